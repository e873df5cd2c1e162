"""Backend ``trtllm_mla``: TensorRT-LLM's kernels for MLA on the latent cache, through FlashInfer, on datacenter Blackwell GPUs.
Not verified on hardware; its call is tested against the signature of flashinfer-python 0.7.2.

The kernel decodes, in absorbed terms. Each token of a ragged batch is given as a sequence of its own (``by_token``): right for
any batch, nothing is read on the host, and every batch can be captured. Prefill reads its keys once per token, and is slow.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from quire.attn_ops.backend import AttentionBackend, AttentionCapabilities, CudagraphSupport
from quire.attn_ops.kv_quant import write
from quire.attn_ops.mla import absorb_query, define_mla_op, expand_output, split_weight
from quire.attn_ops.step import current_step
from quire.attn_ops.vendor import by_token, define_by_token, missing, no_compiler, too_old, widened, wrong_gpu

NAME, RANK, ROPE = "trtllm_mla", 512, 64
LIBRARY = "flashinfer.mla"
INSTALL = "pip install flashinfer-python"
WORKSPACE = 128 << 20  # bytes; zero at first, as the kernels keep counters in it


def _columns(page_size: int) -> int:
    """The kernels read tables in groups of 128 tokens."""
    return max(1, 128 // page_size)


def mla_paged_attention(
    q: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor, kv_b: torch.Tensor, cache: torch.Tensor,
    slot_mapping: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    prepared: list[torch.Tensor], *, scale: float,
) -> torch.Tensor:
    """Store [c, k_rope], then attend: q (T, H, D) -> (T, H, Dv)."""
    heads, nope, page_size = q.shape[1], q.shape[2] - ROPE, cache.shape[1]
    write(cache, None, torch.cat([c, k_rope], dim=-1)[:, None], slot_mapping)
    w_uk, w_uv = split_weight(kv_b, heads, nope)
    if not q.shape[0]:
        return q.new_empty(0, heads, w_uv.shape[1])
    if prepared:
        table, lens = prepared
    else:
        table, lens = by_token(slot_mapping, block_table, query_start_loc, seq_lens)
        table = widened(table, _columns(page_size))
    query = torch.cat([absorb_query(q[..., :nope], w_uk), q[..., nope:]], dim=-1)[:, None]
    step = current_step()
    workspace = step.states[NAME] if step is not None and NAME in step.states else _make_state(None, None, None, q.device)
    with torch.cuda.device_of(q):  # a token without keys reads the null page, and its result is dropped
        out = importlib.import_module(LIBRARY).trtllm_batch_decode_with_kv_cache_mla(
            query=query, kv_cache=cache.squeeze(2), workspace_buffer=workspace, qk_nope_head_dim=nope, kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE, block_tables=table, seq_lens=lens.clamp_min(1), max_seq_len=table.shape[1] * page_size,
            bmm1_scale=scale, bmm2_scale=1.0, backend="trtllm-gen")
    return expand_output(out[:, 0].masked_fill((lens == 0)[:, None, None], 0.0), w_uv)


def _make_state(sites: Any, cache: Any, limits: Any, device: torch.device | None = None) -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device or cache.k[0].device)


def available(device: torch.device) -> str | None:
    return (wrong_gpu(device, 10) or missing(LIBRARY.partition(".")[0], INSTALL) or too_old("flashinfer-python", "0.7.2")
            or no_compiler(LIBRARY.partition(".")[0], "flashinfer-jit-cache"))


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
    make_state=_make_state, prepare=define_by_token(NAME, _columns), packages=("flashinfer-python",), verified=False,
)
