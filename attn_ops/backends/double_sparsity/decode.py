"""Labels of keys, which channels they are made of and where they lie, and decoding over the keys that they choose: the
definition in plain PyTorch, and in kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches, Strides, kernel_module
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.kv_store import has_kernel
from quire.attn_ops.ops.merge_state import merge_states_triton

NAME = "double_sparsity"
SCORE_BYTES = 256 << 20  # of the approximate scores, and of the candidates among them, that are held at a time


@dataclass(frozen=True)
class Options:
    """``channels`` per label, None: all; ``ranked``: layer -> key heads' channels, most important first."""

    tokens: int
    dense_below: int
    channels: int | None = None
    ranked: dict[int, list[list[int]]] | None = None

    @property
    def limit(self) -> int:
        """The longest sequence that is attended exactly."""
        return max(self.tokens, self.dense_below)

    def of_layer(self, layer: int, heads: int, dim: int) -> Tensor:
        """(Hkv, CHANNELS) int64. Raises UnsupportedAttention if the file is of another model."""
        if self.ranked is None or self.channels is None:
            return torch.arange(dim).repeat(heads, 1)
        rows = self.ranked.get(layer)
        if rows is None or len(rows) != heads or any(sorted(r) != list(range(dim)) for r in rows):
            have = "no such layer" if rows is None else f"{len(rows)} heads of {len(rows[0])} channels"
            raise UnsupportedAttention(
                f"{NAME}: layer {layer} has {heads} key heads of {dim} channels, the file has {have}: it was made from another "
                "model. Run `quire calibrate` on this one")
        if self.channels > dim:
            raise UnsupportedAttention(f"{NAME}: {self.channels} channels of keys that have {dim}")
        return torch.tensor([r[: self.channels] for r in rows])


@dataclass(frozen=True)
class LayerLabels:
    """labels: (num_pages, page_size, Hkv, CHANNELS), or the key cache itself; channels: (Hkv, CHANNELS) int32."""

    labels: Tensor
    channels: Tensor
    own: bool  # labels are not the key cache

    def store(self, k_cache: Tensor, slot_mapping: Tensor) -> None:
        """The labels of keys that are in the cache already. Slot -1 may write to the null page, which is never read."""
        if self.own and has_kernel(k_cache.device.type):
            self.store_triton(k_cache, slot_mapping)
        elif self.own:
            slot = slot_mapping.clamp_min(0)
            page, offset = slot // k_cache.shape[1], slot % k_cache.shape[1]
            self.labels[page, offset] = labels_of(k_cache[page, offset], self.channels)

    def store_triton(self, k_cache: Tensor, slot_mapping: Tensor) -> None:
        if slot_mapping.numel():
            kv_heads, channels = self.channels.shape
            launch(kernel_module("kernels.sparse_decode").store_labels_kernel, (len(slot_mapping), kv_heads), k_cache,
                   self.labels, self.channels, slot_mapping, channels, k_cache.shape[1], Strides(*k_cache.stride()[:3]),
                   Strides(*self.labels.stride()[:3]), num_warps=1)


def labels_of(keys: Tensor, channels: Tensor) -> Tensor:
    """(..., Hkv, D), (Hkv, C) -> (..., Hkv, C)."""
    return keys.gather(-1, channels.long().expand(*keys.shape[:-2], *channels.shape))


