"""The kernel of ``attn_ops/ops/merge_state.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.constants import next_power_of_2


@triton.jit(do_not_specialize=["states", "rows"])
def merge_kernel(out_a, out_b, lse_a, lse_b, merged, total_lse, states, rows, heads, strides_a, strides_b, lse_strides_a,
                 lse_strides_b, DIM: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, BINARY: tl.constexpr):
    """A program has ROWS pairs of token and head, and their states, STEP of them at a time, so that they are loaded together.
    State 0 is in the tensors a, state s > 0 at s of the tensors b. *strides: (token, state, head); heads of an lse are
    contiguous. BINARY: logarithms are to base 2. Offsets are 64-bit: states of long batches exceed 2**32 elements."""
    BASE: tl.constexpr = 0.6931471805599453 if BINARY else 1.0  # natural logarithm of the base
    WIDTH: tl.constexpr = next_power_of_2(DIM)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    token = row // heads
    head = row % heads
    columns = tl.arange(0, WIDTH)
    live = columns < DIM
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for begin in range(0, states, STEP):
        state = (begin + tl.arange(0, STEP)).to(tl.int64)[None, :]
        lse_at = tl.where(state == 0, lse_a + (token * lse_strides_a[0] + head)[:, None],
                          lse_b + (token * lse_strides_b[0] + head)[:, None] + state * lse_strides_b[1])
        lse = tl.load(lse_at, mask=(state < states) & real[:, None], other=float("-inf"))
        lse = tl.where(lse == float("inf"), float("-inf"), lse) * BASE
        at = tl.where(state == 0, out_a + (token * strides_a[0] + head * strides_a[2])[:, None],
                      out_b + (token * strides_b[0] + head * strides_b[2])[:, None] + state * strides_b[1])
        some = lse != float("-inf")  # an empty state's output may hold NaN
        part = tl.load(at[:, :, None] + columns[None, None, :], mask=some[:, :, None] & live[None, None, :],
                       other=0.0).to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(lse, 1))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink = tl.exp(highest - safe)
        weight = tl.exp(lse - safe[:, None])
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 1)
        highest = new_highest
    empty = total == 0.0
    over = tl.where(empty, 1.0, total)
    tl.store(total_lse + row, tl.where(empty, float("-inf"), (highest + tl.log(over)) / BASE), mask=real)
    tl.store(merged + row[:, None] * DIM + columns[None, :], acc / over[:, None], mask=real[:, None] & live[None, :])
