"""Requests to an engine on a CPU: what they may be, how they end, and that a bad one loses no other."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from quire import Engine, SamplingParams
from quire.graph_runner.sampling_params import GenerateParams
from tests.tiny import GREEDY, PROMPTS, SAMPLED, assert_idle, hf_greedy, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

# -- what a prompt may be, and what comes back


def test_outputs(engine, tokenizer, prompts, expected) -> None:
    by_text, by_ids = engine.generate(list(PROMPTS[:2]), GREEDY), engine.generate(prompts[:2], GREEDY)
    assert tokens(by_text) == tokens(by_ids) == expected[:2]
    assert [o.index for o in by_text] == [0, 1]
    assert [o.prompt for o in by_text] == list(PROMPTS[:2]) and [o.prompt for o in by_ids] == [None, None]
    assert [o.prompt_token_ids for o in by_text] == prompts[:2]
    assert [o.text for o in by_text] == [tokenizer.decode(t) for t in expected[:2]]
    assert {o.finish_reason for o in by_text} == {"length"} and {o.stop_reason for o in by_text} == {None}
    assert engine.generate([]) == list(engine.stream([], [])) == []


def test_params_for_each_prompt(engine, prompts, expected, sampled) -> None:
    each = [replace(GREEDY, max_tokens=1), SAMPLED, GREEDY]
    one, two, three = tokens(engine.generate(prompts[:3], each))
    assert (one, two, three) == (expected[0][:1], sampled[1], expected[2])
    with pytest.raises(ValueError, match="2 prompts but 1 SamplingParams; give one for all or one for each"):
        engine.generate(prompts[:2], [GREEDY])
    assert len(engine.generate(prompts[0])[0].token_ids) == SamplingParams().max_tokens


def test_seeds(engine, prompts, one_layer) -> None:
    params = [replace(SAMPLED, seed=s, ignore_eos=True) for s in (1, 2, 3, -5, 2**70)]
    several = tokens(engine.generate([prompts[0]] * 5, params))
    assert len(set(map(tuple, several))) == 5
    assert tokens(engine.generate([prompts[0]] * 5, params)) == several
    unseeded = SamplingParams(temperature=2, max_tokens=20, ignore_eos=True)
    assert len(set(map(tuple, tokens(engine.generate([prompts[0]] * 4, unseeded))))) == 4
    params, seen = SamplingParams(max_tokens=20, ignore_eos=True), []
    for seed in (5, 5, 6):
        with Engine(one_layer, num_pages=40, max_num_seqs=4, cudagraph_capture_sizes=[], seed=seed) as engine:
            seen.append(tokens(engine.generate([[3, 4], [5]], params)))
    assert seen[0] == seen[1] != seen[2]


def test_extreme_sampling_params(engine, prompts, expected) -> None:
    extremes = [dict(top_k=2**40), dict(temperature=1e-7), dict(temperature=1e30), dict(top_p=1e-9), dict(min_p=1.0)]
    outputs = tokens(engine.generate([prompts[0]] * 5, [replace(SAMPLED, **e) for e in extremes]))
    assert [outputs[i] for i in (1, 3, 4)] == [expected[0]] * 3  # only the likeliest token is left
    assert all(0 <= t < 1848 for row in outputs for t in row)


def test_n(engine, prompts, sampled) -> None:
    outputs = engine.generate(prompts[:2], replace(SAMPLED, n=3))
    assert [(o.index, o.prompt_token_ids) for o in outputs] == [(0, prompts[0]), (1, prompts[1])]
    assert [o.token_ids for o in outputs] == sampled[:2]  # the first of n is the one there is with n = 1
    assert len(set(map(tuple, tokens(outputs)))) == 6
    assert tokens(engine.generate(prompts[:2], replace(SAMPLED, n=3))) == tokens(outputs)


# -- how requests end


@pytest.fixture(scope="module")
def ended(model, prompts) -> list[int]:
    """The greedy continuation of the first prompt, up to and with the end token."""
    found = hf_greedy(model, prompts[0], 200)
    assert found[-1] == model.config.eos_token_id, "this prompt's continuation does not end; choose another"
    return found


def test_end_token(engine, model, tokenizer, prompts, ended) -> None:
    found = ended
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=None))
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (found, "stop", None)
    assert output.text == tokenizer.decode(found[:-1])
    with_it = replace(GREEDY, max_tokens=None, skip_special_tokens=False, include_stop_str_in_output=True)
    (output,) = engine.generate(prompts[0], with_it)
    assert output.text == tokenizer.decode(found) and output.text.endswith("<|endoftext|>")
    longer = len(found) + 4
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=longer, ignore_eos=True))
    assert (output.finish_reason, len(output.token_ids)) == ("length", longer)
    assert output.token_ids[: len(found)] == found
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=longer, min_tokens=longer))
    assert (output.finish_reason, len(output.token_ids)) == ("length", longer)
    assert model.config.eos_token_id not in output.token_ids
    # The step launched too many is dropped, also while others run on.
    found = ended
    with Engine(model, tokenizer, num_pages=60, max_num_seqs=4, async_stepping=True) as engine:
        outputs = engine.generate([prompts[0], prompts[1], prompts[0]], replace(GREEDY, max_tokens=len(found) + 30))
        assert [outputs[0].token_ids, outputs[2].token_ids] == [found, found]
        assert [outputs[0].finish_reason, outputs[2].finish_reason] == ["stop", "stop"]
        assert outputs[1].token_ids == hf_greedy(model, prompts[1], len(found) + 30)
        assert_idle(engine)


def test_stop_tokens(engine, tokenizer, prompts, expected) -> None:
    token = expected[0][6]
    at = expected[0].index(token)
    params = replace(GREEDY, stop_token_ids=[token, 1])
    (output,) = engine.generate(prompts[0], params)
    assert output.token_ids == expected[0][: at + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", token)
    assert output.text == tokenizer.decode(expected[0][:at])
    # Before min_tokens it is not even chosen; from then on it ends the request.
    (output,) = engine.generate(prompts[0], replace(params, min_tokens=at + 3))
    assert output.token_ids[:at] == expected[0][:at] and token not in output.token_ids[: at + 2]


@pytest.mark.parametrize(("of", "found"), [(SamplingParams, False), (GenerateParams, True)])
def test_the_end_token_that_is_ignored_does_not_come_before_min_tokens(of, found, engine, tokenizer, prompts) -> None:
    """As in vLLM; in transformers' generate only the end tokens of the call do not."""
    eos = tokenizer.eos_token_id
    params = of(max_tokens=4, min_tokens=3, temperature=0, ignore_eos=True, logit_bias={eos: 1e4})
    (output,) = engine.generate(prompts[0], params)
    assert (eos in output.token_ids[:3]) == found and output.token_ids[3] == eos


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_text_of_a_stop_token(include, skip, engine, tokenizer, prompts, expected) -> None:
    """vLLM's rule: in the text only with include_stop_str_in_output; and then a special one as skip_special_tokens says."""
    at = expected[0].index(expected[0][6])
    options = dict(include_stop_str_in_output=include, skip_special_tokens=skip)
    (output,) = engine.generate(prompts[0], replace(GREEDY, stop_token_ids=[expected[0][6]], **options))
    assert output.text == tokenizer.decode(expected[0][: at + include])
    eos = tokenizer.eos_token_id
    (output,) = engine.generate(prompts[0], replace(GREEDY, logit_bias={eos: 1e4}, **options))
    assert (output.token_ids, output.text) == ([eos], tokenizer.eos_token if include and not skip else "")


