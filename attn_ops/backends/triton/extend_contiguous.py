"""Attention of long prompts to contiguous keys, read by tensor descriptors, which takes a fraction of the instructions and
registers of following the block table: causal, to pages that are copied first (``kernels/gather_kv.py``); and of MLA to
expanded keys and values (``attn_ops/mla_prefill.py``), causal or not. These lie side by side in one matrix, by heads, and the
rotary part of a key, which all heads share, in another: scores are the sum of two products, and no key is put together.

A program serves BLOCK_M consecutive tokens of one sequence and one query head; blocks are cut as in ``extend.py``, and those
of one head run side by side, so that its keys stay in the L2 cache. Which steps come here is decided by
``extend_route.py``. Nothing here may be captured in a CUDA graph: the copy is as long as the sequences are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.attn_ops.backends.triton.extend import store_result
from quire.attn_ops.backends.triton.extend_route import Route
from quire.attn_ops.backends.triton.plan import Batch, planner, tuned
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.gather_kv import gather_kv
from quire.attn_ops.kernels.host import Caches
from quire.attn_ops.kernels.launch import descriptor, launch
from quire.attn_ops.kernels.paged import find_block
from quire.attn_ops.kernels.softmax import LOG2E, logits, softmax_step

LONG = 4096  # queries per sequence, see ``config``


class ContiguousConfig(NamedTuple):
    """Tuning parameters: query tokens and keys per tile, warps, loop stages."""

    block_m: int
    block_n: int
    warps: int
    stages: int


class ContiguousTile(NamedTuple):
    """Constants of a launch.

    heads, kv_heads, dim, dim_v: of the attention, dim without ``shared``; width, width_v: of the contiguous keys and values,
    powers of two; stride, stride_v: columns from one head's to the next one's; first_v: the first column of values; shared: the
    numbers of a key that are the same for all heads, the last ones, a power of two; 0: none.
    skip_single, fold, causal: see ExtendTile.
    """

    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    width: int
    width_v: int
    stride: int
    stride_v: int
    first_v: int
    shared: int
    skip_single: bool
    fold: bool
    causal: bool
    block_m: int
    block_n: int
    stages: int


@triton.jit
def attend_contiguous(highest, total, acc, query, query_shared, pos, keys, values, shared, first_key, column, column_v, begin,
                      stop, scale, softcap, TILE: tl.constexpr, MASKED: tl.constexpr):
    """The running softmax over keys begin..stop of the sequence whose first key is row ``first_key`` of the descriptors.
    Without MASKED every query sees all of them, and TILE.block_n divides their number."""
    PRECISION: tl.constexpr = "ieee" if query.dtype == tl.float32 else "tf32"
    factor = scale * LOG2E
    for block in tl.range(begin, stop, TILE.block_n, num_stages=TILE.stages):
        scores = tl.dot(query, tl.trans(keys.load([first_key + block, column])), input_precision=PRECISION)
        if TILE.shared:
            scores = tl.dot(query_shared, tl.trans(shared.load([first_key + block, 0])), scores, input_precision=PRECISION)
        if not TILE.fold:
            scores = logits(scores, scale, softcap)
        if MASKED:
            offsets = block + tl.arange(0, TILE.block_n)
            live = offsets < stop
            scores = tl.where(live[None, :] & (offsets[None, :] <= pos[:, None]), scores, float("-inf"))
        highest, total, weights, shrink = softmax_step(highest, total, scores, factor, TILE.fold, MASKED)
        acc = acc * shrink[:, None]
        rows = values.load([first_key + block, column_v])
        if MASKED:  # the next sequence's values may be NaN, and 0 * NaN is NaN
            rows = tl.where(live[:, None], rows, 0.0)
        acc = tl.dot(weights.to(rows.dtype), rows, acc, input_precision=PRECISION)
    return highest, total, acc


@triton.jit(do_not_specialize=["num_tokens", "num_reqs"])
def contiguous_kernel(q, keys, values, shared, query_start_loc, kv_starts, sinks, out, out_lse, num_tokens, num_reqs, scale,
                      softcap, strides, TILE: tl.constexpr):
    """TILE.block_m query tokens of one sequence and head.

    keys, values: descriptors of (N, columns of all heads), blocks (block_n, width*); shared: of (N, shared). query_start_loc,
    kv_starts: (B + 1,). strides: of tokens and heads of q. None stands for absent shared, sinks, softcap or out_lse (T, H)."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    WIDTH: tl.constexpr = TILE.width
    WIDTH_V: tl.constexpr = TILE.width_v
    GROUP: tl.constexpr = TILE.heads // TILE.kv_heads
    SHARED: tl.constexpr = TILE.shared
    blocks = tl.num_programs(0) // TILE.heads
    head = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks  # the last blocks have the most keys: start with them
    row, start, first_token = find_block(query_start_loc, num_reqs, block, BLOCK_M)
    end = tl.load(query_start_loc + tl.minimum(row + 1, num_reqs))
    end = tl.where(row == num_reqs, num_tokens, end)
    if first_token >= end:
        return
    token = first_token + tl.arange(0, BLOCK_M)
    live = token < end
    columns = tl.arange(0, WIDTH)
    columns_v = tl.arange(0, WIDTH_V)
    out_row = token.to(tl.int64) * TILE.heads + head
    if row == num_reqs:  # padding tokens
        store_result(out, out_lse, out_row, tl.zeros([BLOCK_M, WIDTH_V], tl.float32),
                     tl.full([BLOCK_M], float("-inf"), tl.float32), columns_v, live, TILE.dim_v)
        return
    if TILE.skip_single:
        if end - start == 1:
            return
    first_key = tl.load(kv_starts + row)
    num_keys = tl.load(kv_starts + row + 1) - first_key
    offset = num_keys - end  # position of a token = its index + offset
    pos = token + offset
    stop = tl.minimum(first_token + BLOCK_M, end) + offset
    causal = tl.maximum(first_token + offset + 1, 0) // BLOCK_N * BLOCK_N  # all queries see the keys before it
    if not TILE.causal:
        pos = token * 0 + num_keys
        stop = num_keys
        causal = num_keys // BLOCK_N * BLOCK_N
    query = tl.load(q + token.to(tl.int64)[:, None] * strides[0] + head.to(tl.int64) * strides[1] + columns[None, :],
                    mask=live[:, None] & (columns < TILE.dim)[None, :], other=0.0)
    query_shared = query
    if SHARED > 0:
        query_shared = tl.load(q + token.to(tl.int64)[:, None] * strides[0] + head.to(tl.int64) * strides[1] + TILE.dim
                               + tl.arange(0, SHARED)[None, :], mask=live[:, None], other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)
    if sinks is not None:
        highest = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total = total + 1.0
    column = head // GROUP * TILE.stride
    column_v = head // GROUP * TILE.stride_v + TILE.first_v
    highest, total, acc = attend_contiguous(highest, total, acc, query, query_shared, pos, keys, values, shared, first_key,
                                            column, column_v, 0, causal, scale, softcap, TILE, False)
    highest, total, acc = attend_contiguous(highest, total, acc, query, query_shared, pos, keys, values, shared, first_key,
                                            column, column_v, causal, stop, scale, softcap, TILE, True)
    seen = tl.where(total != 0, total, 1.0)  # NaN stays, also in the lse
    store_result(out, out_lse, out_row, acc / seen[:, None], highest + tl.log2(seen), columns_v, live, TILE.dim_v)


