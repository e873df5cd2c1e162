"""How the tokens of a request are sampled and when generation stops.

Names and defaults are vLLM's (``vllm.SamplingParams``, also the OpenAI completion API's where that has them), so that
code written for vLLM runs here. Fields that quire does not support accept no value but the default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar

_UNSUPPORTED = ("best_of", "extra_args", "output_kind", "spaces_between_special_tokens", "structured_outputs")
#: Of which distribution log probabilities are: the model's, or the one that tokens are drawn from. vLLM's names.
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_MAX_FLOAT32 = 3.4028234663852886e38  # the sampler reads float32
_OR_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_TOKENS = ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "trace_decode_token_ids")


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. Frozen and hashable; change one with `dataclasses.replace`.

    What changes the logits is applied in vLLM's order, in float32: allowed_token_ids, bad_words, min_tokens, logit_bias,
    logits_processors, repetition_penalty, frequency_penalty, presence_penalty; then temperature and filters.

    Args:
        n: sequences to generate per prompt, >= 1; must be 1 with temperature 0.
        presence_penalty, frequency_penalty: subtracted from the logit of each token of the continuation so far, the second
            times how often the token is there; in [-2, 2]. The formula of OpenAI's API reference.
        repetition_penalty: the logit of each token of the prompt or the continuation so far is divided by it where positive and
            multiplied by it elsewhere, > 0; 1 is off. Keskar et al., "CTRL", 2019, section 4.1, with the two signs as in
            vLLM and transformers.
        temperature: logits are divided by it before the softmax, >= 0. 0 takes the likeliest token (greedy), and then
            top_k, top_p and min_p have no effect. Any float32 value is accepted; vLLM clamps to at least 0.01 and refuses
            more than 2.
        top_p: keep the smallest set of likeliest tokens whose probabilities sum to this, in (0, 1].
        top_k: number of likeliest tokens to keep; 0 or -1 keeps all. Stored as 0 for all.
        min_p: keep tokens at least this times as likely as the likeliest, in [0, 1]. Applied before top_p.
        seed: any integer. The same seed gives the same tokens, whatever else is in the batch. None or -1: a different
            one every time. Stored as None for -1.
        bad_words: strings that the continuation must not contain, each also after a space: the last token of each is excluded
            where the continuation ends with those before it. Needs a tokenizer. Stored as a tuple.
        logit_bias: numbers, finite, that are added to the logits of some tokens, by token id.
        allowed_token_ids: only these can be sampled. Stored as a tuple; empty means all.
        logits_processors: functions of the continuation's token ids (a list) and the logits, (V,) float32 on the device, that
            return (V,) logits; or with the prompt's token ids as a third argument, the first. transformers' LogitsProcessors
            are called as transformers does, with (1, tokens) ids and (1, V) scores. They need every token on the host, so these
            requests wait for each step's result. One that raises fails its request. A function with state of its own must not
            be given to two requests (n > 1). Stored as a tuple.
        stop: string or strings that end generation as soon as they appear in the text, with a token after the first min_tokens;
            one that is a special token also where the text leaves it out. Stored as a tuple.
        stop_token_ids: tokens that end generation, in addition to the end-of-sequence token. Stored as a tuple.
        ignore_eos: continue after the end-of-sequence token.
        max_tokens: maximum number of tokens to generate, >= 1; None: up to the maximum length of a request.
        min_tokens: no end-of-sequence token, also with ignore_eos, and none of stop_token_ids before this many tokens,
            0 <= it <= max_tokens.
        logprobs: log probabilities of each sampled token and of this many likeliest ones: 0 for the sampled token only, -1 for
            the whole vocabulary, at most the engine's max_logprobs. None: none.
        prompt_logprobs: the same for each token of the prompt but the first, always of the model's distribution. The prompt is
            then computed in chunks of a few hundred tokens.
        logprob_token_ids: tokens whose log probabilities are given beside those. Stored as a tuple.
        logprobs_mode: "raw_logprobs", of the model's distribution (log_softmax of the logits), or "processed_logprobs", of the
            one that the token was drawn from (after all that changes the logits, temperature and filters; -inf for excluded
            tokens). vLLM has it as an option of the engine.
        trace_decode_token_ids: the tokens to give out instead of sampled ones, with their log probabilities: the same steps as
            when they were sampled. Ends after them at the latest; the end-of-sequence token does not end it. n must be 1.
            Stored as a tuple; empty means none.
        detokenize: False returns token ids without text; `stop` needs text.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: end the text with the stop string, or the text of the token, that ended it instead of
            before it.
        truncate_prompt_tokens: keep the last tokens of a longer prompt, >= 1 of them; None: all.

    Not supported, and refused unless left at their defaults: best_of (n sequences are drawn, and all returned), extra_args,
    output_kind (``generate`` gives final results, ``stream`` new tokens), spaces_between_special_tokens, structured_outputs
    (logits_processors can constrain tokens). docs/vllm.md compares each field with vLLM's.

    Raises:
        ValueError: a value out of range, contradictory values, or an unsupported field.
        TypeError: a value of the wrong type, or an unknown name.
    """

    as_generate: ClassVar[bool] = False  # see GenerateParams
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
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    truncate_prompt_tokens: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    logprobs_mode: str = "raw_logprobs"
    trace_decode_token_ids: Sequence[int] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = field(default=None, hash=False)
    best_of: int | None = None
    extra_args: Mapping[str, Any] | None = field(default=None, hash=False)
    output_kind: Any = field(default=None, hash=False)
    structured_outputs: Any = field(default=None, hash=False)

    def __post_init__(self) -> None:
        self._refuse_unsupported()
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("n", "top_k", "min_tokens", *_OR_NONE):
            value = getattr(self, name)
            if value is not None or name not in _OR_NONE:
                _check_int(name, value, "an integer or None" if name in _OR_NONE else "an integer")
                object.__setattr__(self, name, int(value))  # numpy's integers overflow
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            _check_number(name, getattr(self, name))
        self._normalize()
        self._check_ranges()

    def _refuse_unsupported(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            # Arrays are compared item by item.
            if option.name in _UNSUPPORTED and (isinstance(value, Sized) or value != option.default):
                raise ValueError(
                    f"{option.name}={value!r}: quire does not support {option.name}; leave it at its default, "
                    f"{option.default!r}. Supported: {', '.join(f.name for f in fields(self) if f.name not in _UNSUPPORTED)}")

    def _normalize(self) -> None:
        """Store one form of values that have several spellings."""
        set_field = object.__setattr__  # the dataclass is frozen
        kinds: Any = (("stop", "a string or a list of strings", str), ("bad_words", "a list of strings", str),
                      ("logits_processors", "a list of functions", Callable))
        for name, expected, kind in kinds:
            value = getattr(self, name)
            items = (value,) if name == "stop" and isinstance(value, str) else _as_tuple(name, value, expected)
            for item in items:
                if not isinstance(item, kind):
                    raise TypeError(f"{name} must be {expected}, got {item!r} in it")
            set_field(self, name, items)
        for name in _TOKENS:
            ids = _as_tuple(name, getattr(self, name), "a list of token ids")
            for token in ids:
                _check_int(f"every item of {name}", token)
            ids = tuple(map(int, ids))
            set_field(self, name, ids if name == "trace_decode_token_ids" else tuple(dict.fromkeys(ids)))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(f"logit_bias must be a dict of numbers by token id, got {self.logit_bias!r}")
            for token, number in self.logit_bias.items():
                _check_int("every key of logit_bias", token)
                _check_number("every value of logit_bias", number)
            set_field(self, "logit_bias", {int(t): float(x) for t, x in self.logit_bias.items()} or None)
        set_field(self, "top_k", max(self.top_k, 0) if self.top_k >= -1 else self.top_k)
        set_field(self, "seed", None if self.seed == -1 else self.seed)

    def _check_ranges(self) -> None:
        assert self.stop is not None and self.bad_words is not None  # `_normalize`
        rules: list[tuple[bool, str]] = [
            (self.n >= 1, f"n must be at least 1, got {self.n}"),
            (0 <= self.temperature < math.inf,
             f"temperature must be a finite number of at least 0 (0 means greedy), got {self.temperature}"),
            (self.temperature <= _MAX_FLOAT32,
             f"temperature must be at most {_MAX_FLOAT32}, the largest float32 number, got {self.temperature}"),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1] (1 keeps all tokens), got {self.top_p}"),
            (self.top_k >= -1, f"top_k must be at least 1, or 0 or -1 to keep all tokens, got {self.top_k}"),
            (0 <= self.min_p <= 1, f"min_p must be in [0, 1] (0 keeps all tokens), got {self.min_p}"),
            (self.max_tokens is None or self.max_tokens >= 1,
             f"max_tokens must be at least 1, or None for no limit but the model's length, got {self.max_tokens}"),
            (self.truncate_prompt_tokens is None or self.truncate_prompt_tokens >= 1,
             f"truncate_prompt_tokens must be at least 1, or None to keep the prompt, got {self.truncate_prompt_tokens}"),
            (self.min_tokens >= 0, f"min_tokens must be at least 0, got {self.min_tokens}"),
            (self.max_tokens is None or self.min_tokens <= self.max_tokens,
             f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"),
            (all(self.stop), "stop contains an empty string, which would stop before the first token"),
            (not self.stop or self.detokenize, "stop strings need text, and detokenize=False omits it; set "
             "detokenize=True, or use stop_token_ids"),
            *((min(ids, default=0) >= 0, f"{name} must not be negative, got {min(ids, default=0)}")
              for name in _TOKENS for ids in (getattr(self, name),)),
            *((-2 <= value <= 2, f"{name} must be in [-2, 2], got {value}") for name, value in (
                ("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty))),
            (0 < self.repetition_penalty <= _MAX_FLOAT32,
             f"repetition_penalty must be a finite number above 0 (1 is off), got {self.repetition_penalty}"),
            (all(word.strip() for word in self.bad_words), "bad_words contains an empty string, which every text contains"),
            *((token >= 0 and abs(number) <= _MAX_FLOAT32,
               f"logit_bias must have finite numbers and token ids that are not negative, got {token}: {number}")
              for token, number in (self.logit_bias or {}).items()),
            (self.n == 1 or not self.trace_decode_token_ids,
             f"n must be 1 with trace_decode_token_ids, got {self.n}: all sequences would be the same"),
            *((count is None or count >= -1,
               f"{name} must be at least 0, -1 for the whole vocabulary, or None for none, got {count}")
              for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs))),
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
        """Divisor of the logits for the log probabilities of sampled tokens; 0 where none are wanted."""
        if not self.wants_logprobs:
            return 0.0
        return 1.0 if self.logprobs_mode == "raw_logprobs" or self.temperature < 1e-5 else self.temperature


@dataclass(frozen=True)
class GenerateParams(SamplingParams):
    """Those of transformers' ``GenerationConfig``, for two rules in which ``generate`` is not as vLLM: with ``ignore_eos`` only
    stop_token_ids cannot come before ``min_tokens``, and min_p is applied to what top_p leaves. ``excluded``: tokens that are
    never sampled; those without logits are ignored."""

    as_generate: ClassVar[bool] = True
    excluded: tuple[int, ...] = ()


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
