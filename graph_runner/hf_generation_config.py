"""transformers' ``GenerationConfig`` as ``SamplingParams``, read as ``model.generate`` reads it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from quire.graph_runner.sampling_params import GenerateParams, SamplingParams


def from_generation_config(generation_config: Any, prompt_length: int) -> tuple[SamplingParams, list[str]]:
    """Translate a ``GenerationConfig``, or any object with its attributes, where missing ones count as None. Merge the model's
    own config into it first (``generate`` does). ``prompt_length``: tokens of the prompt, which ``max_length`` and
    ``min_length`` include.

    Options that are None get the defaults of ``generate``: greedy, 20 new tokens, and when sampling temperature 1 and **top_k
    50**. An ``eos_token_id`` replaces the model's own, as in ``generate``: it becomes ``stop_token_ids``, with
    ``ignore_eos=True``.

    Returns the params, and the names of the options that are set, would change the output (tokens, or what else is returned)
    and are not in the params; those in ``IN_LOCKSTEP`` are honoured by ``lockstep.py``, and those in ``EDITS`` by requests too,
    where they are alone (``with_edits``). Not among the names: options that
    change only the speed (caches, compilation, lossless speculation), those without effect beside the others (``top_h`` without
    sampling, ``length_penalty`` without beams), and ``return_dict_in_generate``.

    Raises ValueError or TypeError as SamplingParams does; ValueError for a max_length that the prompt fills, and for do_sample
    with temperature 0 or a negative top_k, as in ``generate``."""
    option = functools.partial(_option, generation_config)
    sampling = bool(option("do_sample"))
    beams = option("num_beams", 1) > 1  # of which num_return_sequences are returned
    values: dict[str, Any] = {"n": 1 if beams else option("num_return_sequences", 1), "stop": option("stop_strings"),
                              "temperature": 0.0}
    if sampling:
        values |= {"temperature": option("temperature", 1.0), "top_k": option("top_k", 50), "top_p": option("top_p", 1.0),
                   "min_p": option("min_p", 0.0)}
        if values["temperature"] == 0:
            raise ValueError("do_sample=True with temperature=0.0; for the likeliest tokens set do_sample=False")
        if values["top_k"] < 0:
            raise ValueError(f"top_k must be at least 0 (which keeps all tokens), got {values['top_k']}")
    if option("eos_token_id") is not None:
        ids = option("eos_token_id")
        ids = ids if isinstance(ids, Iterable) else [ids]
        values |= {"stop_token_ids": [i for i in map(int, ids) if i >= 0], "ignore_eos": True}  # -1 means none
    max_length = option("max_length")
    if max_length is not None and option("max_new_tokens") is None and max_length <= prompt_length:
        raise ValueError(f"max_length={max_length} counts the prompt's tokens too, and the prompt has {prompt_length}, so that "
                         "none is left to generate: raise max_length, or set max_new_tokens")
    from_length = 20 if max_length is None else max_length - prompt_length
    values["max_tokens"] = option("max_new_tokens", from_length)
    # generate stops at the maximum, whatever the minimum
    values["min_tokens"] = min(option("min_new_tokens", max(option("min_length", 0) - prompt_length, 0)), values["max_tokens"])
    return GenerateParams(**values), options_beyond(generation_config)


def options_beyond(generation_config: Any) -> list[str]:
    """The names of ``from_generation_config``, also of a config whose numbers of tokens are no integers."""
    option = functools.partial(_option, generation_config)
    sampling = bool(option("do_sample"))
    unsupported = [name for name, has_no_effect in _REFUSED.items() if _is_set(option, name, has_no_effect, sampling)]
    return unsupported + _unknown_options(generation_config)


def _option(generation_config: Any, name: str, default: Any = None) -> Any:
    value = getattr(generation_config, name, None)
    return default if value is None else value


def is_generation_config(given: Any) -> bool:
    """Whether this is transformers' ``GenerationConfig``, which need not be imported for the question."""
    return any(cls.__name__ == "GenerationConfig" and cls.__module__.startswith("transformers.") for cls in type(given).__mro__)


