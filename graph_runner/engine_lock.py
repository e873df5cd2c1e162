"""Whose turn it is: an engine's requests are touched by one thread at a time, and by one turn from its beginning to its end.

Three things would otherwise come in the middle of a turn, when rows are planned and not yet launched:

- another thread: it waits, or, if it streams, helps, as a turn delivers the tokens of all;
- a Ctrl-C: it takes effect when the turn is over (a step at most), so that no request is left half computed;
- a stream that nobody listens to any more, which the garbage collector ends wherever it happens to run: its requests are
  taken out when the turn is over, by whoever has it.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class Turns:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._busy = False
        self._later: deque[Callable[[], None]] = deque()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no other thread is, and no interrupt comes. May be nested."""
        try:
            with self._lock:
                if self._busy:
                    yield
                    return
                with self._uninterrupted():
                    yield
        finally:
            self._try()

    def soon(self, action: Callable[[], None]) -> None:
        """Do it now, or if a turn is under way, in whatever thread, when that is over. Waits for nobody: finalisers may call
        it, in a thread that holds any lock."""
        self._later.append(action)
        self._try()

    def _try(self) -> None:
        while self._later and self._lock.acquire(blocking=False):  # who has the lock looks again after letting go of it
            try:
                if self._busy:
                    return
                with self._uninterrupted():
                    self._later.popleft()()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        with _interrupts_at_the_end():
            self._busy = True
            try:
                yield
            finally:
                self._busy = False


def alone(method: Callable[..., Any]) -> Any:
    """The method, of an object with ``turns``, runs alone."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.turns.alone():
            return method(self, *args, **kwargs)

    return call


@contextlib.contextmanager
def _interrupts_at_the_end() -> Iterator[None]:
    """A Ctrl-C that comes inside is handled at the end. Python handles signals in the main thread only."""
    if threading.current_thread() is not threading.main_thread() or not callable(handler := signal.getsignal(signal.SIGINT)):
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *signal_and_frame: came.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])


__all__ = ["Turns", "alone"]
