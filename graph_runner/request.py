"""A request as the engine schedules it, its output, and the checks of a prompt."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any, NamedTuple

from quire.graph_runner.detokenizer import Detokenizer
from quire.graph_runner.sampling_params import SamplingParams

Prompt = str | Sequence[int]


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


@dataclass
class RequestOutput:
    """The result of one request.

    Args:
        index: position in the order of the prompts (with n > 1, the n results of a prompt are consecutive).
        prompt: the prompt's text, if it was given as text.
        prompt_token_ids, token_ids: token ids of the prompt and of the continuation (the end token included).
        text: the decoded continuation, cut before a stop string; empty without a tokenizer.
        finish_reason: "stop", "length", "abort", "error", or None while it runs.
        error: the error message of a failed request, or None.
        stop_reason: the stop string or token id that ended it, or None.
        logprobs: for each of ``token_ids`` the log probabilities by token id, the sampled token's first; None if not asked for.
        cumulative_logprob: sum of those of ``token_ids``, or None.
        prompt_logprobs: for each of ``prompt_token_ids`` the log probabilities by token id, its own first; the first entry is
            None. None if not asked for.
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

    @classmethod
    def refused(cls, index: int, prompt: Prompt, error: Exception) -> RequestOutput:
        """The output for a prompt that cannot be served."""
        ids = list(prompt) if isinstance(prompt, (list, tuple)) else []
        return cls(index, prompt if isinstance(prompt, str) else None, ids, finish_reason="error", error=str(error))


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
    launched steps whose results are not collected yet. ``num_computed`` tokens have their keys and values in the cache, or
    will have when the launched steps are done. ``num_scored``: from which prompt token on log probabilities are still to be
    computed; the prompt's length if none. ``inbox``: where the events of the request go.
    """

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
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    preemptions: int = 0
    finished: bool = False

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
    def num_output_tokens(self) -> int:
        return self.num_tokens - len(self.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed


class ScheduledRow(NamedTuple):
    """One request's part in a step: ``num_new`` tokens from position ``start`` on. ``samples``: the row ends with the request's
    last token, so a new token is sampled from its logits. ``num_scored``: prompt tokens whose log probabilities it computes, those
    before the request's ``num_scored``."""

    request: Request
    start: int
    num_new: int
    samples: bool
    num_scored: int = 0


@dataclass(frozen=True)
class ScheduledBatch:
    """One step's rows: decode rows (one token each) first."""

    rows: Sequence[ScheduledRow]
    num_tokens: int
    num_decode_rows: int
    num_scored: int = 0

    @property
    def is_decode(self) -> bool:
        return self.num_decode_rows == len(self.rows)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list. A string, or a sequence of integers (arrays and tensors included), is one prompt."""
    tolist = getattr(prompts, "tolist", None)
    many: Any = prompts if tolist is None else tolist()
    if isinstance(many, str) or not isinstance(many, Sequence) or (len(many) and _is_int(many[0])):
        return [many]
    return list(many)


def _is_int(item: Any) -> bool:
    try:
        operator.index(item)
    except Exception:  # a tensor on the meta device, say, raises errors of its own
        return False
    return getattr(item, "ndim", 0) == 0  # a 1-D tensor of one token is a prompt


def params_of(params: SamplingParams | None) -> SamplingParams:
    """``params``, or the defaults for None. Raises TypeError for other types."""
    if params is not None and not isinstance(params, SamplingParams):
        example = ", ".join(f"{k}={v!r}" for k, v in params.items()) if isinstance(params, dict) else "max_tokens=16"
        raise TypeError(f"params must be SamplingParams, got {str(params)[:60]!r}; write SamplingParams({example})")
    return SamplingParams() if params is None else params


def pairs_of(prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
             ) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its params: one SamplingParams for all, or one per prompt.

    Raises:
        ValueError: the numbers of prompts and params differ.
        TypeError: params of another type.
    """
    batch = as_prompts(prompts)
    if isinstance(params, Sequence) and not isinstance(params, str):
        each = [params_of(p) for p in params]
    else:
        each = [params_of(params)] * len(batch)
    if len(each) != len(batch):
        raise ValueError(f"{len(batch)} prompts but {len(each)} SamplingParams; give one for all or one for each")
    return list(zip(batch, each, strict=True))


