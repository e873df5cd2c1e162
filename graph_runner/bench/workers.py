"""Measuring in processes of their own: a worker reads a job from standard input, and writes rows to a pipe as it measures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


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
         log: Path | None = None, shown: bool = False) -> Iterator[Row]:
    """The rows of a Python process, as they come; what it and its child processes print goes to the end of ``log``, or to this
    process's output (``shown``).

    Args:
        command: arguments of the interpreter. environment: beside this process's own.
        deadline: by ``time.time()``; the process is then ended with all that it started, and the rows end.

    Raises:
        Ended: its exit code was not 0 before the deadline; with what it wrote last.
    """
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
