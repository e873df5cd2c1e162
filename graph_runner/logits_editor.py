"""Draws tokens from logits that requests ask to change (``LogitsEdits``), and gives out the tokens that they fix.

It works after a step's graph and on a float32 copy of its logits, so that steps without such a request pay nothing and captured
graphs stay as they are. On the device it keeps two numbers per token and slot: what is added to the logit (-inf excludes a
token), and how often the token is in the continuation, with a bit for the prompt. They are made from the request's tokens when
it gets its slot, and each sampled token is counted on the device, so that the host need not know it. Only bad words of several
tokens and ``logits_processors`` read tokens on the host; requests with these wait for the result of each step
(``LogitsEdits.reads_tokens``, which the scheduler heeds).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
        self._added = self._counts = self._penalties = torch.empty(0, 0, dtype=torch.float32, device=device)

    def draw(self, batch: ScheduledBatch, logits: Tensor, sampling: SamplingTensors) -> Sampled:
        """``sampler.draw`` after the edits of the batch's requests, of logits (B, V), padding included, which stay as they are,
        and the sampling of the B rows. A row whose processor fails gets INVALID_TOKEN, and its request a ``failure``."""
        rows = [(i, row) for i, row in enumerate(batch.rows) if row.samples and row.request.edits is not None]
        places = [self._place(row, logits.shape[1]) for _, row in rows]
        logits = logits.to(torch.float32, copy=True)
        if sampling.banned is not None:
            logits, sampling = without(logits, sampling.banned), replace(sampling, banned=None)

        def chosen(wanted: Callable[[LogitsEdits], Any]) -> tuple[Tensor, Tensor] | None:
            """Rows of the batch, and of the tables, whose edits are ``wanted``."""
            pairs = [(i, place.index) for (i, row), place in zip(rows, places, strict=True) if wanted(_edits(row.request))]
            return tuple(to_device(np.array(pairs, np.int64).T.copy(), self._device)) if pairs else None

        if (biased := chosen(lambda edits: edits.biased)) is not None:
            at, place = biased
            logits.index_copy_(0, at, logits.index_select(0, at) + self._added.index_select(0, place))
        for i, row in rows:
            if _edits(row.request).reads_tokens:
                self._run(row.request, logits[i])
        if (penalized := chosen(lambda edits: edits.penalties)) is not None:
            at, place = penalized
            piece = compiled_on_cuda(_penalized, logits)
            logits.index_copy_(0, at, piece(logits.index_select(0, at), self._counts, self._penalties, place))
        sampled = draw(logits, sampling)
        tokens = self._traced(rows, sampled.tokens)
        if penalized is not None:
            at, place = penalized
            where = place * self._counts.shape[1] + tokens.index_select(0, at).clamp_min(0)
            self._counts.view(-1).scatter_add_(0, where, torch.ones_like(where, dtype=self._counts.dtype))
        for (_, row), each in zip(rows, places, strict=True):
            each.counted = row.start + row.num_new + 1
        return replace(sampled, tokens=tokens)

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

    def _traced(self, rows: Sequence[tuple[int, ScheduledRow]], tokens: Tensor) -> Tensor:
        """The tokens, with those that traces give; a row without a token keeps none."""
        forced = np.full(len(tokens), -1, np.int64)
        for i, row in rows:
            trace, at = _edits(row.request).trace, row.start + row.num_new - len(row.request.prompt_token_ids)
            if at < len(trace):
                forced[i] = trace[at]
        if not (forced >= 0).any():
            return tokens
        given = to_device(forced, self._device)
        return torch.where((given >= 0) & (tokens >= 0), given, tokens)

    # -- tables -----------------------------------------------------------------------------------------------------

    def _place(self, row: ScheduledRow, vocabulary: int) -> _Place:
        """The place of the row's slot, with the request's tokens up to the one to be drawn."""
        request, total = row.request, row.start + row.num_new
        place = self._places.setdefault(request.slot, _Place(len(self._places)))
        if place.holder is not request.pages or place.counted != total:  # each request gets a new list with its slot
            place.counted = -1  # if interrupted, all is done again
            self._fill(place.index, request, total, vocabulary)
            place.holder, place.counted = request.pages, total
        return place

    def _fill(self, index: int, request: Request, total: int, vocabulary: int) -> None:
        edits, prompt = _edits(request), len(request.prompt_token_ids)
        if edits.biased:
            added = np.full(vocabulary, -math.inf if edits.allowed else 0.0, np.float32)
            added[list(edits.allowed)] = 0.0
            for token, number in edits.added.items():
                added[token] += number
            self._added = _with_rows(self._added, index + 1, vocabulary, torch.float32)
            self._added[index].copy_(to_device(added, self._device))
        if edits.penalties is not None:
            assert len(request.token_ids) >= total  # a request has no token on the device when it gets its slot
            ids = np.array(request.token_ids[:total], np.int64)
            known = ids < vocabulary  # others have no logits: of a prompt, or from before the model was changed
            counts = np.bincount(ids[prompt:][known[prompt:]], minlength=vocabulary).astype(np.int32)
            counts[ids[:prompt][known[:prompt]]] |= _IN_PROMPT
            self._counts = _with_rows(self._counts, index + 1, vocabulary, torch.int32)
            self._penalties = _with_rows(self._penalties, index + 1, 3, torch.float32)
            self._counts[index].copy_(to_device(counts, self._device))
            self._penalties[index].copy_(to_device(np.array(edits.penalties, np.float32), self._device))


def _edits(request: Request) -> LogitsEdits:
    assert request.edits is not None
    return request.edits


def _with_rows(table: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """The table, enlarged to a power of two if it has fewer than ``rows`` rows."""
    if len(table) >= rows:
        return table
    larger = torch.zeros(max(2, 1 << (rows - 1).bit_length()), width, dtype=dtype, device=table.device)
    if len(table):
        larger[: len(table)] = table
    return larger


def _penalized(logits: Tensor, counts: Tensor, penalties: Tensor, place: Tensor) -> Tensor:
    """(k, V) float32 logits with the penalties of their rows; the formulas are in SamplingParams. counts (places, V) int32: how
    often a token is in the continuation, and _IN_PROMPT. penalties (places, 3) float32: repetition, frequency, presence. place
    (k,) int64, of each row."""
    seen, (repetition, frequency, presence) = counts[place], penalties[place][:, :, None].unbind(1)
    logits = torch.where(seen != 0, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    count = seen & (_IN_PROMPT - 1)
    return logits - frequency * count - presence * (count > 0)
