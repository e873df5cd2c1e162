"""Requests to an engine on a CPU: what they may be, how they end, and that a bad one loses no other."""

from __future__ import annotations

import functools
import gc
import time
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from quire.graph_runner.engine import Engine
from quire.graph_runner.gc_freeze import ServingFreeze
from quire.graph_runner.sampling_params import SamplingParams
from tests.tiny import GREEDY, PROMPTS, SAMPLED, assert_idle, hf_greedy, tokens


@pytest.fixture(scope="module")
def shared_engine(model, tokenizer):
    with Engine(model, tokenizer, num_pages=120, max_num_seqs=8, max_model_len=300, async_stepping=False,
                cudagraph_capture_sizes=[1, 2, 4, 8]) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    """One engine for all tests that do not need their own; every test must leave it idle."""
    yield shared_engine
    assert_idle(shared_engine)


# -- what a prompt may be, and what comes back


def test_outputs(engine, tokenizer, prompts, expected) -> None:
    by_text, by_ids = engine.generate(list(PROMPTS[:2]), GREEDY), engine.generate(prompts[:2], GREEDY)
    assert tokens(by_text) == tokens(by_ids) == expected[:2]
    assert [o.index for o in by_text] == [0, 1]
    assert [o.prompt for o in by_text] == list(PROMPTS[:2]) and [o.prompt for o in by_ids] == [None, None]
    assert [o.prompt_token_ids for o in by_text] == prompts[:2]
    assert [o.text for o in by_text] == [tokenizer.decode(t) for t in expected[:2]]
    assert {o.finish_reason for o in by_text} == {"length"} and {o.stop_reason for o in by_text} == {None}


@pytest.mark.parametrize("kind", ["str", "tuple", "array", "tensor", "arrays", "list of one"])
def test_one_prompt_in_many_forms(kind, engine, prompts, expected) -> None:
    prompt = {
        "str": PROMPTS[0], "tuple": tuple(prompts[0]), "array": np.array(prompts[0]),
        "tensor": torch.tensor(prompts[0]), "arrays": [np.array(prompts[0], np.int32)], "list of one": [PROMPTS[0]],
    }[kind]
    assert tokens(engine.generate(prompt, GREEDY)) == [expected[0]]


def test_no_prompts(engine) -> None:
    assert engine.generate([]) == []
    assert list(engine.stream([], [])) == []


def test_params_for_each_prompt(engine, prompts, expected, sampled) -> None:
    each = [replace(GREEDY, max_tokens=1), SAMPLED, GREEDY]
    one, two, three = tokens(engine.generate(prompts[:3], each))
    assert (one, two, three) == (expected[0][:1], sampled[1], expected[2])
    with pytest.raises(ValueError, match="2 prompts but 1 SamplingParams; give one for all or one for each"):
        engine.generate(prompts[:2], [GREEDY])
    assert len(engine.generate(prompts[0])[0].token_ids) == SamplingParams().max_tokens


def test_seeds(engine, prompts) -> None:
    params = [replace(SAMPLED, seed=s, ignore_eos=True) for s in (1, 2, 3, -5, 2**70)]
    several = tokens(engine.generate([prompts[0]] * 5, params))
    assert len(set(map(tuple, several))) == 5
    assert tokens(engine.generate([prompts[0]] * 5, params)) == several
    unseeded = replace(SAMPLED, seed=None, ignore_eos=True)
    assert len(set(map(tuple, tokens(engine.generate([prompts[0]] * 4, unseeded))))) == 4


def test_extreme_sampling_params(engine, prompts, expected) -> None:
    extremes = [dict(top_k=2**40), dict(temperature=1e-7), dict(temperature=1e30), dict(top_p=1e-9), dict(min_p=1.0)]
    outputs = tokens(engine.generate([prompts[0]] * 5, [replace(SAMPLED, **e) for e in extremes]))
    assert [outputs[i] for i in (1, 3, 4)] == [expected[0]] * 3  # only the likeliest token is left
    assert all(0 <= t < 1848 for row in outputs for t in row)


def test_engine_seed(one_layer) -> None:
    params, seen = SamplingParams(max_tokens=20, ignore_eos=True), []
    for seed in (5, 5, 6):
        with Engine(one_layer, num_pages=40, max_num_seqs=4, cudagraph_capture_sizes=[], seed=seed) as engine:
            seen.append(tokens(engine.generate([[3, 4], [5]], params)))
    assert seen[0] == seen[1] != seen[2]


