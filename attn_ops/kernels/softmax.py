"""Softmax in base 2 (``exp2`` is one instruction): scores carry a factor log2(e)."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def logits(scores, scale, softcap):
    """q.k -> base-2 logits, scaled and capped. ``softcap``: a number or None."""
    if softcap is not None:
        # tanh(x) = 1 - 2 / (e^2x + 1); e^2x may overflow to inf, where the limit is right.
        power = tl.exp2(scores * (scale / softcap * (2 * LOG2E)))
        return (1 - 2 / (power + 1)) * (softcap * LOG2E)
    else:
        return scores * (scale * LOG2E)


__all__ = ["LN2", "LOG2E", "logits"]
