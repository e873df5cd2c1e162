"""Time to first token of requests that begin equally, with the prefix cache and without.

    python benchmarks/prefix.py --model llama-8b --json prefix.json
    python benchmarks/prefix.py --model tiny --device cpu --json cpu_prefix.json

All requests are given to the engine at once. ``none``: enable_prefix_caching=False, each computes its whole prompt.
``together``: the default, the first computes what they share and the others wait for it. ``kept``: enable_prefix_caching=True,
and an earlier request had the same beginning. Weights are random; tokens of every mode must be equal, or the run fails.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from quire import Engine, SamplingParams
from quire.graph_runner.bench.models import ModelSpec, build
from quire.graph_runner.bench.report import environment, this_command, write

MODES: dict[str, bool | None] = {"none": False, "together": None, "kept": True}


def first_tokens(engine: Engine, prompts: list[list[int]]) -> tuple[list[float], list[int]]:
    """Seconds from the call to the first token of each request, and the tokens."""
    times, tokens = [0.0] * len(prompts), [0] * len(prompts)
    began = time.perf_counter()
    for event in engine.stream(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), raise_on_error=True):
        times[event.index], tokens[event.index] = time.perf_counter() - began, event.token_ids[0]
    return times, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="tiny", help="a shape of quire bench, or the path of a saved model")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=4096, help="tokens that all prompts share")
    parser.add_argument("--own", type=int, default=16, help="tokens of each prompt beside them")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    length = args.prefix + args.own
    spec = ModelSpec(args.model, torch.bfloat16 if device.type == "cuda" else torch.float32, device, args.layers)
    model = build(spec, positions=length + 16)
    draw = random.Random(0)
    vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr]

    def ids(count: int) -> list[int]:
        return [draw.randrange(5, vocabulary) for _ in range(count)]

    common = ids(args.prefix)
    prompts = [common + ids(args.own) for _ in range(args.requests)]
    rows: list[dict[str, Any]] = []
    seen = []
    for mode, option in MODES.items():
        with Engine(model, enable_prefix_caching=option, max_num_seqs=args.requests, max_model_len=length + 16,
                    num_pages=None if device.type == "cuda" else args.requests * (length // 16 + 2)) as engine:
            first_tokens(engine, [ids(length)])  # not timed
            if mode == "kept":
                first_tokens(engine, [common + ids(args.own)])
            times, tokens = first_tokens(engine, prompts)
            saved = engine.stats().saved_tokens
        seen.append(tokens)
        rows.append({"mode": mode, "mean_s": statistics.fmean(times), "median_s": statistics.median(times),
                     "last_s": max(times), "saved_tokens": saved})
        rows[-1]["times_faster"] = rows[0]["mean_s"] / rows[-1]["mean_s"]
        row = rows[-1]
        print(f"{mode:9} mean {row['mean_s']:8.3f} s, last {row['last_s']:8.3f} s, {saved:7} tokens saved, "
              f"{row['times_faster']:6.1f} x faster", flush=True)
        if args.json:
            write(args.json, environment(device, None), rows, command=this_command(), model=spec.label,
                  requests=args.requests, prefix=args.prefix, own=args.own)
    if any(tokens != seen[0] for tokens in seen):
        sys.exit("the first tokens differ between the modes")


if __name__ == "__main__":
    main()