def config(width: int, width_v: int, shared: int = 0, long: bool = False) -> ContiguousConfig:
    """The parameters for padded head dims: the fastest of those in h200_extend.json; with ``shared`` of four on an H200
    (``benchmarks/backend_kernels.py mla --set`` compares others). ``long``: programs have many keys, and 128 queries that share
    them read half as much as 64 do."""
    widest = max(width, width_v)
    if shared and widest > 64:
        return tuned(ContiguousConfig(128, 64, 8, 3) if long else ContiguousConfig(64, 64, 4, 2))
    if widest <= 128:
        return tuned(ContiguousConfig(64, 64, 4, 3))
    return tuned(ContiguousConfig(128, 64, 8, 2))


@planner
def _plan(heads: int, kv_heads: int, dim: int, dim_v: int, width: int, width_v: int, skip_single: bool, fold: bool,
          shared: int = 0, causal: bool = True, long: bool = False) -> tuple[ContiguousTile, int]:
    """``shared``: as of the tile, whose keys and values then lie side by side."""
    params = config(width, width_v, shared, long)
    fold = fold and max(width, width_v) <= 128  # as in extend
    strides = (width + width_v, width + width_v, width) if shared else (width, width_v, 0)
    return ContiguousTile(heads, kv_heads, dim, dim_v, width, width_v, *strides, shared, skip_single, fold, causal,
                          params.block_m, params.block_n, params.stages), params.warps


