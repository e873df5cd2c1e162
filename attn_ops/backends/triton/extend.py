"""Attention of several query tokens per sequence: prefill, chunked prefill, and the same over a long cached prefix.

A program serves up to BLOCK_M query rows of one sequence and one key head: BLOCK_Q consecutive tokens x the query heads that
read the key head, so that grouped heads fill a matrix tile. Tokens are cut at sequence boundaries: sequence r has the blocks
from query_start_loc[r] // BLOCK_Q + r on, which never overlap; T // BLOCK_Q + B + 1 blocks hold any batch of T tokens in B
sequences, padding tokens counted as one more. Programs without tokens return at once.

The step's keys are in the cache already (``write`` ran first), so keys come from one place only, and a sequence may read pages
that another one fills in this very step. The loop over keys has three stretches: keys that some rows do not see at the lower
end (window, chunk), keys that all rows see (no masks), and the causal end. Where the batch has few query tokens, keys are split
among programs too; see NOTE [Partial results] and NOTE [Last one merges].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.attn_ops.backends.triton.common import arrived_last, first_key, merge_rows
from quire.attn_ops.backends.triton.plan import Batch, Plan, Site, planner, tuned
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.host import CacheLayout, Caches
from quire.attn_ops.kernels.kv_quant import code_format, widen
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.kernels.paged import find_block, load_keys, load_scales
from quire.attn_ops.kernels.softmax import LOG2E, logits, softmax_step


class ExtendConfig(NamedTuple):
    """Tuning parameters: rows and keys per tile, warps, loop stages, fewest keys per split, bound on splits."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    chunk_min: int
    max_splits: int


class ExtendTile(NamedTuple):
    """Constants of a launch.

    blocks, heads: blocks of query heads per key head, heads per block.  skip_single: sequences with one query token are served
    elsewhere.  split: whether keys are split.  fold: whether the scale is positive and there is no softcap, so that the largest
    score stays the largest when scaled.  causal: else every query sees all keys of its sequence.
    """

    blocks: int
    heads: int
    skip_single: bool
    split: bool
    fold: bool
    causal: bool
    block_m: int
    block_n: int
    stages: int


@triton.jit
def attend(
    highest, total, acc, query, pos, caches, table_row, kv_head, begin, stop, scale, softcap, SITE: tl.constexpr,
    LAYOUT: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):
    """The running softmax over keys begin..stop. Without MASKED every row sees all of them, and TILE.block_n divides their
    number. See NOTE [Quantized caches]."""
    D: tl.constexpr = LAYOUT.dim
    DV: tl.constexpr = LAYOUT.dim_v
    PAGE: tl.constexpr = LAYOUT.page
    K: tl.constexpr = LAYOUT.k
    V: tl.constexpr = LAYOUT.v
    S: tl.constexpr = LAYOUT.scale
    PRECISION: tl.constexpr = "ieee" if query.dtype == tl.float32 else "tf32"
    factor = scale * LOG2E
    for block in tl.range(begin, stop, TILE.block_n, num_stages=TILE.stages):
        offsets = block + tl.arange(0, TILE.block_n)
        live = offsets < stop
        keys = load_keys(caches.k, table_row, kv_head, offsets, live, PAGE, K, D, next_power_of_2(D, 16), MASKED)
        if caches.k_scale is not None:
            keys = widen(keys, query)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        if caches.k_scale is not None:
            scores *= load_scales(caches.k_scale, table_row, kv_head, offsets, live, PAGE, S, MASKED)[None, :]
        if not TILE.fold:
            scores = logits(scores, scale, softcap, query.dtype == tl.float32)
        if MASKED:
            keep = live[None, :] & (offsets[None, :] <= pos[:, None])
            if (SITE.window > 0) or (SITE.chunk > 0):
                keep = keep & (offsets[None, :] >= first_key(pos, SITE.window, SITE.chunk)[:, None])
            scores = tl.where(keep, scores, float("-inf"))
        highest, total, weights, shrink = softmax_step(highest, total, scores, factor, TILE.fold, MASKED)
        acc = acc * shrink[:, None]
        values = load_keys(caches.v, table_row, kv_head, offsets, live, PAGE, V, DV, next_power_of_2(DV, 16), MASKED)
        if caches.v_scale is not None:
            values = widen(values, query)
            UNIT: tl.constexpr = code_format(caches.v.dtype.element_ty)[3]
            weights *= (load_scales(caches.v_scale, table_row, kv_head, offsets, live, PAGE, S, MASKED) * UNIT)[None, :]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return highest, total, acc


