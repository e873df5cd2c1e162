"""Kernel of ``attn_ops/ops/routing.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous


@triton.jit
def topk_kernel(x, values, indices, E, stride, K: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr):
    """The K largest of row ``program_id``. A number's rank and, reversed, its index make one 64-bit key, of which the largest
    is taken K times."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_E)
    found = tl.load(x + row * stride + lanes, mask=lanes < E, other=0.0).to(tl.float32)
    let_next_start(PDL)
    rank = found.to(tl.int32, bitcast=True)  # float bits order as the numbers do once the lower 31 are flipped where negative
    rank = tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank)
    rank = tl.where(found != found, 0x7FFFFFFF, rank)
    key = (rank.to(tl.int64) << 32) + (BLOCK_E - lanes).to(tl.int64)
    key = tl.where(lanes < E, key, -0x7FFFFFFFFFFFFFFF)
    for i in tl.static_range(K):
        best = tl.max(key, 0)
        index = BLOCK_E - (best & 0xFFFFFFFF)
        mine = lanes == index
        tl.store(indices + row * K + i, index)
        tl.store(values + row * K + i, tl.sum(tl.where(mine, found, 0.0), 0).to(values.dtype.element_ty))
        key = tl.where(mine, -0x7FFFFFFFFFFFFFFF, key)
