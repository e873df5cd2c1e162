"""The host workload: what an engine step costs the host, on any machine.

The engine is real, its model is not: the forward (and the replay of a graph) is replaced by one that returns at once. What
is left is the host's work, split into ``schedule``, ``fill`` (pack the batch), ``upload`` (the copy; on a GPU its launch),
``launch`` (metadata, planning, sampling flags, copying tokens back) and ``collect`` (take results in).

decode   ``batch`` sequences decode a token each; no text is decoded.
text     the same for the largest batch, with text, by the tokenizer of the model that ships.
prefill  ``batch`` sequences decode, and chunks of long prompts fill the step up to PREFILL_TOKENS.

Each is measured for short and long ``max_model_len``, which decides how wide a block table is.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from quire.attn_ops.kv_cache import pages_for
from quire.graph_runner.bench.report import PHASES
from quire.graph_runner.bench.shapes import ModelSpec, build
from quire.graph_runner.bench.workloads import Prompts, Row, Tick

BATCHES = (1, 8, 32, 128, 256)
LENGTHS = (2048, 131072)
PREFILL_BATCH, PREFILL_TOKENS = 32, 2048
STEPS, WARMUPS = 150, 20  # a repeat; the median over its steps counts
_PROMPT, _LONG_PROMPT = 100, 1900


def host(spec: ModelSpec, attention: str, options: dict[str, Any], batches: tuple[int, ...], repeats: int, tick: Tick
         ) -> Iterator[Row]:
    """A row for each length, and for each batch size of decode and one of prefill."""
    # One layer, unless asked otherwise: the host's part depends on the model no more than this.
    spec = spec if spec.layers is not None or spec.is_path else replace(spec, layers=1)
    for length in LENGTHS:
        model = build(spec, positions=length)
        vocab_size = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        cases = [*((n, 0, False) for n in batches), (max(batches), 0, True), (PREFILL_BATCH, PREFILL_TOKENS, False)]
        for batch, tokens, text in cases:
            variant = "prefill" if tokens else "text" if text else "decode"
            row: Row = {"variant": variant, "batch": batch, "max_model_len": length}
            try:
                row |= _measure(model, Prompts(vocab_size), attention, options, batch, tokens, text, length, repeats, tick)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
            yield row


def _measure(model: torch.nn.Module, prompts: Prompts, attention: str, options: dict[str, Any], batch: int, tokens: int,
             text: bool, length: int, repeats: int, tick: Tick) -> Row:
    from quire.graph_runner.engine import Engine
    from quire.graph_runner.sampling_params import SamplingParams

    steps = repeats * (STEPS + WARMUPS)
    if steps > length - 2 * _PROMPT:
        raise ValueError(f"{repeats} repeats are {steps} steps, too many for sequences of at most {length} tokens")
    page_size = options.get("page_size", 16)
    row_pages = pages_for(min(length, _PROMPT + 16 + steps), page_size)
    chosen: dict[str, Any] = {
        "max_model_len": length, "max_num_seqs": batch + bool(tokens), "async_stepping": True,
        "num_pages": max(pages_for(length, page_size), batch * row_pages + pages_for(2 * PREFILL_TOKENS, page_size)) + 1}
    if tokens:
        chosen["max_num_batched_tokens"] = tokens
    chosen.update(options)
    with Engine(model, _tokenizer() if text else None, attention=attention, **chosen) as engine:
        timer = _Timer(engine)
        forever = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=text)
        # Lengths that differ, so that not all rows need a page in the same step.
        for prompt in prompts([_PROMPT + i % 16 for i in range(batch)]):
            engine.add_request(prompt, forever)
        while engine.scheduler.waiting or any(r.num_uncomputed != 1 for r in engine.scheduler.running):
            engine.step()
        if tokens:
            once = replace(forever, max_tokens=1)
            for prompt in prompts([_LONG_PROMPT] * (steps * tokens // _LONG_PROMPT + 1)):
                engine.add_request(prompt, once)
        totals: list[list[float]] = []
        phases: dict[str, list[float]] = {name: [] for name in PHASES}
        for _ in range(repeats):
            for _ in range(WARMUPS):
                engine.step()
            gc.collect()
            totals.append([])
            for _ in range(STEPS):
                total, parts = timer.step()
                totals[-1].append(total * 1e3)
                for name, ms in parts.items():
                    phases[name].append(ms * 1e3)
            tick()
        medians = [statistics.median(t) for t in totals]
        return {"ms_per_step": statistics.median(medians), "repeats_ms": medians, "slowest_ms": max(map(max, totals)),
                "phases_ms": {name: statistics.median(found) for name, found in phases.items()},
                "attention": engine.runner.backend.name, "engine_options": chosen}


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    from quire.graph_runner.loading import TINY_MODEL

    return AutoTokenizer.from_pretrained(str(TINY_MODEL))


def timed(function: Callable[..., Any], seconds: dict[str, float], name: str) -> Callable[..., Any]:
    """``function``, its time added up in ``seconds[name]``."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    return wrapper


class _Timer:
    """Times the steps of an engine whose model it takes away."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.seconds = engine, dict.fromkeys(PHASES, 0.0)
        runner = engine.runner
        logits = torch.zeros(runner.limits.max_num_seqs, 8, device=runner.device)
        result = logits, torch.full((logits.shape[0],), 17, device=runner.device)  # a token like any other
        stub: Callable[..., Any] = lambda *args: result  # noqa: E731
        # On the instances, so that nothing outside this engine is touched.
        runner.forward = stub
        for owner, method, phase in ((engine.scheduler, "schedule", "schedule"), (runner.buffers, "fill", "fill"),
                                     (runner.buffers, "upload", "upload"), (runner, "launch", "launch"),
                                     (engine, "collect", "collect")):
            owner.__dict__[method] = timed(getattr(owner, method), self.seconds, phase)

    def step(self) -> tuple[float, dict[str, float]]:
        """Seconds of one step, and of its phases."""
        self.seconds.update(dict.fromkeys(PHASES, 0.0))
        began = time.perf_counter()
        self.engine.step()
        total = time.perf_counter() - began
        parts = dict(self.seconds)
        parts["launch"] -= parts["fill"] + parts["upload"]  # inside it
        return total, parts


__all__ = ["BATCHES", "LENGTHS", "host"]
