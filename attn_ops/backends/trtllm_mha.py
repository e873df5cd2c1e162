"""Backend ``trtllm_mha``: TensorRT-LLM's XQA decode kernels, through FlashInfer, on Hopper and consumer Blackwell GPUs.
A decoder (``paged_by_token``)."""

from __future__ import annotations

import importlib

import torch

from quire.attn_ops.backend import AttentionCapabilities, CudagraphSupport
from quire.attn_ops.vendor import ONE_SCALE, decoder, no_flashinfer, paged_by_token, state_of, workspace, wrong_gpu

NAME = "trtllm_mha"
WORKSPACE = 136 << 20  # bytes: 8 MiB of semaphores, which must be zero at first, and 128 MiB for partial results


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, *,
           scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """See ``paged_by_token``. Caches have the logical shape of NHD in either layout, and the kernels read strides."""
    out = torch.empty_like(q)
    importlib.import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache(
        query=q, kv_cache=(k_cache, v_cache), workspace_buffer=state_of(NAME, lambda: workspace(WORKSPACE, q.device)),
        block_tables=table, seq_lens=lens.view(torch.uint32), max_seq_len=table.shape[1] * k_cache.shape[1], bmm1_scale=scale,
        bmm2_scale=1.0, window_left=-1 if window is None else window - 1, out=out, kv_layout="NHD",
        sinks=None if sinks is None else sinks.float().contiguous())
    return out


def available(device: torch.device) -> str | None:
    return wrong_gpu(device, 9, 12) or no_flashinfer("0.6.18")


CAPABILITIES = AttentionCapabilities(
    devices=frozenset({"cuda"}), dtypes=frozenset({torch.float16, torch.bfloat16}),
    head_dims=lambda d, dv: d == dv and d in (64, 128, 256), head_dims_note="64, 128 and 256, the same for values",
    kv_dtypes_note=ONE_SCALE,
    page_sizes=lambda p: p in (16, 32, 64, 128), page_sizes_note="16, 32, 64 and 128", min_compute_capability=(9, 0),
    window=True, sinks=True, cudagraph_support=CudagraphSupport.ALWAYS,
)
paged_attention = paged_by_token(NAME, CAPABILITIES, attend)
BACKEND = decoder(NAME, CAPABILITIES, available, paged_attention, packages=("flashinfer-python",),
                  make_state=lambda sites, cache, limits: workspace(WORKSPACE, cache.k[0].device))
