"""Captured steps: one CUDA graph per bucket of batch shapes, replayed instead of launching kernels one by one.

A decode step of a large model is thousands of kernel launches of a few microseconds each, too many for the host. A CUDA graph
records them once and replays them with a single call. A graph replays *addresses*: whatever changes between steps must be
written into the buffers it was captured on (``graph_runner/step_buffers.py``), and a batch is padded to the shape of the next
larger bucket. See NOTE [Padding].

NOTE [Largest first, one pool]: graphs are captured from the largest bucket down into one memory pool, so that small ones reuse
the memory of large ones. That is sound because only one graph runs at a time and its outputs are read before the next one
runs: an output is valid until the next replay of *any* bucket.

NOTE [Late captures]: a lazy runner captures the largest bucket at the start, whose memory in the pool all others use again,
and any other when the first batch of it comes. A decode step whose graph is there first captures one of the rest, the largest,
where captures then take less than LATE_SHARE of the time. So no step waits for more than one capture, and none with prompts for
a graph that it does not need.

NOTE [Warming up]: what is made at first use must not be made while a graph is recorded: memory would lie in the pool, filled by
the replays of that graph only, and what is measured cannot be. So a step runs before it is recorded; before the first capture
all of it, twice, and before the first of each other ``kind``, whose code has not run yet, in ``short_warm_up``: one layer of
each kind, which launches the same kernels in a fraction of the time. Others run the same code, and what they load for their
sizes is kernels, which may be loaded while a graph is recorded (CAPTURE_MODE). What all that may miss is what layers make for
themselves. So the recording counts only if it succeeds and leaves nothing in the pool but its outputs; else it is replayed,
which fills what was made, and the whole step runs and is recorded again. Steps in pieces, which cannot be replayed without a
plan, always run whole.

What records and replays is the device's (``graph_runner/device_graph.py``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from quire.attn_ops.breaks import breaking, left_out
from quire.graph_runner.buckets import pick_bucket
from quire.graph_runner.device_graph import GraphPool, Recorded, device_graphs
from quire.graph_runner.forward_mode import CaptureHiddenMode
from quire.graph_runner.gc_freeze import freeze_gc
from quire.graph_runner.stats import GraphStats
from quire.graph_runner.step_buffers import BatchShape, Bucket, EncoderShape

logger = logging.getLogger(__name__)
#: Eager runs before the first capture, which create library handles, and before others. See NOTE [Warming up].
FIRST_WARMUPS, WARMUPS = 2, 1
#: Of the time of a lazy runner, the most that goes to graphs that no batch has needed yet.
LATE_SHARE = 0.2


class CudaGraphRunner:
    """Captures ``run`` for each bucket and replays it.

    Args:
        run: bucket -> output tensors. Runs a step of that shape on static buffers: device work only, always the same kernels.
        before_capture: shape -> None. Host work that ``run`` needs; called outside the capture.
        buckets: shapes to capture, any order. Decode buckets have num_tokens == num_reqs; mixed ones have more tokens. Those
            with cross attention are EncoderShapes.
        progress: wraps the sequence of buckets while capturing, for a progress bar.
        lazy: capture the largest bucket at the start, and the others in ``can_run``. See NOTE [Late captures].
        pool: memory shared with other runners; one of its own by default.
        keep_outputs: ``replay`` returns copies, which later replays leave alone. For runners that share a pool, as those of a
            target and a draft model: of engines that speculate, which quire's own does not.
        hidden_mode: the hidden states that ``run`` returns. A batch that needs more runs without a graph. For engines that
            return them; quire's own returns logits.
        piecewise: shape -> whether it is captured in pieces, between its attention calls, which then need not be capturable.
        inputs: shape -> the tensors that ``run`` reads, to check that they are where they were (debugging).
        short_warm_up: inside, ``run`` launches each of its kernels, but need not run all of the step. See NOTE [Warming up].
        kind: shape -> what is the same for shapes of which ``run`` runs the same code: of these one runs before it is recorded.
            By default each does.

    Attributes:
        reason: why the last batch had no graph; None if it had one.
    """

    def __init__(self, run: Callable[[Any], Any], buckets: Iterable[Bucket], device: torch.device, *,
                 before_capture: Callable[[Any], None] | None = None,
                 progress: Callable[[Sequence[Any]], Iterator[Any]] | None = None, lazy: bool = False,
                 pool: GraphPool | None = None, keep_outputs: bool = False,
                 hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
                 piecewise: Callable[[Any], bool] = lambda shape: False,
                 inputs: Callable[[Any], Iterable[torch.Tensor]] | None = None,
                 short_warm_up: Callable[[], AbstractContextManager[Any]] | None = None,
                 kind: Callable[[Any], Hashable] = lambda shape: shape) -> None:
        self._run, self._before, self.device, self._piecewise = run, before_capture, device, piecewise
        self.buckets: list[Bucket] = sorted(set(buckets), key=tuple, reverse=True)
        self.stats = GraphStats()
        self.reason: str | None = None
        self._no_room = False  # a late capture ran out of memory
        self._ahead, self._next_late = True, 0.0  # whether a step may capture a bucket that it does not need, and when
        self.lazy, self.hidden_mode, self._keep, self._inputs = lazy, hidden_mode, keep_outputs, inputs
        self._progress, self._short, self._kind, self._ran = progress or iter, short_warm_up, kind, set[Hashable]()
        self._graphs = device_graphs(device)
        self._shared, self._pool = pool, pool or GraphPool()
        self._entries: dict[Bucket, Recorded] = {}
        self._addresses: dict[Bucket, list[int]] = {}
        #: rows of the decode buckets, and the mixed ones, ascending; without cross attention, and with it
        self._sizes: dict[bool, tuple[list[int], list[Bucket]]] = {}
        for cross, shape in ((False, BatchShape), (True, EncoderShape)):
            alike = [b for b in self.buckets[::-1] if isinstance(b, shape)]
            self._sizes[cross] = ([b.num_reqs for b in alike if b.num_tokens == b.num_reqs],
                                  [b for b in alike if b.num_tokens != b.num_reqs])
        self._warned: set[str] = set()

    def can_run(self, shape: BatchShape, decode: bool, hidden: CaptureHiddenMode = CaptureHiddenMode.NULL,
                encoder_lens: Sequence[int] = (), better: Callable[[], str | None] = lambda: None) -> Any:
        """The captured bucket that ``shape`` is padded to, or None: ``reason`` says why, counted and logged once per reason.

        Args:
            shape: of the live batch.  decode: every row of it has one token.
            hidden: the hidden states that the batch needs.
            encoder_lens: encoder tokens of each live row; without any, no cross attention runs.
            better: () -> why the batch takes less time without the graph that there is; None: it does not.
        """
        if not self._entries and not self.lazy:
            return self._no(shape, "nothing is captured")
        if hidden > self.hidden_mode:
            return self._no(shape, f"hidden states of {hidden.name} are wanted, graphs have {self.hidden_mode.name}")
        cross = any(n > 0 for n in encoder_lens)
        if cross and not all(n > 0 for n in encoder_lens):
            return self._no(shape, "some rows have encoder tokens, and others none")
        sizes, mixed = self._sizes[cross]
        if cross and not sizes and not mixed:
            return self._no(shape, "encoder tokens in the batch, and no bucket with cross attention")
        bucket = self._bucket(shape, decode, cross)
        if bucket is None and decode:
            return self._no(shape, f"more rows than the largest decode bucket ({sizes[-1] if sizes else 0})")
        if bucket is None and not mixed:
            return self._no(shape, "a prefill in the batch, and no mixed bucket captured", logging.DEBUG)
        if bucket is None:
            return self._no(shape, f"more tokens or rows than the largest mixed bucket {tuple(mixed[-1][:2])}", logging.DEBUG)
        if (why := better()) is not None:
            return self._no(shape, why, logging.DEBUG)
        if len(self._entries) < len(self.buckets) and (why := self._capture_late(bucket, decode)) is not None:
            return self._no(shape, why)
        self.reason = None
        self.stats.padding_tokens += bucket.num_tokens - shape.num_tokens
        return bucket

    def _capture_late(self, bucket: Bucket, decode: bool) -> str | None:
        """Capture ``bucket``, or another if it has its graph and there is time. Returns why it has none. A capture that no
        batch needs may fail, and is the last such one. See NOTE [Late captures]."""
        missing = bucket not in self._entries
        if self._no_room or not (missing or (decode and self._ahead and time.perf_counter() >= self._next_late)):
            return "there was no memory for another graph" if missing else None
        try:
            self._capture([bucket if missing else next(b for b in self.buckets if b not in self._entries)])
        except Exception as error:
            self._no_room |= isinstance(error.__cause__, torch.OutOfMemoryError)
            if missing:
                if not self._no_room:
                    raise
                return str(error)
            self._ahead = False
            logger.warning("a CUDA graph that no batch needs yet was not captured, and the rest waits for batches: %s", error)
        return None

    def _bucket(self, shape: BatchShape, decode: bool, cross: bool) -> Bucket | None:
        sizes, mixed = self._sizes[cross]
        if decode:
            size = pick_bucket(sizes, shape.num_reqs)
            if size is not None:
                return EncoderShape(size, size) if cross else BatchShape(size, size)
        # Sorted by tokens: the first that fits wastes least.
        return next((b for b in mixed if b.num_tokens >= shape.num_tokens and b.num_reqs >= shape.num_reqs), None)

    def _no(self, shape: BatchShape, why: str, level: int = logging.WARNING) -> BatchShape | None:
        """Count and log why there is no graph; returns None."""
        self.reason = why
        self.stats.fell_back[why] += 1
        if why not in self._warned:
            self._warned.add(why)
            logger.log(level, "step of %d tokens, %d rows runs without a CUDA graph: %s", *shape, why)
        return None

    def capture(self) -> None:
        """Capture every bucket, or the largest if ``lazy``. See NOTE [Largest first, one pool]. Raises RuntimeError, which says
        what to change, if memory runs out. Earlier captures are dropped."""
        try:
            self._capture(self._progress(self.buckets[:1] if self.lazy else self.buckets))
        except RuntimeError:
            self.clear()
            raise

    def estimate(self) -> int:
        """About how many bytes capturing all buckets will take: the two largest, one from the middle and the smallest are
        captured, measured and dropped. The largest have the memory of their steps, which later ones of the pool use again; each
        further one takes what a graph itself needs, as the last two do."""
        costs: list[int] = []
        count = len(self.buckets)
        for i in sorted({0, 1, count // 2, count - 1} & set(range(count))):
            before = self.stats.capture_bytes
            self._capture([self.buckets[i]])
            costs.append(self.stats.capture_bytes - before)
        self.clear()
        self._graphs.release()
        self.stats = GraphStats(estimated_bytes=sum(costs) + (count - len(costs)) * max(costs[-2:], default=0))
        return self.stats.estimated_bytes

    def _capture(self, buckets: Iterable[Bucket]) -> None:
        began = time.perf_counter()
        self._graphs.release()  # recording does so too: what eager steps left would count as gained
        before = self._graphs.free_bytes()
        # Garbage may hold memory, but a collection walks all objects of the process: for a late capture, longer than it takes.
        with freeze_gc(collect=not self._entries):
            for bucket in buckets:
                try:
                    self._capture_one(bucket)
                except torch.OutOfMemoryError as error:
                    raise RuntimeError(
                        f"out of GPU memory while capturing the CUDA graph of {bucket.num_reqs} rows. Give the KV cache less "
                        "(gpu_memory_utilization or num_pages), capture fewer or smaller batches (max_num_seqs or "
                        "cudagraph_capture_sizes), or none (cudagraph_capture_sizes=[]).") from error
        ended = time.perf_counter()
        self._next_late = ended + (ended - began) * (1 / LATE_SHARE - 1)
        self.stats.capture_seconds += ended - began
        self.stats.capture_bytes += max(0, before - self._graphs.free_bytes())

    def _capture_one(self, bucket: Bucket) -> None:
        if self._before is not None:
            self._before(bucket)
        short = self._entries and self._short is not None and not self._piecewise(bucket)
        recorded = self._after_short_warm_up(bucket) if short else None
        self._entries[bucket] = recorded or self._record(bucket, WARMUPS if self._entries else FIRST_WARMUPS)
        self._ran.add(self._kind(bucket))
        self.stats.pieces += self._entries[bucket].pieces
        if self._inputs is not None:
            self._addresses[bucket] = [t.data_ptr() for t in self._inputs(bucket)]
        self.stats.captured += 1

    def _after_short_warm_up(self, bucket: Bucket) -> Recorded | None:
        """None if the whole step must run before it is recorded. See NOTE [Warming up]."""
        assert self._short is not None
        why = "it made memory that is kept"
        try:
            recorded: Recorded | None = self._record(bucket, 0 if self._kind(bucket) in self._ran else WARMUPS, self._short)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            failed: BaseException | None = error  # a recording that ends after an error raises one of its own
            while failed is not None:
                traceback.clear_frames(failed.__traceback__)  # which hold the tensors that the step had when it failed
                failed = failed.__cause__ or failed.__context__
            if self._left():
                raise  # nothing would fill what was made
            recorded, why = None, str(error)
        if recorded is not None and not self._left():
            return recorded
        logger.info("the graph of %s is recorded again, after its whole step: %s", tuple(bucket), why)
        if recorded is not None:
            recorded.replay()
            self._graphs.release()  # waits for it
        return None

    def _left(self) -> bool:
        return self._graphs.is_left(self._pool.handle(self._graphs), self._pool.recorded)

    def _record(self, bucket: Bucket, warm_ups: int, inside: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
                ) -> Recorded:
        run, cut = functools.partial(self._run, bucket), self._piecewise(bucket)
        if warm_ups:
            with breaking(left_out) if cut else contextlib.nullcontext(), inside():
                self._graphs.warm_up(run, warm_ups)
        record = self._graphs.record_in_segments if cut else self._graphs.record
        recorded = record(run, self._pool.handle(self._graphs))
        self._pool.recorded.add(recorded)
        return recorded

    def replay(self, bucket: Bucket) -> Any:
        """Run the bucket's graph on the static buffers; the output is valid until the next replay of any bucket of the pool, or
        for good with ``keep_outputs``. Raises RuntimeError if the bucket was not captured, or (with ``inputs``) a tensor that
        its graph reads has moved."""
        if bucket not in self._entries:
            raise RuntimeError(f"the step {tuple(bucket)} was not captured: capture it at the start, or make the runner lazy")
        if self._inputs is not None:
            moved = [i for i, (t, there) in enumerate(zip(self._inputs(bucket), self._addresses[bucket], strict=True))
                     if t.data_ptr() != there]
            if moved:
                raise RuntimeError(f"inputs {moved} of the graph of {tuple(bucket)} are not where they were at its capture; "
                                   "the graph would read what lies at the old addresses")
        self.stats.replayed += 1
        self.stats.replays[bucket] += 1
        output = self._entries[bucket].replay()
        return tree_map_only(torch.Tensor, torch.clone, output) if self._keep else output

    def clear(self) -> None:
        """Drop the graphs and their memory."""
        self._entries.clear()
        self._addresses.clear()
        self._pool = self._shared or GraphPool()
