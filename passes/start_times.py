"""Where the time of a start goes: seconds by stage, for the engine's log and ``quire bench start``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

#: Seconds of this process by stage. Cumulative; use ``since()`` to time one start-up.
seconds: dict[str, float] = {}
_nested: list[float] = []  # for each open stage, the seconds of the stages inside it


@contextlib.contextmanager
def timed(stage: str) -> Iterator[None]:
    """Add the time spent inside to ``seconds[stage]``, without that of stages inside it."""
    began = time.perf_counter()
    _nested.append(0.0)
    try:
        yield
    finally:
        took = time.perf_counter() - began
        seconds[stage] = seconds.get(stage, 0.0) + took - _nested.pop()
        if _nested:
            _nested[-1] += took


def since(before: dict[str, float]) -> dict[str, float]:
    """Seconds by stage since ``before``, a copy of ``seconds``."""
    return {stage: total - before.get(stage, 0.0) for stage, total in seconds.items() if total > before.get(stage, 0.0)}


def format_seconds(spent: dict[str, float]) -> str:
    return ", ".join(f"{stage} {took:.1f} s" for stage, took in sorted(spent.items(), key=lambda item: -item[1]))
