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
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from quire.attn_ops.kv_cache import pages_for
from quire.attn_ops.ops.logprobs import TokenLogprobs
from quire.graph_runner.bench.models import ModelSpec, build
from quire.graph_runner.bench.record import until_decoding
from quire.graph_runner.bench.report import PHASES, Row, failure
from quire.graph_runner.bench.workloads import Prompts, Sizes
from quire.graph_runner.engine import Engine
from quire.graph_runner.loading import TINY_MODEL
from quire.graph_runner.model_runner import StepResults
from quire.graph_runner.sampling_params import SamplingParams

LENGTHS = (2048, 131072)
PREFILL_BATCH, PREFILL_TOKENS = 32, 2048
PROMPT_BATCHES, PROMPT, CALLS = (1, 64), 1024, 5  # calls per repeat
STEPS, WARMUPS = 150, 20  # per repeat
_PROMPT, _LONG_PROMPT = 100, 1900

Phases = dict[str, float]  # milliseconds of a step, by phase; "step": of all of it


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
        for variant, batch in cases(sizes):
            row: Row = {"variant": variant, "batch": batch, "max_model_len": length}
            try:
                row |= _measure(model, attention, options, variant, batch, length, sizes.repeats)
            except Exception as error:
                row |= failure(error)
            yield row


def _measure(model: torch.nn.Module, attention: str, options: dict[str, Any], variant: str, batch: int, length: int,
             repeats: int) -> Row:
    from transformers import AutoTokenizer

    page_size, steps = options.get("page_size", 16), repeats * (STEPS + WARMUPS)
    if variant == "prompts":
        pages, rows = pages_for(length, page_size) + batch * pages_for(PROMPT + 1, page_size), 256
    elif steps > length - 2 * _PROMPT:
        raise ValueError(f"{repeats} repeats are {steps} steps, too many for sequences of at most {length} tokens")
    else:
        own = batch * pages_for(min(length, _PROMPT + 16 + steps), page_size)
        pages = max(pages_for(length, page_size), own + pages_for(2 * PREFILL_TOKENS, page_size))
        rows = batch + (variant == "prefill")
    chosen: dict[str, Any] = {"max_model_len": length, "async_stepping": True, "max_num_seqs": rows, "num_pages": pages + 1}
    if variant == "prefill":
        chosen["max_num_batched_tokens"] = PREFILL_TOKENS
    chosen |= options
    tokenizer = AutoTokenizer.from_pretrained(str(TINY_MODEL)) if variant == "text" else None
    with Engine(model, tokenizer, attention=attention, **chosen) as engine:
        prompts, timer = Prompts(model.get_input_embeddings().weight.shape[0]), _Timer(engine)  # type: ignore[operator]
        found, more = (_calls(timer, prompts, batch, repeats) if variant == "prompts" else
                       (_steps(timer, prompts, variant, batch, repeats), {}))
        every = [step for run in found for step in run]
        medians = [statistics.median(step["step"] for step in run) for run in found]
        return {"ms_per_step": statistics.median(medians), "repeats_ms": medians, "slowest_ms": max(s["step"] for s in every),
                "phases_ms": {name: statistics.median(step[name] for step in every) for name in PHASES},
                "attention": engine.runner.backend.name, "engine_options": chosen, **more}


def _steps(timer: _Timer, prompts: Prompts, variant: str, batch: int, repeats: int) -> list[list[Phases]]:
    """STEPS steps of a full batch, per repeat."""
    engine = timer.engine
    forever = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=variant == "text")
    # Different lengths, so that rows need a new page in different steps.
    for prompt in prompts([_PROMPT + i % 16 for i in range(batch)]):
        engine.add_request(prompt, forever)
    until_decoding(engine)
    if variant == "prefill":
        count = repeats * (STEPS + WARMUPS) * PREFILL_TOKENS // _LONG_PROMPT + 1
        for prompt in prompts([_LONG_PROMPT] * count):
            engine.add_request(prompt, replace(forever, max_tokens=1))
    found = []
    for _ in range(repeats):
        for _ in range(WARMUPS):
            engine.step()
        gc.collect()
        found.append([timer.phases(engine.step) for _ in range(STEPS)])
    return found


def _calls(timer: _Timer, prompts: Prompts, batch: int, repeats: int) -> tuple[list[list[Phases]], Row]:
    """CALLS calls of ``generate``, per repeat."""
    engine, once = timer.engine, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    seconds = []

    def call() -> Phases:
        asked, before = prompts([PROMPT] * batch), engine.scheduler.num_steps
        parts = timer.phases(lambda: engine.generate(asked, once))
        seconds.append(parts["step"] / 1e3)
        return {name: ms / (engine.scheduler.num_steps - before) for name, ms in parts.items()}

    call()  # warm-up
    seconds.clear()
    found = [[call() for _ in range(CALLS)] for _ in range(repeats)]
    return found, {"context": PROMPT, "seconds": statistics.median(seconds)}


class _Timer:
    """Replaces the forward of an engine by a stub, and times the phases of its steps."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.ms = engine, dict.fromkeys(PHASES, 0.0)
        runner = engine.runner
        logits = torch.zeros(runner.limits.max_num_seqs, 8, device=runner.device)
        none = TokenLogprobs(torch.zeros(3, len(logits), device=runner.device))
        result = StepResults(logits, torch.full((logits.shape[0],), 17, device=runner.device), none)  # any token
        # On the instances, so that nothing outside this engine is touched.
        runner.forward = lambda *args: result
        owners = (engine.scheduler, runner.buffers, runner.buffers, runner, engine)
        for owner, phase in zip(owners, PHASES, strict=True):
            owner.__dict__[phase] = self._timed(getattr(owner, phase), phase)

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.ms[phase] += (time.perf_counter() - began) * 1e3

        return wrapper

    def phases(self, call: Callable[[], Any]) -> Phases:
        """Milliseconds of the call, and of the phases of its steps."""
        self.ms.update(dict.fromkeys(PHASES, 0.0))
        began = time.perf_counter()
        call()
        taken = (time.perf_counter() - began) * 1e3
        # launch includes fill and upload
        return {**self.ms, "launch": self.ms["launch"] - self.ms["fill"] - self.ms["upload"], "step": taken}
