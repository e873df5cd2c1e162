"""Kernel of sparse prefills: causal attention of each head over chosen keys and over keys at chosen distances."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.softmax import LN2, logits, softmax_step


@triton.jit
def attend_block(query, k, v, index, keep, scale, softcap, highest, total, acc, k_strides, v_strides, kv_head,
                 DIM: tl.constexpr, DIM_V: tl.constexpr):
    """Online softmax over the keys at ``index`` (N,) that ``keep`` (M, N) has: highest, total (M,), acc (M, Dv) updated."""
    PRECISION: tl.constexpr = "ieee" if query.dtype == tl.float32 else "tf32"
    columns = tl.arange(0, next_power_of_2(DIM, 16))
    columns_v = tl.arange(0, next_power_of_2(DIM_V, 16))
    live = tl.max(keep.to(tl.int32), 0) > 0
    at = index.to(tl.int64)
    key = tl.load(k + at[:, None] * k_strides[0] + kv_head * k_strides[1] + columns[None, :],
                  mask=live[:, None] & (columns < DIM)[None, :], other=0.0)
    scores = logits(tl.dot(query, tl.trans(key), input_precision=PRECISION), scale, softcap,
                    PRECISION == "ieee")
    scores = tl.where(keep, scores, float("-inf"))
    highest, total, weights, shrink = softmax_step(highest, total, scores, None, False, True)
    value = tl.load(v + at[:, None] * v_strides[0] + kv_head * v_strides[1] + columns_v[None, :],
                    mask=live[:, None] & (columns_v < DIM_V)[None, :], other=0.0)
    acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
    return highest, total, acc


@triton.jit(do_not_specialize=["first_query", "num_queries", "first_key", "num_keys", "length", "num_listed", "num_steps"])
def lines_kernel(q, k, v, out, lse, of_key, of_distance, listed, listed_from, listed_to, apart, num_apart, first_query,
                 num_queries, first_key, num_keys, length, num_listed, num_steps, scale, softcap, q_strides, k_strides,
                 v_strides, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr):
    """Program (block, head): BLOCK queries, whose first position is a multiple of BLOCK. of_key, of_distance (H, length) int8.
    listed (H, num_listed), of it listed_from to listed_to (H,); apart (H, num_steps), of it num_apart (H,). *strides: (token,
    head)."""
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    kv_head = (head // GROUP).to(tl.int64)  # of tensors that lie head by head the stride is T * D
    block = first_query // BLOCK + tl.program_id(0)
    pos = block * BLOCK + tl.arange(0, BLOCK)
    live = (pos >= first_query) & (pos < first_query + num_queries)
    token = (pos - first_query).to(tl.int64)
    columns = tl.arange(0, next_power_of_2(DIM, 16))
    columns_v = tl.arange(0, next_power_of_2(DIM_V, 16))
    query = tl.load(q + token[:, None] * q_strides[0] + head.to(tl.int64) * q_strides[1] + columns[None, :],
                    mask=live[:, None] & (columns < DIM)[None, :], other=0.0)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, next_power_of_2(DIM_V, 16)], tl.float32)
    row = head.to(tl.int64) * length
    stop = tl.load(listed_to + head)
    for at in range(tl.load(listed_from + head), stop, BLOCK):
        order = at + tl.arange(0, BLOCK)
        key_pos = tl.load(listed + head.to(tl.int64) * num_listed + order, mask=order < stop, other=length)
        keep = live[:, None] & (order < stop)[None, :] & (key_pos[None, :] <= pos[:, None])
        highest, total, acc = attend_block(query, k, v, key_pos - first_key, keep, scale, softcap, highest, total, acc,
                                           k_strides, v_strides, kv_head, DIM, DIM_V)
    first_block = first_key // BLOCK
    last_block = (first_key + num_keys - 1) // BLOCK
    for step in range(0, tl.load(num_apart + head)):
        key_block = block - tl.load(apart + head.to(tl.int64) * num_steps + step)
        if (key_block >= first_block) & (key_block <= last_block):
            key_pos = key_block * BLOCK + tl.arange(0, BLOCK)
            inside = (key_pos >= first_key) & (key_pos < first_key + num_keys)
            inside = inside & (tl.load(of_key + row + key_pos, mask=inside, other=1) == 0)  # listed keys are in already
            distance = pos[:, None] - key_pos[None, :]
            keep = live[:, None] & inside[None, :] & (distance >= 0)
            keep = keep & (tl.load(of_distance + row + distance, mask=keep, other=0) != 0)
            highest, total, acc = attend_block(query, k, v, key_pos - first_key, keep, scale, softcap, highest, total, acc,
                                               k_strides, v_strides, kv_head, DIM, DIM_V)
    some = total != 0  # NaN too, see varlen.py
    acc = acc / tl.where(some, total, 1.0)[:, None]
    out_row = token * heads + head
    tl.store(out + out_row[:, None] * DIM_V + columns_v[None, :], acc, mask=live[:, None] & (columns_v < DIM_V)[None, :])
    tl.store(lse + out_row, tl.where(some, (highest + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf")), mask=live)
