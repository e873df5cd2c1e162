"""The host workload: what an engine step costs the host, on any machine.

The engine is real; its forward and graph replay are replaced by stubs that return at once. What is left is the host's work:
``schedule``, ``fill`` (pack the batch), ``upload`` (the copy; on a GPU its launch), ``launch`` (metadata, planning, sampling
flags, copying tokens back) and ``collect`` (process results).

decode   ``batch`` sequences decode one token each, without text.
text     the same for the largest batch, with text, by the shipped model's tokenizer.
prefill  ``batch`` sequences decode while chunks of long prompts fill the step up to PREFILL_TOKENS.
prompts  a whole call of ``generate`` by an idle engine: ``batch`` prompts of PROMPT tokens, a new token each. ``seconds``
         is the call's time; a step's is that over their number. It depends on the number of modules (--layers), which are
         compared with the trace.

Each runs with a short and a long ``max_model_len``, which sets the width of a block table.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from quire.attn_ops.kv_cache import pages_for
from quire.graph_runner.bench.models import ModelSpec, build
from quire.graph_runner.bench.report import PHASES, Row, failure
from quire.graph_runner.bench.workloads import Prompts, Sizes

LENGTHS = (2048, 131072)
PREFILL_BATCH, PREFILL_TOKENS = 32, 2048
PROMPT_BATCHES, PROMPT, CALLS = (1, 64), 1024, 5  # calls per repeat
STEPS, WARMUPS = 150, 20  # per repeat
_PROMPT, _LONG_PROMPT = 100, 1900


def cases(sizes: Sizes) -> list[tuple[str, int]]:
    """(variant, batch) of each row of one length."""
    return [*(("decode", n) for n in sizes.host_batches), ("text", max(sizes.host_batches)), ("prefill", PREFILL_BATCH),
            *(("prompts", n) for n in PROMPT_BATCHES)]


def host(spec: ModelSpec, attention: str, options: dict[str, Any], sizes: Sizes) -> Iterator[Row]:
    """A row for each case of each length."""
    # One layer unless asked otherwise: the host's part hardly depends on the model.
    spec = spec if spec.layers is not None or spec.is_path else replace(spec, layers=1)
    for length in LENGTHS:
        model = build(spec, positions=length)
        vocab_size = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        for variant, batch in cases(sizes):
            row: Row = {"variant": variant, "batch": batch, "max_model_len": length}
            try:
                measure = _calls if variant == "prompts" else _measure
                row |= measure(model, Prompts(vocab_size), attention, options, variant, batch, length, sizes.repeats)
            except Exception as error:
                row |= failure(error)
            yield row


def _measure(model: torch.nn.Module, prompts: Prompts, attention: str, options: dict[str, Any], variant: str, batch: int,
             length: int, repeats: int) -> Row:
    from transformers import AutoTokenizer

    from quire.graph_runner.engine import Engine
    from quire.graph_runner.loading import TINY_MODEL
    from quire.graph_runner.sampling_params import SamplingParams

    prefill, text = variant == "prefill", variant == "text"
    steps = repeats * (STEPS + WARMUPS)
    if steps > length - 2 * _PROMPT:
        raise ValueError(f"{repeats} repeats are {steps} steps, too many for sequences of at most {length} tokens")
    page_size = options.get("page_size", 16)
    row_pages = pages_for(min(length, _PROMPT + 16 + steps), page_size)
    chosen: dict[str, Any] = {
        "max_model_len": length, "max_num_seqs": batch + prefill, "async_stepping": True,
        "num_pages": max(pages_for(length, page_size), batch * row_pages + pages_for(2 * PREFILL_TOKENS, page_size)) + 1}
    if prefill:
        chosen["max_num_batched_tokens"] = PREFILL_TOKENS
    chosen.update(options)
    tokenizer = AutoTokenizer.from_pretrained(str(TINY_MODEL)) if text else None
    with Engine(model, tokenizer, attention=attention, **chosen) as engine:
        timer = _Timer(engine)
        forever = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=text)
        # Different lengths, so that rows need a new page in different steps.
        for prompt in prompts([_PROMPT + i % 16 for i in range(batch)]):
            engine.add_request(prompt, forever)
        while engine.scheduler.waiting or any(r.num_uncomputed != 1 for r in engine.scheduler.running):
            engine.step()
        if prefill:
            once = replace(forever, max_tokens=1)
            for prompt in prompts([_LONG_PROMPT] * (steps * PREFILL_TOKENS // _LONG_PROMPT + 1)):
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
        medians = [statistics.median(t) for t in totals]
        return {"ms_per_step": statistics.median(medians), "repeats_ms": medians, "slowest_ms": max(map(max, totals)),
                "phases_ms": {name: statistics.median(found) for name, found in phases.items()},
                "attention": engine.runner.backend.name, "engine_options": chosen}


def _calls(model: torch.nn.Module, prompts: Prompts, attention: str, options: dict[str, Any], variant: str, batch: int,
           length: int, repeats: int) -> Row:
    """A row of the variant ``prompts``."""
    from quire.graph_runner.engine import Engine
    from quire.graph_runner.sampling_params import SamplingParams

    chosen: dict[str, Any] = {"max_model_len": length, "max_num_seqs": 256, "async_stepping": True,
                              "num_pages": pages_for(length, 16) + batch * pages_for(PROMPT + 1, 16) + 1, **options}
    with Engine(model, attention=attention, **chosen) as engine:
        timer = _Timer(engine)
        once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        seconds, steps, phases = [], [], defaultdict(list)
        for i in range(repeats * CALLS + 1):
            asked = prompts([PROMPT] * batch)
            timer.seconds.update(dict.fromkeys(PHASES, 0.0))
            before, began = engine.scheduler.num_steps, time.perf_counter()
            engine.generate(asked, once)
            if i:  # the first warms up
                seconds.append(time.perf_counter() - began)
                steps.append(engine.scheduler.num_steps - before)
                for name, found in timer.phases().items():
                    phases[name].append(found * 1e3 / steps[-1])
        each = [s * 1e3 / n for s, n in zip(seconds, steps, strict=True)]
        medians = [statistics.median(each[i : i + CALLS]) for i in range(0, len(each), CALLS)]
        return {"context": PROMPT, "seconds": statistics.median(seconds), "ms_per_step": statistics.median(each),
                "repeats_ms": medians, "slowest_ms": max(each),
                "phases_ms": {name: statistics.median(found) for name, found in phases.items()},
                "attention": engine.runner.backend.name, "engine_options": chosen}


def timed(function: Callable[..., Any], seconds: dict[str, float], name: str) -> Callable[..., Any]:
    """``function``, adding its time to ``seconds[name]``."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    return wrapper


class _Timer:
    """Replaces the forward of an engine by a stub, and times the engine's steps."""

    def __init__(self, engine: Any) -> None:
        from quire.graph_runner.model_runner import StepResults

        self.engine, self.seconds = engine, dict.fromkeys(PHASES, 0.0)
        runner = engine.runner
        logits = torch.zeros(runner.limits.max_num_seqs, 8, device=runner.device)
        result = StepResults(logits, torch.full((logits.shape[0],), 17, device=runner.device))  # any token
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
        return time.perf_counter() - began, self.phases()

    def phases(self) -> dict[str, float]:
        """Seconds of each phase."""
        parts = dict(self.seconds)
        parts["launch"] -= parts["fill"] + parts["upload"]  # launch includes both
        return parts


__all__ = ["LENGTHS", "cases", "host"]
