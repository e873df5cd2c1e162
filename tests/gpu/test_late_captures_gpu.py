"""CUDA graphs that are captured while requests run (``cudagraph_lazy``), before every decode step, until all are there."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace

import pytest
import torch

from quire import Engine
from quire.graph_runner import cuda_graph
from quire.graph_runner.cuda_graph import CudaGraphRunner
from quire.graph_runner.step_buffers import BatchShape
from tests.gpu.helpers import check_likely, need
from tests.tiny import GREEDY, tokens

OPTIONS = dict(num_pages=400, max_num_seqs=8, cudagraph_capture_sizes=list(range(1, 9)), cudagraph_token_sizes=[16, 64],
               compiler="eager")
LONG = replace(GREEDY, ignore_eos=True)


@pytest.fixture(autouse=True)
def at_every_step(monkeypatch) -> None:
    monkeypatch.setattr(cuda_graph, "LATE_SHARE", 1.0)


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_graphs_captured_between_steps(backend, half, prompts) -> None:
    """After a quick start each decode step waits for the capture of a graph that it does not need, while the step before may
    run: tokens are right all the time, and the graphs take what they take when all are captured at the start."""
    options = {**OPTIONS, "attention": need(backend)}
    with Engine(half, **options) as engine:
        whole = engine.runner.graphs.stats
    with Engine(half, **options, cudagraph_lazy=True) as engine:
        stats = engine.runner.graphs.stats
        assert engine._depth == 1 and stats.captured == 1 < whole.captured
        outs = [tokens(engine.generate(prompts, LONG)) for _ in range(2)]
        assert stats.captured == whole.captured and stats.replayed
        assert stats.capture_bytes <= whole.capture_bytes + 2**25
    for prompt, *found in zip(prompts, *outs, strict=True):
        for each in found:
            check_likely(half, prompt, each)


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_other_threads_use_the_gpu_during_late_captures(backend, half, prompts) -> None:
    """Memory that another thread allocates meanwhile, and events that it asks for, end no capture, and no capture ends them.
    Both kinds of graphs: flashinfer's steps with prompts are captured in pieces."""
    done, turns, errors = threading.Event(), [0], list[BaseException]()

    def work() -> None:
        held, event = list[torch.Tensor](), torch.cuda.Event()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not done.is_set():
                    held = [*held[-20:], torch.ones((1 + turns[0] % 40) << 21, dtype=torch.uint8, device="cuda")]
                    held[-1].cpu()
                    event.record()
                    event.query()
                    turns[0] += 1
        except BaseException as error:
            errors.append(error)

    with Engine(half, **OPTIONS, attention=need(backend), cudagraph_lazy=True,
                cudagraph_piecewise=backend == "flashinfer") as engine:
        thread = threading.Thread(target=work)
        thread.start()
        try:
            outs = [tokens(engine.generate(prompts, LONG)) for _ in range(2)]
        finally:
            done.set()
            thread.join()
        assert not errors and turns[0] > 10 and engine.runner.graphs.stats.captured == len(engine.runner.graphs.buckets)
    for prompt, *found in zip(prompts, *outs, strict=True):
        for each in found:
            check_likely(half, prompt, each)


@pytest.mark.parametrize("cut, alike", [(False, False), (True, False), (False, True)], ids=["whole", "in pieces", "one kind"])
def test_what_layers_make_at_first_use(cut, alike) -> None:
    """A table that a layer makes when it first runs holds its numbers, though only the first layer runs before most graphs:
    made inside one, it would be filled by the replays of that graph alone."""
    device, tables, short = torch.device("cuda"), dict[tuple[int, int], torch.Tensor](), [False]
    x, zeros = torch.ones(8, device=device), torch.zeros(8, device=device)

    def run(shape: BatchShape) -> torch.Tensor:
        y = x[: shape.num_reqs]
        for layer in range(1 if short[0] else 3):
            key = (layer, shape.num_reqs)
            if key not in tables:
                tables[key] = torch.full((8,), 2.0, device=device)
            y = y * tables[key][: shape.num_reqs]
        return y + tables.get((2, 7), zeros)[: shape.num_reqs]  # of another graph, which may never be replayed

    @contextlib.contextmanager
    def first_layer():
        short[0] = True
        yield
        short[0] = False

    made = CudaGraphRunner(run, [BatchShape(n, n) for n in (8, 7, 6)], device, short_warm_up=first_layer,
                           piecewise=lambda shape: cut, kind=lambda shape: alike or shape)
    made.capture()
    for n, wanted in ((6, 10.0), (8, 8.0)):  # 8 was recorded first
        assert made.replay(BatchShape(n, n)).tolist() == [wanted] * n


def test_few_graphs_are_recorded_twice(half, caplog) -> None:
    """An engine's steps leave nothing in the pool that they are recorded to, so one layer of each kind runs before most."""
    options = {**OPTIONS, "compiler": "inductor"}
    with caplog.at_level(logging.INFO, "quire.graph_runner.cuda_graph"), Engine(half, **options, attention="triton"):
        pass
    assert "recorded again" not in caplog.text
