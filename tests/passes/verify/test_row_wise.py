"""Which operations are proved to treat each token for itself, and that those do."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from quire.passes.fx import placeholders, value
from quire.passes.verify.row_wise import RowWise, expression

TOKENS, WIDTH = 23, 8


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


W, SQUARE, WIDE = weight(WIDTH), weight(WIDTH, WIDTH), weight(TOKENS, WIDTH)  # a weight with as many rows as tokens


def last_operation(function: Any, *args: torch.Tensor) -> tuple[fx.Node, Any]:
    """The operation that makes the result of ``function`` in its graph, and T, of its first input."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(gm)
        return gm.forward

    for x in args:
        torch._dynamo.mark_dynamic(x, x.shape.index(TOKENS))
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    (gm,) = found
    sizes = [s for n in placeholders(gm.graph) if isinstance(value(n), torch.Tensor) for s in value(n).shape]
    tokens = next(e for s in sizes if (e := expression(s)) is not None)
    return gm.graph.output_node().args[0][0], tokens  # type: ignore[index,return-value]


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


ROW_WISE = {
    "add": lambda x, y: x + y,
    "with a weight": lambda x, y: W * x,
    "with a number": lambda x, y: 1.0 - x,
    "one number a row": lambda x, y: x * y.mean(-1, keepdim=True),
    "a part of a row": lambda x, y: x[..., 2:5],
    "product": lambda x, y: F.linear(x, SQUARE, W),
    "as many columns as tokens": lambda x, y: F.linear(x, WIDE),
    "matmul": lambda x, y: x @ SQUARE,
    "torch.matmul": lambda x, y: torch.matmul(x, SQUARE),
    "addmm": lambda x, y: torch.addmm(W, x[0], SQUARE),
    "layer norm": lambda x, y: F.layer_norm(x, (WIDTH,), W),
    "rms norm": lambda x, y: F.rms_norm(x, (WIDTH,), W),
    "softmax": lambda x, y: F.softmax(x, dim=-1),
    "sum": lambda x, y: x.sum(dim=(2,)),
    "split": lambda x, y: x.split([3, 5], dim=-1)[1],
    "topk": lambda x, y: x.topk(2, dim=-1)[0],
    "cat": lambda x, y: torch.cat([x, y], dim=-1),
    "heads": lambda x, y: x.view(1, x.shape[1], 2, 4),
    "flattened": lambda x, y: x.reshape(-1, WIDTH),
    "first": lambda x, y: x[0],
    "no dropout": lambda x, y: F.dropout(x, 0.5, False),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "cast": lambda x, y: x.to(torch.float64),
    "sum in place": lambda x, y: operator.iadd(x * 1, y),
}


@pytest.mark.parametrize("name", ROW_WISE)
def test_row_wise(name: str) -> None:
    function, x, y = ROW_WISE[name], rows(1, TOKENS, WIDTH), -rows(1, TOKENS, WIDTH) + 0.1
    node, tokens = last_operation(function, x, y)
    assert RowWise(tokens).proves(node)
    some = torch.tensor([5, 0, 22, 5])
    whole = function(x.clone(), y)
    dim = whole.shape.index(TOKENS)
    # A product of fewer rows may be added up in another order: sums of 8 products of order 1, in float32.
    torch.testing.assert_close(function(x[:, some], y[:, some]), whole.index_select(dim, some), atol=1e-5, rtol=0)


NOT_PROVED = {
    "sum over tokens": lambda x, y: x.sum(1, keepdim=True),
    "sum over some": lambda x, y: x.sum((0, 1)),
    "no dimension": lambda x, y: x.mean(),
    "softmax over tokens": lambda x, y: F.softmax(x, dim=1),
    "order of tokens": lambda x, y: x.topk(1, dim=1)[0],
    "joined tokens": lambda x, y: torch.cat([x, y], dim=1),
    "default dimension": lambda x, y: torch.cat([x, y]),
    "scan": lambda x, y: x.cumsum(1),
    "shift": lambda x, y: x.roll(1, 1),
    "turned round": lambda x, y: x.flip(1),
    "cut": lambda x, y: x[:, 1:],
    "every second": lambda x, y: x[:, ::2],
    "backwards by index": lambda x, y: x[0][torch.arange(x.shape[1] - 1, -1, -1)],
    "transposed": lambda x, y: x.transpose(1, 2),
    "tokens behind": lambda x, y: x.transpose(1, 2) * 2,
    "product over tokens": lambda x, y: x.transpose(1, 2) @ y,
    "scores": lambda x, y: x @ y.transpose(1, 2),
    "tokens as columns": lambda x, y: F.linear(x[0].T.contiguous(), x[0].T),
    "dropout": lambda x, y: F.dropout(x, 0.5, True),
    "mixed up": lambda x, y: x.view(1, WIDTH, -1),
    "two tokens a row": lambda x, y: x.repeat(1, 2, 1).view(1, -1, 2 * WIDTH),
    "taken from other rows": lambda x, y: x[:, y[0, :, 0].argsort()],
    "convolution": lambda x, y: F.conv1d(x.transpose(1, 2), SQUARE[..., None]),
    "norm over tokens": lambda x, y: F.layer_norm(x, x.shape[1:]),
    "unknown": lambda x, y: torch.lerp(x, y, 0.5),
    "square": lambda x, y: x[0][:, None] * x,
}


@pytest.mark.parametrize("name", NOT_PROVED)
def test_not_proved(name: str) -> None:
    node, tokens = last_operation(NOT_PROVED[name], rows(1, TOKENS, WIDTH), -rows(1, TOKENS, WIDTH))
    assert not RowWise(tokens).proves(node)


def test_several_sequences() -> None:
    """(2, T, ...): dimension 1 is not all there is to a row."""
    node, tokens = last_operation(lambda x: x * 2, rows(2, TOKENS, WIDTH))
    assert RowWise(tokens).dim(node) is None and not RowWise(tokens).proves(node)


def test_another_length_is_no_token_dimension() -> None:
    """Two inputs of two lengths: each has its own symbol, and only one of them is T."""
    found: list[fx.GraphModule] = []
    x, y = rows(1, TOKENS, WIDTH), rows(1, 19, WIDTH)
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.mark_dynamic(y, 1)
    torch.compile(lambda x, y: (x * 2, y * 2), backend=lambda gm, inputs: found.append(gm) or gm.forward)(x, y)
    first, second = found[0].graph.output_node().args[0]
    row_wise = RowWise(expression(value(first).shape[1]))
    assert row_wise.proves(first) and not row_wise.proves(second)