def for_requests(generation_config: Any, prompt_length: int) -> tuple[SamplingParams, list[str]]:
    """``from_generation_config`` for requests, which have some of the other options by themselves."""
    params, others = from_generation_config(generation_config, prompt_length)
    return with_edits(generation_config, params, others)


def with_edits(generation_config: Any, params: SamplingParams, others: Sequence[str]) -> tuple[SamplingParams, list[str]]:
    """The params with those of the options ``others`` that requests have too (of ``EDITS``, but for bad words of several
    tokens), and the names of the rest."""
    values: dict[str, Any] = {}
    excluded: dict[int, None] = {}
    rest = []
    for name in others:
        value = getattr(generation_config, name)
        if name == "repetition_penalty":
            values[name] = value
        elif name in EDITS and (tokens := _never_sampled(name, value, params)) is not None:
            excluded |= dict.fromkeys(tokens)
            values["excluded"] = tuple(excluded)
        else:
            rest.append(name)
    return replace(params, **values) if values else params, rest


def _never_sampled(name: str, value: Any, params: SamplingParams) -> list[int] | None:
    """The tokens that ``suppress_tokens`` or ``bad_words_ids`` exclude everywhere. None: words of several tokens, or no list of
    token ids, which are transformers' affair."""
    ends: Sequence[int] = ()
    if name == "bad_words_ids":
        if not isinstance(value, list) or not value or any(not isinstance(word, list) or len(word) != 1 for word in value):
            return None
        value, ends = [word[0] for word in value], params.stop_token_ids or ()  # which transformers leaves out of them
    if not isinstance(value, (list, tuple)) or any(type(token) is not int for token in value):
        return None
    if name == "bad_words_ids" and min(value) < 0:
        return None
    return [token for token in value if token >= 0 and token not in ends]


def for_engine(generation_config: Any, own: Any, prompt_length: Callable[[], int]) -> tuple[SamplingParams, Exception | None]:
    """A ``GenerationConfig`` in the place of an engine's SamplingParams, read as ``model.generate`` reads it, but for stop
    strings, which are looked for in the text without special tokens. ``own``: the model's, for options that are None; or
    None. ``prompt_length``: tokens of the prompt; called where they matter.

    Returns the params, and None or why this prompt cannot be served; its params have the right ``n`` then.

    Raises ValueError for options that a request cannot have, whatever its prompt; and as ``from_generation_config``, with
    TypeError."""
    config = copy.copy(generation_config)
    as_generate = own is not None  # then no end token means none, and not the tokenizer's
    for name, value in ({} if own is None else vars(own)).items():
        if name[0] != "_" and getattr(config, name, None) is None:
            setattr(config, name, value)
    counts_prompt = bool(config.min_length) or (config.max_new_tokens is None and config.max_length is not None)
    any_prompt = copy.copy(config)
    if counts_prompt:
        any_prompt.min_length, any_prompt.max_new_tokens = None, 1 if config.max_new_tokens is None else config.max_new_tokens
    params, others = for_requests(any_prompt, 0)
    if params.stop and (config.min_length or config.min_new_tokens):  # SamplingParams' minimum is one for both
        others.append("stop_strings that count before the minimum of tokens")
    if others:
        raise ValueError(f"a request has no {', '.join(others)} of a GenerationConfig: quire.paged(model).generate has, and "
                         "SamplingParams has penalties, bad_words, logit_bias and logits_processors")
    try:
        params = for_requests(config, prompt_length())[0] if counts_prompt else params
        return (replace(params, ignore_eos=True) if as_generate else params), None
    except (ValueError, TypeError) as error:
        return params, error


def _never(value: Any) -> bool:
    return False


