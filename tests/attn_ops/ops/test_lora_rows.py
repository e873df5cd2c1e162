"""Low-rank products of several adapters: each token's own, as the formula has it."""

from __future__ import annotations

import pytest
import torch

import quire
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.ops.lora_rows import lora_rows
from quire.attn_ops.step import Step, running

T, K, N = 5, 8, 6


def adapters(dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    generator = torch.Generator().manual_seed(0)
    ranks = (2, 4, 1)
    return ([torch.randn(r, K, generator=generator).to(dtype) for r in ranks],
            [torch.randn(N, r, generator=generator).to(dtype) for r in ranks], [0.5, 2.0, -1.0])


def step(rows: torch.Tensor) -> Step:
    cache = PagedKVCache(num_layers=1, num_pages=2, page_size=4, num_kv_heads=1, head_dim=4, dtype=torch.float32, device="cpu")
    return Step(cache, quire.CommonAttentionMetadata.build([1], [1], [[1]], page_size=4), adapters=rows)


@pytest.mark.parametrize("bits", [[1, 2, 4], [8, 1, 2**62]])
def test_each_token_has_its_own(bits) -> None:
    torch.manual_seed(1)
    base, x, (a, b, scaling) = torch.randn(1, T, N).double(), torch.randn(1, T, K).double(), adapters()
    sets = [[0], [], [2], [0, 1, 2], [1]]
    rows = torch.tensor([sum(bits[i] for i in each) for each in sets] + [-1] * 3)  # more than there are tokens
    want = base.clone()
    for t, each in enumerate(sets):
        for i in each:
            want[0, t] += b[i] @ (a[i] @ x[0, t]) * scaling[i]
    before = base.clone()
    with running(step(rows)):
        torch.testing.assert_close(lora_rows(base, x, a, b, scaling, bits), want)
    assert torch.equal(base, before)
    with pytest.raises(RuntimeError, match="does not say which adapters"):  # tokens of no request get all of them
        lora_rows(base, x, a, b, scaling, bits)


def test_tokens_without_an_adapter_are_untouched() -> None:
    """To the last bit, also where the adapter's dtype is another."""
    base, x = torch.randn(1, T, N).bfloat16(), torch.randn(1, T, K).bfloat16()
    rows = torch.tensor([0, 1, 0, 0, 1])
    with running(step(rows)):
        out = lora_rows(base, x, *adapters(torch.float32), [1, 2, 4])
    assert out.dtype == torch.bfloat16
    assert torch.equal(out[0, rows == 0], base[0, rows == 0]) and not torch.equal(out[0, 1], base[0, 1])
    with running(step(torch.zeros(T, dtype=torch.int64))):
        assert lora_rows(base, x, *adapters(torch.float32), [1, 2, 4]).data_ptr() != base.data_ptr()


def test_is_an_op() -> None:
    with running(step(torch.full((T,), 7))):
        torch.library.opcheck(lora_rows, (torch.randn(1, T, N), torch.randn(1, T, K), *adapters(torch.float32), [1, 2, 4]))
