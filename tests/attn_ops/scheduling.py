"""One sequence through a backend in steps of given lengths, on one cache: what cutting it must not change."""

from __future__ import annotations

import torch

from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.metadata import CommonAttentionMetadata


def steps_of(length: int, size: int) -> list[int]:
    return [min(size, length - begin) for begin in range(0, length, size)]


def in_pieces(backend: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: list[int],
              kv_dtype: torch.dtype | None, *, page_size: int = 4, rows: int = 1) -> tuple[torch.Tensor, PagedKVCache]:
    """q (T, H, D), k, v (T, Hkv, D or Dv) -> (T, H, Dv) and the cache. ``rows`` > 1 pads each step with empty sequences."""
    pages = -(-len(q) // page_size)
    cache = PagedKVCache(num_layers=1, num_pages=pages + 1, page_size=page_size, num_kv_heads=k.shape[1], head_dim=k.shape[2],
                         head_dim_v=v.shape[2], dtype=kv_dtype or k.dtype, device=q.device)
    outs, done = [], 0
    for count in pieces:
        own = slice(done, done + count)
        done += count
        meta = CommonAttentionMetadata.build([count], [done], [list(range(1, pages + 1))], page_size=page_size,
                                             device=q.device).padded(count, rows)
        tables = (meta.slot_mapping, meta.block_table_tensor, meta.query_start_loc, meta.seq_lens)
        prepared = backend.prepare(*tables, page_size) if backend.prepare is not None else []
        outs.append(backend.op(q[own], k[own], v[own], *cache.of_layer(0), *tables, None, prepared, scale=k.shape[2] ** -0.5,
                               window=None, softcap=None, chunk=None))
    assert done == len(q)
    return torch.cat(outs), cache
