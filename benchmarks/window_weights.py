"""Window models: KV memory and step time at a long context, with the window and without. Weight updates: time, and graphs kept.
Rollouts in bfloat16 of a float32 model: time to write the copy again, beside an optimizer's step and a decode step.

    python benchmarks/window_weights.py window --model mistral-7b --context 32768 --window 4096 --batch 8
    python benchmarks/window_weights.py mixed --model gemma-3-12b --context 32768 --window 1024 --batch 8
    python benchmarks/window_weights.py weights --model llama-8b
    python benchmarks/window_weights.py cast --model qwen3-0.6b
    python benchmarks/window_weights.py window --model tiny --context 512 --window 64 --batch 2      # a dry run on a CPU

``mixed`` is for models whose layers have windows or see everything: ``one_table_mib`` is what the same requests would hold if
all layers kept all of their pages, computed from the pages that the full layers hold.

Prints one JSON line per row. KV pages in use are counted after the last step: what the requests hold, not what the cache has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

import quire
from quire.attn_ops.kv_cache import bytes_per_page
from quire.graph_runner.bench.models import ModelSpec, build, free_memory

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


def window(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    for size in (args.window, None):
        config = MistralConfig(**SHAPES[args.model], sliding_window=size, max_position_embeddings=args.context + 4 * STEPS)
        with device:
            model = MistralForCausalLM._from_config(config, dtype=dtype).eval()
        with quire.Engine(model, attention=args.attention, max_num_seqs=args.batch,
                          max_model_len=args.context + 2 * STEPS) as engine:
            prefill, times = decode(engine, args, config.vocab_size)
            allocator, page = engine.scheduler.allocator, bytes_per_page(engine.runner.sites, engine.config.page_size)
            row: dict[str, Any] = {
                "window": size, "context": args.context, "batch": args.batch, "prefill_s": prefill,
                "ms_per_step": statistics.median(times), "cache_mib": (allocator.num_total + 1) * page / 2**20,
                "held_mib": (allocator.num_total - allocator.num_free) * page / 2**20,
                "preemptions": engine.scheduler.num_preemptions}
            print(json.dumps(row), flush=True)
        del model, engine
        free_memory()


def decode(engine: quire.Engine, args: argparse.Namespace, vocab_size: int) -> tuple[float, list[float]]:
    """Seconds for the prompts, then milliseconds of each of STEPS steps; the requests still run after that."""
    generator = torch.Generator().manual_seed(0)
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


def mixed(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    config = Gemma3TextConfig(**MIXED[args.model], sliding_window=args.window,
                              max_position_embeddings=args.context + 4 * STEPS)
    with device:
        model = Gemma3ForCausalLM._from_config(config, dtype=dtype).eval()
    with quire.Engine(model, attention=args.attention, max_num_seqs=args.batch,
                      max_model_len=args.context + 2 * STEPS) as engine:
        prefill, times = decode(engine, args, config.vocab_size)
        stats, sites, size = engine.stats(), engine.runner.sites, engine.config.page_size
        full, windows = (bytes_per_page([s for s in sites if s.bounded == bounded], size) for bounded in (False, True))
        print(json.dumps({
            "window": args.window, "context": args.context, "batch": args.batch, "prefill_s": prefill,
            "ms_per_step": statistics.median(times), "cache_mib": stats.kv_cache_bytes / 2**20,
            "held_mib": (stats.pages_used * full + stats.window_pages_used * windows) / 2**20,
            "one_table_mib": stats.pages_used * (full + windows) / 2**20, "preemptions": stats.preemptions}), flush=True)


def weights(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    model = build(ModelSpec(args.model, dtype, device))
    with quire.Engine(model, attention=args.attention, max_num_seqs=8, max_model_len=512) as engine:
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
            row = {"from": source, "gib": sum(t.nbytes for t in new.values()) / 2**30, "s": time.perf_counter() - began,
                   "graphs_kept": engine.runner.graphs.stats.captured == captured}
            now = engine.generate(prompt, params)[0].token_ids
            print(json.dumps({**row, "other_tokens": now != said}), flush=True)
            said = now
            del new
            free_memory()


def cast(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    model = build(ModelSpec(args.model, torch.float32, device))
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

    for of_engine in (torch.bfloat16, None):
        with quire.Engine(model, attention=args.attention, dtype=of_engine, max_num_seqs=args.batch,
                          max_model_len=args.context) as engine:
            for _ in range(args.batch):
                engine.add_request([5, 6, 7, 8], quire.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
            for _ in range(8):
                engine.step()
            row = {"engine": str(of_engine or torch.float32), "decode_step_ms": milliseconds(engine.step),
                   "optimizer_step_ms": milliseconds(optimizer.step),
                   "refresh_ms": milliseconds(lambda engine=engine: engine._live.refresh(everything=True)),
                   "weights_gib": engine.stats().weight_bytes / 2**30}
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["window", "mixed", "weights", "cast"])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--attention", default="auto")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    {"window": window, "mixed": mixed, "weights": weights, "cast": cast}[args.what](args, device, dtype)


if __name__ == "__main__":
    main()
