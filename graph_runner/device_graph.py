"""How a device records a step and replays it: all that ``CudaGraphRunner`` needs of one.

A new device is one class with the methods of ``DeviceGraphs``, registered for its torch device type. On a CPU there is
nothing to record: a step is kept as a callable, so that buckets, padding and fallback are tested without an accelerator.

Piecewise graphs (``record_in_segments``) are a step recorded as a sequence of graphs, with attention called between them:

    graph 0: embedding, norm, q/k/v, rope
    attention of layer 0, an ordinary call
    graph 1: output projection, residual, norm, MLP, residual, norm, q/k/v, rope
    ...

Nothing is compiled again and the model's code is not changed: a paged op that runs while a step is recorded ends the graph
and begins the next one in the same pool (``attn_ops/breaks.py``).

NOTE [Memory across a break]: the tensors that attention reads are made by the graph before it, and its result is read by the
graph after it. All lie in the pool, at the addresses of the recording, and nothing keeps them: after the last reader in the
order of the step, later graphs use the memory again, as inside one graph. So a break notes addresses (``alias``) and not
tensors, and the result of the call is copied to the memory that was recorded for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from quire.attn_ops.breaks import breaking
from quire.attn_ops.kernels.launch import CAPTURE_MODE, side_stream, synchronize


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded step. ``replay()`` runs it on the addresses that it was recorded on and returns its output, which is the same
    tensors every time: valid until the next replay of any step of the pool. ``output``: these, if they are known before a
    replay. ``pieces``: graphs that it was recorded in."""

    replay: Callable[[], Any]
    output: Any = None
    pieces: int = 1

    @functools.cached_property
    def memory(self) -> frozenset[int]:
        """Addresses of the memory that holds the output."""
        return frozenset(t.untyped_storage().data_ptr() for t in tree_leaves(self.output) if isinstance(t, torch.Tensor))


class DeviceGraphs(Protocol):
    """One device's graphs."""

    def __init__(self, device: torch.device) -> None:
        """For one device."""

    def new_pool(self) -> Any:
        """Memory that several graphs may share, also graphs of several runners."""

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
        """Run the step as it will be recorded, and wait for it."""

    def record(self, run: Callable[[], Any], pool: Any) -> Recorded:
        """Record ``run``, whose memory comes from ``pool``."""

    def record_in_segments(self, run: Callable[[], Any], pool: Any) -> Recorded:
        """The same, cut at attention calls, which a replay makes anew. Raises RuntimeError where the device
        cannot."""

    def is_left(self, pool: Any, recorded: Iterable[Recorded]) -> bool:
        """Whether anything lies in ``pool`` beside the outputs of ``recorded``, or may."""

    def free_bytes(self) -> int:
        """Free device memory; 0 where that has no meaning."""

    def release(self) -> None:
        """Give the memory of dropped graphs back to the device."""


class CpuGraphs:
    """Keeps callables. Their outputs are new at every replay."""

    def __init__(self, device: torch.device) -> None:
        pass

    def new_pool(self) -> Any:
        return None

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
        pass

    def record(self, run: Callable[[], Any], pool: Any) -> Recorded:
        return Recorded(run)

    record_in_segments = record

    def is_left(self, pool: Any, recorded: Iterable[Recorded]) -> bool:
        return False

    def free_bytes(self) -> int:
        return 0

    def release(self) -> None:
        pass


def _recorded(graph: Any, recording: AbstractContextManager[Any], run: Callable[[], Any]) -> Recorded:
    with recording:
        output = run()

    def replay() -> Any:
        graph.replay()
        return output

    return Recorded(replay, output)


