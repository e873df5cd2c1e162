"""SamplingParams: vLLM's defaults, ranges, and refusals by name."""

import dataclasses
import re

import numpy as np
import pytest

from quire.graph_runner.sampling_params import SamplingParams

SUPPORTED = {
    "n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.5, "seed": 1, "stop": "x", "stop_token_ids": [1],
    "ignore_eos": True, "max_tokens": None, "min_tokens": 3, "detokenize": False, "skip_special_tokens": False,
    "include_stop_str_in_output": True, "logprobs": 0, "prompt_logprobs": 1, "logprob_token_ids": [4],
    "logprobs_mode": "processed_logprobs", "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1,
    "trace_decode_token_ids": [3], "bad_words": ["x"], "logit_bias": {1: 2.0}, "allowed_token_ids": [4],
    "logits_processors": [max], "truncate_prompt_tokens": 8,
}
UNSUPPORTED = {"spaces_between_special_tokens": False, "best_of": 2, "extra_args": {}, "output_kind": 2,
               "structured_outputs": {"regex": "a"}}


def test_defaults_are_vllms() -> None:
    assert {field.name: field.default for field in dataclasses.fields(SamplingParams)} == {
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": None, "stop_token_ids": None, "ignore_eos": False,
        "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "detokenize": True,
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
        "bad_words": None, "logit_bias": None, "truncate_prompt_tokens": None, "logprob_token_ids": None,
        "logprobs_mode": "raw_logprobs", "trace_decode_token_ids": None, "allowed_token_ids": None, "logits_processors": None,
        "best_of": None, "extra_args": None, "output_kind": None, "structured_outputs": None,
    }


def test_every_field_is_supported_or_refused() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == SUPPORTED.keys() | UNSUPPORTED.keys()
    for name, value in SUPPORTED.items():
        SamplingParams(**{name: value})
    assert all(name in SamplingParams.__doc__ for name in names)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_field_is_refused_by_name(name: str) -> None:
    message = f"{name}={UNSUPPORTED[name]!r}: quire does not support {name}; leave it at its"
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        SamplingParams(**{name: UNSUPPORTED[name]})
    assert all(supported in str(caught.value) for supported in SUPPORTED)


