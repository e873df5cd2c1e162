"""``generate`` for calls that look at every token: transformers' processors and criteria over paged steps.

The rows of such a call advance together, one token per step, as in transformers' own loop: a logits processor or a stopping
criterion gets the whole batch, and may read any row of it. transformers prepares the call (it merges configs, builds processors
and criteria), then runs ``type(model)._sample`` or ``_beam_search``, for which a paged model's class calls ``sample`` here or
``beam_search``. Steps of the engine's other callers run in between.

Rows with equal prompts share the prompt's pages, which are computed once, and a beam that has several continuations shares its
full pages with them. Only the partial last page is copied: a row never writes a page that another one reads.
"""

from __future__ import annotations

import itertools
import os.path
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from quire.attn_ops.kv_cache import pages_for
from quire.graph_runner.adapters import after_change
from quire.graph_runner.request import Request, RequestOutput, ScheduledBatch, ScheduledRow, outside_vocabulary
from quire.graph_runner.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.graph_runner.engine import Engine

T = TypeVar("T")
_GREEDY = SamplingParams(temperature=0)


class DoesNotFit(ValueError):
    """The rows of a call may need more than the engine has; says what."""


class _Turn:
    """Two calls that each hold half of the pages would wait for each other: one call at a time per engine."""

    def __init__(self) -> None:
        self.lock, self.thread = threading.RLock(), 0  # of the call; 0: there is none


_turns: weakref.WeakKeyDictionary[Engine, _Turn] = weakref.WeakKeyDictionary()


def held_here(engine: Any) -> bool:
    """Whether this thread is inside a call that advances in lockstep: its processor or criterion runs."""
    turn = _turns.get(engine)
    return turn is not None and turn.thread == threading.get_ident()


