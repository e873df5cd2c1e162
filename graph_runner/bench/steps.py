"""Steps of an engine, timed one by one: for the scripts in ``benchmarks/``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], Any]) -> float:
    """The time of a call, until the GPU has done its work."""
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def milliseconds(run: Callable[[], Any], count: int) -> list[float]:
    """The time of each of ``count`` calls."""
    return [seconds(run) * 1e3 for _ in range(count)]


def processor_ms(run: Callable[[], Any], count: int = 200) -> list[float]:
    """The thread's own processor time of each of ``count`` calls, after a few: other work on the machine counts only by what it
    drops from caches."""
    times = []
    for _ in range(count + 20):
        began = time.thread_time()
        run()
        times.append((time.thread_time() - began) * 1e3)
    return times[20:]


def until_decoding(engine: Any) -> None:
    """Step until all prompts are computed."""
    while engine.scheduler.waiting or any(r.num_uncomputed != 1 for r in engine.scheduler.running):
        engine.step()


def end(engine: Any, requests: Iterable[int]) -> None:
    """Abort the requests, and step until nothing is left."""
    for request in requests:
        engine.abort(request)
    while engine.has_unfinished:
        engine.step()


def random_tokens(vocab_size: int, seed: int = 0) -> Callable[[int], list[int]]:
    """Draws prompts of given lengths, the same ones in each run."""
    generator = torch.Generator().manual_seed(seed)
    return lambda length: torch.randint(vocab_size, (length,), generator=generator).tolist()