def test_n(engine, prompts, sampled) -> None:
    outputs = engine.generate(prompts[:2], replace(SAMPLED, n=3))
    assert [o.index for o in outputs] == list(range(6))
    assert [o.prompt_token_ids for o in outputs] == [prompts[0]] * 3 + [prompts[1]] * 3
    assert [outputs[0].token_ids, outputs[3].token_ids] == sampled[:2]  # the first of n is the one there is with n = 1
    assert len({tuple(o.token_ids) for o in outputs}) == 6
    assert tokens(engine.generate(prompts[:2], replace(SAMPLED, n=3))) == tokens(outputs)


# -- how requests end


def end_of(model, prompt) -> list[int]:
    """A greedy continuation up to and with the end token."""
    found = hf_greedy(model, prompt, 200)
    assert found[-1] == model.config.eos_token_id, "this prompt's continuation does not end; choose another"
    return found


def test_end_token(engine, model, tokenizer, prompts) -> None:
    found = end_of(model, prompts[0])
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=None))
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (found, "stop", None)
    assert output.text == tokenizer.decode(found[:-1])
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=None, skip_special_tokens=False))
    assert output.text == tokenizer.decode(found) and output.text.endswith("<|endoftext|>")
    longer = len(found) + 4
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=longer, ignore_eos=True))
    assert (output.finish_reason, len(output.token_ids)) == ("length", longer)
    assert output.token_ids[: len(found)] == found
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=longer, min_tokens=longer))
    assert (output.finish_reason, len(output.token_ids)) == ("length", longer)
    assert model.config.eos_token_id not in output.token_ids


def test_end_token_with_asynchronous_stepping(model, tokenizer, prompts) -> None:
    """The step launched too many is dropped, also while others run on."""
    found = end_of(model, prompts[0])
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


def test_max_tokens(engine, prompts, expected) -> None:
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=1))
    assert (output.token_ids, output.finish_reason) == (expected[0][:1], "length")
    (output,) = engine.generate(prompts[1], replace(GREEDY, max_tokens=None, ignore_eos=True))
    assert len(prompts[1]) + len(output.token_ids) == engine.max_model_len == 300
    assert output.finish_reason == "length"


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


def test_first_of_several_stop_strings(engine, tokenizer, prompts, expected) -> None:
    text = tokenizer.decode(expected[0])
    first, second = text[8:10], text[9:10]
    assert text.index(second) == 9 and text.index(first) == 8, "choose others"
    assert engine.generate(prompts[0], replace(GREEDY, stop=[second, first]))[0].text == text[:8]


def test_without_text(engine, prompts, expected) -> None:
    (output,) = engine.generate(prompts[0], replace(GREEDY, detokenize=False))
    assert (output.token_ids, output.text) == (expected[0], "")


# -- streaming


def test_stream(engine, prompts, expected) -> None:
    pieces: dict[int, list] = {}
    order = []
    for event in engine.stream(prompts, GREEDY):
        assert not (event.index in pieces and pieces[event.index][-1].finished)  # nothing comes after the end
        pieces.setdefault(event.index, []).append(event)
        order.append(event.index)
        assert event.output.token_ids == [t for e in pieces[event.index] for t in e.token_ids]
        assert event.output.text == "".join(e.text for e in pieces[event.index])
        assert event.finished == (event.output.finish_reason is not None)
    assert [pieces[i][-1].output.token_ids for i in range(len(prompts))] == expected
    assert order[: len(prompts)] == list(range(len(prompts)))  # the first token of each comes before the second of any


def test_interleaved_streams(engine, prompts, expected) -> None:
    """Each stream gets all of its events, whichever of them drives the engine."""
    streams = [engine.stream(p, GREEDY) for p in prompts[:3]]
    got: list[list[int]] = [[], [], []]
    left = {0, 1, 2}
    while left:
        for i in sorted(left):
            for event in islice(streams[i], i + 1):
                got[i] += event.token_ids
                if event.finished:
                    left.discard(i)
    assert got == expected[:3]
    assert [list(s) for s in streams] == [[], [], []]


