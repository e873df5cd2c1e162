"""Captured steps: one CUDA graph per bucket of batch shapes, replayed instead of launching kernels one by one.

A decode step of a large model is thousands of kernel launches of a few microseconds each, too many for the host. A CUDA graph
records them once and replays them with a single call. A graph replays *addresses*: whatever changes between steps must be
written into the buffers it was captured on (``graph_runner/step_buffers.py``), and a batch is padded to the shape of the next
larger bucket. See NOTE [Padding].

NOTE [Largest first, one pool]: graphs are captured from the largest bucket down into one memory pool, so that small ones reuse
the memory of large ones. That is sound because only one graph runs at a time and its outputs are read before the next one
runs: an output is valid until the next replay of *any* bucket.

On a CPU there is nothing to capture; the same runner keeps one callable per bucket, so that buckets, padding and fallback are
tested without a GPU.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.attn_ops.kernels.launch import side_stream
from quire.graph_runner.buckets import pick_bucket
from quire.graph_runner.gc_freeze import freeze_gc
from quire.graph_runner.step_buffers import BatchShape

logger = logging.getLogger(__name__)
#: Eager runs before the first capture, which create library handles, and before each other one, which load its own kernels.
FIRST_WARMUPS, WARMUPS = 2, 1


@dataclass
class GraphStats:
    """Counts so far. ``fell_back``: steps that ran without a graph, by reason."""

    captured: int = 0
    replayed: int = 0
    fell_back: Counter[str] = field(default_factory=Counter)
    capture_seconds: float = 0.0
    capture_bytes: int = 0

    def __str__(self) -> str:
        over = ", ".join(f"{n} for {why}" for why, n in self.fell_back.items()) or "none"
        return (f"{self.captured} graphs ({self.capture_seconds:.1f} s, {self.capture_bytes / 2**20:.0f} MiB), {self.replayed} "
                f"replays, fell back: {over}")


class CudaGraphRunner:
    """Captures ``run`` for each bucket and replays it.

    Args:
        run: shape -> output tensors. Runs a step of that shape on static buffers: device work only, the same kernels each time.
        before_capture: shape -> None. Host work that ``run`` needs; called outside the capture.
        buckets: shapes to capture, any order. Decode buckets have num_tokens == num_reqs; mixed ones have more tokens.
        device: only CUDA devices capture.
        progress: wraps the sequence of buckets while capturing, for a progress bar.
    """

    def __init__(self, run: Callable[[BatchShape], Any], buckets: Iterable[BatchShape], device: torch.device, *,
                 before_capture: Callable[[BatchShape], None] | None = None,
                 progress: Callable[[Sequence[BatchShape]], Iterator[BatchShape]] | None = None) -> None:
        self._run, self._before, self.device = run, before_capture, device
        self.buckets = sorted(set(buckets), reverse=True)
        self.stats = GraphStats()
        self._progress = progress or iter
        self._entries: dict[BatchShape, Any] = {}
        self._outputs: dict[BatchShape, Any] = {}
        self._pool: Any = None
        self._decode = sorted(b.num_reqs for b in self.buckets if b.num_tokens == b.num_reqs)
        self._mixed = sorted(b for b in self.buckets if b.num_tokens != b.num_reqs)
        self._warned: set[str] = set()

    def can_run(self, shape: BatchShape, decode: bool) -> BatchShape | None:
        """The captured bucket that ``shape`` is padded to, or None, which is counted and logged once per reason.

        Args:
            shape: of the live batch.
            decode: every row has one token.
        """
        if not self._entries:
            self._no(shape, "nothing is captured")
            return None
        if decode:
            size = pick_bucket(self._decode, shape.num_reqs)
            if size is not None:
                return BatchShape(size, size)
        for bucket in self._mixed:  # sorted by tokens: the first that fits wastes least
            if bucket.num_tokens >= shape.num_tokens and bucket.num_reqs >= shape.num_reqs:
                return bucket
        if decode:
            self._no(shape, f"more rows than the largest decode bucket ({self._decode[-1] if self._decode else 0})")
        elif not self._mixed:
            self._no(shape, "a prefill in the batch, and no mixed bucket captured", logging.DEBUG)
        else:
            self._no(shape, f"more tokens or rows than the largest mixed bucket {tuple(self._mixed[-1])}", logging.DEBUG)
        return None

    def _no(self, shape: BatchShape, why: str, level: int = logging.WARNING) -> None:
        self.stats.fell_back[why] += 1
        if why not in self._warned:
            self._warned.add(why)
            logger.log(level, "step of %d tokens, %d rows runs without a CUDA graph: %s", *shape, why)

    def capture(self) -> None:
        """Capture every bucket. See NOTE [Largest first, one pool].

        Raises:
            RuntimeError: out of memory; says what to change. Earlier captures are dropped.
        """
        began, before = time.perf_counter(), self._free_bytes()
        with freeze_gc():
            for bucket in self._progress(self.buckets):
                try:
                    self._capture_one(bucket)
                except torch.OutOfMemoryError as error:
                    self.clear()
                    raise RuntimeError(
                        f"out of GPU memory while capturing the CUDA graph of {bucket.num_reqs} rows. Give the KV cache less "
                        "(gpu_memory_utilization or num_pages), capture fewer or smaller batches (max_num_seqs or "
                        "cudagraph_capture_sizes), or none (cudagraph_capture_sizes=[]).") from error
        self.stats.capture_seconds += time.perf_counter() - began
        self.stats.capture_bytes += max(0, before - self._free_bytes())

    def _capture_one(self, bucket: BatchShape) -> None:
        if self._before is not None:
            self._before(bucket)
        if self.device.type != "cuda":
            self._entries[bucket] = functools.partial(self._run, bucket)
            self.stats.captured += 1
            return
        stream = side_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS if self._entries else FIRST_WARMUPS):
                self._run(bucket)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            output = self._run(bucket)
        if self._pool is None:
            self._pool = graph.pool()
        self._entries[bucket], self._outputs[bucket] = graph, output
        self.stats.captured += 1

    def replay(self, bucket: BatchShape) -> Any:
        """Run the bucket's graph on the static buffers; the output is valid until the next replay of any bucket."""
        self.stats.replayed += 1
        entry = self._entries[bucket]
        if self.device.type != "cuda":
            return entry()
        entry.replay()
        return self._outputs[bucket]

    def clear(self) -> None:
        """Drop the graphs and their memory."""
        self._entries.clear()
        self._outputs.clear()
        self._pool = None

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0


__all__ = ["CudaGraphRunner", "GraphStats"]
