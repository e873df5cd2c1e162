"""SamplingParams: vLLM's defaults, ranges, refusals by name, and the translation of HF's GenerationConfig."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import GenerationConfig

from quire.graph_runner import sampling_params
from quire.graph_runner.sampling_params import SamplingParams

SUPPORTED = {
    "n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.5, "seed": 1, "stop": "x", "stop_token_ids": [1],
    "ignore_eos": True, "max_tokens": None, "min_tokens": 3, "detokenize": False, "skip_special_tokens": False,
    "include_stop_str_in_output": True,
}
UNSUPPORTED = {
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logprobs": 0, "prompt_logprobs": 1,
    "spaces_between_special_tokens": False, "bad_words": ["x"], "logit_bias": {1: 2.0}, "truncate_prompt_tokens": 8,
}


def test_defaults_are_vllms() -> None:
    assert {field.name: field.default for field in dataclasses.fields(SamplingParams)} == {
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": None, "stop_token_ids": None, "ignore_eos": False,
        "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "detokenize": True,
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
        "bad_words": None, "logit_bias": None, "truncate_prompt_tokens": None,
    }


def test_every_field_is_supported_or_refused() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == SUPPORTED.keys() | UNSUPPORTED.keys()
    for name, value in SUPPORTED.items():
        SamplingParams(**{name: value})
    assert set(sampling_params._SUPPORTED) == SUPPORTED.keys()
    assert all(name in SamplingParams.__doc__ for name in names)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_field_is_refused_by_name(name: str) -> None:
    message = f"{name}={UNSUPPORTED[name]!r}: quire does not have {name} and will not ignore it; leave it at its"
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        SamplingParams(**{name: UNSUPPORTED[name]})
    assert all(supported in str(caught.value) for supported in SUPPORTED)


def test_unsupported_field_at_its_default_is_accepted() -> None:
    SamplingParams(presence_penalty=0, repetition_penalty=1, bad_words=[], logit_bias={}, logprobs=None)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"n": 1.0}, TypeError, "n must be an integer, got 1.0"),
        ({"n": True}, TypeError, "n must be an integer, got True"),
        ({"n": 2, "temperature": 0}, ValueError, "n must be 1 with temperature 0, got 2"),
        ({"temperature": -0.1}, ValueError, "temperature must be a finite number of at least 0 (0 means greedy), got"),
        ({"temperature": float("nan")}, ValueError, "temperature must be a finite number"),
        ({"temperature": float("inf")}, ValueError, "temperature must be a finite number"),
        ({"temperature": 1e300}, ValueError, "temperature must be at most 3.4028234663852886e+38, the largest float32"),
        ({"temperature": 10**400}, ValueError, "temperature must be at most 3.4028234663852886e+38, the largest float32"),
        ({"temperature": "1"}, TypeError, "temperature must be a number, got '1'"),
        ({"temperature": None}, TypeError, "temperature must be a number, got None"),
        ({"top_p": 0}, ValueError, "top_p must be in (0, 1] (1 keeps all tokens), got 0"),
        ({"top_p": 1.1}, ValueError, "top_p must be in (0, 1] (1 keeps all tokens), got 1.1"),
        ({"top_p": float("nan")}, ValueError, "top_p must be in (0, 1]"),
        ({"top_k": -2}, ValueError, "top_k must be at least 1, or 0 or -1 to keep all tokens, got -2"),
        ({"top_k": 1.5}, TypeError, "top_k must be an integer, got 1.5"),
        ({"min_p": -0.1}, ValueError, "min_p must be in [0, 1] (0 keeps all tokens), got -0.1"),
        ({"min_p": 1.1}, ValueError, "min_p must be in [0, 1] (0 keeps all tokens), got 1.1"),
        ({"seed": 1.0}, TypeError, "seed must be an integer or None, got 1.0"),
        ({"stop": ["a", ""]}, ValueError, "stop has an empty string in it"),
        ({"stop": ""}, ValueError, "stop has an empty string in it"),
        ({"stop": 3}, TypeError, "stop must be a string or a list of strings, got 3"),
        ({"stop": [3]}, TypeError, "stop must be a string or a list of strings, got 3 in it"),
        ({"stop": "a", "detokenize": False}, ValueError, "set detokenize=True, or use stop_token_ids"),
        ({"stop_token_ids": 3}, TypeError, "stop_token_ids must be a list of token ids, got 3"),
        ({"stop_token_ids": "3"}, TypeError, "stop_token_ids must be a list of token ids, got '3'"),
        ({"stop_token_ids": [3.0]}, TypeError, "every item of stop_token_ids must be an integer, got 3.0"),
        ({"stop_token_ids": [3, -1]}, ValueError, "stop_token_ids must not be negative, got -1"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, or None for as many as the model's length"),
        ({"max_tokens": 2.0}, TypeError, "max_tokens must be an integer or None, got 2.0"),
        ({"min_tokens": -1}, ValueError, "min_tokens must be at least 0, got -1"),
        ({"min_tokens": 17}, ValueError, "min_tokens must be at most max_tokens=16, got 17"),
        ({"ignore_eos": 1}, TypeError, "ignore_eos must be True or False, got 1"),
        ({"max_new_tokens": 5}, TypeError, "max_new_tokens"),
    ],
)
def test_refuses(kwargs: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        SamplingParams(**kwargs)


def test_one_form_for_each_value() -> None:
    params = SamplingParams(stop="a", stop_token_ids=[3, np.int64(3), 2], top_k=-1, seed=-1)
    assert (params.stop, params.stop_token_ids, params.top_k, params.seed) == (("a",), (3, 2), 0, None)
    assert (SamplingParams().stop, SamplingParams().stop_token_ids) == ((), ())
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    # Frozen, hashable, and made anew from itself.
    assert dataclasses.replace(params, stop_token_ids=(2,)).stop == ("a",)
    assert hash(params) == hash(SamplingParams(stop=["a"], stop_token_ids=[3, 2]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_numpy_values() -> None:
    """They count as the numbers they are, and are stored as Python's, which do not overflow."""
    given = SamplingParams(
        n=np.int64(2), top_k=np.int32(5), seed=np.int64(4), max_tokens=np.uint8(9), min_tokens=np.int8(1),
        stop_token_ids=np.array([1, 2]), temperature=np.float32(0.5), top_p=np.float64(0.5))
    assert given == SamplingParams(n=2, top_k=5, seed=4, max_tokens=9, min_tokens=1, stop_token_ids=(1, 2), temperature=0.5,
                                   top_p=0.5)
    integers = (given.n, given.top_k, given.seed, given.max_tokens, given.min_tokens, *given.stop_token_ids)
    assert {type(v) for v in integers} == {int}
    assert SamplingParams(seed=np.int64(-1), top_k=np.int64(-1)) == SamplingParams()
    SamplingParams(repetition_penalty=np.float64(1), spaces_between_special_tokens=np.True_)  # at their defaults


