"""The kernel of ``attn_ops/kv_store.py``: a step's keys and values into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.constants import next_power_of_2
from quire.attn_ops.kernels.host import Caches
from quire.attn_ops.kernels.kv_quant import encode_and_store
from quire.attn_ops.kernels.launch import launch


@triton.jit
def write_kernel(k, v, caches, slot_mapping, k_strides, v_strides, LAYOUT: tl.constexpr, HEADS: tl.constexpr):
    """Program (token, block): HEADS heads. caches: Caches; *_strides: (token, head); LAYOUT: CacheLayout."""
    D: tl.constexpr = LAYOUT.dim
    DV: tl.constexpr = LAYOUT.dim_v
    K: tl.constexpr = LAYOUT.k
    V: tl.constexpr = LAYOUT.v
    S: tl.constexpr = LAYOUT.scale
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    row = token.to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = head < LAYOUT.heads
    which = head.to(tl.int64)  # of keys that lie head by head the stride is T * D
    columns = tl.arange(0, next_power_of_2(D))
    key = tl.load(k + row * k_strides[0] + (which * k_strides[1])[:, None] + columns[None, :],
                  mask=live[:, None] & (columns < D)[None, :], other=0.0)
    encode_and_store(key, head, live, slot, caches.k, caches.k_scale, LAYOUT.page, K, S, D)
    columns_v = tl.arange(0, next_power_of_2(DV))
    value = tl.load(v + row * v_strides[0] + (which * v_strides[1])[:, None] + columns_v[None, :],
                    mask=live[:, None] & (columns_v < DV)[None, :], other=0.0)
    encode_and_store(value, head, live, slot, caches.v, caches.v_scale, LAYOUT.page, V, S, DV)


def write(k: torch.Tensor, v: torch.Tensor, caches: Caches, slot_mapping: torch.Tensor) -> None:
    """Store k (T, Hkv, D) and v (T, Hkv, Dv) at their slots, as codes with scales in quantized caches; slot -1: nothing."""
    num_tokens, kv_heads, dim = k.shape
    if not num_tokens:
        return
    widest = max(host.next_power_of_2(dim), host.next_power_of_2(v.shape[2]))
    block = min(host.next_power_of_2(kv_heads), max(1, 4096 // widest))
    launch(write_kernel, (num_tokens, -(-kv_heads // block)), k, v, caches, slot_mapping, k.stride()[:2], v.stride()[:2],
           host.cache_layout(caches), block, num_warps=4)
