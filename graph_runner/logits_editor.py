"""Draws tokens from logits that requests ask to change (``LogitsEdits``), and gives out the tokens that they fix.

It works after a step's graph and on a float32 copy of its logits, so that steps without such a request pay nothing and captured
graphs stay as they are. On the device it keeps two numbers per token and slot: what is added to the logit (-inf excludes a
token), and how often the token is in the continuation, with a bit for the prompt. They are made from the request's tokens when
it gets its slot, and each sampled token is counted on the device, so that the host need not know it. A step of the same slots
as the last one copies nothing to the device, and penalties are one kernel over the batch there. Only bad words of several
tokens and ``logits_processors`` read tokens on the host; requests with these wait for the result of each step
(``LogitsEdits.reads_tokens``, which the scheduler heeds).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.attn_ops.metadata.core import to_device
from quire.graph_runner.logits_edits import LogitsEdits
from quire.graph_runner.request import Request, ScheduledBatch, ScheduledRow
from quire.graph_runner.sampler import Sampled, SamplingTensors, compiled_on_cuda, draw, without

_IN_PROMPT = 1 << 30  # beside the count of a token in the continuation


@dataclass
class _Place:
    """A slot's row in the tables: the list of pages of the request that has the slot, and how many of its tokens are in."""

    index: int
    holder: list[int] | None = None
    counted: int = -1


class LogitsEditor:
    """Draws the tokens of batches with edits. One per runner; not used by batches without. ``in_processor``: a request's own
    code runs. It must not start a step, whose inputs would replace those of the step at work."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.in_processor = device, False
        self._places: dict[int, _Place] = {}  # by slot; only those that some request with edits has had
        # Rows 0 change nothing: they are of rows of a batch that do not ask for that edit.
        self._added = self._counts = self._penalties = torch.empty(0, 0, dtype=torch.float32, device=device)
        self._sent: dict[str, tuple[bytes, Tensor]] = {}  # the tables' rows of the last batch, by table

    def draw(self, batch: ScheduledBatch, logits: Tensor, sampling: SamplingTensors) -> Sampled:
        """``sampler.draw`` after the edits of the batch's requests, of logits (B, V), padding included, which stay as they are,
        and the sampling of the B rows. A row whose processor fails gets INVALID_TOKEN, and its request a ``failure``."""
        rows = [(i, row, _edits(row.request)) for i, row in enumerate(batch.rows)
                if row.samples and row.request.edits is not None]
        places = self._take_places([row for _, row, _ in rows], logits.shape[1])
        added, penalized = np.zeros((2, len(logits)), np.int64)
        for (i, _, edits), place in zip(rows, places, strict=True):
            added[i] = place.index if edits.biased else 0
            penalized[i] = place.index if edits.penalties is not None else 0
        if sampling.banned is not None:
            logits, sampling = without(logits, sampling.banned), replace(sampling, banned=None)
        if added.any():
            logits = compiled_on_cuda(_biased, logits)(logits, self._added, self._on_device("added", added))
        if reading := [(i, row.request) for i, row, edits in rows if edits.reads_tokens]:
            logits = logits.to(torch.float32, copy=True)
            for i, request in reading:
                self._run(request, logits[i])
        if penalized.any():
            place_of = self._on_device("penalized", penalized)
            logits = compiled_on_cuda(_penalized, logits)(logits, self._counts, self._penalties, place_of)
        sampled = draw(logits.to(torch.float32), sampling)
        tokens = self._traced(rows, sampled.tokens)
        if penalized.any():
            where = torch.add(tokens.clamp_min(0), place_of, alpha=self._counts.shape[1])
            self._counts.view(-1).scatter_add_(0, where, (place_of > 0).to(self._counts.dtype))
        for (_, row, _), each in zip(rows, places, strict=True):
            each.counted = row.start + row.num_new + 1
        return replace(sampled, tokens=tokens)

    def _on_device(self, name: str, rows: np.ndarray) -> Tensor:
        """The tables' rows on the device, copied where they are not those of the last batch."""
        key = rows.tobytes()
        if name not in self._sent or self._sent[name][0] != key:
            self._sent[name] = key, to_device(rows, self._device)
        return self._sent[name][1]

    def check_outside(self) -> None:
        """Raises RuntimeError inside a processor: the step at work would go on with what another step, or a change, leaves."""
        if self.in_processor:
            raise RuntimeError("a logits processor ran the engine in whose step it runs, or changed it; give it an engine of "
                               "its own")

    def _run(self, request: Request, logits: Tensor) -> None:
        """Bad words of several tokens and processors, in place."""
        edits, prompt = _edits(request), request.prompt_token_ids
        output = request.token_ids[len(prompt) :]
        if banned := edits.banned(output):
            logits.index_fill_(0, to_device(np.array(banned, np.int64), logits.device), -math.inf)
        given = logits
        self.in_processor = True
        try:
            for function in edits.processors:
                found = function(list(prompt), list(output), given)
                if not isinstance(found, Tensor) or found.shape != logits.shape:
                    shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                    raise TypeError(f"it returned {shape}, not logits of shape {tuple(logits.shape)}")
                given = found
            if given is not logits:
                logits.copy_(given)
        except BaseException as error:  # of the request's own code: no other may fail by it. A Ctrl-C waits for the step's end
            request.failure = f"one of its logits_processors failed: {type(error).__name__}: {error}"
            request.output.raised = None if isinstance(error, Exception) else error
            logits.fill_(math.nan)
        finally:
            self.in_processor = False

    def _traced(self, rows: Sequence[tuple[int, ScheduledRow, LogitsEdits]], tokens: Tensor) -> Tensor:
        """The tokens, with those that traces give; a row without a token keeps none."""
        forced = np.full(len(tokens), -1, np.int64)
        for i, row, edits in rows:
            at = row.start + row.num_new - len(row.request.prompt_token_ids) if edits.trace else 0
            if at < len(edits.trace):
                forced[i] = edits.trace[at]
        if not (forced >= 0).any():
            return tokens
        given = to_device(forced, self._device)
        return torch.where((given >= 0) & (tokens >= 0), given, tokens)

    # -- tables -----------------------------------------------------------------------------------------------------

    def _take_places(self, rows: Sequence[ScheduledRow], vocabulary: int) -> list[_Place]:
        """The places of the rows' slots, with the requests' tokens up to the one to be drawn."""
        places, new = [], []
        for row in rows:
            request, total = row.request, row.start + row.num_new
            place = self._places.setdefault(request.slot, _Place(len(self._places) + 1))
            if place.holder is not request.pages or place.counted != total:  # each request gets a new list with its slot
                place.counted = -1  # if interrupted, all is done again
                new.append((place, request, total))
            places.append(place)
        self._add([(p.index, r) for p, r, _ in new if _edits(r).biased], vocabulary)
        self._count([(p.index, r, total) for p, r, total in new if _edits(r).penalties is not None], vocabulary)
        for place, request, total in new:
            place.holder, place.counted = request.pages, total
        return places

    def _add(self, new: Sequence[tuple[int, Request]], vocabulary: int) -> None:
        """Fill the rows of requests in the table of what is added."""
        if not new:
            return
        self._added = _with_rows(self._added, max(index for index, _ in new) + 1, vocabulary, torch.float32)
        flat, edits = self._added.view(-1), [(index, _edits(request)) for index, request in new]
        for chosen, value in (([i for i, e in edits if not e.allowed], 0.0), ([i for i, e in edits if e.allowed], -math.inf)):
            if chosen:
                self._added.index_fill_(0, self._copied(chosen), value)
        if allowed := [index * vocabulary + np.array(e.allowed, np.int64) for index, e in edits if e.allowed]:
            flat.index_fill_(0, self._copied(np.concatenate(allowed)), 0.0)
        tokens = [index * vocabulary + token for index, e in edits for token in e.added]
        if tokens:
            numbers = np.array([number for _, e in edits for number in e.added.values()], np.float32)
            flat.index_add_(0, self._copied(tokens), to_device(numbers, self._device))

    def _count(self, new: Sequence[tuple[int, Request, int]], vocabulary: int) -> None:
        """Fill the rows of requests in the tables of counts and penalties, from so many of their tokens."""
        if not new:
            return
        most = max(index for index, _, _ in new) + 1
        self._counts = _with_rows(self._counts, most, vocabulary, torch.int32)
        self._penalties = _with_rows(self._penalties, most, 4, torch.float32)
        of_prompts: list[np.ndarray] = []
        of_outputs: list[np.ndarray] = []
        penalties = []
        for index, request, total in new:
            assert len(request.token_ids) >= total  # a request has no token on the device when it gets its slot
            ids, prompt = np.array(request.token_ids[:total], np.int64), len(request.prompt_token_ids)
            for part, found in ((ids[:prompt], of_prompts), (ids[prompt:], of_outputs)):
                # Others have no logits: of a prompt, or from before the model was changed.
                found.append(index * vocabulary + part[part < vocabulary])
            repetition, *rest = np.array(_edits(request).penalties, np.float32)
            penalties.append((repetition, np.float32(1) / repetition, *rest))
        rows, flat = self._copied([index for index, _, _ in new]), self._counts.view(-1)
        self._counts.index_fill_(0, rows, 0)
        flat.index_fill_(0, self._copied(np.concatenate(of_prompts)), _IN_PROMPT)
        if any(map(len, of_outputs)):
            outputs = self._copied(np.concatenate(of_outputs))
            flat.scatter_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
        self._penalties.index_copy_(0, rows, to_device(np.array(penalties, np.float32), self._device))

    def _copied(self, indices: Sequence[int] | np.ndarray) -> Tensor:
        return to_device(np.asarray(indices, np.int64), self._device)


