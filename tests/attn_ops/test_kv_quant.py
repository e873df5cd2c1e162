"""The definition of quantized keys and values, against one that looks through all codes; ``torch_native`` on such caches."""

from __future__ import annotations

import math

import pytest
import torch

from quire.attn_ops.backends import torch_native
from quire.attn_ops.backends.torch_native import BACKEND
from quire.attn_ops.kv_quant import ALIASES, FORMATS, QUANTIZED_KV_DTYPES, check_scales, dequantize, quantize
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
    code = FORMATS[kv_dtype]
    least = 2.0 ** (code.min_exponent - code.mantissa)
    x = torch.tensor([code.qmax, 0.5 * least, 1.5 * least, 2.5 * least, -0.5 * least, -1.5 * least, -0.0])
    codes, scale = quantize(x, kv_dtype)
    assert scale == 1.0
    assert codes.float().tolist() == [code.qmax, 0.0, 2 * least, 2 * least, 0.0, -2 * least, 0.0]
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
    code = FORMATS[kv_dtype]
    assert code.qmax == codes.max() and code.qmax / 2 < code.unit <= code.qmax


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


# torch_native: its numbers are checked by the kit (tests/attn_ops/conformance), on each of these caches.


def test_only_what_is_gathered_is_dequantized(monkeypatch) -> None:
    """The float copies are of the pages that the batch names, not of the cache."""
    sizes = []
    real = torch_native.dequantize
    monkeypatch.setattr(torch_native, "dequantize", lambda codes, scale: sizes.append(codes.numel()) or real(codes, scale))
    made = case([1, 1], [9, 17], kv_dtype=torch.int8, num_pages=5000)
    check_output(run_case(BACKEND, made), made)
    assert sizes and max(sizes) <= 4 * 5 * 4 * 2 * 8  # (tiles, pages, tokens per page, Hkv, D)
