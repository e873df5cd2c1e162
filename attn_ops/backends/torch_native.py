"""Backend ``torch_native``: paged attention in plain PyTorch, on any device, with every feature of the semantic op.

The default on a CPU. It has no Python loop over sequences and, on a GPU, no device-to-host read, and its work grows with the
tokens attended, not with the size of the cache.

Queries are cut into *tiles* of at most M consecutive tokens of one sequence. T tokens of B sequences make at most
T // M + B tiles, a number known from shapes alone, so nothing depends on device data. Each tile goes through its sequence's
pages by blocks of keys with a running softmax (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.attn_ops import mla_prefill
from quire.attn_ops.attention import visible
from quire.attn_ops.backend import (
    AttentionBackend,
    AttentionCapabilities,
    CudagraphSupport,
    define_paged_op,
    define_prepare,
    define_state_op,
)
from quire.attn_ops.kv_quant import FIXED_SCALE_KV_DTYPES, QUANTIZED_KV_DTYPES, check_scales, dequantize, is_fixed, write_kv
from quire.attn_ops.mla import absorb_query, define_mla_op, expand_output, read_latent, split_weight, write_latent

TILE = 16  # queries per tile when the batch has a prefill; larger wastes work on the decode rows of a mixed batch
KEYS = 512  # keys per block: bounds the memory of gathered keys and scores
Scale = Tensor | tuple[int, Tensor, Tensor] | None  # of keys; (rank, of latent vectors, of rotary parts)


def _prepare(slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
             page_size: int) -> list[Tensor]:
    """Cut the batch into tiles, once per forward: [row, token, position], (tiles,) sequence of each tile, (tiles, M) token
    index of each of its queries, T for no query, and (tiles, M) position of each in its sequence."""
    num_tokens, num_reqs = slot_mapping.shape[0], seq_lens.shape[0]
    size = 1 if num_tokens <= num_reqs else TILE  # M
    start = query_start_loc.long()
    lens = start.diff()
    tiles_end = ((lens + size - 1) // size).cumsum(0)
    tile = torch.arange(num_tokens // size + num_reqs, device=slot_mapping.device)
    row = torch.searchsorted(tiles_end, tile, right=True).clamp_max(num_reqs - 1)
    first = tile - (tiles_end[row] - (lens[row] + size - 1) // size)
    offset = first[:, None] * size + torch.arange(size, device=tile.device)
    live = (offset < lens[row][:, None]) & (tile < tiles_end[-1])[:, None]
    token = torch.where(live, start[row][:, None] + offset, num_tokens)
    position = (seq_lens.long()[row] - lens[row])[:, None] + offset
    return [row, token, position]


def _prepare_fake(slot_mapping: Tensor, *others: Any) -> list[Tensor]:
    # Sizes that only the paged op itself reads: fresh symbols, so that no guard compares T with B.
    ctx = torch.library.get_ctx()
    tiles, size = ctx.new_dynamic_size(), ctx.new_dynamic_size()
    long = slot_mapping.new_empty
    return [long(tiles), long(tiles, size), long(tiles, size)]


def _gather(cache: Tensor, scale: Scale, pages: Tensor) -> Tensor:
    """The keys or values on ``pages`` (tiles, n), as they read back: (tiles, n * page_size, Hkv, D) float32."""
    if scale is None:
        return cache[pages].flatten(1, 2).float()
    codes = cache.view(torch.int8)[pages].view(cache.dtype)
    if isinstance(scale, tuple):
        return read_latent(codes, scale[0], scale[1][pages], scale[2][pages]).flatten(1, 2)
    return dequantize(codes, scale if is_fixed(scale) else scale[pages]).flatten(1, 2)


def paged_attention(*tensors: Any, **options: Any) -> Tensor:
    """Store k and v, then attend: q (T, H, D) -> (T, H, Dv). ``attn_ops/backend.py`` has the arguments."""
    return _attend(*tensors, **options, causal=True)[0]


def attention_state(*tensors: Any, scale: float, softcap: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Store k and v, then attend: q (T, H, D) -> (T, H, Dv) and the log-sum-exp (T, H). STATE_SCHEMA has the arguments."""
    tensors = (*tensors[:-1], None, tensors[-1])  # the place of sinks
    return _attend(*tensors, scale=scale, window=None, softcap=softcap, chunk=None, causal=causal)


