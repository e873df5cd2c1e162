"""Keep Python's garbage collector out of the way while CUDA graphs are captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# CPython 3.12 keeps its own immortal objects, some 375, among the frozen ones (3.11 and 3.13: none). Whoever calls
# `gc.freeze` freezes every tracked object, and a bare interpreter has 5000. So between the two lies the answer to "has
# the application frozen objects of its own?".
_INTERPRETERS_OWN = 1000


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Collect once, then keep the collector off until the block ends, also when it ends with an exception.

    A collection during capture can free CUDA tensors, which a capturing stream does not allow, and with a model and a
    tokenizer loaded it walks millions of objects, as often as `torch.cuda.graph` or anything else asks for one. So all
    that is alive on entry is frozen (moved where no collection looks), and automatic collection is disabled.

    On exit the objects are unfrozen, and automatic collection is enabled if it was on entry. May be nested: an inner
    block leaves both to the outer one.

    `gc.unfreeze` knows no owner: it unfreezes everything. Where an application has frozen objects before the block,
    they stay frozen after it; the block then only collects and disables, since freezing more could not be undone.

    The collector belongs to the process: the block holds for all of its threads, and blocks of several threads that
    overlap are not supported.
    """
    was_enabled = gc.isenabled()
    freeze = gc.get_freeze_count() < _INTERPRETERS_OWN
    gc.disable()
    try:
        gc.collect()
        if freeze:
            gc.freeze()
        yield
    finally:
        if freeze:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


__all__ = ["freeze_gc"]
