"""transformers' continuous batching on an engine: the manager behind ``model.generate_batch`` and ``init_continuous_batching``.

``Manager`` has the methods of transformers' ``ContinuousBatchingManager`` and gives its ``GenerationOutput``s, so that
transformers' own ``generate_batch`` and ``continuous_batching_context_manager``, and what calls them, run on it unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import operator
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from quire.graph_runner.engine import Engine
from quire.graph_runner.hf_generation_config import for_requests
from quire.graph_runner.request import Ask, StreamEvent
from quire.graph_runner.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_QUEUE_SECONDS = 10  # how long a full queue makes ``add_request`` wait, as in transformers
_PER_REQUEST = ("temperature", "top_k", "top_p", "min_p")

# Fields of transformers' ContinuousBatchingConfig, and the option of quire.Engine that each sets.
_OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "page_size": lambda v: {"page_size": v},
    "block_size": lambda v: {"page_size": v},  # its name in transformers 5.17, deprecated later
    "num_blocks": lambda v: {"num_pages": v + 1},  # quire counts the null page
    "max_batch_tokens": lambda v: {"max_num_batched_tokens": v},
    "max_requests_per_batch": lambda v: {"max_num_seqs": v},
    "max_memory_percent": lambda v: {"gpu_memory_utilization": v},
    "allow_block_sharing": lambda v: {"enable_prefix_caching": v},
    "use_async_batching": lambda v: {"async_stepping": v},
    "use_cuda_graph": lambda v: _graphs(*(v if isinstance(v, tuple) else (v, v))),
}
_READ = frozenset(("return_logprobs", "seed", "max_queue_size", "per_request_processors"))  # by the manager
# About something that quire does not do: it moves no pages to the host, chooses its kernel by ``attention=``, refuses
# processors instead of dropping them, and runs in one process. Setting one is logged.
_NO_EFFECT = frozenset(("drop_unsupported_processors", "auto_switch_to_flash", "cpu_offload_space_safety_threshold",
                        "disable_nccl_graph_mixing", "cpu_group_timeout", "max_blocks_per_request", "max_cached_graphs",
                        "use_default_compile_configs"))


def _graphs(varlen: bool | None, decode: bool | None) -> dict[str, Any]:
    return ({"cudagraph_token_sizes": []} if varlen is False else {}) | (
        {"cudagraph_capture_sizes": []} if decode is False else {})


def engine_options(config: Any, num_pages: int | None = None, workload_hints: Any = None) -> dict[str, Any]:
    """The engine's options that a ``ContinuousBatchingConfig`` asks for: those that differ from its defaults. ``num_pages``:
    that ``quire.paged`` was given. ``workload_hints``: by which transformers sizes its cache. Raises ValueError for a field
    that quire does not have."""
    if workload_hints is not None:
        logger.info("workload_hints has no effect in quire, which takes its sizes from the continuous_batching_config")
    found: dict[str, Any] = {}
    refused = []
    for field in fields(config):
        value = getattr(config, field.name)
        if value == field.default or field.name in _READ:
            continue
        if field.name in _OPTIONS:
            found |= _OPTIONS[field.name](value)
            if "gpu_memory_utilization" in found and num_pages is not None:
                logger.warning("continuous_batching_config: %s=%r has no effect in quire, where num_pages is set", field.name,
                               value)
        elif field.name in _NO_EFFECT:
            logger.warning("continuous_batching_config: %s=%r has no effect in quire", field.name, value)
        else:
            refused.append(f"{field.name}={value!r}")
    if refused:
        raise ValueError(f"continuous_batching_config: quire has no {', '.join(refused)}; leave them at their defaults. "
                         f"It has {', '.join(sorted([*_OPTIONS, *_READ]))}")
    return found


class Manager:
    """Requests of one generation config on an engine, run by a thread between ``start`` and ``stop``. Threads may share it.
    ``engine`` returns the engine, and is called when the first request comes. ``generation_config``: for all requests;
    ``max_new_tokens=None`` is no limit but the engine's, an ``eos_token_id`` of None or -1 is none. ``config``: a
    ContinuousBatchingConfig. Raises ValueError for an option that quire does not have."""

    def __init__(self, engine: Callable[[], Engine], generation_config: Any, config: Any) -> None:
        self._get_engine, self._config = engine, config
        self.generation_config = generation_config
        self.num_return_sequences = generation_config.num_return_sequences or 1
        self._params = self._sampling_params()
        self.warmed_up = False
        self._thread: threading.Thread | None = None
        self._inbox: deque[StreamEvent] = deque()
        self._outputs: dict[int, tuple[Any, bool]] = {}  # of unfinished requests: output, streaming; by the engine's id
        self._handlers: dict[str, tuple[Callable[[Any], None], asyncio.AbstractEventLoop]] = {}
        self._results: deque[Any] = deque()
        self._changed = threading.Condition(threading.RLock())  # for all the above
        self._stop, self._hard, self._pauses, self._paused = False, False, 0, False
        self._named, self._added = 0, 0  # ids that were made up, and requests

    def _sampling_params(self) -> SamplingParams:
        config = copy.copy(self.generation_config)
        if config.do_sample and config.top_k is None:
            config.top_k = 0  # generate's 50 is not continuous batching's
        unlimited = config.max_new_tokens is None
        if unlimited and config.max_length is not None:
            logger.warning("max_length=%s has no effect in continuous batching, as in transformers; set max_new_tokens",
                           config.max_length)
        config.max_new_tokens = sys.maxsize if unlimited else config.max_new_tokens  # no less than the minimum
        config.min_length = None  # which counts the prompt's tokens
        params, refused = for_requests(config, 0)
        if params.stop:
            refused.append("stop_strings")
        if refused:
            raise ValueError(f"quire does not have {', '.join(refused)} in continuous batching; model.generate does")
        own = self._config
        params = replace(params, ignore_eos=True, detokenize=False, max_tokens=None if unlimited else params.max_tokens)
        if own.return_logprobs:
            params = replace(params, logprobs=0, logprobs_mode="processed_logprobs")
        if own.seed is not None:
            return replace(params, seed=own.seed)
        return params if params.greedy else replace(params, seed=int(torch.randint(2**62, ()).item()))  # by torch.manual_seed

    # -- running ----------------------------------------------------------------------------------------------------

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def warmup(self) -> None:
        """Make the engine, which captures its graphs."""
        self._get_engine()
        self.warmed_up = True

    def start(self) -> None:
        if self.is_running():
            logger.warning("the manager is running already")
            return
        self._stop = self._hard = False
        self._thread = threading.Thread(target=self._run, name="quire-continuous-batching", daemon=True)
        self._thread.start()

    def stop(self, block: bool = True, timeout: float | None = None, keep_for_next_session: bool = False,
             hard_stop: bool = False) -> None:
        """Finish the requests and end the thread. ``hard_stop``: abort them. ``keep_for_next_session``: the engine stays in any
        case. Raises RuntimeError inside ``pause``."""
        if self._pauses:
            raise RuntimeError("cannot stop the manager inside a pause: leave the pause first")
        with self._changed:
            self._stop, self._hard = True, hard_stop
            self._changed.notify_all()
        if block:
            self.join(time.perf_counter(), timeout)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                logger.warning("the manager's thread still runs after %s seconds", timeout)
            else:
                self._thread = None

    def destroy(self) -> None:
        if self.is_running():
            self.stop()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """While inside, no step of the manager runs: the model may be updated. Requests stay where they are."""
        if not self.is_running():
            raise RuntimeError("cannot pause: the manager does not run; call start() first")
        with self._changed:
            self._pauses += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._paused or not self.is_running())
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._may_go)
                    if self._hard:
                        self._fail("the manager was stopped")
                    if not self._outputs:
                        return
                if not self._inbox:
                    self._get_engine()._step()
                self._deliver()
        except BaseException as error:  # a model that cannot be served any more: no request may wait for ever
            logger.exception("continuous batching failed")
            with self._changed:
                self._fail(str(error))

    def _may_go(self) -> bool:
        """Whether the thread has something to do; lets a pause begin if one waits."""
        if self._paused != (self._pauses > 0):
            self._paused = not self._paused
            self._changed.notify_all()
        return not self._paused and bool(self._outputs or self._stop)

    def _fail(self, message: str) -> None:
        for number, (output, _) in list(self._outputs.items()):
            self._get_engine().abort(number)
            self._end(number, output, message)

    # -- requests ---------------------------------------------------------------------------------------------------

    def add_request(self, input_ids: Sequence[int], request_id: str | None = None, max_new_tokens: int | None = None,
                    streaming: bool = False, record_timestamps: bool = False, eos_token_id: int | list[int] | None = None,
                    **logit_processor_kwargs: Any) -> str | None:
        """Queue a request; returns its id, or None after ``stop``. A prompt that cannot be served gives a failed output. Raises
        ValueError for an id in use, or parameters that quire does not have; queue.Full if ``max_queue_size`` requests wait."""
        from transformers.generation.continuous_batching.requests import GenerationOutput

        params = self._of_request(max_new_tokens, eos_token_id, logit_processor_kwargs)
        if isinstance(input_ids, str):
            raise TypeError(f"add_request and generate_batch take token ids, got the text {input_ids[:40]!r}; tokenize it")
        engine, prompt = self._get_engine(), [int(token) for token in input_ids]
        config = self.generation_config
        if config.min_length and config.min_new_tokens is None:
            most = engine.max_model_len if params.max_tokens is None else params.max_tokens
            params = replace(params, min_tokens=min(max(config.min_length - len(prompt), 0), most))
        with self._changed:
            limit = self._config.max_queue_size
            waiting = engine.scheduler.waiting
            if limit and not self._changed.wait_for(lambda: self._stop or len(waiting) < limit, _QUEUE_SECONDS):
                raise queue.Full(f"{limit} requests wait already (max_queue_size)")
            if self._stop:  # nothing would run it
                logger.warning("the manager was stopped and takes no requests until start(): one of %d tokens is dropped",
                               len(prompt))
                return None
            if request_id is None:
                request_id, self._named = f"req_{self._named}", self._named + 1
            if any(output.request_id == request_id for output, _ in self._outputs.values()):
                raise ValueError(f"request_id {request_id!r} is in use")
            self._added += 1
            if params.seed is not None:
                params = replace(params, seed=(params.seed + self._added * 1_000_003) % 2**62)
            names = [request_id, *(f"{request_id}__child#{i}" for i in range(params.n - 1))]
            made = [GenerationOutput(name, prompt, timestamps=[] if record_timestamps else None) for name in names]
            numbers: list[int] = []
            try:
                engine._add(Ask(prompt, params), self._inbox, numbers)
            except (ValueError, TypeError) as error:
                logger.warning("request %s failed: %s", request_id, error)
                for output in made:
                    self._end(-1, output, str(error))
                return request_id
            self._outputs |= {number: (output, streaming) for number, output in zip(numbers, made, strict=True)}
            self._changed.notify_all()
        return request_id

    def add_requests(self, inputs: Sequence[Sequence[int]], max_new_tokens: int | None = None, streaming: bool = False,
                     record_timestamps: bool = False, **logit_processor_kwargs: Any) -> list[str | None]:
        """Queue several; returns their ids. See ``add_request``."""
        with self._changed:
            return [self.add_request(ids, None, max_new_tokens, streaming, record_timestamps, **logit_processor_kwargs)
                    for ids in inputs]

    def _of_request(self, max_new_tokens: int | None, eos_token_id: Any, own: dict[str, Any]) -> SamplingParams:
        params = self._params
        if own:
            if unknown := sorted(own.keys() - set(_PER_REQUEST)):
                raise ValueError(f"quire does not have {', '.join(unknown)} for a request; it has {', '.join(_PER_REQUEST)}")
            if not self._config.per_request_processors:
                raise ValueError(f"{', '.join(sorted(own))} for a request needs per_request_processors=True in the "
                                 "ContinuousBatchingConfig")
            if params.greedy:
                raise ValueError(f"{', '.join(sorted(own))} has no effect without do_sample=True in the generation config")
            params = replace(params, **own)
        if max_new_tokens is not None:
            params = replace(params, max_tokens=max_new_tokens, min_tokens=min(params.min_tokens, max_new_tokens))
        if eos_token_id is not None:
            try:
                ids = [operator.index(i) for i in (eos_token_id if isinstance(eos_token_id, Iterable) else [eos_token_id])]
            except TypeError:
                raise TypeError(f"eos_token_id is a token id, or a list of such, got {eos_token_id!r}") from None
            params = replace(params, stop_token_ids=[i for i in ids if i >= 0])
        return params

    def cancel_request(self, request_id: str) -> None:
        """Abort a request and those made of it (``num_return_sequences``); its output has the status FAILED."""
        with self._changed:
            for number, (output, _) in list(self._outputs.items()):
                if output.request_id.split("__child#")[0] == request_id or output.request_id == request_id:
                    self._get_engine().abort(number)
            self._changed.notify_all()

    # -- results ----------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        from transformers.generation.continuous_batching.requests import RequestStatus

        now = time.perf_counter()
        with self._changed:
            while self._inbox:
                event = self._inbox.popleft()
                known = self._outputs.get(event.index)
                if known is None:
                    continue
                output, streaming = known
                result = event.output
                if output.status == RequestStatus.PENDING:
                    output.status, output.lifespan = RequestStatus.DECODING, (now, -1)
                output.generated_tokens += result.token_ids[len(output.generated_tokens) :]  # what is new: an event is a token
                if result.logprobs is not None:
                    output.logprobs += [next(iter(of.values())).logprob for of in result.logprobs[len(output.logprobs) :]]
                if output.timestamps is not None:
                    output.timestamps += [now] * (len(result.token_ids) - len(output.timestamps))
                if event.finished:
                    cancelled = "the request was cancelled" if result.finish_reason == "abort" else None
                    self._end(event.index, output, result.error or cancelled)
                elif streaming:
                    self._put(replace(  # with lists that do not grow
                        output, generated_tokens=list(output.generated_tokens), logprobs=list(output.logprobs),
                        timestamps=None if output.timestamps is None else list(output.timestamps)))
            self._changed.notify_all()

    def _end(self, number: int, output: Any, error: str | None) -> None:
        from transformers.generation.continuous_batching.requests import RequestStatus

        self._outputs.pop(number, None)
        output.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        output.error, output.lifespan = error, (output.lifespan[0], time.perf_counter())
        self._put(output)

    def _put(self, output: Any) -> None:
        handler = self._handlers.get(output.request_id)
        if handler is None:
            self._results.append(output)
            self._changed.notify_all()
            return
        if output.is_finished():
            del self._handlers[output.request_id]
        handler[1].call_soon_threadsafe(handler[0], output)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Any:
        """The next result, of that request if an id is given; None after ``timeout`` seconds, or if none can come any more."""
        def found() -> Any:
            return next((o for o in self._results if request_id is None or o.request_id == request_id), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or not self.is_running(), timeout)
            result = found()
            if result is not None:
                self._results = deque(o for o in self._results if o is not result)
            return result

    def __iter__(self) -> Iterator[Any]:
        return self.request_id_iter(None)

    def request_id_iter(self, request_id: str | None) -> Iterator[Any]:
        """The results of a request, the finished one last; None: of all."""
        while (result := self.get_result(request_id, timeout=0.1)) is not None or self.is_running():
            if result is not None:
                yield result
                if request_id is not None and result.is_finished():
                    return

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` in the running event loop with each result of a request, instead of queueing it."""
        with self._changed:
            self._handlers[request_id] = callback, asyncio.get_running_loop()
