"""Backend ``intel_amx``: the CPU kernels of sgl-kernel, for processors with AMX. Not verified on hardware. They index the cache
by token, and take the step's keys and values beside it."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from quire.attn_ops.backend import AttentionBackend, AttentionCapabilities, CudagraphSupport, define_paged_op
from quire.attn_ops.kv_quant import write_kv
from quire.attn_ops.vendor import missing, wrong_device

NAME = "intel_amx"
INSTALL = "build sgl-kernel for CPUs from SGLang's source tree (sgl-kernel, pyproject_cpu.toml)"
SPLITS = 8  # of the keys of a query, in the decode kernel


def paged_attention(q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                    v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                    seq_lens: Tensor, sinks: Tensor | None, prepared: list[Tensor], *, scale: float, window: int | None,
                    softcap: float | None, chunk: int | None) -> Tensor:
    BACKEND.capabilities.refuse(NAME, k_scale, window=window, softcap=softcap, chunk=chunk, sinks=sinks)
    importlib.import_module("sgl_kernel")  # registers torch.ops.sgl_kernel
    heads, page_size = q.shape[1], k_cache.shape[1]
    counts = query_start_loc.diff().long()
    rows, live = counts.nonzero()[:, 0], int(counts.sum())  # the kernels take no rows without tokens
    out = q.new_zeros(q.shape[0], heads, v_cache.shape[3])
    if not live:
        return out
    keys, values = (cache.flatten(0, 1) for cache in (k_cache, v_cache))
    slots = slot_mapping[:live]
    if k is None or v is None:  # in the cache already
        k, v = keys[slots], values[slots]
    else:
        write_kv(k, v, k_cache, v_cache, None, None, slot_mapping)
    new_k, new_v, query, result = k[:live].contiguous(), v[:live].contiguous(), q[:live].contiguous(), out[:live]
    table = (block_table[rows].long()[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
    request, lens, cap = torch.arange(len(rows)), seq_lens[rows].long(), softcap or 0.0
    if int(counts.max()) == 1:
        logits = torch.empty(live, heads, SPLITS, v_cache.shape[3] + 1, dtype=torch.float32)
        torch.ops.sgl_kernel.decode_attention_cpu(
            query, keys, values, result, new_k, new_v, slots, logits, table, request, lens, scale, cap)
    else:
        torch.ops.sgl_kernel.extend_attention_cpu(
            query, new_k, new_v, result, keys, values, table, request, lens, counts[rows], query_start_loc[rows].long(),
            int(counts.max()), scale, cap)
    return out


def available(device: torch.device) -> str | None:
    if why := wrong_device(device, "cpu"):
        return why
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    if not has_amx():
        return "the processor has no AMX (Intel Xeon of the 4th generation and newer have it)"
    return missing("sgl_kernel", INSTALL) or _no_kernels()


def _no_kernels() -> str | None:
    """Why the installed package has no kernels for CPUs: another build of it is for GPUs."""
    try:
        importlib.import_module("sgl_kernel")
    except Exception as error:
        return f"sgl_kernel does not load ({type(error).__name__}: {error}): {INSTALL}"
    found = all(hasattr(torch.ops.sgl_kernel, name) for name in ("decode_attention_cpu", "extend_attention_cpu"))
    return None if found else f"the sgl_kernel that is installed has no kernels for CPUs: {INSTALL}"


BACKEND = AttentionBackend(
    name=NAME,
    capabilities=AttentionCapabilities(
        devices=frozenset({"cpu"}), dtypes=frozenset({torch.bfloat16, torch.float16}), layouts=frozenset({"NHD"}),
        head_dims=lambda d, dv: d % 32 == 0 and dv % 32 == 0 and max(d, dv) <= 256, head_dims_note="multiples of 32 up to 256",
        softcap=True, cudagraph_support=CudagraphSupport.NEVER,
    ),
    available=available,
    op=define_paged_op(NAME, paged_attention, devices=("CPU",)),
    packages=("sgl-kernel",), verified=False,
)
