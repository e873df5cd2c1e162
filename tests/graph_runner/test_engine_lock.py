"""Turns are whole: whatever other threads, interrupts and the garbage collector do."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quire.graph_runner
from quire.graph_runner.engine import Engine
from quire.graph_runner.engine_lock import Turns
from tests.tiny import GREEDY, assert_idle, hf_greedy, load_model, load_tokenizer, tokens

FOLDER = str(Path(quire.graph_runner.__file__).parent)
SHORT = replace(GREEDY, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(num_layers=2)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer()
    return [tokenizer(t)["input_ids"] for t in ("Once upon a time", "The cat", "To make soup, you need two carrots", "A")]


@pytest.fixture(scope="module")
def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [hf_greedy(model, p, SHORT.max_tokens, eos_token_id=None) for p in prompts]


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with Engine(model, num_pages=32, page_size=4, prefill_chunk_size=3) as made:
        yield made


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own reaction to a Ctrl-C; pytest-xdist's workers ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# -- Turns by themselves ----------------------------------------------------------------------------------------------------


def test_an_interrupt_comes_at_the_end(interruptible: None) -> None:
    turns, done = Turns(), []
    with pytest.raises(KeyboardInterrupt), turns.alone():
        done.append("begin")
        with turns.alone():
            signal.raise_signal(signal.SIGINT)
        done.append("end")
    assert done == ["begin", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with turns.alone():
        pass


def test_what_is_to_be_done_soon_is_done_after_the_turn() -> None:
    turns, done = Turns(), []
    turns.soon(lambda: done.append(1))
    assert done == [1]
    with turns.alone():
        turns.soon(lambda: done.append(2))
        with turns.alone():
            turns.soon(lambda: done.append(3))
        assert done == [1]
    assert done == [1, 2, 3]


def test_what_is_to_be_done_soon_is_done_after_an_error_too() -> None:
    turns, done = Turns(), []
    with pytest.raises(ValueError), turns.alone():
        turns.soon(lambda: done.append(1))
        raise ValueError
    assert done == [1]


def test_an_interrupt_comes_after_what_is_done_soon(interruptible: None) -> None:
    turns, done = Turns(), []

    def action() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        turns.soon(action)
    assert done == [1]


def test_soon_waits_for_nobody() -> None:
    turns, done, inside, go = Turns(), [], threading.Event(), threading.Event()

    def turn() -> None:
        with turns.alone():
            inside.set()
            go.wait(60)

    thread = threading.Thread(target=turn)
    thread.start()
    assert inside.wait(60)
    turns.soon(lambda: done.append(1))
    assert not done
    go.set()
    thread.join()
    assert done == [1]


# -- an engine --------------------------------------------------------------------------------------------------------------


def test_threads_share_an_engine(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    def job(k: int) -> bool:
        return tokens(engine.generate([prompts[k % 4]], SHORT)) == [expected[k % 4]]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(job, range(24)))
    assert_idle(engine)


def test_a_stream_in_one_thread_and_an_abort_in_another(engine: Engine, prompts: list[list[int]],
                                                        expected: list[list[int]]) -> None:
    (long,) = engine.add_request(prompts[1], replace(SHORT, max_tokens=60))
    stream = engine.stream([prompts[0]], SHORT)
    first = next(stream)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine.abort, long).result()
    rest = list(stream)
    assert [t for e in (first, *rest) for t in e.token_ids] == expected[0]
    assert [e.index for e in engine.step() if e.finished] == [long]
    assert_idle(engine)


def at_line(number: int, action: Callable[[], None]) -> Any:
    """A trace function that acts once, before the ``number``-th line that runs in graph_runner."""
    left = number

    def lines(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                action()
        return lines if left > 0 else None

    return lambda frame, event, arg: lines if frame.f_code.co_filename.startswith(FOLDER) else None


@pytest.mark.parametrize("part", range(2))
def test_interrupts_anywhere(part: int, engine: Engine, prompts: list[list[int]], expected: list[list[int]],
                             interruptible: None) -> None:
    """Whichever line of the package a Ctrl-C comes at, going on gives the same tokens, and nothing is lost."""
    for number in range(5 + 57 * part, 1400, 29 * 4):
        ids = [engine.add_request(p, SHORT)[0] for p in prompts]
        outputs: dict[int, Any] = {}
        sys.settrace(at_line(number, lambda: signal.raise_signal(signal.SIGINT)))
        interrupts = 0
        while engine.has_unfinished:
            try:
                events = engine.step()
            except KeyboardInterrupt:
                interrupts += 1
                continue
            outputs |= {e.index: e.output for e in events}
        sys.settrace(None)
        assert interrupts == 1
        assert [outputs[i].token_ids for i in ids] == expected, number
        assert_idle(engine)


@pytest.mark.parametrize("where", [20, 160, 300, 470, 640])
def test_a_stream_ended_by_the_collector(where: int, engine: Engine, prompts: list[list[int]],
                                         expected: list[list[int]]) -> None:
    """In the middle of a turn, as garbage is found: its requests go after the turn."""

    class Box:
        pass

    gc.disable()
    try:
        box: Any = Box()
        box.stream = engine.stream([prompts[3], prompts[2]], replace(SHORT, max_tokens=60))
        next(box.stream)
        box.itself = box  # only the collector finds it
        del box
        sys.settrace(at_line(where, gc.collect))
        got = tokens(engine.generate(prompts[:2], SHORT))
    finally:
        sys.settrace(None)
        gc.enable()
    assert got == expected[:2]
    gc.collect()
    assert_idle(engine)


def test_no_engine_inside_a_step(model: Any) -> None:
    import quire

    cache = quire.PagedKVCache.for_model(model, num_pages=4, page_size=16)
    meta = quire.CommonAttentionMetadata.build([3], [3], [[1]], page_size=16)
    with pytest.raises(RuntimeError, match="cannot be made inside quire.step"), quire.step(cache, meta):
        Engine(model, num_pages=4)


def test_threads_share_a_paged_model(prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Its engine too is made once, by the thread that comes first."""
    import torch

    import quire

    paged = quire.paged(load_model(num_layers=2), num_pages=64)

    def job(k: int) -> bool:
        ids = torch.tensor([prompts[k % 4]])
        out = paged.generate(ids, max_new_tokens=SHORT.max_tokens, do_sample=False, eos_token_id=-1)
        return out[0, ids.shape[1]:].tolist() == expected[k % 4]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(job, range(12)))
    paged.generate.close()
