"""Batch metadata of a paged step: which tokens belong to which sequence, and where their keys and values live.

A step's tokens are ragged: all sequences end to end in one row of T tokens. Sequence r owns tokens ``query_start_loc[r]`` to
``query_start_loc[r + 1]``; they are the *last* of its ``seq_lens[r]`` tokens, the earlier ones being in the cache already.
Token t of sequence r has position p = seq_lens[r] - query_start_loc[r + 1] + t and its key and value go to slot
``block_table[r, p // page_size] * page_size + p % page_size``.

NOTE [Padding]: a batch may be padded to a bucket's shape. Padding rows repeat the last ``query_start_loc`` (zero tokens) and
have ``seq_lens`` 0; padding tokens have slot -1, "do not write". Page 0 is the null page: no sequence owns it, and padding rows
of ``block_table`` hold it, and so do those of pages that every query of a sequence has left behind its window or chunk. Entries
past a sequence's own pages may be any page, of others too: nothing may depend on them. Kernels accept rows of zero length,
write no slot that is not mapped, and give zeros for padding tokens. Nothing in the contract reads a device tensor on the host.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

PAD_SLOT_ID = -1
NULL_PAGE = 0


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    host = torch.from_numpy(values)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """Metadata of one ragged batch. Field names and units are vLLM's.

    Args:
        query_start_loc: (B + 1,) int32, device: exclusive prefix sums of the tokens scheduled per sequence.
        seq_lens: (B,) int32, device: tokens in the cache *after* this step.
        query_start_loc_cpu, seq_lens_cpu: the same on the host, for planning.
        block_table_tensor: (B, max pages per sequence) int32, device: page numbers in the sequence's order.
        slot_mapping: (T,) int64, device: page * page_size + offset, or -1 for "do not write".
        num_reqs, num_actual_tokens: B and T, padding excluded.
        max_query_len, max_seq_len: upper bounds on the host.  page_size: tokens per page.  causal: queries see no later keys.
        max_page: the largest page that holds a token, where the host knows it; None where only the device has the pages.
        logits_indices_padded, num_logits_indices: tokens whose logits are wanted, ascending, perhaps padded, and how many are
            not padding; only for layers that share an earlier layer's keys and values (``metadata/kv_sharing.py``).
        logits_indices_cpu: the same tokens on the host, for planning; None where only the device has them.
        total_lens: (B,) int32, device: tokens of each sequence when its prompt is complete, later chunks included; None:
            seq_lens. Models whose rotary frequencies depend on the length of a sequence (longrope) read it.
        encoder_seq_lens: (B,) int array on the host, encoder tokens per sequence; only for cross attention.
    """

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    block_table_tensor: Tensor
    slot_mapping: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    page_size: int
    max_page: int | None = None
    causal: bool = True
    logits_indices_padded: Tensor | None = None
    num_logits_indices: int = 0
    logits_indices_cpu: Tensor | None = None
    encoder_seq_lens: np.ndarray | None = None
    total_lens: Tensor | None = None

    @property
    def query_lens_cpu(self) -> Tensor:
        """(B,) int32, host: tokens scheduled per sequence; 0 for padding rows."""
        return self.query_start_loc_cpu.diff()

    @functools.cached_property
    def has_single_queries(self) -> bool:
        return bool((self.query_lens_cpu == 1).any())

    @property
    def num_computed_tokens_cpu(self) -> Tensor:
        """(B,) int32, host: tokens in the cache before this step."""
        return self.seq_lens_cpu - self.query_lens_cpu

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, padding included."""
        return self.slot_mapping.shape[0]

    @property
    def positions(self) -> Tensor:
        """(T,) int64: each token's position in its sequence, 0 for padding tokens. What ``position_ids`` must be."""
        positions = np.zeros(self.num_tokens, dtype=np.int64)
        live = _positions(self.query_start_loc_cpu.diff().numpy(), self.seq_lens_cpu.numpy())
        positions[: live.shape[0]] = live
        return torch.from_numpy(positions).to(self.slot_mapping.device)

    @property
    def logits_indices(self) -> Tensor:
        """(B,) int64 index of each sequence's last token in the ragged row."""
        return (self.query_start_loc[1:].long() - 1).clamp_min(0)

    @classmethod
    def build(cls, query_lens: Sequence[int], seq_lens: Sequence[int],
              block_table: Sequence[Sequence[int]] | Tensor | np.ndarray, *, page_size: int, device: torch.device | str = "cpu",
              total_lens: Sequence[int] | None = None) -> CommonAttentionMetadata:
        """Make the metadata of a batch from plain lists.

        Args:
            query_lens: tokens scheduled per sequence in this step, >= 0.
            seq_lens: tokens per sequence after the step, >= its query_lens.
            block_table: page numbers per sequence, >= 1 and in order, at least ceil(seq_len / page_size) of them; rows may
                differ in length. Sequences may share pages that none of them writes to in this step.
            total_lens: as the field, >= seq_lens, for the prompt of a model with longrope in several steps; None: seq_lens.

        Raises ValueError for lengths that do not fit each other, a sequence whose pages do not hold its tokens, a page below 1,
        or a slot that two tokens would be written to.
        """
        if not len(query_lens) == len(seq_lens) == len(block_table):
            raise ValueError(f"query_lens, seq_lens and block_table describe {len(query_lens)}, {len(seq_lens)} and "
                             f"{len(block_table)} sequences; the numbers must be equal")
        lens, seqs = np.array(query_lens, dtype=np.int32), np.array(seq_lens, dtype=np.int32)
        table, widths = _table(block_table)
        if total_lens is not None and (len(total_lens) != len(seqs) or (np.array(total_lens) < seqs).any()):
            raise ValueError(f"total_lens {list(total_lens)} must have a number for each of seq_lens {list(seq_lens)}, no "
                             "smaller")
        needed = -(-seqs // page_size)
        used = np.arange(table.shape[1]) < needed[:, None]
        bad = (lens < 0) | (lens > seqs) | (widths < needed) | (used & (table <= NULL_PAGE)).any(1)
        if bad.any():
            r = int(bad.argmax())
            _explain(r, int(lens[r]), int(seqs[r]), table[r, : widths[r]].tolist(), page_size)
        max_page = int(table.max(initial=NULL_PAGE, where=used))
        start = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(lens, out=start[1:])
        positions = _positions(lens, seqs)
        row_of = np.repeat(np.arange(len(lens)), lens)
        slots = table[row_of, positions // page_size].astype(np.int64) * page_size + positions % page_size
        _check_slots(slots, row_of, page_size)

        def to(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            query_start_loc=to(start), query_start_loc_cpu=torch.from_numpy(start), seq_lens=to(seqs),
            seq_lens_cpu=torch.from_numpy(seqs), block_table_tensor=to(table), slot_mapping=to(slots), num_reqs=len(lens),
            num_actual_tokens=int(start[-1]), max_query_len=int(lens.max(initial=0)), max_seq_len=int(seqs.max(initial=0)),
            page_size=page_size, max_page=max_page,
            total_lens=None if total_lens is None else to(np.array(total_lens, dtype=np.int32)),
        )

    def unpadded(self) -> CommonAttentionMetadata:
        """The same batch without padding rows and padding tokens; views of the same tensors."""
        rows, tokens = self.num_reqs, self.num_actual_tokens
        return replace(
            self, query_start_loc=self.query_start_loc[: rows + 1], query_start_loc_cpu=self.query_start_loc_cpu[: rows + 1],
            seq_lens=self.seq_lens[:rows], seq_lens_cpu=self.seq_lens_cpu[:rows],
            block_table_tensor=self.block_table_tensor[:rows], slot_mapping=self.slot_mapping[:tokens],
            total_lens=None if self.total_lens is None else self.total_lens[:rows],
            encoder_seq_lens=None if self.encoder_seq_lens is None else self.encoder_seq_lens[:rows])

    def padded(self, num_tokens: int, num_reqs: int) -> CommonAttentionMetadata:
        """The same batch padded to ``num_tokens`` tokens and ``num_reqs`` rows (NOTE [Padding]). Raises ValueError if it is
        larger than that."""
        more_tokens, more_reqs = num_tokens - self.num_tokens, num_reqs - self.seq_lens.shape[0]
        if more_tokens < 0 or more_reqs < 0:
            raise ValueError(f"cannot pad a batch of {self.num_tokens} tokens and {self.seq_lens.shape[0]} sequences to "
                             f"{num_tokens} and {num_reqs}")

        def pad(tensor: Tensor, count: int, value: int) -> Tensor:
            return torch.cat([tensor, tensor.new_full((count, *tensor.shape[1:]), value)])

        return replace(
            self,
            query_start_loc=torch.cat([self.query_start_loc, self.query_start_loc[-1:].expand(more_reqs)]),
            query_start_loc_cpu=torch.cat([self.query_start_loc_cpu, self.query_start_loc_cpu[-1:].expand(more_reqs)]),
            seq_lens=pad(self.seq_lens, more_reqs, 0), seq_lens_cpu=pad(self.seq_lens_cpu, more_reqs, 0),
            block_table_tensor=pad(self.block_table_tensor, more_reqs, NULL_PAGE),
            slot_mapping=pad(self.slot_mapping, more_tokens, PAD_SLOT_ID),
            total_lens=None if self.total_lens is None else pad(self.total_lens, more_reqs, 0),
            encoder_seq_lens=None if self.encoder_seq_lens is None else np.pad(self.encoder_seq_lens, (0, more_reqs)),
        )


def _table(block_table: Sequence[Sequence[int]] | Tensor | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(B, at least 1) int32, filled up with the null page, and the length of each row (B,)."""
    if isinstance(block_table, (Tensor, np.ndarray)):
        given = np.asarray(block_table.cpu() if isinstance(block_table, Tensor) else block_table)
        table = np.array(given, dtype=np.int32, ndmin=2) if given.size else np.zeros((len(given), 1), np.int32)
        return table, np.full(len(given), given.shape[1] if given.ndim == 2 else 0)
    widths = np.fromiter(map(len, block_table), np.int64, len(block_table))
    table = np.full((len(block_table), max(1, int(widths.max(initial=0)))), NULL_PAGE, dtype=np.int32)
    table[np.arange(table.shape[1]) < widths[:, None]] = np.fromiter(
        itertools.chain.from_iterable(block_table), np.int32, int(widths.sum()))
    return table, widths


def _explain(r: int, query: int, seq: int, row: list[int], page_size: int) -> None:
    """Raise for the row of a batch that does not fit."""
    if not 0 <= query <= seq:
        raise ValueError(f"sequence {r} schedules {query} tokens but has {seq} after the step; need "
                         "0 <= query_len <= seq_len (seq_lens counts the tokens of this step too)")
    needed = -(-seq // page_size)
    if len(row) < needed:
        raise ValueError(f"sequence {r} has {seq} tokens and needs {needed} pages of {page_size}, but its row of "
                         f"block_table has {len(row)}: {row}")
    raise ValueError(f"sequence {r} uses page {min(row[:needed])} in block_table row {row}; page 0 is the null page that "
                     "padding points to, give sequences pages from 1 on")


def _check_slots(slots: np.ndarray, row_of: np.ndarray, page_size: int) -> None:
    """Raises ValueError if two tokens would be written to one slot; names their sequences."""
    order = np.argsort(slots, kind="stable")
    again = np.flatnonzero(np.diff(slots[order]) == 0)
    if again.size:
        first, second = (int(row_of[order[again[0] + i]]) for i in (0, 1))
        page, offset = divmod(int(slots[order[again[0]]]), page_size)
        who = f"sequence {first} would write" if first == second else f"sequences {first} and {second} would both write"
        raise ValueError(f"{who} to page {page} at {offset}; a page that a step writes to must occur once in block_table")


def _positions(query_lens: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """(sum of query_lens,) int64 positions of the scheduled tokens; no Python loop over tokens or sequences."""
    ends = np.cumsum(query_lens, dtype=np.int64)
    return np.arange(ends[-1] if ends.size else 0, dtype=np.int64) + np.repeat(seq_lens - ends, query_lens)
