"""How a quantized KV cache stores keys and values: the definition that every backend follows bit for bit.

The vector x of one KV head and one token is stored as codes in the cache's dtype and one float32 ``scale``, computed when the
token is written and never changed:

    scale = max(max|x| / qmax, smallest normal float32)      codes = x / scale, rounded to the nearest code, ties to even

Every query attends to ``codes * scale``, the token's own included, so that results depend no more on how a sequence was cut
into steps, and on which backend wrote a page, than the keys before rounding do (where a last bit can select the next code). The
largest element keeps its value up to float32 rounding; no calibration is needed, and nothing saturates. A vector with a NaN or
an infinity gets scale NaN and codes 0: all of it reads back as NaN. A zero is code 0 without a sign. Vectors below the range of
float32's normal numbers read back as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CodeFormat:
    """The values of a code's dtype as a float format (int8 too: its values lie below 2**7): the largest one, and the bits of
    mantissa after the leading one. Values below 2**min_exponent are multiples of 2**(min_exponent - mantissa)."""

    qmax: float
    mantissa: int
    min_exponent: int

    @property
    def unit(self) -> float:
        """The largest power of two <= qmax: ``unit * scale`` is about the vector's largest element."""
        return 2.0 ** (int(self.qmax).bit_length() - 1)


FORMATS = {
    torch.int8: CodeFormat(127.0, 7, 7),
    torch.float8_e4m3fn: CodeFormat(448.0, 3, -6),
    torch.float8_e5m2: CodeFormat(57344.0, 2, -14),
}
QUANTIZED_KV_DTYPES = frozenset(FORMATS)
#: Names for ``kv_cache_dtype`` in addition to torch's.
ALIASES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., D), floating point -> codes (..., D) in ``dtype``, scale (...) float32."""
    code, x = FORMATS[dtype], x.float()
    largest = x.abs().amax(-1)  # NaN if x has one
    # By a tensor: on CUDA, division by a number multiplies by its reciprocal, which rounds differently.
    scale = (largest / torch.full_like(largest, code.qmax)).clamp_min(torch.finfo(torch.float32).tiny)
    scale = scale.masked_fill(scale.isinf(), float("nan"))
    scaled = (x / scale.unsqueeze(-1)).nan_to_num(nan=0.0).clamp(-code.qmax, code.qmax)
    if not dtype.is_floating_point:
        return scaled.round().to(dtype), scale
    return (scaled.to(dtype).float() + 0.0).to(dtype), scale  # + 0.0: no negative zero


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes (..., D), scale (...) -> (..., D) float32."""
    return codes.float() * scale.unsqueeze(-1)


def check_scales(k_cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> None:
    """Raises ValueError unless there are scales iff the caches are quantized."""
    quantized = k_cache.dtype in QUANTIZED_KV_DTYPES
    if (k_scale is not None, v_scale is not None) != (quantized, quantized):
        raise ValueError(f"a KV cache of {k_cache.dtype} {'needs' if quantized else 'takes no'} k_scale and v_scale; pass "
                         "PagedKVCache.of_layer(layer) as it is")


def write(cache: torch.Tensor, scale: torch.Tensor | None, new: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store ``new`` (T, Hkv, D) at its slots of ``cache``, as codes if there is a ``scale``; both are mutated. A slot of -1
    writes back what slot 0 of the null page holds."""
    slot = slot_mapping.clamp_min(0)
    page, offset = slot // cache.shape[1], slot % cache.shape[1]
    live = (slot_mapping >= 0)[:, None, None]
    if scale is not None:
        new, new_scale = quantize(new, cache.dtype)
        scale[page, offset] = torch.where(live[..., 0], new_scale, scale[page, offset])
        cache, new = cache.view(torch.int8), new.view(torch.int8)  # bytes: torch does not index fp8 everywhere
    cache[page, offset] = torch.where(live, new.to(cache.dtype), cache[page, offset])


def write_kv(k: torch.Tensor | None, v: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor,
             k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, slot_mapping: torch.Tensor) -> None:
    """``write`` k and v; where they are None, the cache has them already."""
    if k is not None and v is not None:
        write(k_cache, k_scale, k, slot_mapping)
        write(v_cache, v_scale, v, slot_mapping)
