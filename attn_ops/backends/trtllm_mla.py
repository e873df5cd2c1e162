"""Backend ``trtllm_mla``: TensorRT-LLM's kernels for MLA on the latent cache, through FlashInfer, on datacenter Blackwell GPUs.
Not verified on hardware; its call is tested against the signature of flashinfer-python 0.7.2. A decoder (``mla_by_token``)."""

from __future__ import annotations

import importlib

import torch

from quire.attn_ops.backend import AttentionBackend, AttentionCapabilities, CudagraphSupport
from quire.attn_ops.mla import define_mla_op
from quire.attn_ops.vendor import define_by_token, mla_by_token, no_flashinfer, state_of, workspace, wrong_gpu

NAME, RANK, ROPE = "trtllm_mla", 512, 64
LIBRARY = "flashinfer.mla"
WORKSPACE = 128 << 20  # bytes; zero at first, as the kernels keep counters in it


def _columns(page_size: int) -> int:
    """The kernels read tables in groups of 128 tokens."""
    return max(1, 128 // page_size)


def attend(query: torch.Tensor, rotary: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor,
           scale: float, nope: int) -> torch.Tensor:
    return importlib.import_module(LIBRARY).trtllm_batch_decode_with_kv_cache_mla(
        query=torch.cat([query, rotary], dim=-1)[:, None], kv_cache=cache,
        workspace_buffer=state_of(NAME, lambda: workspace(WORKSPACE, query.device)), qk_nope_head_dim=nope, kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE, block_tables=table, seq_lens=lens, max_seq_len=table.shape[1] * cache.shape[1], bmm1_scale=scale,
        bmm2_scale=1.0, backend="trtllm-gen")[:, 0]


def available(device: torch.device) -> str | None:
    return wrong_gpu(device, 10) or no_flashinfer("0.7.2")


mla_paged_attention = mla_by_token(attend, _columns)
BACKEND = AttentionBackend(
    name=NAME,
    capabilities=AttentionCapabilities(
        devices=frozenset({"cuda"}), dtypes=frozenset({torch.bfloat16}), head_dims=lambda d, dv: False,
        head_dims_note="MLA only", mla=True, mla_dims=lambda rank, rope: (rank, rope) == (RANK, ROPE),
        mla_dims_note=f"{RANK}+{ROPE}", page_sizes=lambda p: p in (32, 64), page_sizes_note="32 and 64",
        layouts=frozenset({"NHD"}), min_compute_capability=(10, 0), cudagraph_support=CudagraphSupport.ALWAYS,
    ),
    available=available, op=None,
    mla_op=define_mla_op(NAME, mla_paged_attention, devices=("CUDA",)),
    make_state=lambda sites, cache, limits: workspace(WORKSPACE, cache.k[0].device), prepare=define_by_token(NAME, _columns),
    packages=("flashinfer-python",), verified=False,
)
