"""Linear layers in float32 of half-precision numbers: what matches, and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from quire.passes.fusions.float_linear import fuse_float_linear
from tests.passes.models import after_one, listing


class Layer(nn.Module):
    def __init__(self, call: Callable[[Tensor, Tensor], Any], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.randn(8, 16).to(dtype)), call

    def forward(self, x: Tensor) -> Any:
        return self.call(x, self.weight)


@pytest.mark.parametrize("call", [
    lambda x, w: F.linear(x.type(torch.float32), w.type(torch.float32)), lambda x, w: F.linear(x.float(), w.float()),
    lambda x, w: F.linear(x.to(torch.float32), w.to(torch.float32))], ids=["type", "float", "to"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matches(call: Callable[[Tensor, Tensor], Any], dtype: torch.dtype) -> None:
    layer, x = Layer(call, dtype), torch.randn(5, 16).to(dtype)
    count, gm, inputs = after_one(fuse_float_linear, layer, x)
    assert count == 1 and torch.equal(gm(*inputs)[0], layer(x))


def test_graph() -> None:
    layer = Layer(lambda x, w: F.linear(x.float(), w.float()).softmax(-1))
    _, gm, _ = after_one(fuse_float_linear, layer, torch.randn(5, 16).bfloat16())
    assert_expected_inline(listing(gm.graph), """\
l_self_parameters_weight_: [8, 16]
l_x_: [5, 16]
float_linear_default = float_linear.default(l_x_, l_self_parameters_weight_)
softmax = softmax(float_linear_default, -1)
return (softmax,)""")


def changed(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    x.add_(1.0)
    return F.linear(wide, w.float())


@pytest.mark.parametrize("call, dtype", [
    (lambda x, w: F.linear(x, w), torch.bfloat16), (lambda x, w: F.linear(x.float(), w.float()), torch.float32),
    (lambda x, w: F.linear(x.float(), w.float(), x[0, :8].float()), torch.bfloat16), (changed, torch.bfloat16),
    (lambda x, w: F.linear(x.double(), w.double()), torch.bfloat16),
    (lambda x, w: F.linear(x.float(), (w * 2).float()), torch.bfloat16),
], ids=["half", "float32", "bias", "changed in place", "float64", "computed weight"])
def test_left_alone(call: Callable[[Tensor, Tensor], Any], dtype: torch.dtype) -> None:
    assert after_one(fuse_float_linear, Layer(call, dtype), torch.randn(5, 16).to(dtype))[0] == 0
