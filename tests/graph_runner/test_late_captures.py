"""CUDA graphs that are captured after the start, when a batch needs them or between decode steps; on a CPU."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from quire.graph_runner import cuda_graph
from quire.graph_runner.cuda_graph import LATE_SHARE
from quire.graph_runner.step_buffers import BatchShape
from tests.graph_runner.test_cuda_graph import runner, shapes


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The time that captures see; ``capture``, to call before each, takes a second and notes its bucket."""
    made = SimpleNamespace(now=100.0, captured=[])

    def capture(shape: BatchShape) -> None:
        made.captured.append(shape)
        made.now += 1

    made.capture = capture
    monkeypatch.setattr(cuda_graph, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_lazy_capture(clock) -> None:
    """Start-up is short, in the memory of the largest; each size is captured once, when it is needed."""
    r = runner(8, 1, (64, 12), lazy=True, before_capture=clock.capture)
    assert clock.captured == shapes((64, 12)) and r.stats.captured == 1
    for n in (3, 8, 2):
        assert r.replay(r.can_run(BatchShape(n, n), True)).tolist() == [8] * 8
    assert clock.captured == shapes((64, 12), 8) and r.stats.captured == 2
    assert r.can_run(BatchShape(99, 13), False) is None and clock.captured == shapes((64, 12), 8)


def test_the_rest_is_captured_between_decode_steps(clock) -> None:
    """Requests are served meanwhile: a step waits for one capture at most, one with prompts for none that it does not need,
    and four fifths of the time remain for steps."""
    r = runner(8, 4, 2, 1, (64, 12), (32, 12), lazy=True, before_capture=clock.capture)
    clock.now += 3.9
    one, prompt = BatchShape(1, 1), BatchShape(40, 2)
    assert r.can_run(prompt, False) == BatchShape(64, 12) and len(clock.captured) == 1
    clock.now += 0.2
    assert r.can_run(prompt, False) == BatchShape(64, 12) and len(clock.captured) == 1  # due, but the step has prompts
    assert r.can_run(one, True) == one and clock.captured == shapes((64, 12), 1)  # what is needed, and no other
    began = clock.now
    for _ in range(200):
        before = len(clock.captured)
        assert r.can_run(one, True) == one and len(clock.captured) <= before + 1
        clock.now += 0.1
    assert clock.captured == shapes((64, 12), 1, (32, 12), 8, 4, 2)
    assert began + 4 * 5 <= clock.now and r.stats.captured == 6 and not r.stats.fell_back


def test_late_captures_take_a_fifth_of_the_time(clock) -> None:
    r = runner(*range(1, 60), lazy=True, before_capture=clock.capture)
    began = clock.now
    while clock.now - began < 100:
        r.can_run(BatchShape(59, 59), True)
        clock.now += 0.05
    assert 15 <= len(clock.captured) - 1 <= 100 * LATE_SHARE


def test_late_captures_do_not_walk_all_objects(monkeypatch) -> None:
    """A collection with a model loaded takes longer than a capture, and running requests wait for it."""
    collected: list[None] = []
    r = runner(8, 1, lazy=True)
    monkeypatch.setattr(gc, "collect", lambda *generation: collected.append(None))
    assert r.can_run(BatchShape(1, 1), True) and r.stats.captured == 2 and collected == []


def test_no_memory_for_a_late_capture() -> None:
    """The step runs without a graph, and no later step tries again."""
    tried: list[BatchShape] = []

    def full(shape: BatchShape) -> None:
        tried.append(shape)
        if shape.num_reqs == 5:
            raise torch.OutOfMemoryError("full")

    r = runner(8, 5, 1, lazy=True, before_capture=full)
    assert r.can_run(BatchShape(1, 1), True) == BatchShape(1, 1)
    assert r.can_run(BatchShape(5, 5), True) is None and "out of GPU memory" in r.reason
    assert r.can_run(BatchShape(5, 5), True) is None and r.reason == "there was no memory for another graph"
    assert tried == shapes(8, 1, 5) and r.can_run(BatchShape(1, 1), True) == BatchShape(1, 1) and r.reason is None


def test_no_memory_for_a_graph_that_no_batch_needs(clock) -> None:
    """Steps that have their graphs go on as before."""
    def full(shape: BatchShape) -> None:
        clock.capture(shape)
        if shape.num_reqs == 8:
            raise torch.OutOfMemoryError("full")

    r = runner(9, 8, 1, lazy=True, before_capture=full)
    for _ in range(3):
        clock.now += 60
        assert r.can_run(BatchShape(9, 9), True) == BatchShape(9, 9)
    assert clock.captured == shapes(9, 8) and not r.stats.fell_back


def test_a_graph_that_no_batch_needs_cannot_be_captured(clock, caplog) -> None:
    """A request of another batch size does not fail with it. What a batch needs is still captured, or the step says why not."""
    def broken(shape: BatchShape) -> None:
        clock.capture(shape)
        if shape.num_reqs == 8:
            raise ValueError("another thread synchronized the GPU")

    r = runner(9, 8, 7, 1, lazy=True, before_capture=broken)
    for _ in range(3):
        clock.now += 60
        assert r.can_run(BatchShape(9, 9), True) == BatchShape(9, 9)
    assert clock.captured == shapes(9, 8) and "another thread synchronized" in caplog.text
    assert r.can_run(BatchShape(1, 1), True) == BatchShape(1, 1) and clock.captured == shapes(9, 8, 1)
    clock.now += 60
    assert r.can_run(BatchShape(9, 9), True) == BatchShape(9, 9) and clock.captured == shapes(9, 8, 1)  # not once more
    with pytest.raises(ValueError, match="another thread"):
        r.can_run(BatchShape(8, 8), True)
