"""Kernel of ``attn_ops/ops/lora.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous


@triton.jit
def expand_kernel(base, shrunk, b, residual, out, m, n, base_stride, shrunk_stride, residual_stride, sizes, base_starts,
                  shrunk_starts, scalings, RANK: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr):
    """Program (tile of columns, tile of rows). The tiles of a segment come after those of the segment before; the last one may
    be partly empty. The tuples have a number for each segment."""
    tile = tl.program_id(0)
    first, row = 0, 0  # tile and row of b where the segment begins
    next_first, next_row = 0, 0
    size, base_at, shrunk_at, scaling = sizes[0], base_starts[0], shrunk_starts[0], scalings[0]
    for i in tl.static_range(1, SEGMENTS):
        next_first += tl.cdiv(sizes[i - 1], BLOCK_N)
        next_row += sizes[i - 1]
        later = tile >= next_first
        first = tl.where(later, next_first, first)
        row = tl.where(later, next_row, row)
        size = tl.where(later, sizes[i], size)
        base_at = tl.where(later, base_starts[i], base_at)
        shrunk_at = tl.where(later, shrunk_starts[i], shrunk_at)
        scaling = tl.where(later, scalings[i], scaling)
    columns = (tile - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, BLOCK_R)
    live = (rows < m)[:, None] & (columns < size)[None, :]
    factors = tl.load(b + (row + columns).to(tl.int64)[None, :] * RANK + ranks[:, None],
                      mask=(columns < size)[None, :] & (ranks < RANK)[:, None], other=0.0)
    wait_for_previous(PDL)
    x = tl.load(shrunk + rows.to(tl.int64)[:, None] * shrunk_stride + shrunk_at + ranks[None, :],
                mask=(rows < m)[:, None] & (ranks < RANK)[None, :], other=0.0)
    total = tl.load(base + rows.to(tl.int64)[:, None] * base_stride + base_at + columns[None, :], mask=live, other=0.0)
    total = total.to(tl.float32) + tl.dot(x, factors) * scaling
    if residual is not None:
        at = rows.to(tl.int64)[:, None] * residual_stride + (row + columns)[None, :]
        total += tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
    let_next_start(PDL)
    tl.store(out + rows.to(tl.int64)[:, None] * n + (row + columns)[None, :], total.to(out.dtype.element_ty), mask=live)


__all__ = ["expand_kernel"]
