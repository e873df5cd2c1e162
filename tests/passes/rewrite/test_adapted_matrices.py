"""A matrix that LoRA adapts as a parameter: where it multiplies rows each gets its adapters' part; other uses are refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.step import running
from quire.passes.fx import value
from quire.passes.rewrite.adapted_matrices import adapted_matrix, multiply_adapted_matrices
from tests.passes.models import capture

W, A, B = torch.randn(6, 8), [torch.randn(2, 8), torch.randn(3, 8)], [torch.randn(6, 2), torch.randn(6, 3)]
ROWS = torch.randn(5, 8)
TOKENS = torch.tensor([0, 1, 2, 3, 1])


def router(product: Callable[[Tensor, Tensor], Any], bits: tuple[int, int] = (1, 2)) -> Callable[[Tensor], Any]:
    return lambda x: product(x, adapted_matrix(W, A, B, [0.5, 2.0], list(bits)))


def by_token(bits: tuple[int, int]) -> Tensor:
    """Each row by the matrix that PEFT would make of its adapters."""
    weights = [W + sum((scale * (b @ a) for a, b, scale, bit in zip(A, B, (0.5, 2.0), bits, strict=True)
                        if not bit or token & bit), torch.zeros(6, 8)) for token in TOKENS.tolist()]
    return torch.stack([w @ row for w, row in zip(weights, ROWS, strict=True)])


@pytest.mark.parametrize("bits", [(1, 2), (0, 0), (0, 2)])
@pytest.mark.parametrize("product", [
    lambda x, w: F.linear(x, w).softmax(-1), lambda x, w: F.linear(x[None], w)[0].softmax(-1),
    lambda x, w: F.linear(x.double(), w.to(torch.float64)).float().softmax(-1),
    lambda x, w: F.linear(x.float(), w.type(torch.float32), None).softmax(-1)], ids=["flat", "batch", "to", "type"])
def test_rows_get_the_part_of_their_adapters(product: Any, bits: tuple[int, int]) -> None:
    """Logits of order 10, in another order of sums: 1e-5 of a probability."""
    gm, inputs = capture(router(product, bits), ROWS)
    assert multiply_adapted_matrices(gm) == 1
    gm.graph.lint()
    gm.recompile()
    assert all(value(n) is not None for n in gm.graph.nodes if n.op.startswith("call"))
    with running(SimpleNamespace(adapters=TOKENS)):  # type: ignore[arg-type]
        (out,) = gm(*inputs)
    torch.testing.assert_close(out, by_token(bits).softmax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("product", [
    lambda x, w: x @ w.T, lambda x, w: F.linear(x, w + 1), lambda x, w: F.linear(w, x), lambda x, w: F.linear(x, w) * w.norm(),
    lambda x, w: F.linear(x, w.to(torch.float64).float().T.T)], ids=["matmul", "plus", "rows", "norm", "turned"])
def test_other_uses_are_refused(product: Any) -> None:
    """The adapters would be left out of them."""
    gm, _ = capture(router(product), ROWS)
    with pytest.raises(UnsupportedAttention, match="computes otherwise with a parameter that an adapter adapts.*merge_adapter"):
        multiply_adapted_matrices(gm)


def test_a_matrix_of_two_products() -> None:
    gm, inputs = capture(router(lambda x, w: F.linear(x, w) - F.linear(x, w)), ROWS)
    assert multiply_adapted_matrices(gm) == 2
    gm.recompile()
    with running(SimpleNamespace(adapters=TOKENS)):  # type: ignore[arg-type]
        assert not gm(*inputs)[0].any()