# Options of GenerationConfig that change what `generate` returns and that SamplingParams do not have, each with a test of the
# values (other than None) that have no effect. Read from transformers 5.23: `GenerationConfig.get_generation_mode`, and the
# logits processors and stopping criteria that `GenerationMixin` makes of the config.
#: Those that transformers makes logits processors or stopping criteria of, or outputs of their scores, and its beam search.
IN_LOCKSTEP: dict[str, Callable[[Any], bool]] = {
    "num_beams": lambda v: v == 1,
    # logits processors
    "repetition_penalty": lambda v: v == 1,
    "encoder_repetition_penalty": lambda v: v == 1,
    "no_repeat_ngram_size": lambda v: v == 0,
    "encoder_no_repeat_ngram_size": lambda v: v == 0,
    "bad_words_ids": _never,  # an empty list is transformers' error
    "forced_bos_token_id": _never,
    "forced_eos_token_id": _never,
    "remove_invalid_values": lambda v: not v,
    "exponential_decay_length_penalty": _never,
    "suppress_tokens": lambda v: len(v) == 0,
    "begin_suppress_tokens": lambda v: len(v) == 0,
    "sequence_bias": _never,
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
    # further outputs
    "output_scores": lambda v: not v,
    "output_logits": lambda v: not v,
}
#: Of these, those that requests have by themselves, and transformers' processor of each.
EDITS = {"repetition_penalty": "RepetitionPenaltyLogitsProcessor", "suppress_tokens": "SuppressTokensLogitsProcessor",
         "bad_words_ids": "NoBadWordsLogitsProcessor"}
_REFUSED: dict[str, Callable[[Any], bool]] = IN_LOCKSTEP | {
    # other ways of decoding
    "num_beam_groups": lambda v: v == 1,
    "diversity_penalty": lambda v: v == 0,
    "constraints": _never,
    "force_words_ids": _never,
    "dola_layers": _never,
    "penalty_alpha": lambda v: v == 0,
    "assistant_ensemble_weight": _never,  # lossy speculation
    "is_assistant": lambda v: not v,  # stops early, at an uncertain token
    "cache_implementation": lambda v: v != "quantized",  # of the others, none changes numbers
    # further outputs
    "output_attentions": lambda v: not v,
    "output_hidden_states": lambda v: not v,
}
_WHEN_SAMPLING = {"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
_WITH_BEAMS = {"early_stopping", "length_penalty"}
# Honoured, or without effect on the tokens.
_ACCEPTED = {
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings", "do_sample", "temperature", "top_k",
    "top_p", "min_p", "num_return_sequences", "eos_token_id",
    # log_softmax of the scores: the distribution and its maximum stay the same
    "renormalize_logits",
    # form of the result
    "return_dict_in_generate",
    # the prompt is given; encoder-decoder models are refused elsewhere
    "pad_token_id", "bos_token_id", "decoder_start_token_id",
    # speed only: caches, chunking, compilation, and speculation that gives the same distribution
    "use_cache", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size",
    "compile_config", "disable_compile", "continuous_batching_config", "use_mtp", "speculation_type",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind",
    "transformers_version",
}


def _is_set(option: Callable[..., Any], name: str, has_no_effect: Callable[[Any], bool], sampling: bool) -> bool:
    value = option(name)
    if value is None or has_no_effect(value):
        return False
    if name in _WHEN_SAMPLING:
        return sampling
    if name in _WITH_BEAMS:
        return option("num_beams", 1) > 1
    if name == "penalty_alpha":  # contrastive search; see GenerationConfig.get_generation_mode
        return not sampling and option("top_k", 50) > 1
    return True


def _unknown_options(generation_config: Any) -> list[str]:
    """Options that are set and not in the tables above: those of a newer transformers. Only what the config's class declares
    counts: ``generate`` does not read keys that model repositories add to generation_config.json."""
    try:
        declared = vars(type(generation_config)())
    except TypeError:  # needs arguments, or has no __dict__
        return []
    known = _REFUSED.keys() | _ACCEPTED
    return [name for name, default in declared.items() if not name.startswith("_") and name not in known
            and getattr(generation_config, name, default) != default]
