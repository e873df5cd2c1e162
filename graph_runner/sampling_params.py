"""What a request asks for: how tokens are sampled and when generation stops.

Names and defaults are vLLM's (``vllm.SamplingParams``, also the OpenAI completion API's where that has them), so that
code written for vLLM runs here. A field that quire does not honour is there to be refused by name: no value of it other
than the default is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

_SUPPORTED = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens",
    "min_tokens", "detokenize", "skip_special_tokens", "include_stop_str_in_output",
)
_MAX_TEMPERATURE = 3.4028234663852886e38  # the largest float32 number: that is how temperatures get to the sampler


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. Frozen and hashable; change one with `dataclasses.replace`.

    Args:
        n: sequences to generate for the prompt, >= 1; 1 with temperature 0, as all would be the same.
        temperature: logits are divided by it before the softmax, >= 0. 0 takes the likeliest token (greedy), and then
            top_k, top_p and min_p have no effect. Unlike vLLM, which raises temperatures under 0.01 to 0.01 and refuses
            those over 2, every one that float32 can hold is taken.
        top_p: keep the smallest set of likeliest tokens whose probabilities add up to this, in (0, 1].
        top_k: keep this many likeliest tokens; 0 or -1 keeps all. Stored as 0 for all.
        min_p: keep tokens at least this times as likely as the likeliest, in [0, 1].
        seed: any integer. The same seed gives the same tokens, whatever else is in the batch. None or -1: a different
            one every time. Stored as None for -1.
        stop: string or strings that end generation as soon as they appear in the text. Stored as a tuple.
        stop_token_ids: tokens that end generation, in addition to the end-of-sequence token. Stored as a tuple.
        ignore_eos: go on after the end-of-sequence token.
        max_tokens: tokens to generate at most, >= 1; None for as many as the model's length allows.
        min_tokens: no end-of-sequence token and none of stop_token_ids before this many tokens, 0 <= it <= max_tokens.
        detokenize: False returns token ids without text; `stop` needs text.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: end the text with the stop string that ended it instead of before it.

    Not supported, and refused unless left at their defaults: presence_penalty, frequency_penalty, repetition_penalty,
    logprobs, prompt_logprobs, spaces_between_special_tokens, bad_words, logit_bias, truncate_prompt_tokens.

    Raises:
        ValueError: a value out of range, values that contradict each other, or a field that is not supported.
        TypeError: a value of the wrong type, or a name that is not a field.
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

    def __post_init__(self) -> None:
        self._refuse_unsupported()
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("n", "top_k", "min_tokens"):
            _check_int(name, getattr(self, name))
        for name in ("max_tokens", "seed"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), "an integer or None")
        for name in ("temperature", "top_p", "min_p"):
            _check_number(name, getattr(self, name))
        self._normalise()
        self._check_ranges()

    def _refuse_unsupported(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _SUPPORTED:
                continue
            empty = field.default is None and isinstance(value, (list, tuple, dict)) and not value  # asks for nothing
            if empty or (not isinstance(value, Sized) and value == field.default):  # arrays are compared item by item
                continue
            raise ValueError(
                f"{field.name}={value!r}: quire does not have {field.name} and will not ignore it; leave it at its "
                f"default, {field.default!r}. Supported: {', '.join(_SUPPORTED)}"
            )

    def _normalise(self) -> None:
        """One form for each of the values that may be spelled in several ways."""
        stop = self.stop
        stop = (stop,) if isinstance(stop, str) else _as_tuple("stop", stop, "a string or a list of strings")
        ids = _as_tuple("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for text in stop:
            if not isinstance(text, str):
                raise TypeError(f"stop must be a string or a list of strings, got {text!r} in it")
        for token in ids:
            _check_int("every item of stop_token_ids", token)
        set_field = object.__setattr__  # the dataclass is frozen, and this is its construction
        set_field(self, "stop", stop)
        set_field(self, "stop_token_ids", tuple(dict.fromkeys(map(int, ids))))
        for name in ("n", "top_k", "min_tokens", "max_tokens", "seed"):
            value = getattr(self, name)
            set_field(self, name, value if value is None else int(value))  # numpy's integers overflow
        set_field(self, "top_k", max(self.top_k, 0) if self.top_k >= -1 else self.top_k)
        set_field(self, "seed", None if self.seed == -1 else self.seed)

    def _check_ranges(self) -> None:
        assert self.stop is not None and self.stop_token_ids is not None  # tuples since `_normalise`
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
             f"max_tokens must be at least 1, or None for as many as the model's length allows, got {self.max_tokens}"),
            (self.min_tokens >= 0, f"min_tokens must be at least 0, got {self.min_tokens}"),
            (self.max_tokens is None or self.min_tokens <= self.max_tokens,
             f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"),
            (all(self.stop), "stop has an empty string in it, which would stop before the first token; remove it"),
            (not self.stop or self.detokenize, "stop strings are looked for in the text, which detokenize=False leaves "
             "out; set detokenize=True, or use stop_token_ids"),
            (min(self.stop_token_ids, default=0) >= 0,
             f"stop_token_ids must not be negative, got {min(self.stop_token_ids, default=0)}"),
            (self.n == 1 or self.temperature > 0, f"n must be 1 with temperature 0, got {self.n}: greedy decoding "
             "would generate the same sequence each time; set a temperature"),
        ]
        for holds, message in rules:
            if not holds:
                raise ValueError(message)

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is taken and nothing is drawn."""
        return self.temperature == 0

    @classmethod
    def from_generation_config(
        cls, generation_config: Any, *, prompt_length: int | None = None, **overrides: Any
    ) -> tuple[SamplingParams, list[str]]:
        """Translate a Hugging Face ``GenerationConfig``, read as ``model.generate`` reads it.

        Options that are None get the defaults of ``generate``: greedy, 20 new tokens, and when sampling temperature 1
        and **top_k 50**. ``do_sample`` False or None gives temperature 0, unless `overrides` has one. An
        ``eos_token_id`` takes the place of the model's own, as in ``generate``: it becomes ``stop_token_ids``, with
        ``ignore_eos=True``.

        Args:
            generation_config: any object with the attributes of a ``GenerationConfig``; missing ones count as None.
                Merge the model's own config into it first (``generate`` does).
            prompt_length: tokens of the prompt. ``max_length`` and ``min_length`` count it, and are unsupported
                without.
            overrides: fields of SamplingParams, in place of what the config says.

        Returns:
            The params, and the names of the options that are set, would change the output (tokens, or what else is
            returned), and are not honoured: refuse the request when there is any. Left out are options that change only
            how fast ``generate`` is (caches, compilation, lossless speculation), options without effect as the others
            are set (``top_h`` without sampling, ``length_penalty`` without beams), and ``return_dict_in_generate``,
            which is a matter of packing.

        Raises:
            ValueError, TypeError: as for SamplingParams; ValueError for do_sample with temperature 0, as in ``generate``.
        """
        def option(name: str, default: Any = None) -> Any:
            value = getattr(generation_config, name, None)
            return default if value is None else value

        _check_number("temperature", overrides.get("temperature", 0))
        sampling = overrides["temperature"] > 0 if "temperature" in overrides else bool(option("do_sample"))
        values: dict[str, Any] = {"n": option("num_return_sequences", 1), "stop": option("stop_strings")}
        values["temperature"] = 0.0
        if sampling and "temperature" not in overrides and option("temperature", 1.0) == 0:
            raise ValueError("do_sample=True with temperature=0.0; for the likeliest tokens set do_sample=False")
        if sampling:
            values |= {
                "temperature": option("temperature", 1.0), "top_k": option("top_k", 50), "top_p": option("top_p", 1.0),
                "min_p": option("min_p", 0.0),
            }
        if option("eos_token_id") is not None:
            ids = option("eos_token_id")
            ids = ids if isinstance(ids, Iterable) else [ids]
            values |= {"stop_token_ids": [i for i in map(int, ids) if i >= 0], "ignore_eos": True}  # -1 means none

        max_length, min_length = option("max_length"), option("min_length", 0)
        values["max_tokens"] = option("max_new_tokens", 20)
        values["min_tokens"] = option("min_new_tokens", 0)
        if prompt_length is not None:
            if option("max_new_tokens") is None and max_length is not None:
                values["max_tokens"] = max_length - prompt_length
            if option("min_new_tokens") is None:
                values["min_tokens"] = max(min_length - prompt_length, 0)
        values |= overrides
        if "min_tokens" not in overrides and values["max_tokens"] is not None:
            values["min_tokens"] = min(values["min_tokens"], values["max_tokens"])  # generate stops at the maximum too

        unsupported = [name for name, honoured in _HF_REFUSED.items() if _is_set(option, name, honoured, sampling)]
        if prompt_length is None:
            if max_length is not None and option("max_new_tokens") is None and "max_tokens" not in overrides:
                unsupported.append("max_length")
            if min_length > 0 and option("min_new_tokens") is None and "min_tokens" not in overrides:
                unsupported.append("min_length")
        unsupported += _unknown_options(generation_config)
        return cls(**values), [name for name in unsupported if name not in overrides]


