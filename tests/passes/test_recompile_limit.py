"""A model compiled with quire that Dynamo has given up on: the error says so, and not that it should be compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quire
from quire.passes.backend import quire_backend

pytestmark = pytest.mark.usefixtures("tokens_unchecked")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.scale = nn.Embedding(30, 16), nn.Linear(16, 30), 1.0

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = (self.embed(input_ids) + position_ids[..., None] * self.scale).unflatten(-1, (2, 8)).transpose(1, 2)
        return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2))


def test_the_limit_is_named() -> None:
    model = Scaled().eval()
    compiled = torch.compile(model, backend=quire_backend, options={"compiler": "eager"})
    cache = quire.PagedKVCache.for_model(model, num_pages=4, page_size=8)
    meta = quire.CommonAttentionMetadata.build([5], [5], [[1]], page_size=8)

    def run(scale: float) -> torch.Tensor:
        model.scale = scale
        with torch.no_grad(), quire.step(cache, meta):
            return compiled(torch.arange(5)[None], meta.positions[None])

    with torch._dynamo.config.patch(recompile_limit=2):
        run(1.0), run(2.0)
        with pytest.raises(RuntimeError) as caught:
            run(3.0)
        message = str(caught.value)
        assert "compiled already: forward (" in message and "test_recompile_limit.py:" in message
        assert "traced 2 times, as often as torch._dynamo.config.recompile_limit allows" in message
        assert "Call torch._dynamo.reset()" in message and "raise the limit" in message and message.count("\n") < 9
        run(1.0)  # of which there is a trace
        torch._dynamo.reset()  # the remedy
        torch.testing.assert_close(run(3.0), model(torch.arange(5)[None], meta.positions[None]))


def test_a_model_that_is_not_compiled() -> None:
    """Nothing is said of a limit that has no part in it."""
    model = Scaled().eval()
    meta = quire.CommonAttentionMetadata.build([5], [5], [[1]], page_size=8)
    with pytest.raises(RuntimeError, match=r"call quire.paged\(model\) first.$"):
        with quire.step(quire.PagedKVCache.for_model(model, num_pages=4, page_size=8), meta):
            model(torch.arange(5)[None], meta.positions[None])
