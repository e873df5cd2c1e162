"""The block table of all slots, kept on the device: a step sends only new pages.

A row is as wide as the longest sequence, 8192 pages at 131072 tokens, and changes little from step to step. So the device
keeps one row per slot. A step brings changes (position in the table, page number) and the slot of each of its rows; the device
writes the changes and gathers the rows (``update``), inside the CUDA graph.

NOTE [Table in step]: ``_sent`` counts the pages of each slot that the device has. It advances when a step is launched
(``commit``), not when its changes are packed: after a step that failed in between, the pages are sent again, which is
harmless. ``_cleared_sent`` likewise counts the leading pages that were given back, in whose places the device has the null
page. A slot's row is not cleared for its next request: entries after a sequence's own pages may be any page, see NOTE
[Padding].
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from quire.attn_ops.metadata import NULL_PAGE
from quire.attn_ops.metadata.core import to_device

logger = logging.getLogger(__name__)
_NONE = np.zeros(0, np.int64)


def change_capacity(num_tokens: int, num_reqs: int, page_size: int) -> int:
    """Upper bound of a step's new pages: a row of n tokens needs at most ceil(n / page_size); the n sum to ``num_tokens``."""
    return min(num_tokens, (num_tokens + num_reqs * (page_size - 1)) // page_size)


class BlockTable:
    """Host and device side of the table, of ``width`` pages per row: ``host``, (max_num_seqs, width) int32, of whose slots
    ``known`` pages are there; ``device``, (max_num_seqs + 1, width) int32, with a row of null pages that padding rows read and
    padding changes write; ``rows``, (max_num_reqs, width) int32, padding included, whose first rows ``update`` fills, where the
    step reads its block table."""

    def __init__(self, max_num_seqs: int, max_num_reqs: int, width: int, device: torch.device) -> None:
        self.width, self.dummy_slot = width, max_num_seqs
        self.host = np.zeros((max_num_seqs, width), np.int32)
        self.device = torch.full((max_num_seqs + 1, width), NULL_PAGE, dtype=torch.int32, device=device)
        self.rows = torch.full((max_num_reqs, width), NULL_PAGE, dtype=torch.int32, device=device)
        self.known = [0] * max_num_seqs
        self._sent = np.zeros(max_num_seqs, np.int64)  # and in ``device``
        # Leading pages of each slot that were given back: in ``host``, and in ``device``.
        self._cleared, self._cleared_sent = np.zeros((2, max_num_seqs), np.int64)
        self._packed = _NONE, _NONE, _NONE

    def new_holder(self, slot: int) -> None:
        """Assign the slot to another request, none of whose pages are known."""
        self._sent[slot] = self.known[slot] = 0
        self._cleared[slot] = self._cleared_sent[slot] = 0

    def clear(self, slot: int, count: int) -> None:
        """The first ``count`` pages of the slot belong to others now: the null page takes their places."""
        if self._cleared[slot] != count:
            self.host[slot, self._cleared[slot] : count] = NULL_PAGE
            self._cleared[slot] = count

    def note(self, slot: int, pages: list[int]) -> None:
        """Copy the new entries of ``pages`` into the host table."""
        known = self.known[slot]
        if known != len(pages):
            self.host[slot, known : len(pages)] = pages[known:]
            self.known[slot] = len(pages)

    def pack(self, slots: np.ndarray, num_pages: np.ndarray, at: np.ndarray, page: np.ndarray) -> None:
        """Write the changes of a step into ``at`` (capacity,) int64, flat positions in the table, and ``page`` (capacity,)
        int32. Padding writes the null page into the dummy row. ``slots`` (B,): of the step's rows, all different. ``num_pages``
        (B,): pages of each row, all passed to ``note``."""
        cleared = self._cleared[slots]
        places = self._places(slots, self._sent[slots], num_pages)
        if (behind := self._places(slots, self._cleared_sent[slots], cleared)).shape[0]:
            places = np.concatenate([places, behind])
        if count := places.shape[0]:
            pages = self.host.reshape(-1)[places]
            fits = at.shape[0]
            if count > fits:  # pages of earlier steps that failed, or of another row's (``Rows.reorder``)
                logger.debug("%d new pages in a step with room for %d: the others are sent separately", count, fits)
                self._write(*(to_device(x[fits:], self.device.device) for x in (places, pages)))
                places, pages, count = places[:fits], pages[:fits], fits
            at[:count], page[:count] = places, pages
        at[count:], page[count:] = self.dummy_slot * self.width, NULL_PAGE
        self._packed = slots, num_pages, cleared

    def _places(self, slots: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Flat positions in the table of columns ``first`` to ``end`` of each slot's row."""
        new = end - first
        count = int(new.sum())
        if not count:
            return _NONE
        column = np.arange(count) - np.repeat(np.cumsum(new) - end, new)
        return np.repeat(slots, new) * self.width + column

    def commit(self) -> None:
        """The step packed last was launched: the device has its pages, or will before any later work."""
        slots, num_pages, cleared = self._packed
        self._sent[slots], self._cleared_sent[slots] = num_pages, cleared

    def update(self, at: torch.Tensor, page: torch.Tensor, row_slot: torch.Tensor) -> None:
        """Device work of a step: write its changes, then gather its rows (B,) int64. Fixed addresses, no synchronization."""
        self._write(at, page)
        torch.index_select(self.device, 0, row_slot, out=self.rows[: row_slot.shape[0]])

    def _write(self, at: torch.Tensor, page: torch.Tensor) -> None:
        self.device.view(-1)[at] = page
