"""LoRA's second products: the kernel against the definition, and the definition against the layers one by one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from quire.attn_ops.ops.lora import MAX_RANK, lora_expand, lora_expand_cuda, lora_expand_eager

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(tokens: int, sizes: list[int], rank: int, dtype: torch.dtype = torch.float16, residual: bool = False) -> tuple:
    """What a product of [W1; A1; W2; A2; ...] gives, and its second half."""
    torch.manual_seed(0)
    product = torch.randn(1, tokens, sum(sizes) + rank * len(sizes)).to(DEVICE, dtype)
    starts = [sum(sizes[:i]) + rank * i for i in range(len(sizes))]
    b = (torch.randn(sum(sizes), rank) / rank).to(DEVICE, dtype)
    added = torch.randn(1, tokens, sum(sizes)).to(DEVICE, dtype) if residual else None
    return (product, product, b, sizes, starts, [at + size for at, size in zip(starts, sizes, strict=True)],
            [0.5, 2.0, 1.0, 0.1][: len(sizes)], added)


def test_definition() -> None:
    product, _, b, sizes, starts, low, scalings, _ = given = case(3, [8, 4], 2, torch.float32)
    second = product[..., starts[1] : starts[1] + 4] + F.linear(product[..., low[1] : low[1] + 2], b[8:]) * scalings[1]
    assert torch.equal(lora_expand_eager(*given)[..., 8:], second)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("tokens", "sizes", "rank"), [
    (1, [64], 8), (5, [70, 20, 33], 4), (17, [128, 64], 16), (32, [130], 48), (33, [64], 8), (2, [16] * 4, 8),
    (2, [16], MAX_RANK + 1)])
def test_kernel(tokens, sizes, rank, residual) -> None:
    given = case(tokens, sizes, rank, residual=residual)
    wide = [t.float() if isinstance(t, torch.Tensor) else t for t in given]
    want = lora_expand_eager(*wide)
    # One rounding to float16 for each of at most three sums, of values below 16.
    torch.testing.assert_close(lora_expand_cuda(*given).float(), want, atol=3 * 16 * 2**-11, rtol=0)


def test_views() -> None:
    """Columns between two tensors, in a larger one: what is not contiguous."""
    product, _, b, *rest = case(4, [32], 8)
    outer = torch.randn(2, 4, product.shape[-1] + 6, dtype=product.dtype, device=DEVICE)
    outer[:1, :, 3:-3] = product
    got = lora_expand_cuda(outer[:1, :, 3:-3], outer[:1, :, 3:-3], b, *rest)
    assert torch.equal(got, lora_expand_cuda(product, product, b, *rest))


def test_opcheck() -> None:
    torch.library.opcheck(lora_expand, case(2, [4, 6], 2, torch.float32))