class Rows:
    """Sequences in the pages of an engine that advance together. A context manager: its slots and pages go back at the end.
    ``prompts``: token ids of each row; neighbours with equal ones share their pages. ``max_tokens``: that may be appended to
    each row. Raises DoesNotFit, which says what to change; ValueError for ids outside the vocabulary, which a compiled lookup
    would end the process for."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        if held_here(engine):
            raise DoesNotFit("it was called from a processor or a criterion of another call of generate on this engine")
        with engine.lock.hold():  # no other thread is in a processor then
            if engine.runner.editor.in_processor:
                raise DoesNotFit("it was called from a request's logits processor, in a step of the engine")
        config, total = engine.config, engine.scheduler.allocator.num_total
        longest = max(map(len, prompts)) + max_tokens
        starts, vocabulary = [i for i, p in enumerate(prompts) if i == 0 or p != prompts[i - 1]], engine.limits.vocab_size
        for i in starts:
            if not 0 <= min(prompts[i]) <= max(prompts[i]) < vocabulary:
                bad = [token for token in prompts[i] if not 0 <= token < vocabulary]
                raise ValueError(f"row {i}: token ids {bad[:5]} are outside the vocabulary of {vocabulary} tokens")
        self._groups = [slice(a, b) for a, b in itertools.pairwise([*starts, len(prompts)])]  # of rows with one prompt
        shared = sum((g.stop - g.start - 1) * (len(prompts[g.start]) // config.page_size) for g in self._groups)
        whole = [pages_for(len(p) + max_tokens, config.page_size) for p in prompts]
        pages = sum(whole) - shared
        if longest > engine.max_model_len:
            raise DoesNotFit(f"it may make a sequence of {longest} tokens, and the engine holds {engine.max_model_len} (see "
                             "max_model_len and num_pages of quire.Engine)")
        if len(prompts) > config.max_num_seqs:
            raise DoesNotFit(f"its {len(prompts)} sequences advance together, and the engine runs {config.max_num_seqs} at "
                             "once (see max_num_seqs of quire.Engine)")
        if pages > total:
            raise DoesNotFit(f"its {len(prompts)} sequences advance together and may fill {pages} pages, and the engine has "
                             f"{total} (see num_pages of quire.Engine)")
        self.engine, self._runner, self._budget = engine, engine.runner, config.max_num_batched_tokens
        self._version, self._active = engine._live.version, engine._live.active
        if (windows := engine.scheduler.windows) is not None:
            each = windows.reach.pages_held(0, config.page_size) + 1  # of a row that computes one token
            held, free = sum(min(n, each) for n in whole), windows.allocator.num_total
            if max(whole) > each:  # rows that compute more tokens hold as many more pages
                self._budget = min(self._budget, (free - held) * config.page_size)
            if held > free or not self._budget:
                raise DoesNotFit(f"its {len(prompts)} sequences advance together and may hold {held} pages of layers with a "
                                 f"window, without a prompt's, and the engine has {free} (see num_pages of quire.Engine)")
        self.requests = [Request(-1 - i, list(p), _GREEDY, RequestOutput(i, None, list(p)), 0, frozenset(),
                                 engine.max_model_len) for i, p in enumerate(prompts)]

    def __enter__(self) -> Rows:
        self._turn = _turns.setdefault(self.engine, _Turn())
        self._turn.lock.acquire()
        try:
            while not self._take_slots():
                self.engine._step()  # until other requests have ended, and none begins meanwhile
            self._turn.thread = threading.get_ident()
        except BaseException:
            self._turn.lock.release()
            raise
        finally:
            self.engine.scheduler.reserved = 0
        return self

    def _take_slots(self) -> bool:
        with self.engine.lock.hold():
            self._follow(everything=True)
            free = self.engine.scheduler.free_slots
            if len(free) < len(self.requests):
                self.engine.scheduler.reserved = len(self.requests)
                return False
            self._active = self.engine._live.active  # of the graph, while that has no adapters of each request
            self._keep_adapters()
            for row in self.requests:
                row.slot = free.pop()
            self.engine.counters.advance_together(len(self.requests), sum(len(row.token_ids) for row in self.requests))
            return True

    def __exit__(self, *exc: object) -> None:
        with self.engine.lock.hold():
            self._forget_old()
            for row in self.requests:
                self.engine.scheduler.give_back(row)
                self.engine.scheduler.free_slots.append(row.slot)
            self.engine.counters.ended_together(len(self.requests), bool(self.engine.requests))
        self._turn.thread = 0
        self._turn.lock.release()

    def append(self, tokens: Sequence[int]) -> None:
        """One more token for each row; 0 for one outside the vocabulary, with which a row that has ended may be padded."""
        for row, token in zip(self.requests, tokens, strict=True):
            row.token_ids.append(token if 0 <= token < self._runner.vocab_size else 0)

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row i go on from the tokens, keys and values of row ``sources[i]``, which had the same prompt."""
        with self.engine.lock.hold():
            self._follow(everything=False)
            old, first = self.requests, set(sources)
            unused = [row for i, row in enumerate(old) if i not in first]
            rows, forks = [], []
            for i in sources:
                if i in first:
                    first.remove(i)
                    rows.append(old[i])
                else:
                    rows.append(unused.pop())
                    rows[-1].token_ids = list(old[i].token_ids)
                    forks.append((old[i], rows[-1]))
            self.requests = rows
            self._fork(forks)

    def logits(self) -> torch.Tensor:
        """(rows, V) float32: the logits after the last token of each row; computes the tokens that are new."""
        found: dict[int, torch.Tensor] = {}
        while len(found) < len(self.requests):
            with self.engine.lock.hold():
                if self._follow(everything=False):
                    found.clear()
                batch = self._schedule()
                if (logits := self._logits_of(batch)) is None:
                    found.clear()
                    continue
                logits = logits.to(torch.float32, copy=True)
                for scheduled, of_row in zip(batch.rows, logits, strict=True):
                    row = scheduled.request
                    row.num_computed += scheduled.num_new
                    if not row.num_uncomputed:
                        found[row.request_id] = of_row
                for group in self._groups:
                    first, *others = self.requests[group]
                    if first.num_computed == self._awaited(group):
                        self._fork([(first, other) for other in others])
                        found |= {r.request_id: found[first.request_id] for r in others if not r.num_uncomputed}
            if self.engine.requests:
                self.engine._step()
        with self.engine.lock.hold():
            self.engine.counters.generated_tokens += len(self.requests)
        return torch.stack([found[row.request_id] for row in self.requests])

    def every_logits(self, take: Callable[[int, int, torch.Tensor], None], most: int) -> None:
        """The logits at every token of rows with different prompts: ``take`` gets the index of a row, the position of a token,
        and (n, V) for n tokens from there on, which the next step overwrites. ``most``: tokens per step."""
        while any(row.num_uncomputed for row in self.requests):
            with self.engine.lock.hold():
                self._follow(everything=False)
                batch = self._schedule(most, scored=True)
                if (logits := self._logits_of(batch)) is None:
                    continue
                at = len(batch.rows)
                for i, (row, start, count, _, scored) in enumerate(batch.rows):
                    index = self.requests.index(row)
                    take(index, start, logits[at : at + scored])
                    take(index, start + scored, logits[i : i + 1])
                    row.num_computed, at = start + count, at + scored
            if self.engine.requests:
                self.engine._step()

    def _logits_of(self, batch: ScheduledBatch) -> torch.Tensor | None:
        """Run a step. None: it failed because the trace no longer fitted its model, which is traced again; so rows begin
        again too."""
        try:
            return self._runner.logits_of(batch)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if self.engine._live.change() is None or not self._follow(everything=True):
                raise
            return None

    def _awaited(self, group: slice) -> int | None:
        """How many tokens the rows of the group have in common, if the first row computes them for all; None: it has."""
        rows = self.requests[group]
        if len(rows) == 1 or any(row.num_computed for row in rows[1:]):
            return None
        return len(os.path.commonprefix([row.token_ids for row in rows]))

    def _fork(self, pairs: Sequence[tuple[Request, Request]]) -> None:
        """Let the second of each pair read the keys and values of the first: full pages are shared, a partial one is copied."""
        scheduler, copies, window_copies = self.engine.scheduler, [], []
        for source, target in pairs:
            scheduler.give_back(target)
            scheduler.share(source, target)
            if source.num_computed % scheduler.page_size:
                at = len(target.pages)
                self._extend(target, 1)
                copies.append((source.pages[at], target.pages[at]))
                if scheduler.windows is not None:
                    window_copies.append((source.window_pages[at], target.window_pages[at]))
            target.num_computed = source.num_computed
        self._runner.copy_pages(copies, window_copies)

    def _follow(self, *, everything: bool) -> bool:
        """Let the engine follow a model that has changed. Returns whether it did: keys and values are computed again then."""
        if self.engine._closed:
            raise RuntimeError("the engine was closed while generate() ran on it")
        self.engine._follow(everything)
        self.engine._live.refresh(everything)
        if not self._forget_old():
            return False
        self._keep_adapters()
        for row in self.requests:
            if (why := outside_vocabulary(row, self._runner.vocab_size)) is not None:
                raise RuntimeError(f"generate() cannot go on: {why}")
        return True

    def _forget_old(self) -> bool:
        """Give up pages of another cache than the engine's, or of other weights. Returns whether there were any."""
        if self.engine._live.version == self._version:
            return False
        for row in self.requests:
            if self.engine.runner is not self._runner:  # its pages of layers with a window went with it
                row.window_pages, row.window_behind = [], 0
            self.engine.scheduler.give_back(row)
        self._version, self._runner = self.engine._live.version, self.engine.runner
        return True

    def _keep_adapters(self) -> None:
        """Rows keep the adapters that they have drawn tokens with. Raises RuntimeError if they cannot."""
        for _, why in after_change(self.requests, self.engine.model, self._runner.adapters, self._active):
            raise RuntimeError(f"generate() cannot go on: {why}")

    def _schedule(self, most: int | None = None, scored: bool = False) -> ScheduledBatch:
        """A step of up to ``most`` new tokens, with pages for them. ``scored``: with logits for each of them."""
        scheduler, scheduled, budget = self.engine.scheduler, [], min(self._budget, most or self._budget)
        for row in self.requests:
            if scheduler.set_length_kind(row):  # all keys are others; pages behind windows are gone
                scheduler.give_back(row)
            if scheduler.windows is not None:
                scheduler.windows.free_behind(row)
        for group in self._groups:
            rows, common = self.requests[group], self._awaited(group)
            for row in rows if common is None else rows[:1]:
                new = row.num_uncomputed if common is None else common - row.num_computed
                count = min(new, budget, scheduler.prefill_chunk_size or budget)
                missing = pages_for(row.num_computed + count, scheduler.page_size) - len(row.pages)
                if missing > 0:
                    self._extend(row, missing)
                if count:
                    budget -= count
                    row.num_scored = row.num_computed + count
                    scheduled.append(ScheduledRow(row, row.num_computed, count, False, count - 1 if scored else 0))
        scheduled.sort(key=lambda r: r.num_new > 1)  # decode rows come first
        return ScheduledBatch(scheduled, sum(r.num_new for r in scheduled), sum(r.num_new == 1 for r in scheduled),
                              sum(r.num_scored for r in scheduled))

    def _extend(self, row: Request, count: int) -> None:
        """More pages for the row, if need be those of the engine's other requests."""
        if not self.engine.scheduler.extend(row, count):
            self.engine.collect()
            self.engine.scheduler.preempt_all()
            extended = self.engine.scheduler.extend(row, count)
            assert extended  # all rows fit: checked at the start


