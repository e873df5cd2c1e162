"""Spellings of a layer with LoRA's adapters. What is taken for one is computed by another formula, with fewer roundings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quire.attn_ops.ops.lora_rows import MAX_KERNEL_ADAPTERS, MAX_RANK
from quire.passes.fusions.base import Fusion
from quire.passes.fusions.match.lora import AdaptedLayer, adapted_layers
from quire.passes.fx import is_method, value
from tests.passes.models import capture

Tensor = torch.Tensor
WIDTH, COLUMNS, RANK = 8, 6, 2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Layer(nn.Module):
    """``forward(layer, x)`` of a weight in ``dtype`` and adapters (A, B) in these dtypes."""

    def __init__(self, forward: Callable[..., Tensor], *own: torch.dtype, dtype: torch.dtype = BF16, rank: int = RANK) -> None:
        super().__init__()
        self.call, self.linear = forward, nn.Linear(WIDTH, COLUMNS, dtype=dtype)
        self.a = nn.ModuleList(nn.Linear(WIDTH, rank, bias=False, dtype=each) for each in own)
        self.b = nn.ModuleList(nn.Linear(rank, COLUMNS, bias=False, dtype=each) for each in own)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)

    def low(self, i: int, x: Tensor) -> Tensor:
        return self.b[i](self.a[i](x))


def matched(model: Layer, shape: tuple[int, ...] = (1, 3, WIDTH)) -> list[AdaptedLayer]:
    torch._dynamo.reset()
    graph, inputs = capture(model, torch.randn(shape).to(model.linear.weight.dtype))
    return adapted_layers(Fusion(graph, inputs))


def peft(m: Layer, x: Tensor) -> Tensor:
    result = m.linear(x)
    dtype = result.dtype
    for i, a in enumerate(m.a):
        x = x if x.dtype == a.weight.dtype else x.to(a.weight.dtype)
        result = result + m.low(i, F.dropout(x, 0.1, training=False)) * 2.0
    return result.to(dtype)


def casts_again(m: Layer, x: Tensor) -> Tensor:
    """As PEFT did before it looked at the dtype first."""
    wide = x.to(FP32)
    return (m.linear(x) + m.low(0, wide) * 2.0 + m.low(1, wide.to(FP32)) * 2.0).to(BF16)


def two_dropouts(m: Layer, x: Tensor) -> Tensor:
    off = F.dropout(F.dropout(x, 0.1, training=False), 0.2, training=False)
    return m.linear(x) + 2 * m.low(0, off)


def turned(m: Layer, x: Tensor) -> Tensor:
    return 2 * m.low(0, x) + m.linear(x)


def an_input_in_the_models_dtype(m: Layer, x: Tensor) -> Tensor:
    """That it was rounded to is its dtype, not what it was made of."""
    y = (x.float() * 3).to(BF16)
    return (m.linear(y) + m.low(0, y.to(FP32)) * 2.0).to(BF16)


@pytest.mark.parametrize(("model", "adapters"), [
    (Layer(peft, FP32), 1), (Layer(peft, FP32, FP32), 2), (Layer(peft, BF16), 1), (Layer(peft, BF16, BF16), 2),
    (Layer(peft, FP32, BF16), 2), (Layer(peft, BF16, FP32, BF16), 3), (Layer(peft, FP16, dtype=FP16), 1),
    (Layer(peft, BF16, rank=MAX_RANK), 1), (Layer(casts_again, FP32, FP32), 2), (Layer(two_dropouts, BF16), 1),
    (Layer(turned, BF16), 1), (Layer(an_input_in_the_models_dtype, FP32), 1),
], ids=lambda x: f"{x.call.__name__} {[p.weight.dtype for p in x.a]}" if isinstance(x, Layer) else "")
def test_what_is_a_layer(model, adapters) -> None:
    (layer,) = matched(model)
    assert [value(a).shape[1] for a, *_ in layer.adapters] == [WIDTH] * adapters
    assert [value(a).dtype for a, *_ in layer.adapters] == [a.weight.dtype for a in model.a]
    assert {(scaling, bit) for *_, scaling, bit in layer.adapters} == {(2.0, 0)}
    assert value(layer.x).dtype == value(layer.base).dtype == value(layer.result).dtype == model.linear.weight.dtype
    assert layer.base.args[0] is layer.x and (is_method(layer.result, "to") or "dropout" in model.call.__name__ or
                                              model.call is turned)


def inner_sum_read(m: Layer, x: Tensor) -> Tensor:
    """The first sum is a layer by itself, which is all that may be rewritten."""
    inner = m.linear(x) + m.low(0, x) * 2.0
    return (inner + m.low(1, x) * 2.0) * inner


def wide_inner_sum_read(m: Layer, x: Tensor) -> Tensor:
    inner = m.linear(x) + m.low(0, x.to(FP32)) * 2.0
    return (inner + m.low(1, x.to(FP32)) * 2.0).to(BF16) * inner.sum()


def term_read(m: Layer, x: Tensor) -> Tensor:
    term = m.low(0, x) * 2.0
    return (m.linear(x) + term) * term


def first_product_read(m: Layer, x: Tensor) -> Tensor:
    down = m.a[0](x)
    return (m.linear(x) + m.b[0](down) * 2.0) * down.sum()


def other_inputs(m: Layer, x: Tensor) -> Tensor:
    """Again the first sum alone."""
    return m.linear(x) + m.low(0, x) * 2.0 + m.low(1, x * 2) * 2.0


def lossy_input(m: Layer, x: Tensor) -> Tensor:
    """float32 that the model's dtype does not hold."""
    return (m.linear(x) + m.low(0, x.to(FP32) * 3) * 2.0).to(BF16)


