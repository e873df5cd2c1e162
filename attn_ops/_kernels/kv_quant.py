"""Storing keys and values in the cache inside kernels, as they are or quantised as ``attn_ops/kv_quant.py`` defines it.

NOTE [Rounding to codes]: ``encode`` rounds in float32 and leaves only numbers that are codes, so whatever way a GPU has
to convert to fp8 is exact. For x with 2**e <= |x| < 2**(e+1) codes lie 2**(e - mantissa) apart; adding and subtracting
1.5 * 2**23 times that rounds x to a multiple of it, ties to even. 2**e are the exponent bits of x; ROUNDER is
1.5 * 2**(23 - mantissa), and LOWEST is 2**min_exponent, below which codes get no closer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attn_ops.kv_quant import FORMATS

SMALLEST = tl.constexpr(2.0**-126)  # the smallest normal float32


@triton.jit
def encode(x, AXIS: tl.constexpr, QMAX: tl.constexpr, LOWEST: tl.constexpr, ROUNDER: tl.constexpr):
    """``kv_quant.quantise`` along the last axis, AXIS: codes, still float32, and scale. See NOTE [Rounding to codes]."""
    x = x.to(tl.float32)
    size = tl.abs(x)
    broken = tl.max((~(size < float("inf"))).to(tl.int32), AXIS) > 0
    scale = tl.maximum(tl.div_rn(tl.max(size, AXIS), QMAX), SMALLEST)
    scale = tl.where(broken, float("nan"), scale)
    if AXIS == 1:
        scaled = tl.div_rn(x, tl.where(broken, 1.0, scale)[:, None])
        scaled = tl.where(broken[:, None], 0.0, scaled)
    else:
        scaled = tl.where(broken, 0.0, tl.div_rn(x, tl.where(broken, 1.0, scale)))
    scaled = tl.minimum(tl.maximum(scaled, -QMAX), QMAX)
    power = tl.maximum(tl.abs(scaled), LOWEST).to(tl.int32, bitcast=True) & 0x7F800000
    shift = power.to(tl.float32, bitcast=True) * ROUNDER
    return (scaled + shift) - shift, scale


@triton.jit
def store_heads(x, head, live, slot, cache, scales, PAGE: tl.constexpr, C_PAGE: tl.constexpr, C_TOKEN: tl.constexpr,
                C_HEAD: tl.constexpr, S_PAGE: tl.constexpr, S_TOKEN: tl.constexpr, S_HEAD: tl.constexpr, QMAX: tl.constexpr,
                LOWEST: tl.constexpr, ROUNDER: tl.constexpr, DIM: tl.constexpr, DIM_P2: tl.constexpr):
    """Store keys (or values) x (heads, DIM_P2) of one token at its ``slot`` (64-bit, not negative): those of live ``head``s,
    as codes with their scales if there are ``scales``. C_* and S_* are the strides of cache and scales."""
    page = slot // PAGE
    offset = slot % PAGE
    columns = tl.arange(0, DIM_P2)
    where = head.to(tl.int64)
    if scales is not None:
        codes, scale = encode(x, 1, QMAX, LOWEST, ROUNDER)
        tl.store(scales + page * S_PAGE + offset * S_TOKEN + where * S_HEAD, scale, mask=live)
        x = codes
    tl.store(cache + page * C_PAGE + offset * C_TOKEN + (where * C_HEAD)[:, None] + columns[None, :],
             x.to(cache.dtype.element_ty), mask=live[:, None] & (columns < DIM)[None, :])


def rounding(dtype: torch.dtype) -> tuple[float, float, float]:
    """QMAX, LOWEST and ROUNDER of ``encode`` for a cache's dtype; zeros for one that is not quantised."""
    if dtype not in FORMATS:
        return 0.0, 0.0, 0.0
    code = FORMATS[dtype]
    return code.qmax, 2.0**code.min_exponent, 1.5 * 2.0 ** (23 - code.mantissa)


def scale_strides(scale: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if scale is None else scale.stride()


__all__ = ["encode", "rounding", "scale_strides", "store_heads"]
