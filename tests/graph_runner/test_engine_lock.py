"""Engine steps are not interrupted: not by other threads, Ctrl-C or the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import quire
from quire.graph_runner.engine import Engine
from quire.graph_runner.engine_lock import EngineLock
from tests.tiny import GREEDY, assert_idle, hf_greedy, load_model, load_tokenizer, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
SHORT = replace(GREEDY, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer()
    return [tokenizer(t)["input_ids"] for t in ("Once upon a time", "The cat", "To make soup, you need two carrots", "A")]


@pytest.fixture(scope="module")
def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [hf_greedy(model, p, SHORT.max_tokens, eos_token_id=None) for p in prompts]


@pytest.fixture(scope="module")
def shared(model: Any) -> Iterator[Engine]:
    with Engine(model, num_pages=32, page_size=4, prefill_chunk_size=3) as made:
        yield made


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    assert_idle(shared)


# -- the lock by itself ----------------------------------------------------------------------------------------------------


def test_an_interrupt_is_deferred(interruptible: None) -> None:
    lock, done = EngineLock(), []
    with pytest.raises(KeyboardInterrupt), lock.hold():
        done.append("begin")
        with lock.hold():
            signal.raise_signal(signal.SIGINT)
        done.append("end")
    assert done == ["begin", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with lock.hold():
        pass
    lock, done = EngineLock(), []

    def action() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        lock.when_free(action)
    assert done == [1]


def test_actions_run_when_the_lock_is_free() -> None:
    lock, done = EngineLock(), []
    lock.when_free(lambda: done.append(1))
    assert done == [1]
    with lock.hold():
        lock.when_free(lambda: done.append(2))
        with lock.hold():
            lock.when_free(lambda: done.append(3))
        assert done == [1]
    assert done == [1, 2, 3]
    lock, done = EngineLock(), []
    with pytest.raises(ValueError), lock.hold():
        lock.when_free(lambda: done.append(1))
        raise ValueError
    assert done == [1]


def test_when_free_does_not_block() -> None:
    lock, done, inside, go = EngineLock(), [], threading.Event(), threading.Event()

    def turn() -> None:
        with lock.hold():
            inside.set()
            go.wait(60)

    thread = threading.Thread(target=turn)
    thread.start()
    assert inside.wait(60)
    lock.when_free(lambda: done.append(1))
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


def test_a_stream_registers_before_other_threads_step(engine: Engine, prompts: list[list[int]],
                                                      expected: list[list[int]]) -> None:
    """A thread that steps as fast as it can finishes requests of one token at once: their streams get all events."""
    done = threading.Event()

    def steps() -> None:
        while not done.is_set():
            assert not engine.step()  # no event of a stream ends up here

    with ThreadPoolExecutor(1) as pool:
        stepping = pool.submit(steps)
        try:
            for _ in range(40):
                assert tokens(engine.generate(prompts, replace(SHORT, max_tokens=1))) == [e[:1] for e in expected]
        finally:
            done.set()
        stepping.result()
    assert_idle(engine)


def test_no_step_comes_before_a_request_is_registered(engine: Engine, prompts: list[list[int]], expected: list[list[int]],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of another thread while a request is added could finish it before its stream knows it."""
    add, stepped, threads = engine.scheduler.add, threading.Event(), []

    def add_and_wait(request: Any) -> None:
        add(request)
        threads.append(threading.Thread(target=lambda: (engine.step(), stepped.set())))
        threads[-1].start()
        assert not stepped.wait(0.3)

    monkeypatch.setattr(engine.scheduler, "add", add_and_wait)
    assert tokens(engine.generate(prompts[0], replace(SHORT, max_tokens=1))) == [expected[0][:1]]
    threads[0].join()
    stepped.clear()
    engine.add_request(prompts[0], replace(SHORT, max_tokens=1))
    threads[1].join()
    while engine.has_unfinished:
        engine.step()


def test_an_idle_engine_drops_an_abandoned_stream_at_once(engine: Engine, prompts: list[list[int]]) -> None:
    stream = engine.stream(prompts, SHORT)
    event = next(stream)
    del stream
    assert_idle(engine)
    assert event.output.finish_reason == "abort"
    stream = engine.stream(prompts, SHORT)  # never begun
    del stream
    with ThreadPoolExecutor(1) as pool:
        stream = engine.stream(prompts, SHORT)
        pool.submit(next, stream).result()  # begun in another thread
    stream.close()
    assert_idle(engine)


def test_an_interrupted_stream_leaves_nothing(engine: Engine, prompts: list[list[int]], interruptible: None) -> None:
    """Ctrl-C while its requests are added comes after one of them was: it is aborted too."""
    interrupt = at_call(engine.scheduler, "add", 2, True, lambda: signal.raise_signal(signal.SIGINT))
    with interrupt, pytest.raises(KeyboardInterrupt):
        next(engine.stream(prompts, SHORT))
    assert_idle(engine)


