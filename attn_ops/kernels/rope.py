"""The kernel of ``attn_ops/ops/rope.py``: one program a token and block of heads, of q, then of k, then of v."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.kv_quant import store_heads
from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous


@triton.jit
def weights(norm_weight, columns, live, NORM_OFFSET: tl.constexpr):
    """Of a norm, in float32."""
    loaded = tl.load(norm_weight + columns, mask=live, other=0.0).to(tl.float32)
    if NORM_OFFSET is not None:
        loaded += NORM_OFFSET
    return loaded


@triton.jit
def rotated(rows, live, cos_row, sin_row, norm_weight, eps, DIM: tl.constexpr, ROTARY: tl.constexpr, DIM_P2: tl.constexpr,
            INTERLEAVED: tl.constexpr, HALF_TABLES: tl.constexpr, NORM_AFTER: tl.constexpr, NORM_OFFSET: tl.constexpr):
    """Rows of a head each (pointers to their first element), normalised if there is a weight, and rotated, in float32:
    (rows, DIM_P2). Each element is loaded twice, once as its partner's partner: no data moves between threads. The
    last four are those of RopeForm in ``attn_ops/ops/rope.py``."""
    columns = tl.arange(0, DIM_P2)
    half: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        partner = tl.where(columns < ROTARY, columns ^ 1, columns)
        is_first = columns % 2 == 0
        pair = columns // 2
    else:
        partner = tl.where(columns < half, columns + half, tl.where(columns < ROTARY, columns - half, columns))
        is_first = columns < half
        pair = tl.where(is_first, columns, columns - half)
    entry = columns
    if HALF_TABLES:
        entry = pair
    mask = live[:, None] & (columns < DIM)[None, :]
    x = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(rows[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if norm_weight is not None:
        if not NORM_AFTER:
            scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
            x = x * scale * weights(norm_weight, columns, columns < DIM, NORM_OFFSET)[None, :]
            other = other * scale * weights(norm_weight, partner, columns < DIM, NORM_OFFSET)[None, :]
    cos = tl.load(cos_row + entry, mask=columns < ROTARY, other=1.0).to(tl.float32)
    sin = tl.load(sin_row + entry, mask=columns < ROTARY, other=0.0).to(tl.float32)
    result = x * cos[None, :] + tl.where(is_first, -sin, sin)[None, :] * other
    if norm_weight is not None:
        if NORM_AFTER:
            scale = tl.rsqrt(tl.sum(result * result, 1) / DIM + eps)[:, None]
            result = result * scale * weights(norm_weight, columns, columns < DIM, NORM_OFFSET)[None, :]
    return result


@triton.jit
def rope_kv_write_kernel(
    q, k, v, cos, sin, q_norm_weight, k_norm_weight, out, k_cache, v_cache, k_scale, v_scale, slot_mapping, eps,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cos, stride_sin,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, HALF_TABLES: tl.constexpr, NORM_AFTER: tl.constexpr, NORM_OFFSET: tl.constexpr,
    PAGE: tl.constexpr,
    K_PAGE: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr,
    S_PAGE: tl.constexpr, S_TOKEN: tl.constexpr, S_HEAD: tl.constexpr,
    QMAX: tl.constexpr, LOWEST: tl.constexpr, ROUNDER: tl.constexpr,
    HEADS: tl.constexpr, D_P2: tl.constexpr, DV_P2: tl.constexpr, PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (H + HEADS - 1) // HEADS
    kv_blocks: tl.constexpr = (HKV + HEADS - 1) // HEADS
    columns = tl.arange(0, D_P2)
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        result = rotated(q + token * stride_qt + head * stride_qh, head < H, cos + token * stride_cos, sin + token * stride_sin,
                         q_norm_weight, eps, D, ROTARY, D_P2, INTERLEAVED, HALF_TABLES, NORM_AFTER, NORM_OFFSET)
        tl.store(out + (token * H + head)[:, None] * D + columns[None, :], result,
                 mask=(head < H)[:, None] & (columns < D)[None, :])
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            head = (block - q_blocks) % kv_blocks * HEADS + tl.arange(0, HEADS)
            live = head < HKV
            if block < q_blocks + kv_blocks:
                key = rotated(k + token * stride_kt + head * stride_kh, live, cos + token * stride_cos,
                              sin + token * stride_sin, k_norm_weight, eps, D, ROTARY, D_P2, INTERLEAVED, HALF_TABLES,
                              NORM_AFTER, NORM_OFFSET).to(k.dtype.element_ty)
                store_heads(key, head, live, slot, k_cache, k_scale, PAGE, K_PAGE, K_TOKEN, K_HEAD, S_PAGE, S_TOKEN, S_HEAD,
                            QMAX, LOWEST, ROUNDER, D, D_P2)
            else:
                columns_v = tl.arange(0, DV_P2)
                value = tl.load(v + token * stride_vt + (head * stride_vh)[:, None] + columns_v[None, :],
                                mask=live[:, None] & (columns_v < DV)[None, :], other=0.0)
                store_heads(value, head, live, slot, v_cache, v_scale, PAGE, V_PAGE, V_TOKEN, V_HEAD, S_PAGE, S_TOKEN, S_HEAD,
                            QMAX, LOWEST, ROUNDER, DV, DV_P2)
