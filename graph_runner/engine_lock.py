"""The engine's lock: one thread at a time, and each engine step runs from beginning to end.

Three things would otherwise interrupt a step between scheduling and launching its batch:

- another thread: it waits, and if it streams, runs the next step itself, since a step delivers the tokens of all requests;
- Ctrl-C: handled after the step, so that no request is left half computed;
- a dropped stream, which the garbage collector may finalize anywhere: its requests are aborted after the step.

And steps run without what the calling thread has set in torch (``isolated``). ``torch.set_default_dtype`` holds for the whole
process, so that a step cannot set it without changing what other threads compute meanwhile: the code of steps gives a dtype to
each tensor of floats that it makes.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch


class EngineLock:
    """A re-entrant lock that defers interrupts, and runs actions as soon as it is free."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held = False
        self._deferred: deque[Callable[[], None]] = deque()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other threads out and defer Ctrl-C to the end. May be nested."""
        try:
            with self._lock:
                if self._held:
                    yield
                    return
                with self._uninterrupted():
                    yield
        finally:
            self._run_deferred()

    def when_free(self, action: Callable[[], None], ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Run ``action`` now, or where any thread holds the lock, when that thread releases it. Never blocks, so that
        finalizers may call it in a thread that holds any lock. Not where the interpreter is ``ending``, whose modules may be
        empty by then."""
        if not ending():
            self._deferred.append(action)
            self._run_deferred()

    def _run_deferred(self) -> None:
        while self._deferred and self._lock.acquire(blocking=False):  # a holder runs them after it has released the lock
            try:
                if self._held:
                    return
                with self._uninterrupted():
                    self._deferred.popleft()()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Handle a Ctrl-C at the end of the block. Python handles signals in the main thread only."""
        main = threading.current_thread() is threading.main_thread()
        handler, received = signal.getsignal(signal.SIGINT) if main else None, list[Any]()
        if callable(handler):
            signal.signal(signal.SIGINT, lambda *signal_and_frame: received.append(signal_and_frame))
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if callable(handler):
                signal.signal(signal.SIGINT, handler)
                if received:
                    handler(*received[-1])


def locked(method: Callable[..., Any]) -> Any:
    """Method decorator: hold ``self.lock``, an EngineLock."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock.hold():
            return method(self, *args, **kwargs)

    return call


def isolated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method of a runner without what the caller's thread has set, and without gradients.

    Autocast is off: a step holds requests of several threads, and what is compiled or captured under autocast stays so. So is
    inference mode, which a runner's tensors outlive. The GPU of the model (``device`` of the runner; in its constructor, of the
    first argument's parameters) is the current one, on whose stream events are recorded.
    """

    @functools.wraps(method)
    def run(runner: Any, *args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            device = runner.device if hasattr(runner, "device") else next(args[0].parameters()).device
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            return method(runner, *args)

    return run
