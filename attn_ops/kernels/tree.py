"""Attention of draft tokens among themselves, by a mask: a tree's nodes to their ancestors (``attn_ops/ops/tree.py``)."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.softmax import tanh


@triton.jit
def _logits(scores, scale, softcap):
    scores *= scale
    if softcap is not None:
        scores = tanh(scores / softcap) * softcap
    return scores


@triton.jit(do_not_specialize=["width"])
def tree_kernel(q, k, v, out, out_lse, starts, mask, scale, softcap, q_strides, k_strides, v_strides, mask_stride, width,
                HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr):
    """Program (sequence, key head, block): BLOCK_M rows, which are tokens x the GROUP query heads of the key head.

    mask: (T, width) int8, of a token to each token of its sequence; strides: of tokens and heads. Sums are float32, and so are
    weights: tf32x3 multiplies numbers of 16 bits by float32 ones to its rounding, on tensor cores."""
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32x3"
    start = tl.load(starts + tl.program_id(0))
    end = tl.load(starts + tl.program_id(0) + 1)
    kv_head = tl.program_id(1).to(tl.int64)  # of tensors that lie head by head the stride is T * D
    lines = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    if start + tl.program_id(2) * BLOCK_M // GROUP >= end:
        return
    token = (start + lines // GROUP).to(tl.int64)
    head = kv_head * GROUP + lines % GROUP
    live = token < end
    columns = tl.arange(0, next_power_of_2(DIM, 16))
    columns_v = tl.arange(0, next_power_of_2(DIM_V, 16))
    query = tl.load(q + (token * q_strides[0] + head * q_strides[1])[:, None] + columns[None, :],
                    mask=live[:, None] & (columns < DIM)[None, :], other=0.0).to(tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, next_power_of_2(DIM_V, 16)], tl.float32)
    for begin in range(0, tl.minimum(end - start, width), BLOCK_N):
        number = begin + tl.arange(0, BLOCK_N)
        other = (start + number).to(tl.int64)
        there = (other < end) & (number < width)
        keys = tl.load(k + (other * k_strides[0] + kv_head * k_strides[1])[:, None] + columns[None, :],
                       mask=there[:, None] & (columns < DIM)[None, :], other=0.0).to(tl.float32)
        scores = _logits(tl.dot(query, tl.trans(keys), input_precision=PRECISION), scale, softcap)
        keep = tl.load(mask + token[:, None] * mask_stride + number[None, :], mask=live[:, None] & there[None, :], other=0)
        scores = tl.where(keep != 0, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # rows that have seen no key yet
        shrink = tl.exp(highest - safe)
        weights = tl.exp(scores - safe[:, None])
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v + (other * v_strides[0] + kv_head * v_strides[1])[:, None] + columns_v[None, :],
                         mask=there[:, None] & (columns_v < DIM_V)[None, :], other=0.0).to(tl.float32)
        acc = tl.dot(weights, values, acc * shrink[:, None], input_precision=PRECISION)
        highest = new_highest
    if tl.min((tl.abs(acc) < float("inf")).to(tl.int32)) == 0:
        # Again, key by key: a value that is not finite is for the rows that see it. 0, the weight of others, times it is NaN.
        highest_or_0 = tl.where(highest == float("-inf"), 0.0, highest)
        acc = tl.zeros_like(acc)
        for number in range(0, tl.minimum(end - start, width)):
            other = (start + number).to(tl.int64)
            key = tl.load(k + other * k_strides[0] + kv_head * k_strides[1] + columns, mask=columns < DIM, other=0.0)
            value = tl.load(v + other * v_strides[0] + kv_head * v_strides[1] + columns_v, mask=columns_v < DIM_V, other=0.0)
            score = _logits(tl.sum(query * key.to(tl.float32)[None, :], 1), scale, softcap)
            keep = tl.load(mask + token * mask_stride + number, mask=live, other=0) != 0
            weighted = tl.exp(score - highest_or_0)[:, None] * value.to(tl.float32)[None, :]
            acc += tl.where(keep[:, None], weighted, 0.0)
    seen = tl.where(total != 0, total, 1.0)  # NaN stays, also in the lse
    row = token * HEADS + head
    tl.store(out + row[:, None] * DIM_V + columns_v[None, :], acc / seen[:, None],
             mask=live[:, None] & (columns_v < DIM_V)[None, :])
    tl.store(out_lse + row, highest + tl.log(seen), mask=live)
