"""Rows of kernels, measured in processes of their own: one that hangs or dies costs its row, and the next ones follow."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from quire.attn_ops.conformance.lanes import LATE, Ended, Worker
from quire.graph_runner.bench.record import Record
from quire.graph_runner.bench.report import Row, failure, first_line
from quire.graph_runner.bench.workers import of_gpu

HANGS = 2  # rows of a system that take too long, after which its others are left out
AT_THE_END = 0.1  # seconds by which the clocks of the deadline and of the process may differ
_BROKEN = ("took more than", "process ended", "CUDA error")  # errors after which a process can do nothing more
_STARTING = threading.Lock()


@dataclass(frozen=True)
class RowTask:
    """A row to measure: the columns that name it, "system" among them; what its process gets; and its group, whose rows are
    measured one after the other."""

    row: Row
    given: Any
    group: Any


def measure_rows(record: Record, tasks: Sequence[RowTask], measure: Callable[[Any], Row], *, limit: float, gpus: int = 1,
                 process_per_group: bool = False, before: Callable[[Any], None] = lambda group: None,
                 complete: Callable[[Row], Row] = lambda row: row) -> bool:
    """Keep a row for each task that has none: what ``measure``, which is imported by name, returns for it within ``limit``
    seconds, or ``error``; ``complete`` adds derived columns. Returns whether the deadline left time for all.

    As many processes as ``gpus`` run at once, each with a GPU; the groups are divided among them. ``process_per_group``: end a
    process, and so free its memory, after each group. ``before``: called with a group before its first row."""
    left = [task for task in tasks if not record.has(task.row)]
    print(f"{len(left)} of {len(tasks)} rows to measure", flush=True)
    groups = list(dict.fromkeys(task.group for task in left))
    keeping = threading.Lock()

    def lane(gpu: int) -> None:
        worker: Worker | None = None
        current, hung = None, Counter[str]()  # rows that took too long, by system
        try:
            for task in [task for task in left if groups.index(task.group) % gpus == gpu]:
                if worker is not None and process_per_group and task.group != current:
                    worker.end()
                    worker = None
                if task.group != current:
                    before(current := task.group)
                if hung[task.row["system"]] == HANGS:
                    found = {"error": f"left out: {HANGS} rows before it took too long"}
                else:
                    worker = worker or _process(measure, gpu if gpus > 1 else None)
                    try:
                        found = worker.call(task.given, time.time() + record.left, limit)
                    except Ended as error:
                        found = {"error": f"{error}"}
                    if found is LATE and record.left <= AT_THE_END:
                        return
                    if found is LATE:
                        hung[task.row["system"]] += 1
                        found = {"error": f"took more than {limit:.0f} s"}
                    if any(broken in found.get("error", "") for broken in _BROKEN):
                        worker.end()
                        worker = None
                with keeping:
                    record.keep(complete({**task.row, **found}))
        finally:
            if worker is not None:
                worker.end()

    if gpus == 1:
        lane(0)
    else:
        with ThreadPoolExecutor(gpus) as pool:
            list(pool.map(lane, range(gpus)))
    record.write()
    return all(record.has(task.row) for task in left)


def _process(measure: Callable[[Any], Row], gpu: int | None) -> Worker:
    """A process; it has this one's environment as of now, and sees one GPU where ``gpu`` is given."""
    with _STARTING:
        environment = dict(os.environ)
        try:
            os.environ.update({} if gpu is None else of_gpu(gpu))
            return Worker(measure)
        finally:
            if gpu is not None:
                os.environ.pop("CUDA_VISIBLE_DEVICES")
                os.environ.update(environment)


def or_failure(measure: Callable[[Any], Row]) -> Callable[[Any], Row]:
    """Decorator: the row, or the error; memory of the GPU that nothing uses is given back."""

    @functools.wraps(measure)
    def call(task: Any) -> Row:
        try:
            with torch.no_grad():
                return measure(task)
        except Exception as error:
            return {"error": str(failure(error)["error"])[:300]}
        finally:
            if torch.cuda.is_initialized():
                with contextlib.suppress(Exception):  # after an error of the GPU
                    torch.cuda.empty_cache()

    return call


def kernel_line(name: str, row: Row, *more: str) -> str:
    """A row for the terminal: ``name``, time, share of the floor, and ``more``."""
    if "us" not in row:
        return f"{name} {first_line(row['error'])[:120]}"
    return "  ".join([f"{name} {row['us']:10.1f} us {row['share']:6.1%} of the floor", *more])
