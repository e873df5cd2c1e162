"""Staging of a step's inputs: packed on the host, one copy to the device, read there at fixed addresses.

All integers and floats of a step (token ids, positions, slots, block table, lengths, sampling parameters) are packed into one
flat buffer, so that a step costs one copy. ``StepLayout`` says where each field lies for a batch of a given shape; the
device buffer is one and the same for all shapes, so a CUDA graph captured for a shape finds its fields where it left them.
The host side is pinned and there are two of it: the host packs step n + 1 while the copy of step n may still be under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from attn_ops.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from graph_runner.request import Request, ScheduledBatch
from graph_runner.sampler import SamplingTensors

# Sampling parameters: name, type, value for padding rows.
_PARAMS = (("seed", "i8", 0), ("temperature", "f4", 0), ("top_k", "i4", 0), ("top_p", "f4", 1), ("min_p", "f4", 0))
_TORCH = {"i8": torch.int64, "i4": torch.int32, "f4": torch.float32}


class BatchShape(NamedTuple):
    """Shape of a (padded) batch: tokens and rows. The key of captured graphs."""

    num_tokens: int
    num_reqs: int


def _fields(shape: BatchShape, width: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, type, shape) of each field; 8-byte ones first, so that all are aligned."""
    t, b = shape
    return [
        ("input_ids", "i8", (t,)), ("positions", "i8", (t,)), ("slot_mapping", "i8", (t,)), ("token_source", "i8", (t,)),
        ("logits_indices", "i8", (b,)), ("sample_slot", "i8", (b,)), ("seed", "i8", (b,)), ("sample_position", "i8", (b,)),
        ("query_start_loc", "i4", (b + 1,)), ("seq_lens", "i4", (b,)), ("top_k", "i4", (b,)), ("temperature", "f4", (b,)),
        ("top_p", "f4", (b,)), ("min_p", "f4", (b,)), ("block_table", "i4", (b, width)),
    ]


@dataclass(frozen=True)
class StepLayout:
    """Where the fields of a batch shape lie in the flat buffer: name -> (byte offset, type, shape)."""

    shape: BatchShape
    fields: dict[str, tuple[int, str, tuple[int, ...]]]
    num_bytes: int

    @classmethod
    def of(cls, shape: BatchShape, width: int) -> StepLayout:
        """``width``: pages of a block table row."""
        fields, at = {}, 0
        for name, kind, size in _fields(shape, width):
            fields[name] = (at, kind, size)
            at += int(np.prod(size)) * int(kind[1])
        return cls(shape, fields, at)