def test_values_at_the_edges() -> None:
    SamplingParams(spaces_between_special_tokens=True, structured_outputs=None)
    largest = SamplingParams(temperature=float(np.finfo(np.float32).max)).temperature
    assert np.isfinite(np.float32(largest))
    assert SamplingParams(temperature=0).greedy and not SamplingParams().greedy
    SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1)  # without effect, as in vLLM
    assert SamplingParams(max_tokens=None, min_tokens=1000).min_tokens == 1000
    with pytest.raises(ValueError, match="quire does not support best_of"):
        SamplingParams(best_of=np.array([3]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"n": 0}, ValueError, "n must be at least 1, got 0"), ({"n": 1.0}, TypeError, "n must be an integer, got 1.0"),
        ({"logprobs": -2}, ValueError, "logprobs must be at least 0, -1 for the whole vocabulary, or None for none, got -2"),
        ({"truncate_prompt_tokens": -1}, ValueError, "truncate_prompt_tokens must be at least 1, or None to keep the prompt"),
        ({"prompt_logprobs": 1.5}, TypeError, "prompt_logprobs must be an integer or None, got 1.5"),
        ({"logprob_token_ids": [-1]}, ValueError, "logprob_token_ids must not be negative, got -1"),
        ({"logprob_token_ids": ["x"]}, TypeError, "every item of logprob_token_ids must be an integer, got 'x'"),
        ({"logprobs_mode": "raw"}, ValueError, "logprobs_mode must be one of 'raw_logprobs', 'processed_logprobs', got 'raw'"),
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
        ({"stop": ["a", ""]}, ValueError, "stop contains an empty string"),
        ({"stop": ""}, ValueError, "stop contains an empty string"),
        ({"stop": 3}, TypeError, "stop must be a string or a list of strings, got 3"),
        ({"stop": [3]}, TypeError, "stop must be a string or a list of strings, got 3 in it"),
        ({"stop": "a", "detokenize": False}, ValueError, "set detokenize=True, or use stop_token_ids"),
        ({"stop_token_ids": 3}, TypeError, "stop_token_ids must be a list of token ids, got 3"),
        ({"stop_token_ids": "3"}, TypeError, "stop_token_ids must be a list of token ids, got '3'"),
        ({"stop_token_ids": [3.0]}, TypeError, "every item of stop_token_ids must be an integer, got 3.0"),
        ({"stop_token_ids": [3, -1]}, ValueError, "stop_token_ids must not be negative, got -1"),
        ({"presence_penalty": 2.5}, ValueError, "presence_penalty must be in [-2, 2], got 2.5"),
        ({"frequency_penalty": float("nan")}, ValueError, "frequency_penalty must be in [-2, 2], got nan"),
        ({"frequency_penalty": "1"}, TypeError, "frequency_penalty must be a number, got '1'"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be a finite number above 0 (1 is off), got 0"),
        ({"repetition_penalty": float("inf")}, ValueError, "repetition_penalty must be a finite number above 0"),
        ({"presence_penalty": np.zeros(2)}, TypeError, "presence_penalty must be a number"),
        ({"bad_words": "x"}, TypeError, "bad_words must be a list of strings, got 'x'"),
        ({"bad_words": [3]}, TypeError, "bad_words must be a list of strings, got 3 in it"),
        ({"bad_words": [" "]}, ValueError, "bad_words contains an empty string"),
        ({"logit_bias": [1]}, TypeError, "logit_bias must be a dict of numbers by token id, got [1]"),
        ({"logit_bias": {"1": 2.0}}, TypeError, "every key of logit_bias must be an integer, got '1'"),
        ({"logit_bias": {1: "x"}}, TypeError, "every value of logit_bias must be a number, got 'x'"),
        ({"logit_bias": {1: float("inf")}}, ValueError, "logit_bias must have finite numbers and token ids that are not"),
        ({"logit_bias": {-1: 1.0}}, ValueError, "token ids that are not negative, got -1: 1.0"),
        ({"allowed_token_ids": [-1]}, ValueError, "allowed_token_ids must not be negative, got -1"),
        ({"trace_decode_token_ids": 3}, TypeError, "trace_decode_token_ids must be a list of token ids, got 3"),
        ({"trace_decode_token_ids": [3], "n": 2}, ValueError, "n must be 1 with trace_decode_token_ids, got 2"),
        ({"logits_processors": [3]}, TypeError, "logits_processors must be a list of functions, got 3 in it"),
        ({"logits_processors": max}, TypeError, "logits_processors must be a list of functions, got <built-in"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, or None for no limit but the model's length"),
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
    hash(SamplingParams(logit_bias={3: 1.0}, logits_processors=[[].append]))
    assert SamplingParams(allowed_token_ids=[3, 3], logit_bias={}) == SamplingParams(allowed_token_ids=(3,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    # They count as the numbers they are, and are stored as Python's, which do not overflow.
    given = SamplingParams(
        n=np.int64(2), top_k=np.int32(5), seed=np.int64(4), max_tokens=np.uint8(9), min_tokens=np.int8(1),
        stop_token_ids=np.array([1, 2]), temperature=np.float32(0.5), top_p=np.float64(0.5))
    assert given == SamplingParams(n=2, top_k=5, seed=4, max_tokens=9, min_tokens=1, stop_token_ids=(1, 2), temperature=0.5,
                                   top_p=0.5)
    more = SamplingParams(logit_bias={np.int64(3): np.float32(0.5)}, trace_decode_token_ids=np.array([3, 3]))
    assert more == SamplingParams(logit_bias={3: 0.5}, trace_decode_token_ids=[3, 3])
    integers = (given.n, given.top_k, given.seed, given.max_tokens, given.min_tokens, *given.stop_token_ids)
    assert {type(v) for v in integers} == {int}
    assert SamplingParams(seed=np.int64(-1), top_k=np.int64(-1)) == SamplingParams()
    SamplingParams(repetition_penalty=np.float64(1), spaces_between_special_tokens=np.True_)  # at their defaults
