"""The page tables of a batch as FlashInfer's kernels read them."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.step import StepLimits

BLOCK = 1024  # page numbers that one program of gather_pages copies


@triton.jit
def gather_pages(block_table, table, indices, row_stride, table_stride,  # type: ignore[no-untyped-def]
                  BLOCK: tl.constexpr):
    """Lay the rows' page numbers end to end. ``table`` is PageTable.device."""
    row = tl.program_id(0)
    begin = tl.load(table + row)
    end = tl.load(table + row + 1)
    first = tl.load(table + 2 * table_stride + row)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < end - begin
    page = tl.load(block_table + row.to(tl.int64) * row_stride + first + i, mask=live)
    tl.store(indices + begin + i, page, mask=live)


def page_table(seq_lens: np.ndarray, query_lens: np.ndarray, page_size: int, window: int | None
               ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """FlashInfer's page table of a batch, on the host: (B,) lengths -> (indptr, last_page_len, first_page).

    ``indptr`` (B + 1,): prefix sums of the pages each row reads; ``last_page_len`` (B,): tokens on its last page;
    ``first_page`` (B,): column of ``block_table`` where its pages start. Pages wholly before the window of a row's first query
    are left out: FlashInfer counts positions from a row's end, so no mask changes. A row without tokens has one page with none
    on it: the planner of the decode kernel counts rows without pages as free, and then assigns more work than it has room for.
    """
    pages = np.maximum((seq_lens + page_size - 1) // page_size, 1)
    first = np.zeros_like(pages)
    if window is not None:
        first = np.maximum(seq_lens - np.maximum(query_lens, 1) - (window - 1), 0) // page_size
    indptr = np.zeros(pages.shape[0] + 1, dtype=np.int32)
    np.cumsum(pages - first, out=indptr[1:])
    return indptr, seq_lens - (pages - 1) * page_size, first


class PageTable:
    """The page tables of the current batch for one window, at fixed addresses: ``host`` (pinned) and ``device`` (4, rows + 1)
    int32, indptr, last_page_len, first_page, and the start of each row's queries, counted from the first prefill token;
    ``indices`` (pages,) int32, the page numbers."""

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        rows = max(1, limits.max_num_seqs)
        self.host = torch.zeros(4, rows + 1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.device = torch.zeros(4, rows + 1, dtype=torch.int32, device=device)
        self.indices = torch.zeros(rows * max(1, limits.max_pages_per_seq), dtype=torch.int32, device=device)

    def fill(self, metadata: CommonAttentionMetadata, rows: int, decodes: int, window: int | None,
             seq_lens: np.ndarray | None = None) -> None:
        """Compute on the host, copy once, gather the page numbers on the device. ``seq_lens``: (rows,) first tokens of each
        sequence that are read; None: all."""
        starts, block_table, host = metadata.query_start_loc_cpu.numpy(), metadata.block_table_tensor, self.host.numpy()
        starts = starts[: rows + 1]
        seq_lens = metadata.seq_lens_cpu.numpy()[:rows] if seq_lens is None else seq_lens
        indptr, last, first = page_table(seq_lens, np.diff(starts), metadata.page_size, window)
        counts = np.diff(indptr)
        longest, needed = (int(x.max(initial=0)) for x in (counts, counts + first))
        if rows >= host.shape[1] or indptr[-1] > self.indices.shape[0] or needed > block_table.shape[1]:
            raise ValueError(
                f"flashinfer: a batch of {rows} sequences on {indptr[-1]} pages, at most {needed} each, exceeds the "
                f"StepLimits of its state ({host.shape[1] - 1} sequences, {self.indices.shape[0]} pages) or its "
                f"block_table, which has {block_table.shape[1]} columns")
        host[0, : rows + 1], host[1, :rows], host[2, :rows], host[3, : rows + 1] = indptr, last, first, starts - decodes
        with torch.cuda.device_of(self.device):
            self.device.copy_(self.host, non_blocking=True)
            gather_pages[(rows, triton.cdiv(longest, BLOCK))](
                block_table, self.device, self.indices, block_table.stride(0), self.device.stride(0), BLOCK=BLOCK)