def extend_contiguous(q: Tensor, caches: Caches, batch: Batch, route: Route, sinks: Tensor | None,
                      out: Tensor, scale: float, softcap: float | None, lse: Tensor | None = None) -> None:
    """``extend`` by the way of contiguous keys, causal: the sequences that ``route`` copies, and zeros for padding tokens."""
    keys, values = gather_kv(caches, batch.block_table, route.kv_starts, route.num_keys, q.dtype)
    attend_to_contiguous(q, keys, values, batch.query_start_loc, route.kv_starts, sinks, out, scale, softcap,
                         route.skip_single, lse)


def attend_to_contiguous(q: Tensor, keys: Tensor, values: Tensor, query_start_loc: Tensor, kv_starts: Tensor,
                         sinks: Tensor | None, out: Tensor, scale: float, softcap: float | None, skip_single: bool,
                         lse: Tensor | None = None) -> None:
    """Attend q (T, H, D) to keys (N, Hkv, D padded) and values (N, Hkv, Dv padded), both contiguous; queries are the last
    tokens of each sequence. ``out``, ``lse`` and ``skip_single`` are those of ``extend``."""
    plan = _plan(q.shape[1], keys.shape[1], q.shape[2], out.shape[2], keys.shape[2], values.shape[2], skip_single,
                 softcap is None and scale > 0)
    _launch(plan, q, keys.flatten(1), values.flatten(1), None, query_start_loc, kv_starts, sinks, out, lse, scale, softcap)


def attend_to_expanded(q: Tensor, kv: Tensor, k_rope: Tensor, query_start_loc: Tensor, kv_starts: Tensor, *, scale: float,
                       causal: bool) -> tuple[Tensor, Tensor]:
    """``mla_prefill.ragged`` of heads that ``extend_route.serves_expanded``."""
    heads, rope = q.shape[1], k_rope.shape[1]
    nope = q.shape[2] - rope
    dim_v = kv.shape[1] // heads - nope
    out = q.new_empty(q.shape[0], heads, dim_v)
    lse = torch.empty(q.shape[0], heads, dtype=torch.float32, device=q.device)
    long = not causal or q.shape[0] >= LONG * (query_start_loc.shape[0] - 1)
    plan = _plan(heads, heads, nope, dim_v, nope, dim_v, False, scale > 0, rope, causal, long)
    _launch(plan, host.rows_contiguous(q), kv, kv, k_rope.contiguous(), query_start_loc, kv_starts, None, out, lse, scale, None)
    return out, lse


def _launch(plan: tuple[ContiguousTile, int], q: Tensor, keys: Tensor, values: Tensor, shared: Tensor | None,
            query_start_loc: Tensor, kv_starts: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor | None, scale: float,
            softcap: float | None) -> None:
    tile, warps = plan
    num_reqs = query_start_loc.shape[0] - 1
    grid = (q.shape[0] // tile.block_m + num_reqs + 1) * tile.heads
    launch(contiguous_kernel, (grid,), q, descriptor(keys, (tile.block_n, tile.width)),
           descriptor(values, (tile.block_n, tile.width_v)),
           None if shared is None else descriptor(shared, (tile.block_n, tile.shared)), query_start_loc, kv_starts, sinks, out,
           lse, q.shape[0], num_reqs, scale, softcap, q.stride()[:2], tile, num_warps=warps)
