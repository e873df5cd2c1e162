"""Backend ``cudnn``: cuDNN's paged attention for decoding, through FlashInfer. Not verified on hardware; its call is tested
against the signature of flashinfer-python 0.7.2.

FlashInfer builds a cuDNN graph for each shape of a batch at its first call, on the host, and needs cuDNN's frontend for it.
Each token of a ragged batch is given as a sequence of its own (``by_token``): right for any batch, nothing is read on the host,
and every batch can be captured after it has run once. Prefill reads its keys once per token, and is slow: choose another
backend for prefill, step by step. cuDNN's packed prefill, for head dim 128 only, is not used.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from quire.attn_ops.backend import (
    AttentionBackend,
    AttentionCapabilities,
    CudagraphSupport,
    UnsupportedAttention,
    define_paged_op,
)
from quire.attn_ops.kv_quant import write_kv
from quire.attn_ops.step import current_step
from quire.attn_ops.vendor import by_token, define_by_token, missing, too_old, wrong_gpu

NAME = "cudnn"
LIBRARY = "flashinfer.cudnn"
WORKSPACE = 128 << 20  # bytes, FlashInfer's recommendation


def paged_attention(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, slot_mapping: torch.Tensor, block_table: torch.Tensor,
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, sinks: torch.Tensor | None, prepared: list[torch.Tensor], *,
    scale: float, window: int | None, softcap: float | None, chunk: int | None,
) -> torch.Tensor:
    """Store k and v, then attend: q (T, H, D) -> (T, H, D)."""
    if softcap is not None or chunk is not None or sinks is not None or k_scale is not None:
        raise UnsupportedAttention(f"the {NAME} backend has no softcap, chunks, sinks or quantized KV cache")
    write_kv(k, v, k_cache, v_cache, None, None, slot_mapping)
    out = q.new_empty(q.shape)
    if not q.shape[0]:
        return out
    table, lens = prepared or by_token(slot_mapping, block_table, query_start_loc, seq_lens)
    step = current_step()
    workspace = step.states[NAME] if step is not None and NAME in step.states else _make_state(None, None, None, q.device)
    with torch.cuda.device_of(q):  # a token without keys reads the null page, and its result is dropped
        # cuDNN wants the heads outside the tokens of a page, and takes any strides.
        importlib.import_module(LIBRARY).cudnn_batch_decode_with_kv_cache(
            q.detach().contiguous(), k_cache.transpose(1, 2), v_cache.transpose(1, 2), scale, workspace,
            max_sequence_kv=table.shape[1] * k_cache.shape[1], actual_seq_lens_kv=lens.clamp_min(1).view(-1, 1, 1, 1),
            block_tables=table, is_cuda_graph_compatible=True, out=out, window_left=-1 if window is None else window - 1)
    return out.masked_fill_((lens == 0)[:, None, None], 0)


def _make_state(sites: Any, cache: Any, limits: Any, device: torch.device | None = None) -> torch.Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device or cache.k[0].device)


def available(device: torch.device) -> str | None:
    return (wrong_gpu(device, 8, 9, 10, 12) or missing(LIBRARY.partition(".")[0], "pip install flashinfer-python")
            or too_old("flashinfer-python", "0.7.2") or missing("cudnn", "pip install nvidia-cudnn-frontend"))


BACKEND = AttentionBackend(
    name=NAME,
    capabilities=AttentionCapabilities(
        devices=frozenset({"cuda"}), dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_dims=lambda d, dv: d == dv and d in (64, 128), head_dims_note="64 and 128, the same for values",
        page_sizes=lambda p: p in (16, 32, 64, 128), page_sizes_note="16, 32, 64 and 128", min_compute_capability=(8, 0),
        window=True, cudagraph_support=CudagraphSupport.ALWAYS,
    ),
    available=available,
    op=define_paged_op(NAME, paged_attention, devices=("CUDA",)),
    make_state=_make_state, prepare=define_by_token(NAME), packages=("flashinfer-python", "nvidia-cudnn-frontend"),
    verified=False,
)
