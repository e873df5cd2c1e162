"""Chunked local attention as plain causal attention over more sequences: a kernel without ``chunk`` (``attention.py``) serves a
site that has it if every chunk becomes a sequence of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from quire.attn_ops.metadata.core import CommonAttentionMetadata


def make_local_attention_virtual_batches(attn_chunk_size: int, common_attn_metadata: CommonAttentionMetadata,
                                         block_size: int | None = None) -> CommonAttentionMetadata:
    """The batch with each sequence cut at multiples of ``attn_chunk_size`` of its own positions.

    Tokens, slots and their order stay. Virtual sequence j of a row has the row's tokens of one chunk as its queries and, as
    ``seq_lens``, the chunk's tokens up to the last of them. Its block table has attn_chunk_size / block_size columns; those
    past the row's table repeat its last column, and ``seq_lens`` keeps kernels from reading them. ``positions`` of the result
    count from the chunk's start; the model's are those of the batch, and so are ``total_lens``. ``block_size``: tokens per
    page; the batch's own by default. Raises ValueError for chunks that do not consist of whole pages.
    """
    meta = common_attn_metadata
    page = block_size or meta.page_size
    if attn_chunk_size < 1 or attn_chunk_size % page:
        raise ValueError(f"a chunk of {attn_chunk_size} tokens is not a multiple of the page size {page}: chunks would share "
                         "pages. Choose a page_size that divides the chunk")
    query = np.diff(meta.query_start_loc_cpu.numpy()).astype(np.int64)
    seq = meta.seq_lens_cpu.numpy().astype(np.int64)
    done = seq - query
    first = done // attn_chunk_size
    count = np.where(query > 0, (seq - 1) // attn_chunk_size - first + 1, 0)
    row = np.repeat(np.arange(len(query)), count)
    chunk = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    end = np.minimum((chunk + 1) * attn_chunk_size, seq[row])
    begin = np.maximum(chunk * attn_chunk_size, done[row])
    start = np.zeros(len(row) + 1, dtype=np.int32)
    np.cumsum(end - begin, out=start[1:])
    lens = (end - chunk * attn_chunk_size).astype(np.int32)

    table = meta.block_table_tensor
    device, width = table.device, attn_chunk_size // page
    column = np.minimum(chunk[:, None] * width + np.arange(width), table.shape[1] - 1)
    rows, columns = torch.from_numpy(row).to(device), torch.from_numpy(column).to(device)
    start_cpu, lens_cpu = torch.from_numpy(start), torch.from_numpy(lens)
    return replace(
        meta, query_start_loc=start_cpu.to(device), query_start_loc_cpu=start_cpu, seq_lens=lens_cpu.to(device),
        seq_lens_cpu=lens_cpu, block_table_tensor=table[rows[:, None], columns], num_reqs=len(row),
        max_query_len=int((end - begin).max(initial=0)), max_seq_len=int(lens.max(initial=0)), page_size=page,
        total_lens=(meta.seq_lens if meta.total_lens is None else meta.total_lens)[rows],
        encoder_seq_lens=None if meta.encoder_seq_lens is None else meta.encoder_seq_lens[row])