def one_row_for_all(m: Layer, x: Tensor) -> Tensor:
    return m.linear(x[:, :1]) + m.low(0, x) * 2.0


def one_term_for_all(m: Layer, x: Tensor) -> Tensor:
    return m.linear(x) + m.low(0, x[:, :1]) * 2.0


def not_cast_back(m: Layer, x: Tensor) -> Tensor:
    return m.linear(x) + m.low(0, x.to(FP32)) * 2.0


def tensor_factor(m: Layer, x: Tensor) -> Tensor:
    return m.linear(x) + m.low(0, x) * x.sum()


def no_factor(m: Layer, x: Tensor) -> Tensor:
    return m.linear(x) + m.low(0, x)


def difference(m: Layer, x: Tensor) -> Tensor:
    return torch.add(m.linear(x), m.low(0, x) * 2.0, alpha=-1)


@pytest.mark.parametrize(("model", "found"), [
    (Layer(inner_sum_read, BF16, BF16), 1), (Layer(wide_inner_sum_read, FP32, FP32), 0), (Layer(term_read, BF16), 0),
    (Layer(first_product_read, BF16), 0), (Layer(other_inputs, BF16, BF16), 1), (Layer(lossy_input, FP32), 0),
    (Layer(one_row_for_all, BF16), 0), (Layer(one_term_for_all, BF16), 0), (Layer(not_cast_back, FP32), 0),
    (Layer(tensor_factor, BF16), 0), (Layer(no_factor, BF16), 0), (Layer(difference, BF16), 0),
], ids=lambda x: x.call.__name__ if isinstance(x, Layer) else "")
def test_what_is_not(model, found) -> None:
    assert len(matched(model)) == found


@pytest.mark.parametrize("model", [
    Layer(peft, FP32, dtype=FP32), Layer(peft, FP16), Layer(peft, BF16, rank=MAX_RANK + 1),
    Layer(peft, *[BF16] * (MAX_KERNEL_ADAPTERS + 1))], ids=["float32 model", "float16 adapter", "rank", "number"])
def test_what_the_kernels_do_not_take(model) -> None:
    """PEFT's products stay, as they were traced."""
    assert not matched(model)


def test_inputs_of_other_dimensions() -> None:
    assert not matched(Layer(peft, BF16), (3, WIDTH)) and not matched(Layer(peft, BF16), (1, 2, 3, WIDTH))


def test_a_bias_of_the_adapter() -> None:
    model = Layer(peft, BF16)
    model.b[0] = nn.Linear(RANK, COLUMNS, dtype=BF16)
    assert not matched(model)