def test_abandoned_stream(engine, prompts, expected) -> None:
    stream = engine.stream(prompts[:3], GREEDY)
    events = list(islice(stream, 5))
    assert engine.has_unfinished
    stream.close()
    assert_idle(engine)
    assert {e.output.finish_reason for e in events} == {"abort"}
    assert events[0].output.token_ids == expected[0][: len(events[0].output.token_ids)]
    never_started = engine.stream(prompts, GREEDY)
    del never_started
    assert tokens(engine.generate(prompts[1], GREEDY)) == [expected[1]]


@pytest.fixture
def collector():
    gc.unfreeze()
    gc.collect()
    yield
    gc.unfreeze()


def test_collector_is_frozen_while_serving_only(engine, prompts, expected, collector, monkeypatch) -> None:
    """Not after the end, nor after an error, nor once nobody reads a stream on."""
    turns = ServingFreeze.TURNS
    seen = [gc.get_freeze_count() for _ in engine.stream(prompts[3], replace(GREEDY, ignore_eos=True))]
    assert seen[turns] > 1000 > max(seen[: turns - 1]) and gc.get_freeze_count() < 1000

    launch, calls = engine.runner.launch, Counter()

    def fails(batch):
        calls["launch"] += 1
        if calls["launch"] == turns + 2:
            assert gc.get_freeze_count() > 1000
            raise RuntimeError("a kernel failed")
        return launch(batch)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a kernel failed"):
        patch.setattr(engine.runner, "launch", fails)
        engine.generate(prompts[:2], replace(GREEDY, ignore_eos=True))
    assert gc.get_freeze_count() < 1000

    stream = engine.stream(prompts[3], replace(GREEDY, max_tokens=100, ignore_eos=True))
    for _ in range(turns + 2):
        next(stream)
    assert gc.get_freeze_count() > 1000
    stream.close()
    assert gc.get_freeze_count() < 1000
    assert tokens(engine.generate(prompts[:2], GREEDY)) == expected[:2]


def test_abandoned_stream_that_only_the_collector_finds(engine, prompts, collector, monkeypatch) -> None:
    """It is frozen itself, in a cycle. Once the engine has not stepped for a while, its requests are aborted all the same."""
    monkeypatch.setattr(ServingFreeze, "STALE_SECONDS", 0.5)

    class Prompt(list):
        pass

    asked = Prompt(prompts[0])
    asked.stream = engine.stream([asked, prompts[1]], replace(GREEDY, max_tokens=100, ignore_eos=True))
    for _ in range(3 * ServingFreeze.TURNS):
        next(asked.stream)
    del asked
    gc.collect()
    assert engine.has_unfinished and gc.get_freeze_count() > 1000
    deadline = time.monotonic() + 60
    while engine.has_unfinished and time.monotonic() < deadline:
        time.sleep(0.05)  # the engine is idle, and nothing else runs the collector
    assert not engine.requests and gc.get_freeze_count() < 1000


