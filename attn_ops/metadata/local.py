"""Chunked local attention as plain causal attention over more sequences: a kernel without ``chunk`` (``attention.py``) serves a
site that has it if every chunk becomes a sequence of its own. The backends ``local:NAME`` do that."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from quire.attn_ops.metadata.core import CommonAttentionMetadata, to_device


class ChunkRows(NamedTuple):
    """The virtual sequences of a batch, one for each chunk that a row has queries in, on the host: (V,) int32 ``row``,
    ``chunk`` (its number in the row), ``seq_lens`` (its tokens up to the row's last), (V + 1,) int32 ``query_start_loc``."""

    row: np.ndarray
    chunk: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray

    @classmethod
    def of(cls, query_start_loc: np.ndarray, seq_lens: np.ndarray, attn_chunk_size: int, keep_empty: bool) -> ChunkRows:
        """Cut a batch with these (B + 1,) offsets and (B,) lengths. ``keep_empty``: a row without queries stays, without
        queries, with the chunk of its last token; else it has no virtual sequence."""
        query, seq = np.diff(query_start_loc).astype(np.int64), seq_lens.astype(np.int64)
        done, last = seq - query, np.maximum(seq - 1, 0) // attn_chunk_size
        first = np.where(query > 0, done // attn_chunk_size, last)
        count = np.where((query > 0) | keep_empty, last - first + 1, 0)
        row = np.repeat(np.arange(len(query)), count)
        chunk = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        end = np.minimum((chunk + 1) * attn_chunk_size, seq[row])
        begin = np.maximum(chunk * attn_chunk_size, done[row])
        start = np.zeros(len(row) + 1, dtype=np.int32)
        np.cumsum(end - begin, out=start[1:])
        return cls(row.astype(np.int32), chunk.astype(np.int32), (end - chunk * attn_chunk_size).astype(np.int32), start)


def check_chunk(attn_chunk_size: int, page_size: int) -> None:
    """Raises ValueError for chunks that do not consist of whole pages."""
    if attn_chunk_size < 1 or attn_chunk_size % page_size:
        raise ValueError(f"a chunk of {attn_chunk_size} tokens is not a multiple of the page size {page_size}: chunks would "
                         "share pages. Choose a page_size that divides the chunk")


def make_local_attention_virtual_batches(attn_chunk_size: int, common_attn_metadata: CommonAttentionMetadata,
                                         block_size: int | None = None, *, keep_empty: bool = False,
                                         width: int | None = None) -> CommonAttentionMetadata:
    """The batch with each sequence cut at multiples of ``attn_chunk_size`` of its own positions.

    Tokens, slots and their order stay. Virtual sequence j of a row has the row's tokens of one chunk as its queries and, as
    ``seq_lens``, the chunk's tokens up to the last of them. Its block table has attn_chunk_size / block_size columns; those
    past the row's table repeat its last column, and ``seq_lens`` keeps kernels from reading them. ``positions`` of the result
    count from the chunk's start; the model's are those of the batch, and so are ``total_lens``.

    Args:
        block_size: tokens per page; the batch's own by default.
        keep_empty: rows without tokens stay; by default they vanish.
        width: most columns of the block table, at least those that the longest virtual sequence needs.

    Raises ValueError for chunks that do not consist of whole pages. Reads nothing on the device.
    """
    meta = common_attn_metadata
    page = block_size or meta.page_size
    check_chunk(attn_chunk_size, page)
    made = ChunkRows.of(meta.query_start_loc_cpu.numpy(), meta.seq_lens_cpu.numpy(), attn_chunk_size, keep_empty)
    table, columns = meta.block_table_tensor, attn_chunk_size // page
    arrays = (made.query_start_loc, made.seq_lens, made.row, made.chunk)
    packed = np.zeros((4, -(-len(made.query_start_loc) // 4) * 4), dtype=np.int32)  # one copy; rows begin at 16 bytes
    for place, array in zip(packed, arrays, strict=True):
        place[: len(array)] = array
    start, lens, row, chunk = (
        place[: len(array)] for place, array in zip(to_device(packed, table.device), arrays, strict=True))
    column = chunk.long()[:, None] * columns + torch.arange(min(columns, width or columns), device=table.device)
    rows = row.long()
    return replace(
        meta, query_start_loc=start, query_start_loc_cpu=torch.from_numpy(made.query_start_loc), seq_lens=lens,
        seq_lens_cpu=torch.from_numpy(made.seq_lens),
        block_table_tensor=table[rows[:, None], column.clamp_max(table.shape[1] - 1)],
        num_reqs=int((made.row < meta.num_reqs).sum()),
        max_query_len=int(np.diff(made.query_start_loc).max(initial=0)), max_seq_len=int(made.seq_lens.max(initial=0)),
        page_size=page, total_lens=(meta.seq_lens if meta.total_lens is None else meta.total_lens)[rows],
        encoder_seq_lens=None if meta.encoder_seq_lens is None else meta.encoder_seq_lens[made.row])
