"""Which dimension of a value holds the tokens. tests/adversarial/test_mixers.py has the operations that keep them apart, and
tests/passes/fusions/test_last_tokens.py what is computed on fewer rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from quire.passes.fx import placeholders, value
from quire.passes.verify.row_wise import RowWise, expression
from tests.passes.models import capture

TOKENS, WIDTH = 23, 8


def last_operation(function: Any, *args: torch.Tensor) -> tuple[fx.Node, Any]:
    """The operation that makes the result of ``function`` in its graph, and T, of its first input."""
    torch._dynamo.reset()
    for x in args:
        torch._dynamo.mark_dynamic(x, 1)
    gm, _ = capture(function, *args)
    sizes = [s for n in placeholders(gm.graph) if isinstance(value(n), torch.Tensor) for s in value(n).shape]
    tokens = next(e for s in sizes if (e := expression(s)) is not None)
    return gm.graph.output_node().args[0][0], tokens  # type: ignore[index,return-value]


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_a_weight_with_as_many_rows_as_tokens() -> None:
    """Its size is a number, and T is a symbol, whatever the trace had."""
    weight = torch.randn(TOKENS, WIDTH)
    node, tokens = last_operation(lambda x: F.linear(x, weight), rows(1, TOKENS, WIDTH))
    assert RowWise(tokens).proves(node)


@pytest.mark.parametrize("function", [
    lambda x, y: x.sum(1, keepdim=True), lambda x, y: x[:, 1:], lambda x, y: torch.cat([x, y], dim=1),
    lambda x, y: x[:, y[0, :, 0].argsort()], lambda x, y: x.softmax(1),
    lambda x, y: x.view(1, WIDTH, -1), lambda x, y: torch.lerp(x, y, 0.5),
], ids=["sum over tokens", "cut", "joined tokens", "other rows", "along tokens", "mixed up", "not in the tables"])
def test_not_proved(function: Any) -> None:
    node, tokens = last_operation(function, rows(1, TOKENS, WIDTH), -rows(1, TOKENS, WIDTH))
    assert not RowWise(tokens).proves(node)


def test_several_sequences() -> None:
    """(2, T, ...): dimension 1 is not all there is to a row."""
    node, tokens = last_operation(lambda x: x * 2, rows(2, TOKENS, WIDTH))
    assert RowWise(tokens).dim(node) is None and not RowWise(tokens).proves(node)


def test_another_length_is_no_token_dimension() -> None:
    """Two inputs of two lengths: each has its own symbol, and only one of them is T."""
    first, tokens = last_operation(lambda x, y: (x * 2, y * 2), rows(1, TOKENS, WIDTH), rows(1, 19, WIDTH))
    second = first.graph.output_node().args[0][1]
    row_wise = RowWise(tokens)
    assert row_wise.proves(first) and not row_wise.proves(second)
