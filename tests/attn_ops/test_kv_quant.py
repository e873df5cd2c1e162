"""The definition of quantized keys and values, against one that looks through all codes; ``torch_native`` on such caches."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from quire.attn_ops.backends import torch_native
from quire.attn_ops.backends.torch_native import BACKEND
from quire.attn_ops.kv_quant import (
    ALIASES,
    FIXED_SCALE_KV_DTYPES,
    QMAX,
    QUANTIZED_KV_DTYPES,
    check_kv_scales,
    check_scales,
    dequantize,
    quantize,
)
from quire.attn_ops.registry import get_backend
from tests.attn_ops.cases import bits, check_output, make_case, run_case
from tests.attn_ops.oracle import quantized

KV_DTYPES = sorted(QUANTIZED_KV_DTYPES, key=str)
EACH = pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
SMALL = dict(num_heads=4, num_kv_heads=2, head_dim=8, page_size=4)


def case(query_lens, seq_lens, **options):
    return make_case(query_lens, seq_lens, **{**SMALL, **options})


# The definition.


@EACH
def test_codes_and_scales_are_the_nearest(kv_dtype) -> None:
    """Over magnitudes that reach all codes, small ones too: bit for bit what a search through all codes finds."""
    torch.manual_seed(0)
    x = torch.randn(4000, 3, 16) * torch.exp(3 * torch.randn(4000, 3, 16))
    codes, scale = quantize(x, kv_dtype)
    wanted, wanted_scale = quantized(x, kv_dtype)
    assert codes.dtype == kv_dtype and codes.shape == x.shape and scale.shape == x.shape[:-1]
    assert torch.equal(bits(codes), bits(wanted)) and torch.equal(scale, wanted_scale)
    assert torch.equal(dequantize(codes, scale), wanted.float() * wanted_scale[..., None])
    if kv_dtype == torch.int8:
        assert codes.amin() == -127 and codes.amax() == 127 and codes.unique().numel() == 255


@EACH
def test_ties_go_to_the_even_code(kv_dtype) -> None:
    """The scale is 1: the largest is qmax. Half way between two codes, and between 0 and the smallest."""
    qmax, least = QMAX[kv_dtype], torch.finfo(kv_dtype).tiny * torch.finfo(kv_dtype).eps if kv_dtype.is_floating_point else 1.0
    x = torch.tensor([qmax, 0.5 * least, 1.5 * least, 2.5 * least, -0.5 * least, -1.5 * least, -0.0])
    codes, scale = quantize(x, kv_dtype)
    assert scale == 1.0
    assert codes.float().tolist() == [qmax, 0.0, 2 * least, 2 * least, 0.0, -2 * least, 0.0]
    assert not bits(codes)[codes.float() == 0].any(), "zero has no sign"


@EACH
def test_extremes(kv_dtype) -> None:
    tiny = torch.finfo(torch.float32).tiny
    x = torch.stack([torch.zeros(4), torch.full((4,), 1e-44), torch.tensor([3e38, -3e38, 1e30, 0.0]), torch.full((4,), 2e-3)])
    codes, scale = quantize(x, kv_dtype)
    back = dequantize(codes, scale)
    assert scale[:2].tolist() == [tiny, tiny] and not back[:2].any()
    assert back.isfinite().all() and torch.allclose(back[2:], x[2:], rtol=1e-6, atol=1e36)
    assert torch.allclose(back[3], x[3], rtol=1e-6, atol=0)


@EACH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reads_back_as_nan(bad, kv_dtype) -> None:
    """int8 cannot hold a NaN and e4m3 no infinity: the scale says it, of that vector and no other."""
    x = torch.ones(3, 2, 4)
    x[1, 0, 2] = bad
    codes, scale = quantize(x, kv_dtype)
    assert scale.isnan().nonzero().tolist() == [[1, 0]] and not bits(codes)[1, 0].any()
    back = dequantize(codes, scale)
    assert back[1, 0].isnan().all() and torch.equal(back[0], x[0]) and torch.equal(back[1, 1], x[1, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EACH
def test_codes_fit_the_dtypes_of_models(kv_dtype, dtype) -> None:
    """Kernels multiply codes in the dtype of the queries: it must hold each of them exactly."""
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype).float()
    codes = codes[codes.isfinite()]
    assert torch.equal(codes.to(dtype).float(), codes)
    assert QMAX[kv_dtype] == codes.max()


def test_aliases() -> None:
    assert ALIASES == {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    assert set(ALIASES.values()) <= QUANTIZED_KV_DTYPES == {torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}


def test_scales_must_go_with_the_cache() -> None:
    codes, plain, scale = torch.zeros(2, dtype=torch.int8), torch.zeros(2), torch.zeros(1)
    check_scales(codes, scale, scale)
    check_scales(plain, None, None)
    with pytest.raises(ValueError, match="a KV cache of torch.int8 needs k_scale and v_scale; pass PagedKVCache.of_layer"):
        check_scales(codes, None, scale)
    with pytest.raises(ValueError, match="a KV cache of torch.float32 takes no k_scale and v_scale"):
        check_scales(plain, scale, None)
    made = case([1], [5], kv_dtype=torch.int8)
    made.cache.v_scale[0] = None
    with pytest.raises(ValueError, match="needs k_scale and v_scale"):
        run_case(BACKEND, made)


# Fixed scales.

FP8 = pytest.mark.parametrize("kv_dtype", sorted(FIXED_SCALE_KV_DTYPES, key=str), ids=str)


def fixed(value: float) -> torch.Tensor:
    return torch.full((1, 1, 1), value)


@FP8
@pytest.mark.parametrize("scale", [1.0, 0.0137, 3.7e4])
def test_codes_of_a_fixed_scale_are_the_nearest(kv_dtype, scale) -> None:
    """Bit for bit what a search through all codes finds, ties to the even one; NaN where no code is near enough, and there
    alone: a user who gives too small a scale gets no wrong number."""
    qmax, numbers = QMAX[kv_dtype], torch.arange(128, dtype=torch.uint8).view(kv_dtype).double()
    table = numbers[numbers.isfinite()]  # codes 0, 1, ... in order
    torch.manual_seed(0)
    x = (torch.randn(4000, 3, 16) * torch.exp(3 * torch.randn(4000, 3, 16)) * scale)
    ties = ((table[1:] + table[:-1]) / 2).float()[: len(table) // 2 * 2 - 2].view(-1, 1, 2) * scale
    special = torch.tensor([math.nan, math.inf, -math.inf, -0.0, qmax * scale, -qmax * scale,
                            math.nextafter(qmax, math.inf) * scale * (1 + 2**-20), 3e38]).view(-1, 1, 2)
    for given in (x, ties, -ties, special):
        codes, returned = quantize(given, kv_dtype, fixed(scale))
        ratio = (given.double() / torch.tensor(scale).double()).float().double()
        distance = (ratio.abs()[..., None] - table).abs()
        nearest = distance.nan_to_num(math.inf).min(-1)
        later = distance.flip(-1).nan_to_num(math.inf).min(-1)  # the upper one of two that are equally near
        upper = len(table) - 1 - later.indices
        wanted = torch.where(upper % 2 == 0, upper, nearest.indices)
        wanted = torch.where((ratio < 0) & (wanted != 0), wanted + 128, wanted)
        wanted = torch.where(ratio.abs() <= qmax, wanted, 0x7F)
        assert torch.equal(codes.view(torch.uint8).long(), wanted)
        back = dequantize(codes, returned)
        assert torch.equal(back.isnan(), ~(ratio.abs() <= qmax)) and back.shape == given.shape


def test_scales_that_cannot_be_fixed() -> None:
    with pytest.raises(ValueError, match="int8 has no NaN, which says that a number does not fit.*set kv_cache_dtype='fp8'"):
        check_kv_scales(0.1, torch.int8)
    with pytest.raises(ValueError, match="kv_scales=0.1 are the fixed scales of an fp8 KV cache: set kv_cache_dtype='fp8'"):
        check_kv_scales(0.1, None)
    for wrong in (0.0, -1.0, math.nan, math.inf, 1e31, {0: (0.1, 0.0)}, {0: (0.1,)}, {0: 0.1}):
        with pytest.raises(ValueError, match="kv_scales must be numbers between 1e-30 and 1e30, one for keys and one for val"):
            check_kv_scales(wrong, torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"has scales for layers \[0, 2\]; the layers that have keys and values of their own"):
        check_kv_scales({0: (1.0, 1.0), 2: (1.0, 1.0)}, torch.float8_e5m2, [0, 1])
    assert check_kv_scales({3: (0.5, 2)}, torch.float8_e5m2, [3]) == {3: (0.5, 2.0)}
    assert check_kv_scales(0.1, torch.float8_e4m3fn, [1, 4])[4] == (float(torch.tensor(0.1)),) * 2, "as kernels get it"


def test_a_backend_that_does_not_serve_fixed_scales_refuses_them() -> None:
    """Also where a cache and a step are made by hand: its kernels would read the codes of NaN as numbers."""
    codes = torch.zeros(2, 4, 2, 8, dtype=torch.float8_e4m3fn)
    check_scales(codes, fixed(1.0), fixed(2.0), fixed=True)
    with pytest.raises(ValueError, match="one fixed scale per layer .kv_scales., which these kernels do not serve"):
        check_scales(codes, fixed(1.0), fixed(2.0))
    for cache, v_scale in ((codes, torch.ones(2, 4, 2)), (codes.view(torch.int8), fixed(1.0))):
        with pytest.raises(ValueError, match="fixed scales are those of keys and values of an fp8 KV cache"):
            check_scales(cache, fixed(1.0), v_scale, fixed=True)
    made = case([1], [5], kv_dtype=torch.float8_e4m3fn, kv_scales=0.1)
    for name in ("flex_attention", "triton"):
        if importlib.util.find_spec("triton") is None and name == "triton":
            continue
        before = made.cache.k[0].clone()
        with pytest.raises(ValueError, match="which these kernels do not serve"):
            run_case(get_backend(name), made)
        assert torch.equal(bits(made.cache.k[0]), bits(before)), "nothing was stored"


# torch_native: its numbers are checked by the kit (tests/attn_ops/conformance), on each of these caches.


def test_only_what_is_gathered_is_dequantized(monkeypatch) -> None:
    """The float copies are of the pages that the batch names, not of the cache."""
    sizes = []
    real = torch_native.dequantize
    monkeypatch.setattr(torch_native, "dequantize", lambda codes, scale: sizes.append(codes.numel()) or real(codes, scale))
    made = case([1, 1], [9, 17], kv_dtype=torch.int8, num_pages=5000)
    check_output(run_case(BACKEND, made), made)
    assert sizes and max(sizes) <= 4 * 5 * 4 * 2 * 8  # (tiles, pages, tokens per page, Hkv, D)
