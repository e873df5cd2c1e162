"""Keep Python's garbage collector out of the way while CUDA graphs are captured, and while an engine serves."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# CPython 3.12 keeps some 375 immortal objects among the frozen ones (3.11 and 3.13: none), and `gc.freeze` freezes at least the
# 5000 objects of a bare interpreter. More than this many frozen objects mean that the application froze its own.
_INTERPRETERS_OWN = 1000
_inside = 0  # blocks of freeze_gc; counting the frozen objects walks them, which takes longer than many a capture


@contextmanager
def freeze_gc(collect: bool = True) -> Iterator[None]:
    """Collect once, then keep the collector off until the block ends.

    A collection during capture may free CUDA tensors, which a capturing stream does not allow, and with a model loaded it walks
    millions of objects. So all objects alive on entry are frozen (moved where no collection looks), and automatic collection
    is disabled until the end. ``collect=False`` freezes garbage too: a collection walks all of torch and transformers.

    May be nested: an inner block leaves all to the outer one. Where the application has frozen objects of its own, the block
    only collects and disables: `gc.unfreeze` would unfreeze theirs too. The collector is per process: the block holds for all
    threads, and overlapping blocks of several threads are not supported.
    """
    global _inside
    was_enabled = gc.isenabled()
    freeze = not _inside and gc.get_freeze_count() < _INTERPRETERS_OWN
    _inside += 1
    gc.disable()
    try:
        if collect:
            gc.collect()
        if freeze:
            gc.freeze()
        yield
    finally:
        _inside -= 1
        if freeze:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


class ServingFreeze:
    """Freezes the objects that are alive while an engine serves, so that a collection walks only newer ones: with a model
    loaded a full collection walks millions of objects, and no step is launched meanwhile. The collector stays on for what
    serving and the caller make.

    The engine calls ``turn`` in every step and ``release`` when it has no requests left. Only the TURNS-th turn freezes:
    shorter runs are not worth it, as each freeze resets the collector's counters. Garbage among the frozen objects waits for
    ``release``, which collects everything once in COLLECT_SECONDS. An engine may stop stepping with requests left: an error, a
    stream that is no longer read, and may be garbage itself, frozen. So a timer unfreezes and collects everything if no step
    came for STALE_SECONDS.

    Does nothing where the collector is off, or where the application or another engine has frozen objects."""

    TURNS = 16
    STALE_SECONDS = 5.0
    COLLECT_SECONDS = 60.0

    def __init__(self) -> None:
        self.frozen = False
        self._turns = 0
        self._last_turn = self._collected = time.monotonic()
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def turn(self) -> None:
        """The engine is about to launch a step."""
        self._last_turn = time.monotonic()
        if not self.frozen:
            self._turns += 1
            if self._turns == self.TURNS and gc.isenabled() and gc.get_freeze_count() < _INTERPRETERS_OWN:
                gc.collect(1)  # young garbage
                self.frozen = True
                gc.freeze()
                self._start_timer()

    def release(self) -> None:
        """The engine is idle."""
        if self._unfreeze() and gc.isenabled() and time.monotonic() - self._collected > self.COLLECT_SECONDS:
            self._collect()
        self._turns = 0

    def _start_timer(self) -> None:
        self._timer = threading.Timer(self.STALE_SECONDS, self._check)
        self._timer.daemon = True
        self._timer.start()

    def _check(self) -> None:
        if self.frozen and time.monotonic() - self._last_turn < self.STALE_SECONDS:
            self._start_timer()
        elif self._unfreeze() and gc.isenabled():
            self._collect()

    def _unfreeze(self) -> bool:
        with self._lock:  # the engine's thread and the timer's
            was, self.frozen, self._turns = self.frozen, False, 0
            if was:
                gc.unfreeze()
                if self._timer is not None:
                    self._timer.cancel()
            return was

    def _collect(self) -> None:
        gc.collect()
        self._collected = time.monotonic()
