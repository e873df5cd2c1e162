"""The engine: requests in, tokens out, with continuous batching over one traced model and one paged KV cache.

An engine step asks the scheduler for a batch, launches it, and collects the results of the step before. So on a GPU the host
prepares step n + 1 while the device runs step n: sampled tokens stay on the device, where the next step reads them, and reach
the host one step late. A request that ends by a stop token has then run one step too many, whose result is dropped.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, Unpack

import torch

from quire.graph_runner import adapters, loading
from quire.graph_runner.admission import Admission
from quire.graph_runner.block_allocator import BlockAllocator
from quire.graph_runner.calls import EngineCalls
from quire.graph_runner.config import EngineConfig, EngineOptions, documents_options
from quire.graph_runner.engine_lock import EngineLock, locked
from quire.graph_runner.gc_freeze import ServingFreeze
from quire.graph_runner.live_model import LiveModel
from quire.graph_runner.logprobs import SCORED_ROWS
from quire.graph_runner.model_runner import Launched, ModelRunner, Result
from quire.graph_runner.prefix_cache import PrefixCache
from quire.graph_runner.prompts import Prompt
from quire.graph_runner.request import Ask, FinishReason, Limits, Request, RequestOptions, StreamEvent, fit_again, make_requests
from quire.graph_runner.sampling_params import SamplingParams
from quire.graph_runner.scheduler import NeedsDrain, Scheduler
from quire.graph_runner.stats import Counters
from quire.graph_runner.weights import WeightUpdates


@documents_options
class Engine(EngineCalls, WeightUpdates):
    """Serves one causal LM in this process; ``EngineCalls`` has its calls. Use as a context manager, or call ``close``: the
    model is then as it was. Threads may share an engine: their requests run together, in the model's dtypes
    (``torch.autocast`` does not apply) and as in evaluation mode: without dropout, also while the model trains.

    Args:
        model: a transformers causal LM, a module with such a forward, or a path to a saved model.
        tokenizer: for prompts and results as text; loaded from the path if ``model`` is one. Token ids need none.
        {options}

    Attributes:
        config: the options, as an EngineConfig.
        requests: the unfinished requests by id.
        scheduler, runner: see their classes; ``runner`` is replaced when the model changes. Tests may wrap their public
            methods, those of ``runner.buffers``, and ``collect``.

    Raises:
        UnsupportedAttention: the model, or one of its attention sites, cannot be served; says which and why.
        ValueError: an option out of range, or an unknown backend.
        TypeError: an unknown option.
    """

    def __init__(self, model: torch.nn.Module | str, tokenizer: Any = None, **options: Unpack[EngineOptions]) -> None:
        config = EngineConfig.of(options)
        self.model, self.tokenizer = loading.load(model, tokenizer, config.dtype)
        self._live = LiveModel(self.model, config)
        self.config = config = self._live.config
        allocator, share = BlockAllocator(self._live.num_pages), config.enable_prefix_caching
        prefixes = None if share is False else PrefixCache(allocator, config.page_size, self.model, lasting=share is True)
        self.scheduler = Scheduler(allocator, page_size=config.page_size, max_num_seqs=config.max_num_seqs,
                                   max_num_batched_tokens=config.max_num_batched_tokens,
                                   prefill_chunk_size=config.prefill_chunk_size, max_scored=SCORED_ROWS, prefixes=prefixes)
        self.max_model_len = self._live.fit(self.scheduler)
        self._depth = int(self.runner.device.type == "cuda" if config.async_stepping is None else config.async_stepping)
        self._random = random.Random(config.seed)
        self._in_flight: deque[Launched] = deque()
        self._results: deque[Result] = deque()  # of a finished step, not handled yet
        self._gc, self.lock = ServingFreeze(), EngineLock()
        self.requests: dict[int, Request] = {}
        self.counters, self._admission = Counters(), Admission(config.max_waiting, config.max_num_seqs)
        self._events: deque[StreamEvent] = deque()  # for ``step``; each stream has its own
        self._next_id = 0
        self._closed = self._launch_failed = self._check_due = False  # due: to compare the whole model with its trace

    @property
    def runner(self) -> ModelRunner:
        return self._live.runner

    # -- requests ---------------------------------------------------------------------------------------------------

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None,
                    priority: int = 0, timeout: float | None = None, adapter: str | None = None) -> list[int]:
        """Queue a prompt; returns the ids of its requests (``params.n`` of them), whose events ``step`` returns. See ``stream``
        for the arguments. Raises ValueError, TypeError or QueueFull if the prompt cannot be served. Nothing else is
        affected."""
        ids: list[int] = []
        chosen, why = self._params_of(prompt, params)
        self._add(Ask(prompt, chosen, RequestOptions(request_id, priority, timeout, adapter=adapter), why), self._events, ids)
        return ids

    @locked
    def _add(self, ask: Ask, inbox: deque[StreamEvent], request_ids: list[int], index: int | None = None) -> None:
        """Queue a prompt and append its request ids to ``request_ids``. ``index``: of the first output; None: the ids."""
        self._check_open()
        made = make_requests(ask, self._next_id, index, inbox, tokenizer=self.tokenizer, eos_token_ids=self._eos,
                             limits=self.limits, random=self._random)
        self._admission.check(ask.options, len(made), len(self.scheduler.waiting) - len(self.scheduler.free_slots))
        why = adapters.choose(made, ask.options.adapter, self.model, self.runner.adapters)
        if why and self._live.places is not None:  # there may be one for a new adapter
            self._follow(everything=True)
            why = adapters.choose(made, ask.options.adapter, self.model, self.runner.adapters)
        if why:
            self._begin_again(why, own_adapters=True)
        self._check_due |= not self.requests or self._live.switched()
        self._next_id += len(made)
        for request in made:
            self.requests[request.request_id] = request
            self.scheduler.add(request)
            request_ids.append(request.request_id)
        self._admission.added(made, ask.options)

    @property
    def limits(self) -> Limits:
        """What a request may have."""
        if not (self.requests or self._closed) and loading.vocab_size(self.model) != self.runner.vocab_size:
            with self.lock.hold():  # resize_token_embeddings: before a request is measured by the old size
                self._begin_again(self._live.change() or "its vocabulary has another size")
        return Limits(self.runner.vocab_size, self.runner.paged.num_logits, self.max_model_len, self.config.max_logprobs)

    def abort(self, request_id: int | str) -> None:
        """End a request, given by number or name, after the step in progress if there is one; its output so far stays, with
        finish_reason "abort". Unknown and finished ids are ignored. Raises TypeError for anything but one id."""
        if not isinstance(request_id, (int, str)):  # here, for the abort may run in another thread's turn
            raise TypeError(f"abort takes the number or the name of a request, got {request_id!r}; abort ids one by one")
        self.lock.when_free(lambda: self._abort(self._admission.ids_of(request_id, self.requests)))

    def _abort(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            if (request := self.requests.get(request_id)) is not None:
                self._finish(request, FinishReason.ABORT)

    @property
    def _eos(self) -> frozenset[int]:
        return loading.eos_token_ids(self.model, self.tokenizer)  # users may set them while the engine is open

    @property
    def has_unfinished(self) -> bool:
        """Whether requests run, or events wait for ``step``."""
        return bool(self.requests or self._events)

    # -- a step -----------------------------------------------------------------------------------------------------

    @locked
    def step(self) -> list[StreamEvent]:
        """Launch the next batch and collect results. Returns the new events of requests from ``add_request``; their ``index``
        is the request's id."""
        self._step()
        return [self._events.popleft() for _ in range(len(self._events))]

    @locked
    def _step(self) -> None:
        if self._closed:
            return
        self.runner.editor.check_outside()
        self._follow(everything=False)
        self._live.refresh(everything=self._check_due)
        if self._launch_failed:  # that step may have replaced newest tokens on the device; from here on the host has them all
            self.collect()
            self._launch_failed = False
        self.counters.tick(bool(self.requests))
        if self.requests:
            self._gc.turn()
        for late, seconds in self._admission.late():
            if (request := self.requests.get(late)) is not None:
                self._finish(request, FinishReason.ERROR, error=(
                    f"timed out after {seconds} seconds with {len(request.output.token_ids)} new tokens"))
        try:
            batch = self.scheduler.schedule()
        except NeedsDrain:
            self.collect()
            batch = self.scheduler.schedule()
        if batch is not None:
            try:
                self._in_flight.append(self.runner.launch(batch))
            except BaseException as error:
                self._launch_failed = True
                self.scheduler.take_back(batch)
                if not isinstance(error, torch.OutOfMemoryError):
                    if isinstance(error, Exception) and (change := self._live.change()) is not None:
                        return self._begin_again(change)  # the error of a trace that no longer fits its model
                    raise
                for row in batch.rows:
                    self._finish(row.request, FinishReason.ERROR, error=(
                        f"out of GPU memory in a step of {batch.num_tokens} tokens: {error}. Lower max_num_batched_tokens or "
                        "gpu_memory_utilization."))
        if self._check_due:  # after the launch, while a GPU is busy, and before anyone sees a result
            if self._follow(everything=True):
                return
            self._check_due = False
        self.collect(self._depth if batch is not None else 0)

    def _follow(self, everything: bool) -> bool:
        """Take in how the model has changed: traced again or, where adapters were merged, served as it is. ``everything``: see
        ``LiveModel.change``. Returns whether it has, and launched steps were dropped."""
        change = self._live.change(everything)
        if change is None and not self._live.take_adapters():
            return False
        self._begin_again(change)
        return True

    def _begin_again(self, change: str | None, own_adapters: bool = False) -> None:
        """Drop the launched steps; running requests are recomputed from the host's tokens. ``change``: trace the changed model
        first. Raises RuntimeError if that cannot be served any more; the next step tries again."""
        self.runner.editor.check_outside()
        for launched in self._in_flight:
            launched.tokens()  # wait: its pages go to others
        self._in_flight.clear()
        self._results.clear()
        self.scheduler.preempt_all()
        self._launch_failed, before = False, self._live.active
        if change is not None:
            self._live.trace_again(change, own_adapters)
            self.max_model_len = self._live.fit(self.scheduler)
        for request, error in adapters.after_change(self.requests.values(), self.model, self.runner.adapters, before):
            self._finish(request, FinishReason.ERROR, error=error)
        for request, error in fit_again(self.requests.values(), self.tokenizer, self.limits):
            self._finish(request, FinishReason.ERROR, error=error)

    def collect(self, leave: int = 0) -> None:
        """Wait for the launched steps but the last ``leave``, and take in their tokens."""
        while self._results or len(self._in_flight) > leave:
            if not self._results:
                step = self._in_flight[0]
                results = step.results()
                self._in_flight.popleft()
                self._results.extend(results)
            while self._results:  # if interrupted, the next call continues here
                row, token, logprobs = self._results.popleft()
                if row.samples:
                    row.request.num_pending -= 1
                if logprobs is not None and not row.request.finished:
                    logprobs.give(row.request, token)
                if row.samples and not row.request.finished:
                    self._take(row.request, token)

    def _take(self, request: Request, token: int) -> None:
        """Append a new token to a request, decode it, and end the request if it is the last."""
        if token < 0:
            return self._finish(request, FinishReason.ERROR, error=request.failure or (
                f"the logits for token {len(request.token_ids)} contain NaN, or are all -inf; the model overflowed"
                f"{'' if self.config.kv_scales is None else ', or keys or values do not fit kv_scales: give larger ones'}"
                f"{', or its sampling parameters leave no token' if request.edits or request.params.min_tokens else ''}"))
        output, params, text = request.output, request.params, request.detokenizer
        ends, full = request.append(token)
        piece = ""
        if text is not None and (params.include_stop_str_in_output or not ends):
            piece = text.add([token], may_stop=len(output.token_ids) > params.min_tokens)
            if text.error is not None:
                return self._finish(request, FinishReason.ERROR, [token], error=text.error)
            output.text, output.stop_reason = text.text, text.stopped_by
            if text.stopped_by is not None:
                return self._finish(request, FinishReason.STOP, [token], piece)
        if ends:
            output.stop_reason = token if params.ignore_eos or token not in self._eos else None
            return self._finish(request, FinishReason.STOP, [token], piece)
        if full:
            return self._finish(request, FinishReason.LENGTH, [token], piece)
        request.inbox.append(StreamEvent(output.index, [token], piece, False, output))

    def _finish(self, request: Request, reason: FinishReason, tokens: list[int] | None = None, text: str = "", *,
                error: str | None = None) -> None:
        self.scheduler.finish(request)
        if self.requests.pop(request.request_id, None) is not None:
            self.counters.ended(request.output, bool(self.requests))
        self._admission.ended(request)
        output, detokenizer = request.output, request.detokenizer
        if detokenizer is not None:
            text += detokenizer.flush(reason is FinishReason.LENGTH and len(output.token_ids) > request.params.min_tokens)
            output.text = detokenizer.text
            if reason is FinishReason.LENGTH and detokenizer.stopped_by is not None:
                reason, output.stop_reason = FinishReason.STOP, detokenizer.stopped_by
            if detokenizer.error is not None:
                reason, error = FinishReason.ERROR, detokenizer.error
        output.finish_reason, output.error = reason.value, error
        request.inbox.append(StreamEvent(output.index, tokens or [], text, True, output))
        if not self.requests:
            self._gc.release()

    @locked
    def close(self) -> None:
        """Abort all requests, free cache and graphs, and restore the model. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._abort(list(self.requests))
            self.collect()
            self.destroy_weights_update_group()
            self._live.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
