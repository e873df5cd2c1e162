"""The cells of ``quire bench matrix``, measured for one model and one system with one engine.

decode    Time of one step of ``batch`` sequences of about ``context`` tokens: the prompts are prefilled, and after WARM
          steps BLOCKS blocks of steps are timed; the median. The batches of one long context share a prefill: the largest is
          measured first, then all but the next ones are aborted. ``mean_context``: mean length over the timed steps. Greedy;
          with experts at temperature 1: greedy sequences of dummy weights soon repeat one token, and share their experts.
prefill   Time of ``batch`` prompts of ``context`` tokens with one new token each; the median of the repeats after a warm-up.
mixed256  256 requests of mixed lengths, all at once, temperature 0.6 (``graph_runner/bench/workloads.py``).
online    Requests arrive at random (exponential gaps), prompts of 100..1024 tokens, outputs of 50..300, at LOAD of the rate
          that the first system measured reaches when all come at once: time to the first token, from arrival, and between
          tokens.

As a program, this is a worker (``graph_runner/bench/workers.py``) of ``graph_runner/bench/matrix.py``.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from quire.graph_runner.bench import roofline, workers, workloads
from quire.graph_runner.bench.models import Models, ModelSpec, config_of
from quire.graph_runner.bench.report import Row, complete, environment, failure
from quire.graph_runner.bench.systems import Limits, NotMeasured, SteppedSystem, open_system
from quire.graph_runner.bench.workloads import Prompts, Sizes, mixed_lengths, run_seconds

BATCHES, CONTEXTS = (1, 8, 32, 128), (1024, 8192, 32768)
PREFILLS = ((1, 1024), (1, 16384), (4, 32704), (64, 1024))  # 32704: with its new token within 32768 positions
WARM, BLOCKS = 8, 4
LOAD, ARRIVALS = 0.7, 200
SEQUENCES = 256  # that run at once, at most
SPARE = 6 * 2**30  # bytes that are neither weights nor KV cache: activations, graphs, workspaces


class Cell(NamedTuple):
    workload: str
    batch: int | None = None
    context: int | None = None

    @property
    def name(self) -> str:
        return self.workload if self.context is None else f"{self.workload}/{self.batch}x{self.context}"


def cells(scale: int = 1) -> list[Cell]:
    """The whole matrix. ``scale`` divides lengths, for a dry run."""
    return [*(Cell("decode", b, c // scale) for c in CONTEXTS for b in BATCHES),
            *(Cell("prefill", b, c // scale) for b, c in PREFILLS), Cell("mixed256"), Cell("online")]


@dataclass(frozen=True)
class Job:
    """A worker's task: the cells by name. ``rate``: requests per second of the online cell; None: measure it.
    ``deadline``: by ``time.time()``; cells that may end later are left out."""

    model: str
    dtype: str
    device: str
    system: str
    cells: list[str]
    layers: int | None = None
    attention: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    scale: int = 1
    rate: float | None = None
    deadline: float | None = None


class Worker:
    """Measures a job; ``run`` yields {"environment": ...} and rows."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, torch.device(job.device)
        self.spec = ModelSpec(job.model, getattr(torch, job.dtype), self.device, job.layers)
        self.models = Models(self.spec)
        self.sizes = Sizes(scale=job.scale)
        config = config_of(self.spec).get_text_config(decoder=True)
        self.positions, self.prompts = int(config.max_position_embeddings), Prompts(int(config.vocab_size))
        self.limits = Limits(SEQUENCES, min(self.positions, max(CONTEXTS) // job.scale))
        self.counted = self.models.skeleton
        self.bandwidth, self.rate = roofline.copy_bandwidth(self.device), roofline.matmul_rate(self.device, self.spec.dtype)
        self.warm, self.blocks = (WARM, BLOCKS) if job.scale == 1 else (1, 2)

    def run(self) -> Iterator[Row]:
        yield {"environment": {**environment(self.device), "copy_tb_per_s": self.bandwidth / 1e12,
                               "matmul_tflop_per_s": self.rate / 1e12}}
        wanted = [cell for cell in cells(self.job.scale) if cell.name in self.job.cells]
        unfit = {cell: why for cell in wanted if (why := self.why_not(cell))}
        yield from (self.row(cell, {"error": f"NotMeasured: {why}"}) for cell, why in unfit.items())
        groups = sorted(self.groups([cell for cell in wanted if cell not in unfit]), key=self.seconds)
        done: set[Cell] = set()
        if not groups or self.late(groups[0]):
            return
        try:
            with open_system(self.job.system, self.models, self.job.attention, self.limits, self.job.options) as system:
                assert isinstance(system, SteppedSystem)
                for group in groups:
                    if self.late(group):
                        return
                    for cell, row in self.measure(system, group):
                        yield self.row(cell, {**system.facts(self.device), **row})
                        done.add(cell)
        except Exception as error:
            yield from (self.row(cell, failure(error))
                        for group in groups for cell in group if cell not in done)

    def row(self, cell: Cell, row: Row) -> Row:
        dtype = self.job.options.get("kv_cache_dtype", "auto")
        return complete({"system": self.job.system, "attention": self.job.attention, "model": self.spec.label,
                         "dtype": self.job.dtype, "kv_cache_dtype": self.job.dtype if dtype == "auto" else str(dtype),
                         **cell._asdict(), **row}, self.bandwidth)

    def late(self, group: list[Cell]) -> bool:
        return self.job.deadline is not None and time.time() + self.seconds(group) > self.job.deadline

    def measure(self, system: SteppedSystem, group: list[Cell]) -> Iterator[tuple[Cell, Row]]:
        """The rows of cells that share a prefill. A cell that fails does not stop other groups, unless the GPU is lost."""
        done: set[Cell] = set()
        try:
            for cell, row in getattr(self, group[0].workload)(system, group):
                yield cell, row
                done.add(cell)
        except Exception as error:
            yield from ((cell, failure(error)) for cell in group if cell not in done)
            if "CUDA error" in str(error):
                raise SystemExit(1) from error  # this process can do nothing more on the GPU
            self._end(system)

    def _end(self, system: SteppedSystem, requests: list[int] | None = None) -> None:
        system.abort(requests)
        while system.busy:
            system.step()

    # -- what fits, and how long it takes ---------------------------------------------------------------------------

    def why_not(self, cell: Cell) -> str | None:
        """Why the cell is left out, the same for every system; None if it fits."""
        longest = cell.context or 2 * self.sizes.lengths[1]
        if longest + (cell.workload == "prefill") > self.positions:
            return f"the model has {self.positions} positions"
        if cell.workload == "decode" and self.device.type == "cuda":
            needed = (cell.batch or 1) * longest * roofline.kv_bytes(self.counted, [1])
            room = torch.cuda.get_device_properties(self.device).total_memory * 0.9 - SPARE
            room -= sum(p.numel() * p.element_size() for p in self.counted.parameters())
            if needed > room:
                return f"{needed / 1e9:.0f} GB of keys and values do not fit beside the weights ({room / 1e9:.0f} GB are left)"
        return None

    def groups(self, wanted: list[Cell]) -> list[list[Cell]]:
        """Cells that share a prefill, the largest batch first."""
        shared = {cell.context for cell in wanted if cell.workload == "decode"} - {min(CONTEXTS) // self.job.scale}
        found = [[cell for cell in wanted if cell.workload == "decode" and cell.context == c][::-1] for c in shared]
        return found + [[cell] for cell in wanted if cell.workload != "decode" or cell.context not in shared]

    def seconds(self, group: list[Cell]) -> float:
        """A generous estimate."""
        cell = group[0]
        if cell.workload == "online":
            lengths, steps, runs = [(562, 175)] * (SEQUENCES + ARRIVALS // 2), 2.0 * ARRIVALS, 1
        elif cell.workload == "mixed256":
            lengths, steps, runs = mixed_lengths(self.sizes), 1.5 * self.sizes.lengths[1], 1
        else:
            decode = cell.workload == "decode"
            lengths, runs = [(cell.context or 1, 0)] * (cell.batch or 1), 1 if decode else self.repeats(cell) + 1
            steps = len(group) * (self.warm + self.blocks * self.steps(cell)) if decode else 0
        prompts = [prompt for prompt, _ in lengths]
        step = roofline.step_bytes(self.counted, min(SEQUENCES, len(prompts)), max(prompts)) / self.bandwidth
        return runs * (2.5 * roofline.prefill_flops(self.counted, prompts) / self.rate + steps * (2 * step + 2e-3)) + 3

    def steps(self, cell: Cell) -> int:
        """Steps per block: fewer where sequences are long, since all batches of a context share one prefill."""
        if self.job.scale > 1:
            return 2
        return 30 if cell.context == min(CONTEXTS) else 12

    def repeats(self, cell: Cell) -> int:
        return 3 if (cell.batch or 1) * (cell.context or 1) <= 4096 else 2

    # -- the workloads ----------------------------------------------------------------------------------------------

    def decode(self, system: SteppedSystem, group: list[Cell]) -> Iterator[tuple[Cell, Row]]:
        batch, context = group[0].batch or 1, group[0].context or 1
        steps = self.steps(group[0])
        each = self.warm + self.blocks * steps
        ahead = batch * context // 8192  # tokens that the first sequence makes before the last is prefilled, 8192 a step
        length = max(1, context - each // 2 if len(group) == 1 and context == min(CONTEXTS) // self.job.scale
                     else context - ahead - len(group) * each)
        new = min(self.limits.max_model_len - length, ahead + len(group) * each + batch + 16)
        # The last request is prefilled last, and preempted first.
        *most, final = self.prompts([length] * batch)
        heat = 1.0 if roofline.has_experts(self.counted) else 0.0
        requests = [*(system.submit(prompt, new, heat) for prompt in most), system.submit(final, new, heat, stream=True)]
        last = requests[-1]
        taken = 1
        while last not in system.step():
            taken += 1
            if taken >= new or not system.busy:  # the first may have ended
                raise NotMeasured("the batch did not run together: it does not fit in the KV cache")
        for i, cell in enumerate(group):
            keep = cell.batch or 1
            system.abort(requests[:-keep])
            del requests[:-keep]
            for _ in range(self.warm):
                system.step()
            times = []
            for _ in range(self.blocks):
                began, tokens, calls = time.perf_counter(), 0, 0
                while tokens < steps:  # a call may return before its step is done
                    tokens, calls = tokens + system.step().count(last), calls + 1
                    if calls > 2 * steps:
                        raise NotMeasured(f"{tokens} tokens in {calls} steps: the batch does not fit in the KV cache")
                times.append((time.perf_counter() - began) / tokens)
            mean = length + keep * context // 16384 + i * each + self.warm + self.blocks * steps // 2
            step = statistics.median(times)
            yield cell, {"ms_per_step": step * 1e3, "tokens_per_s": keep / step, "repeats_ms": [t * 1e3 for t in times],
                         "mean_context": mean,
                         "bytes_per_step": roofline.step_bytes(self.counted, keep, mean, system.kv_cache_dtype)}
        self._end(system, requests)

    def prefill(self, system: SteppedSystem, group: list[Cell]) -> Iterator[tuple[Cell, Row]]:
        (cell,) = group
        count, length = cell.batch or 1, cell.context or 1
        flops = roofline.prefill_flops(self.counted, [length] * count)
        row = workloads.prefill(system, count, length, self.repeats(cell), self.prompts, new=1)
        yield cell, {**row, "tflop_per_s": flops / row["seconds"] / 1e12,
                     "floor_ms": self._floor(flops, roofline.weight_bytes(self.counted, count * length))}

    def _floor(self, flops: float, size: float) -> float:
        """Milliseconds: operations over the rate of a matrix product, or bytes over copy bandwidth, whichever is longer."""
        return max(flops / self.rate, size / self.bandwidth) * 1e3

    def mixed256(self, system: SteppedSystem, group: list[Cell]) -> Iterator[tuple[Cell, Row]]:
        lengths = mixed_lengths(self.sizes)
        tokens, steps = sum(new for _, new in lengths), max(new for _, new in lengths)
        size = steps * roofline.weight_bytes(self.counted, tokens // steps)
        size += sum(new * roofline.kv_bytes(self.counted, [prompt + new // 2], system.kv_cache_dtype)
                    for prompt, new in lengths)
        flops = roofline.prefill_flops(self.counted, [prompt for prompt, _ in lengths])
        row = workloads.mixed256(system, self.sizes, self.prompts)
        yield group[0], {**row, **group[0]._asdict(), "floor_ms": self._floor(flops, size)}

    def online(self, system: SteppedSystem, group: list[Cell]) -> Iterator[tuple[Cell, Row]]:
        rng, scale = random.Random(0), self.job.scale
        count = max(4, ARRIVALS // scale)

        def lengths(n: int) -> list[tuple[int, int]]:
            return [(rng.randint(max(2, 100 // scale), 1024 // scale), rng.randint(max(2, 50 // scale), max(3, 300 // scale)))
                    for _ in range(n)]

        everything = lengths(max(4, SEQUENCES // scale))
        rate = self.job.rate
        if rate is None:
            run_seconds(system, self.prompts, everything[:32], 0.6)  # warm-up
            rate = LOAD * len(everything) / run_seconds(system, self.prompts, everything, 0.6)
        asked = lengths(count)
        prompts, due = self.prompts([prompt for prompt, _ in asked]), 0.0
        arrivals = [due := due + rng.expovariate(rate) for _ in asked]
        tokens: dict[int, list[float]] = {}  # of each request: when it arrived, and its tokens came
        began, ended = time.perf_counter(), 0.0
        while len(tokens) < count or system.busy:
            now = time.perf_counter() - began
            while (i := len(tokens)) < count and arrivals[i] <= now:
                tokens[system.submit(prompts[i], asked[i][1], 0.6, stream=True)] = [arrivals[i]]
            if not system.busy:
                time.sleep(max(0.0, arrivals[len(tokens)] - now))
                continue
            got = system.step()
            ended = time.perf_counter() - began
            for request in got:
                tokens[request].append(ended)
        times = list(tokens.values())
        if [len(t) - 1 for t in times] != [new for _, new in asked]:
            raise NotMeasured(f"{system.name} did not generate the tokens asked for")
        first = [t[1] - t[0] for t in times]
        between = [b - a for t in times for a, b in zip(t[1:], t[2:], strict=False)]
        running = max(1, round(sum(t[-1] - t[1] for t in times) / ended))
        context = round(statistics.fmean(prompt + new / 2 for prompt, new in asked))
        prompt = round(statistics.fmean(prompt for prompt, _ in asked))
        step = roofline.step_bytes(self.counted, running, context, system.kv_cache_dtype) / self.bandwidth * 1e3
        flops, size = roofline.prefill_flops(self.counted, [prompt]), roofline.weight_bytes(self.counted, prompt)
        for variant, found, floor in (("first token", first, self._floor(flops, size)), ("between tokens", between, step)):
            ranked = sorted(found)
            yield group[0], {"variant": variant, "ms_per_step": statistics.median(ranked) * 1e3, "rate": rate,
                             "p99_ms": ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))] * 1e3, "running": running,
                             "floor_ms": floor, "tokens_per_s": sum(new for _, new in asked) / ended}


if __name__ == "__main__":  # a worker process
    for found in Worker(Job(**workers.job())).run():
        workers.emit(found)
    workers.emit({})