def test_abort_takes_one_id(engine: Engine, prompts: list[list[int]]) -> None:
    """The caller sees the error: in another thread's turn, it would end that thread's requests."""
    ids = engine.add_request(prompts[0], quire.SamplingParams(max_tokens=2, temperature=0))
    with pytest.raises(TypeError, match="abort takes the number or the name of a request"):
        engine.abort(ids)  # type: ignore[arg-type]
    assert engine.has_unfinished
    engine.abort(ids[0])
    while engine.has_unfinished:
        engine.step()


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


def boundaries(engine: Engine) -> list[tuple[Any, str]]:
    """The public methods that a step calls, outermost first."""
    runner = engine.runner
    return [(engine, "collect"), (engine.scheduler, "schedule"), (runner, "launch"), (runner, "stage"), (runner, "forward"),
            *((runner.buffers, name) for name in ("fill", "upload", "update_table", "forward_batch"))]


@contextlib.contextmanager
def at_call(owner: Any, name: str, number: int, after: bool, action: Callable[[], None]) -> Iterator[Counter[str]]:
    """Act once, before or after the ``number``-th call of a method."""
    method, calls = getattr(owner, name), Counter[str]()

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        now = calls[name] == number
        if now and not after:
            action()
        result = method(*args, **kwargs)
        if now and after:
            action()
        return result

    setattr(owner, name, wrapper)
    try:
        yield calls
    finally:
        delattr(owner, name)


@pytest.mark.parametrize(("number", "depth"), [(1, False), pytest.param(1, True, marks=pytest.mark.slow), (4, True)])
def test_interrupts_anywhere(number: int, depth: bool, model: Any, prompts: list[list[int]], expected: list[list[int]],
                             interruptible: None) -> None:
    """Wherever in a step Ctrl-C comes, continuing gives the same tokens, and nothing is lost."""
    with Engine(model, num_pages=32, page_size=4, prefill_chunk_size=3, async_stepping=depth) as engine:
        for (owner, name), after in itertools.product(boundaries(engine), (False, True)):
            ids = [engine.add_request(p, SHORT)[0] for p in prompts]
            outputs: dict[int, Any] = {}
            interrupts = 0
            with at_call(owner, name, number, after, lambda: signal.raise_signal(signal.SIGINT)) as calls:
                while engine.has_unfinished:
                    try:
                        outputs |= {e.index: e.output for e in engine.step()}
                    except KeyboardInterrupt:
                        interrupts += 1
            assert interrupts == 1 and calls[name] >= number
            assert [outputs[i].token_ids for i in ids] == expected, name
            assert_idle(engine)


def test_a_stream_finalized_by_the_collector(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """In the middle of a step, as garbage is found: its requests are aborted after the step."""

    class Box:
        pass

    for owner, name in boundaries(engine)[::2]:
        gc.disable()
        try:
            box: Any = Box()
            box.stream = engine.stream([prompts[3], prompts[2]], replace(SHORT, max_tokens=60))
            next(box.stream)
            box.itself = box  # only the collector finds it
            del box
            with at_call(owner, name, 2, False, gc.collect):
                got = tokens(engine.generate(prompts[:2], SHORT))
        finally:
            gc.enable()
        assert got == expected[:2]
        assert_idle(engine)


def test_a_stream_that_is_open_when_the_interpreter_ends() -> None:
    """Its finalizer may run after the modules are emptied: nothing is printed."""
    program = """
from quire.graph_runner import engine_lock
def stream(lock):
    try:
        yield
    finally:
        lock.when_free(int)
engine_lock.kept = stream(engine_lock.EngineLock())
next(engine_lock.kept)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not ended.stderr


def test_no_engine_inside_a_step(model: Any) -> None:
    cache = quire.PagedKVCache.for_model(model, num_pages=4, page_size=16)
    meta = quire.CommonAttentionMetadata.build([3], [3], [[1]], page_size=16)
    with pytest.raises(RuntimeError, match="cannot be made inside quire.step"), quire.step(cache, meta):
        Engine(model, num_pages=4)


def test_threads_share_a_paged_model(prompts: list[list[int]], expected: list[list[int]]) -> None:
    """The first thread makes its engine, once."""
    paged = quire.paged(load_model(num_layers=1), num_pages=64)

    def job(k: int) -> bool:
        ids = torch.tensor([prompts[k % 4]])
        out = paged.generate(ids, max_new_tokens=SHORT.max_tokens, do_sample=False, eos_token_id=-1)
        return out[0, ids.shape[1]:].tolist() == expected[k % 4]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(job, range(12)))
    paged.generate.close()


def test_a_row_that_is_aborted_is_an_error(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another thread that closes or replaces the engine meanwhile: generate() must not return a row cut short."""
    paged = quire.paged(load_model(num_layers=1), num_pages=64)
    ids = torch.tensor([prompts[0]])
    paged.generate(ids, max_new_tokens=1)
    engine = paged.generate.engine
    collect = engine.collect

    def collect_and_abort(leave: int = 0) -> None:
        collect(leave)
        for request_id in list(engine.requests):
            engine.abort(request_id)

    monkeypatch.setattr(engine, "collect", collect_and_abort)
    with pytest.raises(RuntimeError, match="row 0 was aborted after . tokens"):
        paged.generate(ids, max_new_tokens=8, eos_token_id=-1)
    monkeypatch.undo()
    paged.generate.close()
