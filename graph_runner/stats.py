"""Figures of a running engine: ``Engine.stats()``."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.graph_runner.prefix_cache import PrefixStats
from quire.graph_runner.step_buffers import Bucket
from quire.passes.verify.quantized import num_bytes


@dataclass(frozen=True)
class EngineStats:
    """An engine's state and counts since it was made. ``str()`` is a line for a log.

    Args:
        running, waiting: requests now.
        finished: requests that ended, failed ones included.
        preemptions: requests that gave up their pages and were computed again.
        pages, pages_used, pages_idle: of the KV cache: all, held by requests, and kept by the prefix cache for later ones.
        window_pages, window_pages_used: of layers with a window, where others see everything; 0 where all have the same pages.
        prefix_requests, prefix_hits: requests started, and those that reused computed pages.
        prefix_tokens, saved_tokens: tokens of the requests started, and those of them that were not computed.
        prompt_tokens, generated_tokens: of finished and unfinished requests; rows of calls that look at every token
            (``graph_runner/lockstep.py``: beams, processors, criteria, scores) are requests too, and get a token in each step.
        busy_seconds: time with at least one request.
        tokens_per_second: generated tokens per busy second.
        weight_bytes, kv_cache_bytes, graph_bytes: memory of the model (with its copies for the option ``dtype``), the KV cache
            and captured CUDA graphs.
        estimated_graph_bytes: what graphs were expected to take when the KV cache was sized; 0 where nothing was sized for them
            (on a CPU, and with num_pages).
        backend_bytes: what the attention backend keeps of the cached tokens, beside the KV cache.
        step_bytes: what the largest step needs beside these, the backend's workspace included, as measured then; 0 where it was
            not.
        free_bytes: of the GPU; None on a CPU.
    """

    running: int
    waiting: int
    finished: int
    preemptions: int
    pages: int
    pages_used: int
    pages_idle: int
    window_pages: int
    window_pages_used: int
    prefix_requests: int
    prefix_hits: int
    prefix_tokens: int
    saved_tokens: int
    prompt_tokens: int
    generated_tokens: int
    busy_seconds: float
    tokens_per_second: float
    weight_bytes: int
    kv_cache_bytes: int
    graph_bytes: int
    estimated_graph_bytes: int
    backend_bytes: int
    step_bytes: int
    free_bytes: int | None

    def __str__(self) -> str:
        memory = (("weights", self.weight_bytes), ("KV cache", self.kv_cache_bytes),
                  ("attention's data of it", self.backend_bytes or None), ("graphs", self.graph_bytes),
                  ("largest step", self.step_bytes or None), ("free", self.free_bytes))
        windows = f"of windows: {self.window_pages_used} of {self.window_pages} used; " if self.window_pages else ""
        return (f"{self.running} running, {self.waiting} waiting, {self.finished} finished; {self.generated_tokens} new "
                f"tokens, {self.tokens_per_second:,.0f}/s; pages: {self.pages_used} of {self.pages} used, {self.pages_idle} "
                f"kept; {windows}prefix cache: {self.prefix_hits} of {self.prefix_requests} requests, {self.saved_tokens} "
                f"tokens saved; {self.preemptions} preemptions; memory: "
                + ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in memory if size is not None))


@dataclass
class Counters:
    """What ``EngineStats`` counts of the past. ``tick`` is called in every step. ``rows``: sequences that advance in lockstep
    now."""

    rows: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    busy_seconds: float = 0.0
    _busy_since: float | None = field(default=None, repr=False)

    def tick(self, busy: bool) -> None:
        """``busy``: whether there are requests now, but for ``rows``."""
        now = time.monotonic()
        if self._busy_since is not None:
            self.busy_seconds += now - self._busy_since
        self._busy_since = now if busy or self.rows else None

    def ended(self, output: Any, busy: bool) -> None:
        """A request ended. ``busy``: as of ``tick``, after it."""
        if not busy:
            self.tick(False)
        self.finished += 1
        self.prompt_tokens += len(output.prompt_token_ids)
        self.generated_tokens += len(output.token_ids)

    def advance_together(self, rows: int, prompt_tokens: int) -> None:
        self.rows, self.prompt_tokens = self.rows + rows, self.prompt_tokens + prompt_tokens
        self.tick(True)

    def ended_together(self, rows: int, busy: bool) -> None:
        self.rows, self.finished = self.rows - rows, self.finished + rows
        self.tick(busy)


def stats_of(engine: Any) -> EngineStats:
    """The figures of an engine. Raises RuntimeError if it is closed."""
    if not hasattr(engine.runner, "cache"):
        raise RuntimeError("the engine is closed; make a new one")
    scheduler, runner, past = engine.scheduler, engine.runner, engine.counters
    allocator, prefixes = scheduler.allocator, scheduler.prefixes
    idle = 0 if prefixes is None else prefixes.num_idle
    windows = scheduler.windows
    outputs = [r.output for r in engine.requests.values()]
    generated = past.generated_tokens + sum(len(o.token_ids) for o in outputs)
    on_gpu = runner.device.type == "cuda"
    counts = PrefixStats() if prefixes is None else prefixes.stats
    tensors = {id(t): t for t in (*engine.model.parameters(), *engine.model.buffers())}
    cast, places = engine._live.cast, engine._live.places
    copies = (0 if cast is None else cast.copies.num_bytes) + (0 if places is None else places.num_bytes)
    return EngineStats(
        running=len(scheduler.running) + past.rows, waiting=len(scheduler.waiting), finished=past.finished,
        preemptions=scheduler.num_preemptions, pages=allocator.num_total,
        pages_used=allocator.num_total - allocator.num_free - idle, pages_idle=idle,
        window_pages=windows.allocator.num_total if windows else 0, window_pages_used=windows.num_used if windows else 0,
        prefix_requests=counts.requests, prefix_hits=counts.hits, prefix_tokens=counts.tokens, saved_tokens=counts.saved_tokens,
        prompt_tokens=past.prompt_tokens + sum(len(o.prompt_token_ids) for o in outputs), generated_tokens=generated,
        busy_seconds=past.busy_seconds, tokens_per_second=generated / past.busy_seconds if past.busy_seconds else 0.0,
        weight_bytes=copies + sum(map(num_bytes, tensors.values())), kv_cache_bytes=runner.cache.num_bytes,
        graph_bytes=runner.graphs.stats.capture_bytes, estimated_graph_bytes=runner.graphs.stats.estimated_bytes,
        backend_bytes=runner.cache.beside_bytes, step_bytes=runner.step_bytes,
        free_bytes=torch.cuda.mem_get_info(runner.device)[0] if on_gpu else None)


@dataclass
class GraphStats:
    """Counts so far. ``fell_back``: steps that ran without a graph, by reason; ``replays``: by bucket; ``padding_tokens``: by
    which batches were padded; ``estimated_bytes``: what ``estimate`` found, before ``capture_bytes`` were measured;
    ``pieces``: graphs that the captured steps are made of, one each unless they are cut."""

    captured: int = 0
    replayed: int = 0
    fell_back: Counter[str] = field(default_factory=Counter)
    capture_seconds: float = 0.0
    capture_bytes: int = 0
    estimated_bytes: int = 0
    pieces: int = 0
    replays: Counter[Bucket] = field(default_factory=Counter)
    padding_tokens: int = 0

    def __str__(self) -> str:
        over = ", ".join(f"{n} for {why}" for why, n in self.fell_back.items()) or "none"
        return (f"{self.captured} graphs ({self.capture_seconds:.1f} s, {self.capture_bytes / 2**20:.0f} MiB), {self.replayed} "
                f"replays, fell back: {over}")
