"""The largest scores of each row: as ``torch.topk`` without the order, and of equal scores the first.

Scores are integers that order as float32 numbers do (``order_key``). A sample of the row tells between which two numbers the
last chosen score lies, with a margin of four standard deviations. A pass over the row counts the larger scores and those in
between, the candidates, a few percent of the row; where the sample was wrong, all are candidates: slower, never another choice.
A second pass lists the positions of the larger ones and copies the candidates, with their positions, so that no two are equal.
Bisection among them ends at the last chosen one.

A prefix sum over a program's threads costs many instructions, so there is one for each list: each thread has places of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import launch

SAMPLE, ROWS = 2048, 512  # scores of a sample; threads of a program
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
def next_scores(row, begin, length, ROWS: tl.constexpr):
    """ROWS scores from number ``begin`` on, one for each thread; LOWEST behind the ``length`` scores."""
    at = begin + tl.arange(0, ROWS)
    return tl.load(row + at, mask=at < length, other=LOWEST)


@triton.jit
def put(score, begin, low, high, listed, near, place, near_place, ROWS: tl.constexpr):
    """List each thread's score, or copy it to the candidates, if it is one of them; returns the next places."""
    at = begin + tl.arange(0, ROWS)
    win = score > high
    between = (score >= low) & (score <= high)
    tl.store(listed + place, at, mask=win)
    tl.store(near + near_place, (score.to(tl.int64) << 32) | (0x7FFFFFFF - at), mask=between)
    return place + win.to(tl.int32), near_place + between.to(tl.int32)


@triton.jit
def count_from(near, length, threshold, ROWS: tl.constexpr):
    """How many of the ``length`` candidates are ``threshold`` or more."""
    found = tl.zeros([ROWS], tl.int32)
    for begin in range(0, length, ROWS):
        at = begin + tl.arange(0, ROWS)
        found += ((tl.load(near + at, mask=at < length, other=0) >= threshold) & (at < length)).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit(do_not_specialize=["width", "picked", "limit"])
def select_kernel(scores, lens, near, listed, width, picked, limit, SAMPLE: tl.constexpr, ROWS: tl.constexpr):
    """Program (token, head): positions (T, H, picked) int32 of the ``picked`` largest of a row's scores (T, H, width) int32.
    The row has lens (T,) scores; of at most ``limit`` nothing is written. near: (T, H, width) int64, for the candidates: a
    score, and in the lower half 2**31 - 1 less its position, as of equal scores the first is more."""
    token = tl.program_id(0)
    length = tl.load(lens + token)
    if length <= limit:
        return
    index = token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    row = scores + index * width
    near += index * width
    listed += index * picked
    low, high = sampled_bounds(row, length, picked, SAMPLE)
    wins = tl.zeros([ROWS], tl.int32)  # of each thread
    nears = tl.zeros([ROWS], tl.int32)
    winners = length * 0
    candidates = length * 0
    attempts = length * 0
    while (winners + candidates < picked) & (attempts < 2):
        attempts += 1
        low = tl.maximum(low, LOWEST + 1)
        wins = tl.zeros([ROWS], tl.int32)
        nears = tl.zeros([ROWS], tl.int32)
        for begin in range(0, length, 8 * ROWS):
            for part in tl.static_range(8):
                score = next_scores(row, begin + part * ROWS, length, ROWS)
                wins += (score > high).to(tl.int32)
                nears += ((score >= low) & (score <= high)).to(tl.int32)
        winners = tl.sum(wins, 0)
        candidates = tl.sum(nears, 0)
        if (winners > picked) | (winners + candidates < picked):
            winners = length * 0
            candidates = length * 0
            low = tl.where(length > 0, LOWEST, low)
            high = tl.where(length > 0, HIGHEST, high)
    place = tl.cumsum(wins, 0) - wins
    near_place = tl.cumsum(nears, 0) - nears
    for begin in range(0, length, 4 * ROWS):  # four loads, then their stores, which loads do not pass
        score_0 = next_scores(row, begin, length, ROWS)
        score_1 = next_scores(row, begin + ROWS, length, ROWS)
        score_2 = next_scores(row, begin + 2 * ROWS, length, ROWS)
        score_3 = next_scores(row, begin + 3 * ROWS, length, ROWS)
        place, near_place = put(score_0, begin, low, high, listed, near, place, near_place, ROWS)
        place, near_place = put(score_1, begin + ROWS, low, high, listed, near, place, near_place, ROWS)
        place, near_place = put(score_2, begin + 2 * ROWS, low, high, listed, near, place, near_place, ROWS)
        place, near_place = put(score_3, begin + 3 * ROWS, low, high, listed, near, place, near_place, ROWS)
    tl.debug_barrier()  # candidates are read by other threads than wrote them

    need = picked - winners
    bottom = low.to(tl.int64) << 32  # ``enough`` candidates are that or more, at least as many as are needed
    top = (high.to(tl.int64) << 32) + 0xFFFFFFFF  # fewer than are needed, or none, are that or more
    enough = candidates
    while (enough != need) & (bottom + 1 < top):
        middle = (bottom & top) + ((bottom ^ top) >> 1)  # their mean; the sum may overflow
        count = count_from(near, candidates, middle, ROWS)
        if count >= need:
            bottom = middle
            enough = count
        else:
            top = middle
    chosen = tl.zeros([ROWS], tl.int32)
    for begin in range(0, candidates, ROWS):
        at = begin + tl.arange(0, ROWS)
        chosen += ((tl.load(near + at, mask=at < candidates, other=0) >= bottom) & (at < candidates)).to(tl.int32)
    place = winners + tl.cumsum(chosen, 0) - chosen
    for begin in range(0, candidates, ROWS):
        at = begin + tl.arange(0, ROWS)
        pair = tl.load(near + at, mask=at < candidates, other=0)
        win = (pair >= bottom) & (at < candidates)
        tl.store(listed + place, 0x7FFFFFFF - (pair & 0x7FFFFFFF).to(tl.int32), mask=win)
        place += win.to(tl.int32)


def largest(scores: torch.Tensor, lens: torch.Tensor, picked: int, limit: int) -> torch.Tensor:
    """Positions (T, H, picked) int32, in no order, of the largest of ``scores`` (T, H, W) int32, of ``order_key``.
    Row t has lens (T,) int32 of them. Of rows of at most ``limit`` scores, which is at least ``picked``, memory
    may hold anything."""
    tokens, heads, width = scores.shape
    listed = torch.empty(tokens, heads, picked, dtype=torch.int32, device=scores.device)
    near = torch.empty_like(scores, dtype=torch.int64)
    fits = host.next_power_of_2(width)
    launch(select_kernel, (tokens, heads), scores, lens, near, listed, width, picked, limit, min(SAMPLE, fits),
           min(ROWS, fits), num_warps=16)
    return listed
