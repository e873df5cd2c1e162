"""Low-rank products of several adapters: each token's own, as the formula has it."""

from __future__ import annotations

import pytest
import torch

import quire
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.ops.lora_rows import MAX_RANK, MAX_TOKENS, lora_rows, lora_rows_cuda, lora_rows_eager
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


@pytest.mark.parametrize("dtypes", [
    (torch.float16, torch.float16), (torch.float16, torch.float32), (torch.float32, torch.float32)], ids=str)
@pytest.mark.parametrize(("tokens", "width", "columns", "ranks"), [
    (1, 64, 48, (8,)), (17, 600, 130, (4, 16, 33)), (40, 90, 64, (8, 1)), (3, 32, 16, (MAX_RANK + 1,)),
    (MAX_TOKENS + 1, 8, 8, (2,))])
def test_kernels(tokens, width, columns, ranks, dtypes) -> None:
    """Against the definition in float64. An adapter that nobody has is never read, nor are rows beyond the tokens."""
    pytest.importorskip("triton")
    device, (dtype, own) = "cuda" if torch.cuda.is_available() else "cpu", dtypes
    generator = torch.Generator().manual_seed(0)
    base, x = (torch.randn(1, tokens, w, generator=generator).to(device, dtype) for w in (columns, width))
    a = [(torch.randn(r, width, generator=generator) / width**0.5).to(device, own) for r in (*ranks, 2)]
    b = [(torch.randn(columns, r, generator=generator) / r**0.5).to(device, own) for r in (*ranks, 2)]
    a[-1].fill_(float("nan"))
    bits, scaling = [2**62, 1, 4, 2][: len(a)], [0.5, 2.0, -1.0, 1.0][: len(a)]
    sets = torch.randint(2 ** (len(a) - 1), (tokens,), generator=generator)  # never the last one
    rows = sum(((sets >> i) & 1) * bit for i, bit in enumerate(bits)).to(device)
    with running(step(torch.cat([rows, rows.new_full((3,), -1)]))):
        got = lora_rows_cuda(base, x, a, b, scaling, bits)
        want = lora_rows_eager(base.double(), x.double(), [y.double() for y in a], [y.double() for y in b], scaling, bits)
    # Roundings of A x and of the result, of values below 16; the sums of A x are below 8 in absolute value.
    atol = {torch.float16: 3 * 16 * 2**-11, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=0)
    assert got.dtype == dtype and torch.equal(got[0, rows == 0], base[0, rows == 0])
