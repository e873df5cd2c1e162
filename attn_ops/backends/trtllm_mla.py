"""Backend ``trtllm_mla``: TensorRT-LLM's kernels for MLA on the latent cache, through FlashInfer, on datacenter Blackwell GPUs.
Not verified on hardware; its call is tested against the signature of flashinfer-python 0.7.2. A decoder (``mla_by_token``)."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from quire.attn_ops.backend import CudagraphSupport
from quire.attn_ops.vendor import decoder, mla_by_token, mla_only, no_flashinfer, state_of, workspace, wrong_gpu

NAME, RANK, ROPE = "trtllm_mla", 512, 64
WORKSPACE = 128 << 20  # bytes; zero at first, as the kernels keep counters in it


def _columns(page_size: int) -> int:
    """The kernels read tables in groups of 128 tokens."""
    return max(1, 128 // page_size)


def attend(query: Tensor, rotary: Tensor, cache: Tensor, table: Tensor, lens: Tensor, scale: float, nope: int) -> Tensor:
    return importlib.import_module("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla(
        query=torch.cat([query, rotary], dim=-1)[:, None], kv_cache=cache,
        workspace_buffer=state_of(NAME, lambda: workspace(WORKSPACE, query.device)), qk_nope_head_dim=nope, kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE, block_tables=table, seq_lens=lens, max_seq_len=table.shape[1] * cache.shape[1], bmm1_scale=scale,
        bmm2_scale=1.0, backend="trtllm-gen")[:, 0]


def available(device: torch.device) -> str | None:
    return wrong_gpu(device, 10) or no_flashinfer("0.7.2")


mla_paged_attention = mla_by_token(attend, _columns)
CAPABILITIES = mla_only(
    RANK, ROPE, dtypes=frozenset({torch.bfloat16}), page_sizes=lambda p: p in (32, 64), page_sizes_note="32 and 64",
    layouts=frozenset({"NHD"}), min_compute_capability=(10, 0), cudagraph_support=CudagraphSupport.ALWAYS)
BACKEND = decoder(NAME, CAPABILITIES, available, mla_paged_attention, _columns, packages=("flashinfer-python",), verified=False,
                  make_state=lambda sites, cache, limits: workspace(WORKSPACE, cache.k[0].device))
