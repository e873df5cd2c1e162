"""What LoRA costs in a decode step: ms per step without adapters, with one for all requests, and with one for each request.

    pip install peft
    python benchmarks/adapters.py --model llama-8b --batch 1,8,32 --json adapters.json
    python benchmarks/adapters.py --model tiny --batch 2 --context 16 --rank 4            # a dry run on a CPU

``one`` is an adapter of all linear layers in the model's dtype, ``one, float32`` the same in PEFT's default dtype, ``each`` two
adapters and the model without any, in turn, in one batch (``adapter=``). ``cost`` is the time beside that without adapters, at
the same batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import quire
from quire.graph_runner.bench.models import ModelSpec, build, free_memory
from quire.graph_runner.bench.report import environment, write

STEPS = 64


def step_ms(model: Any, batch: int, names: list[str | None], args: argparse.Namespace) -> float:
    """The median time of a decode step of ``batch`` requests."""
    vocab, generator = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    params = quire.SamplingParams(temperature=0, max_tokens=2 * STEPS, ignore_eos=True)
    with quire.Engine(model, attention=args.attention, max_num_seqs=batch, max_model_len=args.context + 2 * STEPS) as engine:
        for i in range(batch):
            prompt = torch.randint(vocab, (args.context,), generator=generator).tolist()
            engine.add_request(prompt, params, adapter=names[i % len(names)])
        while engine.scheduler.waiting or any(r.num_uncomputed != 1 for r in engine.scheduler.running):
            engine.step()
        times = []
        for _ in range(STEPS):
            began = time.perf_counter()
            engine.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = build(ModelSpec(args.model, dtype, device))
    rows: list[dict[str, Any]] = []

    def measure(way: str, names: list[str | None], of: Any) -> None:
        for batch in map(int, args.batch.split(",")):
            ms = step_ms(of, batch, names, args)
            without = next((row["ms"] for row in rows if row["way"] == "none" and row["batch"] == batch), ms)
            rows.append({"way": way, "batch": batch, "ms": ms, "cost": ms / without - 1})
            print(json.dumps(rows[-1]), flush=True)
            free_memory()
        if args.json:
            write(args.json, environment(device, None), rows, arguments=vars(args))

    measure("none", [None], model)
    config = LoraConfig(r=args.rank, target_modules="all-linear", init_lora_weights=False)
    adapted: Any = get_peft_model(model, config, adapter_name="first", autocast_adapter_dtype=False)
    adapted.eval()
    measure("one", [None], adapted)
    adapted.add_adapter("second", config)
    adapted.set_adapter("first")
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            p.data = p.data.to(dtype)
    measure("each", ["first", "second", "__base__"], adapted)
    adapted.delete_adapter("second")
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            p.data = p.data.float()
    measure("one, float32", [None], adapted)


if __name__ == "__main__":
    main()
