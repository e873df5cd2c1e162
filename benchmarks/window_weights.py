"""Window models: KV memory and step time at a long context, with the window and without. Weight updates: time, and graphs kept.
Rollouts in bfloat16 of a float32 model: time to write the copy again, beside an optimizer's step and a decode step.

    python benchmarks/window_weights.py window --model mistral-7b --context 32768 --window 4096 --batch 8 --deadline 110
    python benchmarks/window_weights.py mixed --model gemma-3-12b --context 32768 --window 1024 --batch 8 --layers 12
    python benchmarks/window_weights.py weights --model llama-8b --json updates.json
    python benchmarks/window_weights.py cast --model qwen3-0.6b
    python benchmarks/window_weights.py window --model tiny --context 512 --window 64 --batch 2      # a dry run on a CPU

``mixed`` is for models whose layers have windows or see everything: ``one_table_mib`` is what the same requests would hold if
all layers kept all of their pages, computed from the pages that the full layers hold.

KV pages in use are counted after the last step: what the requests hold (``held_mib``); ``idle_mib`` is what they gave back and
equal beginnings may still read. ``start_s`` is the time to make model and engine. Only the batch size that is measured is
captured. With an ``error`` in a row the exit code is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

import quire
from quire.attn_ops.kv_cache import bytes_per_page
from quire.graph_runner.bench.models import free_memory
from quire.graph_runner.bench.record import (
    Record,
    dtype_of,
    milliseconds,
    model_of,
    random_tokens,
    script,
    seconds,
    started,
    synchronize,
    until_decoding,
)

SHAPES = {
    "mistral-7b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                       num_key_value_heads=8, vocab_size=32000),
    "tiny": dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 vocab_size=256),
}
#: Five layers with a window to one without.
MIXED = {
    "gemma-3-12b": dict(hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16,
                        num_key_value_heads=8, head_dim=256, vocab_size=262208),
    "tiny": dict(hidden_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=16, vocab_size=256),
}
STEPS = 64


@contextmanager
def engine_of(model: torch.nn.Module, args: argparse.Namespace, began: float, **options: Any) -> Iterator[tuple[Any, float]]:
    """An engine, and seconds since ``began``."""
    with quire.Engine(model, attention=args.attention, cudagraph_token_sizes=[], **options) as engine:
        synchronize()
        yield engine, time.perf_counter() - began
    free_memory()


def long_contexts(kind: str, make: Any, config: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The row of a new model that decodes a batch of long contexts."""
    began = time.perf_counter()
    with torch.device(args.device):
        model = make._from_config(config, dtype=dtype_of(args)).eval()
    with engine_of(model, args, began, max_num_seqs=args.batch, cudagraph_capture_sizes=[args.batch],
                   max_model_len=args.context + 2 * STEPS) as (engine, start):
        prefill, times = decode(engine, args, config.vocab_size)
        stats, sites, size = engine.stats(), engine.runner.sites, engine.config.page_size
        row = {"row": kind, "model": args.model, "layers": config.num_hidden_layers, "window": config.sliding_window,
               "context": args.context, "batch": args.batch, "start_s": start, "prefill_s": prefill,
               "ms_per_step": statistics.median(times), "cache_mib": stats.kv_cache_bytes / 2**20,
               "preemptions": stats.preemptions}
        if kind == "window":
            page = bytes_per_page(sites, size)
            return {**row, "held_mib": stats.pages_used * page / 2**20, "idle_mib": stats.pages_idle * page / 2**20}
        full, windows = (bytes_per_page([s for s in sites if s.bounded == bounded], size) for bounded in (False, True))
        return {**row, "held_mib": (stats.pages_used * full + stats.window_pages_used * windows) / 2**20,
                "one_table_mib": stats.pages_used * (full + windows) / 2**20}


