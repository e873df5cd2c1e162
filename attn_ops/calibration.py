"""Which channels of the keys matter: measured while a model runs, for backends that look at some of them only.

A score is a sum over channels of q[c] * k[c]. If the two were independent, the root mean square of a channel's part would be
``sqrt(mean(q[c]**2) * mean(k[c]**2))``: that is a channel's importance, with q[c]**2 summed over the query heads of a key head,
after the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, CudagraphSupport, define_paged_op
from quire.attn_ops.composite import op_name
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.step import current_step


class ChannelMoments:
    """Sums of squares by layer: of q (H, D) and of k (Hkv, D), float64; and the tokens counted."""

    def __init__(self) -> None:
        self.sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.tokens = 0

    def reset(self) -> None:
        for sums in self.sums.values():
            for total in sums:
                total.zero_()
        self.tokens = 0

    def importance(self, layer: int) -> torch.Tensor:
        """(Hkv, D) of the layer."""
        q, k = self.sums[layer]
        return (q.unflatten(0, (k.shape[0], -1)).sum(1) * k).sqrt()

    def ranked(self) -> dict[int, list[list[int]]]:
        """Layer -> key head -> its channels, most important first."""
        return {layer: self.importance(layer).argsort(-1, descending=True).tolist() for layer in sorted(self.sums)}


def recorder(base: AttentionBackend, moments: ChannelMoments) -> AttentionBackend:
    """``base``, with every step's queries and keys added to ``moments``. Raises ValueError for one with a state or a plan."""
    if base.op is None or base.make_state is not None or base.plan is not None:
        raise ValueError(f"channels are measured through a backend without state and plan, which {base.name} is not")
    name = op_name("calibration")

    def make_state(sites: Sequence[AttentionSite], cache: PagedKVCache, limits: Any) -> dict[int, int]:
        for site in sites:
            shapes = ((site.num_heads, site.head_dim), (site.num_kv_heads, site.head_dim))
            q, k = (torch.zeros(shape, dtype=torch.float64, device=cache.device) for shape in shapes)
            moments.sums.setdefault(site.layer, (q, k))
        return {cache.of_layer(site.layer)[0].data_ptr(): site.layer for site in sites}

    def paged_attention(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, k_cache: torch.Tensor, *rest: Any,
                        **options: Any) -> torch.Tensor:
        out = base.op(q, k, v, k_cache, *rest, **options)
        step, slots = current_step(), rest[3]
        assert step is not None
        layer = step.states[name][k_cache.data_ptr()]
        live = slots >= 0
        slots = slots[live]
        keys = k_cache[slots // k_cache.shape[1], slots % k_cache.shape[1]]
        for total, new in zip(moments.sums[layer], (q[live], keys), strict=True):
            total += new.double().square().sum(0)
        if layer == min(moments.sums):
            moments.tokens += len(slots)
        return out

    capabilities = replace(base.capabilities, cudagraph_support=CudagraphSupport.NEVER, mla=False, lse=False)  # op alone
    return AttentionBackend(name=name, capabilities=capabilities, available=base.available,
                            op=define_paged_op(name, paged_attention), make_state=make_state, prepare=base.prepare,
                            every_step=True)
