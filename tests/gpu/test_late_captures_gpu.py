"""CUDA graphs that are captured while requests run (``cudagraph_lazy``), before every decode step, until all are there."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from quire import Engine
from quire.graph_runner import cuda_graph
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
