"""Which programs of a decode serve which keys, where slots are more than multiprocessors: made once per step.

From a slot per multiprocessor on, slots fill the GPU, and only a sequence that is much longer than the others should be split.
A grid of the same number of programs for every slot would launch as many as the block table has room for, and for short
sequences almost all of them in vain: on an H200 a step of Llama-3.1-8B at 128 x 1024 took 9.28 ms with room for 1155 tokens,
and 10.08 with room for 32768. So the grid has a program per slot, and for each block of heads at most 128 for the *extra*
parts, those beyond the first, of all items together. Items are tokens where T <= B, else sequences of one token. Parts and
slots: NOTE [Partial results].

How far keys are best cut depends on how many programs run at once (``waves.py``), which layers differ in. So a schedule has
some cuts, and a program takes the one that is best for its layer (``common.scheduled_part``). It is int32: for each cut the
keys per part, the number of parts and of all keys; then for each cut, for each item (B,) the number of extra parts of the items
before it, and for each extra part (EXTRA_PARTS,) its item, or -1. Part p of an item has partial result number item + (extra
parts before it) + p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.attn_ops.backends.triton.common import CUTS, EXTRA
from quire.attn_ops.backends.triton.plan import Batch, Plan, cut_sizes, schedule_size, scheduled_reqs, tuned
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import launch

MAX_REQS = 8192  # sequences; keys of more are not split


class ScheduleConfig(NamedTuple):
    """chunk: fewest keys per part of the first cut (``plan.cut_sizes``)."""

    chunk: int


def config() -> ScheduleConfig:
    return tuned(ScheduleConfig(2048))


def extra_parts(items: int) -> int:
    """Programs per head for extra parts: what few items can use."""
    return min(EXTRA.value, 3 * items)


def is_scheduled(items: int, heads: int, num_reqs: int, capacity: int, least: int) -> bool:
    """Whether a decode of ``items`` with ``heads`` programs each goes by the schedule: from ``least`` programs on, where there
    is one."""
    return least <= items * heads <= host.NUM_COUNTERS and is_made(items, num_reqs, capacity)


def is_made(items: int, num_reqs: int, capacity: int) -> bool:
    """Whether ``prepare`` makes a schedule: where the block table has room for more keys per row than a part has at least. One
    item never goes by it."""
    return items > 1 and num_reqs <= MAX_REQS and capacity > config().chunk


@triton.jit
def parts_of(keys, size):
    return tl.maximum((keys + size - 1) // size, 1)


@triton.jit(do_not_specialize=["num_reqs", "items", "most"])
def schedule_kernel(query_start_loc, seq_lens, counters, schedule, num_reqs, items, most, sizes, BITS: tl.constexpr,
                    BY_ROW: tl.constexpr, N: tl.constexpr, COUNTERS: tl.constexpr):
    """A program per cut; the first zeroes the counters too. Writes the schedule of ``items`` <= num_reqs <= N, with ``most`` <=
    EXTRA extra parts. sizes: fewest keys per part, by cut. BITS: enough for num_reqs."""
    cut = tl.program_id(0)
    if cut == 0:
        zeros = tl.zeros([2048], tl.int32)
        for begin in range(0, COUNTERS, 2048):
            tl.store(counters + begin + tl.arange(0, 2048), zeros)
    number = tl.arange(0, N)
    live = number < items
    row = number
    if BY_ROW:
        start = tl.load(query_start_loc + row, mask=live, other=0)
        live = live & (tl.load(query_start_loc + row + 1, mask=live, other=0) - start == 1)
    else:  # the largest row that starts at or before the token; num_reqs for padding
        row = number * 0
        for bit in tl.static_range(BITS):
            later = row + (1 << (BITS - 1 - bit))
            start = tl.load(query_start_loc + later, mask=live & (later <= num_reqs), other=2147483647)
            row = tl.where((later <= num_reqs) & (start <= number), later, row)
        live = live & (row < num_reqs)
    keys = tl.load(seq_lens + row, mask=live, other=0)
    size = cut * 0
    for n in tl.static_range(CUTS):
        size = tl.where(cut == n, sizes[n], size)
    more = parts_of(keys, size) - 1
    while tl.sum(more, 0) > most:
        size = size * 2
        more = parts_of(keys, size) - 1
    before = tl.cumsum(more, 0) - more
    tl.store(schedule + 3 * cut, size)
    tl.store(schedule + 3 * cut + 1, tl.sum(more + live, 0))
    tl.store(schedule + 3 * cut + 2, tl.sum(keys, 0))
    rest = schedule + 3 * CUTS + cut * (num_reqs + EXTRA)
    tl.store(rest + number, before, mask=number < num_reqs)
    extra = rest + num_reqs
    of_extra = tl.arange(0, EXTRA)
    tl.store(extra + of_extra, of_extra * 0 - 1)
    tl.debug_barrier()  # other threads write over them
    for part in range(0, tl.max(more, 0)):
        tl.store(extra + before + part, number, mask=part < more)


def prepare(slot_mapping: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
            page_size: int) -> list[torch.Tensor]:
    """[counters, zeroed: NOTE [Last one merges]; schedule]: the backend's ``prepare``."""
    num_tokens, num_reqs = slot_mapping.shape[0], seq_lens.shape[0]
    items, device = min(num_tokens, num_reqs), seq_lens.device
    size = schedule_size(num_reqs)
    if not is_made(items, num_reqs, block_table.shape[1] * page_size):
        return [host.new_counters(device), torch.zeros(size, dtype=torch.int32, device=device)]
    size_2 = host.next_power_of_2(num_reqs, 32)
    counters, schedule = (torch.empty(n, dtype=torch.int32, device=device) for n in (host.NUM_COUNTERS, size))
    launch(schedule_kernel, (CUTS.value,), query_start_loc, seq_lens, counters, schedule, num_reqs, items, extra_parts(items),
           cut_sizes(config().chunk), 0 if num_tokens > num_reqs else size_2.bit_length(), num_tokens > num_reqs, size_2,
           host.NUM_COUNTERS, num_warps=8)
    return [counters, schedule]


def buffers(plan: Plan, prepared: list[torch.Tensor], batch: Batch, page_size: int
            ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Workspace, counters and schedule of a launch: what ``prepare`` made for the forward, if it did; None if not needed.
    Raises ValueError for what it made for another number of sequences."""
    device = batch.seq_lens.device
    if not plan.scheduled:
        return (*plan.buffers(prepared, device), None)
    counters, schedule = prepared or prepare(*batch, page_size)
    num_reqs = batch.seq_lens.shape[0]
    if schedule.shape[0] != schedule_size(num_reqs):
        raise ValueError(f"prepared is of a batch of {scheduled_reqs(schedule.shape[0])} sequences, and this one has "
                         f"{num_reqs}; give the op what the backend's prepare makes of its tables")
    return torch.empty(plan.workspace, dtype=torch.float32, device=device), counters, schedule
