"""What the attention kernels share: which keys a query sees, one step of the running softmax, and merging partial
results.

Softmax is computed in base 2 (``exp2`` is one instruction): scores carry a factor log2(e), and so does every ``lse``.

NOTE [Partial results]: where a query's keys are divided among ``splits`` programs, each program that has keys (they
are numbered 0 to active - 1, without gaps) leaves a normalised output and the log2 of its softmax denominator,
``lse``, in a float32 workspace: first all outputs, then all lse. A slot is what one program would have computed
alone. The number of active splits follows from the lengths, on the device; the grid never does. Merging goes in the
order of the splits, whichever program does it, so results do not depend on timing.

NOTE [Last one merges]: with ATOMIC, every active program of a slot adds 1 to the slot's counter after its partial
result is written, and the one that finds active - 1 there merges, then sets the counter back to 0. This is right
because
* the barrier before the addition orders the writes of all threads of a program before the addition of its one thread,
* the addition is acquire-release at GPU scope, and releases are cumulative: who reads the last count sees all those
  writes,
* the partial results are read past the L1 cache (``.cg``), which need not be coherent,
* exactly one program of a slot sees active - 1, and all of them agree on ``active``.
The counters are zero before a launch and after it. They belong to one forward (``prepare`` makes them), so forwards
on two streams cannot meet in them, and launches of one forward follow each other in stream order.

NOTE [Quantised caches]: codes go into the products as they are, in the dtype of the queries, which holds each of them
exactly; a key's scale multiplies its scores, a value's scale its weights. Weights are rounded to the dtype of the
queries, and in float16 a weight times a small scale could vanish: so values' scales are multiplied with UNIT, a power
of two near the largest code, and the sums divided by it in the end.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

from quire.attn_ops.kv_quant import FORMATS

#: Kernels defined while this is set run in Triton's interpreter; it is read when this module is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

#: Counters a forward has. See NOTE [Last one merges]. More slots than this are never split.
NUM_COUNTERS = 16384

LOG2E = tl.constexpr(1.4426950408889634)


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
def find_row(query_start_loc, num_reqs, token):
    """Largest r with query_start_loc[r] <= token: the token's sequence, or num_reqs for a padding token."""
    low = num_reqs * 0
    high = num_reqs
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle) <= token:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def key_rows(cache, block_table_row, kv_head, offsets, live, PAGE: tl.constexpr, STRIDE_PAGE: tl.constexpr,
             STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr, MASKED: tl.constexpr):
    """Pointers to the keys (or values) of one head at positions ``offsets``. Offsets are 64-bit: caches exceed
    2**31."""
    if MASKED:
        page = tl.load(block_table_row + offsets // PAGE, mask=live, other=0)
    else:
        page = tl.load(block_table_row + offsets // PAGE)
    return (cache + page.to(tl.int64) * STRIDE_PAGE + (offsets % PAGE) * STRIDE_TOKEN
            + (kv_head * STRIDE_HEAD).to(tl.int64))


@triton.jit
def load_rows(rows, live, DIM: tl.constexpr, DIM_P2: tl.constexpr, MASKED: tl.constexpr):
    """The DIM elements at each of the row pointers, padded to DIM_P2 with zeros. Rows that are not live are zeros too:
    what lies there may be NaN, and 0 * NaN is NaN."""
    columns = tl.arange(0, DIM_P2)
    pointers = rows[:, None] + columns[None, :]
    if MASKED:
        if DIM == DIM_P2:
            return tl.load(pointers, mask=live[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=live[:, None] & (columns < DIM)[None, :], other=0.0)
    else:
        if DIM == DIM_P2:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)


@triton.jit
def load_scales(scale, block_table_row, kv_head, offsets, live, PAGE: tl.constexpr, STRIDE_PAGE: tl.constexpr,
                STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr, MASKED: tl.constexpr):
    """What the codes of one head at positions ``offsets`` are to be multiplied with; 0 where not live."""
    at = key_rows(scale, block_table_row, kv_head, offsets, live, PAGE, STRIDE_PAGE, STRIDE_TOKEN, STRIDE_HEAD, MASKED)
    if MASKED:
        return tl.load(at, mask=live, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def logits(scores, scale, softcap):
    """q.k -> the base-2 logits: scaled, capped. ``softcap`` is a number or None."""
    if softcap is not None:
        # tanh(x) = 1 - 2 / (e^2x + 1); e^2x may overflow to inf, where the limit is right.
        power = tl.exp2(scores * (scale / softcap * (2 * LOG2E)))
        return (1 - 2 / (power + 1)) * (softcap * LOG2E)
    else:
        return scores * (scale * LOG2E)


@triton.jit
def arrived_last(counter, active):
    """Say that this program's partial result is written; True for the last of a slot. See NOTE [Last one merges]."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == active - 1
    if last:
        tl.store(counter, 0)
    return last


def unit(dtype: torch.dtype) -> float:
    """UNIT of a cache's dtype. See NOTE [Quantised caches]."""
    return FORMATS[dtype].unit if dtype in FORMATS else 1.0


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the GPU; in the interpreter a few, so that tests divide keys too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def power_of_2(n: int, at_least: int = 1) -> int:
    """The smallest power of two >= n."""
    return max(at_least, 1 << (n - 1).bit_length())


def head_blocks(group: int, rows: int) -> tuple[int, int]:
    """Cut the query heads of one key head into blocks of at most ``rows``: (blocks, heads a block)."""
    blocks = -(-group // rows)
    return blocks, -(-group // blocks)


def new_counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


def counters_for(prepared: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The forward's zeroed counters, or fresh ones for a call on its own. See NOTE [Last one merges]."""
    return prepared[0] if prepared else new_counters(device)
