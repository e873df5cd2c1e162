"""Spellings of RMSNorm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from quire.passes.fusions.match.norm import match_rms_norm
from quire.passes.fx import placeholders
from tests.passes.models import capture

Tensor = torch.Tensor
DIM = 8


def scaled(x: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def by_power(x: Tensor) -> Tensor:  # Gemma 4
    wide = x.float()
    return wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)


def traced(norm: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> fx.Node:
    """The node that the norm of x (1, 3, 2, 8) with a weight (8,) returns, in a graph as Dynamo traces it."""
    torch._dynamo.reset()
    gm, _ = capture(norm, torch.randn(1, 3, 2, DIM, dtype=dtype), torch.rand(DIM, dtype=weight_dtype or dtype))
    (output,) = gm.graph.find_nodes(op="output")
    return output.args[0][0]


RIGHT = {
    "llama": (lambda x, w: w * scaled(x).to(x.dtype), True, None),
    "gemma3": (lambda x, w: (scaled(x) * (1.0 + w.float())).type_as(x), True, 1.0),
    "gemma4": (lambda x, w: (by_power(x) * w.float()).type_as(x), True, 0.0),
    "flint": (lambda x, w: (w * scaled(x)).to(x.dtype), True, 0.0),
    "llama4": (lambda x, w: scaled(x).type_as(x) + 0 * w.sum().to(x.dtype), False, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_matched(name: str, dtype: torch.dtype) -> None:
    norm, weighted, offset = RIGHT[name]
    node = traced(norm, dtype)
    found = match_rms_norm(node if weighted else node.args[0])
    assert found is not None and found.eps == 1e-6 and found.offset == offset
    x, *weight = placeholders(node.graph)
    assert found.x is x and (found.weight is weight[0] if weighted else found.weight is None)


@pytest.mark.parametrize("norm", [
    lambda x, w: (scaled(x).to(x.dtype) * (1.0 + w)).float().to(x.dtype),  # the sum and the product in bfloat16
    lambda x, w: (scaled(x) * (1.0 + w).float()).to(x.dtype),  # the sum in bfloat16
    lambda x, w: (scaled(x) * (1.0 - w.float())).to(x.dtype),
    lambda x, w: (scaled(x) * w.float().exp()).to(x.dtype),
    lambda x, w: (scaled(x) * torch.add(1.0 + w.float(), w.float())).to(x.dtype),
    lambda x, w: w * scaled(x),  # stays in float32
    lambda x, w: w * (scaled(x) + x.float()).to(x.dtype),
    lambda x, w: w * (x.float() * torch.rsqrt(x.float().abs().mean(-1, keepdim=True) + 1e-6)).to(x.dtype),
    lambda x, w: w * (x.float() * torch.rsqrt((x.float() ** 2).mean(-2, keepdim=True) + 1e-6)).to(x.dtype),
    lambda x, w: torch.nn.functional.layer_norm(x, (DIM,), w),
], ids=["all narrow", "narrow sum", "1 - w", "exp(w)", "1 + 2 w", "wide result", "with x", "mean of |x|", "other dim",
        "LayerNorm"])
def test_what_is_not(norm: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert match_rms_norm(traced(norm, torch.bfloat16)) is None
