"""Backend ``flex_attention``: torch's FlexAttention, on CUDA compiled by Inductor, on a CPU with its dense fallback.

The pages of the batch are gathered into one row of keys per sequence, zeros past its end, and FlexAttention runs on them with a
block mask made from the lengths. A batch of another shape compiles nothing; a new combination of head counts, head dims, dtype
and features does, and one block in the place of several. Batches of one token per sequence run as (T, H, 1, D), all others as
one ragged row. It reads the lengths on the host, as the size of the gathered row, so its steps are not captured in CUDA graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from quire.attn_ops.attention import visible
from quire.attn_ops.backend import AttentionBackend, AttentionCapabilities, CudagraphSupport, define_paged_op
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES, check_scales, dequantize
from quire.attn_ops.kv_store import store_kv
from quire.attn_ops.step import current_step

NAME = "flex_attention"
BLOCK = 128  # queries and keys per block of the mask
#: Below 128 queries Inductor takes its kernel for few. Its block of queries is all of them times the query heads per key head,
#: and past a block of the mask it finds no such kernel ("No choices exist"). So a ragged row goes to the kernel for many.
MANY: Any = {"FORCE_USE_FLEX_ATTENTION": True}
ROUND = 1024  # keys that the gathered rows are rounded up to: few sizes, few allocations


def gather(cache: Tensor, scale: Tensor | None, pages: Tensor, live: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys or values on ``pages`` (B, n): (B, Hkv, L, D), L = n * page_size, and whether each is finite, (B, Hkv, L). Zeros
    stand for what is not ``live`` (B, L) or not finite: a masked key has weight 0, and 0 * NaN is NaN."""
    rows = cache[pages] if scale is None else dequantize(cache.view(torch.int8)[pages].view(cache.dtype), scale[pages])
    rows = rows.flatten(1, 2).to(dtype).transpose(1, 2).masked_fill(~live[:, None, :, None], 0)
    finite = rows.isfinite().all(-1)
    return rows.masked_fill(~finite[..., None], 0), finite


def plainly(run: Callable[[], Tensor], device: torch.device) -> Tensor:
    """``run()``; inside a dispatch mode of the caller (opcheck's) in a thread of its own, where the mode does not reach:
    neither vmap nor Dynamo works under one, and for the mode the op is one call."""
    try:
        with torch.overrides.enable_reentrant_dispatch():
            pass
    except RuntimeError:  # not inside a mode
        return run()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def alone() -> Tensor:
        with torch.no_grad(), torch.cuda.stream(stream):
            return run()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(alone).result()


