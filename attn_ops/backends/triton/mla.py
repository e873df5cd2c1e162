"""MLA on the latent cache (``attn_ops/mla.py``) in absorbed terms: all query heads read one key [c, k_rope] with the value c.

``kv_write`` stores the step's latent vectors, ``attend`` serves prefill, decode and mixed batches: a program has a *tile* of
BLOCK_M rows (BLOCK_Q consecutive tokens of one sequence x a block of the heads) and one of ``splits`` ranges of the tile's
keys, and loads each latent vector once, for scores and values. Partial results (float32: first all outputs, then all lse; by
token, head and split) are merged by a kernel of their own, with a program per token and head: a result is ``rank`` numbers
wide, too much for the last program of a tile alone, where many programs share a tile. Where tokens alone fill the GPU, the few
longest are split by a schedule (``schedule.py``), and the last program of a tile merges.

Of a quantized cache the latent vector and the rotary part of a token have a scale each: see NOTE [Quantized caches].

Tiles are numbered as in ``extend.py``. Every grid follows from shapes alone; lengths are read on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.attn_ops.backends.triton import schedule
from quire.attn_ops.backends.triton.common import arrived_last, extra_item, merge_partials, merge_rows
from quire.attn_ops.backends.triton.plan import Batch, Plan, planner, tuned
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.host import Caches, Strides
from quire.attn_ops.kernels.kv_quant import code_format, widen
from quire.attn_ops.kernels.kv_write import write
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.kernels.paged import find_block, find_row, load_rows
from quire.attn_ops.kernels.softmax import LOG2E, softmax_step

WORKSPACE = 1 << 25  # most float32 elements of partial results
ALONE = 0.75  # tiles per multiprocessor from which on they fill the GPU alone


class MlaConfig(NamedTuple):
    """Tuning parameters: rows and keys per tile, warps, loop stages, fewest keys per split, bound on splits.

    Keys are cut so that one wave of programs fills the GPU (the last field: parts per tile), unless a part would have more than
    ``chunk_max`` keys or fewer than ``chunk_min``.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    chunk_min: int
    max_splits: int
    chunk_max: int
    wave: int


class MlaTile(NamedTuple):
    """Constants of a launch. heads: of a query; blocks, per_block: blocks of heads and heads per block; block_q: tokens; split:
    whether keys are split; rank, rope, page, row, scale: sizes, tokens per page and strides of the cache and of its scales."""

    heads: int
    blocks: int
    per_block: int
    block_q: int
    block_m: int
    block_n: int
    stages: int
    split: bool
    rank: int
    rope: int
    page: int
    row: Strides
    scale: Strides