def in_parts(items: Sequence[T], together: int, rows_of: Callable[[Sequence[T]], Rows]) -> Iterator[tuple[Sequence[T], Rows]]:
    """The items, up to ``together`` at once, with their rows: fewer where those would not fit. Raises DoesNotFit if the rows of
    a single item do not."""
    at = 0
    while part := items[at : at + together]:
        try:
            rows = rows_of(part)
        except DoesNotFit:
            if len(part) == 1:
                raise
            together = len(part) // 2
            continue
        yield part, rows
        at += len(part)


def sample(rows: Rows, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
           streamer: Any = None) -> Any:
    """What ``GenerationMixin._sample`` returns, with logits from the engine. ``rows``: not entered yet, with the prompts
    without padding. ``input_ids``: (rows, length) int, as the processors and criteria get them, padding included. The rest is
    as transformers prepared it."""
    config, device = generation_config, input_ids.device
    ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    pad: Any = None if config._pad_token_tensor is None else config._pad_token_tensor.to(device)
    scores: Any = () if config.return_dict_in_generate and config.output_scores else None
    raw: Any = () if config.return_dict_in_generate and config.output_logits else None
    going = torch.ones(len(input_ids), dtype=torch.long, device=device)
    with rows:
        while True:
            logits = rows.logits().to(device)
            processed = logits_processor(input_ids, logits)
            if scores is not None:
                scores += (processed,)
            if raw is not None:
                raw += (logits,)
            if config.do_sample:
                tokens = torch.multinomial(torch.softmax(processed, dim=-1), num_samples=1).squeeze(1)
            else:
                tokens = processed.argmax(dim=-1)
            if ends:
                tokens = tokens * going + pad * (1 - going)
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
            going = going & ~stopping_criteria(input_ids, scores)
            if streamer is not None:
                streamer.put(tokens.cpu())
            if not going.any():
                break
            rows.append(tokens.tolist())
    if streamer is not None:
        streamer.end()
    return output_dict(input_ids, scores, raw) if config.return_dict_in_generate else input_ids


