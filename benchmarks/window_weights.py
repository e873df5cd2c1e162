"""Window models: KV memory and step time at a long context, with the window and without. Weight updates: time, and graphs kept.
Rollouts in bfloat16 of a float32 model: time to write the copy again, beside an optimizer's step and a decode step.

    python benchmarks/window_weights.py window --model mistral-7b --context 32768 --window 4096 --batch 8 --deadline 110
    python benchmarks/window_weights.py mixed --model gemma-3-12b --context 32768 --window 1024 --batch 8 --layers 12
    python benchmarks/window_weights.py weights --model llama-8b --json updates.json
    python benchmarks/window_weights.py cast --model qwen3-0.6b
    python benchmarks/window_weights.py window --model tiny --context 512 --window 64 --batch 2      # a dry run on a CPU

``mixed`` is for models whose layers have windows or see everything: ``one_table_mib`` is what the same requests would hold if
all layers kept all of their pages, computed from the pages that the full layers hold.

Prints one JSON line per row, and writes each to ``--json`` at once. KV pages in use are counted after the last step: what the
requests hold (``held_mib``); ``idle_mib`` is what they gave back and equal beginnings may still read. ``start_s`` is the time
to make model and engine. Only the batch size that is measured is captured. What ``--deadline`` (seconds from the start of the
process) leaves no time for becomes a row with ``error``; the exit code is then 1.
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
from quire.graph_runner.bench.models import ModelSpec, build, free_memory, layers_asked
from quire.graph_runner.bench.record import Record, add_arguments

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


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def engine_of(model: torch.nn.Module, args: argparse.Namespace, began: float, **options: Any) -> Iterator[tuple[Any, float]]:
    """An engine, and seconds since ``began``."""
    with quire.Engine(model, attention=args.attention, cudagraph_token_sizes=[], **options) as engine:
        synchronize()
        yield engine, time.perf_counter() - began
    free_memory()


def long_contexts(model: torch.nn.Module, args: argparse.Namespace, began: float) -> Any:
    return engine_of(model, args, began, max_num_seqs=args.batch, cudagraph_capture_sizes=[args.batch],
                     max_model_len=args.context + 2 * STEPS)


def window(args: argparse.Namespace, record: Record, device: torch.device, dtype: torch.dtype) -> None:
    shape = SHAPES[args.model]
    took = 0.0

    def measure(size: int | None) -> None:
        began = time.perf_counter()
        config = MistralConfig(**{**shape, "num_hidden_layers": args.layers or shape["num_hidden_layers"]}, sliding_window=size,
                               max_position_embeddings=args.context + 4 * STEPS)
        with device:
            model = MistralForCausalLM._from_config(config, dtype=dtype).eval()
        with long_contexts(model, args, began) as (engine, start):
            prefill, times = decode(engine, args, config.vocab_size)
            stats, page = engine.stats(), bytes_per_page(engine.runner.sites, engine.config.page_size)
            record.keep({
                "row": "window", "model": args.model, "layers": config.num_hidden_layers, "window": size,
                "context": args.context, "batch": args.batch, "start_s": start, "prefill_s": prefill,
                "ms_per_step": statistics.median(times), "cache_mib": stats.kv_cache_bytes / 2**20,
                "held_mib": stats.pages_used * page / 2**20, "idle_mib": stats.pages_idle * page / 2**20,
                "preemptions": stats.preemptions})

    for size in (args.window, None):
        free_memory()
        began = time.perf_counter()
        record.measure(f"window {size}", lambda size=size: measure(size), needs=0.6 * took)  # what is compiled is found again
        took = time.perf_counter() - began


def decode(engine: quire.Engine, args: argparse.Namespace, vocab_size: int) -> tuple[float, list[float]]:
    """Seconds for the prompts, then milliseconds of each of STEPS steps; the requests still run after that. A first prompt is
    not timed: kernels are loaded in it."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(vocab_size, (min(args.context, engine.config.max_num_batched_tokens),), generator=generator)
    engine.generate([first.tolist()], quire.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    for _ in range(args.batch):
        prompt = torch.randint(vocab_size, (args.context,), generator=generator).tolist()
        engine.add_request(prompt, quire.SamplingParams(temperature=0, max_tokens=2 * STEPS, ignore_eos=True))
    began = time.perf_counter()
    while engine.scheduler.waiting or any(r.num_uncomputed != 1 for r in engine.scheduler.running):
        engine.step()
    synchronize()
    prefill, times = time.perf_counter() - began, []
    for _ in range(STEPS):
        began = time.perf_counter()
        engine.step()
        synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return prefill, times


def mixed(args: argparse.Namespace, record: Record, device: torch.device, dtype: torch.dtype) -> None:
    began, shape = time.perf_counter(), MIXED[args.model]
    layers = args.layers or shape["num_hidden_layers"]
    kinds = ["full_attention" if i % 6 == 5 or i == layers - 1 else "sliding_attention" for i in range(layers)]
    config = Gemma3TextConfig(**{**shape, "num_hidden_layers": layers}, layer_types=kinds, sliding_window=args.window,
                              max_position_embeddings=args.context + 4 * STEPS)
    with device:
        model = Gemma3ForCausalLM._from_config(config, dtype=dtype).eval()
    with long_contexts(model, args, began) as (engine, start):
        prefill, times = decode(engine, args, config.vocab_size)
        stats, sites, size = engine.stats(), engine.runner.sites, engine.config.page_size
        full, windows = (bytes_per_page([s for s in sites if s.bounded == bounded], size) for bounded in (False, True))
        record.keep({
            "row": "mixed", "model": args.model, "layers": layers, "window": args.window, "context": args.context,
            "batch": args.batch, "start_s": start, "prefill_s": prefill, "ms_per_step": statistics.median(times),
            "cache_mib": stats.kv_cache_bytes / 2**20,
            "held_mib": (stats.pages_used * full + stats.window_pages_used * windows) / 2**20,
            "one_table_mib": stats.pages_used * (full + windows) / 2**20, "preemptions": stats.preemptions})


def weights(args: argparse.Namespace, record: Record, device: torch.device, dtype: torch.dtype) -> None:
    began = time.perf_counter()
    model = build(ModelSpec(args.model, dtype, device, args.layers))
    with engine_of(model, args, began, max_num_seqs=8, cudagraph_capture_sizes=[1], max_model_len=512) as (engine, start):
        prompt, params = [[5, 6, 7, 8]], quire.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        said = engine.generate(prompt, params)[0].token_ids
        captured = engine.runner.graphs.stats.captured
        for source in ("device", "host"):
            new = {name: p.detach().to("cpu" if source == "host" else device, copy=True).mul_(-1)
                   for name, p in model.named_parameters()}
            synchronize()
            began = time.perf_counter()
            engine.update_weights_from_tensors(new)
            synchronize()
            row = {"row": "weights", "model": args.model, "start_s": start, "from": source,
                   "gib": sum(t.nbytes for t in new.values()) / 2**30, "s": time.perf_counter() - began,
                   "graphs": captured, "graphs_kept": engine.runner.graphs.stats.captured == captured}
            replayed = engine.runner.graphs.stats.replayed
            now = engine.generate(prompt, params)[0].token_ids
            record.keep({**row, "replays_after": engine.runner.graphs.stats.replayed - replayed, "other_tokens": now != said})
            said = now
            del new
            free_memory()


def cast(args: argparse.Namespace, record: Record, device: torch.device, dtype: torch.dtype) -> None:
    model = build(ModelSpec(args.model, torch.float32, device, args.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def milliseconds(run: Any) -> float:
        times = []
        for _ in range(6):
            synchronize()
            began = time.perf_counter()
            run()
            synchronize()
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times[1:])

    def measure(of_engine: torch.dtype | None) -> None:
        with engine_of(model, args, time.perf_counter(), dtype=of_engine, max_num_seqs=args.batch,
                       cudagraph_capture_sizes=[args.batch], max_model_len=args.context) as (engine, start):
            for _ in range(args.batch):
                engine.add_request([5, 6, 7, 8], quire.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
            for _ in range(8):
                engine.step()
            record.keep({
                "row": "cast", "model": args.model, "engine": str(of_engine or torch.float32), "start_s": start,
                "decode_step_ms": milliseconds(engine.step), "optimizer_step_ms": milliseconds(optimizer.step),
                "refresh_ms": milliseconds(lambda: engine._live.refresh(everything=True)),
                "weights_gib": engine.stats().weight_bytes / 2**30})

    for of_engine in (torch.bfloat16, None):
        record.measure(f"cast {of_engine}", lambda of_engine=of_engine: measure(of_engine))


RUNS = {"window": window, "mixed": mixed, "weights": weights, "cast": cast}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(RUNS))
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--attention", default="auto")
    add_arguments(parser)
    args = parser.parse_args()
    args.layers = layers_asked(args.layers)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    record = Record(args.json, device, args.deadline)
    record.measure(args.what, lambda: RUNS[args.what](args, record, device, dtype))
    return int(not record.rows or any("error" in row for row in record.rows))


if __name__ == "__main__":
    sys.exit(main())
