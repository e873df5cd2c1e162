"""The largest scores of each row: as ``torch.topk`` without the order, and of equal scores the first.

Scores are integers that order as float32 numbers do (``order_key``). A sample of the row tells between which two numbers the
last chosen score lies, with a margin of four standard deviations. One pass over the row then lists the positions of all larger
scores, and copies those in between, the candidates, a few percent of the row. Bisection among the candidates ends at the last
chosen score. Where the sample was wrong, all scores are candidates: slower, never another choice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import launch

SAMPLE, BLOCK, NEAR = 2048, 4096, 2048  # scores of a sample, and of a step through the row and through its candidates
#: Leading bits of a score that the sample's bounds have, and the others.
SAMPLED_BITS, OPEN_BITS = tl.constexpr(20), tl.constexpr(2**12 - 1)
LOWEST = tl.constexpr(-(2**31))  # below every score
HIGHEST = tl.constexpr(2**31 - 1)  # above every score


@triton.jit
def order_key(scores):
    """int32 numbers that order as float32 ``scores`` do. NaN is above all; sums that begin at 0 are never -0."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(scores != scores, 2**31 - 2, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def sampled_bounds(row, length, picked, SAMPLE: tl.constexpr):
    """(low, high), int32: probably fewer than ``picked`` of the row's scores are above high, and at least as many are low or
    more."""
    step = tl.cdiv(length, SAMPLE)
    number = tl.arange(0, SAMPLE)
    at = number * step + ((number * 40503) >> 4) % step  # one of each ``step`` scores, not always the same
    score = tl.load(row + at, mask=at < length, other=LOWEST)
    taken = tl.sum((at < length).to(tl.int32), 0)
    rank = picked.to(tl.float32) * taken.to(tl.float32) / length.to(tl.float32)
    margin = 4.0 * tl.sqrt(rank) + 2.0
    above = (rank - margin).to(tl.int32)
    below = (rank + margin).to(tl.int32) + 1
    count = tl.sum((score >= 0).to(tl.int32), 0)
    low = tl.where(count >= below, 0, LOWEST)
    high = tl.where(count >= above, 0, LOWEST)
    for place in range(1, SAMPLED_BITS):
        bit = 1 << (31 - place)
        both = tl.sum((score >= (low | bit)).to(tl.int32) + ((score >= (high | bit)).to(tl.int32) << 16), 0)
        low = tl.where((both & 0xFFFF) >= below, low | bit, low)
        high = tl.where((both >> 16) >= above, high | bit, high)
    return low, high | OPEN_BITS


@triton.jit
def pairs_of(near, begin, length, BLOCK: tl.constexpr):
    """(scores, positions) of BLOCK of the ``length`` candidates, from number ``begin`` on; scores of LOWEST behind them."""
    at = begin + tl.arange(0, BLOCK)
    pair = tl.load(near + at, mask=at < length, other=-(2**63))
    return (pair >> 32).to(tl.int32), pair.to(tl.int32)


@triton.jit
def count_from(near, length, threshold, BLOCK: tl.constexpr):
    """How many of the ``length`` candidates have a score of ``threshold`` or more."""
    found = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, length, BLOCK):
        score, _ = pairs_of(near, begin, length, BLOCK)
        found += (score >= threshold).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit(do_not_specialize=["width", "picked", "limit"])
def select_kernel(scores, lens, near, listed, width, picked, limit, SAMPLE: tl.constexpr, BLOCK: tl.constexpr,
                  NEAR: tl.constexpr):
    """Program (token, head): positions (T, H, picked) int32 of the ``picked`` largest of a row's scores (T, H, width) int32.
    The row has lens (T,) scores; of at most ``limit`` nothing is written. near: (T, H, width) int64, for the candidates:
    a score, and in the lower half its position."""
    token = tl.program_id(0)
    length = tl.load(lens + token)
    if length <= limit:
        return
    index = token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    row = scores + index * width
    near += index * width
    listed += index * picked
    low, high = sampled_bounds(row, length, picked, SAMPLE)
    winners = length * 0
    candidates = length * 0
    attempts = length * 0
    while attempts < 2:
        winners = length * 0
        candidates = length * 0
        for begin in tl.range(0, length, BLOCK, num_stages=3):
            at = begin + tl.arange(0, BLOCK)
            live = at < length
            score = tl.load(row + at, mask=live, other=LOWEST)
            wins = live & (score > high)
            between = live & (score >= low) & (score <= high)
            both = wins.to(tl.int32) + (between.to(tl.int32) << 16)
            rank = tl.cumsum(both, 0) - both
            place = winners + (rank & 0xFFFF)
            tl.store(listed + place, at, mask=wins & (place < picked))
            tl.store(near + candidates + (rank >> 16), (score.to(tl.int64) << 32) | at, mask=between)
            added = tl.sum(both, 0)
            winners += added & 0xFFFF
            candidates += added >> 16
        attempts += 1
        if (winners <= picked) & (winners + candidates >= picked):
            attempts = length * 0 + 2
        else:
            low = tl.where(winners >= 0, LOWEST, low)
            high = tl.where(winners >= 0, HIGHEST, high)
    tl.debug_barrier()  # candidates are read by other threads than wrote them

    # ``from_low`` candidates are low or more, at least as many as are needed; ``from_top`` are top or more, which is too few.
    need = picked - winners
    low = tl.maximum(low, LOWEST + 1)
    top = tl.minimum(high, HIGHEST - 1) + 1
    from_low = candidates
    from_top = candidates * 0
    while (low + 1 < top) & (from_low != need):
        middle = (low & top) + ((low ^ top) >> 1)  # their mean; the sum may overflow
        count = count_from(near, candidates, middle, NEAR)
        if count >= need:
            low = middle
            from_low = count
        else:
            top = middle
            from_top = count
    equal = tl.where(from_low == need, need, need - from_top)  # that many equal to low, the first, are chosen
    above = winners
    equals = candidates * 0
    for begin in range(0, candidates, NEAR):
        score, position = pairs_of(near, begin, candidates, NEAR)
        both = (score > low).to(tl.int32) + ((score == low).to(tl.int32) << 16)
        rank = tl.cumsum(both, 0) - both
        tl.store(listed + above + (rank & 0xFFFF), position, mask=score > low)
        place = equals + (rank >> 16)
        tl.store(listed + picked - 1 - place, position, mask=(score == low) & (place < equal))  # from the end
        added = tl.sum(both, 0)
        above += added & 0xFFFF
        equals += added >> 16


def largest(scores: torch.Tensor, lens: torch.Tensor, picked: int, limit: int) -> torch.Tensor:
    """Positions (T, H, picked) int32, in no order, of the largest of ``scores`` (T, H, W) int32, of ``order_key``. Row t has
    lens (T,) int32 of them. Of rows of at most ``limit`` scores, which is at least ``picked``, memory may hold anything."""
    tokens, heads, width = scores.shape
    listed = torch.empty(tokens, heads, picked, dtype=torch.int32, device=scores.device)
    near = torch.empty_like(scores, dtype=torch.int64)
    fits = host.next_power_of_2(width)
    launch(select_kernel, (tokens, heads), scores, lens, near, listed, width, picked, limit, min(SAMPLE, fits),
           min(BLOCK, fits), min(NEAR, fits), num_warps=16)
    return listed