def block_mask(first: Tensor, last: Tensor, num_keys: int, mask_mod: Any) -> BlockMask:
    """The block mask of queries (N, S) that see keys from first to last (N, S), none where last < first."""
    batch, queries = first.shape
    q_blocks, k_blocks = -(-queries // BLOCK), -(-num_keys // BLOCK)
    block = (torch.arange(queries, device=first.device) // BLOCK).expand(batch, queries)
    some = (last >= first).int()
    change = torch.zeros(batch, q_blocks * (k_blocks + 1), dtype=torch.int32, device=first.device)
    change.scatter_add_(1, block * (k_blocks + 1) + first.clamp(0, num_keys - 1) // BLOCK, some)
    change.scatter_add_(1, block * (k_blocks + 1) + last.clamp(0, num_keys - 1) // BLOCK + 1, -some)
    needed = (change.view(batch, q_blocks, k_blocks + 1).cumsum(-1)[..., :-1] > 0).int()
    # In ascending order, those needed first: sums go in the order of positions, wherever the pages are.
    order = torch.argsort(needed, dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(needed.sum(-1, dtype=torch.int32)[:, None], order[:, None], BLOCK_SIZE=(BLOCK, BLOCK),
                                    mask_mod=mask_mod, seq_lengths=(queries, num_keys))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, softcap: Tensor | None, lse: bool) -> Any:
    def capped(score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return softcap * torch.tanh(score / softcap)  # type: ignore[operator]

    return flex_attention(q, k, v, score_mod=None if softcap is None else capped, block_mask=mask, scale=scale,
                          enable_gqa=q.shape[1] != k.shape[1],
                          return_aux=AuxRequest(lse=True) if lse else None,
                          kernel_options=MANY if q.shape[2] > 1 else None)


@functools.cache
def _compiled(device: str) -> Any:
    return torch.compile(_attend, dynamic=True, backend="inductor" if device == "cuda" else "eager")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, softcap: float | None,
           sinks: Tensor | None) -> Tensor:
    """q (N, H, S, D), k, v (N, Hkv, L, D) -> (N, H, S, D). Sinks leave exp(lse) / (exp(lse) + exp(sink)) of the weight for the
    keys."""
    # As a number it would be a new compilation.
    cap = None if softcap is None else torch.full((), softcap, dtype=torch.float32, device=q.device)
    # Layers differ in dims and features, each of which is one compilation; torch's limit is 8.
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
        found = _compiled(q.device.type)(q, k, v, mask, scale, cap, sinks is not None)
    if sinks is None:
        return found
    out, aux = found
    return out * torch.sigmoid(aux.lse - sinks.float()[:, None])[..., None].to(out.dtype)


def paged_attention(q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                    v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                    seq_lens: Tensor, sinks: Tensor | None, prepared: list[Tensor], *, scale: float, window: int | None,
                    softcap: float | None, chunk: int | None) -> Tensor:
    check_scales(k_cache, k_scale, v_scale)
    store_kv(k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping)
    (tokens, heads, _), room, rows = q.shape, block_table.shape[1] * k_cache.shape[1], seq_lens.shape[0]
    step = current_step()
    longest = room if step is None else min(step.metadata.max_seq_len, room)
    if not tokens or not rows or not longest:
        return q.new_zeros(tokens, heads, v_cache.shape[3])
    pages = block_table[:, : -(-(-(-longest // ROUND) * ROUND) // k_cache.shape[1])].long()
    token = torch.arange(tokens, device=q.device)
    row = torch.searchsorted(query_start_loc[1:].long(), token, right=True).clamp_max(rows - 1)
    live = token < query_start_loc[-1]
    pos = torch.where(live, seq_lens.long()[row] - query_start_loc.long()[row + 1] + token, -1)
    low = torch.zeros_like(pos)
    if window is not None:
        low = torch.maximum(low, pos - (window - 1))
    if chunk is not None:
        low = torch.maximum(low, pos // chunk * chunk)
    inside = torch.arange(pages.shape[1] * k_cache.shape[1], device=q.device) < seq_lens[:, None]
    keys, finite_keys = gather(k_cache, k_scale, pages, inside, q.dtype)
    values, finite_values = gather(v_cache, v_scale, pages, inside, q.dtype)
    width, group = keys.shape[2], heads // keys.shape[1]
    if group & (group - 1):  # Inductor's kernel for few queries takes powers of two only
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))

    def seen(query: Any, key: Any) -> Tensor:
        return visible(pos[query], key, window=window, chunk=chunk, causal=True) & live[query]

    def by_token(b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return seen(b, j)

    def in_row(b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return (row[i] == j // width) & seen(i, j % width)

    def run() -> Tensor:
        if tokens <= rows:
            mask = block_mask(low[:, None], pos[:, None], width, by_token)
            return attend(q[:, :, None], keys[row], values[row], mask, scale, softcap, sinks)[:, :, 0]
        begin = row * width
        mask = block_mask((begin + low)[None], torch.where(live, begin + pos, -1)[None], rows * width, in_row)
        flat_k, flat_v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (keys, values))
        return attend(q.transpose(0, 1)[None], flat_k, flat_v, mask, scale, softcap, sinks)[0].transpose(0, 1)

    out = plainly(run, q.device)
    # A query that sees a key or value that is not finite has no result, for the heads that read it.
    bad = torch.nn.functional.pad((~(finite_keys & finite_values)).int().cumsum(-1), (1, 0))[row]
    last, first = (bad.gather(2, at.clamp_min(0)[:, None, None].expand(-1, bad.shape[1], 1))[..., 0] for at in (pos + 1, low))
    spoilt = (last > first).repeat_interleave(heads // bad.shape[1], 1)
    return out.masked_fill(spoilt[..., None], float("nan")).masked_fill(~live[:, None, None], 0).contiguous()


BACKEND = AttentionBackend(
    name=NAME,
    capabilities=AttentionCapabilities(
        devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_dtypes=QUANTIZED_KV_DTYPES, head_dims=lambda d, dv: d == dv and d in (16, 32, 64, 128, 256),
        head_dims_note="16, 32, 64, 128 and 256, the same for values", window=True, softcap=True, sinks=True, chunk=True,
        any_batch=True, cudagraph_support=CudagraphSupport.NEVER,
    ),
    available=lambda device: None if device.type != "cuda" or torch.cuda.is_available() else (
        "no CUDA device is visible to PyTorch"),
    op=define_paged_op(NAME, paged_attention),
)
