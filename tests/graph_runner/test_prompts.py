"""What counts as a prompt, as many prompts, and as params; and what is said of those that are none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.graph_runner.prompts import as_prompts, pairs_of, params_of, token_ids_of
from quire.graph_runner.sampling_params import SamplingParams

IDS = [5, 6, 7]


def served(prompts) -> list[list[int]]:
    return [token_ids_of(p, None, 100, 50) for p in as_prompts(prompts)]


@pytest.mark.parametrize("prompt", [
    IDS, tuple(IDS), np.array(IDS), torch.tensor(IDS), list(np.array(IDS)), list(torch.tensor(IDS)),
    tuple(np.array(IDS, np.uint8)),
], ids=lambda p: type(p).__name__)
def test_one_prompt(prompt) -> None:
    assert served(prompt) == [IDS]
    assert served([prompt]) == [IDS]
    assert served([prompt, prompt]) == [IDS, IDS]
    assert all(type(i) is int for i in served(prompt)[0])


def test_prompts_of_one_token() -> None:
    """A tensor of one token is a prompt and no token, though it can be made an index."""
    assert served([torch.tensor([3]), torch.tensor([4])]) == served([np.array([3]), np.array([4])]) == [[3], [4]]
    assert served(torch.tensor([[3], [4]])) == served([[3], [4]]) == [[3], [4]]
    assert as_prompts([]) == []
    assert as_prompts("text") == ["text"] and as_prompts(["text", "more"]) == ["text", "more"]


@pytest.mark.parametrize("prompt", [None, 5, [1.5, 2], torch.tensor([0.5]), [torch.tensor(0.5)], [None], b"Once",
                                    bytearray(b"Once"), {"prompt": b"Once"}], ids=str)
def test_what_is_no_prompt(prompt) -> None:
    with pytest.raises(TypeError, match="a prompt is text or a list of token ids, got ['\"]"):
        token_ids_of(prompt, None, 100, 50)


def test_text_that_cannot_be_a_prompt(tokenizer) -> None:
    """As bytes become that are not UTF-8 on a standard input that takes any."""
    broken = b"ab\xff".decode("utf-8", "surrogateescape")
    with pytest.raises(ValueError, match=r"the prompt is not valid text: character 2 is '\\udcff', half of a surrogate pair"):
        token_ids_of(broken, tokenizer, 1848, 50)
    assert token_ids_of("ab", tokenizer, 1848, 50) == tokenizer("ab")["input_ids"]
    backend = tokenizer.backend_tokenizer  # of the tokenizers package
    with pytest.raises(TypeError, match="the prompt is text, and the tokenizer, .*Tokenizer, cannot be called with it"):
        token_ids_of("ab", backend, 1848, 50)
    assert token_ids_of([1, 2], backend, 1848, 50) == [1, 2]


def test_params() -> None:
    one, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert params_of(None) == SamplingParams() and params_of(one) is one
    assert pairs_of(["a", "b"], one) == [("a", one), ("b", one)]
    assert pairs_of(["a", "b"], [one, two]) == pairs_of(["a", "b"], (one, two)) == [("a", one), ("b", two)]
    assert pairs_of(["a", "b"], None) == pairs_of(["a", "b"], [None, None]) == [(p, SamplingParams()) for p in "ab"]
    assert pairs_of([], []) == pairs_of([], None) == []
    with pytest.raises(ValueError, match="2 prompts but 1 SamplingParams; give one for all or one for each"):
        pairs_of(["a", "b"], [one])


@pytest.mark.parametrize(("params", "message"), [
    ({"max_tokens": 3, "stop": "x"},
     r"params must be SamplingParams, got \"{'max_tokens': 3, .*; write SamplingParams\(max_tokens=3, stop='x'\)"),
    ({}, r"params must be SamplingParams, got '{}'; write SamplingParams\(\)"),
    (3, r"params must be SamplingParams, got '3'; write SamplingParams\(max_tokens=16\)"),
    ("ab", "params must be SamplingParams, got 'ab'"),
    (SamplingParams, "params must be SamplingParams, got \"<class"),
])
def test_what_is_no_params(params, message) -> None:
    for prompts, given in ((["a", "b"], params), (["a", "b"], [SamplingParams(), params]), ([], params)):
        with pytest.raises(TypeError, match=message):
            pairs_of(prompts, given)
    with pytest.raises(TypeError, match=message):
        params_of(params)
