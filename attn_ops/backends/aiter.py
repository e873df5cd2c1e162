"""Backend ``aiter``: AMD's AI Tensor Engine (package amd-aiter) on MI300 and newer. Not verified on hardware. Its kernels read
pages of one token: ``prepare`` lays the slots of all sequences end to end."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from quire.attn_ops.backend import AttentionBackend, AttentionCapabilities, CudagraphSupport, define_paged_op, define_prepare
from quire.attn_ops.kv_store import store_kv
from quire.attn_ops.vendor import by_token, missing, no_rocm, padding_tokens, slots_end_to_end

NAME = "aiter"
PARTITION = 256  # keys per partial result of the decode kernel
INSTALL = "pip install --pre amd-aiter (the package aiter is another project)"


def _prepare(slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
             page_size: int) -> list[Tensor]:
    """[indptr, slots, tokens on the last page of each row, a scale of 1, padding]: rows are tokens in a batch of decodes, else
    sequences; padding (T, 1, 1) bool."""
    table, lens = block_table, seq_lens
    if slot_mapping.shape[0] <= len(seq_lens):
        table, lens = by_token(slot_mapping, block_table, query_start_loc, seq_lens)
        lens = lens.clamp_min(1)
    return [*slots_end_to_end(table, lens, page_size), torch.ones_like(lens),
            torch.ones(1, dtype=torch.float32, device=lens.device), padding_tokens(slot_mapping, query_start_loc)]


def _prepare_fake(slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                  seq_lens: Tensor, page_size: int) -> list[Tensor]:
    ctx = torch.library.get_ctx()  # sizes that only the paged op reads
    rows, slots, ends = ctx.new_dynamic_size(), ctx.new_dynamic_size(), ctx.new_dynamic_size()
    return [seq_lens.new_empty(ends), seq_lens.new_empty(slots), seq_lens.new_empty(rows),
            seq_lens.new_empty(1, dtype=torch.float32), seq_lens.new_empty(slot_mapping.shape[0], 1, 1, dtype=torch.bool)]


def paged_attention(q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                    v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                    seq_lens: Tensor, sinks: Tensor | None, prepared: list[Tensor], *, scale: float, window: int | None,
                    softcap: float | None, chunk: int | None) -> Tensor:
    BACKEND.capabilities.refuse(NAME, k_scale, window=window, softcap=softcap, chunk=chunk, sinks=sinks)
    store_kv(k, v, k_cache, v_cache, None, None, slot_mapping)
    tokens, heads, dim = q.shape
    if not tokens:
        return q.new_empty(q.shape)
    page_size, room = k_cache.shape[1], block_table.shape[1] * k_cache.shape[1]
    indptr, slots, last, one, padding = prepared or _prepare(slot_mapping, block_table, query_start_loc, seq_lens, page_size)
    lib, q = importlib.import_module("aiter"), q.detach().contiguous()
    caches = [c.view(-1, 1, *c.shape[2:]) for c in (k_cache, v_cache)]  # pages of one token
    if tokens > seq_lens.shape[0]:
        out = lib.mha_batch_prefill_func(
            q, caches[0][:, 0], caches[1][:, 0], query_start_loc, indptr, slots, tokens, room, softmax_scale=scale,
            logits_soft_cap=softcap or 0.0, causal=True)
        return out.masked_fill_(padding, 0)
    out, partitions = torch.empty_like(q), -(-room // PARTITION)
    workspace = torch.empty(tokens * heads * partitions * (4 * dim + 8), dtype=torch.uint8, device=q.device)
    lib.paged_attention_ragged(
        out, workspace, q, *caches, scale, indptr, slots, last, 1, partitions, None, "auto", "NHD", softcap or 0.0, one, one,
        None, PARTITION)
    return out.masked_fill_(padding, 0)


def available(device: torch.device) -> str | None:
    if why := no_rocm(device) or missing("aiter", INSTALL):
        return why
    found = importlib.util.find_spec("aiter")
    if not any(Path(folder, "ops").is_dir() for folder in (found and found.submodule_search_locations) or ()):
        return f"the package aiter that is installed is not AMD's: pip uninstall aiter, then {INSTALL}"
    return None


BACKEND = AttentionBackend(
    name=NAME,
    capabilities=AttentionCapabilities(
        devices=frozenset({"cuda"}), dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_dims=lambda d, dv: d == dv and d in (64, 128, 256), head_dims_note="64, 128 and 256, the same for values",
        layouts=frozenset({"NHD"}), softcap=True, cudagraph_support=CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    ),
    available=available,
    op=define_paged_op(NAME, paged_attention, devices=("CUDA",)),
    prepare=define_prepare(NAME, _prepare, _prepare_fake),
    packages=("amd-aiter",), verified=False,
)