@triton.jit
def store_result(out, out_lse, out_row, result, lse, columns, live, DIM: tl.constexpr):
    """Store the rows of a tile, and their lse, of base 2, as a natural logarithm."""
    tl.store(out + out_row[:, None] * DIM + columns[None, :], result, mask=live[:, None] & (columns < DIM)[None, :])
    if out_lse is not None:
        tl.store(out_lse + out_row, lse / LOG2E, mask=live)


@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "splits", "chunk_min", "stride_table"])
def extend_kernel(
    q, caches, batch, sinks, out, out_lse, partial, counters, num_tokens, num_reqs, splits, chunk_min, scale, softcap, strides,
    stride_table, SITE: tl.constexpr, LAYOUT: tl.constexpr, TILE: tl.constexpr,
):
    """TILE.block_m rows (tokens x TILE.heads query heads) of one sequence.

    caches: Caches, batch: Batch; strides: of tokens and heads of q. SITE: Site, LAYOUT: CacheLayout, TILE: ExtendTile. None
    stands for absent scales, sinks, softcap, out_lse (T, H), partial or counters."""
    DV: tl.constexpr = LAYOUT.dim_v
    HEADS: tl.constexpr = TILE.heads
    GROUP: tl.constexpr = SITE.heads // LAYOUT.heads
    BLOCK_M: tl.constexpr = TILE.block_m  # a local constant: Triton takes no plain integer in a shape
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    DV_P2: tl.constexpr = next_power_of_2(DV, 16)
    WINDOWED: tl.constexpr = SITE.window > 0 or SITE.chunk > 0
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last blocks have the most keys: start with them
    head_block = program % (LAYOUT.heads * TILE.blocks)
    block = program // (LAYOUT.heads * TILE.blocks)
    split = 0
    if TILE.split:
        split = block % splits
        block = block // splits
    row, start, first_token = find_block(batch.query_start_loc, num_reqs, block, BLOCK_Q)
    end = tl.load(batch.query_start_loc + tl.minimum(row + 1, num_reqs))
    end = tl.where(row == num_reqs, num_tokens, end)
    if first_token >= end:
        return

    kv_head = head_block // TILE.blocks
    lines = tl.arange(0, BLOCK_M)
    token = first_token + lines // HEADS
    in_group = head_block % TILE.blocks * HEADS + lines % HEADS
    head = kv_head * GROUP + in_group
    live = (lines < BLOCK_Q * HEADS) & (token < end) & (in_group < GROUP)
    columns = tl.arange(0, next_power_of_2(LAYOUT.dim, 16))
    columns_v = tl.arange(0, DV_P2)
    out_row = token.to(tl.int64) * SITE.heads + head
    out_live = live[:, None] & (columns_v < DV)[None, :]
    if row == num_reqs:
        if split == 0:
            zeros = tl.zeros([BLOCK_M, DV_P2], tl.float32)
            nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
            store_result(out, out_lse, out_row, zeros, nothing, columns_v, live, DV)
        return
    if TILE.skip_single:
        if end - start == 1:
            return

    offset = tl.load(batch.seq_lens + row) - end  # position of a token = its index + offset
    first_pos = first_token + offset
    last_pos = tl.minimum(first_token + BLOCK_Q, end) - 1 + offset
    pos = token + offset
    if not TILE.causal:  # every query sees what the last one would
        last_pos = end - 1 + offset
        first_pos = last_pos
        pos = token * 0 + last_pos
    lowest = first_key(first_pos, SITE.window, SITE.chunk)
    begin = lowest
    stop = last_pos + 1
    active = 1
    if TILE.split:
        size = tl.cdiv(tl.maximum(tl.cdiv(stop - lowest, splits), chunk_min), BLOCK_N) * BLOCK_N
        active = tl.cdiv(stop - lowest, size)
        if out_lse is not None:  # a sequence without keys has a result too
            active = tl.maximum(active, 1)
        if split >= active:
            return
        begin = lowest + split * size
        stop = tl.minimum(begin + size, stop)
    # begin .. all_see: some rows may not see these keys any more; .. causal: all rows see all; .. stop: the causal end
    all_see = begin
    if WINDOWED:
        lead = tl.cdiv(first_key(last_pos, SITE.window, SITE.chunk) - begin, BLOCK_N)
        all_see = tl.minimum(begin + tl.maximum(lead, 0) * BLOCK_N, stop)
    causal = all_see + tl.maximum(tl.minimum(first_pos + 1, stop) - all_see, 0) // BLOCK_N * BLOCK_N

    query = tl.load(q + token.to(tl.int64)[:, None] * strides[0] + (head.to(tl.int64) * strides[1])[:, None] + columns[None, :],
                    mask=live[:, None] & (columns < LAYOUT.dim)[None, :], other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_P2], tl.float32)
    if sinks is not None:
        if split == 0:
            highest = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2E
            total = total + 1.0
    table_row = batch.block_table + row.to(tl.int64) * stride_table
    if WINDOWED:
        highest, total, acc = attend(highest, total, acc, query, pos, caches, table_row, kv_head, begin, all_see, scale,
                                     softcap, SITE, LAYOUT, TILE, True)
    highest, total, acc = attend(highest, total, acc, query, pos, caches, table_row, kv_head, all_see, causal, scale,
                                 softcap, SITE, LAYOUT, TILE, False)
    highest, total, acc = attend(highest, total, acc, query, pos, caches, table_row, kv_head, causal, stop, scale,
                                 softcap, SITE, LAYOUT, TILE, True)
    if caches.v_scale is not None:
        UNIT: tl.constexpr = code_format(caches.v.dtype.element_ty)[3]
        acc *= 1.0 / UNIT
    seen = tl.where(total != 0, total, 1.0)  # NaN stays, also in the lse
    acc = acc / seen[:, None]
    own_lse = highest + tl.log2(seen)
    if TILE.split:
        if active > 1:
            lse = partial + num_tokens.to(tl.int64) * splits * (SITE.heads * DV)
            index = out_row + num_tokens.to(tl.int64) * SITE.heads * split
            tl.store(partial + index[:, None] * DV + columns_v[None, :], acc, mask=out_live)
            tl.store(lse + index, own_lse, mask=live)
            if arrived_last(counters + block * (LAYOUT.heads * TILE.blocks) + head_block, active):
                merged, merged_lse = merge_rows(partial, lse, out_row, num_tokens.to(tl.int64) * SITE.heads, active, live,
                                                BLOCK_M, DV, DV_P2)
                store_result(out, out_lse, out_row, merged, merged_lse, columns_v, live, DV)
        else:
            store_result(out, out_lse, out_row, acc, own_lse, columns_v, live, DV)
    else:
        store_result(out, out_lse, out_row, acc, own_lse, columns_v, live, DV)


