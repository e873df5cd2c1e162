"""Kernels of ``attn_ops/ops/routing.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous

#: Below the key of every number.
DEAD = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def ordered(numbers, lanes, BLOCK: tl.constexpr):
    """A 64-bit key of each number (BLOCK,), float32, with its index: its rank above, and below, reversed, the index. NaN is the
    largest."""
    rank = tl.where(numbers == 0.0, 0.0, numbers).to(tl.int32, bitcast=True)  # zeros of either sign are equals
    # Float bits order as the numbers do once the lower 31 are flipped where negative.
    rank = tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank)
    rank = tl.where(numbers != numbers, 0x7FFFFFFF, rank)
    return (rank.to(tl.int64) << 32) + (BLOCK - lanes).to(tl.int64)


@triton.jit
def topk_kernel(x, values, indices, E, stride, K: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr):
    """The K largest of row ``program_id``: the largest key is taken K times."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_E)
    found = tl.load(x + row * stride + lanes, mask=lanes < E, other=0.0).to(tl.float32)
    let_next_start(PDL)
    key = tl.where(lanes < E, ordered(found, lanes, BLOCK_E), DEAD)
    for i in tl.static_range(K):
        index = BLOCK_E - (tl.max(key, 0) & 0xFFFFFFFF)
        mine = lanes == index
        tl.store(indices + row * K + i, index)
        tl.store(values + row * K + i, tl.sum(tl.where(mine, found, 0.0), 0).to(values.dtype.element_ty))
        key = tl.where(mine, DEAD, key)


@triton.jit
def route_kernel(logits, bias, weights, ids, stride, eps, E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr,
                 NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
                 BLOCK_E: tl.constexpr, PDL: tl.constexpr):
    """The experts of the token ``program_id`` and their weights; arguments as of ``route_rows_eager``."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_E)
    live = lanes < E
    x = tl.load(logits + row * stride + lanes, mask=live, other=float("-inf")).to(tl.float32)
    let_next_start(PDL)
    if SIGMOID:
        score = tl.div_rn(1.0, 1.0 + tl.exp(-x))
        choice = score
        if bias is not None:
            choice += tl.load(bias + lanes, mask=live, other=0.0).to(tl.float32)
    else:
        choice = x
        power = tl.where(live, tl.exp(x - tl.max(x, 0)), 0.0)
        score = tl.div_rn(power, tl.sum(power, 0))
    key = tl.where(live, ordered(choice, lanes, BLOCK_E), DEAD)
    if GROUPS > 1:
        GROUPS_P2: tl.constexpr = next_power_of_2(GROUPS)
        places = tl.arange(0, GROUPS_P2)
        group = lanes // (E // GROUPS)
        best = tl.zeros((GROUPS_P2,), tl.float32)
        for g in tl.static_range(GROUPS):
            own = tl.where(group == g, key, DEAD)
            total = 0.0
            for _ in tl.static_range(GROUP_BEST):
                mine = lanes == BLOCK_E - (tl.max(own, 0) & 0xFFFFFFFF)
                total += tl.sum(tl.where(mine, choice, 0.0), 0)
                own = tl.where(mine, DEAD, own)
            best = tl.where(places == g, total, best)
        group_key = tl.where(places < GROUPS, ordered(best, places, GROUPS_P2), DEAD)
        allowed = lanes < 0
        for _ in tl.static_range(TOP_GROUPS):
            chosen = GROUPS_P2 - (tl.max(group_key, 0) & 0xFFFFFFFF)
            allowed = allowed | (group == chosen)
            group_key = tl.where(places == chosen, DEAD, group_key)
        key = tl.where(allowed & live, key, DEAD)
    order = tl.full((BLOCK_E,), -1, tl.int32)
    for i in tl.static_range(K):
        mine = lanes == BLOCK_E - (tl.max(key, 0) & 0xFFFFFFFF)
        order = tl.where(mine, i, order)
        key = tl.where(mine, DEAD, key)
    taken = order >= 0
    if NORMALIZE:
        score = tl.div_rn(score, tl.sum(tl.where(taken, score, 0.0), 0) + eps)
    tl.store(weights + row * K + order, score, mask=taken)
    tl.store(ids + row * K + order, lanes.to(tl.int64), mask=taken)
