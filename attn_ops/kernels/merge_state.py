"""The kernel of ``attn_ops/ops/merge_state.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.constants import next_power_of_2


@triton.jit(do_not_specialize=["states"])
def merge_kernel(out_a, out_b, lse_a, lse_b, merged, total_lse, states, strides_a, strides_b, lse_strides_a, lse_strides_b,
                 DIM: tl.constexpr, STEP: tl.constexpr, BINARY: tl.constexpr):
    """Program (token, head): the states, STEP of them at a time, so that they are loaded together. State 0 is in the tensors
    a, state s > 0 at s of the tensors b. *strides: (token, state, head); heads of an lse are contiguous. BINARY: logarithms
    are to base 2. Offsets are 64-bit: states of long batches exceed 2**32 elements."""
    BASE: tl.constexpr = 0.6931471805599453 if BINARY else 1.0  # natural logarithm of the base
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, next_power_of_2(DIM))
    live = columns < DIM
    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([next_power_of_2(DIM)], tl.float32)
    for begin in range(0, states, STEP):
        state = (begin + tl.arange(0, STEP)).to(tl.int64)
        lse_at = tl.where(state == 0, lse_a + token * lse_strides_a[0] + head,
                          lse_b + token * lse_strides_b[0] + state * lse_strides_b[1] + head)
        lse = tl.load(lse_at, mask=state < states, other=float("-inf"))
        lse = tl.where(lse == float("inf"), float("-inf"), lse) * BASE
        at = tl.where(state == 0, out_a + token * strides_a[0] + head * strides_a[2],
                      out_b + token * strides_b[0] + state * strides_b[1] + head * strides_b[2])
        some = lse != float("-inf")  # an empty state's output may hold NaN
        part = tl.load(at[:, None] + columns[None, :], mask=some[:, None] & live[None, :], other=0.0).to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink = tl.exp(highest - safe)
        weight = tl.exp(lse - safe)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        highest = new_highest
    row = token * tl.num_programs(1) + head
    if total == 0.0:
        tl.store(total_lse + row, float("-inf"))
    else:
        tl.store(total_lse + row, (highest + tl.log(total)) / BASE)
        acc = acc / total
    tl.store(merged + row * DIM + columns, acc, mask=live)
