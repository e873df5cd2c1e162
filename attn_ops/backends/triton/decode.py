"""Split-KV decoding: every query token on its own, its keys divided among several programs.

A program serves one token and one key head, with all the query heads that read it (or a block of them), and one of
``splits`` ranges of the token's cached keys. The grid is items x splits x key heads, from shapes alone. Two modes:

* by token (T <= B): items are tokens. It is fast when every sequence has one token and right for any ragged batch.
  The step's own keys are read from k and v, and program 0 of each token writes them to the cache, so that attention
  never waits for the write, nor races with it: no position >= seq_len - query_len is read from the cache.
* by row (T > B): items are sequences; those without exactly one query token are left to ``extend``. The keys are in
  the cache already (``write``), k and v are None.

Limits: 64-bit offsets into caches, q, k, v and out; the workspace (see NOTE [Partial results]) is indexed with 64
bits too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.attn_ops.backends.triton._common import (
    LOG2E,
    NUM_COUNTERS,
    arrived_last,
    counters_for,
    find_row,
    first_key,
    head_blocks,
    key_rows,
    load_rows,
    load_scales,
    logits,
    num_sms,
    power_of_2,
    unit,
)
from quire.attn_ops.kernels.kv_quant import encode, joined, rounding, scale_strides, unpack, widen
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.kernels.pdl import launch_options, let_next_start, use_pdl, wait_for_previous
from quire.attn_ops.kernels.rope import rotated
from quire.attn_ops.kv_quant import FORMATS
from quire.attn_ops.ops.rope import PLAIN


@triton.jit
def merge_partials(partial, lse, slot, splits, active, first_row, ROWS: tl.constexpr, ROWS_P2: tl.constexpr,
                   ALL_ROWS: tl.constexpr, DV: tl.constexpr, DV_P2: tl.constexpr, STEP: tl.constexpr):
    """Merge the partial results of rows first_row.. of a slot, STEP splits at a time: (ROWS_P2, DV_P2), normalised."""
    rows = first_row + tl.arange(0, ROWS_P2)
    columns = tl.arange(0, DV_P2)
    highest = tl.full([ROWS_P2], float("-inf"), tl.float32)
    total = tl.zeros([ROWS_P2], tl.float32)
    merged = tl.zeros([ROWS_P2, DV_P2], tl.float32)
    for begin in range(0, active, STEP):
        split = begin + tl.arange(0, STEP)
        index = (slot.to(tl.int64) * splits + split[:, None]) * ALL_ROWS + rows[None, :]
        live = (split < active)[:, None] & (rows < first_row + ROWS)[None, :]
        part = tl.load(partial + index[:, :, None] * DV + columns[None, None, :],
                       mask=live[:, :, None] & (columns < DV)[None, None, :], other=0.0, cache_modifier=".cg")
        part_lse = tl.load(lse + index, mask=live, other=float("-inf"), cache_modifier=".cg")
        new_highest = tl.maximum(highest, tl.max(part_lse, 0))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # rows of padding
        weight = tl.exp2(part_lse - safe[None, :])
        shrink = tl.exp2(highest - safe)
        total = total * shrink + tl.sum(weight, 0)
        merged = merged * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        highest = new_highest
    return merged / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def one_key(highest, total, acc, query, key, value, scale, softcap):
    """One step of the running softmax with a single key (D_P2,) and value (DV_P2,), in float32."""
    score = logits(tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1), scale, softcap)
    new_highest = tl.maximum(highest, score)
    shrink = tl.exp2(highest - new_highest)
    weight = tl.exp2(score - new_highest)
    return new_highest, total * shrink + weight, acc * shrink[:, None] + weight[:, None] * value.to(tl.float32)[None, :]


@triton.jit
def new_key(key_row, token, stride_kt, cos, sin, stride_cos, stride_sin, k_norm, eps, D: tl.constexpr, ROTARY: tl.constexpr,
            D_P2: tl.constexpr, INTERLEAVED: tl.constexpr, HALF_TABLES: tl.constexpr, NORM_AFTER: tl.constexpr,
            NORM_OFFSET: tl.constexpr):
    """The key (D_P2,) of one of the step's own tokens (64-bit), rotated if cos is there, in k's dtype."""
    if cos is None:
        columns = tl.arange(0, D_P2)
        return tl.load(key_row + token * stride_kt + columns, mask=columns < D, other=0.0)
    else:
        one = tl.arange(0, 1)
        key = rotated(key_row + token * stride_kt + one, one == 0, cos + token * stride_cos, sin + token * stride_sin, k_norm,
                      eps, D, ROTARY, D_P2, INTERLEAVED, HALF_TABLES, NORM_AFTER, NORM_OFFSET)
        return tl.sum(key, 0).to(key_row.dtype.element_ty)


@triton.jit(do_not_specialize=["num_reqs", "splits", "chunk_min", "stride_table"])
def decode_kernel(
    q, k, v, cos, sin, q_norm, k_norm, eps, k_cache, v_cache, k_scale, v_scale, slot_mapping, block_table,
    query_start_loc, seq_lens, sinks, out, partial, counters, num_reqs, splits, chunk_min, scale, softcap,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cos, stride_sin, stride_table,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    K_PAGE: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr,
    S_PAGE: tl.constexpr, S_TOKEN: tl.constexpr, S_HEAD: tl.constexpr,
    QMAX: tl.constexpr, LOWEST: tl.constexpr, ROUNDER: tl.constexpr, UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    D_P2: tl.constexpr, DV_P2: tl.constexpr, BY_ROW: tl.constexpr, SPLIT: tl.constexpr, ATOMIC: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MERGE_ROWS: tl.constexpr,
    MERGE_STEP: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, HALF_TABLES: tl.constexpr,
    NORM_AFTER: tl.constexpr, NORM_OFFSET: tl.constexpr, PDL: tl.constexpr, WORDS: tl.constexpr,
):
    """HEADS query heads (ROWS with padding) of one token, over one range of its keys. None stands for an absent k, v, cos
    and what goes with it, k_scale, v_scale, sinks, softcap, partial or counters; K_*, V_* and S_* are the strides of
    caches and scales. See NOTE [Quantised caches]."""
    wait_for_previous(PDL)
    program = tl.program_id(0)
    head_block = program % (HKV * BLOCKS)
    item = program // (HKV * BLOCKS)
    split = 0
    if SPLIT:
        split = item % splits
        item = item // splits
    slot = item * (HKV * BLOCKS) + head_block
    kv_head = head_block // BLOCKS
    first_head = kv_head * (H // HKV) + head_block % BLOCKS * HEADS
    rows = tl.arange(0, ROWS)
    row_live = (rows < HEADS) & (head_block % BLOCKS * HEADS + rows < H // HKV)
    columns = tl.arange(0, D_P2)
    columns_v = tl.arange(0, DV_P2)

    row = item
    start = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + row + 1)
    seq_len = tl.load(seq_lens + row)
    if BY_ROW:
        token = start
        if end - start != 1:
            return
    else:
        token = item
        if (start != token) | (end != token + 1):  # not a pure decode batch
            row = find_row(query_start_loc, num_reqs, token)
            if row < num_reqs:
                start = tl.load(query_start_loc + row)
                end = tl.load(query_start_loc + row + 1)
                seq_len = tl.load(seq_lens + row)
    out_offsets = (token.to(tl.int64) * (H * DV) + (first_head + rows) * DV)[:, None] + columns_v[None, :]
    out_live = row_live[:, None] & (columns_v < DV)[None, :]
    if not BY_ROW:
        if row >= num_reqs:  # a padding token
            if split == 0:
                tl.store(out + out_offsets, tl.zeros([ROWS, DV_P2], tl.float32), mask=out_live)
            return

    pos = seq_len - (end - token)
    first = first_key(pos, WINDOW, CHUNK)
    if k is None:
        last = pos + 1
    else:
        last = seq_len - (end - start)
    num_keys = tl.maximum(last - first, 0)
    active = 1
    begin = first
    stop = last
    if SPLIT:
        chunk = tl.maximum(tl.cdiv(num_keys, splits), chunk_min)
        chunk = tl.cdiv(chunk, BLOCK_N) * BLOCK_N
        active = tl.maximum(tl.cdiv(num_keys, chunk), 1)
        if split >= active:
            return
        begin = first + split * chunk
        stop = tl.minimum(begin + chunk, last)

    if cos is None:
        query = tl.load(q + token.to(tl.int64) * stride_qt + ((first_head + rows) * stride_qh)[:, None] + columns[None, :],
                        mask=row_live[:, None] & (columns < D)[None, :], other=0.0)
    else:
        query = rotated(q + token.to(tl.int64) * stride_qt + (first_head + rows) * stride_qh, row_live,
                        cos + token.to(tl.int64) * stride_cos, sin + token.to(tl.int64) * stride_sin, q_norm, eps, D,
                        ROTARY, D_P2, INTERLEAVED, HALF_TABLES, NORM_AFTER, NORM_OFFSET).to(q.dtype.element_ty)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if WORDS:
        v_words = v_cache.to(tl.pointer_type(tl.int32), bitcast=True)
        acc_0 = tl.zeros([ROWS, DV_P2 // 4], tl.float32)
        acc_1 = acc_0
        acc_2 = acc_0
        acc_3 = acc_0
    else:
        acc = tl.zeros([ROWS, DV_P2], tl.float32)
    table_row = block_table + row.to(tl.int64) * stride_table
    for block in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        offsets = block + tl.arange(0, BLOCK_N)
        live = offsets < stop
        keys = load_rows(key_rows(k_cache, table_row, kv_head, offsets, live, PAGE, K_PAGE, K_TOKEN, K_HEAD, True),
                         live, D, D_P2, True)
        if DOT:
            if k_scale is not None:
                keys = widen(keys, query)
            scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        else:
            scores = tl.sum(query.to(tl.float32)[:, None, :] * keys.to(tl.float32)[None, :, :], 2)
        if k_scale is not None:
            scores *= load_scales(k_scale, table_row, kv_head, offsets, live, PAGE, S_PAGE, S_TOKEN, S_HEAD, True)[None, :]
        scores = tl.where(live[None, :], logits(scores, scale, softcap), float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if v_scale is not None:
            scales = load_scales(v_scale, table_row, kv_head, offsets, live, PAGE, S_PAGE, S_TOKEN, S_HEAD, True) * UNIT
            weights *= scales[None, :]
        if WORDS:
            words = load_rows(key_rows(v_words, table_row, kv_head, offsets, live, PAGE, V_PAGE // 4, V_TOKEN // 4, V_HEAD // 4,
                                       True), live, DV // 4, DV_P2 // 4, True)
            value_0, value_1, value_2, value_3 = unpack(words, query, v_cache.dtype.element_ty)
            weights = weights.to(query.dtype)
            acc_0 = tl.dot(weights, value_0, acc_0 * shrink[:, None])
            acc_1 = tl.dot(weights, value_1, acc_1 * shrink[:, None])
            acc_2 = tl.dot(weights, value_2, acc_2 * shrink[:, None])
            acc_3 = tl.dot(weights, value_3, acc_3 * shrink[:, None])
        else:
            acc = acc * shrink[:, None]
            values = load_rows(key_rows(v_cache, table_row, kv_head, offsets, live, PAGE, V_PAGE, V_TOKEN, V_HEAD, True),
                               live, DV, DV_P2, True)
            if DOT:
                if v_scale is not None:
                    values = widen(values, query)
                acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
            else:
                acc += tl.sum(weights[:, :, None] * values.to(tl.float32)[None, :, :], 1)
        highest = new_highest

    if WORDS:
        acc = joined(acc_0, acc_1, acc_2, acc_3, ROWS, DV_P2)
    let_next_start(PDL)
    if split == 0:
        if k is not None:
            key_row = k + kv_head * stride_kh
            value_row = v + kv_head * stride_vh + columns_v
            # The step's earlier tokens of the sequence: none in a pure decode batch.
            for other in range(start + tl.maximum(first - last, 0), token):
                source = token.to(tl.int64) - (token - other)
                key = new_key(key_row, source, stride_kt, cos, sin, stride_cos, stride_sin, k_norm, eps, D, ROTARY, D_P2,
                              INTERLEAVED, HALF_TABLES, NORM_AFTER, NORM_OFFSET)
                value = tl.load(value_row + source * stride_vt, mask=columns_v < DV, other=0.0)
                if k_scale is not None:
                    codes, key_scale = encode(key, 0, QMAX, LOWEST, ROUNDER)
                    codes_v, value_scale = encode(value, 0, QMAX, LOWEST, ROUNDER)
                    key = codes * key_scale
                    value = codes_v * (value_scale * UNIT)
                highest, total, acc = one_key(highest, total, acc, query, key, value, scale, softcap)
            key = new_key(key_row, token.to(tl.int64), stride_kt, cos, sin, stride_cos, stride_sin, k_norm, eps, D, ROTARY,
                          D_P2, INTERLEAVED, HALF_TABLES, NORM_AFTER, NORM_OFFSET)
            value = tl.load(value_row + token.to(tl.int64) * stride_vt, mask=columns_v < DV, other=0.0)
            if k_scale is not None:
                codes, key_scale = encode(key, 0, QMAX, LOWEST, ROUNDER)
                codes_v, value_scale = encode(value, 0, QMAX, LOWEST, ROUNDER)
                key = codes.to(k_cache.dtype.element_ty)
                value = codes_v.to(v_cache.dtype.element_ty)
            if head_block % BLOCKS == 0:
                target = tl.load(slot_mapping + token).to(tl.int64)
                page = target // PAGE
                live = target >= 0
                if k_scale is not None:
                    place = page * S_PAGE + target % PAGE * S_TOKEN + kv_head * S_HEAD
                    tl.store(k_scale + place, key_scale, mask=live)
                    tl.store(v_scale + place, value_scale, mask=live)
                tl.store(k_cache + page * K_PAGE + target % PAGE * K_TOKEN + kv_head * K_HEAD + columns, key,
                         mask=(columns < D) & live)
                tl.store(v_cache + page * V_PAGE + target % PAGE * V_TOKEN + kv_head * V_HEAD + columns_v, value,
                         mask=(columns_v < DV) & live)
            if k_scale is not None:
                key = codes * key_scale
                value = codes_v * (value_scale * UNIT)
            highest, total, acc = one_key(highest, total, acc, query, key, value, scale, softcap)
        if sinks is not None:
            sink = tl.load(sinks + first_head + rows, mask=row_live, other=0.0).to(tl.float32) * LOG2E
            new_highest = tl.maximum(highest, sink)
            shrink = tl.exp2(highest - new_highest)
            total = total * shrink + tl.exp2(sink - new_highest)
            acc = acc * shrink[:, None]
            highest = new_highest

    if v_scale is not None:
        acc *= 1.0 / UNIT
    acc = acc / total[:, None]
    if SPLIT:
        if active > 1:
            lse = partial + tl.num_programs(0).to(tl.int64) * (HEADS * DV)
            index = (slot.to(tl.int64) * splits + split) * HEADS + rows
            tl.store(partial + index[:, None] * DV + columns_v[None, :], acc,
                     mask=(rows < HEADS)[:, None] & (columns_v < DV)[None, :])
            tl.store(lse + index, highest + tl.log2(total), mask=rows < HEADS)
            if ATOMIC:
                if arrived_last(counters + slot, active):
                    merged = merge_partials(partial, lse, slot, splits, active, 0, HEADS, MERGE_ROWS, HEADS, DV, DV_P2,
                                            MERGE_STEP)
                    merged_rows = tl.arange(0, MERGE_ROWS)
                    live = (merged_rows < HEADS) & (head_block % BLOCKS * HEADS + merged_rows < H // HKV)
                    tl.store(out + token.to(tl.int64) * (H * DV) + ((first_head + merged_rows) * DV)[:, None]
                             + columns_v[None, :], merged, mask=live[:, None] & (columns_v < DV)[None, :])
        else:
            tl.store(out + out_offsets, acc, mask=out_live)
    else:
        tl.store(out + out_offsets, acc, mask=out_live)


@triton.jit(do_not_specialize=["num_reqs", "splits", "chunk_min"])
def reduce_kernel(
    partial, query_start_loc, seq_lens, out, num_reqs, splits, chunk_min, HAS_NEW: tl.constexpr,
    H: tl.constexpr, HKV: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr, HEADS: tl.constexpr, DV_P2: tl.constexpr, BY_ROW: tl.constexpr, BLOCK_N: tl.constexpr,
    MERGE_STEP: tl.constexpr,
):
    """Merge the partial results of one head of one slot: the second launch where programs do not merge themselves."""
    head = tl.program_id(0) % HEADS
    slot = tl.program_id(0) // HEADS
    head_block = slot % (HKV * BLOCKS)
    row = slot // (HKV * BLOCKS)
    token = row
    if BY_ROW:
        token = tl.load(query_start_loc + row)
        if tl.load(query_start_loc + row + 1) - token != 1:
            return
    else:
        row = find_row(query_start_loc, num_reqs, token)
        if row >= num_reqs:
            return
    start = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + row + 1)
    seq_len = tl.load(seq_lens + row)
    pos = seq_len - (end - token)
    last = pos + 1
    if HAS_NEW:
        last = seq_len - (end - start)
    num_keys = tl.maximum(last - first_key(pos, WINDOW, CHUNK), 0)
    chunk = tl.cdiv(tl.maximum(tl.cdiv(num_keys, splits), chunk_min), BLOCK_N) * BLOCK_N
    active = tl.cdiv(num_keys, chunk)
    if (active < 2) | (head_block % BLOCKS * HEADS + head >= H // HKV):
        return
    lse = partial + (tl.num_programs(0).to(tl.int64) * splits) * DV
    merged = merge_partials(partial, lse, slot, splits, active, head, 1, 1, HEADS, DV, DV_P2, MERGE_STEP)
    columns = tl.arange(0, DV_P2)
    out_head = head_block // BLOCKS * (H // HKV) + head_block % BLOCKS * HEADS + head
    out_row = out + token.to(tl.int64) * (H * DV) + out_head * DV
    tl.store(out_row + columns[None, :], merged, mask=(columns < DV)[None, :])


class DecodeConfig(NamedTuple):
    """Tuning parameters. They change speed, never results beyond rounding.

    block_n: keys a step.  warps, stages: of the kernel and its loop.  chunk_min: least keys that a split is made for (a
    multiple of block_n).  max_splits: bound on splits.  atomic: the last program merges, else a second launch does.
    dot: tensor cores (the group is padded to 16 rows), else sums of products.
