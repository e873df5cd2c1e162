"""Parts that the attention kernels share: which keys a query sees, merging partial results.

Softmax is computed in base 2 (``attn_ops/kernels/softmax.py``): scores and every ``lse`` carry a factor log2(e).

NOTE [Partial results]: where a query's keys are split among programs, each of them writes a normalized output and the log2 of
its softmax denominator, ``lse``, to a float32 workspace: first all outputs, then all lse. A slot is what one program would have
computed alone. How many parts a slot has, and where their results lie, says a schedule where slots are many (``schedule.py``),
and where they are few each program works it out from the lengths (``shares.py``); the grid follows from shapes alone. Merging
goes in the order of the parts, whichever program does it, so results do not depend on timing.

NOTE [Last one merges]: with a schedule, and in ``extend``, every active program of a slot adds 1 to the slot's counter after
its partial result is written; the one that finds active - 1 there merges, then sets the counter back to 0. This is correct, for
* the barrier before the addition orders the writes of all threads of a program before the addition of its one thread,
* the addition is acquire-release at GPU scope, and releases are cumulative: whoever reads the last count sees all writes,
* the partial results are read past the L1 cache (``.cg``), which need not be coherent, or asynchronously after that addition,
  whose acquire holds for all later reads of the program behind a barrier,
* exactly one program of a slot sees active - 1, and all of them agree on ``active``.
The counters are zero before a launch and after it. They belong to one forward (``prepare`` makes them), so forwards on two
streams do not share them, and launches of one forward follow each other in stream order.

NOTE [Quantized caches]: codes are multiplied as they are, in the dtype of the queries, which holds each of them exactly; a
key's scale multiplies its scores, a value's scale its weights. Weights are rounded to the dtype of the queries, and in float16
a weight times a small scale could vanish: so values' scales are multiplied with ``unit``, a power of two near the largest
code, and the sums divided by it in the end. Decoding waits for the conversion of codes, which is shortest to float16: it
multiplies in float16 with bfloat16 queries too, brought to its range (``in_half``). There a weight times a scale could be too
large as well, since bfloat16 values can: so what scores are compared with is not the highest of them but of the scores plus
log2 of the values' scales times unit. Then weights times scales are about 1 at most, for values from 2**-36 to 2**90, and the
sum of the weights, by which they are divided in the end, fits in float32, since it is between 2**36 and 2**-90 for the highest
score. Smaller values are rounded at 2**-61; with larger ones results are infinite.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from quire.attn_ops.backends.triton import plan
from quire.attn_ops.backends.triton.waves import START, waves

#: Whether the kernels run in Triton's interpreter: read when this module is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
CUTS = tl.constexpr(len(plan.CUTS))
EXTRA = tl.constexpr(plan.EXTRA_PARTS)


@triton.jit
def first_key(pos, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Position of the first key that the query at ``pos`` sees."""
    first = pos * 0
    if WINDOW > 0:
        first = tl.maximum(first, pos - (WINDOW - 1))
    if CHUNK > 0:
        first = tl.maximum(first, pos // CHUNK * CHUNK)
    return first


@triton.jit
def merge_partials(partial, lse, first, stride, active, ROWS: tl.constexpr, ROWS_P2: tl.constexpr, DV: tl.constexpr,
                   DV_P2: tl.constexpr, STEP: tl.constexpr):
    """Merge the partial results of a slot's ROWS heads, number first + i * stride for split i (``first`` is 64-bit), STEP
    splits at a time: (ROWS_P2, DV_P2), normalized. With STEP 1 the next ones are loaded meanwhile, which pays where a split has
    many numbers."""
    rows = tl.arange(0, ROWS_P2)
    columns = tl.arange(0, DV_P2)
    highest = tl.full([ROWS_P2], float("-inf"), tl.float32)
    total = tl.zeros([ROWS_P2], tl.float32)
    merged = tl.zeros([ROWS_P2, DV_P2], tl.float32)
    if STEP == 1:
        for begin in range(0, active, 32):
            index = (first + (begin + tl.arange(0, 32))[:, None] * stride) * ROWS + rows[None, :]
            live = (begin + tl.arange(0, 32) < active)[:, None] & (rows < ROWS)[None, :]
            part_lse = tl.load(lse + index, mask=live, other=float("-inf"), cache_modifier=".cg")
            highest, total, _, _ = _weigh(highest, total, part_lse)
        highest = tl.where(highest == float("-inf"), 0.0, highest)  # rows of padding
        for split in tl.range(0, active, num_stages=4):
            index = (first + split * stride) * ROWS + rows
            part = tl.load(partial + index[:, None] * DV + columns[None, :],
                           mask=(rows < ROWS)[:, None] & (columns < DV)[None, :], other=0.0, cache_modifier=".cg")
            part_lse = tl.load(lse + index, mask=rows < ROWS, other=float("-inf"), cache_modifier=".cg")
            merged += part * tl.exp2(part_lse - highest)[:, None]
    else:
        for begin in range(0, active, STEP):
            split = begin + tl.arange(0, STEP)
            index = (first + split[:, None] * stride) * ROWS + rows[None, :]
            live = (split < active)[:, None] & (rows < ROWS)[None, :]
            part = tl.load(partial + index[:, :, None] * DV + columns[None, None, :],
                           mask=live[:, :, None] & (columns < DV)[None, None, :], other=0.0, cache_modifier=".cg")
            part_lse = tl.load(lse + index, mask=live, other=float("-inf"), cache_modifier=".cg")
            highest, total, weight, shrink = _weigh(highest, total, part_lse)
            merged = merged * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
    return merged / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _weigh(highest, total, part_lse):
    """More log-sum-exps (STEP, ROWS) of each row: the highest and the sum of all weights so far; the weights of these, and the
    factor of earlier ones."""
    new_highest = tl.maximum(highest, tl.max(part_lse, 0))
    safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # rows of padding
    weight = tl.exp2(part_lse - safe[None, :])
    shrink = tl.exp2(highest - safe)
    return new_highest, total * shrink + tl.sum(weight, 0), weight, shrink


@triton.jit
def merge_rows(partial, lse, first, step, active, live, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_P2: tl.constexpr):
    """Merge ``active`` partial results of ROWS rows, number i of them at index first + i * step: (ROWS, DIM_P2), and their
    log-sum-exp of base 2 (ROWS,). See NOTE [Partial results]."""
    columns = tl.arange(0, DIM_P2)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_P2], tl.float32)
    for number in range(0, active):
        index = first + step * number
        part_lse = tl.load(lse + index, mask=live, other=0.0, cache_modifier=".cg")
        part = tl.load(partial + index[:, None] * DIM + columns[None, :], mask=live[:, None] & (columns < DIM)[None, :],
                       other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, part_lse)
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink = tl.exp2(highest - safe)
        weight = tl.exp2(part_lse - safe)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + part * weight[:, None]
        highest = new_highest
    return acc / total[:, None], highest + tl.log2(total)


