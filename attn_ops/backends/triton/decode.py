"""Split-KV decoding: every query token on its own, its keys split among several programs.

A program serves one token and one key head, with all the query heads that read it (or a block of them), and one range of the
token's cached keys. The grid follows from shapes alone. Two modes:

* by token (T <= B): items are tokens. Fast when every sequence has one token, and correct for any ragged batch. The step's own
  keys are read from k and v, and program 0 of each token writes them to the cache, so that attention neither waits for the
  write nor races with it: no position >= seq_len - query_len is read from the cache.
* by row (T > B): items are sequences; those without exactly one query token are left to ``extend``. The keys are in
  the cache already (``kv_write``), k and v are None.

NOTE [How far keys are split]: on an H200, with 32/8 heads x 128 in bfloat16, a program alone took about 4 us and 28 ns
per key (benchmarks/results/h200_triton_decode_sweep*.json). Two to four programs fit on a multiprocessor (``python -m
benchmarks.hopper``), and two or three read as fast as memory gives. So where slots are fewer than that, a launch has one wave
of programs, ``config.wave``, and sequences share them (``shares.py``); a kernel merges the parts, a program per query head:
with a program per slot 1 x 8192 took 17.5 us for one head of 128 and 25.9 for 16 (h200_attention_grid.json). From a slot per
multiprocessor on, slots alone fill the GPU, and sequences longer than 2048 keys are split by a schedule (``schedule.py``),
with windows into parts of about as many. There a last wave that is not full is lost time (``waves.py``), so the steps of the
loop, of which fewer programs fit where they are longer, and the keys per part are chosen such that few places stay empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.attn_ops.backends.triton import schedule, shares
from quire.attn_ops.backends.triton.decode_kernel import decode_kernel
from quire.attn_ops.backends.triton.plan import Batch, Plan, Site, cut_sizes, planner, tuned
from quire.attn_ops.backends.triton.waves import time_of
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import CacheLayout, Caches, Rope, next_power_of_2
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES
from quire.attn_ops.ops.rope import PLAIN, RopeForm


class DecodeConfig(NamedTuple):
    """Tuning parameters. They change speed, never results beyond rounding.

    block_n: keys per step.  warps, stages: of the kernel and its loop.  chunk_min: contexts of no more keys are not split, and
    where slots fill the GPU a part has no fewer.  dot: tensor cores (the group is padded to 16 rows), else sums of products.
    wave: programs in all that few slots are cut into; 0: slots fill the GPU.  places: programs that run at once, where slots
    are as many as multiprocessors; 0: not known.  masked: whether loads of the loop leave out keys past the end; else they
    read the last one again, which takes fewer registers.
    """

    block_n: int
    warps: int
    stages: int
    chunk_min: int
    dot: bool
    wave: int
    places: int
    masked: bool


class DecodeTile(NamedTuple):
    """Constants of a launch.

    blocks, heads, rows: blocks of query heads per key head, heads per block, and the same padded.  by_row: the mode.  split:
    whether keys are split.  half: whether products are in float16 whatever the queries are, as codes are.  words: codes per
    word, or 0: see NOTE [Values by words].  masked: of DecodeConfig.  merge_rows, merge_step: heads and parts merged at a time.
    """

    blocks: int
    heads: int
    rows: int
    by_row: bool
    split: bool
    dot: bool
    half: bool
    words: int
    masked: bool
    block_n: int
    stages: int
    merge_rows: int
    merge_step: int


class InputStrides(NamedTuple):
    q_token: int
    q_head: int
    k_token: int
    k_head: int
    v_token: int
    v_head: int


#: Programs in half precision for whose registers a multiprocessor has room (``python -m benchmarks.hopper``), of padded head
#: dims up to 64, 128 and 256, by keys per step of the loop and heads (1, 2, 4, 8, 16).
REGISTERS = {64: {128: (5, 5, 5, 4, 5)}, 128: {64: (4, 4, 4, 4, 5), 128: (3,) * 5}, 256: {64: (3,) * 5}}
#: Keys per step and stages where slots fill the GPU, by the same dims.
STEPS = {64: ((128, 3), (128, 5)), 128: ((64, 3), (128, 3), (64, 5)), 256: ((64, 2),)}


def shared_bytes(block_n: int, stages: int, widest: int) -> int:
    """Shared memory of a program in half precision, at most: beside 9 KB the keys and values of the steps in flight, of which
    five stages have two, as page numbers are loaded ahead of keys."""
    return 4 * block_n * widest * max(1, (stages - 1) // 2) + 9216


def places(widest: int, heads: int, device: torch.device) -> dict[tuple[int, int], int]:
    """Programs that the GPU runs at once, by keys per step and stages, for half precision, padded head dims up to 256 and 16
    heads."""
    of_heads, dims = next_power_of_2(heads).bit_length() - 1, max(64, widest)
    return {(n, stages): host.num_sms(device) * max(1, min(
        REGISTERS[dims][n][of_heads], host.shared_memory(device) // shared_bytes(n, stages, widest)))
        for n, stages in STEPS[dims]}


def config(dim: int, dim_v: int, itemsize: int, heads: int, slots: int, device: torch.device, quantized: bool = False,
           rotary: bool = False, padded: bool = False) -> DecodeConfig:
    """The parameters for padded head dims, bytes per element of q, query heads per program, and slots (see NOTE [Partial
    results]). ``quantized``: whether the cache is.  rotary: whether the kernel rotates.  padded: whether the longer head dim
    is."""
    widest = max(dim, dim_v)
    # Half precision always uses the tensor cores: they pad a group to 16 rows, but sums of products are bound by arithmetic
    # long before memory, for a single head too. In float32 the dot costs as many operations as the sums.
    dot = itemsize == 2 or heads > 8
    if dot and itemsize == 2:
        block_n, warps, stages = (64 if widest <= 128 else 32), 4, 3
    elif dot:
        block_n, warps, stages = (32 if widest <= 128 else 16), 8, 1
    else:
        products = widest * next_power_of_2(heads)
        block_n = min(64, max(8192 // products, 16))
        warps, stages = (8 if block_n * products > 16384 else 4), 3
    # Measured on an H200 (benchmarks/attention_grid.py, h200_decode_shares*.json): two warps each for the fewest slots; a few
    # keys are not worth merging; with a slot or more per multiprocessor, splitting costs more than it balances.
    sms = host.num_sms(device)
    chunk = 2048 if slots >= sms else min(1024, next_power_of_2(max(512 * slots // sms, 64)))
    half, full = itemsize == 2 and not quantized, slots >= sms
    per_sm, fitting = 2, 0
    if itemsize == 2 and widest <= 128:  # in bytes, 128 keys of heads of 64 are 64 of heads of 128
        block_n = 128 if chunk >= 128 and (widest <= 64 or quantized) else 64
        warps = 2 if chunk == 64 and not quantized else 4
        # Of codes, few programs wait for arithmetic (h200_decode_quantized.json).
        stages = 2 if quantized else 3 if full else 5
        # Programs of heads of 128 fit three times for codes, if they do not rotate (benchmarks.hopper).
        if widest <= 64 or slots <= 8 or (quantized and not rotary):
            per_sm = 3
    elif itemsize == 2 and widest <= 256 and heads <= 16:
        # h200_decode_shares.json, h200_decode_shares_wide.json, h200_decode_waves.json, h200_decode_quantized_wide.json
        block_n, stages = (64, 2) if full or quantized else (32, 5)
        more = (32, 7) if padded else (64, 5)  # for few programs, of which each has more in flight
        if half and slots <= 8 and heads <= (8 if padded else 16) and shared_bytes(*more, widest) <= host.shared_memory(device):
            (block_n, stages), per_sm = more, 2 if padded else 1
    if half and full and widest <= 256 and heads <= 16:  # see NOTE [How far keys are split]
        alike = min(heads, 8) if padded else heads  # masks take the registers
        by_step = places(widest, alike, device)
        if (64, 5) in by_step:  # h200_decode_full_stages.json: instead of 128 keys, for many programs of many heads
            del by_step[(128, 3) if alike > 8 and slots > by_step[64, 3] else (64, 5)]
        block_n, stages = min(by_step, key=lambda step: time_of(slots, by_step[step], 1024))
        fitting = by_step[block_n, stages]
    # h200_decode_unmasked.json, h200_decode_shares.json, h200_decode_full.json
    masked = not quantized and (itemsize > 2 or (padded and widest == 128 if full else widest > 128))
    return tuned(DecodeConfig(block_n, warps, stages, chunk, dot, 0 if full else per_sm * sms, fitting, masked))


def num_parts(items: int, blocks: int, capacity: int, params: DecodeConfig) -> int:
    """Programs per block of heads, of ``blocks``, where there is no schedule: ``items`` if keys are not split. ``capacity``:
    number of keys that a row of the block table has room for."""
    if items > shares.ITEMS.value:
        return items
    most = items * -(-capacity // params.chunk_min)
    return max(items, min(most, params.wave // blocks) if params.wave else most)


def cut(slots: int, capacity: int, params: DecodeConfig) -> int:
    """Fewest keys per part of sequences that fill ``capacity``: of ``chunk_min`` and the other cuts of a schedule those that
    take the least time."""
    if not params.places or capacity <= params.chunk_min:
        return params.chunk_min

    def time(size: int) -> float:
        parts = -(-capacity // size)
        return time_of(slots * parts, params.places, capacity / parts)

    return min(cut_sizes(params.chunk_min), key=time)


@planner
def _plan(q_shape: torch.Size, dtype: torch.dtype, layout: CacheLayout, num_reqs: int, table_width: int, window: int | None,
          chunk: int | None, kv_dtype: torch.dtype, by_row: bool, rotary: bool, device: torch.device, v_offset: int
          ) -> Plan | None:
    num_tokens, heads, _ = q_shape
    itemsize, quantized = dtype.itemsize, kv_dtype in QUANTIZED_KV_DTYPES
    dim, dim_v = next_power_of_2(layout.dim, 16), next_power_of_2(layout.dim_v, 16)
    # The accumulators of all heads of a program stay in registers.
    blocks, per_block = host.head_blocks(heads // layout.heads, max(16, min(64, 16384 // (max(dim, dim_v) * itemsize))))
    items = num_reqs if by_row else num_tokens
    slots = items * layout.heads * blocks
    if not slots:
        return None
    padded = max(layout.dim, layout.dim_v) < max(dim, dim_v)
    params = config(dim, dim_v, itemsize, per_block, slots, device, quantized, rotary, padded)
    capacity = min([table_width * layout.page, *(n for n in (window, chunk) if n)])
    scheduled = not (window or chunk) and schedule.is_scheduled(items, layout.heads * blocks, num_reqs, capacity,
                                                                host.num_sms(device))
    if not scheduled:
        params = params._replace(chunk_min=cut(slots, capacity, params))
    parts = items + schedule.extra_parts(items) if scheduled else num_parts(items, layout.heads * blocks, capacity, params)
    if params.wave and parts > items:  # a kernel merges in any case: then parts may have as few keys as a step
        params = params._replace(chunk_min=min(params.chunk_min, params.block_n))
    programs = parts * layout.heads * blocks
    merge_rows = next_power_of_2(per_block)
    # See NOTE [Values by words]. From 64 rows on Triton 3.6 makes the four products Hopper's wgmma, and on an H200 with 71
    # heads per key head numbers were wrong (tests/gpu/test_triton_gpu.py); why is not known. By bytes they are right.
    half = quantized and params.dot and itemsize == 2
    words = 0
    if half and dim_v >= 64 and merge_rows <= 32:
        places = (layout.dim_v, v_offset, *layout.v)
        sizes = (4, 2) if dim_v >= 128 else (2,)
        words = next((n for n in sizes if not any(place % n for place in places)), 0)
    rows, split = next_power_of_2(per_block, 16 if params.dot else 1), programs > slots
    # Few of a schedule's slots have parts to merge; more at a time would cost all programs registers, and a fourth per
    # multiprocessor. From 1024 numbers per part on, one at a time is faster (h200_decode_merge.json).
    numbers = merge_rows * dim_v
    merge_step = min(16, 2048 // numbers) if scheduled and numbers < 1024 else 1
    tile = DecodeTile(blocks, per_block, rows, by_row, split, params.dot, half, words, bool(params.masked), params.block_n,
                      params.stages, merge_rows, merge_step)
    return Plan((programs,), params, parts, programs * per_block * (layout.dim_v + 1) if split else 0,
                (Site(heads, window or 0, chunk or 0), layout, tile), items, scheduled)


def decode(q: Tensor, k: Tensor | None, v: Tensor | None, caches: Caches, batch: Batch, sinks: Tensor | None,
           prepared: list[Tensor], out: Tensor, scale: float, window: int | None, softcap: float | None, chunk: int | None,
           by_row: bool, rope: tuple[Any, ...] | None = None, form: RopeForm = PLAIN) -> None:
    """Launch the kernel. Writes ``out`` (T, H, Dv): every token, or with ``by_row`` only those that are alone in their
    sequence. With k and v it also writes the caches and their scales. ``rope``: cos, sin (T, R or R/2), the norms' weights and
    eps, for q and k not yet rotated, of ``form``. The other arguments are the paged op's."""
    num_reqs, device, layout = batch.seq_lens.shape[0], q.device, host.cache_layout(caches)
    plan = _plan(q.shape, q.dtype, layout, num_reqs, batch.block_table.shape[1], window, chunk,
                 caches.k.dtype, by_row, rope is not None, device, caches.v.storage_offset() % 4)
    if plan is None:
        return
    partial = counters = made = None
    if plan.scheduled:
        partial, counters, made = schedule.buffers(plan, prepared, batch, layout.page)
    elif plan.workspace:
        partial = torch.empty(plan.workspace, dtype=torch.float32, device=device)
    merged = partial is not None and made is None
    pdl = host.use_pdl(device, 1)  # of the kernel that merges: its programs are small, whatever the step
    strides = InputStrides(*(n for x in (q, k, v) for n in ((0, 0) if x is None else x.stride()[:2])))
    params, sizes = plan.params, (num_reqs, plan.items, plan.splits, plan.params.chunk_min)
    launch(decode_kernel, plan.grid, q, k, v, None if rope is None else Rope.of(*rope), caches, batch, sinks, out, partial,
           counters, made, *sizes, params.places, scale, softcap, strides, batch.block_table.stride(0), *plan.constants,
           0 if rope is None else form.rotated(rope[0]), form, merged and pdl, pdl=host.use_pdl(device, q.shape[0]),
           num_warps=params.warps)
    if merged:
        # As many parts at a time as sequences of one length have, which few warps can hold.
        dim_v = next_power_of_2(layout.dim_v, 16)
        step = min(next_power_of_2(plan.splits // plan.items), 8192 // dim_v)
        launch(shares.merge_kernel, (plan.items, q.shape[1]), batch, out, partial, *sizes, *plan.constants, step, pdl=pdl,
               num_warps=max(1, min(4, step * dim_v // 1024)))
