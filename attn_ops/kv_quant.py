"""How a quantised KV cache holds a key or a value: the one definition that every backend follows bit for bit.

The vector x that one KV head has for one token is stored as codes in the cache's dtype and one float32 ``scale``, made
with the token and never changed again:

    scale = max(max|x| / qmax, smallest normal float32)      codes = x / scale, rounded to the nearest code, ties to even

``codes * scale`` is what every query attends to, the token's own included. So results depend on how a sequence
was cut into steps, and on which backend wrote a page, no more than the keys before rounding do: a last bit there can
pick the code next to it. The largest element keeps its value (up to float32 rounding); no calibration is needed, and
nothing saturates.

A vector with a NaN or an infinity gets scale NaN and codes 0: all of it reads back as NaN, in every dtype. A zero is code 0
without a sign. Vectors below the range of float32's normal numbers read back as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CodeFormat:
    """The numbers that codes can be: a float format, of which whole numbers are a case (all of int8 lies below 2**7).

    Args:
        qmax: the largest.
        mantissa: bits after the leading one.
        min_exponent: numbers below 2**min_exponent are multiples of 2**(min_exponent - mantissa).
    """

    qmax: float
    mantissa: int
    min_exponent: int

    @property
    def unit(self) -> float:
        """The largest power of two <= qmax: ``unit * scale`` is of the size of the vector's largest element."""
        return 2.0 ** (int(self.qmax).bit_length() - 1)


FORMATS = {
    torch.int8: CodeFormat(127.0, 7, 7),
    torch.float8_e4m3fn: CodeFormat(448.0, 3, -6),
    torch.float8_e5m2: CodeFormat(57344.0, 2, -14),
}
QUANTISED = frozenset(FORMATS)
#: Names for ``kv_cache_dtype`` beside those of torch.
ALIASES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., D), floating point -> codes (..., D) in ``dtype``, scale (...) float32."""
    code, x = FORMATS[dtype], x.float()
    largest = x.abs().amax(-1)  # NaN if one is there
    # By a tensor: on CUDA, division by a number is multiplication with its reciprocal, which rounds differently.
    scale = (largest / torch.full_like(largest, code.qmax)).clamp_min(torch.finfo(torch.float32).tiny)
    scale = scale.masked_fill(scale.isinf(), float("nan"))
    scaled = (x / scale.unsqueeze(-1)).nan_to_num(nan=0.0).clamp(-code.qmax, code.qmax)
    if not dtype.is_floating_point:
        return scaled.round().to(dtype), scale
    return (scaled.to(dtype).float() + 0.0).to(dtype), scale  # + 0.0: no negative zero


def dequantise(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes (..., D), scale (...) -> (..., D) float32."""
    return codes.float() * scale.unsqueeze(-1)


def check_scales(k_cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> None:
    """Raises ValueError unless there are scales exactly where the caches hold codes."""
    wanted = k_cache.dtype in QUANTISED
    if (k_scale is not None, v_scale is not None) != (wanted, wanted):
        raise ValueError(f"a KV cache of {k_cache.dtype} {'needs' if wanted else 'takes no'} k_scale and v_scale; pass "
                         "PagedKVCache.of_layer(layer) as it is")


__all__ = ["ALIASES", "CodeFormat", "FORMATS", "QUANTISED", "check_scales", "dequantise", "quantise"]