@triton.jit
def scheduled_part(schedule, num_reqs, items, number, heads, places):
    """(item, split, extra parts of the items before it, keys per part) that program ``number`` of a block of heads serves, in
    the cut that takes ``heads`` blocks the least time where ``places`` programs run at once (0: the first cut); item -1: no
    part. See ``schedule.py``."""
    cut = 0
    size = tl.load(schedule)
    if places > 0:
        least = cut_time(schedule, 0, heads, places)
        for n in tl.static_range(1, CUTS):
            time = cut_time(schedule, n, heads, places)
            cut = tl.where(time < least, n, cut)
            size = tl.where(time < least, tl.load(schedule + 3 * n), size)
            least = tl.minimum(time, least)
    rest = schedule + 3 * CUTS + cut * (num_reqs + EXTRA)
    extra = number - items
    item = number
    if extra >= 0:
        item = tl.load(rest + num_reqs + extra)
    before = tl.load(rest + tl.maximum(item, 0))
    return item, tl.where(extra >= 0, extra - before + 1, 0), before, size


@triton.jit
def cut_time(schedule, cut, heads, places):
    parts = tl.maximum(tl.load(schedule + 3 * cut + 1), 1)
    keys = tl.load(schedule + 3 * cut + 2)
    return waves(parts * heads, places) * (keys / parts + START)


@triton.jit
def arrived_last(counter, active):
    """Count this program's partial result as written; True for the last program of a slot. See NOTE [Last one merges]."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == active - 1
    if last:
        tl.store(counter, 0)
    return last