def token_ids_of(prompt: Prompt, tokenizer: Any, vocab_size: int, max_model_len: int) -> list[int]:
    """The token ids of a prompt. Raises ValueError or TypeError for a prompt that cannot be served."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError("the prompt is text, but the engine has no tokenizer; pass one, or give token ids")
        if not callable(tokenizer):
            raise TypeError(f"the prompt is text, and the tokenizer, {type(tokenizer).__name__}, cannot be called with it as "
                            "those of transformers can; pass one of these, or give token ids")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the prompt is not valid text: character {error.start} is {prompt[error.start]!r}, half of a surrogate pair, "
                "as from bytes that are not UTF-8 (errors='surrogateescape'); decode them with errors='replace'") from None
        ids = list(tokenizer(prompt)["input_ids"])
    else:
        try:
            ids = [operator.index(i) for i in prompt]
        except TypeError:
            raise TypeError(f"a prompt is text or a list of token ids, got {str(prompt)[:60]!r}") from None
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    bad = [i for i in ids if not 0 <= i < vocab_size]
    if bad:
        raise ValueError(f"token ids {bad[:5]} are outside the vocabulary of {vocab_size} tokens")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens; a request may have {max_model_len}, prompt and continuation (the smallest of "
            "max_model_len, the model's length and what the KV cache holds). Shorten the prompt, or raise num_pages or "
            "max_model_len")
    return ids


def _detokenizer_of(params: SamplingParams, tokenizer: Any, prompt_token_ids: list[int]) -> Detokenizer | None:
    """The detokenizer of a new request, or None where no text is wanted. Raises ValueError for stop strings without text."""
    if tokenizer is None and params.stop:
        raise ValueError("stop strings need text, and the engine has no tokenizer; pass one, or use stop_token_ids")
    if tokenizer is None or not params.detokenize:
        return None
    return Detokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens, params.stop or (),
                       params.include_stop_str_in_output)


def check_logprobs(params: SamplingParams, num_logits: int, max_logprobs: int) -> None:
    """Raises ValueError for more log probabilities than the engine allows, or tokens that have none."""
    ids = params.logprob_token_ids or ()
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs), ("logprob_token_ids", len(ids))):
        number = num_logits if count == -1 else count
        if number is not None and number > max_logprobs:
            raise ValueError(f"{name} asks for {number} tokens per position, and this engine gives at most {max_logprobs}. Ask for "
                             f"fewer, or make the engine with max_logprobs={number}")
    outside = [token for token in ids if token >= num_logits]
    if outside:
        raise ValueError(f"logprob_token_ids {outside[:5]} have no logits; the model has {num_logits}")


def make_requests(prompt: Prompt, params: SamplingParams | None, first_id: int, index: int | None, inbox: deque[StreamEvent], *,
                  tokenizer: Any, eos_token_ids: frozenset[int], vocab_size: int, num_logits: int, max_model_len: int,
                  max_logprobs: int, random: Random, score_from: int | None = None) -> list[Request]:
    """The ``params.n`` requests of a prompt.

    Args:
        first_id: id of the first; the others follow.
        index: of the first output; None: the request's id.
        num_logits: width of the logits.
        random: draws the seeds of requests that have none.
        score_from: first prompt token whose log probability is wanted; None: as params say.

    Raises:
        ValueError, TypeError: the prompt cannot be served; says why.
    """
    params, ids = params_of(params), token_ids_of(prompt, tokenizer, vocab_size, max_model_len)
    limit = max_model_len if params.max_tokens is None else min(max_model_len, len(ids) + params.max_tokens)
    check_logprobs(params, num_logits, max_logprobs)
    if score_from is None:
        score_from = len(ids) if params.prompt_logprobs is None else 1
    if any(token >= num_logits for token in ids[score_from:]):
        raise ValueError(f"the prompt has tokens for which the model has no logits ({num_logits} of them), so these have no log "
                         "probability")
    stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else eos_token_ids)
    made = []
    for k in range(params.n):
        seed = params.seed if params.seed is not None else random.getrandbits(62)
        output = RequestOutput((first_id if index is None else index) + k, prompt if isinstance(prompt, str) else None, ids)
        if score_from < len(ids) or params.prompt_logprobs is not None:
            output.prompt_logprobs = [None] * score_from
        if params.wants_logprobs:
            output.logprobs, output.cumulative_logprob = [], 0.0
        made.append(Request(
            first_id + k, ids, params, output, seed=(seed + k * 0x9E3779B9) % 2**63, stop_token_ids=stops,
            max_total_tokens=limit, inbox=inbox, detokenizer=_detokenizer_of(params, tokenizer, ids),
            num_scored=score_from))
    return made


__all__ = ["FinishReason", "Logprob", "Prompt", "Request", "RequestOutput", "ScheduledBatch", "ScheduledRow", "StreamEvent",
           "as_prompts", "make_requests", "pairs_of", "params_of", "token_ids_of"]
