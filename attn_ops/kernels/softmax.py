"""Softmax in base 2 (``exp2`` is one instruction): scores carry a factor log2(e)."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """By its series near 0, where 1 - 2 / (e^2x + 1) is a difference of like numbers."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1))


@triton.jit
def logits(scores, scale, softcap, PRECISE: tl.constexpr = False):
    """q.k -> base-2 logits, scaled and capped. ``softcap``: a number or None. PRECISE: to the last digits of float32 whatever
    the cap is; else the error grows with it, and is beneath rounding of half precision for caps of models."""
    if softcap is not None and PRECISE:
        return tanh(scores * (scale / softcap)) * (softcap * LOG2E)
    elif softcap is not None:
        # tanh(x) = 1 - 2 / (e^2x + 1); e^2x may overflow to inf, where the limit is right.
        power = tl.exp2(scores * (scale / softcap * (2 * LOG2E)))
        return (1 - 2 / (power + 1)) * (softcap * LOG2E)
    else:
        return scores * (scale * LOG2E)


@triton.jit
def softmax_step(highest, total, scores, factor, FOLD: tl.constexpr, MASKED: tl.constexpr, level=None):
    """More base-2 ``scores`` (M, N) in a running softmax: highest and total (M,), then the weights of the scores, and what the
    weights before shrink by (M,). MASKED: rows may have seen no key yet. FOLD: scores are still to be multiplied by ``factor``,
    which is positive: one multiply-add per score instead of a product and a difference. ``level``: (1, N), without FOLD: the
    highest is that of scores + level, so that weights times 2**level are at most 1."""
    if level is not None:
        new_highest = tl.maximum(highest, tl.max(scores + level, 1))
    elif FOLD:
        new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
    else:
        new_highest = tl.maximum(highest, tl.max(scores, 1))
    if MASKED:
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    else:
        safe = new_highest
    shrink = tl.exp2(highest - safe)
    if FOLD:
        weights = tl.exp2(scores * factor - safe[:, None])
    else:
        weights = tl.exp2(scores - safe[:, None])
    return new_highest, total * shrink + tl.sum(weights, 1), weights, shrink
