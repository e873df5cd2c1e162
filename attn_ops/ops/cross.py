"""Cross attention on a paged cache: keys and values of an encoder, written once per request, read in every step.

Every query sees all keys of its request, so each token is a decode of its own, whose keys are the request's encoder tokens: the
paged op of any backend that needs no plan serves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, UnsupportedAttention
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.kv_quant import write_kv
from quire.attn_ops.metadata import PAD_SLOT_ID
from quire.attn_ops.step import running


def cross_attention(backend: AttentionBackend, q: Tensor, cache: PagedKVCache, layer: int, block_table: Tensor,
                    query_start_loc: Tensor, encoder_lens: Tensor, *, scale: float, softcap: float | None = None,
                    k: Tensor | None = None, v: Tensor | None = None, slot_mapping: Tensor | None = None) -> Tensor:
    """Attend each query to all encoder tokens of its request: q (T, H, D) -> (T, H, Dv).

    Args:
        backend: one whose paged op needs no plan and keeps nothing about keys, such as those of plain PyTorch and of Triton.
        cache, layer: where the encoder's keys and values lie.
        block_table: (B, W) int32, pages of the encoder tokens.  query_start_loc: (B + 1,) int32, of the queries.
        encoder_lens: (B,) int32; the queries of a request with 0 give 0, as padding tokens do.
        k, v, slot_mapping: (N, Hkv, D), (N, Hkv, Dv), (N,) int64: encoder tokens to store first, in the request's first step.
            Raises ValueError for some of them without the others.

    Raises UnsupportedAttention if the backend plans on the host, or does not serve these heads.
    """
    if backend.plan is not None:
        raise UnsupportedAttention(f"cross attention: backend {backend.name} plans on the host for self-attention; use one "
                                   "that does not")
    if backend.every_step:
        raise UnsupportedAttention(f"cross attention: backend {backend.name} keeps data about the keys of self-attention; use "
                                   "one that does not")
    k_cache, v_cache, k_scale, v_scale = cache.of_layer(layer)
    if v_cache is None:
        raise UnsupportedAttention(f"cross attention: layer {layer} of the cache is a latent one, without values of its own")
    site = AttentionSite(layer, q.shape[1], k_cache.shape[2], q.shape[2], v_cache.shape[3], q.dtype, scale, softcap=softcap)
    why = backend.capabilities.reasons_against(site, device=q.device, page_size=cache.page_size, kv_dtype=cache.dtype,
                                               layout=cache.layout, fixed_scale=cache.fixed_scale)
    if why:
        raise UnsupportedAttention(f"cross attention of {site.needs()}: {backend.name} cannot: {'; '.join(why)}")
    given = [x is not None for x in (k, v, slot_mapping)]
    if any(given) != all(given):
        raise ValueError("cross attention: k, v and slot_mapping go together")
    if slot_mapping is not None:
        write_kv(k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping)
    tokens = q.shape[0]
    if not tokens or not encoder_lens.shape[0]:
        return q.new_zeros(tokens, q.shape[1], v_cache.shape[3])
    token = torch.arange(tokens, device=q.device)
    row = torch.searchsorted(query_start_loc[1:].long(), token, right=True).clamp_max(encoder_lens.shape[0] - 1)
    lens = torch.where(token < query_start_loc[-1], encoder_lens[row], 0).int()
    # A token without keys reads the null page, and its result is dropped.
    slots = torch.full((tokens,), PAD_SLOT_ID, dtype=torch.int64, device=q.device)
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=q.device)
    tables = (slots, torch.where((lens > 0)[:, None], block_table[row], 0), starts, lens.clamp_min(1))
    with running(None):  # the lengths of the step in progress are those of self-attention
        out = backend.op(q, None, None, k_cache, v_cache, k_scale, v_scale, *tables, None,
                         backend.prepared(*tables, cache.page_size), scale=scale, window=None, softcap=softcap, chunk=None)
    return out.masked_fill((lens == 0)[:, None, None], 0)