def decode(engine: quire.Engine, args: argparse.Namespace, vocab_size: int) -> tuple[float, list[float]]:
    """Seconds for the prompts, then milliseconds of each of STEPS steps; the requests still run after that. A first prompt is
    not timed: kernels are loaded in it."""
    prompt = random_tokens(vocab_size)
    first = prompt(min(args.context, engine.config.max_num_batched_tokens))
    engine.generate([first], quire.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    for _ in range(args.batch):
        engine.add_request(prompt(args.context), quire.SamplingParams(temperature=0, max_tokens=2 * STEPS, ignore_eos=True))
    return seconds(lambda: until_decoding(engine)), milliseconds(engine.step, STEPS)


def window(args: argparse.Namespace, record: Record) -> None:
    shape, took = SHAPES[args.model], 0.0
    for size in (args.window, None):
        config = MistralConfig(**{**shape, "num_hidden_layers": args.layers or shape["num_hidden_layers"]}, sliding_window=size,
                               max_position_embeddings=args.context + 4 * STEPS)
        free_memory()
        began = time.perf_counter()
        record.measure(f"window {size}", lambda config=config: record.keep(
            long_contexts("window", MistralForCausalLM, config, args)), needs=0.6 * took)  # what is compiled is found again
        took = time.perf_counter() - began


def mixed(args: argparse.Namespace, record: Record) -> None:
    shape = MIXED[args.model]
    layers = args.layers or shape["num_hidden_layers"]
    kinds = ["full_attention" if i % 6 == 5 or i == layers - 1 else "sliding_attention" for i in range(layers)]
    config = Gemma3TextConfig(**{**shape, "num_hidden_layers": layers}, layer_types=kinds, sliding_window=args.window,
                              max_position_embeddings=args.context + 4 * STEPS)
    record.keep(long_contexts("mixed", Gemma3ForCausalLM, config, args))


def weights(args: argparse.Namespace, record: Record) -> None:
    began = time.perf_counter()
    model = model_of(args)
    with engine_of(model, args, began, max_num_seqs=8, cudagraph_capture_sizes=[1], max_model_len=512) as (engine, start):
        prompt, params = [[5, 6, 7, 8]], quire.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        said = engine.generate(prompt, params)[0].token_ids
        captured = engine.runner.graphs.stats.captured
        for source in ("device", "host"):
            new = {name: p.detach().to("cpu" if source == "host" else args.device, copy=True).mul_(-1)
                   for name, p in model.named_parameters()}
            took = seconds(lambda new=new: engine.update_weights_from_tensors(new))
            row = {"row": "weights", "model": args.model, "start_s": start, "from": source,
                   "gib": sum(t.nbytes for t in new.values()) / 2**30, "s": took,
                   "graphs": captured, "graphs_kept": engine.runner.graphs.stats.captured == captured}
            replayed = engine.runner.graphs.stats.replayed
            now = engine.generate(prompt, params)[0].token_ids
            record.keep({**row, "replays_after": engine.runner.graphs.stats.replayed - replayed, "other_tokens": now != said})
            said = now
            del new
            free_memory()


def cast(args: argparse.Namespace, record: Record) -> None:
    model = model_of(args, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def median(run: Any) -> float:
        return statistics.median(milliseconds(run, 6)[1:])

    def measure(of_engine: torch.dtype | None) -> None:
        with engine_of(model, args, time.perf_counter(), dtype=of_engine, max_num_seqs=args.batch,
                       cudagraph_capture_sizes=[args.batch], max_model_len=args.context) as (engine, start):
            for _ in range(args.batch):
                engine.add_request([5, 6, 7, 8], quire.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
            for _ in range(8):
                engine.step()
            record.keep({
                "row": "cast", "model": args.model, "engine": str(of_engine or torch.float32), "start_s": start,
                "decode_step_ms": median(engine.step), "optimizer_step_ms": median(optimizer.step),
                "refresh_ms": median(lambda: engine._live.refresh(everything=True)),
                "weights_gib": engine.stats().weight_bytes / 2**30})

    for of_engine in (torch.bfloat16, None):
        record.measure(f"cast {of_engine}", lambda of_engine=of_engine: measure(of_engine))


RUNS = {"window": window, "mixed": mixed, "weights": weights, "cast": cast}


def main() -> int:
    parser = script(__doc__, context=512, window=64, batch=2, attention="auto")
    parser.add_argument("what", choices=list(RUNS))
    args = parser.parse_args()
    record = started(args)
    record.measure(args.what, lambda: RUNS[args.what](args, record))
    return int(record.failed)


if __name__ == "__main__":
    sys.exit(main())
