"""Prompts of many queries per key, by keys and values copied to contiguous memory.

On Hopper GPUs FlashInfer's kernel loads contiguous keys with the tensor memory accelerator, and pages without it. Four prompts
of 32704 tokens took qwen3-0.6b 1,055 instead of 1,189 ms (``h200_long_contiguous.json``, ``h200_long.json``). The copy takes
time per key, so what counts is how many queries read each. Keys of a quantized cache are copied as they read back: FlashInfer's
kernels take one scale for a whole cache, and quire's caches have one for each token and head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.tuning.prefill import pairs

#: Seconds per operation of the two products that contiguous keys spare. Estimated from those two files;
#: ``benchmarks/attention_grid.py --systems fi-fa3,fi-ragged`` measures both ways, and has not run yet.
SAVED = 0.3e-15
MORE_LAUNCHES = 15e-6  # seconds, of the copy; estimated
DIM = 128  # the head dim of both files: others stay with the pages until they are measured


class Contiguous:
    """A plan that is run as one for pages is: copies, then attends. ``wrapper``: FlashInfer's
    BatchPrefillWithRaggedKVCacheWrapper, planned. ``block_table``: (B, W); ``kv_starts``: (B + 1,) int32, device, where the
    keys of each sequence begin; ``num_keys``: of all; ``heads_first``: whether ``run`` gets pages of (Hkv, page, D)."""

    def __init__(self, wrapper: Any, block_table: torch.Tensor, kv_starts: torch.Tensor, num_keys: int, heads_first: bool
                 ) -> None:
        self.wrapper, self.block_table, self.kv_starts, self.num_keys = wrapper, block_table, kv_starts, num_keys
        self.heads_first = heads_first

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor],
            scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None), **options: Any) -> Any:
        k, v = (x.transpose(1, 2) if self.heads_first else x for x in pages)
        copied = host.kernel_module("kernels.gather_kv").gather_kv(
            Caches(k, v, *scales), self.block_table, self.kv_starts, self.num_keys, q.dtype, padded=False)
        return self.wrapper.run(q, *copied, **options)


def spares(query_lens: np.ndarray, seq_lens: np.ndarray, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether sequences of (B,) lengths take less time this way, and their keys little enough memory."""
    copied = 4 * kv_heads * dim * int(seq_lens.sum(dtype=np.int64))
    saved = 4 * heads * dim * pairs(query_lens, seq_lens, None, None) * SAVED
    return dim == DIM and copied <= host.MAX_GATHERED and saved > 2 * copied / host.GATHER_BANDWIDTH + MORE_LAUNCHES


def parts(query_lens: np.ndarray, seq_lens: np.ndarray, kv_heads: int, dim: int) -> list[tuple[int, int]]:
    """(first row, row after the last) of parts of the batch whose copied keys, in half precision, stay within the memory for
    copies. Raises ValueError for a sequence whose keys do not."""
    room, found, begin, copied = host.MAX_GATHERED // (4 * kv_heads * dim), [], 0, 0
    for row, (queries, keys) in enumerate(zip(query_lens.tolist(), seq_lens.tolist(), strict=True)):
        if queries and keys > room:
            raise ValueError(f"flashinfer: the copied keys of a sequence of {keys} tokens in a quantized cache are more than "
                             f"{host.MAX_GATHERED >> 20} MiB")
        if copied + keys > room:
            found.append((begin, row))
            begin, copied = row, 0
        copied += keys
    return [*found, (begin, len(seq_lens))]


def lengths(metadata: CommonAttentionMetadata, first: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Query tokens, and keys, of the sequences ``first`` to ``rows``; sequences without queries have no keys."""
    query_lens = np.diff(metadata.query_start_loc_cpu.numpy()[first : rows + 1])
    return query_lens, np.where(query_lens > 0, metadata.seq_lens_cpu.numpy()[first:rows], 0)


def plan(wrapper: Any, metadata: CommonAttentionMetadata, first: int, rows: int, heads: int, kv_heads: int, dim: int,
         heads_first: bool, **options: Any) -> Contiguous:
    """Plan the sequences ``first`` to ``rows`` of a batch. ``options``: further ones of FlashInfer's plan."""
    query_lens, seq_lens = lengths(metadata, first, rows)
    starts = [torch.from_numpy(np.concatenate(([0], np.cumsum(lens))).astype(np.int32)) for lens in (query_lens, seq_lens)]
    wrapper.plan(*starts, heads, kv_heads, dim, causal=True, **options)
    on_device = host.kernel_module("kernels.gather_kv").kv_starts(
        metadata.query_start_loc[first : rows + 1], metadata.seq_lens[first:rows])
    return Contiguous(wrapper, metadata.block_table_tensor[first:rows], on_device, int(seq_lens.sum()), heads_first)