@triton.jit
def attend_keys(highest, total, acc, query, query_rope, pos, cache, c_scale, rope_scale, table_row, begin, stop, scale,
                TILE: tl.constexpr, MASKED: tl.constexpr):
    """The running softmax over keys begin..stop. Without MASKED all rows see them, and block_n divides their number."""
    RANK_P2: tl.constexpr = next_power_of_2(TILE.rank, 16)
    ROPE_P2: tl.constexpr = next_power_of_2(TILE.rope, 16)
    PRECISION: tl.constexpr = "ieee" if query.dtype == tl.float32 else "tf32"
    for block in tl.range(begin, stop, TILE.block_n, num_stages=TILE.stages):
        offsets = block + tl.arange(0, TILE.block_n)
        live = offsets < stop
        if MASKED:
            page = tl.load(table_row + offsets // TILE.page, mask=live, other=0)
        else:
            page = tl.load(table_row + offsets // TILE.page)
        start = cache + page.to(tl.int64) * TILE.row.page + offsets % TILE.page * TILE.row.token
        latent = load_rows(start, live, TILE.rank, RANK_P2, MASKED)
        rotary = load_rows(start + TILE.rank, live, TILE.rope, ROPE_P2, MASKED)
        if c_scale is not None:
            at = page.to(tl.int64) * TILE.scale.page + offsets % TILE.page * TILE.scale.token
            own = tl.load(c_scale + at, mask=live, other=0.0)
            own_rope = tl.load(rope_scale + at, mask=live, other=0.0)
            latent = widen(latent, query)
            rotary = widen(rotary, query)
            scores = tl.dot(query, tl.trans(latent), input_precision=PRECISION) * own[None, :]
            scores += tl.dot(query_rope, tl.trans(rotary), input_precision=PRECISION) * own_rope[None, :]
            scores *= scale * LOG2E
        else:
            scores = tl.dot(query, tl.trans(latent), input_precision=PRECISION)
            scores = tl.dot(query_rope, tl.trans(rotary), scores, input_precision=PRECISION) * (scale * LOG2E)
        if MASKED:
            scores = tl.where(live[None, :] & (offsets[None, :] <= pos[:, None]), scores, float("-inf"))
        highest, total, weights, shrink = softmax_step(highest, total, scores, None, False, MASKED)
        if c_scale is not None:
            UNIT: tl.constexpr = code_format(cache.dtype.element_ty)[3]
            weights *= (own * UNIT)[None, :]
        acc = tl.dot(weights.to(latent.dtype), latent, acc * shrink[:, None], input_precision=PRECISION)
    return highest, total, acc


@triton.jit
def row_of(query_start_loc, num_reqs, token):
    """``find_row``, at once where every sequence has one token."""
    row = tl.minimum(token, num_reqs - 1)
    if (tl.load(query_start_loc + row) != token) | (tl.load(query_start_loc + row + 1) != token + 1):
        row = find_row(query_start_loc, num_reqs, token)
    return row


@triton.jit
def split_size(num_keys, splits, chunk_min, chunk_max, one_wave, TILE: tl.constexpr):
    """Keys per split of a tile with ``num_keys``: a multiple of block_n."""
    size = tl.maximum(tl.cdiv(num_keys, splits), tl.minimum(tl.cdiv(num_keys, one_wave), chunk_max))
    return tl.cdiv(tl.maximum(size, chunk_min), TILE.block_n) * TILE.block_n


@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "splits", "chunk_min", "chunk_max", "one_wave", "stride_table"])
def attend_kernel(q, q_rope, cache, c_scale, rope_scale, batch, out, partial, counters, made, num_tokens, num_reqs, splits,
                  chunk_min, chunk_max, one_wave, scale, strides, stride_table, TILE: tl.constexpr):
    """One tile and one range of its keys. q (T, H, rank), q_rope (T, H, R): absorbed queries, with ``strides`` of tokens and
    heads of both; *_scale: None of a cache that is not quantized; batch: Batch; partial: None where keys are not split;
    counters, made: None, or counters and schedule of a batch of T <= B tokens, of which a tile has one."""
    BLOCK_M: tl.constexpr = TILE.block_m  # local constants: Triton takes no plain integer in a shape
    BLOCK_Q: tl.constexpr = TILE.block_q
    HEADS: tl.constexpr = TILE.per_block
    RANK: tl.constexpr = TILE.rank
    RANK_P2: tl.constexpr = next_power_of_2(TILE.rank, 16)
    ROPE_P2: tl.constexpr = next_power_of_2(TILE.rope, 16)
    split = 0
    before = 0
    if made is not None:
        head_block = tl.program_id(0) % TILE.blocks
        block = tl.program_id(0) // TILE.blocks
        extra = block - num_tokens
        if extra >= 0:
            block = extra_item(made, num_reqs, extra)
            if block < 0:
                return
        before = tl.load(made + 1 + block)
        if extra >= 0:
            split = extra - before + 1
    else:
        program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles have the most keys: start with them
        head_block = program % TILE.blocks
        block = program // TILE.blocks
        if TILE.split:
            split = block % splits
            block = block // splits
    if BLOCK_Q == 1:
        row = row_of(batch.query_start_loc, num_reqs, block)
        start = tl.load(batch.query_start_loc + row)
        first_token = block
    else:
        row, start, first_token = find_block(batch.query_start_loc, num_reqs, block, BLOCK_Q)
    end = tl.load(batch.query_start_loc + tl.minimum(row + 1, num_reqs))
    end = tl.where(row == num_reqs, num_tokens, end)
    if first_token >= end:
        return

    lines = tl.arange(0, BLOCK_M)
    token = first_token + lines // HEADS
    head = head_block * HEADS + lines % HEADS
    live = (lines < BLOCK_Q * HEADS) & (token < end) & (head < TILE.heads)
    columns = tl.arange(0, RANK_P2)
    out_row = token.to(tl.int64) * TILE.heads + head
    out_live = live[:, None] & (columns < RANK)[None, :]
    if row == num_reqs:
        if split == 0:
            tl.store(out + out_row[:, None] * RANK + columns[None, :], tl.zeros([BLOCK_M, RANK_P2], tl.float32),
                     mask=out_live)
        return

    offset = tl.load(batch.seq_lens + row) - end  # position of a token = its index + offset
    stop = tl.minimum(first_token + BLOCK_Q, end) + offset
    begin = stop * 0
    active = 1
    if TILE.split:
        if made is not None:
            size = tl.load(made)
            size = tl.cdiv(stop, tl.maximum(tl.cdiv(stop, size), 1))  # of equal lengths: the longest decides
            size = tl.maximum(tl.cdiv(size, TILE.block_n), 1) * TILE.block_n
        else:
            size = split_size(stop, splits, chunk_min, chunk_max, one_wave, TILE)
        active = tl.cdiv(stop, size)
        if split >= active:
            return
        begin = split * size
        stop = tl.minimum(begin + size, stop)
    all_see = begin + tl.maximum(tl.minimum(first_token + offset + 1, stop) - begin, 0) // TILE.block_n * TILE.block_n

    source = token.to(tl.int64)
    which = head.to(tl.int64)  # absorbed queries lie head by head: the stride is T * rank
    query = tl.load(q + (source * strides[0] + which * strides[1])[:, None] + columns[None, :], mask=out_live, other=0.0)
    columns_rope = tl.arange(0, ROPE_P2)
    query_rope = tl.load(q_rope + (source * strides[2] + which * strides[3])[:, None] + columns_rope[None, :],
                         mask=live[:, None] & (columns_rope < TILE.rope)[None, :], other=0.0)
    pos = token + offset
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RANK_P2], tl.float32)
    table_row = batch.block_table + row.to(tl.int64) * stride_table
    highest, total, acc = attend_keys(highest, total, acc, query, query_rope, pos, cache, c_scale, rope_scale, table_row, begin,
                                      all_see, scale, TILE, False)
    highest, total, acc = attend_keys(highest, total, acc, query, query_rope, pos, cache, c_scale, rope_scale, table_row,
                                      all_see, stop, scale, TILE, True)
    if c_scale is not None:
        UNIT: tl.constexpr = code_format(cache.dtype.element_ty)[3]
        acc *= 1.0 / UNIT
    seen = tl.where(total > 0, total, 1.0)
    acc = acc / seen[:, None]
    if TILE.split:
        if active > 1:
            if made is not None:
                index = (block + before).to(tl.int64) * TILE.heads + head
                lse = partial + (tl.num_programs(0) // TILE.blocks).to(tl.int64) * (TILE.heads * RANK)
                own = index + split * TILE.heads
            else:
                lse = partial + num_tokens.to(tl.int64) * splits * (TILE.heads * RANK)
                own = out_row * splits + split
            tl.store(partial + own[:, None] * RANK + columns[None, :], acc, mask=out_live)
            tl.store(lse + own, highest + tl.log2(seen), mask=live)
            if made is not None:
                if arrived_last(counters + block * TILE.blocks + head_block, active):
                    merged, _ = merge_rows(partial, lse, index, TILE.heads, active, live, BLOCK_M, RANK, RANK_P2)
                    tl.store(out + out_row[:, None] * RANK + columns[None, :], merged, mask=out_live)
        else:
            tl.store(out + out_row[:, None] * RANK + columns[None, :], acc, mask=out_live)
    else:
        tl.store(out + out_row[:, None] * RANK + columns[None, :], acc, mask=out_live)


@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "splits", "chunk_min", "chunk_max", "one_wave"])
def merge_kernel(batch, out, partial, num_tokens, num_reqs, splits, chunk_min, chunk_max, one_wave, TILE: tl.constexpr,
                 STEP: tl.constexpr):
    """Merge the partial results of one head of one token, STEP at a time, if its tile's keys were split."""
    RANK: tl.constexpr = TILE.rank
    RANK_P2: tl.constexpr = next_power_of_2(RANK, 16)
    BLOCK_Q: tl.constexpr = TILE.block_q
    token = tl.program_id(0)
    row = row_of(batch.query_start_loc, num_reqs, token)
    if row == num_reqs:
        return
    start = tl.load(batch.query_start_loc + row)
    end = tl.load(batch.query_start_loc + row + 1)
    stop = tl.minimum(start + (token - start) // BLOCK_Q * BLOCK_Q + BLOCK_Q, end) - end + tl.load(batch.seq_lens + row)
    active = tl.cdiv(stop, split_size(stop, splits, chunk_min, chunk_max, one_wave, TILE))
    if active <= 1:
        return
    columns = tl.arange(0, RANK_P2)
    out_row = token.to(tl.int64) * TILE.heads + tl.program_id(1)
    lse = partial + num_tokens.to(tl.int64) * splits * (TILE.heads * RANK)
    merged = merge_partials(partial, lse, out_row * splits, 1, active, 1, 1, RANK, RANK_P2, STEP)
    tl.store(out + out_row * RANK + columns[None, :], merged, mask=(columns < RANK)[None, :])


def config(rank: int, itemsize: int, heads: int, num_tokens: int, num_reqs: int, device: torch.device) -> MlaConfig:
    """The parameters. 32 latent vectors of 512+64 in bf16 are 36 KiB of shared memory. Page numbers and then vectors are loaded
    ahead, so that three stages hold one such block in flight and five hold two; compiled for an H200, 64 rows take 145 of its
    227 KiB, and 16 rows less than half of it: one or two programs fit on a multiprocessor. Of codes, 64 rows spill a twentieth
    of the loop."""
    sms = host.num_sms(device)
    if itemsize == 4:
        block_m, block_n, warps, stages = 16, 16, 8, 1
    elif num_tokens > num_reqs or heads > 32:  # 64 rows are what Hopper's matrix unit takes at a time
        block_m, block_n, warps, stages = 64, 32, 8, 3
    else:
        block_m, block_n, warps, stages = host.next_power_of_2(heads, 16), 32, 4, 5
    tiles = num_tokens * -(-heads // block_m)
    if itemsize == 2 and block_m <= 32 and tiles >= ALONE * sms:  # a program per multiprocessor, with longer steps
        block_n, stages = 64, 2
    wave = max(1, min(128, (1 if block_m > 32 else 2) * sms // tiles))
    return tuned(MlaConfig(block_m, block_n, warps, stages, 64, 128, 2048, wave))


@planner
def _plan(num_tokens: int, num_reqs: int, heads: int, rank: int, dtype: torch.dtype, cache_shape: torch.Size,
          cache_strides: tuple[int, ...], scale_strides: tuple[int, ...], table_width: int, device: torch.device) -> Plan:
    params = config(rank, dtype.itemsize, heads, num_tokens, num_reqs, device)
    blocks, per_block = host.head_blocks(heads, params.block_m)
    block_q = params.block_m // per_block
    tiles = num_tokens if block_q == 1 else num_tokens // block_q + num_reqs + 1
    page = cache_shape[1]
    room = WORKSPACE // (num_tokens * heads * (rank + 1))
    capacity = table_width * page
    extra = schedule.extra_parts(num_tokens)
    scheduled = (block_q == 1 and num_tokens <= num_reqs
                 and schedule.is_scheduled(num_tokens, blocks, num_reqs, capacity, int(ALONE * host.num_sms(device)))
                 and (num_tokens + extra) * heads * (rank + 1) <= WORKSPACE)
    splits = max(1, min(params.max_splits, max(params.wave, -(-capacity // params.chunk_max)), -(-capacity // params.chunk_min),
                        room, 8192 // (tiles * blocks)))
    tile = MlaTile(heads, blocks, per_block, block_q, params.block_m, params.block_n, params.stages, scheduled or splits > 1,
                   rank, cache_shape[3] - rank, page, Strides(*cache_strides[:3]), Strides(*scale_strides))
    if scheduled:
        return Plan(((num_tokens + extra) * blocks,), params.warps, 1, params.chunk_min,
                    (num_tokens + extra) * heads * (rank + 1), (tile,), params.chunk_max, params.wave, num_tokens, True)
    return Plan((tiles * blocks * splits,), params.warps, splits, params.chunk_min,
                num_tokens * heads * splits * (rank + 1) if splits > 1 else 0, (tile,), params.chunk_max, params.wave)


def mla(q: torch.Tensor, q_rope: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, batch: Batch,
        prepared: list[torch.Tensor], scale: float, c_scale: torch.Tensor | None = None,
        rope_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Store c (T, rank) and k_rope (T, R) in the cache, then attend the absorbed queries q (T, H, rank), q_rope (T, H, R):
    (T, H, rank), zeros for padding tokens."""
    (num_tokens, heads, rank), num_reqs, device = q.shape, batch.seq_lens.shape[0], q.device
    out = q.new_empty(num_tokens, heads, rank)
    plan = _plan(num_tokens, num_reqs, heads, rank, q.dtype, cache.shape, cache.stride(),
                 (0, 0, 0) if c_scale is None else c_scale.stride(), batch.block_table.shape[1], device)
    write(c[:, None], k_rope[:, None], Caches(cache[..., :rank], cache[..., rank:], c_scale, rope_scale), batch.slot_mapping)
    if plan.scheduled:
        partial, counters, made = schedule.buffers(plan, prepared, batch, cache.shape[1])
    else:  # a kernel merges
        partial = torch.empty(plan.workspace, dtype=torch.float32, device=device) if plan.workspace else None
        counters = made = None
    sizes = (num_tokens, num_reqs, plan.splits, plan.chunk_min, plan.chunk_max, plan.wave)
    launch(attend_kernel, plan.grid, q, q_rope, cache, c_scale, rope_scale, batch, out, partial, counters, made, *sizes, scale,
           (*q.stride()[:2], *q_rope.stride()[:2]), batch.block_table.stride(0), *plan.constants, num_warps=plan.warps)
    if plan.splits > 1:
        step = max(1, min(16, 8192 // host.next_power_of_2(rank)))
        launch(merge_kernel, (num_tokens, heads), batch, out, partial, *sizes, *plan.constants, step, num_warps=4)
    return out
