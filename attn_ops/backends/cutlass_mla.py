"""Backend ``cutlass_mla``: CUTLASS's decoding kernel for MLA on the latent cache, from sgl-kernel, on datacenter Blackwell
GPUs. Not verified on hardware; its call is tested against the signature of sgl-kernel 0.3.21. A decoder (``mla_by_token``),
with up to 128 heads."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from quire.attn_ops.backend import CudagraphSupport
from quire.attn_ops.vendor import decoder, missing, mla_by_token, mla_only, state_of, too_old, wrong_gpu

NAME, PAGE_SIZE, RANK, ROPE, HEADS = "cutlass_mla", 128, 512, 64, 128
LIBRARY = "sgl_kernel"


def attend(query: Tensor, rotary: Tensor, cache: Tensor, table: Tensor, lens: Tensor, scale: float, nope: int) -> Tensor:
    workspace = state_of(NAME, lambda: _workspace(table.shape[1], len(query), query.device))
    return importlib.import_module(LIBRARY).cutlass_mla_decode(
        q_nope=query.contiguous(), q_pe=rotary.contiguous(), kv_c_and_k_pe_cache=cache, seq_lens=lens,
        page_table=table.contiguous(), workspace=workspace, sm_scale=scale, num_kv_splits=1)


def _workspace(pages: int, tokens: int, device: torch.device) -> Tensor:
    """Workspace for batches of ``tokens`` tokens with ``pages`` pages each. Keys are not split: graphs need a fixed number."""
    size = importlib.import_module(LIBRARY).cutlass_mla_get_workspace_size(
        max_seq_len=pages * PAGE_SIZE, num_batches=tokens, num_kv_splits=1)
    return torch.empty(size, dtype=torch.uint8, device=device)


def available(device: torch.device) -> str | None:
    return (wrong_gpu(device, 10) or missing(LIBRARY, "pip install sgl-kernel, of the version for your torch and CUDA")
            or too_old("sgl-kernel", "0.3.21"))


mla_paged_attention = mla_by_token(attend)
CAPABILITIES = mla_only(
    RANK, ROPE, dtypes=frozenset({torch.bfloat16, torch.float16}), heads=lambda heads, kv_heads: heads <= HEADS,
    heads_note=f"up to {HEADS} query heads", page_sizes=lambda p: p == PAGE_SIZE, page_sizes_note=f"{PAGE_SIZE}",
    layouts=frozenset({"NHD"}), min_compute_capability=(10, 0), cudagraph_support=CudagraphSupport.ALWAYS)
BACKEND = decoder(
    NAME, CAPABILITIES, available, mla_paged_attention, packages=("sgl-kernel",), verified=False,
    make_state=lambda sites, cache, limits: _workspace(
        max(1, limits.max_pages_per_seq), max(1, limits.max_num_tokens), cache.k[0].device))
