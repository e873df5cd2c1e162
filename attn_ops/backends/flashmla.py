"""Backend ``flashmla``: FlashMLA's decoding kernel for MLA on the latent cache, in absorbed terms, on Hopper GPUs.

The kernel takes equally many queries per sequence, so each token of a ragged batch becomes a row of its own, with its
sequence's pages and its position + 1 as length (``prepare``). That is right for any batch and reads nothing on the host;
prefill reads its keys once per token, and is slow. The package is ``sgl-flash-mla``, which keeps the dense kernels for Hopper.
Not yet run on a GPU; its call is tested against the signature of version 1.0.0.
"""

from __future__ import annotations

import functools
import importlib

import torch

from quire.attn_ops.backend import AttentionBackend, AttentionCapabilities, CudagraphSupport
from quire.attn_ops.kv_quant import write
from quire.attn_ops.library import define_op
from quire.attn_ops.mla import absorb_query, define_mla_op, expand_output, split_weight
from quire.attn_ops.vendor import missing, too_old, wrong_gpu

INSTALL = "pip install sgl-flash-mla (torch 2.14.1 or newer, CUDA 13)"
NAME, PAGE_SIZE, RANK, ROPE = "flashmla", 64, 512, 64


def _prepare(slot_mapping: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
             page_size: int) -> list[torch.Tensor]:
    """[table (T, W), lens (T,)] int32: pages and number of keys of each token; padding tokens have the null page and 1 key."""
    token = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    row = torch.searchsorted(query_start_loc[1:].long(), token, right=True).clamp_max(seq_lens.shape[0] - 1)
    live = slot_mapping >= 0
    lens = seq_lens[row] - query_start_loc[1:][row] + token + 1
    return [torch.where(live[:, None], block_table[row], 0), torch.where(live, lens, 1).int()]


def _prepare_fake(slot_mapping: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor,
                  seq_lens: torch.Tensor, page_size: int) -> list[torch.Tensor]:
    return [block_table.new_empty(slot_mapping.shape[0], block_table.shape[1]),
            seq_lens.new_empty(slot_mapping.shape[0])]


def mla_paged_attention(
    q: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor, kv_b: torch.Tensor, cache: torch.Tensor,
    slot_mapping: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    prepared: list[torch.Tensor], *, scale: float,
) -> torch.Tensor:
    """Store [c, k_rope], then attend: q (T, H, D) -> (T, H, Dv)."""
    heads, nope = q.shape[1], q.shape[2] - ROPE
    write(cache, None, torch.cat([c, k_rope], dim=-1)[:, None], slot_mapping)
    w_uk, w_uv = split_weight(kv_b, heads, nope)
    if not q.shape[0]:
        return q.new_empty(0, heads, w_uv.shape[1])
    table, lens = prepared or _prepare(slot_mapping, block_table, query_start_loc, seq_lens, PAGE_SIZE)
    queries = torch.cat([absorb_query(q[..., :nope], w_uk), q[..., nope:]], dim=-1)
    package = importlib.import_module("flash_mla")
    out, _ = package.flash_mla_with_kvcache(
        queries[:, None], cache, table, lens, RANK, package.get_mla_metadata()[0], softmax_scale=scale, causal=False,
        use_legacy=True)
    return expand_output(out[:, 0].masked_fill((slot_mapping < 0)[:, None, None], 0.0), w_uv)


@functools.cache
def _import_error() -> str | None:
    """Why the package does not load: its libraries are for one version of torch and CUDA."""
    try:
        importlib.import_module("flash_mla")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def available(device: torch.device) -> str | None:
    if why := wrong_gpu(device, 9) or missing("flash_mla", INSTALL) or too_old("sgl-flash-mla", "1.0.0", INSTALL):
        return why
    error = _import_error()
    return None if error is None else f"flash_mla does not load with torch {torch.__version__} ({error}): {INSTALL}"


BACKEND = AttentionBackend(
    name=NAME,
    capabilities=AttentionCapabilities(
        devices=frozenset({"cuda"}), dtypes=frozenset({torch.float16, torch.bfloat16}), head_dims=lambda d, dv: False,
        head_dims_note="MLA only", mla=True, mla_dims=lambda rank, rope: (rank, rope) == (RANK, ROPE),
        mla_dims_note=f"{RANK}+{ROPE}", page_sizes=lambda p: p == PAGE_SIZE, page_sizes_note=f"{PAGE_SIZE}",
        layouts=frozenset({"NHD"}), min_compute_capability=(9, 0), cudagraph_support=CudagraphSupport.ALWAYS,
    ),
    available=available, op=None,
    mla_op=define_mla_op(NAME, mla_paged_attention, devices=("CUDA",)),
    prepare=define_op(
        f"{NAME}_prepare(Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, int page_size) -> "
        "Tensor[]", cpu=_prepare, cuda=_prepare, fake=_prepare_fake),
    packages=("sgl-flash-mla",), verified=False,
)