"""

    block_n: int
    warps: int
    stages: int
    chunk_min: int
    max_splits: int
    atomic: bool
    dot: bool


_overrides: dict[str, Any] = {}


@contextlib.contextmanager
def overridden(**params: Any) -> Iterator[None]:
    """Run with some fields of DecodeConfig set by hand; for benchmarks and tests, not thread-safe."""
    saved = dict(_overrides)
    _overrides.update(params)
    _plan.cache_clear()
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(saved)
        _plan.cache_clear()


def config(dim: int, dim_v: int, itemsize: int, heads: int, slots: int, device: torch.device,
           quantised: bool = False) -> DecodeConfig:
    """The parameters for padded head dims, bytes an element (of q), query heads a program, slots (see NOTE [Partial
    results]), and for a quantised cache."""
    widest = max(dim, dim_v)
    # Half precision always goes to the tensor cores: they pad a group to 16 rows, but sums of products are bound by
    # arithmetic long before memory, for a single head too. In float32 the dot costs as many operations as the sums.
    dot = itemsize == 2 or heads > 8
    if dot and itemsize == 2:
        block_n, warps, stages = (64 if widest <= 128 else 32), 4, 3
    elif dot:
        block_n, warps, stages = (32 if widest <= 128 else 16), 8, 1
    else:
        products = widest * power_of_2(heads)
        block_n = min(64, max(8192 // products, 16))
        warps, stages = (8 if block_n * products > 16384 else 4), 3
    # Measured on an H200 at contexts of 1024 (benchmarks/attention_kernels.py --sweep): few slots want small chunks, the
    # fewest on two warps each; with a slot or more for every multiprocessor, splitting costs more than it balances. Larger
    # steps of the loop are better until there are programs enough to hide each other's latency.
    sms = num_sms(device)
    chunk = 2048 if slots >= sms else min(1024, power_of_2(max(512 * slots // sms, 64)))
    if dot and itemsize == 2 and widest <= 128:
        block_n = 128 if 256 <= chunk and slots < 4 * sms else 64
        warps = 2 if chunk == 64 else 4
        if quantised:  # a key is half as many bytes, and costs the same to find and to weigh
            block_n, warps, stages = (128 if chunk >= 128 else 64), 4, (5 if slots >= sms else 3)
    params = dict(block_n=block_n, warps=warps, stages=stages, chunk_min=chunk, max_splits=64, atomic=True, dot=dot)
    return DecodeConfig(**(params | _overrides))


def num_splits(slots: int, capacity: int, tuned: DecodeConfig) -> int:
    """Programs a slot, from shapes only. ``capacity`` is the number of keys that a row of the block table can name."""
    if slots > NUM_COUNTERS:
        return 1
    return max(1, min(tuned.max_splits, -(-capacity // tuned.chunk_min), -(-8192 // slots)))


class _Plan(NamedTuple):
    """What a launch needs besides tensors: everything that follows from shapes, worked out once for each."""

    grid: tuple[int]
    splits: int
    workspace: int
    counters: bool
    tuned: DecodeConfig
    constants: tuple
    words: bool
    reduce_grid: tuple[int]
    reduce_constants: tuple


@functools.lru_cache(maxsize=4096)
def _plan(q_shape: torch.Size, dtype: torch.dtype, k_shape: torch.Size, k_strides: tuple[int, ...], v_shape: torch.Size,
          v_strides: tuple[int, ...], num_reqs: int, table_width: int, window: int | None, chunk: int | None,
          s_strides: tuple[int, ...], kv_dtype: torch.dtype, by_row: bool, device: torch.device, v_offset: int) -> _Plan | None:
    num_tokens, heads, dim = q_shape
    page, kv_heads, dim_v = k_shape[1], k_shape[2], v_shape[3]
    itemsize = dtype.itemsize
    dim_p2, dim_v_p2 = power_of_2(dim, 16), power_of_2(dim_v, 16)
    # The accumulators of all heads of a program stay in registers.
    blocks, per_block = head_blocks(heads // kv_heads, max(16, min(64, 16384 // (max(dim_p2, dim_v_p2) * itemsize))))
    slots = (num_reqs if by_row else num_tokens) * kv_heads * blocks
    if not slots:
        return None
    tuned = config(dim_p2, dim_v_p2, itemsize, per_block, slots, device, kv_dtype in FORMATS)
    splits = num_splits(slots, table_width * page, tuned)
    merge_rows = power_of_2(per_block)
    return _Plan(
        grid=(slots * splits,), splits=splits, workspace=slots * splits * per_block * (dim_v + 1) if splits > 1 else 0,
        counters=splits > 1 and tuned.atomic, tuned=tuned,
        constants=(heads, kv_heads, dim, dim_v, page, *k_strides[:3], *v_strides[:3], *s_strides, *rounding(kv_dtype),
                   unit(kv_dtype), window or 0, chunk or 0, blocks, per_block, power_of_2(per_block, 16 if tuned.dot else 1),
                   dim_p2, dim_v_p2, by_row, splits > 1, tuned.atomic, tuned.dot, "ieee" if itemsize == 4 else "tf32",
                   tuned.block_n, tuned.stages,
                   merge_rows, max(1, min(16, 8192 // (merge_rows * dim_v_p2)))),
        # See NOTE [Values by words]. From 64 rows on Triton 3.6 makes the four products Hopper's wgmma, and on an H200 with
        # 71 heads a key head numbers were wrong (tests/gpu/test_triton_gpu.py); why is not known. By bytes they are right.
        words=kv_dtype in FORMATS and tuned.dot and itemsize == 2 and dim_v_p2 >= 64 and power_of_2(per_block) <= 32
        and not any(n % 4 for n in (dim_v, v_offset, *v_strides[:3])),
        reduce_grid=(slots * per_block,),
        reduce_constants=(heads, kv_heads, dim_v, window or 0, chunk or 0, blocks, per_block, dim_v_p2, by_row,
                          tuned.block_n, max(1, min(32, 4096 // dim_v_p2))),
    )


def decode(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, slot_mapping: torch.Tensor, block_table: torch.Tensor,
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, sinks: torch.Tensor | None, prepared: list[torch.Tensor],
    out: torch.Tensor, scale: float, window: int | None, softcap: float | None, chunk: int | None, by_row: bool,
    rope: tuple[Any, ...] | None = None,
) -> None:
    """Launch the kernel. Writes ``out`` (T, H, Dv): every token, or with ``by_row`` only those that are alone in
    their row. With k and v it also writes the caches and their scales. ``rope``: cos, sin (T, R or R/2), the norms'
    weights, eps and the RopeForm, for q and k not yet rotated. The other arguments are the paged op's."""
    num_reqs, device = seq_lens.shape[0], q.device
    plan = _plan(q.shape, q.dtype, k_cache.shape, k_cache.stride(), v_cache.shape, v_cache.stride(), num_reqs,
                 block_table.shape[1], window, chunk, scale_strides(k_scale), k_cache.dtype, by_row, device,
                 v_cache.storage_offset() % 4)
    if plan is None:
        return
    partial = torch.empty(plan.workspace, dtype=torch.float32, device=device) if plan.workspace else None
    counters = counters_for(prepared, device) if plan.counters else None
    stride_qt, stride_qh, _ = q.stride()
    stride_kt, stride_kh, _ = (0, 0, 0) if k is None else k.stride()
    stride_vt, stride_vh, _ = (0, 0, 0) if v is None else v.stride()
    cos, sin, q_norm, k_norm, eps, form = rope or (None, None, None, None, 0.0, PLAIN)
    if rope is not None:
        cos, sin = (x if x.stride(1) == 1 else x.contiguous() for x in (cos, sin))
    stride_cos, stride_sin, rotary = (cos.stride(0), sin.stride(0), form.rotated(cos)) if rope is not None else (0, 0, 0)
    tuned, pdl = plan.tuned, use_pdl(device, q.shape[0])
    launch(
        decode_kernel, plan.grid,
        q, k, v, cos, sin, q_norm, k_norm, eps, k_cache, v_cache, k_scale, v_scale, slot_mapping, block_table,
        query_start_loc, seq_lens, sinks, out, partial, counters, num_reqs, plan.splits, tuned.chunk_min, scale, softcap,
        stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cos, stride_sin, block_table.stride(0),
        *plan.constants, rotary, *form, pdl, plan.words, num_warps=tuned.warps, **launch_options(pdl),
    )
    if plan.splits > 1 and not tuned.atomic:
        launch(
            reduce_kernel, plan.reduce_grid,
            partial, query_start_loc, seq_lens, out, num_reqs, plan.splits, tuned.chunk_min, k is not None,
            *plan.reduce_constants, num_warps=4,
        )


__all__ = ["DecodeConfig", "config", "decode", "num_splits", "overridden"]
