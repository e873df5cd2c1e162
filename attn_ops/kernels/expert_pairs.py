"""Which pairs of a row and an expert a program has: for the kernels in experts.py and expert_lora.py.

Legend: S pairs, E experts. Ids outside 0 .. E-1 count as expert E, which has no weight.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_ids(ids, at, S, E):
    """The experts of the pairs ``at``, int32; -1 past the end."""
    found = tl.load(ids + at, mask=at < S, other=0)
    found = tl.where((found >= 0) & (found < E), found, E).to(tl.int32)
    return tl.where(at < S, found, -1)


@triton.jit
def count_of_leader(ids, leader, S, E, BLOCK_S: tl.constexpr, BY_PAIR: tl.constexpr):
    """The expert of a leader, and how many pairs have it. The leader is a pair (BY_PAIR; it has none if an earlier pair has its
    expert) or an expert (0 .. E)."""
    expert = leader
    if BY_PAIR:
        expert = load_ids(ids, leader, S, E)
    lanes = tl.arange(0, BLOCK_S)
    count = 0
    earlier = 0
    for start in range(0, S, BLOCK_S):
        at = start + lanes
        mine = load_ids(ids, at, S, E) == expert
        count += tl.sum(mine.to(tl.int32), 0)
        earlier += tl.sum((mine & (at < leader)).to(tl.int32), 0)
    if BY_PAIR:
        count = tl.where(earlier > 0, 0, count)
    return expert, count


@triton.jit
def pairs_of_expert(ids, expert, first, S, E, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr):
    """(BLOCK_M,) int32: the pairs with rank first, first + 1, ... among those of the expert; 0 past their end."""
    lanes, tile = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_M)
    pairs = tl.zeros((BLOCK_M,), tl.int32)
    before = 0
    for start in range(0, S, BLOCK_S):
        at = start + lanes
        mine = (load_ids(ids, at, S, E) == expert).to(tl.int32)
        rank = before + tl.cumsum(mine, 0) - 1 - first
        hit = (mine > 0)[None, :] & (rank[None, :] == tile[:, None])
        pairs += tl.sum(tl.where(hit, at[None, :], 0), 1)
        before += tl.sum(mine, 0)
    return pairs


@triton.jit
def pairs_of_tile(order, tiles, tile, E, BLOCK_M: tl.constexpr):
    """Of a tile of ``tiles_kernel``: its expert; its pairs (BLOCK_M,) int32; and which of them count, the others being any. The
    expert of a tile past the last is E + 1, and what pairs it has means nothing."""
    expert = tl.load(tiles + tile * 4)
    at = tl.load(tiles + tile * 4 + 1) + tl.arange(0, BLOCK_M)
    last = tl.load(tiles + tile * 4 + 2)
    inside = (at < last) & (expert <= E)
    pairs = tl.load(order + tl.minimum(at, last - 1), mask=(expert <= E) & (at >= 0), other=0).to(tl.int32)
    return expert, pairs, inside
