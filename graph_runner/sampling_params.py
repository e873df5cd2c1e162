"""How the tokens of a request are sampled and when generation stops.

Names and defaults are vLLM's (``vllm.SamplingParams``, also the OpenAI completion API's where that has them), so that
code written for vLLM runs here. Fields that quire does not support accept no value but the default.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

_SUPPORTED = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens",
    "min_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids", "logprobs_mode", "detokenize", "skip_special_tokens",
    "include_stop_str_in_output",
)
#: Of which distribution log probabilities are: the model's, or the one that tokens are drawn from. vLLM's names.
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_MAX_TEMPERATURE = 3.4028234663852886e38  # the largest float32; the sampler reads float32


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. Frozen and hashable; change one with `dataclasses.replace`.

    Args:
        n: sequences to generate per prompt, >= 1; must be 1 with temperature 0.
        temperature: logits are divided by it before the softmax, >= 0. 0 takes the likeliest token (greedy), and then
            top_k, top_p and min_p have no effect. Any float32 value is accepted; vLLM clamps to at least 0.01 and refuses
            more than 2.
        top_p: keep the smallest set of likeliest tokens whose probabilities sum to this, in (0, 1].
        top_k: number of likeliest tokens to keep; 0 or -1 keeps all. Stored as 0 for all.
        min_p: keep tokens at least this times as likely as the likeliest, in [0, 1].
        seed: any integer. The same seed gives the same tokens, whatever else is in the batch. None or -1: a different
            one every time. Stored as None for -1.
        stop: string or strings that end generation as soon as they appear in the text. Stored as a tuple.
        stop_token_ids: tokens that end generation, in addition to the end-of-sequence token. Stored as a tuple.
        ignore_eos: continue after the end-of-sequence token.
        max_tokens: maximum number of tokens to generate, >= 1; None: up to the maximum length of a request.
        min_tokens: no end-of-sequence token and none of stop_token_ids before this many tokens, 0 <= it <= max_tokens.
        logprobs: log probabilities of each sampled token and of this many likeliest ones: 0 for the sampled token only, -1 for
            the whole vocabulary, at most the engine's max_logprobs. None: none.
        prompt_logprobs: the same for each token of the prompt but the first, always of the model's distribution. The prompt is
            then computed in chunks of a few hundred tokens.
        logprob_token_ids: tokens whose log probabilities are given beside those. Stored as a tuple.
        logprobs_mode: "raw_logprobs", of the model's distribution (log_softmax of the logits), or "processed_logprobs", of the
            one that the token was drawn from (after temperature, top_k, top_p, min_p and min_tokens; -inf for excluded
            tokens). vLLM has it as an option of the engine.
        detokenize: False returns token ids without text; `stop` needs text.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: end the text with the stop string that ended it instead of before it.

    Not supported, and refused unless left at their defaults: presence_penalty, frequency_penalty, repetition_penalty,
    spaces_between_special_tokens, bad_words, logit_bias, truncate_prompt_tokens, trace_decode_token_ids.

    Raises:
        ValueError: a value out of range, contradictory values, or an unsupported field.
        TypeError: a value of the wrong type, or an unknown name.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words: Sequence[str] | None = None
    logit_bias: dict[int, float] | None = None
    truncate_prompt_tokens: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    logprobs_mode: str = "raw_logprobs"
    trace_decode_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self._refuse_unsupported()
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("n", "top_k", "min_tokens"):
            _check_int(name, getattr(self, name))
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), "an integer or None")
        for name in ("temperature", "top_p", "min_p"):
            _check_number(name, getattr(self, name))
        self._normalize()
        self._check_ranges()

    def _refuse_unsupported(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _SUPPORTED:
                continue
            empty = field.default is None and isinstance(value, (list, tuple, dict)) and not value
            if empty or (not isinstance(value, Sized) and value == field.default):  # arrays are compared item by item
                continue
            raise ValueError(
                f"{field.name}={value!r}: quire does not support {field.name}; leave it at its default, {field.default!r}. "
                f"Supported: {', '.join(_SUPPORTED)}")

    def _normalize(self) -> None:
        """Store one form of values that have several spellings."""
        stop = self.stop
        stop = (stop,) if isinstance(stop, str) else _as_tuple("stop", stop, "a string or a list of strings")
        ids = _as_tuple("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for text in stop:
            if not isinstance(text, str):
                raise TypeError(f"stop must be a string or a list of strings, got {text!r} in it")
        shown = _as_tuple("logprob_token_ids", self.logprob_token_ids, "a list of token ids")
        for name, tokens in (("stop_token_ids", ids), ("logprob_token_ids", shown)):
            for token in tokens:
                _check_int(f"every item of {name}", token)
        set_field = object.__setattr__  # the dataclass is frozen
        set_field(self, "stop", stop)
        set_field(self, "stop_token_ids", tuple(dict.fromkeys(map(int, ids))))
        set_field(self, "logprob_token_ids", tuple(dict.fromkeys(map(int, shown))))
        for name in ("n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            set_field(self, name, value if value is None else int(value))  # numpy's integers overflow
        set_field(self, "top_k", max(self.top_k, 0) if self.top_k >= -1 else self.top_k)
        set_field(self, "seed", None if self.seed == -1 else self.seed)

    def _check_ranges(self) -> None:
        assert self.stop is not None and self.stop_token_ids is not None and self.logprob_token_ids is not None  # `_normalize`
        rules: list[tuple[bool, str]] = [
            (self.n >= 1, f"n must be at least 1, got {self.n}"),
            (0 <= self.temperature < math.inf,
             f"temperature must be a finite number of at least 0 (0 means greedy), got {self.temperature}"),
            (self.temperature <= _MAX_TEMPERATURE,
             f"temperature must be at most {_MAX_TEMPERATURE}, the largest float32 number, got {self.temperature}"),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1] (1 keeps all tokens), got {self.top_p}"),
            (self.top_k >= -1, f"top_k must be at least 1, or 0 or -1 to keep all tokens, got {self.top_k}"),
            (0 <= self.min_p <= 1, f"min_p must be in [0, 1] (0 keeps all tokens), got {self.min_p}"),
            (self.max_tokens is None or self.max_tokens >= 1,
             f"max_tokens must be at least 1, or None for no limit but the model's length, got {self.max_tokens}"),
            (self.min_tokens >= 0, f"min_tokens must be at least 0, got {self.min_tokens}"),
            (self.max_tokens is None or self.min_tokens <= self.max_tokens,
             f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"),
            (all(self.stop), "stop contains an empty string, which would stop before the first token"),
            (not self.stop or self.detokenize, "stop strings need text, and detokenize=False omits it; set "
             "detokenize=True, or use stop_token_ids"),
            (min(self.stop_token_ids, default=0) >= 0,
             f"stop_token_ids must not be negative, got {min(self.stop_token_ids, default=0)}"),
            *((count is None or count >= -1,
               f"{name} must be at least 0, -1 for the whole vocabulary, or None for none, got {count}")
              for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs))),
            (min(self.logprob_token_ids, default=0) >= 0,
             f"logprob_token_ids must not be negative, got {min(self.logprob_token_ids, default=0)}"),
            (self.logprobs_mode in LOGPROBS_MODES,
             f"logprobs_mode must be one of {', '.join(map(repr, LOGPROBS_MODES))}, got {self.logprobs_mode!r}"),
            (self.n == 1 or self.temperature > 0, f"n must be 1 with temperature 0, got {self.n}: all sequences "
             "would be the same; set a temperature"),
        ]
        for holds, message in rules:
            if not holds:
                raise ValueError(message)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken and nothing is sampled."""
        return self.temperature == 0

    @property
    def wants_logprobs(self) -> bool:
        """Whether sampled tokens come with log probabilities."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def logprob_temperature(self) -> float:
        """What logits are divided by for the log probabilities of sampled tokens; 0 where none are wanted."""
        if not self.wants_logprobs:
            return 0.0
        return 1.0 if self.logprobs_mode == "raw_logprobs" or self.temperature < 1e-5 else self.temperature


def _as_tuple(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be {expected}, got {value!r}")
    return tuple(value)


def _check_int(name: str, value: Any, expected: str = "an integer") -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be {expected}, got {value!r}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")


__all__ = ["LOGPROBS_MODES", "SamplingParams"]
