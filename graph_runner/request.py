"""A request as the engine schedules it, its output, and the checks of a prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any, NamedTuple

from quire.graph_runner.detokenizer import Detokenizer
from quire.graph_runner.forward_mode import ForwardMode
from quire.graph_runner.logits_edits import LogitsEdits
from quire.graph_runner.prompts import Prompt, params_of, text_of, token_ids_of
from quire.graph_runner.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended. ``length``: max_tokens or the maximum length; ``stop``: an end token, stop token or stop string."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Logprob(NamedTuple):
    """Log probability of a token at one position, and its rank there: 1 for the likeliest. vLLM's names.

    ``decoded_token``: its text, None where no text is made (no tokenizer, or detokenize=False).
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt, with vLLM's names: ``index`` among the n of its prompt; the rest as in RequestOutput."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None
    error: str | None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The result of a prompt. ``generate`` gives one for each prompt: with n > 1 that of the first of its continuations, which
    are all in ``outputs``. An event of a stream has the result of one continuation.

    Args:
        index: position in the order of the prompts; of a stream, of its continuations (those of a prompt are consecutive).
        prompt: the prompt's text, if it was given as text.
        prompt_token_ids, token_ids: token ids of the prompt and of the continuation (the end token included).
        text: the decoded continuation, cut before a stop string; empty without a tokenizer.
        finish_reason: "stop", "length", "abort", "error", or None while it runs.
        error: the error message of a failed request (of n, the first that failed), or None.
        stop_reason: the stop string or token id that ended it, or None.
        logprobs: for each of ``token_ids`` the log probabilities by token id, the sampled token's first; None if not asked for.
        cumulative_logprob: sum of those of ``token_ids``, or None.
        prompt_logprobs: for each of ``prompt_token_ids`` the log probabilities by token id, its own first; the first entry is
            None. None if not asked for.
        request_id: the name given to the request, or its number.
        raised: what its own code raised to end the caller (KeyboardInterrupt, SystemExit), for the call that waits for it.
    """

    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    request_id: str = ""
    raised: BaseException | None = field(default=None, repr=False, compare=False)
    _completions: list[CompletionOutput] = field(default_factory=list, repr=False, compare=False)

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The n continuations of the prompt, as vLLM has them; in an event, the one that it is about."""
        return self._completions or [self._completion(0)]

    def _completion(self, index: int) -> CompletionOutput:
        return CompletionOutput(index, self.text, self.token_ids, self.cumulative_logprob, self.logprobs, self.finish_reason,
                                self.stop_reason, self.error)

    @classmethod
    def of_prompt(cls, index: int, results: Sequence[RequestOutput]) -> RequestOutput:
        """The result of the prompt with that index, from the results of its continuations: the first of them, changed."""
        first = results[0]
        first.index = index
        if len(results) > 1:
            first._completions = [result._completion(i) for i, result in enumerate(results)]
            first.error = next((result.error for result in results if result.error is not None), None)
        return first

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @classmethod
    def refused(cls, index: int, ask: Ask, error: Exception) -> RequestOutput:
        """The output for a prompt that cannot be served."""
        ids = [i for i in ask.prompt if isinstance(i, int)] if isinstance(ask.prompt, (list, tuple)) else []
        return cls(index, text_of(ask.prompt), ids, finish_reason="error", error=str(error),
                   request_id=str(ask.options.request_id or ""))


@dataclass(slots=True)  # not frozen: one is made per token, and frozen ones take three times as long to make
class StreamEvent:
    """New tokens of one request. ``output`` is the request's result so far, final if ``finished``."""

    index: int
    token_ids: list[int]
    text: str
    finished: bool
    output: RequestOutput


