"""The kernels of ``mla.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.attn_ops.backends.triton.common import arrived_last, merge_partials, merge_rows, scheduled_part
from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.kv_quant import code_format, widen
from quire.attn_ops.kernels.paged import find_block, find_row, in_page, load_rows
from quire.attn_ops.kernels.softmax import LOG2E, softmax_step


@triton.jit
def attend_keys(highest, total, acc, query, query_rope, pos, cache, c_scale, rope_scale, table_row, begin, stop, scale,
                TILE: tl.constexpr, MASKED: tl.constexpr):
    """The running softmax over keys begin..stop. Without MASKED all rows see them, and block_n divides their number."""
    RANK_P2: tl.constexpr = next_power_of_2(TILE.rank, 16)
    ROPE_P2: tl.constexpr = next_power_of_2(TILE.rope, 16)
    PAGE: tl.constexpr = TILE.page
    ROW: tl.constexpr = TILE.row
    PRECISION: tl.constexpr = "ieee" if query.dtype == tl.float32 else "tf32"
    for block in tl.range(begin, stop, TILE.block_n, num_stages=TILE.stages):
        offsets = block + tl.arange(0, TILE.block_n)
        live = offsets < stop
        if MASKED:
            page = tl.load(table_row + offsets // TILE.page, mask=live, other=0)
        else:
            page = tl.load(table_row + offsets // TILE.page)
        start = cache + page.to(tl.int64) * TILE.row.page + in_page(offsets, PAGE, ROW)
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
        block, split, before, size = scheduled_part(made, num_reqs, num_tokens, tl.program_id(0) // TILE.blocks, TILE.blocks,
                                                    0)
        if block < 0:
            return
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
