"""What quire tells Inductor."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor import config

from quire.passes.compile.inductor import inductor


def test_settings_of_inductor() -> None:
    """Its own CUDA graphs, and padding of weights, which makes an assumption of the number of tokens, are off."""
    seen: list[Any] = []

    def look(graph: fx.Graph) -> None:
        seen.append((config.shape_padding, config.triton.cudagraphs))

    weight = torch.randn(4, 16)
    gm = fx.symbolic_trace(lambda x: (x @ weight.T,))
    x = torch.randn(3, 16)
    with config.patch(post_grad_custom_post_pass=look, fx_graph_cache=False, shape_padding=True), torch.no_grad():
        torch.testing.assert_close(inductor(gm, [x])(x)[0], x @ weight.T)
    assert seen == [(False, False)]
