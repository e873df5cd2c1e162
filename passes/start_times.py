"""Where the time of a start goes: seconds by stage, for the engine's log and ``quire bench start``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

#: Seconds spent so far in this process, by stage. Who wants those of one start takes the difference.
seconds: dict[str, float] = {}
_inside: list[float] = []  # for each open stage, the seconds that stages within it took


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Add the time spent inside to ``seconds[name]``; stages within it count for themselves alone."""
    began = time.perf_counter()
    _inside.append(0.0)
    try:
        yield
    finally:
        took = time.perf_counter() - began
        seconds[name] = seconds.get(name, 0.0) + took - _inside.pop()
        if _inside:
            _inside[-1] += took


def since(before: dict[str, float]) -> dict[str, float]:
    """Seconds by stage since ``before`` was copied from ``seconds``."""
    return {name: total - before.get(name, 0.0) for name, total in seconds.items() if total > before.get(name, 0.0)}


def described(spent: dict[str, float]) -> str:
    return ", ".join(f"{name} {took:.1f} s" for name, took in sorted(spent.items(), key=lambda item: -item[1]))


__all__ = ["described", "seconds", "since", "stage"]
