"""The kernel of ``attn_ops/ops/positions.py``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def positions_kernel(positions, start_loc, prefix_lens, extend_lens, rows, BLOCK: tl.constexpr):
    """One program per sequence: its offset by summing the lengths before it, then its positions."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.zeros([], dtype=tl.int64)
    for begin in range(0, row, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        start += tl.sum(tl.load(extend_lens + at, mask=at < row, other=0).to(tl.int64), axis=0)
    prefix = tl.load(prefix_lens + row).to(tl.int64)
    length = tl.load(extend_lens + row).to(tl.int64)
    tl.store(start_loc + row, start.to(tl.int32))
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(positions + start + at, prefix + at, mask=at < length)
