"""A paged step without a compiler: a call of the semantic op goes straight to a backend's paged op.

So runs a model of the attention interface inside ``quire.step`` when it is not compiled: slow to launch, exact, for debuggers.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, UnsupportedAttention
from quire.attn_ops.selection import select_backend
from quire.attn_ops.step import Step, ensure_planned


def check_step(step: Step, tokens: int) -> None:
    """Raises ValueError unless the ragged row has as many tokens as the metadata."""
    if tokens != step.metadata.num_tokens:
        raise ValueError(f"the model ran on {tokens} tokens inside a paged step whose metadata has "
                         f"{step.metadata.num_tokens}; pass the batch as one ragged row input_ids[None] of that length")


def paged_eager(step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, *, layer: int,
                scale: float, window: int | None, softcap: float | None, chunk: int | None, causal: bool) -> torch.Tensor:
    """One attention call inside a paged step: (B, H, S, D) as the semantic op takes it -> (B, H, S, Dv)."""
    site = AttentionSite(layer=layer, num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[3],
                         head_dim_v=v.shape[3], dtype=q.dtype, scale=scale, window=window, softcap=softcap, chunk=chunk,
                         sinks=sinks is not None, causal=causal)
    cache = step.cache
    check_step(step, q.shape[0] * q.shape[2])
    if cache.is_latent(layer):
        raise UnsupportedAttention(
            f"layer {layer} of the step's cache holds latent vectors (MLA), which only a compiled model writes: call "
            "torch.compile(model, backend='quire') in the step, or make the cache with PagedKVCache.for_model(model)")
    cache.check(site)
    if not isinstance(step.attention, AttentionBackend):
        step.attention = select_backend(step.attention, [site], device=q.device, page_size=cache.page_size,
                                        kv_dtype=cache.dtype, layout=cache.layout, fixed_scale=cache.fixed_scale).backend
    backend = step.attention
    why = backend.capabilities.reasons_against(site, device=q.device, page_size=cache.page_size, kv_dtype=cache.dtype,
                                               layout=cache.layout, fixed_scale=cache.fixed_scale)
    if why:
        raise UnsupportedAttention(f"attention site {layer} needs {site.needs()}; {backend.name} cannot: {'; '.join(why)}")
    ensure_planned(step, backend, [site])
    meta = step.metadata
    tables = (meta.slot_mapping, meta.block_table_tensor, meta.query_start_loc, meta.seq_lens)
    prepared: dict[str, Any] = step.states.setdefault("prepared", {})
    if backend.name not in prepared:
        prepared[backend.name] = [] if backend.prepare is None else backend.prepare(*tables, cache.page_size)
    flat = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    out = backend.op(*flat, *cache.of_layer(layer), *tables, sinks, prepared[backend.name], scale=scale, window=window,
                     softcap=softcap, chunk=chunk)
    step.served.add(layer)
    return out.view(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