@dataclass(eq=False)
class Request:
    """Scheduling state of one request.

    ``token_ids`` holds the prompt and the continuation as far as the host knows it; ``num_pending`` more tokens were sampled by
    launched steps whose results are not collected yet. ``num_computed`` tokens have their keys and values in the cache, or will
    have when the launched steps are done. ``num_scored``: from which prompt token on log probabilities are still to be
    computed; the prompt's length if none. ``inbox``: where the events of the request go. The scheduler's step ``arrived_at`` is
    the last that was launched before it came. The first ``num_behind`` of ``pages`` are given back (``window_pages.py``), and
    the first ``window_behind`` of ``window_pages``, which are those of layers with a window where other layers have none.
    ``page_keys``, ``num_keyed``, ``num_coming``, ``epoch``, ``computed_since``: see PrefixCache. ``length_kind``: how many of
    the scheduler's ``length_limits`` the request exceeds; all its keys are of that kind. ``edits``: what it asks to be done to
    its logits; ``failure``: why that failed, or None. ``adapters``: their names; None: the model's active ones.
    ``chose_adapters``: it came with them. ``root``: what its keys and values depend on beside its tokens. ``too_early``: tokens
    that cannot come before its ``min_tokens``, beside the ``stop_token_ids``."""

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    output: RequestOutput
    seed: int
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    inbox: deque[StreamEvent] = field(default_factory=deque)
    detokenizer: Detokenizer | None = None
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    num_scored: int = -1
    priority: int = 0
    arrived_at: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_behind: int = 0
    window_pages: list[int] = field(default_factory=list)
    window_behind: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    num_keyed: int = 0
    num_coming: int = 0
    length_kind: int = 0
    epoch: int = 0
    computed_since: int = 0
    preemptions: int = 0
    finished: bool = False
    edits: LogitsEdits | None = None
    failure: str | None = None
    adapters: tuple[str, ...] | None = None
    chose_adapters: bool = False
    root: bytes = b""
    too_early: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        if self.num_scored < 0:
            self.num_scored = len(self.prompt_token_ids)

    def append(self, token: int) -> tuple[bool, bool]:
        """Add a sampled token. Returns whether it ends the request, and whether the maximum length is reached."""
        self.token_ids.append(token)
        self.output.token_ids.append(token)
        ends = token in self.stop_token_ids and len(self.output.token_ids) >= self.params.min_tokens
        return ends, len(self.token_ids) >= self.max_total_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens, the pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed


class ScheduledRow(NamedTuple):
    """One request's part in a step: ``num_new`` tokens from position ``start`` on. ``samples``: the row ends with the request's
    last token, so a new token is sampled from its logits. ``num_scored``: prompt tokens whose log probabilities it computes,
    those before the request's ``num_scored``."""

    request: Request
    start: int
    num_new: int
    samples: bool
    num_scored: int = 0


@dataclass(frozen=True)
class ScheduledBatch:
    """One step's rows: decode rows (one token each) first. ``copies``: (from, to) pages to copy before the step, and of layers
    with a window ``window_copies``, where these have pages of their own."""

    rows: Sequence[ScheduledRow]
    num_tokens: int
    num_decode_rows: int
    num_scored: int = 0
    copies: Sequence[tuple[int, int]] = ()
    window_copies: Sequence[tuple[int, int]] = ()

    @property
    def is_decode(self) -> bool:
        return self.num_decode_rows == len(self.rows)

    @property
    def forward_mode(self) -> ForwardMode:
        return ForwardMode.of(self.num_decode_rows, len(self.rows))


def _detokenizer_of(params: SamplingParams, tokenizer: Any, prompt_token_ids: list[int]) -> Detokenizer | None:
    """The detokenizer of a new request, or None where no text is wanted. Raises ValueError for stop strings without text."""
    if tokenizer is None and params.stop:
        raise ValueError("stop strings need text, and the engine has no tokenizer; pass one, or use stop_token_ids")
    if tokenizer is None or not params.detokenize:
        return None
    return Detokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens, params.stop or (),
                       params.include_stop_str_in_output)


def check_logprobs(params: SamplingParams, limits: Limits) -> None:
    """Raises ValueError for more log probabilities than the engine allows, or tokens that have none."""
    ids = params.logprob_token_ids or ()
    asked = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs, "logprob_token_ids": len(ids)}
    for name, count in asked.items():
        number = limits.num_logits if count == -1 else count
        if number is not None and number > limits.max_logprobs:
            raise ValueError(f"{name} asks for {number} tokens per position, and this engine gives at most "
                             f"{limits.max_logprobs}. Ask for fewer, or make the engine with max_logprobs={number}")
    outside = [token for token in ids if token >= limits.num_logits]
    if outside:
        raise ValueError(f"logprob_token_ids {outside[:5]} have no logits; the model has {limits.num_logits}")


def _check_scored(ids: Sequence[int], limits: Limits) -> None:
    if any(token >= limits.num_logits for token in ids):
        raise ValueError(f"the prompt has tokens of {limits.num_logits} and more, for which the model has no logits, and so no "
                         "log probability")


def outside_vocabulary(request: Request, vocab_size: int) -> str | None:
    """Why a request cannot go on in a model whose vocabulary was changed, or None."""
    found = [token for token in request.token_ids if token >= vocab_size]
    return f"its token ids {found[:5]} are outside the vocabulary, which was changed to {vocab_size} tokens" if found else None


