"""The kernel of ``attn_ops/rope.py``: one program a token and block of heads, of q, then of k, then of v."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_ops._kernels.kv_quant import store_heads
from attn_ops._kernels.pdl import let_next_start, wait_for_previous


@triton.jit
def rotated(rows, live, cos_row, sin_row, norm_weight, eps, DIM: tl.constexpr, ROTARY: tl.constexpr, DIM_P2: tl.constexpr):
    """Rows of a head each (pointers to their first element), normalised if there is a weight, and rotated, in float32:
    (rows, DIM_P2). Each element is loaded twice, once as its partner's partner: no data moves between threads."""
    columns = tl.arange(0, DIM_P2)
    half: tl.constexpr = ROTARY // 2
    partner = tl.where(columns < half, columns + half, tl.where(columns < ROTARY, columns - half, columns))
    mask = live[:, None] & (columns < DIM)[None, :]
    x = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(rows[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if norm_weight is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = x * scale * tl.load(norm_weight + columns, mask=columns < DIM, other=0.0).to(tl.float32)[None, :]
        other = other * scale * tl.load(norm_weight + partner, mask=columns < DIM, other=0.0).to(tl.float32)[None, :]
    cos = tl.load(cos_row + columns, mask=columns < ROTARY, other=1.0).to(tl.float32)
    sin = tl.load(sin_row + columns, mask=columns < ROTARY, other=0.0).to(tl.float32)
    return x * cos[None, :] + tl.where(columns < half, -sin, sin)[None, :] * other


@triton.jit
def rope_kv_write_kernel(
    q, k, v, cos, sin, q_norm_weight, k_norm_weight, out, k_cache, v_cache, k_scale, v_scale, slot_mapping, eps,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cos, stride_sin,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr,
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
                         q_norm_weight, eps, D, ROTARY, D_P2)
        tl.store(out + (token * H + head)[:, None] * D + columns[None, :], result,
                 mask=(head < H)[:, None] & (columns < D)[None, :])
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            head = (block - q_blocks) % kv_blocks * HEADS + tl.arange(0, HEADS)
            live = head < HKV
            if block < q_blocks + kv_blocks:
                key = rotated(k + token * stride_kt + head * stride_kh, live, cos + token * stride_cos,
                              sin + token * stride_sin, k_norm_weight, eps, D, ROTARY, D_P2).to(k.dtype.element_ty)
                store_heads(key, head, live, slot, k_cache, k_scale, PAGE, K_PAGE, K_TOKEN, K_HEAD, S_PAGE, S_TOKEN, S_HEAD,
                            QMAX, LOWEST, ROUNDER, D, D_P2)
            else:
                columns_v = tl.arange(0, DV_P2)
                value = tl.load(v + token * stride_vt + (head * stride_vh)[:, None] + columns_v[None, :],
                                mask=live[:, None] & (columns_v < DV)[None, :], other=0.0)
                store_heads(value, head, live, slot, v_cache, v_scale, PAGE, V_PAGE, V_TOKEN, V_HEAD, S_PAGE, S_TOKEN, S_HEAD,
                            QMAX, LOWEST, ROUNDER, DV, DV_P2)
