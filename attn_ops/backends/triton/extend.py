"""Attention of several query tokens a sequence: prefill, chunked prefill, and the same over a long cached prefix.

A program serves up to BLOCK_M query rows of one sequence and one key head: BLOCK_Q consecutive tokens x the query
heads that read the key head, so that grouped heads fill a matrix tile. Tokens are cut at sequence boundaries:
sequence r gets the blocks from query_start_loc[r] // BLOCK_Q + r on, which never overlap; T // BLOCK_Q + B + 1 blocks
hold any batch of T tokens in B sequences, the padding tokens after the last sequence counted as one more. Programs
without tokens leave at once.

The step's keys are in the cache already (``write`` runs first), so keys come from one place only, and a sequence may
read pages that another one fills in this very step. Keys are walked in three stretches: those that some rows may not
see yet or no more at the lower end (window, chunk), those that all rows see (no masks), and the causal end. Where the
batch has few query tokens the keys are divided among programs too; see NOTE [Partial results] and NOTE [Last one
merges].
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
from quire.attn_ops.kernels.kv_quant import scale_strides, widen
from quire.attn_ops.kernels.launch import launch


@triton.jit
def attend(
    highest, total, acc, query, pos, k_cache, v_cache, k_scale, v_scale, table_row, kv_head, begin, stop, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    K_PAGE: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr,
    S_PAGE: tl.constexpr, S_TOKEN: tl.constexpr, S_HEAD: tl.constexpr, UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, D_P2: tl.constexpr, DV_P2: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):
    """The running softmax over keys begin..stop. Without MASKED every row sees all of them, and BLOCK_N divides
    them. See NOTE [Quantised caches]."""
    for block in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        offsets = block + tl.arange(0, BLOCK_N)
        live = offsets < stop
        keys = load_rows(key_rows(k_cache, table_row, kv_head, offsets, live, PAGE, K_PAGE, K_TOKEN, K_HEAD, MASKED),
                         live, D, D_P2, MASKED)
        if k_scale is not None:
            keys = widen(keys, query)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        if k_scale is not None:
            scores *= load_scales(k_scale, table_row, kv_head, offsets, live, PAGE, S_PAGE, S_TOKEN, S_HEAD, MASKED)[None, :]
        scores = logits(scores, scale, softcap)
        if MASKED:
            keep = live[None, :] & (offsets[None, :] <= pos[:, None])
            if (WINDOW > 0) or (CHUNK > 0):
                keep = keep & (offsets[None, :] >= first_key(pos, WINDOW, CHUNK)[:, None])
            scores = tl.where(keep, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        if MASKED:  # rows that have seen no key yet
            safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        else:
            safe = new_highest
        shrink = tl.exp2(highest - safe)
        weights = tl.exp2(scores - safe[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        values = load_rows(key_rows(v_cache, table_row, kv_head, offsets, live, PAGE, V_PAGE, V_TOKEN, V_HEAD, MASKED),
                           live, DV, DV_P2, MASKED)
        if v_scale is not None:
            values = widen(values, query)
            scales = load_scales(v_scale, table_row, kv_head, offsets, live, PAGE, S_PAGE, S_TOKEN, S_HEAD, MASKED) * UNIT
            weights *= scales[None, :]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        highest = new_highest
    return highest, total, acc


@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "splits", "chunk_min", "stride_table"])
def extend_kernel(
    q, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, sinks, out, partial, counters,
    num_tokens, num_reqs, splits, chunk_min, scale, softcap, stride_qt, stride_qh, stride_table,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    K_PAGE: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr,
    S_PAGE: tl.constexpr, S_TOKEN: tl.constexpr, S_HEAD: tl.constexpr, UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr,
    D_P2: tl.constexpr, DV_P2: tl.constexpr, SKIP_SINGLE: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):
    """BLOCK_M rows (tokens x HEADS query heads) of one sequence. SKIP_SINGLE: sequences with one query token are served
    elsewhere. None stands for absent scales (S_* are their strides), sinks, softcap, partial or counters."""
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last blocks have the most keys: start with them
    head_block = program % (HKV * BLOCKS)
    block = program // (HKV * BLOCKS)
    split = 0
    if SPLIT:
        split = block % splits
        block = block // splits
    low = num_reqs * 0
    high = num_reqs
    while low < high:  # the last sequence whose blocks start at or before this one; num_reqs: the padding tokens
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle - 1
    row = low
    start = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + tl.minimum(row + 1, num_reqs))
    end = tl.where(row == num_reqs, num_tokens, end)
    first_token = start + (block - start // BLOCK_Q - row) * BLOCK_Q
    if first_token >= end:
        return

    kv_head = head_block // BLOCKS
    lines = tl.arange(0, BLOCK_M)
    token = first_token + lines // HEADS
    in_group = head_block % BLOCKS * HEADS + lines % HEADS
    head = kv_head * (H // HKV) + in_group
    live = (lines < BLOCK_Q * HEADS) & (token < end) & (in_group < H // HKV)
    columns = tl.arange(0, D_P2)
    columns_v = tl.arange(0, DV_P2)
    out_row = token.to(tl.int64) * H + head
    out_live = live[:, None] & (columns_v < DV)[None, :]
    if row == num_reqs:
        if split == 0:
            zeros = tl.zeros([BLOCK_M, DV_P2], tl.float32)
            tl.store(out + out_row[:, None] * DV + columns_v[None, :], zeros, mask=out_live)
        return
    if SKIP_SINGLE:
        if end - start == 1:
            return

    offset = tl.load(seq_lens + row) - end  # position of a token = its index + offset
    first_pos = first_token + offset
    last_pos = tl.minimum(first_token + BLOCK_Q, end) - 1 + offset
    lowest = first_key(first_pos, WINDOW, CHUNK)
    begin = lowest
    stop = last_pos + 1
    active = 1
    if SPLIT:
        size = tl.cdiv(tl.maximum(tl.cdiv(stop - lowest, splits), chunk_min), BLOCK_N) * BLOCK_N
        active = tl.cdiv(stop - lowest, size)
        if split >= active:
            return
        begin = lowest + split * size
        stop = tl.minimum(begin + size, stop)
    # begin .. all_see: some rows may not see these keys any more; .. causal: all rows see all; .. stop: the causal end
    all_see = begin
    if (WINDOW > 0) or (CHUNK > 0):
        lead = tl.cdiv(first_key(last_pos, WINDOW, CHUNK) - begin, BLOCK_N)
        all_see = tl.minimum(begin + tl.maximum(lead, 0) * BLOCK_N, stop)
    causal = all_see + tl.maximum(tl.minimum(first_pos + 1, stop) - all_see, 0) // BLOCK_N * BLOCK_N

    pos = token + offset
    query = tl.load(q + token.to(tl.int64)[:, None] * stride_qt + (head * stride_qh)[:, None] + columns[None, :],
                    mask=live[:, None] & (columns < D)[None, :], other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_P2], tl.float32)
    if sinks is not None:
        if split == 0:
            highest = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2E
            total = total + 1.0
    table_row = block_table + row.to(tl.int64) * stride_table
    if (WINDOW > 0) or (CHUNK > 0):
        highest, total, acc = attend(
            highest, total, acc, query, pos, k_cache, v_cache, k_scale, v_scale, table_row, kv_head, begin, all_see,
            scale, softcap, D, DV, PAGE, K_PAGE, K_TOKEN, K_HEAD, V_PAGE, V_TOKEN, V_HEAD, S_PAGE, S_TOKEN, S_HEAD, UNIT,
            WINDOW, CHUNK, D_P2, DV_P2, PRECISION, BLOCK_N, STAGES, True)
    highest, total, acc = attend(
        highest, total, acc, query, pos, k_cache, v_cache, k_scale, v_scale, table_row, kv_head, all_see, causal, scale,
        softcap, D, DV, PAGE, K_PAGE, K_TOKEN, K_HEAD, V_PAGE, V_TOKEN, V_HEAD, S_PAGE, S_TOKEN, S_HEAD, UNIT, WINDOW, CHUNK,
        D_P2, DV_P2, PRECISION, BLOCK_N, STAGES, False)
    highest, total, acc = attend(
        highest, total, acc, query, pos, k_cache, v_cache, k_scale, v_scale, table_row, kv_head, causal, stop, scale,
        softcap, D, DV, PAGE, K_PAGE, K_TOKEN, K_HEAD, V_PAGE, V_TOKEN, V_HEAD, S_PAGE, S_TOKEN, S_HEAD, UNIT, WINDOW, CHUNK,
        D_P2, DV_P2, PRECISION, BLOCK_N, STAGES, True)
    if v_scale is not None:
        acc *= 1.0 / UNIT
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLIT:
        if active > 1:
            lse = partial + num_tokens.to(tl.int64) * splits * (H * DV)
            index = out_row + num_tokens.to(tl.int64) * H * split
            tl.store(partial + index[:, None] * DV + columns_v[None, :], acc, mask=out_live)
            tl.store(lse + index, highest + tl.log2(tl.where(total > 0, total, 1.0)), mask=live)
            if arrived_last(counters + block * (HKV * BLOCKS) + head_block, active):
                highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                acc = tl.zeros([BLOCK_M, DV_P2], tl.float32)
                for other in range(0, active):
                    index = out_row + num_tokens.to(tl.int64) * H * other
                    part_lse = tl.load(lse + index, mask=live, other=0.0, cache_modifier=".cg")
                    part = tl.load(partial + index[:, None] * DV + columns_v[None, :], mask=out_live, other=0.0,
                                   cache_modifier=".cg")
                    new_highest = tl.maximum(highest, part_lse)
                    safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
                    shrink = tl.exp2(highest - safe)
                    weight = tl.exp2(part_lse - safe)
                    total = total * shrink + weight
                    acc = acc * shrink[:, None] + part * weight[:, None]
                    highest = new_highest
                tl.store(out + out_row[:, None] * DV + columns_v[None, :], acc / total[:, None], mask=out_live)
        else:
            tl.store(out + out_row[:, None] * DV + columns_v[None, :], acc, mask=out_live)
    else:
        tl.store(out + out_row[:, None] * DV + columns_v[None, :], acc, mask=out_live)


class ExtendConfig(NamedTuple):
    """Tuning parameters: rows and keys a tile, warps, loop stages, least keys a split is made for, bound on splits."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    chunk_min: int
    max_splits: int


