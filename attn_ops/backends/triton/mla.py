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

from quire.attn_ops.backends.triton import schedule
from quire.attn_ops.backends.triton.mla_kernel import attend_kernel, merge_kernel
from quire.attn_ops.backends.triton.plan import Batch, Plan, planner, tuned
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches, Strides
from quire.attn_ops.kernels.kv_write import write
from quire.attn_ops.kernels.launch import launch

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


def config(rank: int, itemsize: int, heads: int, num_tokens: int, num_reqs: int, device: torch.device, codes: bool = False
           ) -> MlaConfig:
    """The parameters. 32 latent vectors of 512+64 in bf16 are 36 KiB of shared memory. Compiled for an H200, 64 rows take 145
    of its 227 KiB, and 16 rows less than half of it: one or two programs fit on a multiprocessor. Of codes, 64 rows spill a
    twentieth of the loop, and 16 rows a hundredth with 64 vectors, so that they keep 32."""
    sms = host.num_sms(device)
    if itemsize == 4:
        block_m, block_n, warps, stages = 16, 16, 8, 1
    elif num_tokens > num_reqs or heads > 32:  # 64 rows are what Hopper's matrix unit takes at a time
        block_m, block_n, warps, stages = 64, 32, 8, 3
    else:
        block_m, block_n, warps, stages = host.next_power_of_2(heads, 16), *((32, 4, 5) if codes else (64, 4, 2))
    tiles = num_tokens * -(-heads // block_m)
    wave = max(1, min(128, (1 if block_m > 32 else 2) * sms // tiles))
    return tuned(MlaConfig(block_m, block_n, warps, stages, 64, 128, 2048 if block_m > 32 else 4096, wave))


@planner
def _plan(num_tokens: int, num_reqs: int, heads: int, rank: int, dtype: torch.dtype, cache_shape: torch.Size,
          cache_strides: tuple[int, ...], scale_strides: tuple[int, ...], table_width: int, device: torch.device) -> Plan:
    params = config(rank, dtype.itemsize, heads, num_tokens, num_reqs, device, any(scale_strides))
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
        return Plan(((num_tokens + extra) * blocks,), params, 1, (num_tokens + extra) * heads * (rank + 1), (tile,), num_tokens,
                    True)
    return Plan((tiles * blocks * splits,), params, splits, num_tokens * heads * splits * (rank + 1) if splits > 1 else 0,
                (tile,))


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
    params = plan.params
    sizes = (num_tokens, num_reqs, plan.splits, params.chunk_min, params.chunk_max, params.wave)
    launch(attend_kernel, plan.grid, q, q_rope, cache, c_scale, rope_scale, batch, out, partial, counters, made, *sizes, scale,
           (*q.stride()[:2], *q_rope.stride()[:2]), batch.block_table.stride(0), *plan.constants, num_warps=params.warps)
    if plan.splits > 1:
        step = max(1, min(16, 8192 // host.next_power_of_2(rank)))
        launch(merge_kernel, (num_tokens, heads), batch, out, partial, *sizes, *plan.constants, step, num_warps=4)
    return out