def _attend(q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Scale,
            v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
            sinks: Tensor | None, prepared: list[Tensor], *, scale: float, window: int | None, softcap: float | None,
            chunk: int | None, causal: bool) -> tuple[Tensor, Tensor]:
    if not isinstance(k_scale, tuple):
        check_scales(k_cache, k_scale, v_scale, fixed=True)
        write_kv(k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping)
    page_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    num_tokens, heads, dim = q.shape
    row, token, position = prepared or _prepare(slot_mapping, block_table, query_start_loc, seq_lens, page_size)
    tiles, size = token.shape
    if not causal:  # every query sees what the last one would
        position = (seq_lens.long()[row] - 1)[:, None].expand(tiles, size)
    # A row of zeros stands in for "no query", so that gathering needs no branch; its result is dropped at the end.
    padded = torch.cat([q, q.new_zeros(1, heads, dim)])
    queries = padded[token].float().view(tiles, size, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    queries = (queries * scale).reshape(tiles, kv_heads, -1, dim)
    limit = (position.amax(1) + 1).clamp_max(seq_lens.long()[row])

    highest = torch.full((tiles, kv_heads, heads // kv_heads, size, 1), float("-inf"), dtype=torch.float32,
                         device=q.device)
    total = torch.zeros_like(highest)
    out = torch.zeros(tiles, kv_heads, heads // kv_heads, size, v_cache.shape[3], dtype=torch.float32, device=q.device)
    if sinks is not None:
        highest = sinks.float().view(1, kv_heads, -1, 1, 1).expand_as(highest)
        total = torch.ones_like(highest)
    pages_per_block = max(1, KEYS // page_size)
    first_page, last_page = 0, block_table.shape[1]
    if q.device.type == "cpu":  # the host has the lengths: only the pages in use
        last_page = min(last_page, -(-int(seq_lens.max()) // page_size)) if seq_lens.numel() else 0
        if window is not None and last_page:
            live = token < num_tokens
            lowest = int(torch.where(live, position, torch.iinfo(torch.int64).max).min())
            first_page = max(0, min(last_page, (lowest - window + 1) // page_size))
    for begin in range(first_page, last_page, pages_per_block):
        pages = block_table[:, begin : min(begin + pages_per_block, last_page)].long()[row]
        width = pages.shape[1] * page_size
        keys = _gather(k_cache, k_scale, pages).permute(0, 2, 3, 1)
        scores = (queries @ keys).view(tiles, kv_heads, heads // kv_heads, size, width)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        key_pos = torch.arange(begin * page_size, begin * page_size + width, device=q.device)
        keep = visible(position[:, :, None], key_pos, window=window, chunk=chunk, causal=True)
        beyond = key_pos >= limit[:, None]
        keep = keep & ~beyond[:, None]
        scores = scores.masked_fill(~keep[:, None, None], float("-inf"))
        new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
        safe = new_highest.masked_fill(new_highest == float("-inf"), 0.0)  # rows that have seen no key yet
        weights = torch.exp(scores - safe)
        shrink = torch.exp(highest - safe)
        values = _gather(v_cache, v_scale, pages).transpose(1, 2)
        values = values.masked_fill(beyond[:, None, :, None], 0.0)  # 0 * NaN is NaN
        part = weights.view(tiles, kv_heads, -1, width) @ values
        out = out * shrink + part.view(out.shape)
        total = total * shrink + weights.sum(-1, keepdim=True)
        highest = new_highest
    out = (out / total.clamp_min(torch.finfo(torch.float32).tiny)).permute(0, 3, 1, 2, 4)
    result = q.new_zeros(num_tokens + 1, heads, v_cache.shape[3])
    result[token.reshape(-1)] = out.reshape(tiles * size, heads, -1).to(q.dtype)
    lse = torch.full((num_tokens + 1, heads), float("-inf"), dtype=torch.float32, device=q.device)
    lse[token.reshape(-1)] = (highest + total.log()).permute(0, 3, 1, 2, 4).reshape(tiles * size, heads)
    return result[:num_tokens].clone(), lse[:num_tokens].clone()


def _absorbed(q: Tensor, c: Tensor, k_rope: Tensor, kv_b: Tensor, cache: Tensor, slot_mapping: Tensor, block_table: Tensor,
              query_start_loc: Tensor, seq_lens: Tensor, prepared: list[Tensor], c_scale: Tensor | None = None,
              rope_scale: Tensor | None = None, *, scale: float) -> Tensor:
    """MLA on the latent cache, absorbed and in float32: q (T, H, D) -> (T, H, Dv). ``attn_ops/mla.py`` has the arguments."""
    write_latent(c, k_rope, cache, slot_mapping, c_scale, rope_scale)
    rank, nope = c.shape[1], q.shape[2] - k_rope.shape[1]
    w_uk, w_uv = (w.float() for w in split_weight(kv_b, q.shape[1], nope))
    absorbed = torch.cat([absorb_query(q[..., :nope].float(), w_uk), q[..., nope:].float()], dim=-1)
    of_keys = None if c_scale is None or rope_scale is None else (rank, c_scale, rope_scale)
    out, _ = _attend(absorbed, None, None, cache, cache[..., :rank], of_keys, c_scale, slot_mapping, block_table,
                     query_start_loc, seq_lens, None, prepared, scale=scale, window=None, softcap=None, chunk=None, causal=True)
    return expand_output(out, w_uv).to(q.dtype)


def mla_paged_attention(*args: Any, scale: float) -> Tensor:
    """MLA on the latent cache: long prefills expanded (``attn_ops/mla_prefill.py``), all others absorbed."""
    return mla_prefill.attend(_absorbed, mla_prefill.ragged, *args, scale=scale)


BACKEND = AttentionBackend(
    name="torch_native",
    capabilities=AttentionCapabilities(
        devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_dtypes=QUANTIZED_KV_DTYPES, latent_kv_dtypes=QUANTIZED_KV_DTYPES, fixed_scale_kv_dtypes=FIXED_SCALE_KV_DTYPES,
        window=True, softcap=True, sinks=True, chunk=True, mla=True, lse=True, any_batch=True,
        cudagraph_support=CudagraphSupport.ALWAYS,
    ),
    available=lambda device: None,
    op=define_paged_op("torch_native", paged_attention),
    mla_op=define_mla_op("torch_native", mla_paged_attention),
    state_op=define_state_op("torch_native", attention_state),
    prepare=define_prepare("torch_native", _prepare, _prepare_fake),
    priority={"cpu": 0, "cuda": 100},
)
