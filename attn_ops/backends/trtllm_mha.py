"""Backend ``trtllm_mha``: TensorRT-LLM's XQA decode kernels, through FlashInfer, on Hopper and consumer Blackwell GPUs.

XQA serves one query token per sequence. A batch with longer queries runs with each of its tokens as a sequence of its own:
exact, and slow for prefill; choose another backend for that step by step. Lengths are read on the device, so
every batch can be captured in a CUDA graph.
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
from quire.attn_ops.library import define_op
from quire.attn_ops.step import current_step
from quire.attn_ops.vendor import by_token, missing, no_compiler, too_old, wrong_gpu

NAME = "trtllm_mha"
LIBRARY = "flashinfer.decode"
INSTALL = "pip install flashinfer-python"
WORKSPACE = 136 << 20  # bytes: 8 MiB of semaphores, which must be zero at first, and 128 MiB for partial results


def workspace(device: torch.device) -> torch.Tensor:
    """The workspace of the step's engine; a new one outside a step."""
    step = current_step()
    if step is not None and NAME in step.states:
        return step.states[NAME]
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def paged_attention(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, slot_mapping: torch.Tensor, block_table: torch.Tensor,
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, sinks: torch.Tensor | None, prepared: list[torch.Tensor], *,
    scale: float, window: int | None, softcap: float | None, chunk: int | None,
) -> torch.Tensor:
    """Store k and v, then attend: q (T, H, D) -> (T, H, D)."""
    if softcap is not None or chunk is not None or k_scale is not None:
        raise UnsupportedAttention("the trtllm_mha backend has no softcap, no chunks and no quantized KV cache with a scale "
                                   "per token")
    write_kv(k, v, k_cache, v_cache, None, None, slot_mapping)
    out = q.new_empty(q.shape)
    if not q.shape[0]:
        return out
    table, lens = prepared or by_token(slot_mapping, block_table, query_start_loc, seq_lens)
    with torch.cuda.device_of(q):
        # Caches have the logical shape of NHD in either layout, and the kernels read strides. A sequence without keys reads
        # the null page, and its result is dropped.
        importlib.import_module(LIBRARY).xqa_batch_decode_with_kv_cache(
            query=q.detach().contiguous(), kv_cache=(k_cache, v_cache), workspace_buffer=workspace(q.device),
            block_tables=table, seq_lens=lens.clamp_min(1).view(torch.uint32),
            max_seq_len=table.shape[1] * k_cache.shape[1], bmm1_scale=scale, bmm2_scale=1.0,
            window_left=-1 if window is None else window - 1, out=out,
            sinks=None if sinks is None else sinks.float(), kv_layout="NHD")
    return out.masked_fill_((lens == 0)[:, None, None], 0)


def _prepare(slot_mapping: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
             page_size: int) -> list[torch.Tensor]:
    return list(by_token(slot_mapping, block_table, query_start_loc, seq_lens))


def _prepare_fake(slot_mapping: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor,
                  seq_lens: torch.Tensor, page_size: int) -> list[torch.Tensor]:
    tokens = slot_mapping.shape[0]
    return [block_table.new_empty(tokens, block_table.shape[1]), seq_lens.new_empty(tokens)]


def _make_state(sites: Any, cache: Any, limits: Any) -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=cache.k[0].device)


def available(device: torch.device) -> str | None:
    package = LIBRARY.partition(".")[0]
    return (wrong_gpu(device, 9, 12) or missing(package, INSTALL) or too_old("flashinfer-python", "0.6.18")
            or no_compiler(package, "flashinfer-jit-cache"))


BACKEND = AttentionBackend(
    name=NAME,
    capabilities=AttentionCapabilities(
        devices=frozenset({"cuda"}), dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=lambda d, dv: d == dv and d in (64, 128, 256), head_dims_note="64, 128 and 256, the same for values",
        kv_dtypes_note="its kernels take one scale for a whole cache, and quire's have one for each token and head",
        page_sizes=lambda p: p in (16, 32, 64, 128), page_sizes_note="16, 32, 64 and 128", min_compute_capability=(9, 0),
        window=True, sinks=True, cudagraph_support=CudagraphSupport.ALWAYS,
    ),
    available=available,
    op=define_paged_op(NAME, paged_attention, devices=("CUDA",)),
    make_state=_make_state,
    prepare=define_op(
        "trtllm_mha_prepare(Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, int page_size) "
        "-> Tensor[]", cpu=_prepare, cuda=_prepare, fake=_prepare_fake),
    packages=("flashinfer-python",),
)
