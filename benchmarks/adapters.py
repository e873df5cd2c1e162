"""What LoRA costs in a decode step: ms per step without adapters, with one for all requests, and with one for each request.

    pip install peft
    python benchmarks/adapters.py --model llama-8b --batch 1,8,32 --deadline 150 --json adapters.json
    python benchmarks/adapters.py --model tiny --batch 2 --context 16 --rank 4            # a dry run on a CPU

``one`` is an adapter of all linear layers, ``each`` two adapters and the model without any, in turn, in one batch
(``adapter=``), in each ``--lora-dtype`` (float32 is PEFT's default). ``cost`` is the time beside that without adapters, at the
same batch. ``sites`` restricts the adapters' layers (PEFT's ``target_modules``). Each has an equal share of the time left.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import quire
from quire.graph_runner.bench.models import ModelSpec, build, free_memory, layers_asked
from quire.graph_runner.bench.record import Record, add_arguments

STEPS = 64


def step_ms(engine: quire.Engine, batch: int, names: list[str | None], context: int) -> float:
    """The median time of a decode step of ``batch`` requests."""
    vocab, generator = engine.runner.vocab_size, torch.Generator().manual_seed(0)
    params = quire.SamplingParams(temperature=0, max_tokens=2 * STEPS, ignore_eos=True)
    ids = []
    for i in range(batch):
        prompt = torch.randint(vocab, (context,), generator=generator).tolist()
        ids += engine.add_request(prompt, params, adapter=names[i % len(names)])
    while engine.scheduler.waiting or any(r.num_uncomputed != 1 for r in engine.scheduler.running):
        engine.step()
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        engine.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_unfinished:
        engine.step()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sites", default="all-linear", help="all-linear, or names of layers: q_proj,k_proj,v_proj")
    parser.add_argument("--lora-dtype", default="model,float32", help="of the adapters' weights: model (the model's), float32")
    add_arguments(parser)
    args = parser.parse_args()
    args.layers = layers_asked(args.layers)
    if unknown := sorted(set(args.lora_dtype.split(",")) - {"model", "float32"}):
        parser.error(f"unknown --lora-dtype {', '.join(unknown)}; there are: model, float32")
    batches = [int(n) for n in args.batch.split(",")]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    record = Record(args.json, device, args.deadline, arguments=vars(args))
    model: Any = build(ModelSpec(args.model, dtype, device, args.layers), positions=args.context + 2 * STEPS)
    options = dict(attention=args.attention, max_num_seqs=max(batches), max_model_len=args.context + 2 * STEPS)

    todo = [("none", "model")] + [(way, of) for of in args.lora_dtype.split(",") for way in ("one", "each")]

    def measure(way: str, names: list[str | None], of: Any) -> None:
        _, lora_dtype = todo.pop(0)

        def run() -> None:
            with quire.Engine(of, **options) as engine:
                for batch in batches:
                    ms = step_ms(engine, batch, names, args.context)
                    without = [row["ms"] for row in record.rows if row.get("way") == "none" and row["batch"] == batch]
                    record.keep({"way": way, "lora_dtype": None if way == "none" else lora_dtype, "batch": batch, "ms": ms,
                                 "cost": ms / without[0] - 1 if without else None})

        record.measure(f"{way}, {lora_dtype}", run, most=record.left / (len(todo) + 1))
        free_memory()

    measure("none", [None], model)
    sites = args.sites if args.sites == "all-linear" else args.sites.split(",")
    config = LoraConfig(r=args.rank, target_modules=sites, init_lora_weights=False)
    adapted: Any = get_peft_model(model, config, adapter_name="first", autocast_adapter_dtype=False)
    adapted.add_adapter("second", config)
    adapted.set_adapter("first")
    adapted.eval()
    while todo:
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.data = p.data.to(torch.float32 if todo[0][1] == "float32" else dtype)
        measure("one", [None], adapted)
        measure("each", ["first", "second", "__base__"], adapted)


if __name__ == "__main__":
    main()
