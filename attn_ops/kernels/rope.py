"""The kernel of ``attn_ops/ops/rope.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.kv_quant import encode_and_store
from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous


@triton.jit
def _norm_weights(norm_weight, columns, live, FORM: tl.constexpr):
    loaded = tl.load(norm_weight + columns, mask=live, other=0.0).to(tl.float32)
    if FORM.norm_offset is not None:
        loaded += FORM.norm_offset
    return loaded


@triton.jit
def rotated(rows, live, token, rope, norm_weight, DIM: tl.constexpr, DIM_P2: tl.constexpr, ROTARY: tl.constexpr,
            FORM: tl.constexpr):
    """Heads of a token (64-bit), normalized if there is a weight, and rotated, in float32: (heads, DIM_P2).

    ``rows`` points to the heads' first elements. Each element is loaded twice, the second time as its partner's partner: no
    data moves between threads."""
    cos_row = rope.cos + token * rope.cos_stride
    sin_row = rope.sin + token * rope.sin_stride
    columns = tl.arange(0, DIM_P2)
    half: tl.constexpr = ROTARY // 2
    if FORM.interleaved:
        partner = tl.where(columns < ROTARY, columns ^ 1, columns)
        is_first = columns % 2 == 0
        pair = columns // 2
    else:
        partner = tl.where(columns < half, columns + half, tl.where(columns < ROTARY, columns - half, columns))
        is_first = columns < half
        pair = tl.where(is_first, columns, columns - half)
    entry = columns
    if FORM.half_tables:
        entry = pair
    mask = live[:, None] & (columns < DIM)[None, :]
    x = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(rows[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if norm_weight is not None:
        if not FORM.norm_after:
            scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + rope.eps)[:, None]
            x = x * scale * _norm_weights(norm_weight, columns, columns < DIM, FORM)[None, :]
            other = other * scale * _norm_weights(norm_weight, partner, columns < DIM, FORM)[None, :]
    cos = tl.load(cos_row + entry, mask=columns < ROTARY, other=1.0).to(tl.float32)
    sin = tl.load(sin_row + entry, mask=columns < ROTARY, other=0.0).to(tl.float32)
    result = x * cos[None, :] + tl.where(is_first, -sin, sin)[None, :] * other
    if norm_weight is not None:
        if FORM.norm_after:
            scale = tl.rsqrt(tl.sum(result * result, 1) / DIM + rope.eps)[:, None]
            result = result * scale * _norm_weights(norm_weight, columns, columns < DIM, FORM)[None, :]
    return result


@triton.jit
def rope_kv_write_kernel(
    q, k, v, out, caches, rope, slot_mapping, q_strides, k_strides, v_strides, H: tl.constexpr, LAYOUT: tl.constexpr,
    ROTARY: tl.constexpr, FORM: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):
    """Program (token, block): HEADS heads of q, then of k, then of v. caches: Caches; rope: Rope; *_strides: (token, head).
    LAYOUT: CacheLayout; ROTARY, FORM: number of rotated dimensions, RopeForm."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    D_P2: tl.constexpr = next_power_of_2(LAYOUT.dim)
    DV_P2: tl.constexpr = next_power_of_2(LAYOUT.dim_v)
    SCALE: tl.constexpr = LAYOUT.scale
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (H + HEADS - 1) // HEADS
    kv_blocks: tl.constexpr = (LAYOUT.heads + HEADS - 1) // HEADS
    columns = tl.arange(0, D_P2)
    if block < q_blocks:
        head = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)  # of tensors that lie head by head the stride is T * D
        result = rotated(q + token * q_strides[0] + head * q_strides[1], head < H, token, rope, rope.q_norm, LAYOUT.dim, D_P2,
                         ROTARY, FORM)
        tl.store(out + (token * H + head)[:, None] * LAYOUT.dim + columns[None, :], result,
                 mask=(head < H)[:, None] & (columns < LAYOUT.dim)[None, :])
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            head = (block - q_blocks) % kv_blocks * HEADS + tl.arange(0, HEADS)
            which = head.to(tl.int64)
            live = head < LAYOUT.heads
            if block < q_blocks + kv_blocks:
                K: tl.constexpr = LAYOUT.k
                key = rotated(k + token * k_strides[0] + which * k_strides[1], live, token, rope, rope.k_norm, LAYOUT.dim,
                              D_P2, ROTARY, FORM).to(k.dtype.element_ty)
                encode_and_store(key, head, live, slot, caches.k, caches.k_scale, LAYOUT.page, K, SCALE, LAYOUT.dim)
            else:
                V: tl.constexpr = LAYOUT.v
                columns_v = tl.arange(0, DV_P2)
                value = tl.load(v + token * v_strides[0] + (which * v_strides[1])[:, None] + columns_v[None, :],
                                mask=live[:, None] & (columns_v < LAYOUT.dim_v)[None, :], other=0.0)
                encode_and_store(value, head, live, slot, caches.v, caches.v_scale, LAYOUT.page, V, SCALE, LAYOUT.dim_v)