@pytest.mark.parametrize(("name", "value"), [
    ("logprobs", np.int64(0)), ("bad_words", np.array(["x", "y"])), ("bad_words", np.array([])),
    ("presence_penalty", np.zeros(2)),
])
def test_unsupported_numpy_value_is_refused_by_name(name, value) -> None:
    with pytest.raises(ValueError, match=f"quire does not have {name} and will not ignore it"):
        SamplingParams(**{name: value})


def test_largest_temperature() -> None:
    largest = SamplingParams(temperature=float(np.finfo(np.float32).max)).temperature
    assert np.isfinite(np.float32(largest))


def test_greedy() -> None:
    assert SamplingParams(temperature=0).greedy and not SamplingParams().greedy
    SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1)  # without effect, as in vLLM


def test_min_tokens_without_a_maximum() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=1000).min_tokens == 1000


def from_config(overrides: dict | None = None, **options: object) -> tuple[SamplingParams, list[str]]:
    return SamplingParams.from_generation_config(GenerationConfig(**options), **(overrides or {}))


def test_generation_config_defaults_are_those_of_generate() -> None:
    assert from_config() == (SamplingParams(temperature=0, max_tokens=20), [])
    assert from_config(do_sample=True) == (SamplingParams(top_k=50, max_tokens=20), [])
    empty = SamplingParams.from_generation_config(SimpleNamespace())
    assert empty == (SamplingParams(temperature=0, max_tokens=20), [])


def test_generation_config_options() -> None:
    params, unsupported = from_config(
        do_sample=True, temperature=0.7, top_k=0, top_p=0.9, min_p=0.05, max_new_tokens=7, min_new_tokens=2,
        stop_strings=["a", "b"], eos_token_id=[5, 6], num_return_sequences=3,
    )
    assert unsupported == []
    assert params == SamplingParams(
        n=3, temperature=0.7, top_k=0, top_p=0.9, min_p=0.05, max_tokens=7, min_tokens=2, stop=["a", "b"],
        stop_token_ids=[5, 6], ignore_eos=True,
    )
    assert from_config(eos_token_id=5)[0].stop_token_ids == (5,)
    nothing_ends_it = from_config(eos_token_id=-1)[0]
    assert (nothing_ends_it.stop_token_ids, nothing_ends_it.ignore_eos) == ((), True)


def test_generation_config_greedy_ignores_the_sampling_options() -> None:
    options = {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5, "top_h": 0.5}
    assert from_config(do_sample=False, **options) == (SamplingParams(temperature=0, max_tokens=20), [])
    # A temperature of one's own means sampling: then they count.
    params, unsupported = from_config({"temperature": 0.3}, **options)
    assert params == SamplingParams(temperature=0.3, top_k=3, top_p=0.5, min_p=0.1, max_tokens=20)
    assert unsupported == ["top_h", "typical_p"]


