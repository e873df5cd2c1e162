"""Writing a step's keys and values into the paged cache: one program a token and block of heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.attn_ops.backends.triton._common import power_of_2
from quire.attn_ops.kernels.kv_quant import rounding, scale_strides, store_heads
from quire.attn_ops.kernels.launch import launch


@triton.jit
def write_kernel(
    k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, stride_kt, stride_kh, stride_vt, stride_vh,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    K_PAGE: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr,
    HEADS: tl.constexpr, D_P2: tl.constexpr, DV_P2: tl.constexpr,
    S_PAGE: tl.constexpr, S_TOKEN: tl.constexpr, S_HEAD: tl.constexpr,
    QMAX: tl.constexpr, LOWEST: tl.constexpr, ROUNDER: tl.constexpr,
):
    """None stands for absent scales: the caches then take keys and values as they are."""
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    row = token.to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = head < HKV
    columns = tl.arange(0, D_P2)
    key = tl.load(k + row * stride_kt + (head * stride_kh)[:, None] + columns[None, :],
                  mask=live[:, None] & (columns < D)[None, :], other=0.0)
    store_heads(key, head, live, slot, k_cache, k_scale, PAGE, K_PAGE, K_TOKEN, K_HEAD, S_PAGE, S_TOKEN, S_HEAD, QMAX, LOWEST,
                ROUNDER, D, D_P2)
    columns_v = tl.arange(0, DV_P2)
    value = tl.load(v + row * stride_vt + (head * stride_vh)[:, None] + columns_v[None, :],
                    mask=live[:, None] & (columns_v < DV)[None, :], other=0.0)
    store_heads(value, head, live, slot, v_cache, v_scale, PAGE, V_PAGE, V_TOKEN, V_HEAD, S_PAGE, S_TOKEN, S_HEAD, QMAX, LOWEST,
                ROUNDER, DV, DV_P2)


def write(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None,
          v_scale: torch.Tensor | None, slot_mapping: torch.Tensor) -> None:
    """Store k (T, Hkv, D) and v (T, Hkv, Dv) at their slots of the caches, which it mutates, the scales too; slot -1
    stores nothing."""
    num_tokens, kv_heads, dim = k.shape
    dim_v = v.shape[2]
    if not num_tokens:
        return
    dim_p2, dim_v_p2 = power_of_2(dim), power_of_2(dim_v)
    block = min(power_of_2(kv_heads), max(1, 4096 // max(dim_p2, dim_v_p2)))
    launch(
        write_kernel, (num_tokens, -(-kv_heads // block)),
        k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kv_heads, dim, dim_v, k_cache.shape[1], *k_cache.stride()[:3], *v_cache.stride()[:3], block, dim_p2, dim_v_p2,
        *scale_strides(k_scale), *rounding(k_cache.dtype), num_warps=4,
    )


__all__ = ["write"]
