"""Staging of a step's inputs: packed on the host, one copy to the device, read there at fixed addresses.

All integers and floats of a step (token ids, positions, slots, new pages, lengths, sampling parameters) are packed into one
flat buffer, so that a step costs one copy. ``StepLayout`` has the offset of each field for a batch of a given shape; all shapes
share one device buffer, so the fields of a captured shape stay at their addresses. The host side is pinned and double-buffered:
the host packs step n + 1 while the copy of step n may still run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.attn_ops.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from quire.attn_ops.metadata.core import to_device
from quire.graph_runner.adapters import TokenAdapters
from quire.graph_runner.block_table import BlockTable, change_capacity
from quire.graph_runner.forward_batch import ForwardBatch
from quire.graph_runner.forward_mode import ForwardMode
from quire.graph_runner.request import Request, ScheduledBatch
from quire.graph_runner.sampler import SamplingTensors

# Sampling parameters: name, type, value for padding rows.
_PARAMS = (("seed", "i8", 0), ("temperature", "f4", 0), ("top_k", "i4", 0), ("top_p", "f4", 1), ("min_p", "f4", 0),
           ("logprob_temperature", "f4", 0))
#: Bytes. Inductor copies inputs with less alignment, at every call of every compiled piece.
ALIGNMENT = 16
#: In the field "resample", of rows whose logits are edited; of others that the sampler draws it is 1.
EDITED = 2
_LEAST_TOP_P = torch.finfo(torch.float32).tiny  # a smaller one may be 0 on the device, of which every token has as much
_TORCH = {"i8": torch.int64, "i4": torch.int32, "f4": torch.float32}


class BatchShape(NamedTuple):
    """Shape of a (padded) batch: tokens and rows. The key of captured graphs."""

    num_tokens: int
    num_reqs: int


class EncoderShape(NamedTuple):
    """A bucket of steps with cross attention, in which every row has encoder tokens. Its key differs from the ``BatchShape`` of
    the same numbers, whose graph has none. For engines of encoder-decoder models; quire's own refuses such models."""

    num_tokens: int
    num_reqs: int
    cross: bool = True


Bucket = BatchShape | EncoderShape