def test_generation_config_lengths_that_count_the_prompt() -> None:
    config = GenerationConfig(max_length=30, min_length=12)
    assert SamplingParams.from_generation_config(config)[1] == ["max_length", "min_length"]
    assert SamplingParams.from_generation_config(config, max_tokens=9, min_tokens=0)[1] == []
    params, unsupported = SamplingParams.from_generation_config(config, prompt_length=10)
    assert (params.max_tokens, params.min_tokens, unsupported) == (20, 2, [])
    params, unsupported = SamplingParams.from_generation_config(config, prompt_length=15)
    assert (params.max_tokens, params.min_tokens, unsupported) == (15, 0, [])
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        SamplingParams.from_generation_config(config, prompt_length=30)
    # max_new_tokens and min_new_tokens win over them.
    config = GenerationConfig(max_length=30, min_length=12, max_new_tokens=4, min_new_tokens=6)
    params, unsupported = SamplingParams.from_generation_config(config)
    assert (params.max_tokens, params.min_tokens, unsupported) == (4, 4, [])  # generate stops at the maximum, too


REFUSED_VALUES = {
    "num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5, "constraints": ["x"], "force_words_ids": [[1]],
    "dola_layers": "low", "penalty_alpha": 0.6, "assistant_ensemble_weight": 0.5, "is_assistant": True,
    "repetition_penalty": 1.1, "encoder_repetition_penalty": 1.1, "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2, "bad_words_ids": [[3]], "forced_bos_token_id": 0, "forced_eos_token_id": 0,
    "remove_invalid_values": True, "exponential_decay_length_penalty": (1, 1.1), "suppress_tokens": [1],
    "begin_suppress_tokens": [1], "sequence_bias": [[[1], 0.5]], "token_healing": True, "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.0}, "top_h": 0.4, "typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1,
    "max_time": 1.0, "output_attentions": True, "output_hidden_states": True, "output_scores": True,
    "output_logits": True,
}
NEEDS = {
    "early_stopping": {"num_beams": 2}, "length_penalty": {"num_beams": 2}, "top_h": {"do_sample": True},
    "typical_p": {"do_sample": True}, "epsilon_cutoff": {"do_sample": True}, "eta_cutoff": {"do_sample": True},
    "output_attentions": {"return_dict_in_generate": True}, "output_hidden_states": {"return_dict_in_generate": True},
    "output_scores": {"return_dict_in_generate": True}, "output_logits": {"return_dict_in_generate": True},
}


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_generation_config_names_what_it_cannot_honour(name: str) -> None:
    assert from_config(**{name: REFUSED_VALUES[name]}, **NEEDS.get(name, {}))[1] == [name]


def test_generation_config_beams() -> None:
    assert from_config(num_beams=2, early_stopping=True, length_penalty=2.0)[1] == [
        "num_beams", "early_stopping", "length_penalty"]
    assert from_config(early_stopping=True, length_penalty=2.0)[1] == []


def test_generation_config_contrastive_search_is_greedy_only() -> None:
    assert from_config(penalty_alpha=0.6, do_sample=True)[1] == []
    assert from_config(penalty_alpha=0.6, top_k=1)[1] == []


def test_generation_config_values_without_effect() -> None:
    defaults = GenerationConfig._get_default_generation_params()
    defaults.pop("max_length")
    assert from_config(**defaults)[1] == []
    assert from_config(**{**defaults, "do_sample": True})[1] == []
    neutral = {"bad_words_ids": [], "suppress_tokens": [], "begin_suppress_tokens": [], "guidance_scale": 1.0,
               "renormalize_logits": True, "use_cache": False, "prompt_lookup_num_tokens": 3}
    assert from_config(**neutral)[1] == []


def test_generation_config_override_of_a_refused_option() -> None:
    assert from_config({"repetition_penalty": 1.0}, repetition_penalty=1.3)[1] == []
    with pytest.raises(ValueError, match="quire does not have repetition_penalty"):
        from_config({"repetition_penalty": 1.3})
    with pytest.raises(TypeError, match="max_new_tokens"):
        from_config({"max_new_tokens": 3})


def test_every_option_of_the_installed_transformers_is_known() -> None:
    """When this fails, transformers has a new option: put it in one of the two tables of sampling_params.py."""
    known = sampling_params._HF_REFUSED.keys() | sampling_params._HF_ACCEPTED
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert names <= known
    assert not sampling_params._HF_REFUSED.keys() & sampling_params._HF_ACCEPTED
    assert REFUSED_VALUES.keys() | {"early_stopping", "length_penalty"} == sampling_params._HF_REFUSED.keys()


def test_options_of_a_newer_transformers_are_named() -> None:
    class NewerConfig:
        def __init__(self) -> None:
            self.new_warper: float | None = None
            self.other_warper: float | None = None

    config = NewerConfig()
    config.new_warper = 0.5
    assert SamplingParams.from_generation_config(config)[1] == ["new_warper"]
    # Keys that a model repository adds to generation_config.json are no options: generate does not read them.
    assert from_config(chat_format="chatml")[1] == []
