"""The workloads that serve requests. Each yields rows (see ``graph_runner/bench/report.py``) for one open system.

decode    Time of one step while ``batch`` sequences of about ``context`` tokens decode, greedily: (t(130 new tokens) -
          t(2 new tokens)) / 128, with prompts of context - 64 random tokens; the median of the repeats, after a warm-up.
mixed256  256 requests, prompt and output lengths each uniform in 100..1024, temperature 0.6: seconds and output tokens per
          second. Lengths are drawn from random.Random(0) like nano-vllm's bench.py: 133,966 output tokens.
prefill   128 prompts of 960 tokens, and one, with 2 new tokens each: seconds and prompt tokens per second.

Prompts are drawn anew for every run, so that a prefix cache never hits.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.graph_runner.bench.models import Models
from quire.graph_runner.bench.report import Row, failure
from quire.graph_runner.bench.roofline import step_bytes
from quire.graph_runner.bench.systems import Limits, NotMeasured, System, open_system

SHORT, LONG = 2, 130  # new tokens of the two runs whose difference is 128 decode steps
MARGIN = 64  # prompts are this much shorter than the context, which is then the mean length over the 128 steps


@dataclass(frozen=True)
class Sizes:
    """Sizes of the workloads. ``scale`` divides the fixed ones (256 requests, 128 x 960 tokens, ...), for dry runs."""

    batches: Sequence[int] = (1, 8, 32, 128)
    host_batches: Sequence[int] = (1, 8, 32, 128, 256)
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

    def __init__(self, vocab_size: int) -> None:
        self._random, self._vocab_size = random.Random(0), vocab_size

    def __call__(self, lengths: Sequence[int]) -> list[list[int]]:
        return [self._random.choices(range(self._vocab_size), k=n) for n in lengths]


def run_seconds(system: System, prompts: Prompts, lengths: Sequence[tuple[int, int]], temperature: float = 0.0) -> float:
    """Wall time of one run of prompts and outputs of these lengths. Raises NotMeasured unless every token came."""
    texts, new_tokens = prompts([prompt for prompt, _ in lengths]), [new for _, new in lengths]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    began = time.perf_counter()
    count = system.generate(texts, new_tokens, temperature)
    seconds = time.perf_counter() - began
    if count != sum(new_tokens):
        raise NotMeasured(f"{system.name} generated {count} tokens instead of {sum(new_tokens)}")
    return seconds


def decode(system: System, models: Models, sizes: Sizes, prompts: Prompts) -> Iterator[Row]:
    """One row per batch size; one that fails does not stop the others."""
    for batch in sizes.batches:
        def run(new: int, batch: int = batch) -> float:
            return run_seconds(system, prompts, [(sizes.context - MARGIN, new)] * batch)

        row: Row = {"batch": batch, "context": sizes.context}
        try:
            for new in (LONG, LONG, SHORT) if system.compiles_each_size else (SHORT + 2,):  # warm-up
                run(new)
            steps = []
            for _ in range(sizes.repeats):
                short, long = run(SHORT), run(LONG)
                steps.append((long - short) / (LONG - SHORT))
            step = statistics.median(steps)
            if step <= 0:
                raise NotMeasured("the long runs took no longer than the short ones; raise --repeats")
            yield {**row, "ms_per_step": step * 1e3, "tokens_per_s": batch / step, "repeats_ms": [s * 1e3 for s in steps],
                   "bytes_per_step": step_bytes(models.counted, batch, sizes.context, system.kv_cache_dtype)}
        except Exception as error:
            yield {**row, **failure(error)}


def mixed_lengths(sizes: Sizes) -> list[tuple[int, int]]:
    """Prompt and output length of each request of mixed256."""
    rng = random.Random(0)
    low, high = sizes.lengths
    prompt_lengths = []
    for _ in range(sizes.requests):
        prompt_lengths.append(rng.randint(low, high))
        for _ in range(prompt_lengths[-1]):
            rng.randint(0, 10000)  # nano-vllm's token here; unused, but later lengths depend on the draw
    return [(n, rng.randint(low, high)) for n in prompt_lengths]


def mixed256(system: System, sizes: Sizes, prompts: Prompts) -> Row:
    lengths = mixed_lengths(sizes)
    run_seconds(system, prompts, [(p, min(n, 16)) for p, n in lengths[: max(2, len(lengths) // 16)]], 0.6)  # warm-up
    seconds = run_seconds(system, prompts, lengths, 0.6)
    tokens = sum(n for _, n in lengths)
    return {"batch": len(lengths), "seconds": seconds, "tokens_per_s": tokens / seconds,
            "output_tokens": tokens, "prompt_tokens": sum(p for p, _ in lengths)}


def prefill(system: System, count: int, length: int, repeats: int, prompts: Prompts, new: int = SHORT) -> Row:
    """``count`` prompts of ``length`` tokens, and ``new`` new tokens each."""
    runs = [run_seconds(system, prompts, [(length, new)] * count) for _ in range(repeats + 1)]
    seconds = statistics.median(runs[1:])  # the first is the warm-up
    return {"batch": count, "context": length, "seconds": seconds, "tokens_per_s": count * length / seconds,
            "repeats_s": runs[1:]}


@dataclass(frozen=True)
class Workload:
    """``run`` measures an open system that was made with ``limits``; ``rows``: the number of rows it yields."""

    limits: Callable[[Sizes], Limits]
    run: Callable[[System, Models, Sizes, Prompts], Iterator[Row]]
    rows: Callable[[Sizes], int]

    def serve(self, models: Models, system: str, attention: str, options: dict[str, Any], sizes: Sizes, vocab_size: int
              ) -> Iterator[Row]:
        """The rows of one system, opened for them."""
        with open_system(system, models, attention, self.limits(sizes), options) as opened:
            for row in self.run(opened, models, sizes, Prompts(vocab_size)):
                yield {**opened.facts(models.spec.device), **row}


WORKLOADS: dict[str, Workload] = {
    "decode": Workload(lambda s: Limits(max(s.batches), s.context - MARGIN + LONG + 1), decode, lambda s: len(s.batches)),
    "mixed256": Workload(lambda s: Limits(s.requests, 2 * s.lengths[1] + 1),
                         lambda system, models, sizes, prompts: iter([mixed256(system, sizes, prompts)]), lambda s: 1),
    "prefill": Workload(lambda s: Limits(s.prefills[0][0], s.prefills[0][1] + SHORT + 1),
                        lambda system, models, sizes, prompts: (prefill(system, count, length, sizes.repeats, prompts)
                                                                for count, length in sizes.prefills),
                        lambda s: len(s.prefills)),
}
