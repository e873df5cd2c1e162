"""Labels of keys: which channels they are made of, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.kernels.host import Strides, kernel_module
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.kv_store import has_kernel

NAME = "double_sparsity"


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

    def of_layer(self, layer: int, heads: int, dim: int) -> torch.Tensor:
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

    labels: torch.Tensor
    channels: torch.Tensor
    own: bool  # labels are not the key cache

    def store(self, k_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """The labels of keys that are in the cache already. Slot -1 may write to the null page, which is never read."""
        if self.own and has_kernel(k_cache.device.type):
            self.store_triton(k_cache, slot_mapping)
        elif self.own:
            slot = slot_mapping.clamp_min(0)
            page, offset = slot // k_cache.shape[1], slot % k_cache.shape[1]
            self.labels[page, offset] = labels_of(k_cache[page, offset], self.channels)

    def store_triton(self, k_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if slot_mapping.numel():
            kv_heads, channels = self.channels.shape
            launch(kernel_module("kernels.sparse_decode").store_labels_kernel, (len(slot_mapping), kv_heads), k_cache,
                   self.labels, self.channels, slot_mapping, channels, k_cache.shape[1], Strides(*k_cache.stride()[:3]),
                   Strides(*self.labels.stride()[:3]), num_warps=1)


def labels_of(keys: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """(..., Hkv, D), (Hkv, C) -> (..., Hkv, C)."""
    return keys.gather(-1, channels.long().expand(*keys.shape[:-2], *channels.shape))