def choose_eager(q: Tensor, layer: LayerLabels, table: Tensor, lens: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Positions (T, H, n) of the keys that each query head attends to, and which of them count (T, H, n). Of keys with equal
    scores the first are chosen."""
    page_size, heads = layer.labels.shape[1], q.shape[1]
    table = table[:, : max(1, -(-int(lens.max()) // page_size))].long()
    labels = layer.labels[table].flatten(1, 2).repeat_interleave(heads // layer.labels.shape[2], 2)  # (T, L, H, C)
    query = labels_of(q, layer.channels.repeat_interleave(heads // layer.channels.shape[0], 0))
    scores = torch.einsum("thc,tlhc->thl", query.float(), labels.float())
    dense = (lens <= options.limit)[:, None, None]
    live = torch.arange(scores.shape[2], device=q.device) < lens[:, None, None]
    scores = scores.masked_fill(dense, 0.0).masked_fill(~live, float("-inf"))
    positions = scores.sort(dim=2, descending=True, stable=True).indices[..., : options.limit]  # NaN first
    rank = torch.arange(positions.shape[2], device=q.device)
    return positions, (positions < lens[:, None, None]) & (dense | (rank < options.tokens))


def decode_eager(q: Tensor, k_cache: Tensor, v_cache: Tensor, layer: LayerLabels, table: Tensor, lens: Tensor, options: Options,
                 scale: float, softcap: float | None) -> Tensor:
    """The definition: each of q (T, H, D) is the last token of a sequence of lens (T,) tokens on pages table (T, W)."""
    positions, keep = choose_eager(q, layer, table, lens, options)
    tokens, heads, count = positions.shape
    page = table.long().gather(1, (positions // k_cache.shape[1]).flatten(1)).view(tokens, heads, count)
    kv_head = torch.arange(heads, device=q.device)[:, None] // (heads // k_cache.shape[2])
    keys, values = (c[page, positions % c.shape[1], kv_head].float() for c in (k_cache, v_cache))  # (T, H, n, D)
    scores = scale * (keys @ q.float().unsqueeze(-1))[..., 0]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~keep, float("-inf")), -1)
    weights = weights.masked_fill(~keep.any(-1, keepdim=True), 0.0)  # no key at all: padding
    return (weights.unsqueeze(2) @ values.masked_fill(~keep[..., None], 0.0))[:, :, 0].to(q.dtype)


def choose_triton(q: Tensor, layer: LayerLabels, table: Tensor, lens: Tensor, options: Options) -> Tensor:
    """Positions (T, H, TOKENS) int32 of the keys that each query head attends to, in no order: those of ``choose_eager``, up to
    the rounding of float32 sums. Of a token that is attended exactly, memory may hold anything."""
    tokens, heads, _ = q.shape
    labels, (kv_heads, channels), page_size = layer.labels, layer.channels.shape, layer.labels.shape[1]
    width, limit = table.shape[1] * page_size, options.limit
    picked, group = min(options.tokens, width), heads // kv_heads
    if width <= limit:  # the block table has no room for a sequence that is not attended exactly
        return torch.empty(tokens, heads, picked, dtype=torch.int32, device=q.device)
    block = max(16, 4096 // host.next_power_of_2(group, 16)) if q.dtype.itemsize == 2 else 64
    scores = torch.empty(tokens, heads, width, dtype=torch.int32, device=q.device)
    launch(kernel_module("kernels.sparse_decode").label_scores_kernel, (tokens, kv_heads, -(-width // block)), q, labels,
           layer.channels, table, lens, scores, q.stride()[:2], table.stride(0), width, limit, group, channels,
           page_size, Strides(*labels.stride()[:3]), min(64, host.next_power_of_2(channels, 16)), block, num_warps=4)
    return kernel_module("kernels.select").largest(scores, lens, picked, limit)


def decode_triton(q: Tensor, k_cache: Tensor, v_cache: Tensor, layer: LayerLabels, table: Tensor, lens: Tensor,
                  options: Options, scale: float, softcap: float | None) -> Tensor:
    """``decode_eager`` in three kernels, and one that merges; reads nothing on the host, and shapes follow from shapes."""
    caches = Caches(k_cache, v_cache, None, None)
    host.check_cache_strides(f"the {NAME} backend", caches)
    q = host.rows_contiguous(q)
    tokens, heads, dim = q.shape
    dim_v, half = v_cache.shape[3], q.dtype.itemsize == 2
    width, limit = table.shape[1] * k_cache.shape[1], options.limit
    block = (64 if max(dim, dim_v) <= 128 else 32) if half else 16
    # At most three programs for each multiprocessor, as many as fit there, of at least four steps each.
    splits = max(1, min(3 * host.num_sms(q.device) // (tokens * heads), min(limit, width) // (4 * block)))
    out = torch.empty(tokens, splits, heads, dim_v, dtype=torch.float32 if splits > 1 else q.dtype, device=q.device)
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device) if splits > 1 else None
    at_once = max(1, SCORE_BYTES // (heads * width * 12))
    for begin in range(0, tokens, at_once):
        part = slice(begin, min(begin + at_once, tokens))
        listed = choose_triton(q[part], layer, table[part], lens[part], options)
        launch(kernel_module("kernels.sparse_decode").attend_listed_kernel, (len(listed) * heads, splits), q[part], k_cache,
               v_cache, table[part], lens[part], listed, out[part], None if lse is None else lse[part], q.stride()[:2],
               table.stride(0), listed.shape[2], limit, heads, scale, softcap, heads // k_cache.shape[2],
               host.cache_layout(caches), block, 4 if half else 1, num_warps=4)
    return out[:, 0] if lse is None else merge_states_triton(out, lse, q.dtype)[0]