def _edits(request: Request) -> LogitsEdits:
    assert request.edits is not None
    return request.edits


def _with_rows(table: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """The table, enlarged to one row more than a power of two if it has fewer than ``rows`` rows, which are at least 2."""
    if len(table) >= rows:
        return table
    larger = torch.zeros(1 + (1 << (rows - 2).bit_length()), width, dtype=dtype, device=table.device)
    if len(table):
        larger[: len(table)] = table
    return larger


# ---- pieces that are compiled on CUDA


def _biased(logits: Tensor, added: Tensor, place: Tensor) -> Tensor:
    """(B, V) float32 logits, and what is added (places, V) to them; place (B,) int64, of each row."""
    return logits.float() + added[place]


def _penalized(logits: Tensor, counts: Tensor, penalties: Tensor, place: Tensor) -> Tensor:
    """(B, V) float32 logits with the penalties of their rows; the formulas are in SamplingParams. counts (places, V) int32: how
    often a token is in the continuation, and _IN_PROMPT. penalties (places, 4) float32: repetition, its reciprocal, frequency,
    presence. place (B,) int64, of each row."""
    x, seen = logits.float(), counts[place]
    repetition, reciprocal, frequency, presence = penalties[place][:, :, None].unbind(1)
    # As PyTorch divides by a number there, which transformers does: to the bit, in the kernel of any compiler.
    less = x * reciprocal if x.is_cuda else x / repetition
    x = torch.where(seen != 0, torch.where(x > 0, less, x * repetition), x)
    count = seen & (_IN_PROMPT - 1)
    return x - frequency * count - presence * (count > 0)