def _never(value: Any) -> bool:
    return False


# Options of GenerationConfig that change what `generate` returns and that quire does not have, each with the values
# (other than None) that change nothing. Read from transformers 5.23: `GenerationConfig.get_generation_mode`, and the
# logits processors and stopping criteria that `GenerationMixin` makes of the config.
_HF_REFUSED: dict[str, Callable[[Any], bool]] = {
    # other ways of decoding
    "num_beams": lambda v: v == 1,
    "num_beam_groups": lambda v: v == 1,
    "diversity_penalty": lambda v: v == 0,
    "constraints": _never,
    "force_words_ids": _never,
    "dola_layers": _never,
    "penalty_alpha": lambda v: v == 0,
    "assistant_ensemble_weight": _never,  # speculation that is not lossless
    "is_assistant": lambda v: not v,  # stops early, at an unsure token
    # logits processors
    "repetition_penalty": lambda v: v == 1,
    "encoder_repetition_penalty": lambda v: v == 1,
    "no_repeat_ngram_size": lambda v: v == 0,
    "encoder_no_repeat_ngram_size": lambda v: v == 0,
    "bad_words_ids": lambda v: len(v) == 0,
    "forced_bos_token_id": _never,
    "forced_eos_token_id": _never,
    "remove_invalid_values": lambda v: not v,
    "exponential_decay_length_penalty": _never,
    "suppress_tokens": lambda v: len(v) == 0,
    "begin_suppress_tokens": lambda v: len(v) == 0,
    "sequence_bias": lambda v: len(v) == 0,
    "token_healing": lambda v: not v,
    "guidance_scale": lambda v: v == 1,
    "watermarking_config": _never,
    "top_h": _never,
    "typical_p": lambda v: v >= 1,
    "epsilon_cutoff": lambda v: not 0 < v < 1,
    "eta_cutoff": lambda v: not 0 < v < 1,
    "early_stopping": lambda v: v is False,
    "length_penalty": lambda v: v == 1,
    # stopping criteria
    "max_time": _never,
    # more to return
    "output_attentions": lambda v: not v,
    "output_hidden_states": lambda v: not v,
    "output_scores": lambda v: not v,
    "output_logits": lambda v: not v,
}
_HF_WHEN_SAMPLING = {"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
_HF_WITH_BEAMS = {"early_stopping", "length_penalty"}
# Honoured above, or without influence on the tokens.
_HF_ACCEPTED = {
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings", "do_sample", "temperature", "top_k",
    "top_p", "min_p", "num_return_sequences", "eos_token_id",
    # log_softmax of the scores: the distribution and its maximum stay the same
    "renormalize_logits",
    # packing of the result
    "return_dict_in_generate",
    # the prompt is given; encoder-decoder models are refused elsewhere
    "pad_token_id", "bos_token_id", "decoder_start_token_id",
    # speed only: caches, chunking, compilation, and speculation that gives the same distribution
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size",
    "compile_config", "disable_compile", "continuous_batching_config", "use_mtp", "speculation_type",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind",
    "transformers_version",
}


def _is_set(option: Callable[..., Any], name: str, changes_nothing: Callable[[Any], bool], sampling: bool) -> bool:
    value = option(name)
    if value is None or changes_nothing(value):
        return False
    if name in _HF_WHEN_SAMPLING:
        return sampling
    if name in _HF_WITH_BEAMS:
        return option("num_beams", 1) > 1
    if name == "penalty_alpha":  # contrastive search; see GenerationConfig.get_generation_mode
        return not sampling and option("top_k", 50) > 1
    return True


def _unknown_options(generation_config: Any) -> list[str]:
    """Options that are set and that this file has never heard of: those of a newer transformers.

    Only what the config's class declares counts. Model repositories add keys of their own to generation_config.json,
    and ``generate`` does not read them.
    """
    try:
        declared = vars(type(generation_config)())
    except TypeError:  # needs arguments, or has no __dict__
        return []
    known = _HF_REFUSED.keys() | _HF_ACCEPTED
    return [
        name for name, default in declared.items()
        if not name.startswith("_") and name not in known and getattr(generation_config, name, default) != default
    ]


def _as_tuple(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be {wanted}, got {value!r}")
    return tuple(value)


def _check_int(name: str, value: Any, wanted: str = "an integer") -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be {wanted}, got {value!r}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")


__all__ = ["SamplingParams"]
