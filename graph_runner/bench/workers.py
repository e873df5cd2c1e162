"""Measuring in processes of their own: a worker reads a job from standard input, and writes rows to a pipe as it measures."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.graph_runner.bench.record import Record, started
from quire.graph_runner.bench.report import Row


class Ended(RuntimeError):
    """A worker ended before its job was done."""

    def __init__(self, code: int, said: list[str]) -> None:
        self.code = code
        super().__init__(f"the process ended with exit code {code}: {said[-1] if said else ''}\n" + "\n".join(said[-40:]))


def job() -> Any:
    """In a worker: its job."""
    return json.loads(sys.stdin.read())


def emit(row: Row) -> None:
    """In a worker: hand over a row. An empty one is the last."""
    with open(int(os.environ["QUIRE_ROWS"]), "w", closefd=False) as pipe:
        print(json.dumps(row, default=str), file=pipe)


def rows(command: list[str], job: Any, environment: Mapping[str, str], *, deadline: float | None = None,
         log: Path | None = None, shown: bool = False, cores: Collection[int] | None = None) -> Iterator[Row]:
    """The rows of a Python process, as they come; what it and its child processes print goes to the end of ``log``, or to this
    process's output (``shown``). ``command``: arguments of the interpreter. ``environment``: beside this process's own.
    ``cores``: those it may run on; None: this process's. At the ``deadline``, by ``time.time()``, the process is ended with
    all that it started, and the rows end. Raises Ended, with what it wrote last, if its exit code was not 0 before that."""
    read, write = os.pipe()
    with os.fdopen(read) as found, log.open("a+") if log else tempfile.TemporaryFile("w+") as said:
        try:
            out = None if shown else said
            worker = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=out, stderr=out, text=True,
                                      pass_fds=[write], env={**os.environ, **environment, "QUIRE_ROWS": str(write)},
                                      start_new_session=True)
        finally:
            os.close(write)  # the worker has it: the pipe ends with its last holder
        timer = threading.Timer(1e6 if deadline is None else max(0.1, deadline - time.time()), _end, [worker])
        timer.daemon = True
        timer.start()
        done = False
        try:
            if cores:
                os.sched_setaffinity(worker.pid, cores)
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError), worker.stdin as given:
                json.dump(job, given, default=str)
            for line in found:
                if done := not (row := json.loads(line)):
                    break
                yield row
            if not done:
                worker.wait()
        finally:
            timer.cancel()
            _end(worker)
            code = worker.wait()
        if not done and code and (deadline is None or time.time() < deadline):
            said.seek(0)
            raise Ended(code, [line.rstrip() for line in said if line.strip()])


def _end(worker: subprocess.Popen[str]) -> None:
    """End the worker and the processes it started, which are a process group of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)


def of_gpu(gpu: int) -> dict[str, str]:
    """The environment of a process that sees one of this process's GPUs."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": visible[gpu] if visible else str(gpu)}


def cores_of(gpu: int, gpus: int) -> list[int] | None:
    """A GPU's share of the cores that this process may run on, so that what starts on one does not slow the host's part of
    another's steps; None if there are not enough, or the system has no such bounds."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    each = len(cores) // gpus
    return cores[gpu * each : (gpu + 1) * each] if gpus > 1 and each > 1 else None


def run_apart(
    parser: argparse.ArgumentParser, shares: dict[str, float], measure: Callable[[str, Record, argparse.Namespace], None],
    finish: Callable[[list[Row]], None] = lambda rows: None,
) -> Record | None:
    """Measure each of ``--ways`` in a process of its own, and write all rows to one file, as each way writes its own. The
    memory of one is free before the next one starts, and a deadline that ends one leaves the others as they are. Returns the
    record of all ways; None in the process of one.

    A way gets its share of the time that is left. At its end its processes are killed, and what it has written stays: a row
    without figures then has ``error``, which says what the way was doing (``doing`` of its row).

    Args:
        parser: of the script (``record.script``). It gets ``--ways``, and ``--apart``, with which the script starts itself.
        shares: of the time, for each way that the script knows.
        measure: ``(way, record, arguments)``, called in the way's own process; nothing interrupts it after ``record.left``.
        finish: completes the rows of all ways, in place, before they are written.
    """
    parser.add_argument("--ways", default=",".join(shares), help="any of: %(default)s (default: all)")
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    ways = args.ways.split(",")
    if unknown := sorted(set(ways) - shares.keys()):
        raise SystemExit(f"unknown ways {', '.join(unknown)}; there are: {', '.join(shares)}")
    record = started(args)
    record.interrupts = False
    if args.apart:
        record.write = lambda: emit({"rows": record.rows})  # type: ignore[method-assign]
        record.measure(ways[0], lambda: measure(ways[0], record, args))
        emit({})
        return None
    # So that a way's process ends with this one.
    previous = signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        for i, way in enumerate(ways):
            _one(record, way, record.left * shares[way] / sum(shares[of] for of in ways[i:]), finish)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return record


def _one(record: Record, way: str, seconds: float, finish: Callable[[list[Row]], None]) -> None:
    before, began, own, ended = list(record.rows), time.monotonic(), list[Row](), ""

    def merge() -> None:
        record.rows[:] = before + own
        finish(record.rows)
        record.write()

    limit = [] if seconds == float("inf") else ["--deadline", f"{seconds:.1f}"]
    try:
        for found in rows([*sys.argv, "--ways", way, "--apart", *limit], None, {}, shown=True,
                          deadline=time.time() + seconds if limit else None):
            own = found["rows"]
            merge()
        took = time.monotonic() - began
        ended = f"was stopped after {took:.0f} s" if took >= seconds else ""
    except Ended as error:
        took, ended = time.monotonic() - began, f"ended with exit code {error.code}"
    last: Row = own[-1] if own else {"way": way}
    doing = last.pop("doing", None)
    if ended and "error" not in last:
        last["error" if doing or not own else "ended"] = ended + (f", during {doing}" if doing else "")
        print(json.dumps(last, default=str), flush=True)
    own = [{"way": way, **row, "process_s": took} for row in own or [last]]
    merge()
