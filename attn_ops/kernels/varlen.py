"""The kernel of ``attn_ops/ops/varlen.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.paged import find_block
from quire.attn_ops.kernels.softmax import LN2, logits, softmax_step


@triton.jit(do_not_specialize=["num_tokens", "num_reqs"])
def varlen_kernel(q, k, v, out, lse, cu_q, cu_k, num_tokens, num_reqs, scale, softcap, q_strides, k_strides, v_strides,
                  GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Program (block, head): BLOCK_M queries of one sequence. *strides: (token, head)."""
    D_P2: tl.constexpr = next_power_of_2(DIM, 16)
    DV_P2: tl.constexpr = next_power_of_2(DIM_V, 16)
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    block = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    row, _, first = find_block(cu_q, num_reqs, block, BLOCK_M)
    end = tl.load(cu_q + tl.minimum(row + 1, num_reqs))
    end = tl.where(row == num_reqs, num_tokens, end)
    if first >= end:
        return
    token = first + tl.arange(0, BLOCK_M)
    live = token < end
    columns = tl.arange(0, D_P2)
    columns_v = tl.arange(0, DV_P2)
    out_row = token.to(tl.int64) * heads + head
    out_live = live[:, None] & (columns_v < DIM_V)[None, :]
    if row == num_reqs:
        tl.store(out + out_row[:, None] * DIM_V + columns_v[None, :], tl.zeros([BLOCK_M, DV_P2], tl.float32), mask=out_live)
        tl.store(lse + out_row, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=live)
        return
    first_key = tl.load(cu_k + row)
    keys = tl.load(cu_k + row + 1) - first_key
    offset = keys - end  # position of a token = its index + offset
    pos = token + offset
    begin = keys * 0
    stop = keys
    if CAUSAL:
        stop = tl.minimum(stop, tl.minimum(first + BLOCK_M, end) + offset)
    if WINDOW > 0:
        begin = tl.maximum(first + offset - (WINDOW - 1), 0) // BLOCK_N * BLOCK_N
        stop = tl.minimum(stop, tl.minimum(first + BLOCK_M, end) + offset + WINDOW - 1)
    query = tl.load(q + token.to(tl.int64)[:, None] * q_strides[0] + head.to(tl.int64) * q_strides[1] + columns[None, :],
                    mask=live[:, None] & (columns < DIM)[None, :], other=0.0)
    kv_head = (head // GROUP).to(tl.int64)  # of tensors that lie head by head the stride is T * D
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_P2], tl.float32)
    for at in range(begin, stop, BLOCK_N):
        key_pos = at + tl.arange(0, BLOCK_N)
        inside = key_pos < stop
        index = (first_key + key_pos).to(tl.int64)
        key = tl.load(k + index[:, None] * k_strides[0] + kv_head * k_strides[1] + columns[None, :],
                      mask=inside[:, None] & (columns < DIM)[None, :], other=0.0)
        scores = logits(tl.dot(query, tl.trans(key), input_precision=PRECISION), scale, softcap,
                        PRECISION == "ieee")
        keep = inside[None, :] & live[:, None]
        if CAUSAL:
            keep = keep & (key_pos[None, :] <= pos[:, None])
        if WINDOW > 0:
            keep = keep & (key_pos[None, :] - pos[:, None] < WINDOW) & (pos[:, None] - key_pos[None, :] < WINDOW)
        scores = tl.where(keep, scores, float("-inf"))
        highest, total, weights, shrink = softmax_step(highest, total, scores, None, False, True)
        value = tl.load(v + index[:, None] * v_strides[0] + kv_head * v_strides[1] + columns_v[None, :],
                        mask=inside[:, None] & (columns_v < DIM_V)[None, :], other=0.0)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
    some = total != 0  # NaN too: an lse of -inf would say that there are no keys, and NaN would be lost where states merge
    acc = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(out + out_row[:, None] * DIM_V + columns_v[None, :], acc, mask=out_live)
    tl.store(lse + out_row, tl.where(some, (highest + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf")), mask=live)
