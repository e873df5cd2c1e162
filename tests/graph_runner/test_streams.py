"""Streams of an engine, requests that join and leave while others run, and what fails in between; on a CPU."""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from quire.graph_runner.engine import Engine
from quire.graph_runner.gc_freeze import ServingFreeze
from tests.tiny import GREEDY, assert_idle, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")


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


@pytest.fixture
def collector():
    gc.unfreeze()
    gc.collect()
    yield
    gc.unfreeze()


def test_collector_is_frozen_while_serving_only(engine, prompts, expected, collector, monkeypatch) -> None:
    """Not after the end, nor after an error, nor once a stream is no longer read."""
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


@pytest.mark.parametrize("depth", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "async"])
def test_a_tokenizer_that_fails_ends_one_request_only(depth, model, tokenizer, prompts, expected) -> None:
    def lone(which: int) -> list[int]:
        """Places of tokens that no other row has, neither its first nor its last."""
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
