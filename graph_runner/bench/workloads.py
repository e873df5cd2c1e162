"""What is measured. Each workload yields rows (see ``graph_runner/bench/report.py``) for one open system.

decode    The time of one step while ``batch`` sequences of about ``context`` tokens decode: (t(130 new tokens) -
          t(2 new tokens)) / 128 with prompts of context - 64 random tokens, greedy; the median of the repeats, after a
          warm-up.
mixed256  256 requests, prompt and output lengths each uniform in 100..1024, temperature 0.6: seconds and output tokens
          per second. Drawn from random.Random(0) as nano-vllm's bench.py draws them: 133,966 output tokens.
prefill   128 prompts of 960 tokens, and one, each with 2 new tokens: seconds, prompt tokens per second.
start     Process start to ready, cold and warm: ``graph_runner/bench/start.py``.

Prompts are drawn anew for every run, so that a prefix cache has nothing to find. Except for the lengths nothing depends
on the values: the weights are random too.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.graph_runner.bench.roofline import step_bytes
from quire.graph_runner.bench.systems import Limits, Models, NotMeasured, System

SHORT, LONG = 2, 130  # new tokens of the two runs whose difference is 128 decode steps
MARGIN = 64  # prompts are so much shorter than the context asked for: the mean over the 128 steps is then the context
Row = dict[str, Any]
Tick = Callable[[], None]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the workloads. ``scale`` divides the fixed ones (256 requests, 128 x 960 tokens, ...), for dry runs."""

    batches: Sequence[int] = (1, 8, 32, 128)
    context: int = 1024
    repeats: int = 3
    scale: int = 1

    @property
    def lengths(self) -> tuple[int, int]:
        return max(2, 100 // self.scale), max(3, 1024 // self.scale)

    @property
    def requests(self) -> int:
        return max(2, 256 // self.scale)

    @property
    def prefills(self) -> list[tuple[int, int]]:
        length = max(4, 960 // self.scale)
        return [(max(2, 128 // self.scale), length), (1, length)]


class Prompts:
    """Random token ids of a model's vocabulary, different at every call."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._random, self._vocab_size = random.Random(seed), vocab_size

    def __call__(self, lengths: Sequence[int]) -> list[list[int]]:
        return [self._random.choices(range(self._vocab_size), k=n) for n in lengths]


def _seconds(system: System, prompts: list[list[int]], new_tokens: Sequence[int], temperature: float = 0.0) -> float:
    """Wall time of one run. Raises NotMeasured if not all tokens came."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    began = time.perf_counter()
    count = system.generate(prompts, new_tokens, temperature)
    seconds = time.perf_counter() - began
    if count != sum(new_tokens):
        raise NotMeasured(f"{system.name} generated {count} tokens instead of {sum(new_tokens)}")
    return seconds


def decode_limits(sizes: Sizes) -> Limits:
    if sizes.context <= MARGIN:
        raise ValueError(f"--context must be more than {MARGIN}, got {sizes.context}")
    return Limits(max(sizes.batches), sizes.context - MARGIN + LONG + 1)


def decode(system: System, models: Models, sizes: Sizes, prompts: Prompts, tick: Tick) -> Iterator[Row]:
    """A row for each batch size; one that fails does not stop the others."""
    for batch in sizes.batches:
        row: Row = {"batch": batch, "context": sizes.context}
        try:
            differences = _decode_seconds(system, sizes, [sizes.context - MARGIN] * batch, prompts, tick)
        except Exception as error:
            yield {**row, "error": f"{type(error).__name__}: {error}"}
            continue
        step = statistics.median(differences)
        if step <= 0:
            yield {**row, "error": "NotMeasured: the long runs took no longer than the short ones; raise --repeats"}
            continue
        yield {**row, "ms_per_step": step * 1e3, "tokens_per_s": batch / step,
               "repeats_ms": [d * 1e3 for d in differences],
               "bytes_per_step": step_bytes(models.counted, batch, sizes.context, system.kv_cache_dtype)}


def _decode_seconds(system: System, sizes: Sizes, lengths: list[int], prompts: Prompts, tick: Tick) -> list[float]:
    """Seconds of one step, once for every repeat."""
    for new in (LONG, LONG, SHORT) if system.compiles_each_size else (SHORT + 2,):  # warm-up
        _seconds(system, prompts(lengths), [new] * len(lengths))
    tick()
    found = []
    for _ in range(sizes.repeats):
        short = _seconds(system, prompts(lengths), [SHORT] * len(lengths))
        long = _seconds(system, prompts(lengths), [LONG] * len(lengths))
        found.append((long - short) / (LONG - SHORT))
        tick()
    return found


def mixed_limits(sizes: Sizes) -> Limits:
    return Limits(min(256, sizes.requests), 2 * sizes.lengths[1] + 1)


def mixed256(system: System, models: Models, sizes: Sizes, prompts: Prompts, tick: Tick) -> Iterator[Row]:
    """One row."""
    rng = random.Random(0)
    low, high = sizes.lengths
    prompt_lengths = []
    for _ in range(sizes.requests):
        prompt_lengths.append(rng.randint(low, high))
        for _ in range(prompt_lengths[-1]):
            rng.randint(0, 10000)  # the token there; ours come from ``prompts``, but the lengths after it depend on it
    lengths = [(n, rng.randint(low, high)) for n in prompt_lengths]
    warm = lengths[: max(2, len(lengths) // 16)]
    _seconds(system, prompts([p for p, _ in warm]), [min(n, 16) for _, n in warm], 0.6)
    tick()
    seconds = _seconds(system, prompts([p for p, _ in lengths]), [n for _, n in lengths], 0.6)
    tick()
    tokens = sum(n for _, n in lengths)
    yield {"batch": len(lengths), "context": None, "seconds": seconds, "tokens_per_s": tokens / seconds,
           "output_tokens": tokens, "prompt_tokens": sum(p for p, _ in lengths)}


def prefill_limits(sizes: Sizes) -> Limits:
    return Limits(max(n for n, _ in sizes.prefills), max(length for _, length in sizes.prefills) + SHORT + 1)


def prefill(system: System, models: Models, sizes: Sizes, prompts: Prompts, tick: Tick) -> Iterator[Row]:
    """A row for many prompts and a row for one."""
    for count, length in sizes.prefills:
        runs = []
        for _ in range(sizes.repeats + 1):  # the first is the warm-up
            runs.append(_seconds(system, prompts([length] * count), [SHORT] * count))
            tick()
        seconds = statistics.median(runs[1:])
        yield {"batch": count, "context": length, "seconds": seconds, "tokens_per_s": count * length / seconds,
               "repeats_s": runs[1:]}


@dataclass(frozen=True)
class Workload:
    """``run`` measures an open system; ``ticks``: how often it calls ``tick``, for the progress bar."""

    limits: Callable[[Sizes], Limits]
    run: Callable[[System, Models, Sizes, Prompts, Tick], Iterator[Row]]
    ticks: Callable[[Sizes], int]


WORKLOADS: dict[str, Workload] = {
    "decode": Workload(decode_limits, decode, lambda s: len(s.batches) * (s.repeats + 1)),
    "mixed256": Workload(mixed_limits, mixed256, lambda s: 2),
    "prefill": Workload(prefill_limits, prefill, lambda s: len(s.prefills) * (s.repeats + 1)),
}

__all__ = ["LONG", "MARGIN", "Prompts", "Row", "SHORT", "Sizes", "WORKLOADS", "Workload"]