def output_dict(sequences: Any, scores: Any = None, logits: Any = None) -> Any:
    """transformers' result with ``return_dict_in_generate``; it has no ``past_key_values``: those are in the engine's pages."""
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)


class _Forward:
    """Stands for ``model`` in transformers' beam search, for a call whose beams are ``rows``. That loop reaches the model by
    these few methods; length penalties, early stopping, end tokens and sampled beams stay transformers' own."""

    def __init__(self, model: Any, rows: Rows) -> None:
        self._model, self._rows = model, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _prefill(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self._rows.logits()[:, None])

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": input_ids}

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> SimpleNamespace:
        self._rows.append(input_ids[:, -1].tolist())
        return self._prefill(input_ids)

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return model_kwargs

    def _reorder_cache(self, cache: Any, beam_idx: torch.Tensor) -> Any:
        self._rows.reorder(beam_idx.tolist())
        return cache


def beam_search(plain: Callable[..., Any], rows: Rows, input_ids: torch.Tensor, **options: Any) -> Any:
    """What ``plain``, a model's ``_beam_search``, returns, with logits from the engine. Arguments as of ``sample``;
    ``options``: the others of ``plain``, without what is for the model."""
    loop, model = plain.__func__, plain.__self__  # type: ignore[attr-defined]
    with rows:
        found = loop(_Forward(model, rows), input_ids, past_key_values=rows, use_cache=True, **options)
    if hasattr(found, "past_key_values"):
        found.past_key_values = None  # keys and values were in the engine's pages
    return found
