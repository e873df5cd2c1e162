"""Attention whose softmax is written out, or made safe from NaN: with the logits of the plain forward, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.adversarial.harness import outcome
from tests.adversarial.structures import Structure, merge, qkv, start

Weights = Callable[..., torch.Tensor]


def result(weights: Weights, see: Callable[[torch.Tensor], torch.Tensor] = lambda p: p[0][:, None] >= p[0]) -> str:
    """Of a model with ``weights(scores, see)``; ``see`` of positions."""
    def forward(m: Any, ids: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv(m, x := start(m, ids, p))
        return m.head(x + merge(weights((q @ k.mT * 0.5).masked_fill(~see(p), -math.inf), see(p)) @ v))

    return outcome(lambda kind: kind(forward), "engine", base=Structure)


def over(e: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return e / e.sum(dim=dim, keepdim=True)


def lower_later(x: torch.Tensor, see: torch.Tensor) -> torch.Tensor:
    """The scores that are exponentiated are not those of the maximum."""
    most = x.amax(-1, keepdim=True)
    x.mul_(0.5)
    return over((x - most).exp())


def halved(x: torch.Tensor, see: torch.Tensor) -> torch.Tensor:
    most = x.amax(-1, keepdim=True)
    return over(torch.sub(x, most, alpha=0.5).exp())


@pytest.mark.parametrize("weights", [
    lambda x, see: over((x - x.max(dim=-1, keepdim=True).values).exp()),
    lambda x, see: over(torch.exp(x - torch.max(x, -1, keepdim=True)[0])),
    lambda x, see: over(torch.exp(x - x.amax(3, True).detach()), (-1,)),
    lambda x, see: torch.nan_to_num(over((x - x.amax(-1, keepdim=True)).exp())),
    lambda x, see: (x - x.amax(-1, keepdim=True).detach()).softmax(dim=-1),
    lambda x, see: torch.softmax(x - x.max(-1, keepdim=True)[0], 3, dtype=torch.float32),
    lambda x, see: x.softmax(-1).nan_to_num(0.0),
    lambda x, see: (w := x.softmax(-1)).masked_fill(torch.isnan(w), 0.0),
    lambda x, see: torch.where(torch.isnan(w := x.softmax(-1)), torch.zeros_like(w), w),
])
def test_served(weights: Weights) -> None:
    assert result(weights) == "exact"


@pytest.mark.parametrize("weights", [
    lambda x, see: over(x.exp()), lambda x, see: over((x - x.amax(-1, keepdim=True)).exp(), -2),
    lambda x, see: (x - x.amax(-1, keepdim=True)).softmax(-1, dtype=torch.bfloat16).float(),
    lambda x, see: (x - x.amax(-2, keepdim=True)).softmax(-1), lambda x, see: (x - x.amax(-1, keepdim=True)).softmax(-2),
    lambda x, see: over((x - x.amax(-2, keepdim=True)).exp()), halved, lower_later,
    lambda x, see: (e := (x - x.amax(-1, keepdim=True)).exp()) / (1 + e.sum(-1, keepdim=True)),
    lambda x, see: (e := (x - x.amax(-1, keepdim=True)).exp()) / (e * see).sum(-1, keepdim=True).clamp(min=2),
    lambda x, see: (e := (x - x.amax(-1, keepdim=True)).exp()) / e.sum((1, -1), keepdim=True),
    lambda x, see: (e := (x - x.amax((1, -1), keepdim=True)).exp()) / e.sum(-1, keepdim=True),
    lambda x, see: over((x - x.amin(-1, keepdim=True).nan_to_num()).exp()),
    lambda x, see: x.softmax(-1).masked_fill(torch.isnan(x * 0), 0.25),
    lambda x, see: torch.where(torch.isnan(w := x.softmax(-1)), w, torch.zeros_like(w)),
])
def test_refused(weights: Weights) -> None:
    assert result(weights).startswith("refused")


def test_rows_without_a_key_are_refused() -> None:
    """There the weights are NaN, and 0 instead."""
    assert "none of causal" in result(lambda x, see: x.softmax(-1).nan_to_num(0.0), lambda p: p[0][:, None] > p[0])
