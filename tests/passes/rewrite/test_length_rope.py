"""The choice of rotary frequencies by the longest position: what is rewritten, and with which numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from quire.passes.fx import placeholders, value
from quire.passes.rewrite.length_rope import LIMITS, choose_per_sequence
from tests.passes.models import capture

LONG, SHORT = torch.tensor([3.7, 0.3, 5.2]), torch.tensor([1.0, 2.5, 4.0])


class Model(nn.Module):
    """Positions times the chosen frequencies, from a buffer of ``dtype``. ``alpha``: times one that is added to the largest."""

    def __init__(self, dtype: torch.dtype = torch.float32, alpha: int = 1, sets: tuple[torch.Tensor, ...] = (LONG, SHORT)
                 ) -> None:
        super().__init__()
        self.alpha, self.sets = alpha, sets
        self.register_buffer("frequencies", torch.zeros(3, dtype=dtype))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        largest = position_ids.max()
        above = (largest + 1 if self.alpha == 1 else largest.add(1, alpha=self.alpha)) > 4
        self.frequencies.copy_(torch.where(above, *self.sets))
        return (position_ids[..., None].float() * self.frequencies).cos() + input_ids[..., None]


def rewritten(model: nn.Module) -> tuple[fx.GraphModule, list[Any]]:
    ids, positions = torch.arange(9)[None], torch.arange(9)[None]
    gm, inputs = capture(model, ids, positions, dynamic=True)
    choose_per_sequence(gm, next(value(n).shape[1] for n in placeholders(gm.graph) if "input_ids" in n.name))
    return gm, inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_the_frequencies_are_those_of_the_buffer(dtype: torch.dtype) -> None:
    """Whatever dtype it rounds them to. (In the graph ``longer_than`` goes by each position; a step puts lengths there.)"""
    model = Model(dtype)
    gm, inputs = rewritten(model)
    assert gm.meta[LIMITS] == (4,)
    ids, positions = torch.arange(9)[None], torch.arange(9)[None]
    found = gm(*inputs)[0]
    assert torch.equal(found[:, 4:], model(ids, positions)[:, 4:])
    assert torch.equal(found[:, :4], model(ids[:, :4], positions[:, :4]))


@pytest.mark.parametrize("model", [lambda: Model(alpha=9), lambda: Model(sets=(LONG, SHORT[:1]))], ids=["alpha", "one for all"])
def test_other_choices_stay(model: Any) -> None:
    assert LIMITS not in rewritten(model())[0].meta
