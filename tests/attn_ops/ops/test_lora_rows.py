"""Low-rank products of several adapters: each token's own, as the formula has it."""

from __future__ import annotations

import contextlib

import pytest
import torch

import quire
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.ops.lora_counters import LINE, lora_counters
from quire.attn_ops.ops.lora_rows import (
    MAX_RANK,
    lora_group,
    lora_group_cuda,
    lora_group_eager,
    lora_rows,
    lora_rows_cuda,
    lora_rows_eager,
)
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
    (300, 520, 16, (2,)), (600, 80, 48, (2, 16))])
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


@pytest.mark.parametrize(("tokens", "sizes", "every"), [(3, (48, 16, 130), False), (20, (64, 48), True), (1, (16,), True)])
def test_kernels_of_a_group(tokens, sizes, every) -> None:
    """Layers of several widths, one of them without an adapter, bases that are columns of one product, adapters of every token
    beside those of some."""
    pytest.importorskip("triton")
    device, width = "cuda" if torch.cuda.is_available() else "cpu", 72
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, width, generator=generator).to(device, torch.float16)
    bases = torch.randn(1, tokens, sum(sizes), generator=generator).to(device, torch.float16).split(sizes, -1)
    layers = [0, 0] if len(sizes) == 1 else [0, len(sizes) - 1, 0, len(sizes) - 1]
    ranks, scaling = (4, 16, 1, 40)[: len(layers)], [0.5, 2.0, -1.0, 1.0][: len(layers)]
    a = [(torch.randn(r, width, generator=generator) / width**0.5).to(device) for r in ranks]
    b = [(torch.randn(sizes[i], r, generator=generator) / r**0.5).to(device) for i, r in zip(layers, ranks, strict=True)]
    bits = [0] * len(layers) if every else [1, 0, 4, 2**62]
    rows = torch.tensor([0, 1, 5, 2**62])[torch.randint(4, (tokens,), generator=generator)].to(device)
    with contextlib.nullcontext() if every else running(step(rows)):
        got = lora_group_cuda(bases, x, a, b, layers, scaling, bits)
        want = lora_group_eager([y.double() for y in bases], x.double(), [y.double() for y in a], [y.double() for y in b],
                                layers, scaling, bits)
    torch.testing.assert_close(got.double(), want, atol=3 * 16 * 2**-11, rtol=0)  # as above
    assert got.dtype == torch.float16 and got.shape == (1, tokens, sum(sizes))
    if len(sizes) > 2:
        assert torch.equal(got[..., sizes[0] : sizes[0] + sizes[1]], bases[1])


def test_each_launch_of_a_forward_has_a_counter() -> None:
    """Else programs would add first products that are not there yet."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    base, x = (torch.randn(1, 20, n, generator=generator).to(device, torch.float16) for n in (48, 72))
    a, b = torch.randn(4, 72, generator=generator).to(device), torch.randn(48, 4, generator=generator).to(device)
    alone = lora_group_cuda([base], x, [a], [b], [0], [0.1], [0])
    counters = lora_counters(x)
    for _ in range(2):
        assert torch.equal(lora_group_cuda([base], x, [a], [b], [0], [0.1], [0], counters), alone)
    first, second = counters[0].item(), counters[LINE].item()
    assert first == second > 0 and int(counters.sum()) == first + second


def test_a_group_is_its_layers() -> None:
    bases, x = [torch.randn(1, T, N), torch.randn(1, T, N)], torch.randn(1, T, K)
    a, b, scaling = adapters(torch.float32)
    with running(step(torch.tensor([1, 0, 6, 7, 4]))):
        found = lora_group(bases, x, a, b, [0, 1, 0], scaling, [1, 2, 4]).split(N, -1)
        for i, (base, mine) in enumerate(zip(bases, ([0, 2], [1]), strict=True)):
            want = lora_rows(base, x, *([of[j] for j in mine] for of in (a, b, scaling, [1, 2, 4])))
            assert torch.equal(found[i], want)
        torch.library.opcheck(lora_group, (bases, x, a, b, [0, 1, 0], scaling, [1, 2, 0]))
    with torch.no_grad():  # no step is needed where every token has all
        want = bases[0] + torch.nn.functional.linear(torch.nn.functional.linear(x, a[0]), b[0]) * scaling[0]
        assert torch.equal(lora_rows(bases[0], x, a[:1], b[:1], scaling[:1], [0]), want)
