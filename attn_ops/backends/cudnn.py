"""Backend ``cudnn``: cuDNN's paged attention for decoding, through FlashInfer's calls of 0.7.2. Prompts run token by token, 13
to 18 times as long as with Triton's kernel (docs/performance.md): use ``hybrid:triton+cudnn`` for them.

FlashInfer builds a cuDNN graph for each shape of a batch at its first call, on the host, and needs cuDNN's frontend for it.
A decoder (``paged_by_token``): every batch can be captured after it has run once. cuDNN's packed prefill, for head dim 128
only, is not used.
"""

from __future__ import annotations

import importlib

import torch

from quire.attn_ops.backend import AttentionCapabilities, CudagraphSupport
from quire.attn_ops.vendor import decoder, missing, paged_by_token, state_of, too_old, workspace, wrong_gpu

NAME = "cudnn"
LIBRARY = "flashinfer.cudnn"
WORKSPACE = 128 << 20  # bytes, FlashInfer's recommendation


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, *,
           scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """See ``paged_by_token``. cuDNN wants the heads outside the tokens of a page, and takes any strides."""
    out = torch.empty_like(q)
    importlib.import_module(LIBRARY).cudnn_batch_decode_with_kv_cache(
        q, k_cache.transpose(1, 2), v_cache.transpose(1, 2), scale, state_of(NAME, lambda: workspace(WORKSPACE, q.device)),
        max_sequence_kv=table.shape[1] * k_cache.shape[1], actual_seq_lens_kv=lens.view(-1, 1, 1, 1), block_tables=table,
        is_cuda_graph_compatible=True, out=out, window_left=-1 if window is None else window - 1)
    return out


def available(device: torch.device) -> str | None:
    return (wrong_gpu(device, 8, 9, 10, 12) or missing(LIBRARY.partition(".")[0], "pip install flashinfer-python")
            or too_old("flashinfer-python", "0.7.2") or missing("cudnn", "pip install nvidia-cudnn-frontend"))


CAPABILITIES = AttentionCapabilities(
    devices=frozenset({"cuda"}), dtypes=frozenset({torch.bfloat16, torch.float16}),
    head_dims=lambda d, dv: d == dv and d in (64, 128), head_dims_note="64 and 128, the same for values",
    page_sizes=lambda p: p in (16, 32, 64, 128), page_sizes_note="16, 32, 64 and 128", min_compute_capability=(8, 0),
    window=True, cudagraph_support=CudagraphSupport.ALWAYS,
)
paged_attention = paged_by_token(NAME, CAPABILITIES, attend)
BACKEND = decoder(NAME, CAPABILITIES, available, paged_attention, packages=("flashinfer-python", "nvidia-cudnn-frontend"),
                  make_state=lambda sites, cache, limits: workspace(WORKSPACE, cache.k[0].device))
