"""What quire tells Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache

from quire.passes import sources
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


def test_compiled_code_is_of_this_version_of_quire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who updates quire has Inductor's code of the old one on disk. It checks what ops say of their results: with another
    schedule of Triton's decodes the first engine ended with "expected size 399==131"."""
    x, found = torch.randn(3, 16), []
    with fresh_cache(), torch.no_grad():
        for version in ("one", "one", "another"):
            monkeypatch.setattr(sources, "digest", lambda version=version: version)
            torch._dynamo.reset()
            counters.clear()
            torch.testing.assert_close(torch.compile(lambda x: x.sin() + 1, backend=inductor)(x), x.sin() + 1)
            found.append(counters["inductor"]["fxgraph_cache_hit"])
    assert found == [0, 1, 0]