def fit_again(requests: Iterable[Request], tokenizer: Any, limits: Limits) -> list[tuple[Request, str]]:
    """Fit requests, all of which wait, to a model that was changed meanwhile. Returns those that cannot go on, and why."""
    found = []
    for request in requests:
        if (why := outside_vocabulary(request, limits.vocab_size)) is not None:
            found.append((request, why))
            continue
        try:
            check_logprobs(request.params, limits)
            _check_scored(request.prompt_token_ids[request.num_scored :], limits)
            request.edits = LogitsEdits.of(request.params, tokenizer, limits.num_logits)
        except ValueError as error:
            found.append((request, f"the model's vocabulary was changed: {error}"))
    return found


class RequestOptions(NamedTuple):
    """Options of a request other than its prompt and sampling, as of ``Engine.stream``: ``request_id`` None: a number is given.
    ``score_from``: first prompt token whose log probability is wanted; None: as the sampling parameters say. ``adapter``: None:
    the model's active ones."""

    request_id: str | None = None
    priority: int = 0
    timeout: float | None = None
    score_from: int | None = None
    adapter: str | None = None

    def check(self) -> RequestOptions:
        """Raises TypeError or ValueError for values that cannot be served."""
        for name, kind, what in (("request_id", str | None, "a string or None"), ("priority", int, "an integer"),
                                 ("adapter", str | None, "the name of an adapter or None"),
                                 ("timeout", int | float | None, "a number of seconds or None")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                raise TypeError(f"{name} must be {what}, got {value!r}")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, got {self.timeout}")
        return self


class Ask(NamedTuple):
    """A prompt, how to continue it, and the other options of its request. ``refused``: why it cannot be served."""

    prompt: Prompt
    params: SamplingParams
    options: RequestOptions = RequestOptions()
    refused: Exception | None = None


class Limits(NamedTuple):
    """Bounds of an engine: token ids below ``vocab_size``, of which those below ``num_logits`` can be sampled and scored, in
    requests of up to ``max_model_len`` tokens, with up to ``max_logprobs`` log probabilities per position."""

    vocab_size: int
    num_logits: int
    max_model_len: int
    max_logprobs: int


def make_requests(ask: Ask, first_id: int, index: int | None, inbox: deque[StreamEvent], *, tokenizer: Any,
                  eos_token_ids: frozenset[int], limits: Limits, random: Random) -> list[Request]:
    """The ``params.n`` requests of a prompt, with ids from ``first_id`` on. ``index``: of the first output; None: the request's
    id. ``random``: draws the seeds of requests that have none. Raises ValueError or TypeError, which say why, if the prompt
    cannot be served."""
    if ask.refused is not None:
        raise ask.refused
    params, options = params_of(ask.params), ask.options.check()
    score_from = options.score_from
    longest = limits.max_model_len + (score_from is not None)  # the token that ends a score is not computed
    ids = token_ids_of(ask.prompt, tokenizer, limits.vocab_size, longest, params.truncate_prompt_tokens)
    check_logprobs(params, limits)
    if score_from is None:
        score_from = len(ids) if params.prompt_logprobs is None else 1
    _check_scored(ids[score_from:], limits)
    edits, trace = LogitsEdits.of(params, tokenizer, limits.num_logits), params.trace_decode_token_ids
    limit = longest if params.max_tokens is None else min(longest, len(ids) + params.max_tokens)
    limit = min(limit, len(ids) + len(trace)) if trace else limit
    stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos or trace else eos_token_ids)
    too_early = stops if params.as_generate else stops | eos_token_ids
    made = []
    for k in range(params.n):
        seed = params.seed if params.seed is not None else random.getrandbits(62)
        output = RequestOutput((first_id if index is None else index) + k, text_of(ask.prompt), list(ids),  # the caller's own
                               request_id=str(first_id + k) if options.request_id is None else options.request_id)
        if score_from < len(ids) or params.prompt_logprobs is not None:
            output.prompt_logprobs = [None] * score_from
        if params.wants_logprobs:
            output.logprobs, output.cumulative_logprob = [], 0.0
        made.append(Request(
            first_id + k, ids, params, output, seed=(seed + k * 0x9E3779B9) % 2**63, stop_token_ids=stops,
            max_total_tokens=limit, inbox=inbox, detokenizer=_detokenizer_of(params, tokenizer, ids), num_scored=score_from,
            priority=options.priority, edits=edits, too_early=too_early))
    return made