class CudaGraphs:
    """CUDA graphs, recorded on the side stream that quire's kernels know, in CAPTURE_MODE."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
        with self._beside() as stream, torch.cuda.stream(stream):
            for _ in range(times):
                run()

    def record(self, run: Callable[[], Any], pool: Any) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        # The outer one restores the current stream where the recording fails, after which torch.cuda.graph does not.
        with side_stream(self.device) as stream, torch.cuda.stream(torch.cuda.current_stream(self.device)):
            return _recorded(graph, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=CAPTURE_MODE), run)

    def record_in_segments(self, run: Callable[[], Any], pool: Any) -> Recorded:
        def begin() -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode=CAPTURE_MODE)
            return graph

        def end(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
            graph.capture_end()
            return graph.replay

        self.release()  # what warming up left in the ordinary pool, as torch.cuda.graph does
        with self._beside() as stream, torch.cuda.stream(stream):
            return Recorded(*record_in_segments(begin, end, run))

    def is_left(self, pool: Any, recorded: Iterable[Recorded]) -> bool:
        known = frozenset().union(*(each.memory for each in recorded))
        return any(block["state"] == "active_allocated" and block["address"] not in known
                   for segment in torch.cuda.memory_snapshot(pool) for block in segment["blocks"])

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def release(self) -> None:
        synchronize(self.device)
        torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _beside(self) -> Iterator[torch.cuda.Stream]:
        """The side stream, between what the current stream has to do before and after."""
        with side_stream(self.device) as stream:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            yield stream
            torch.cuda.current_stream(self.device).wait_stream(stream)


class NpuGraphs:
    """Ascend's graphs, by torch_npu's published names. Never run on hardware, and no attention backend here runs on an NPU yet:
    the class is for adding one. Lengths that a kernel reads from the host (``actual_seq_lengths_kv``) must be updated at each
    replay by that backend's ``plan``."""

    def __init__(self, device: torch.device) -> None:
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            raise RuntimeError(f"graphs on {device} need torch_npu, which is not installed: pip install torch_npu") from error
        self.device, self._npu = device, torch.npu  # type: ignore[attr-defined]

    def new_pool(self) -> Any:
        return self._npu.graph_pool_handle()

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
        for _ in range(times):
            run()
        self._npu.synchronize()

    def record(self, run: Callable[[], Any], pool: Any) -> Recorded:
        graph = self._npu.NPUGraph()
        return _recorded(graph, self._npu.graph(graph, pool=pool, auto_dispatch_capture=True), run)

    def record_in_segments(self, run: Callable[[], Any], pool: Any) -> Recorded:
        raise RuntimeError("piecewise graphs are not supported on an NPU: make the engine without cudagraph_piecewise")

    def is_left(self, pool: Any, recorded: Iterable[Recorded]) -> bool:
        return True  # not known

    def free_bytes(self) -> int:
        return self._npu.mem_get_info(self.device)[0]

    def release(self) -> None:
        self._npu.empty_cache()


_DEVICES: dict[str, type[DeviceGraphs]] = {"cpu": CpuGraphs, "cuda": CudaGraphs, "npu": NpuGraphs}


def register_device_graphs(device_type: str, graphs: type[DeviceGraphs]) -> None:
    """Use ``graphs`` for devices of a torch device type."""
    _DEVICES[device_type] = graphs


def device_graphs(device: torch.device) -> DeviceGraphs:
    """The graphs of a device. Raises RuntimeError if none are registered for it, or its package is missing."""
    if device.type not in _DEVICES:
        raise RuntimeError(f"no graphs are known for {device.type}; there are those of {', '.join(_DEVICES)}. Register a class "
                           "with quire.graph_runner.device_graph.register_device_graphs")
    return _DEVICES[device.type](device)


class GraphPool:
    """Memory for the graphs of several runners (a target and its draft model), made at the first use.

    Sound because replays never overlap; a runner that shares one copies its outputs (``CudaGraphRunner(keep_outputs=True)``)
    if they are read after another's replay. ``recorded``: the graphs that live in it.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self.recorded: weakref.WeakSet[Recorded] = weakref.WeakSet()

    def handle(self, graphs: DeviceGraphs) -> Any:
        if self._handle is None:
            self._handle = graphs.new_pool()
        return self._handle


def record_in_segments(begin: Callable[[], Any], end: Callable[[Any], Callable[[], Any]], run: Callable[[], Any]
                       ) -> tuple[Callable[[], Any], Any, int]:
    """Record ``run`` in pieces, cut at each paged op; returns what replays it, its output, and the number of pieces. Attention
    is not run meanwhile. ``begin`` starts recording and returns the graph, ``end`` stops recording a graph and returns what
    replays it."""
    steps: list[Callable[[], Any]] = []
    graph: Any = begin()

    def at_break(implementation: Callable[..., Any], fake: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
                 ) -> torch.Tensor:
        nonlocal graph
        out = fake(*args, **kwargs)  # while recording, so that it lies in the pool
        ended, graph = graph, None
        steps.append(end(ended))
        given_args, given_kwargs, result = tree_map_only(torch.Tensor, alias, (args, kwargs, out))
        steps.append(lambda: result.copy_(implementation(*given_args, **given_kwargs)))
        graph = begin()
        return out

    try:
        with breaking(at_break):
            output = run()
    except BaseException:
        if graph is not None:
            with contextlib.suppress(Exception):  # the first error says more
                end(graph)
        raise
    steps.append(end(graph))

    def replay() -> Any:
        for step in steps:
            step()
        return output

    return replay, output, (len(steps) + 1) // 2


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that does not keep it. See NOTE [Memory across a break]."""
    there = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(there.data_ptr(), tensor.device, there.nbytes())
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride())