_overrides: dict[str, Any] = {}


@contextlib.contextmanager
def overridden(**params: Any) -> Iterator[None]:
    """Run with some fields of ExtendConfig set by hand; for benchmarks and tests, not thread-safe."""
    saved = dict(_overrides)
    _overrides.update(params)
    _plan.cache_clear()
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(saved)
        _plan.cache_clear()


def config(dim: int, dim_v: int, itemsize: int, group: int, tokens_per_row: int) -> ExtendConfig:
    """The parameters for padded head dims, bytes an element, query heads a key head, mean tokens a sequence."""
    widest = max(dim, dim_v)
    rows = tokens_per_row * group
    if itemsize == 4:
        block_m, block_n = (64, 32) if widest <= 64 else (32, 32) if widest <= 128 else (16, 16)
        warps, stages = 8, 1
    elif rows <= 32:
        block_m, block_n, warps, stages = 16, 64 if widest <= 128 else 32, 4, 3
    elif rows <= 128:
        block_m, block_n, warps, stages = 64, 64 if widest <= 128 else 32, 4, 3
    else:
        block_m, block_n, warps, stages = 128, 64 if widest <= 128 else 32, 8, 3
    params = dict(block_m=block_m, block_n=block_n, warps=warps, stages=stages, chunk_min=512, max_splits=32)
    return ExtendConfig(**(params | _overrides))


