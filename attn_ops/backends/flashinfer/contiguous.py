"""Prompts by keys and values in contiguous memory (``routes.py``): copied from pages, or the op's own k and v.

Keys of a quantized cache are copied as they read back: FlashInfer's kernels take one scale for a whole cache, and quire's
caches have one for each token and head. See NOTE [Values behind a sequence]: the copies of each sequence end with zeros.

By the op's own k and v the step's tokens attend to each other, causally, and by pages to the cached tokens before them: every
query sees all of its sequence's prefix, so no window goes this way. Both passes are merged by their log-sum-exp, to base 2 as
FlashInfer's kernels give it. Sequences without a prefix have no keys in the second pass, and the merge leaves what the first
one gave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.attn_ops.backends.flashinfer.routes import TILE, padded
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches
from quire.attn_ops.metadata import CommonAttentionMetadata, split_prefill_chunks
from quire.attn_ops.ops.merge_state import merge_state_triton


def loadable(x: torch.Tensor) -> torch.Tensor:
    """``x`` (T, H, D), or a copy of it: FlashInfer takes no gradient, and loads 16 bytes of a head at a time."""
    size, x = x.element_size(), x.detach() if x.requires_grad else x
    token, head, number = x.stride()
    aligned = number == 1 and min(token, head) > 0 and not any(n % 16 for n in (x.data_ptr(), token * size, head * size))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


@dataclass(eq=False)
class Contiguous:
    """A plan that is run as one for pages is: copies, then attends. ``wrapper``: FlashInfer's
    BatchPrefillWithRaggedKVCacheWrapper, planned. ``block_table``: (B, W); ``seq_lens``: (B,) and ``kv_starts``: (B + 1,)
    int32, device, the keys of each sequence and where they begin; ``num_keys``: of all, with the zeros behind them;
    ``heads_first``: whether ``run`` gets pages of (Hkv, page, D)."""

    wrapper: Any
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    kv_starts: torch.Tensor
    num_keys: int
    heads_first: bool

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor],
            scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None), **options: Any) -> Any:
        k, v = (x.transpose(1, 2) if self.heads_first else x for x in pages)
        copied = host.kernel_module("kernels.gather_kv").gather_kv(
            Caches(k, v, *scales), self.block_table, self.kv_starts, self.num_keys, q.dtype, padded=False,
            seq_lens=self.seq_lens)
        return self.wrapper.run(q, *copied, **options)


@dataclass(eq=False)
class OwnKeys:
    """A plan that is run as one for pages is, but for ``own``. ``runs``: (FlashInfer's BatchPrefillWithRaggedKVCacheWrapper,
    planned, first token, token after the last), of all tokens; ``prefix``: its paged wrapper, planned for the prefixes; None:
    no sequence has one."""

    runs: list[tuple[Any, int, int]]
    prefix: Any

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], *, own: tuple[torch.Tensor, torch.Tensor],
            out: torch.Tensor, lse: torch.Tensor | None = None, return_lse: bool = False) -> None:
        """Writes ``out`` (T, H, D), and ``lse`` (T, H) with ``return_lse``. ``own``: k and v (T, Hkv, D) of the tokens."""
        near, near_lse = out, lse if return_lse else None
        if self.prefix is not None:
            near, near_lse = torch.empty_like(out), out.new_empty(out.shape[:2], dtype=torch.float32)
        for wrapper, begin, end in self.runs:
            wrapper.run(q[begin:end], *(x[begin:end] for x in own), out=near[begin:end], return_lse=near_lse is not None,
                        lse=None if near_lse is None else near_lse[begin:end])
        if self.prefix is None or near_lse is None:
            return
        far, far_lse = torch.empty_like(near), torch.empty_like(near_lse)
        self.prefix.run(q, pages, out=far, lse=far_lse, return_lse=True)
        _, total = merge_state_triton(near, near_lse, far, far_lse, merged=out, binary=True)
        if return_lse and lse is not None:
            lse.copy_(total)


def parts(seq_lens: np.ndarray, kv_heads: int, dim: int, first: int = 0) -> list[tuple[int, int]]:
    """(first row, row after the last) of parts of the batch from row ``first`` on, whose copied keys, in half precision, stay
    within the memory for copies. Raises ValueError for a sequence whose keys do not."""
    room, copied = host.MAX_GATHERED // (4 * kv_heads * dim), padded(seq_lens)
    if (copied > room).any():
        raise ValueError(f"flashinfer: the copied keys of a sequence of {seq_lens[(copied > room).argmax()]} tokens in a "
                         f"quantized cache are more than {host.MAX_GATHERED >> 20} MiB")
    return split_prefill_chunks(copied, room, first)


def lengths(metadata: CommonAttentionMetadata, first: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Query tokens, and keys, of the sequences ``first`` to ``rows``; sequences without queries have no keys."""
    query_lens = np.diff(metadata.query_start_loc_cpu.numpy()[first : rows + 1])
    return query_lens, np.where(query_lens > 0, metadata.seq_lens_cpu.numpy()[first:rows], 0)


def plan(planned: Callable[..., Any], metadata: CommonAttentionMetadata, first: int, rows: int, heads: int, kv_heads: int,
         dim: int, heads_first: bool, **options: Any) -> Contiguous:
    """Plan the sequences ``first`` to ``rows`` of a batch. ``planned``: arguments of FlashInfer's plan -> the wrapper, planned;
    ``options``: further ones."""
    query_lens, seq_lens = lengths(metadata, first, rows)
    ends = np.cumsum(padded(seq_lens))
    # After each sequence a row without queries, whose keys are the zeros behind it.
    key_ends = np.stack((ends - padded(seq_lens) + seq_lens, ends), axis=1).ravel()
    starts = [torch.from_numpy(np.concatenate(([0], x)).astype(np.int32)) for x in (np.cumsum(query_lens).repeat(2), key_ends)]
    wrapper = planned(*starts, heads, kv_heads, dim, causal=True, **options)
    lens = metadata.seq_lens[first:rows]
    key_starts = host.kernel_module("kernels.gather_kv").kv_starts(
        metadata.query_start_loc[first : rows + 1], lens, multiple_of=TILE)
    return Contiguous(wrapper, metadata.block_table_tensor[first:rows], lens, key_starts, int(ends[-1]), heads_first)