class Picky:
    """A tokenizer that cannot decode some tokens."""

    def __init__(self, tokenizer, bad):
        self.tokenizer, self.bad = tokenizer, bad

    def decode(self, ids, **options):
        if self.bad & set(ids):
            raise OverflowError("no such piece")
        return self.tokenizer.decode(ids, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("depth", [False, True], ids=["sync", "async"])
def test_a_tokenizer_that_fails_ends_one_request_only(depth, model, tokenizer, prompts, expected) -> None:
    def lone(which: int) -> list[int]:
        """Places of tokens that nobody else has, and that are neither its first nor its last."""
        others = {t for i, found in enumerate(expected) if i != which for t in found} | {t for p in prompts for t in p}
        return [i for i, t in enumerate(expected[which][:-1]) if i and t not in others and t not in expected[which][:i]]

    which = next(i for i in range(len(prompts)) if lone(i))
    at = lone(which)[0]
    picky = Picky(tokenizer, {expected[which][at]})
    with Engine(model, picky, num_pages=120, max_num_seqs=8, async_stepping=depth) as engine:
        outputs = engine.generate(prompts, GREEDY)
        failed = outputs.pop(which)
        assert failed.finish_reason == "error" and failed.token_ids == expected[which][: at + 1]
        assert failed.error == "the tokenizer could not decode the tokens: OverflowError: no such piece"
        assert tokenizer.decode(expected[which][:at]).startswith(failed.text)
        assert tokens(outputs) == [e for i, e in enumerate(expected) if i != which]
        assert [o.text for o in outputs] == [tokenizer.decode(o.token_ids, skip_special_tokens=True) for o in outputs]
        assert_idle(engine)
        assert tokens(engine.generate(prompts, replace(GREEDY, detokenize=False))) == expected


def test_interrupted_while_results_are_taken_in(model, tokenizer, prompts, expected) -> None:
    """The other rows of the step are not lost: whoever goes on gets all their tokens."""
    calls = Counter()

    class Interrupted(Picky):
        def decode(self, ids, **options):
            calls["decode"] += 1
            if calls["decode"] == 9:
                raise KeyboardInterrupt
            return super().decode(ids, **options)

    with Engine(model, Interrupted(tokenizer, set()), num_pages=120, max_num_seqs=8, async_stepping=True) as engine:
        ids = [engine.add_request(p, GREEDY)[0] for p in prompts]
        outputs = {i: engine.requests[i].output for i in ids}
        with pytest.raises(KeyboardInterrupt):
            while engine.has_unfinished:
                engine.step()
        while engine.has_unfinished:
            engine.step()
        assert [outputs[i].token_ids for i in ids] == expected
        assert_idle(engine)


def test_abort_from_outside_ends_a_stream(engine, prompts, expected) -> None:
    stream = engine.stream(prompts[:2], GREEDY)
    next(stream)
    engine.abort(min(engine.requests))
    rest = list(stream)
    ends = {e.index: e.output.finish_reason for e in rest if e.finished}
    assert ends == {0: "abort", 1: "length"}


# -- continuous batching by hand


def run(engine: Engine) -> dict[int, list]:
    events: dict[int, list] = {}
    while engine.has_unfinished:
        for event in engine.step():
            events.setdefault(event.index, []).append(event)
    return events


def test_add_request_while_others_run(engine, prompts, expected) -> None:
    found: dict[int, list[int]] = {}
    ids: dict[int, int] = {}
    todo = list(range(len(prompts)))
    for turn in range(1000):
        if todo and turn % 3 == 0:
            (request,) = engine.add_request(prompts[todo[0]], GREEDY)
            ids[request] = todo.pop(0)
        for event in engine.step():
            found.setdefault(ids[event.index], []).extend(event.token_ids)
            assert event.output.index == event.index  # by hand, the request's id
        if not todo and not engine.has_unfinished:
            break
    assert found == dict(enumerate(expected))


def test_generate_leaves_other_requests_events_alone(engine, prompts, expected) -> None:
    (mine,) = engine.add_request(prompts[0], GREEDY)
    engine.step()
    assert tokens(engine.generate(prompts[1:3], GREEDY)) == expected[1:3]
    events = run(engine)
    assert set(events) == {mine}
    assert events[mine][-1].output.token_ids == expected[0]
    assert [t for e in events[mine] for t in e.token_ids] == expected[0][1:]  # the first came with the first step


def test_abort(engine, prompts, expected) -> None:
    keep, waiting, running = (engine.add_request(p, GREEDY)[0] for p in prompts[:3])
    engine.abort(waiting)
    engine.step()
    engine.step()
    engine.abort(running)
    engine.abort(running)
    engine.abort(12345678)
    events = run(engine)
    assert events[running][-1].finished and events[running][-1].output.finish_reason == "abort"
    assert events[running][-1].output.token_ids == expected[2][:2]
    assert events[keep][-1].output.token_ids == expected[0]
    engine.abort(keep)  # long done


# -- what cannot be served: said clearly, and nothing else is touched


@pytest.mark.parametrize(("prompt", "message"), [
    ([], "the prompt is empty; give at least one token"),
    ("", "the prompt is empty"),
    (list(range(3, 303)), "the prompt has 300 tokens; a request may have 300, prompt and continuation"),
    ([3, 1848], r"token ids \[1848\] are outside the vocabulary of 1848 tokens"),
    ([-1, 5], r"token ids \[-1\] are outside the vocabulary"),
    ([1.5, 2], "a prompt is text or a list of token ids, got '\\[1.5, 2\\]'"),
    (None, "a prompt is text or a list of token ids, got 'None'"),
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


def test_one_prompt_of_a_wrong_type(engine) -> None:
    with pytest.raises(TypeError, match="a prompt is text or a list of token ids, got '5'"):
        engine.generate(5)


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
        (output,) = engine.generate([3, 4], GREEDY)
        assert len(output.token_ids) > 0 and output.text == ""


def test_max_tokens_0() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        SamplingParams(max_tokens=0)


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
