"""Piecewise graphs: steps recorded between their attention calls. A device without hardware records what PyTorch runs. And
the graphs of CUDA, by stand-ins (tests/gpu has the real ones), and of other devices."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quire
from quire.attn_ops.backend import CudagraphSupport
from quire.attn_ops.breaks import breakable, breaking, left_out
from quire.attn_ops.registry import get_backend
from quire.graph_runner.cuda_graph import CudaGraphRunner
from quire.graph_runner.device_graph import (
    CpuGraphs,
    CudaGraphs,
    Recorded,
    alias,
    device_graphs,
    record_in_segments,
    register_device_graphs,
)
from quire.graph_runner.step_buffers import BatchShape
from tests.tiny import hf_greedy, small_llama, tokens


class Tape(TorchDispatchMode):
    """Records the operations between ``begin`` and ``end``; a replay computes them again into the tensors of the recording."""

    def __init__(self) -> None:
        super().__init__()
        self.graph: list[Any] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.graph
        out = func(*args, **(kwargs or {}))
        if self.graph is before and before is not None:  # else the recording was cut inside
            before.append((func, args, kwargs or {}, out))
        return out

    def begin(self) -> list[Any]:
        self.graph = []
        return self.graph

    def end(self, graph: list[Any]) -> Any:
        assert self.graph is graph
        self.graph = None

        def replay() -> None:
            for func, args, kwargs, out in graph:
                for there, now in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(there, torch.Tensor) and there.data_ptr() != now.data_ptr():
                        there.copy_(now)

        return replay


class TapeGraphs(CpuGraphs):
    made: list[Recorded] = []

    def warm_up(self, run, times) -> None:
        for _ in range(times):
            run()

    def record(self, run, pool) -> Recorded:
        tape = Tape()
        with tape:
            graph = tape.begin()
            output = run()
            replay = tape.end(graph)
        self.made.append(Recorded(lambda: (replay(), output)[1], output))
        return self.made[-1]

    def record_in_segments(self, run, pool) -> Recorded:
        tape = Tape()
        with tape:
            self.made.append(Recorded(*record_in_segments(tape.begin, tape.end, run)))
        return self.made[-1]


@pytest.fixture
def tape_graphs() -> Iterator[None]:
    TapeGraphs.made = []
    register_device_graphs("cpu", TapeGraphs)
    yield
    register_device_graphs("cpu", CpuGraphs)


@pytest.mark.parametrize("breaks", [0, 1, 3])
def test_arithmetic(breaks) -> None:
    """The replay has the input of now in its pieces, and what the host knows now between them; its output stays in place."""
    host = [10.0]
    double = breakable(lambda x: 2 * x + host[0], lambda x: torch.empty_like(x))
    given = torch.ones(2)

    def run() -> torch.Tensor:
        x = given + 1
        for _ in range(breaks):
            x = double(x) + 1
        return x * 1

    def wanted(x: float) -> float:
        x += 1
        for _ in range(breaks):
            x = 2 * x + host[0] + 1
        return x

    tape = Tape()
    with tape:
        replay, output, pieces = record_in_segments(tape.begin, tape.end, run)
    assert pieces == breaks + 1
    out = replay()
    assert out is output
    assert out.tolist() == [wanted(1)] * 2
    given.fill_(5)
    host[0] = -3.0
    assert replay() is out and out.tolist() == [wanted(5)] * 2 == run().tolist()


def test_an_error_ends_the_recording() -> None:
    ended: list[int] = []
    op = breakable(lambda x: x, lambda x: torch.empty_like(x))

    def run() -> None:
        op(torch.ones(1))
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        record_in_segments(lambda: len(ended), lambda graph: ended.append(graph) or (lambda: None), run)
    assert ended == [0, 1]
    assert op(torch.ones(1)).tolist() == [1] and ended == [0, 1]  # nothing is recorded any more


def test_an_alias_keeps_nothing() -> None:
    """Or the q, k and v of each layer would stay in memory, for each captured size."""
    x = torch.arange(12.0).view(3, 4).t()[1:]
    there, gone = alias(x), weakref.ref(x)
    assert torch.equal(there, x) and there.data_ptr() == x.data_ptr() and there.stride() == x.stride()
    del x
    assert gone() is None


def test_warming_up_leaves_attention_out() -> None:
    op = breakable(lambda x: x / 0, lambda x: torch.empty_like(x))
    with breaking(left_out):
        assert op(torch.ones(2)).tolist() == [0, 0]


@pytest.mark.slow
def test_mixed_steps_of_a_backend_that_plans(tape_graphs) -> None:
    """A backend whose attention can be captured for decodes only, and plans on the host: its steps with prompts replay the rest
    as graphs, and have the tokens of ``generate``. Each plan is for the batch that runs."""
    planned: list[tuple[int, bool]] = []
    native = get_backend("torch_native")
    capabilities = dataclasses.replace(native.capabilities, cudagraph_support=CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
    quire.register_backend(dataclasses.replace(
        native, name="pieces", priority=None, capabilities=capabilities,
        plan=lambda meta, step: planned.append((meta.num_actual_tokens, step.graph_key is not None))))
    model = small_llama(std=0.3, num_hidden_layers=3)
    prompts = [[3 + i % 60 for i in range(30)], [3, 1, 4, 1, 5], [60 - i % 57 for i in range(21)]]
    params = quire.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = [hf_greedy(model, p, 12, eos_token_id=None) for p in prompts]
    options: dict[str, Any] = dict(attention="pieces", page_size=4, num_pages=60, max_num_seqs=3, max_model_len=80,
                                   max_num_batched_tokens=16, cudagraph_capture_sizes=[3])
    with quire.Engine(model, **options, cudagraph_token_sizes=[16], cudagraph_piecewise=True, cudagraph_debug=True) as engine:
        stats, planned[:] = engine.runner.graphs.stats, []
        assert sorted(r.pieces for r in TapeGraphs.made) == [1, 4] and stats.pieces == 5
        assert tokens(engine.generate(prompts, params)) == want
        assert not stats.fell_back and {b.num_tokens for b in stats.replays} == {3, 16}
        assert {graph for tokens_, graph in planned if tokens_ > 3} == {False} and (3, True) in planned
    with quire.Engine(model, **options, cudagraph_token_sizes=[16]) as engine:
        assert tokens(engine.generate(prompts, params)) == want
        assert engine.runner.graphs.stats.fell_back["a prefill in the batch, and no mixed bucket captured"] > 0


def test_devices_without_graphs() -> None:
    with pytest.raises(RuntimeError, match="no graphs are known for xla; there are those of cpu, cuda, npu"):
        device_graphs(torch.device("xla"))
    with pytest.raises(RuntimeError, match="need torch_npu, which is not installed: pip install torch_npu"):
        device_graphs(SimpleNamespace(type="npu"))


def test_calls_of_the_npu_class(monkeypatch) -> None:
    """In the order and with the arguments of torch_npu's signatures; its hardware has not been seen."""
    log: list = []

    class NPUGraph:
        def replay(self) -> None:
            log.append("replay")

    @contextlib.contextmanager
    def graph(npu_graph, pool=None, stream=None, capture_error_mode="global", auto_dispatch_capture=False):
        assert isinstance(npu_graph, NPUGraph)
        log.append(("begin", pool, auto_dispatch_capture))
        yield
        log.append("end")

    npu = SimpleNamespace(NPUGraph=NPUGraph, graph=graph, graph_pool_handle=lambda: "pool", empty_cache=lambda: None,
                          synchronize=lambda: log.append("wait"), mem_get_info=lambda device: (7, 9))
    monkeypatch.setitem(sys.modules, "torch_npu", npu)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    device = SimpleNamespace(type="npu")
    r = CudaGraphRunner(lambda shape: log.append("run") or torch.ones(shape.num_reqs), [BatchShape(2, 2)], device)
    r.capture()
    assert log == ["run", "run", "wait", ("begin", "pool", True), "run", "end"]
    assert r.replay(BatchShape(2, 2)).tolist() == [1, 1] and log[-1] == "replay"
    with pytest.raises(RuntimeError, match="make the engine without cudagraph_piecewise"):
        CudaGraphRunner(print, [BatchShape(2, 2)], device, piecewise=lambda shape: True).capture()


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def cuda_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens; "run" stands on the stream that is current then."""
    found: list[str] = []
    current = [FakeStream("main", found)]

    @contextlib.contextmanager
    def on(stream: FakeStream, says: str = "") -> Iterator[None]:
        current.append(stream)
        found.extend([says] if says else [])
        yield
        current.pop()

    class Graph:
        def capture_begin(self, **given: Any) -> None:
            found.append(f"begin on {current[-1].name}, {given['capture_error_mode']}")

        def capture_end(self) -> None:
            found.append("end")

        def replay(self) -> None:
            found.append("replay")

    def graph(of: Graph, pool: Any, stream: FakeStream, capture_error_mode: str) -> contextlib.AbstractContextManager[None]:
        return on(stream, f"record on {stream.name}, {capture_error_mode}")

    fakes = dict(Stream=lambda index: FakeStream("side", found), stream=on, current_stream=lambda device: current[-1],
                 CUDAGraph=Graph, graph=graph, synchronize=lambda device: found.append("synchronize"), empty_cache=lambda: None)
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("quire.attn_ops.kernels.launch._side_streams", {})
    return found


def test_what_waits_for_what_on_cuda(cuda_log: list[str]) -> None:
    """A warm-up or a recording that did not wait would read inputs that are being written, and later steps its outputs too
    soon; and one in CUDA's default mode would fail where another thread uses the GPU."""
    graphs, log = CudaGraphs(torch.device("cuda", 0)), cuda_log

    def run() -> None:
        log.append(f"run on {torch.cuda.current_stream(None).name}")

    def taken() -> list[str]:
        found, log[:] = list(log), []
        return found

    graphs.warm_up(run, 2)
    assert taken() == ["side waits for main", "run on side", "run on side", "main waits for side"]
    graphs.record(run, None).replay()
    assert taken() == ["record on side, relaxed", "run on side", "replay"]
    graphs.record_in_segments(run, None).replay()
    assert taken() == ["synchronize", "side waits for main", "begin on side, relaxed", "run on side", "end",
                       "main waits for side", "replay"]