class StepLayout(NamedTuple):
    """The fields of a batch shape in the flat buffer: name -> (byte offset, type, length)."""

    fields: dict[str, tuple[int, str, int]]
    num_bytes: int

    @classmethod
    def of(cls, shape: BatchShape, page_size: int, windows: bool, total_lens: bool, adapters: bool) -> StepLayout:
        """``page_size`` bounds the number of new pages in a step. The others: see StepBuffers."""
        t, b = shape
        changes = change_capacity(t, b, page_size)
        of_windows = [(f"window_{name}", kind, size) for name, kind, size in (
            ("slot_mapping", "i8", t), ("change_at", "i8", changes), ("change_page", "i4", changes))]
        fields, at = {}, 0
        for name, kind, size in (
                ("input_ids", "i8", t), ("positions", "i8", t), ("slot_mapping", "i8", t), ("token_source", "i8", t),
                ("logits_indices", "i8", b), ("row_slot", "i8", b), ("sample_slot", "i8", b), ("seed", "i8", b),
                ("sample_position", "i8", b), ("change_at", "i8", changes), ("change_page", "i4", changes),
                ("query_start_loc", "i4", b + 1), ("seq_lens", "i4", b), ("top_k", "i4", b), ("temperature", "f4", b),
                ("top_p", "f4", b), ("min_p", "f4", b), ("resample", "i4", b), ("logprob_temperature", "f4", b),
                *(of_windows if windows else ()), *([("total_lens", "i4", b)] if total_lens else ()),
                *([("adapters", "i8", t)] if adapters else ())):
            fields[name] = at, kind, size
            at += -(-size * int(kind[1]) // ALIGNMENT) * ALIGNMENT
        return cls(fields, at)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields in a buffer of bytes."""
        return {name: buffer[at : at + length * int(kind[1])].view(_TORCH[kind])
                for name, (at, kind, length) in self.fields.items()}


class StepBuffers:
    """The staging buffers of an engine.

    Args:
        max_shape: the largest batch.
        max_pages_per_seq: width of a block table row.
        max_num_seqs: slots; the table of newest tokens has one more, which padding rows write.
        total_lens: whether the model reads ``total_lens``; see CommonAttentionMetadata.
        graph_draws: whether the model's graph samples rows with a temperature; then only filters need the sampler.
        windows: whether layers with a window have pages of their own (``Request.window_pages``).
        fast_prefill: whether metadata say which logits are wanted, in steps with more tokens than rows that score no prompt
            token (``passes/rewrite/last_rows.py``).
        adapters: of each token, where requests have adapters of their own.
    """

    def __init__(self, max_shape: BatchShape, *, max_pages_per_seq: int, max_num_seqs: int, page_size: int,
                 device: torch.device, graph_draws: bool = False, total_lens: bool = False, windows: bool = False,
                 fast_prefill: bool = False, adapters: TokenAdapters | None = None) -> None:
        self.fast_prefill, self.adapters = fast_prefill, adapters
        self.width, self.page_size, self.device, self.graph_draws = max_pages_per_seq, page_size, device, graph_draws
        self.dummy_slot, self.total_lens = max_num_seqs, total_lens
        # The largest mixed shape has both the most tokens and the most rows, so it bounds every layout.
        num_bytes = StepLayout.of(max_shape, page_size, windows, total_lens, adapters is not None).num_bytes
        pin = device.type == "cuda"
        self.host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self.device_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.table = BlockTable(max_num_seqs, max_shape.num_reqs, max_pages_per_seq, device)
        self.window_table = BlockTable(max_num_seqs, max_shape.num_reqs, max_pages_per_seq, device) if windows else None
        # Parameters of each slot's request, written when it gets the slot; a step only gathers them.
        self._holder: list[list[int] | None] = [None] * max_num_seqs
        self._params = {name: np.zeros(max_num_seqs, np.dtype(kind)) for name, kind, _ in _PARAMS}
        self._resample = np.zeros(max_num_seqs, np.int32)
        self._may_end_at = np.zeros(max_num_seqs, np.int64)  # sequence length from which on it may end
        self._layouts: dict[BatchShape, StepLayout] = {}
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._views: dict[BatchShape, dict[str, torch.Tensor]] = {}
        self._host_views: list[dict[BatchShape, dict[str, np.ndarray]]] = [{}, {}]

    def layout(self, shape: BatchShape) -> StepLayout:
        if shape not in self._layouts:
            if len(self._layouts) > 4096:  # eager steps have many shapes; captured ones are added again
                caches: list[dict[BatchShape, Any]] = [self._layouts, self._views, *self._host_views]
                for cache in caches:
                    cache.clear()
            self._layouts[shape] = StepLayout.of(shape, self.page_size, self.window_table is not None, self.total_lens,
                                                 self.adapters is not None)
        return self._layouts[shape]

    def views(self, shape: BatchShape) -> dict[str, torch.Tensor]:
        """The fields on the device, at fixed addresses per shape."""
        if shape not in self._views:
            self._views[shape] = self.layout(shape).views(self.device_bytes)
        return self._views[shape]

    def fill(self, batch: ScheduledBatch, shape: BatchShape) -> dict[str, np.ndarray]:
        """Pack ``batch``, padded to ``shape``, into the next host buffer. See NOTE [Padding]. Returns its arrays."""
        event, views = self._copied[self._turn], self._host_views[self._turn]
        if event is not None:
            event.synchronize()  # the copy of two steps ago, normally done
        if shape not in views:
            views[shape] = {name: t.numpy() for name, t in self.layout(shape).views(self.host[self._turn]).items()}
        a = views[shape]
        rows, page, n, t = batch.rows, self.page_size, len(batch.rows), batch.num_tokens
        slots, start, num_pages, first_id = self._columns(batch)
        if batch.is_decode:
            ends, total, sample_slot = np.arange(1, n + 1), start + 1, slots
            positions, token_slot = start, slots
            a["input_ids"][:n] = np.maximum(first_id, 0)
            a["token_source"][:n] = np.where(first_id < 0, slots, -1)
        else:
            count = np.fromiter((r.num_new for r in rows), np.int64, n)
            ends, total = np.cumsum(count), start + count
            sample_slot = np.where(np.fromiter((r.samples for r in rows), np.bool_, n), slots, self.dummy_slot)
            positions = np.arange(t) + np.repeat(start - (ends - count), count)
            token_slot = np.repeat(slots, count)
            a["token_source"][:t] = -1
            a["input_ids"][ends - count] = np.maximum(first_id, 0)
            a["token_source"][ends - count] = np.where(first_id < 0, slots, -1)
            for row, end in zip(rows, ends.tolist(), strict=True):
                if row.num_new > 1:
                    a["input_ids"][end - row.num_new : end] = row.request.token_ids[row.start : row.start + row.num_new]
        a["input_ids"][t:], a["token_source"][t:] = 0, -1
        a["positions"][:t], a["positions"][t:] = positions, 0
        for prefix, table in self._tables():
            pages_of = table.host[token_slot, positions // page].astype(np.int64)
            a[f"{prefix}slot_mapping"][:t], a[f"{prefix}slot_mapping"][t:] = pages_of * page + positions % page, PAD_SLOT_ID
            table.pack(slots, num_pages, a[f"{prefix}change_at"], a[f"{prefix}change_page"])
        a["query_start_loc"][0], a["query_start_loc"][1 : n + 1], a["query_start_loc"][n + 1 :] = 0, ends, t
        a["seq_lens"][:n], a["seq_lens"][n:] = total, 0
        if self.total_lens:  # without the token that the row samples
            a["total_lens"][:n] = np.fromiter((r.request.num_tokens - r.samples for r in rows), np.int64, n)
            a["total_lens"][n:] = 0
        if self.adapters is not None:
            a["adapters"][:t], a["adapters"][t:] = self.adapters.of(batch), 0
        a["logits_indices"][:n], a["logits_indices"][n:] = ends - 1, 0
        a["row_slot"][:n], a["row_slot"][n:] = slots, self.dummy_slot
        a["sample_slot"][:n], a["sample_slot"][n:] = sample_slot, self.dummy_slot
        a["sample_position"][:n], a["sample_position"][n:] = total, 0
        for name, _, pad in _PARAMS:
            a[name][:n], a[name][n:] = self._params[name][slots], pad
        a["resample"][:n], a["resample"][n:] = self._resample[slots] | self._banned_rows(a, n), 0
        return a

    def _tables(self) -> list[tuple[str, BlockTable]]:
        """The block tables, with what begins the names of their fields."""
        return [("", self.table)] + ([] if self.window_table is None else [("window_", self.window_table)])

    def _columns(self, batch: ScheduledBatch) -> list[np.ndarray]:
        """Per row: slot, start position, number of pages, and first token id, -1 if it is still on the device. The only loop
        over rows; it also registers new requests of slots, and new pages."""
        holder, table, windows = self._holder, self.table, self.window_table
        slots, start, num_pages, first_id = [], [], [], []
        for request, begin, *_ in batch.rows:
            slot, pages, ids = request.slot, request.pages, request.token_ids
            if holder[slot] is not pages:  # each request gets a new list with its slot, also after a preemption
                self._new_holder(request)
            if table.known[slot] != len(pages):
                table.note(slot, pages)
            if request.num_behind:
                self.table.clear(slot, request.num_behind)
            if windows is not None:
                windows.note(slot, request.window_pages)
                windows.clear(slot, request.window_behind)
            slots.append(slot)
            start.append(begin)
            num_pages.append(len(pages))
            first_id.append(ids[begin] if begin < len(ids) else -1)
        return [np.array(column, np.int64) for column in (slots, start, num_pages, first_id)]

    def _new_holder(self, request: Request) -> None:
        slot, p = request.slot, request.params
        draws = p.temperature > 0  # a greedy row takes no filters
        min_p = -p.min_p if p.as_generate and p.top_p < 1 else p.min_p
        values = (request.seed, p.temperature, min(p.top_k, 2**31 - 1) if draws else 0,
                  max(p.top_p, _LEAST_TOP_P) if draws else 1.0, min_p if draws else 0.0, p.logprob_temperature)
        for (name, _, _), number in zip(_PARAMS, values, strict=True):
            self._params[name][slot] = number
        filtered = p.top_k > 0 or p.top_p < 1 or p.min_p > 0
        self._resample[slot] = EDITED if request.edits is not None else draws and (filtered or not self.graph_draws)
        self._may_end_at[slot] = len(request.prompt_token_ids) + p.min_tokens if p.min_tokens else 0
        for _, table in self._tables():
            table.new_holder(slot)
        self._holder[slot] = request.pages  # last: if interrupted, all of it is done again

    def _banned_rows(self, a: dict[str, np.ndarray], n: int) -> np.ndarray:
        """(n,) bool: rows that sample a token before their ``min_tokens``, which must be none that ends a sequence."""
        return (a["seq_lens"][:n] < self._may_end_at[a["row_slot"][:n]]) & (a["sample_slot"][:n] != self.dummy_slot)

    def upload(self, shape: BatchShape) -> None:
        """Copy the buffer packed last to the device, asynchronously, and switch to the other one."""
        num_bytes = self.layout(shape).num_bytes
        self.device_bytes[:num_bytes].copy_(self.host[self._turn][:num_bytes], non_blocking=True)
        if self.device.type == "cuda":
            event = self._copied[self._turn] or torch.cuda.Event()
            event.record()
            self._copied[self._turn] = event
        self._turn = 1 - self._turn

    def forward_batch(self, shape: BatchShape, host: dict[str, np.ndarray] | None = None, batch: ScheduledBatch | None = None
                      ) -> ForwardBatch:
        """The step over the device fields; host-side lengths from ``host``, or of an all-padding batch."""
        v = self.views(shape)
        if host is None or batch is None:
            start, lens = np.zeros(shape.num_reqs + 1, np.int32), np.zeros(shape.num_reqs, np.int32)
            longest_query, longest, tokens, reqs, mode = 1, 1, shape.num_tokens, shape.num_reqs, ForwardMode.IDLE
        else:
            start, lens = host["query_start_loc"], host["seq_lens"]
            longest_query = 1 if batch.is_decode else max(r.num_new for r in batch.rows)
            longest, tokens, reqs, mode = int(lens.max()), batch.num_tokens, len(batch.rows), batch.forward_mode
        metadata = CommonAttentionMetadata(
            query_start_loc=v["query_start_loc"], query_start_loc_cpu=torch.from_numpy(start), seq_lens=v["seq_lens"],
            seq_lens_cpu=torch.from_numpy(lens), block_table_tensor=self.table.rows[: shape.num_reqs],
            slot_mapping=v["slot_mapping"], num_reqs=reqs, num_actual_tokens=tokens, max_query_len=longest_query,
            max_seq_len=longest, page_size=self.page_size, total_lens=v["total_lens"] if self.total_lens else None)
        if self.fast_prefill and shape.num_tokens > shape.num_reqs and not (batch and batch.num_scored):
            metadata = replace(metadata, logits_indices_padded=v["logits_indices"], num_logits_indices=reqs)
        windows = None if self.window_table is None else replace(
            metadata, block_table_tensor=self.window_table.rows[: shape.num_reqs], slot_mapping=v["window_slot_mapping"])
        return ForwardBatch(mode, metadata, v["input_ids"], v["positions"], window_metadata=windows,
                            token_source=v["token_source"], logits_indices=v["logits_indices"], inputs=v)

    def update_table(self, batch: ForwardBatch) -> None:
        """Device work: update the block tables and gather the batch's rows for its metadata."""
        v = batch.inputs
        for prefix, table in self._tables():
            table.update(v[f"{prefix}change_at"], v[f"{prefix}change_page"], v["row_slot"])

    def commit(self) -> None:
        """The step packed last was launched; see NOTE [Table in step]."""
        for _, table in self._tables():
            table.commit()

    def stage_padding(self, shape: BatchShape) -> None:
        """Stage an all-padding batch: it writes no slot, reads the null page and leaves the block table unchanged."""
        self.device_bytes.zero_()
        v = self.views(shape)
        for name, value in (("token_source", -1), ("sample_slot", self.dummy_slot), ("row_slot", self.dummy_slot)):
            v[name].fill_(value)
        for prefix, _ in self._tables():
            v[f"{prefix}slot_mapping"].fill_(PAD_SLOT_ID)
            v[f"{prefix}change_at"].fill_(self.dummy_slot * self.width)

    def poison_padding(self, shape: BatchShape, rows: int, tokens: int, last_token: int, last_position: int) -> None:
        """Fill what lies past the batch with values that would show if they had an effect (debugging). Slots, lengths and
        offsets of padding are part of the contract, see NOTE [Padding], and stay."""
        v = self.views(shape)
        v["input_ids"][tokens:], v["positions"][tokens:] = last_token, last_position
        for name, value in (("seed", 12345), ("sample_position", 7), ("temperature", 1), ("top_p", 0.5), ("min_p", 0.5)):
            v[name][rows:] = value
        v["logits_indices"][rows:] = max(0, tokens - 1)
        if self.adapters is not None:
            v["adapters"][tokens:] = (1 << len(self.adapters.names)) - 1

    def sampling(self, shape: BatchShape, host: dict[str, np.ndarray], batch: ScheduledBatch) -> SamplingTensors | None:
        """Sampling parameters over the device fields, or None if no row needs the sampler."""
        n = len(batch.rows)
        if not host["resample"][:n].any():
            return None
        v = self.views(shape)
        return SamplingTensors(
            temperature=v["temperature"], top_k=v["top_k"], top_p=v["top_p"], min_p=v["min_p"], seed=v["seed"],
            position=v["sample_position"], all_greedy=not (host["temperature"][:n] > 0).any(),
            any_top_k=bool((host["top_k"][:n] > 0).any()), any_top_p=bool((host["top_p"][:n] < 1).any()),
            any_min_p=bool((host["min_p"][:n] > 0).any()), any_late_min_p=bool((host["min_p"][:n] < 0).any()),
            banned=self._banned(host, batch))

    def _banned(self, host: dict[str, np.ndarray], batch: ScheduledBatch) -> torch.Tensor | None:
        """(row, token) pairs of the tokens that cannot come before a request's ``min_tokens``."""
        rows = np.flatnonzero(self._banned_rows(host, len(batch.rows))).tolist()
        requests = [(i, batch.rows[i].request) for i in rows]
        pairs = [(i, token) for i, request in requests for token in request.stop_token_ids | request.too_early]
        return to_device(np.array(pairs, np.int64), self.device) if pairs else None
