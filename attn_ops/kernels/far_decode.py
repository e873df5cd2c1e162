"""Decoding with a query that is rotated anew for each chunk of far keys."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.paged import find_row, load_keys
from quire.attn_ops.kernels.rope import rotated
from quire.attn_ops.kernels.softmax import LN2, logits, softmax_step


@triton.jit(do_not_specialize=["num_reqs", "limit", "length", "one_wave", "longest_split", "table_stride"])
def far_decode_kernel(
    q, turned, far, k_cache, v_cache, block_table, query_start_loc, seq_lens, out, lse, num_reqs, limit, length, one_wave,
    longest_split, scale, softcap, q_strides, table_stride, H: tl.constexpr, LAYOUT: tl.constexpr, BLOCKS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, ROTARY: tl.constexpr, FORM: tl.constexpr,
):
    """Program (token and block of heads, split): HEADS query heads of one key head over a range of the token's keys, which are
    in the cache: out (T, splits, H, Dv) float32 and lse (T, splits, H), natural logarithm; 0 and -inf without keys.

    A token at position p < limit + b * length sees chunk b, keys b * length to (b + 1) * length, and all later keys with its
    query ``turned`` (T, H, D) as it is, else chunk b with ``q`` (T, H, D), rotated by row b of ``far``: Rope, of ROTARY
    dimensions in the FORM. A token has at most ``one_wave`` ranges, or more of ``longest_split`` keys. LAYOUT: CacheLayout;
    BLOCKS: blocks of heads per key head."""
    D: tl.constexpr = LAYOUT.dim
    DV: tl.constexpr = LAYOUT.dim_v
    D_P2: tl.constexpr = next_power_of_2(D, 16)
    DV_P2: tl.constexpr = next_power_of_2(DV, 16)
    ROWS: tl.constexpr = next_power_of_2(HEADS, 16)
    GROUP: tl.constexpr = H // LAYOUT.heads
    PAGE: tl.constexpr = LAYOUT.page
    K: tl.constexpr = LAYOUT.k
    V: tl.constexpr = LAYOUT.v
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    token = tl.program_id(0) // (LAYOUT.heads * BLOCKS)
    head_block = tl.program_id(0) % (LAYOUT.heads * BLOCKS)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    kv_head = head_block // BLOCKS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, D_P2)
    columns_v = tl.arange(0, DV_P2)
    head = kv_head * GROUP + head_block % BLOCKS * HEADS + rows
    row_live = (rows < HEADS) & (head_block % BLOCKS * HEADS + rows < GROUP)

    row = find_row(query_start_loc, num_reqs, token)
    keys = token * 0
    if row < num_reqs:  # not a padding token
        keys = tl.load(seq_lens + row) - (tl.load(query_start_loc + row + 1) - token) + 1
    span = tl.maximum(tl.cdiv(keys, splits), tl.minimum(tl.cdiv(keys, one_wave), longest_split))
    span = tl.maximum(tl.cdiv(span, BLOCK), 1) * BLOCK
    at = split * span
    stop = tl.minimum(at + span, keys)
    chunks = tl.maximum(keys - 1 - limit + length, 0) // length  # far ones
    table_row = block_table + row.to(tl.int64) * table_stride
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_P2], tl.float32)
    while at < stop:
        chunk = at // length
        if chunk < chunks:
            end = tl.minimum(stop, (chunk + 1) * length)
            query = rotated(q + token.to(tl.int64) * q_strides[0] + head * q_strides[1], row_live, chunk.to(tl.int64), far,
                            far.q_norm, D, D_P2, ROTARY, FORM).to(q.dtype.element_ty)
        else:
            end = stop
            query = tl.load(turned + (token.to(tl.int64) * H + head)[:, None] * D + columns[None, :],
                            mask=row_live[:, None] & (columns < D)[None, :], other=0.0)
        for block in tl.range(at, end, BLOCK, num_stages=STAGES):
            offsets = block + tl.arange(0, BLOCK)
            live = offsets < end
            key = load_keys(k_cache, table_row, kv_head, offsets, live, PAGE, K, D, D_P2, True)
            scores = logits(tl.dot(query, tl.trans(key), input_precision=PRECISION), scale, softcap,
                            PRECISION == "ieee")
            scores = tl.where(live[None, :], scores, float("-inf"))
            highest, total, weights, shrink = softmax_step(highest, total, scores, None, False, False)
            value = load_keys(v_cache, table_row, kv_head, offsets, live, PAGE, V, DV, DV_P2, True)
            acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        at = end
    index = (token.to(tl.int64) * splits + split) * H + head
    some = tl.where(total != 0, total, 1.0)  # NaN stays, see varlen.py
    tl.store(out + index[:, None] * DV + columns_v[None, :], acc / some[:, None],
             mask=row_live[:, None] & (columns_v < DV)[None, :])
    tl.store(lse + index, tl.where(total != 0, (highest + tl.log2(some)) * LN2, float("-inf")), mask=row_live)