def expected_tokens(num_tokens: int, num_reqs: int, skip_single: bool) -> int:
    """Tokens per sequence that tiles are made for: the mean, or where sequences with one token are served elsewhere
    (``skip_single``) an eighth of what is left when all others have one. In a captured batch most rows are decodes or padding,
    and beside 250 of these a prompt of 700 tokens would be cut into tiles of a few tokens, each of which reads all keys. Too
    wide a tile costs products of short sequences, too narrow a one reads of long ones."""
    mean = -(-num_tokens // max(num_reqs, 1))
    return max(mean, (num_tokens - num_reqs) // 8) if skip_single else mean


def config(dim: int, dim_v: int, itemsize: int, group: int, tokens_per_row: int) -> ExtendConfig:
    """The parameters for padded head dims, bytes per element, query heads per key head, tokens per sequence."""
    widest = max(dim, dim_v)
    rows = tokens_per_row * group
    if itemsize == 4:
        block_m, block_n = (64, 32) if widest <= 64 else (32, 32) if widest <= 128 else (16, 16)
        warps, stages = 8, 1
    elif rows <= 32:
        block_m, block_n, warps, stages = 16, 64 if widest <= 128 else 32, 4, 3
    elif rows <= 128:
        block_m, block_n, warps, stages = 64, 64 if widest <= 128 else 32, 4, 3
    else:  # four warps of 128 rows read each key from shared memory half as often as eight
        block_m, block_n, warps, stages = (128, 64, 4, 3) if widest <= 128 else (128, 32, 8, 3)
    return tuned(ExtendConfig(block_m, block_n, warps, stages, 512, 32))


@planner
def _plan(q_shape: torch.Size, dtype: torch.dtype, layout: CacheLayout, num_reqs: int, table_width: int, window: int | None,
          chunk: int | None, skip_single: bool, fold: bool, causal: bool, device: torch.device) -> Plan:
    num_tokens, heads, _ = q_shape
    dims = host.next_power_of_2(layout.dim, 16), host.next_power_of_2(layout.dim_v, 16)
    group = heads // layout.heads
    params = config(*dims, dtype.itemsize, group, expected_tokens(num_tokens, num_reqs, skip_single))
    fold = fold and max(dims) <= 128  # wider heads leave no registers for it
    blocks, per_block = host.head_blocks(group, params.block_m)
    full_blocks = num_tokens // (params.block_m // per_block)
    slots = (full_blocks + num_reqs + 1) * layout.heads * blocks
    splits = 1
    if full_blocks * layout.heads * blocks < 2 * host.num_sms(device) and slots <= host.NUM_COUNTERS:
        most = -(-table_width * layout.page // params.chunk_min)
        splits = max(1, min(params.max_splits, most, 8192 // slots, 2048 // num_tokens))
    tile = ExtendTile(blocks, per_block, skip_single, splits > 1, fold, causal, params.block_m, params.block_n, params.stages)
    return Plan((slots * splits,), params, splits, num_tokens * heads * splits * (layout.dim_v + 1) if splits > 1 else 0,
                (Site(heads, window or 0, chunk or 0), layout, tile))


def extend(q: torch.Tensor, caches: Caches, batch: Batch, sinks: torch.Tensor | None, prepared: list[torch.Tensor],
           out: torch.Tensor, scale: float, window: int | None, softcap: float | None, chunk: int | None, skip_single: bool,
           lse: torch.Tensor | None = None, causal: bool = True) -> None:
    """Launch the kernel. Writes ``out`` (T, H, Dv) for all tokens, zeros for padding tokens, and ``lse`` (T, H), natural
    logarithm, if given; with ``skip_single`` not for tokens that are alone in their sequence. Without ``causal`` every query
    sees all keys of its sequence. The other arguments are the paged op's."""
    num_reqs, device = batch.seq_lens.shape[0], q.device
    plan = _plan(q.shape, q.dtype, host.cache_layout(caches), num_reqs, batch.block_table.shape[1], window, chunk, skip_single,
                 softcap is None and scale > 0, causal, device)
    launch(extend_kernel, plan.grid, q, caches, batch, sinks, out, lse, *plan.buffers(prepared, device), q.shape[0], num_reqs,
           plan.splits, plan.params.chunk_min, scale, softcap, q.stride()[:2], batch.block_table.stride(0), *plan.constants,
           num_warps=plan.params.warps)