class _Plan(NamedTuple):
    """What a launch needs besides tensors: everything that follows from shapes, worked out once for each."""

    grid: tuple[int]
    splits: int
    workspace: int
    tuned: ExtendConfig
    constants: tuple


@functools.lru_cache(maxsize=4096)
def _plan(q_shape: torch.Size, dtype: torch.dtype, k_shape: torch.Size, k_strides: tuple[int, ...], v_shape: torch.Size,
          v_strides: tuple[int, ...], num_reqs: int, table_width: int, window: int | None, chunk: int | None,
          s_strides: tuple[int, ...], kv_dtype: torch.dtype, skip_single: bool, device: torch.device) -> _Plan:
    num_tokens, heads, dim = q_shape
    page, kv_heads, dim_v = k_shape[1], k_shape[2], v_shape[3]
    itemsize = dtype.itemsize
    dim_p2, dim_v_p2 = power_of_2(dim, 16), power_of_2(dim_v, 16)
    group = heads // kv_heads
    tuned = config(dim_p2, dim_v_p2, itemsize, group, -(-num_tokens // max(num_reqs, 1)))
    blocks, per_block = head_blocks(group, tuned.block_m)
    full_blocks = num_tokens // (tuned.block_m // per_block)
    slots = (full_blocks + num_reqs + 1) * kv_heads * blocks
    splits = 1
    if full_blocks * kv_heads * blocks < 2 * num_sms(device) and slots <= NUM_COUNTERS:
        most = -(-table_width * page // tuned.chunk_min)
        splits = max(1, min(tuned.max_splits, most, 8192 // slots, 2048 // num_tokens))
    return _Plan(
        grid=(slots * splits,), splits=splits, workspace=num_tokens * heads * splits * (dim_v + 1) if splits > 1 else 0,
        tuned=tuned,
        constants=(heads, kv_heads, dim, dim_v, page, *k_strides[:3], *v_strides[:3], *s_strides, unit(kv_dtype),
                   window or 0, chunk or 0, blocks, per_block, dim_p2, dim_v_p2, skip_single, splits > 1,
                   "ieee" if itemsize == 4 else "tf32", tuned.block_m, tuned.block_n, tuned.stages),
    )


def extend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    sinks: torch.Tensor | None, prepared: list[torch.Tensor], out: torch.Tensor, scale: float, window: int | None,
    softcap: float | None, chunk: int | None, skip_single: bool,
) -> None:
    """Launch the kernel. Writes ``out`` (T, H, Dv) for all tokens, zeros for padding tokens; with ``skip_single`` not
    for tokens that are alone in their sequence. The other arguments are the paged op's."""
    num_reqs, device = seq_lens.shape[0], q.device
    plan = _plan(q.shape, q.dtype, k_cache.shape, k_cache.stride(), v_cache.shape, v_cache.stride(), num_reqs,
                 block_table.shape[1], window, chunk, scale_strides(k_scale), k_cache.dtype, skip_single, device)
    partial = counters = None
    if plan.workspace:
        partial = torch.empty(plan.workspace, dtype=torch.float32, device=device)
        counters = counters_for(prepared, device)
    stride_qt, stride_qh, _ = q.stride()
    launch(
        extend_kernel, plan.grid,
        q, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, sinks, out, partial, counters,
        q.shape[0], num_reqs, plan.splits, plan.tuned.chunk_min, scale, softcap, stride_qt, stride_qh,
        block_table.stride(0), *plan.constants, num_warps=plan.tuned.warps,
    )


__all__ = ["ExtendConfig", "config", "extend", "overridden"]
