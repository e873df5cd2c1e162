"""Sequences served together in ragged steps, as an engine schedules them, for tests that make their steps by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from quire.attn_ops.kv_cache import PagedKVCache, pages_for
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.step import Step


def ragged(ids: Sequence[torch.Tensor], steps: Sequence[Sequence[int]], page_size: int, device: Any = "cpu"
           ) -> Iterator[tuple[torch.Tensor, CommonAttentionMetadata, list[int]]]:
    """(tokens (T,), metadata, rows of ``ids`` in it) of each step.

    Args:
        steps: of each step, the number of tokens of each sequence in it.

    The pages 1 to n, without a gap, in random order.
    """
    needed = [pages_for(len(i), page_size) for i in ids]
    order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(2)) + 1).split(needed)
    table, done = [pages.tolist() for pages in order], [0] * len(ids)
    for counts in steps:
        rows = [r for r, n in enumerate(counts) if n]
        tokens = torch.cat([ids[r][done[r] : done[r] + counts[r]] for r in rows])
        done = [d + n for d, n in zip(done, counts, strict=True)]
        meta = CommonAttentionMetadata.build([counts[r] for r in rows], [done[r] for r in rows], [table[r] for r in rows],
                                             page_size=page_size, device=device)
        yield tokens, meta, rows


def serve(call: Callable[[torch.Tensor, CommonAttentionMetadata], torch.Tensor], ids: Sequence[torch.Tensor],
          steps: Sequence[Sequence[int]], page_size: int, device: Any = "cpu") -> list[torch.Tensor]:
    """Logits (length, V) of each sequence; ``call(tokens, metadata)`` gives those of one step, (T, V), and may add padding."""
    logits: list[list[torch.Tensor]] = [[] for _ in ids]
    for tokens, meta, rows in ragged(ids, steps, page_size, device):
        out = call(tokens, meta)[: len(tokens)]
        for r, part in zip(rows, out.split((meta.query_start_loc[1:] - meta.query_start_loc[:-1]).tolist()), strict=True):
            logits[r].append(part)
    return [torch.cat(parts) for parts in logits]


def in_one_step(model: Any, ids: Sequence[torch.Tensor], page_size: int = 4) -> list[torch.Tensor]:
    """Logits (length, V) of each sequence by a PagedModel, all in one step."""
    pages = sum(pages_for(len(i), page_size) for i in ids)
    cache = PagedKVCache.for_sites(model.sites, num_pages=pages + 1, page_size=page_size, device="cpu")
    return serve(lambda tokens, meta: model(Step(cache, meta), tokens, meta.positions, torch.arange(len(tokens))), ids,
                 [[len(i) for i in ids]], page_size)