@pytest.mark.parametrize("ignore", [False, True])
def test_the_end_token_as_a_stop_token(ignore, engine, tokenizer, prompts) -> None:
    """Where it does not end a request by itself, it is the stop token that did."""
    eos = tokenizer.eos_token_id
    (output,) = engine.generate(prompts[0], replace(GREEDY, logit_bias={eos: 1e4}, stop_token_ids=[eos], ignore_eos=ignore))
    assert (output.finish_reason, output.stop_reason) == ("stop", eos if ignore else None)


def test_max_tokens(engine, prompts, expected) -> None:
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=1))
    assert (output.token_ids, output.finish_reason) == (expected[0][:1], "length")
    long = (prompts[3] * 10)[:280]
    (output,) = engine.generate(long, replace(GREEDY, max_tokens=None, ignore_eos=True))
    assert len(long) + len(output.token_ids) == engine.max_model_len == 300
    assert output.finish_reason == "length"
    (output,) = engine.generate(prompts[0], replace(GREEDY, detokenize=False))
    assert (output.token_ids, output.text) == (expected[0], "")


def stop_text(tokenizer, found: list[int]) -> tuple[str, str]:
    """A text and a string in it that begins and ends inside of tokens and spans several."""
    text = tokenizer.decode(found)
    third = len(tokenizer.decode(found[:3]))
    stop = text[third - 1 : third + 9]
    assert text.count(stop) == 1
    return text, stop


@pytest.mark.parametrize("include", [False, True])
def test_stop_string(include, engine, tokenizer, prompts, expected) -> None:
    text, stop = stop_text(tokenizer, expected[0])
    params = replace(GREEDY, stop=["nowhere", stop], include_stop_str_in_output=include)
    events = list(engine.stream(prompts[0], params))
    output = events[-1].output
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == text[: text.index(stop) + len(stop) * include]
    assert "".join(e.text for e in events) == output.text  # what was streamed is never taken back
    assert output.token_ids == expected[0][: len(output.token_ids)]
    assert stop in tokenizer.decode(output.token_ids) and stop not in tokenizer.decode(output.token_ids[:-1])