class HostArrays:
    """One pinned staging buffer, seen as numpy arrays for a layout."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin)
        self._bytes = self.tensor.numpy()
        self._views: dict[BatchShape, dict[str, np.ndarray]] = {}

    def view(self, layout: StepLayout) -> dict[str, np.ndarray]:
        if layout.shape not in self._views:
            self._views[layout.shape] = {
                name: self._bytes[at : at + int(np.prod(size)) * int(kind[1])].view(kind).reshape(size)
                for name, (at, kind, size) in layout.fields.items()}
        return self._views[layout.shape]


class StepBuffers:
    """The staging buffers of an engine.

    Args:
        max_shape: the largest batch.
        max_pages_per_seq: width of a block table row.
        max_num_seqs: slots; the table of newest tokens has one more, for padding rows to write to.
        device: where the step runs.
    """

    def __init__(self, max_shape: BatchShape, *, max_pages_per_seq: int, max_num_seqs: int, page_size: int,
                 device: torch.device) -> None:
        self.width, self.page_size, self.device = max_pages_per_seq, page_size, device
        self.dummy_slot = max_num_seqs
        # Mixed shapes reach max tokens and max rows at once, so this bounds every layout.
        num_bytes = StepLayout.of(max_shape, max_pages_per_seq).num_bytes
        pin = device.type == "cuda"
        self.host = [HostArrays(num_bytes, pin) for _ in range(2)]
        self.device_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.block_table = np.zeros((max_num_seqs, max_pages_per_seq), dtype=np.int32)
        # What a slot's request brings along, written when it gets the slot, so that a step only gathers by slot.
        self._holder: list[list[int] | None] = [None] * max_num_seqs
        self._pages_known = [0] * max_num_seqs
        self._params = {name: np.zeros(max_num_seqs, np.dtype(kind)) for name, kind, _ in _PARAMS}
        self._layouts: dict[BatchShape, StepLayout] = {}
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._views: dict[BatchShape, dict[str, torch.Tensor]] = {}

    def layout(self, shape: BatchShape) -> StepLayout:
        if shape not in self._layouts:
            if len(self._layouts) > 4096:  # eager steps have many shapes; the captured ones come back at once
                self._layouts.clear()
                self._views.clear()
                for host in self.host:
                    host._views.clear()
            self._layouts[shape] = StepLayout.of(shape, self.width)
        return self._layouts[shape]

    def views(self, shape: BatchShape) -> dict[str, torch.Tensor]:
        """The fields on the device, at the same addresses every time for one shape."""
        layout = self.layout(shape)
        if shape not in self._views:
            self._views[shape] = {
                name: self.device_bytes[at : at + int(np.prod(size)) * int(kind[1])].view(_TORCH[kind]).view(size)
                for name, (at, kind, size) in layout.fields.items()}
        return self._views[shape]

    def fill(self, batch: ScheduledBatch, shape: BatchShape) -> dict[str, np.ndarray]:
        """Pack ``batch``, padded to ``shape``, into the next host buffer. See NOTE [Padding]. Returns its arrays."""
        host = self.host[self._turn]
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()  # the copy of two steps ago; long done
        a = host.view(self.layout(shape))
        rows, page = batch.rows, self.page_size
        n, t = len(rows), batch.num_tokens
        count = np.fromiter((r.num_new for r in rows), np.int64, n)
        start = np.fromiter((r.start for r in rows), np.int64, n)
        slots = np.fromiter((r.request.slot for r in rows), np.int64, n)
        samples = np.fromiter((r.samples for r in rows), np.bool_, n)
        ends = np.cumsum(count)
        a["query_start_loc"][0] = 0
        a["query_start_loc"][1 : n + 1] = ends
        a["query_start_loc"][n + 1 :] = t
        a["seq_lens"][:n] = start + count
        a["seq_lens"][n:] = 0
        for row in rows:
            self._note(row.request)
        in_use = -(-(start + count) // page)
        used = int(in_use.max())
        table = a["block_table"]
        # Behind a row's own pages the slot may still hold those of a request before it.
        table[:n, :used] = np.where(np.arange(used) < in_use[:, None], self.block_table[slots, :used], 0)
        table[:n, used:], table[n:] = 0, 0
        if batch.is_decode:
            positions = start
            pages_of = self.block_table[slots, positions // page]
        else:
            row_of = np.repeat(np.arange(n), count)
            positions = np.arange(t) + np.repeat(start - (ends - count), count)
            pages_of = self.block_table[slots[row_of], positions // page]
        a["positions"][:t], a["positions"][t:] = positions, 0
        a["slot_mapping"][:t], a["slot_mapping"][t:] = pages_of.astype(np.int64) * page + positions % page, PAD_SLOT_ID
        a["input_ids"][t:] = 0
        a["token_source"][:] = -1
        self._fill_ids(a, batch, ends)
        a["logits_indices"][:n], a["logits_indices"][n:] = ends - 1, 0
        a["sample_slot"][:n] = np.where(samples, slots, self.dummy_slot)
        a["sample_slot"][n:] = self.dummy_slot
        a["sample_position"][:n], a["sample_position"][n:] = start + count, 0
        for name, _, pad in _PARAMS:
            a[name][:n], a[name][n:] = self._params[name][slots], pad
        return a

    def _note(self, request: Request) -> None:
        """Keep up with what a request holds: its sampling parameters when it gets its slot, its pages as they come."""
        slot, pages = request.slot, request.pages
        if self._holder[slot] is not pages:  # a list of its own each time a request gets a slot, also after a preemption
            self._holder[slot], self._pages_known[slot] = pages, 0
            p = request.params
            draws = p.temperature > 0  # a greedy row takes no filters
            values = (request.seed, p.temperature, min(p.top_k, 2**31 - 1) if draws else 0, p.top_p if draws else 1.0,
                      p.min_p if draws else 0.0)
            for (name, _, _), number in zip(_PARAMS, values, strict=True):
                self._params[name][slot] = number
        known = self._pages_known[slot]
        if known != len(pages):
            self.block_table[slot, known : len(pages)] = pages[known:]
            self._pages_known[slot] = len(pages)

    @staticmethod
    def _fill_ids(a: dict[str, np.ndarray], batch: ScheduledBatch, ends: np.ndarray) -> None:
        """Token ids the host knows, and for a token that is still on the device, the slot it will be read from."""
        at = 0
        ids, source = a["input_ids"], a["token_source"]
        for row in batch.rows:
            request, known = row.request, len(row.request.token_ids)
            if row.num_new == 1:
                if row.start < known:
                    ids[at] = request.token_ids[row.start]
                else:
                    ids[at], source[at] = 0, request.slot
                at += 1
                continue
            stop = row.start + row.num_new
            ids[at : at + row.num_new] = request.token_ids[row.start : stop]
            at += row.num_new

    def upload(self, shape: BatchShape) -> None:
        """Copy the buffer packed last to the device, asynchronously, and turn to the other one."""
        num_bytes = self.layout(shape).num_bytes
        self.device_bytes[:num_bytes].copy_(self.host[self._turn].tensor[:num_bytes], non_blocking=True)
        if self.device.type == "cuda":
            event = self._copied[self._turn] or torch.cuda.Event()
            event.record()
            self._copied[self._turn] = event
        self._turn = 1 - self._turn

    def metadata(self, shape: BatchShape, host: dict[str, np.ndarray] | None, batch: ScheduledBatch | None) -> \
            CommonAttentionMetadata:
        """Metadata over the device fields; host-side lengths from ``host``, or those of an all-padding batch."""
        v = self.views(shape)
        if host is None or batch is None:
            start, lens = np.zeros(shape.num_reqs + 1, np.int32), np.zeros(shape.num_reqs, np.int32)
            longest_query, longest, tokens, reqs = 1, 1, shape.num_tokens, shape.num_reqs
        else:
            start, lens = host["query_start_loc"], host["seq_lens"]
            longest_query = 1 if batch.is_decode else max(r.num_new for r in batch.rows)
            longest, tokens, reqs = int(lens.max()), batch.num_tokens, len(batch.rows)
        return CommonAttentionMetadata(
            query_start_loc=v["query_start_loc"], query_start_loc_cpu=torch.from_numpy(start), seq_lens=v["seq_lens"],
            seq_lens_cpu=torch.from_numpy(lens), block_table_tensor=v["block_table"], slot_mapping=v["slot_mapping"],
            num_reqs=reqs, num_actual_tokens=tokens, max_query_len=longest_query, max_seq_len=longest,
            page_size=self.page_size)

    def sampling(self, shape: BatchShape, batch: ScheduledBatch) -> SamplingTensors:
        """Sampling parameters over the device fields."""
        v = self.views(shape)
        params = [p for p in (r.request.params for r in batch.rows) if p.temperature > 0]
        return SamplingTensors(
            temperature=v["temperature"], top_k=v["top_k"], top_p=v["top_p"], min_p=v["min_p"], seed=v["seed"],
            position=v["sample_position"], all_greedy=not params, any_top_k=any(p.top_k > 0 for p in params),
            any_top_p=any(p.top_p < 1 for p in params), any_min_p=any(p.min_p > 0 for p in params),
            banned=self._banned(batch))

    def _banned(self, batch: ScheduledBatch) -> torch.Tensor | None:
        """(row, token) pairs of the tokens that would end a request before its ``min_tokens``."""
        pairs = [(i, token) for i, r in enumerate(batch.rows)
                 if r.request.params.min_tokens and r.request.num_output_tokens - r.samples < r.request.params.min_tokens
                 for token in r.request.stop_token_ids]
        if not pairs:
            return None
        host = torch.tensor(pairs, dtype=torch.int64)
        return (host.pin_memory() if self.device.type == "cuda" else host).to(self.device, non_blocking=True)


__all__ = ["BatchShape", "HostArrays", "StepBuffers", "StepLayout"]
