"""Checks in several processes: each waits for compilers most of the time, and one that crashes takes no other with it."""

from __future__ import annotations

import collections
import itertools
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
HANGS = 3


class Ended(RuntimeError):
    """A process ended before it answered."""


class Worker:
    """A process that runs ``function`` on what it is sent. Of several GPUs that CUDA_VISIBLE_DEVICES names, process ``number``
    has another one as its first than the process before."""

    def __init__(self, function: Callable[[Any], Any], number: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        first = number % len(gpus)
        visible = ",".join(gpus[first:] + gpus[:first])
        self.process = context.Process(target=_serve, args=(other, function, visible), daemon=True)
        self.process.start()
        self.ready = False
        other.close()

    def call(self, task: Any, until: float | None, seconds: float) -> Any:
        """The answer, or LATE if there is none at ``until`` (by ``time.time()``), or ``seconds`` after the process got the
        task: it begins with its imports. Raises Ended."""
        try:
            if not self.ready:
                if not self._answers(until):
                    return LATE
                self.ready = self.pipe.recv()
            self.pipe.send(task)
            ends = time.time() + seconds
            return self.pipe.recv() if self._answers(ends if until is None else min(ends, until)) else LATE
        except (EOFError, OSError):
            self.process.join(10)
            raise Ended(f"the process ended with exit code {self.process.exitcode}") from None

    def _answers(self, until: float | None) -> bool:
        while not self.pipe.poll(0.5 if until is None else max(0.0, min(0.5, until - time.time()))):
            if until is not None and time.time() >= until:
                return False
        return True

    def end(self) -> None:
        """End it with what it started, a compiler perhaps: they are a process group of their own."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join(10)


def _serve(pipe: Any, function: Callable[[Any], Any], gpus: str) -> None:
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # CUDA reads it when it is first used
    os.setsid()
    with suppress(EOFError):
        pipe.send(True)
        while True:
            pipe.send(function(pipe.recv()))


def work_off(tasks: Sequence[Task], function: Callable[[Task], Answer], take: Callable[[Task, Answer], None],
             failed: Callable[[Task, str], Answer], *, jobs: int, until: float | None, each: float,
             group: Callable[[Task], Any], poisoned: Callable[[Answer], bool]) -> None:
    """Run ``function``, which can be imported by name, on the tasks in this order; ``take`` their answers, one at a time.

    Args:
        failed: makes the answer for a task whose process ended, or took too long.  jobs: processes; 1: this one.
        until: by ``time.time()``; nothing is started after it, and with several processes what is not done by then is ended
            without an answer.  each: seconds for one task, with several processes.
        group: of a task; when HANGS tasks of one took too long, its others fail at once: each may be left to hang.
        poisoned: an answer after which a process can do nothing more.
    """
    if jobs == 1:
        for task in tasks:
            if until is not None and time.time() >= until:
                return
            take(task, function(task))
        return
    left, lock, hung = collections.deque(tasks), threading.Lock(), collections.Counter[Any]()
    numbers = itertools.count()

    def lane() -> None:
        worker: Worker | None = None
        try:
            while left and (until is None or time.time() < until):
                try:
                    task = left.popleft()
                except IndexError:
                    return
                if hung[group(task)] >= HANGS:
                    with lock:
                        take(task, failed(task, f"left out: {HANGS} others of {group(task)} took more than {each:.0f} s"))
                    continue
                worker = worker or Worker(function, next(numbers))
                try:
                    answer = worker.call(task, until, each)
                except Ended as error:
                    answer = failed(task, str(error))
                if stuck := answer is LATE:
                    if until is not None and time.time() >= until:
                        return
                    answer = failed(task, f"took more than {each:.0f} s")
                with lock:
                    hung[group(task)] += stuck
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
