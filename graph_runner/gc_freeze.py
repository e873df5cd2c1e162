"""Keep Python's garbage collector out of the way while CUDA graphs are captured, and while an engine serves."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

# CPython 3.12 keeps its own immortal objects, some 375, among the frozen ones (3.11 and 3.13: none). Whoever calls
# `gc.freeze` freezes every tracked object, and a bare interpreter has 5000. So between the two lies the answer to "has
# the application frozen objects of its own?".
_INTERPRETERS_OWN = 1000


@contextmanager
def freeze_gc(collect: bool = True) -> Iterator[None]:
    """Collect once, then keep the collector off until the block ends, also when it ends with an exception.

    A collection during capture can free CUDA tensors, which a capturing stream does not allow, and with a model and a
    tokenizer loaded it walks millions of objects, as often as `torch.cuda.graph` or anything else asks for one. So all
    that is alive on entry is frozen (moved where no collection looks), and automatic collection is disabled.

    On exit the objects are unfrozen, and automatic collection is enabled if it was on entry. May be nested: an inner
    block leaves both to the outer one.

    `gc.unfreeze` knows no owner: it unfreezes everything. Where an application has frozen objects before the block,
    they stay frozen after it; the block then only collects and disables, since freezing more could not be undone.

    With ``collect=False`` garbage is frozen too, and waits for the end: a collection walks all of torch and transformers.

    The collector belongs to the process: the block holds for all of its threads, and blocks of several threads that
    overlap are not supported.
    """
    was_enabled = gc.isenabled()
    freeze = gc.get_freeze_count() < _INTERPRETERS_OWN
    gc.disable()
    try:
        if collect:
            gc.collect()
        if freeze:
            gc.freeze()
        yield
    finally:
        if freeze:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


class ServingFreeze:
    """Freezes what is alive while an engine serves, so that a collection walks only what is new since.

    With a model and a tokenizer loaded a full collection walks millions of objects, and no step is launched meanwhile. The
    collector stays on: what serving and the caller make meanwhile is collected as ever.

    The engine calls ``turn`` in every turn and ``release`` when it has no requests left. Only the TURNS-th turn freezes: runs
    shorter than that are left alone, as each freeze also resets the collector's counters. Garbage among the frozen objects
    waits for ``release``, which now and then (COLLECT_SECONDS) collects everything.

    An engine may stop turning with requests left: a stream that nobody reads on, an error, an engine that was dropped. The
    stream may even be garbage itself, in a cycle that only the collector can find, and frozen. So every collection looks
    (``_look``) whether the engine still turns, and unfreezes if it has not for STALE_SECONDS.

    Does nothing where the collector is off, or where objects are frozen already, by the application or by another engine:
    ``gc.unfreeze`` knows no owner.
    """

    TURNS = 16
    STALE_SECONDS = 5.0
    COLLECT_SECONDS = 60.0

    def __init__(self) -> None:
        self.frozen = False
        self._turns = 0
        self._turned = self._collected = time.monotonic()

    def turn(self) -> None:
        """The engine is about to launch a step."""
        self._turned = time.monotonic()
        if not self.frozen:
            self._turns += 1
            if self._turns == self.TURNS and gc.isenabled() and gc.get_freeze_count() < _INTERPRETERS_OWN:
                gc.collect(1)  # what is garbage already, and young
                if self._look not in gc.callbacks:
                    gc.callbacks.append(self._look)
                self.frozen = True
                gc.freeze()

    def release(self) -> None:
        """The engine is idle."""
        if self.frozen:
            self._unfreeze()
            if gc.isenabled() and time.monotonic() - self._collected > self.COLLECT_SECONDS:
                gc.collect()
                self._collected = time.monotonic()
        self._turns = 0
        if self._look in gc.callbacks:
            gc.callbacks.remove(self._look)

    def _look(self, phase: str, info: dict[str, int]) -> None:
        # It stays among the callbacks here: the collector is going through that list.
        if self.frozen and phase == "start" and time.monotonic() - self._turned > self.STALE_SECONDS:
            self._unfreeze()

    def _unfreeze(self) -> None:
        self.frozen, self._turns = False, 0
        gc.unfreeze()


__all__ = ["ServingFreeze", "freeze_gc"]
