"""Storing a step's keys and values, or latent vectors, in the paged cache: on a GPU in one launch. In PyTorch
(``kv_quant.write_kv``, the definition, of the same bits) it takes seven for keys and seven for values."""

from __future__ import annotations

import functools
import importlib.util

import torch

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches, rows_contiguous
from quire.attn_ops.kv_quant import check_scales, write_kv
from quire.attn_ops.mla import write_latent


@functools.cache
def has_kernel(device_type: str) -> bool:
    """Whether tensors of such a device are stored by the kernel: CUDA devices (AMD's too), where Triton is installed."""
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None


def store_kv(k: torch.Tensor | None, v: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor,
             k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, slot_mapping: torch.Tensor) -> None:
    """Store k (T, Hkv, D) and v (T, Hkv, Dv) at their slots (T,) int64 of the caches, as codes with scales where these are
    quantized. Slot -1 stores nothing. k and v None: the cache has them already. Raises ValueError for scales that do not match
    the caches, and on a GPU for caches whose last dim is not contiguous."""
    if k is None or v is None:
        return
    check_scales(k_cache, k_scale, v_scale, fixed=True)
    if not has_kernel(k.device.type):
        write_kv(k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping)
        return
    caches = Caches(k_cache, v_cache, k_scale, v_scale)
    host.check_cache_strides("storing keys and values", caches)
    host.kernel_module("kernels.kv_write").write(rows_contiguous(k), rows_contiguous(v), caches, slot_mapping)


def store_latent(c: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor,
                 c_scale: torch.Tensor | None = None, rope_scale: torch.Tensor | None = None) -> None:
    """``mla.write_latent``: c (T, rank) and k_rope (T, R) to their slots of the latent cache. Raises as ``store_kv``."""
    if has_kernel(c.device.type):
        rank = c.shape[1]
        store_kv(c[:, None], k_rope[:, None], cache[..., :rank], cache[..., rank:], c_scale, rope_scale, slot_mapping)
    else:
        write_latent(c, k_rope, cache, slot_mapping, c_scale, rope_scale)
