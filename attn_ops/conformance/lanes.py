"""Checks in several processes: each waits for compilers most of the time, and one that crashes takes no other with it."""

from __future__ import annotations

import collections
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

Task = TypeVar("Task")
Answer = TypeVar("Answer")

#: Of the processes that run checks: many share the CPU, so each computes and compiles in one thread; ninja, of which few run,
#: compiles 6 files at a time, because each compiler takes some GB.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "MAX_JOBS": "6"}
LATE: Any = object()


class Ended(RuntimeError):
    """A process ended before it answered."""


class Worker:
    """A process that runs ``function`` on what it is sent."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, function), daemon=True)
        self.process.start()
        other.close()

    def call(self, task: Any, until: float | None) -> Any:
        """The answer, or LATE if there is none at ``until`` (by ``time.time()``). Raises Ended."""
        try:
            self.pipe.send(task)
            while not self.pipe.poll(0.5 if until is None else max(0.0, min(0.5, until - time.time()))):
                if until is not None and time.time() >= until:
                    return LATE
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(10)
            raise Ended(f"the process ended with exit code {self.process.exitcode}") from None

    def end(self) -> None:
        """End it with what it started, a compiler perhaps: they are a process group of their own."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join(10)


def _serve(pipe: Any, function: Callable[[Any], Any]) -> None:
    os.setsid()
    with suppress(EOFError):
        while True:
            pipe.send(function(pipe.recv()))


def work_off(tasks: Sequence[Task], function: Callable[[Task], Answer], take: Callable[[Task, Answer], None],
             failed: Callable[[Task, str], Answer], *, jobs: int, until: float | None, each: float,
             poisoned: Callable[[Answer], bool]) -> None:
    """Run ``function``, which can be imported by name, on the tasks in this order; ``take`` their answers, one at a time.

    Args:
        failed: makes the answer for a task whose process ended, or took too long.
        jobs: processes; 1: this one.
        until: by ``time.time()``; nothing is started after it, and with several processes what is not done by then is ended
            without an answer.
        each: seconds for one task, with several processes.
        poisoned: an answer after which a process can do nothing more.
    """
    if jobs == 1:
        for task in tasks:
            if until is not None and time.time() >= until:
                return
            take(task, function(task))
        return
    left, lock = collections.deque(tasks), threading.Lock()

    def lane() -> None:
        worker: Worker | None = None
        try:
            while left and (until is None or time.time() < until):
                try:
                    task = left.popleft()
                except IndexError:
                    return
                worker = worker or Worker(function)
                ends = time.time() + each
                try:
                    answer = worker.call(task, ends if until is None else min(ends, until))
                except Ended as error:
                    answer = failed(task, str(error))
                if stuck := answer is LATE:
                    if until is not None and until <= ends:
                        return
                    answer = failed(task, f"took more than {each:.0f} s")
                with lock:
                    take(task, answer)
                if stuck or poisoned(answer) or not worker.process.is_alive():
                    worker.end()
                    worker = None
        finally:
            if worker is not None:
                worker.end()

    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        threads = [threading.Thread(target=lane) for _ in range(min(jobs, len(tasks)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


__all__ = ["LATE", "Ended", "Worker", "work_off"]