def test_stop_strings_that_do_not_end_it(engine, tokenizer, prompts, expected) -> None:
    text, stop = stop_text(tokenizer, expected[0])
    almost = stop[:-1] + "\x00"  # text that waits for it must still come out
    events = list(engine.stream(prompts[0], replace(GREEDY, stop=[almost, text[-3:] + "\x00"])))
    assert "".join(e.text for e in events) == events[-1].output.text == text
    assert events[-1].output.finish_reason == "length"
    early = replace(GREEDY, stop=stop, min_tokens=GREEDY.max_tokens)
    assert engine.generate(prompts[0], early)[0].text == text


def test_a_stop_string_that_ends_in_the_last_token_of_the_minimum(engine, tokenizer, prompts, expected) -> None:
    """It comes too early, as in vLLM; one that ends in the token after it counts."""
    text, stop = stop_text(tokenizer, expected[0])
    count = len(engine.generate(prompts[0], replace(GREEDY, stop=stop))[0].token_ids)
    assert engine.generate(prompts[0], replace(GREEDY, stop=stop, min_tokens=count))[0].text == text
    assert engine.generate(prompts[0], replace(GREEDY, stop=stop, min_tokens=count - 1))[0].stop_reason == stop


# -- what cannot be served: said clearly, and nothing else is touched


@pytest.mark.parametrize(("prompt", "message"), [
    ([], "the prompt is empty; give at least one token"), ("", "the prompt is empty"),
    (list(range(3, 303)), "the prompt has 300 tokens; a request may have 300, prompt and continuation"),
    ([3, 1848], r"token ids \[1848\] are outside the vocabulary of 1848 tokens"),
    ([-1, 5], r"token ids \[-1\] are outside the vocabulary"), (None, "a prompt is text or a list of token ids, got 'None'"),
])
def test_bad_prompt(prompt, message, engine, prompts, expected) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        engine.add_request(prompt, GREEDY)
    with pytest.raises((ValueError, TypeError), match=message):
        list(engine.stream([prompt], GREEDY))
    good, bad, good_too = engine.generate([prompts[0], prompt, prompts[1]], GREEDY)
    assert tokens([good, good_too]) == expected[:2]
    assert (bad.index, bad.finish_reason, bad.token_ids) == (1, "error", [])
    with pytest.raises(ValueError, match=message):
        raise ValueError(bad.error)


@pytest.mark.parametrize("raise_on_error", [True, False, None])
def test_raise_on_error(raise_on_error, engine, prompts, expected, caplog) -> None:
    """A failed request is seen: as an exception, or in the log beside the results of the others."""
    run = functools.partial(engine.generate, params=GREEDY, raise_on_error=raise_on_error)
    if raise_on_error:
        with pytest.raises(ValueError, match="the prompt is empty"):
            run([prompts[0], [], prompts[1]])
    else:
        good, bad, good_too = run([prompts[0], [], prompts[1]])
        assert tokens([good, good_too]) == expected[:2] and "the prompt is empty" in bad.error
        assert "request 1 failed: the prompt is empty; give at least one token" in caplog.messages
    if raise_on_error is False:
        assert "the prompt is empty" in run([[]])[0].error
    else:
        with pytest.raises(ValueError, match="the prompt is empty"):
            run([[]])
    assert_idle(engine)


def test_text_without_a_tokenizer(one_layer) -> None:
    with Engine(one_layer, num_pages=40, max_num_seqs=2, cudagraph_capture_sizes=[]) as engine:
        with pytest.raises(TypeError, match="the prompt is text, but the engine has no tokenizer; pass one, or give"):
            engine.add_request("hello", GREEDY)
        with pytest.raises(ValueError, match="stop strings need text, and the engine has no tokenizer"):
            engine.add_request([3, 4], replace(GREEDY, stop="x"))
        with pytest.raises(ValueError, match="bad_words need text, and the engine has no tokenizer; pass one, or give"):
            engine.add_request([3], SamplingParams(bad_words=["x"]))
        (output,) = engine.generate([3, 4], GREEDY)
        assert len(output.token_ids) > 0 and output.text == ""


def test_out_of_memory_in_a_step(engine, prompts, expected, monkeypatch) -> None:
    launch, calls = engine.runner.launch, Counter()

    def fails(batch):
        calls["launch"] += 1
        if calls["launch"] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(batch)

    monkeypatch.setattr(engine.runner, "launch", fails)
    outputs = engine.generate(prompts[:2], GREEDY)
    assert [o.finish_reason for o in outputs] == ["error", "error"]
    assert [o.token_ids for o in outputs] == [e[:2] for e in expected[:2]]
    assert all("out of GPU memory in a step of 2 tokens: CUDA out of memory. Lower max_num_batched_tokens" in o.error
               for o in outputs)
    assert_idle(engine)
    assert tokens(engine.generate(prompts[:2], GREEDY)) == expected[:2]
