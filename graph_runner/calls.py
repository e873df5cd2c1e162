"""What users call to run prompts on an engine: ``generate``, ``stream``, ``astream``, ``score``.

Each queues requests, runs engine steps until they end, and gives out events or outputs. Calls of several threads share steps: a
step delivers the tokens of all requests, each to the call that waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from quire.graph_runner.admission import QueueFull
from quire.graph_runner.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from quire.graph_runner.engine_lock import EngineLock, locked
from quire.graph_runner.hf_generation_config import for_engine, is_generation_config
from quire.graph_runner.lockstep import held_here
from quire.graph_runner.prompts import (
    Prompt,
    appended_to_texts,
    as_prompts,
    chat_prompt,
    each_of,
    pairs_of,
    params_of,
    token_ids_of,
)
from quire.graph_runner.request import Ask, Limits, RequestOptions, RequestOutput, StreamEvent
from quire.graph_runner.sampling_params import SamplingParams
from quire.graph_runner.scheduler import Scheduler
from quire.graph_runner.stats import EngineStats, stats_of

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from quire.graph_runner.engine import Engine

    _Params = SamplingParams | GenerationConfig | Sequence[SamplingParams | GenerationConfig] | None

logger = logging.getLogger(__name__)
#: Seconds after which ``generate`` shows a progress bar on a terminal.
BAR_AFTER = 2.0
_ADDED_AT_ONCE = 64  # prompts under one hold of the lock: each hold sets a signal handler, and other threads wait meanwhile
_SCORING = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True, logprobs=0)


@dataclass(frozen=True)
class Score:
    """Log probabilities of a continuation's tokens, given the prompt and the tokens before: log_softmax of the logits at each
    of ``token_ids``, and its rank, 1 where the token is the likeliest."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]

    @property
    def total(self) -> float:
        """Log probability of the whole continuation."""
        return sum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one."""
        return all(rank == 1 for rank in self.ranks)


class EngineCalls:
    """The calls of ``Engine``, which has the steps."""

    tokenizer: Any
    lock: EngineLock
    scheduler: Scheduler
    runner: Any

    _add: Callable[..., None]
    _step: Callable[[], None]
    _abort: Callable[[list[int]], None]
    collect: Callable[[], None]
    _check_due: bool

    @property
    def limits(self) -> Limits:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an engine cannot be copied or pickled: it holds the caches and graphs of its model. Copy the model, "
                        "and make another engine of it")

    @locked
    def stats(self) -> EngineStats:
        """Requests, pages, prefix cache, tokens and memory, now and since the engine was made; none of a closed engine."""
        return stats_of(self)

    @locked
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Forget the pages of the prefix cache, and copy the weights again that the engine has copies of (``dtype``,
        ``max_loras``). Needed only after a change of weights that PyTorch does not count, such as ``p.data.copy_``; an engine
        without requests copies them by itself. ``reset_running_requests``: requests that run are computed again from their
        tokens so far, as after a change of weights in place, of which they would keep the keys and values from before."""
        self.runner.editor.check_outside()
        self.scheduler.forget_prefixes()
        if reset_running_requests:
            self.collect()
            self.scheduler.preempt_all()
        self._check_due = True

    def stream(self, prompts: Prompt | Sequence[Prompt], params: _Params = None, *, sampling_params: _Params = None,
               request_id: str | Sequence[str] | None = None, priority: int | Sequence[int] = 0, timeout: float | None = None,
               adapter: str | Sequence[str | None] | None = None, raise_on_error: bool | None = None
               ) -> Generator[StreamEvent, None, None]:
        """Run the prompts together and yield tokens as they come. ``event.index`` is the prompt's position; with n > 1 that of
        the continuation, of which a prompt has n in a row. A prompt that is refused has one event, with the first of its n.

        Args:
            prompts: a prompt or several: text, token ids, a chat (a list of messages), vLLM's dicts, or what a tokenizer
                returns for several texts, padding included.
            params: one SamplingParams for all prompts, or one for each; or transformers' ``GenerationConfig``, completed from
                the model's own as ``model.generate`` does. ``sampling_params`` is another name for it, vLLM's.
            request_id: names of the requests, for ``abort``; one for each prompt.
            priority: prompts with a lower number start first; one for all or one for each.
            timeout: seconds after which a request that has not ended fails.
            adapter: the LoRA adapter of PEFT that a request has, by name, "__base__" for none; one for all or one for each.
                None: those that are active in the model. The first one has the model traced again.
            raise_on_error: raise if a request fails, and abort the others. False: log a warning; the output of the failed
                request has ``error``, and the others run on. None: raise for a single prompt only.

        Raises:
            ValueError, TypeError: a prompt that cannot be served. RuntimeError: a request that failed on its way.
            QueueFull: more requests would wait than ``max_waiting``.
            KeyboardInterrupt, SystemExit: as a request's own logits processor raised it; other calls go on.
        """
        asks = self._asks(prompts, params, sampling_params, request_id, priority, timeout, adapter)
        return self._stream(asks, raise_on_error)

    def _asks(self, prompts: Prompt | Sequence[Prompt], params: _Params, sampling_params: _Params,
              request_id: str | Sequence[str] | None, priority: int | Sequence[int], timeout: float | None,
              adapter: str | Sequence[str | None] | None) -> list[Ask]:
        """The prompts of a call with their options. Raises TypeError or ValueError for options that do not fit the prompts."""
        if params is not None and sampling_params is not None:
            raise TypeError("params and sampling_params are two names of one argument; give one of them")
        given: Any = params if sampling_params is None else sampling_params
        refused: list[Exception | None] | None = None
        if any(map(is_generation_config, given if isinstance(given, (list, tuple)) else [given])):
            batch = as_prompts(prompts)
            each = each_of("SamplingParams", given, len(batch))
            read = [self._params_of(prompt, one) for prompt, one in zip(batch, each, strict=True)]
            given, refused = [p for p, _ in read], [why for _, why in read]
        pairs = pairs_of(prompts, given)
        if isinstance(request_id, str) and len(pairs) > 1:
            raise ValueError(f"{len(pairs)} prompts but one request_id; give one for each")
        options = (each_of(what, one, len(pairs)) for what, one in (
            ("request_ids", request_id), ("priorities", priority), ("adapters", adapter), ("refusals", refused)))
        return [Ask(prompt, p, RequestOptions(name, number, timeout, adapter=own).check(), why)
                for (prompt, p), name, number, own, why in zip(pairs, *options, strict=True)]

    def _params_of(self, prompt: Prompt, given: Any) -> tuple[SamplingParams, Exception | None]:
        """What was given as the params of a prompt, and None or why the prompt cannot be served with them. Raises ValueError
        for what requests do not have, else TypeError."""
        if not is_generation_config(given):
            return params_of(given), None
        limits = self.limits
        return for_engine(given, getattr(cast("Engine", self).model, "generation_config", None), lambda: len(
            token_ids_of(prompt, self.tokenizer, limits.vocab_size, limits.max_model_len)))

    def _stream(self, asks: Sequence[Ask], raise_on_error: bool | None) -> Generator[StreamEvent, None, None]:
        strict = len(asks) == 1 if raise_on_error is None else raise_on_error
        inbox: deque[StreamEvent] = deque()
        ids: list[int] = []
        count = 0  # of outputs
        try:
            for at in range(0, len(asks), _ADDED_AT_ONCE):
                refused: list[RequestOutput] = []
                with self.lock.hold():
                    for ask in asks[at : at + _ADDED_AT_ONCE]:
                        try:
                            self._add(ask, inbox, ids, count)
                        except (ValueError, TypeError, QueueFull) as error:
                            if strict:
                                raise
                            logger.warning("request %d failed: %s", count, error)
                            refused.append(RequestOutput.refused(count, ask, error))
                        count += ask.params.n
                for output in refused:
                    yield StreamEvent(output.index, [], "", True, output)
            left = len(ids)
            while left:
                while not inbox:
                    before = self.scheduler.num_steps
                    self._step()
                    if not inbox and not self.scheduler.running and self.scheduler.num_steps == before and held_here(self):
                        raise RuntimeError("a processor or criterion of generate() runs requests on the same engine, and its "
                                           "own call holds the slots or pages that they need. Give it an engine of its own, "
                                           "or raise max_num_seqs and num_pages")
                event = inbox.popleft()
                left -= event.finished
                if event.output.raised is not None:
                    raise event.output.raised
                if event.output.error is not None:
                    message = f"request {event.index} failed: {event.output.error}"
                    if strict:
                        raise RuntimeError(message)
                    logger.warning(message)
                yield event
        finally:  # the caller may have stopped reading
            self.lock.when_free(lambda: self._abort(ids))

    def _run(self, asks: Sequence[Ask], raise_on_error: bool | None, use_tqdm: bool | Callable[..., Any] | None
             ) -> dict[int, RequestOutput]:
        """The outputs by their index."""
        done: dict[int, RequestOutput] = {}
        with progress(sum(ask.params.n for ask in asks), use_tqdm) as advance:
            for event in self._stream(asks, raise_on_error):
                if event.finished:
                    done[event.index] = event.output
                    advance()
        return done

    def generate(self, prompts: Prompt | Sequence[Prompt], params: _Params = None, *, sampling_params: _Params = None,
                 use_tqdm: bool | Callable[..., Any] | None = None, request_id: str | Sequence[str] | None = None,
                 priority: int | Sequence[int] = 0, timeout: float | None = None,
                 adapter: str | Sequence[str | None] | None = None, lora_request: None = None,
                 raise_on_error: bool | None = None) -> list[RequestOutput]:
        """Run the prompts together; a result for each, in their order. With n > 1 its ``outputs`` are the n continuations. See
        ``stream`` for the other arguments.

        Args:
            use_tqdm: show a progress bar; None: on a terminal, where it takes longer than two seconds. Or a function that
                makes one, such as ``tqdm``.
            lora_request: None, as code written for vLLM may say; for anything else ``adapter`` is there. Raises TypeError.
        """
        _check_lora_request(lora_request)
        asks = self._asks(prompts, params, sampling_params, request_id, priority, timeout, adapter)
        done = self._run(asks, raise_on_error, use_tqdm)
        found, at = [], 0
        for index, ask in enumerate(asks):
            found.append(RequestOutput.of_prompt(index, [done[i] for i in range(at, at + ask.params.n) if i in done]))
            at += ask.params.n
        return found

    def get_tokenizer(self) -> Any:
        """The tokenizer, or None: vLLM's name for ``tokenizer``."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config says about sampling, as vLLM's method of this name reads it. ``generate`` without
        parameters takes ``SamplingParams()``."""
        config = getattr(cast("Engine", self).model, "generation_config", None)
        same = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {**{name: getattr(config, name, None) for name in same}, "max_tokens": getattr(config, "max_new_tokens", None)}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def chat(self, messages: Prompt | Sequence[Prompt], params: _Params = None, *, chat_template: str | None = None,
             add_generation_prompt: bool = True, continue_final_message: bool = False,
             tools: list[dict[str, Any]] | None = None, chat_template_kwargs: dict[str, Any] | None = None, **options: Any
             ) -> list[RequestOutput]:
        """``generate`` for chats, with vLLM's names: a list of messages, or several. An output's prompt is the chat's text.
        ``chat_template``, ``add_generation_prompt``, ``continue_final_message`` and ``tools`` are those of the tokenizer's
        ``apply_chat_template``, which also gets ``chat_template_kwargs``. ``options``: those of ``generate``."""
        asked = {"chat_template": chat_template, "tools": tools, **(chat_template_kwargs or {})}
        prompts = [chat_prompt(chat, self.tokenizer, add_generation_prompt=add_generation_prompt,
                               continue_final_message=continue_final_message,
                               **{k: v for k, v in asked.items() if v is not None}) for chat in as_prompts(messages)]
        return self.generate(prompts, params, **options)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, lora_request: None = None,
                    use_tqdm: bool = False, concurrency_limit: int | None = None) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, by vLLM's search (``beam_search.py``). Beams share the prompt's pages.

        Args:
            prompts: as for ``stream``.
            lora_request: None; the beams have the adapters that are active in the model.
            concurrency_limit: prompts that are searched together at most; None: as many as fit.

        Raises:
            ValueError, TypeError: a prompt or a number of beams that cannot be served; nothing has run then.
        """
        _check_lora_request(lora_request, "set_adapter(name) of the model, for beams have its active adapters")
        with progress(len(as_prompts(prompts)), use_tqdm) as advance:
            return beam_search(cast("Engine", self), prompts, params, concurrency_limit=concurrency_limit, done=advance)

    async def astream(self, prompts: Prompt | Sequence[Prompt], params: _Params = None, **options: Any
                      ) -> AsyncIterator[StreamEvent]:
        """``stream`` for asyncio: steps run in a thread, so that the event loop goes on. Options as of ``stream``. Requests of
        a stream that is cancelled or closed are aborted."""
        events = self.stream(prompts, params, **options)
        loop = asyncio.get_running_loop()
        running: asyncio.Future[StreamEvent | None] | None = None
        try:
            while True:
                running = loop.run_in_executor(None, functools.partial(next, events, None))
                event = await asyncio.shield(running)
                if event is None:
                    return
                yield event
        finally:
            if running is not None and not running.done():  # a generator cannot be closed while it runs
                running.add_done_callback(functools.partial(_close_after, events))
            else:
                events.close()

    def score(self, prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt], *,
              adapter: str | Sequence[str | None] | None = None, use_tqdm: bool | Callable[..., Any] | None = None
              ) -> list[Score]:
        """Log probabilities of given continuations, one for each prompt; nothing is generated.

        The LM head runs on the continuations' tokens only. Prompts that begin equally are computed once. The last token of a
        continuation is not computed, so that prompt and continuation may have one token more than ``max_model_len``.

        Args:
            prompts: as for ``generate``.
            continuations: one for each prompt, as text or token ids. Of text after text, the tokens that prompt and
                continuation have together behind the last one that the prompt alone begins with too; without what the
                tokenizer appends to every text.
            adapter: as for ``stream``.

        Raises:
            ValueError, TypeError: a prompt or continuation that cannot be served, or different numbers of them.
        """
        first, second = as_prompts(prompts), as_prompts(continuations)
        if len(first) != len(second):
            raise ValueError(f"{len(first)} prompts but {len(second)} continuations; give one for each")
        asks = []
        for prompt, continuation, own in zip(first, second, each_of("adapters", adapter, len(first)), strict=True):
            before, ids = self._joined(prompt, continuation)
            if len(ids) > self.limits.max_model_len + 1:
                raise ValueError(f"prompt and continuation have {len(ids)} tokens, and {self.limits.max_model_len + 1} can be "
                                 "scored: one more than max_model_len, or than what the model or the KV cache holds")
            params = replace(_SCORING, trace_decode_token_ids=ids[-1:])  # with the log probability that it has
            asks.append(Ask(ids[:-1], params, RequestOptions(score_from=before, adapter=own).check()))
        outputs = self._run(asks, True, use_tqdm)
        return [_score(outputs[i], ask.options.score_from or 0) for i, ask in enumerate(asks)]

    def _joined(self, prompt: Prompt, continuation: Prompt) -> tuple[int, list[int]]:
        """The number of tokens of the prompt, and the tokens of both."""
        ids = functools.partial(token_ids_of, tokenizer=self.tokenizer, vocab_size=self.limits.vocab_size,
                                max_model_len=sys.maxsize)
        before = ids(prompt)
        if not isinstance(continuation, str):
            if not len(continuation):
                raise ValueError("the continuation is empty; give at least one token")
            return len(before), ids([*before, *ids(continuation)])
        if not isinstance(prompt, str):
            raise TypeError("a continuation is text only after a prompt that is text; give the token ids of both")
        both = ids(prompt + continuation)
        appended = appended_to_texts(self.tokenizer, both)
        if appended and before[-len(appended):] == appended:
            before, both = before[: -len(appended)], both[: -len(appended)]
        same = next((i for i, (a, b) in enumerate(zip(before, both, strict=False)) if a != b), min(len(before), len(both)))
        if len(both) <= same or (before and not same):
            raise ValueError(f"the continuation {continuation!r} adds no token to the prompt, or changes all of its tokens; "
                             "give token ids")
        return same, both


def _check_lora_request(given: object, choose: str = "adapter=name in this call") -> None:
    """Raises TypeError for a LoRARequest of vLLM; says how an adapter is chosen here."""
    if given is not None:
        raise TypeError(f"lora_request must be None, got {str(given)[:60]!r}: quire runs the adapters that PEFT has in the "
                        f"model. Load it once (load_adapter), and choose it by {choose}")


def _close_after(events: Generator[StreamEvent, None, None], done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()  # nobody reads it any more
    events.close()


def _score(output: RequestOutput, start: int) -> Score:
    found = [*(output.prompt_logprobs or [])[start:], *(output.logprobs or [])]
    ids = [*output.prompt_token_ids[start:], *output.token_ids]
    entries = [entry[token] for token, entry in zip(ids, found, strict=True) if entry is not None]
    return Score(ids, [e.logprob for e in entries], [e.rank for e in entries])


@contextlib.contextmanager
def progress(total: int, use_tqdm: bool | Callable[..., Any] | None) -> Iterator[Callable[[], Any]]:
    """A progress bar over ``total`` requests, as ``use_tqdm`` of ``generate`` says; gives the function that advances it."""
    if callable(use_tqdm):
        with contextlib.closing(use_tqdm(total=total, desc="Generating")) as bar:
            yield lambda: bar.update(1)
        return
    if use_tqdm is False:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console, began = Console(stderr=True), time.monotonic()
    if not (use_tqdm or console.is_terminal):
        yield lambda: None
        return
    shown = Progress(console=console)
    task = shown.add_task("Generating", total=total)

    def advance() -> None:
        shown.advance(task)
        if use_tqdm or time.monotonic() - began > BAR_AFTER:
            shown.start()  # if it is not shown yet

    try:
        yield advance
    finally:
        if shown.live.is_started:
            shown.stop()
