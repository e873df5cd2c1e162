"""What LoRA costs in a decode step: ms per step without adapters, with one for all requests, and with one for each request.
Steps follow one another as in ``generate``: the host prepares one while the GPU runs the one before.

    pip install peft
    python benchmarks/adapters.py --model llama-8b --batch 1,8,32 --deadline 150 --json adapters.json
    python benchmarks/adapters.py --model tiny --batch 2 --context 16 --rank 4            # a dry run on a CPU

Rows with ``tokens`` instead of ``batch`` (``--prompts``) have the time of a request for one token after a prompt of that
length, and the host's part of it.

    python benchmarks/adapters.py --places 1,8 --json cpu_places.json                     # on any machine

``--places`` measures something else, on the host alone: what it takes, before each step, to see that nothing has changed in so
many adapters in places (``max_loras``), in milliseconds of processor time. The model has no memory (the meta device).
``--profile`` adds the GPU time of a step, by kernel and its grid, to the rows of decode steps.

``one`` is an adapter of all linear layers, ``each`` two adapters and the model without any, in turn, in one batch
(``adapter=``), and ``nobody`` the same engine when no request has an adapter, in each ``--lora-dtype`` (float32 is PEFT's
default). ``cost`` is the time beside that without adapters, at the same batch. ``sites`` restricts the adapters' layers
(PEFT's ``target_modules``; names with a dot are ``target_parameters``: mlp.experts.gate_up_proj). Each has its share of the
time left.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import quire
from quire.graph_runner.adapter_places import AdapterPlaces
from quire.graph_runner.adapters import BASE
from quire.graph_runner.bench.kernel_times import longest, profiled
from quire.graph_runner.bench.models import free_memory, skeleton
from quire.graph_runner.bench.record import (
    dtype_of,
    end,
    model_of,
    numbers,
    processor_ms,
    random_tokens,
    script,
    seconds,
    spec_of,
    started,
    until_decoding,
)
from quire.passes.capture.lora import adapter_layers

STEPS, ROUNDS = 32, 3
SHARES = {"none": 3, "one": 3, "each": 6}  # of the time


def step_of(engine: quire.Engine, batch: int, names: list[str | None], context: int, profile: bool) -> dict[str, Any]:
    """A decode step of ``batch`` requests: ``ms``, the median of ROUNDS times STEPS steps; and with ``profile`` the kernels of
    one."""
    prompt = random_tokens(engine.runner.vocab_size)
    params = quire.SamplingParams(temperature=0, max_tokens=(ROUNDS + 2) * STEPS, ignore_eos=True)
    ids = [one for i in range(batch) for one in engine.add_request(prompt(context), params, adapter=names[i % len(names)])]
    until_decoding(engine)
    for _ in range(8):
        engine.step()
    times = [seconds(lambda: [engine.step() for _ in range(STEPS)]) for _ in range(ROUNDS)]
    kernels = profiled(lambda: [engine.step() for _ in range(STEPS)], STEPS, grids=True) if profile else {}
    end(engine, ids)
    return {"ms": statistics.median(times) / STEPS * 1e3, **({"kernels": longest(kernels)} if profile else {})}


def prompt_of(engine: quire.Engine, tokens: int) -> dict[str, Any]:
    """``ms`` from a request to its only token: the median of 2 ROUNDS."""
    prompt, params = random_tokens(engine.runner.vocab_size), quire.SamplingParams(temperature=0, max_tokens=1)
    times = [seconds(lambda: engine.generate([prompt(tokens)], params)) for _ in range(2 * ROUNDS + 1)]
    return {"ms": statistics.median(times[1:]) * 1e3}


def watching_ms(args: Any, adapters: int) -> dict[str, Any]:
    """A row: the processor time of ``AdapterPlaces.change`` between steps of a busy engine, median and least."""
    model, config = skeleton(spec_of(args)), LoraConfig(r=args.rank, target_modules="all-linear")
    adapted: Any = get_peft_model(model, config, adapter_name="0", low_cpu_mem_usage=True)
    for i in range(1, adapters):
        adapted.add_adapter(str(i), config, low_cpu_mem_usage=True)
    places = AdapterPlaces(model, adapters, None, None)
    if None in places.names or places.change(False) is not None:
        raise RuntimeError("the adapters are not in places")
    times = processor_ms(lambda: places.change(False))
    return {"adapters": adapters, "layers": len(adapter_layers(model)), "median_ms": statistics.median(times),
            "least_ms": min(times)}


def main() -> None:
    parser = script(__doc__, "llama-8b", attention="auto", batch=[1, 8, 32], context=1024, rank=16,
                    sites=("all-linear", "all-linear, or names of layers and of parameters: q_proj,mlp.experts.down_proj"),
                    lora_dtype=("model,float32", "of the adapters' weights: model (the model's), float32"),
                    prompts=("", "also prompts of these lengths: 1024,8192"),
                    fusions=("auto", "of the engines, as quire.Engine takes them"), ways=("one,each", "one, each, or both"),
                    profile=(False, "also the GPU time by kernel, of a step"),
                    places=("", "instead: the host's time to watch this number of adapters in places: 1,8"))
    args = parser.parse_args()
    kinds = args.lora_dtype.split(",")
    if args.ways not in ("one", "each", "one,each"):
        parser.error("--ways is one, each, or one,each")
    if unknown := sorted(set(kinds) - {"model", "float32"}):
        parser.error(f"unknown --lora-dtype {', '.join(unknown)}; there are: model, float32")
    if args.profile and torch.device(args.device).type != "cuda":
        parser.error("--profile needs a GPU")
    if args.places:
        torch.set_num_threads(1)
        record = started(args)
        for count in numbers(args.places):
            record.keep(watching_ms(args, count))
        return
    prompts = numbers(args.prompts)
    record, length = started(args), max([args.context + (ROUNDS + 2) * STEPS, *(n + 1 for n in prompts)])
    model = model_of(args, positions=length)
    todo = [("none", "model"), *((way, kind) for kind in kinds for way in args.ways.split(","))]

    def measure(way: str, of: Any, *requests: tuple[str, list[str | None]]) -> None:
        """Steps of an engine on ``of``; ``requests``: what they are called, and the adapters of requests in turn."""
        share = SHARES[way] / sum(SHARES[each] for each, _ in todo)
        _, lora_dtype = todo.pop(0)

        def run() -> None:
            with quire.Engine(of, attention=args.attention, max_num_seqs=max(args.batch), max_model_len=length,
                              enable_lora=way == "each", fusions=args.fusions) as engine:
                times = [(what, "batch", n, lambda n=n, names=names: step_of(engine, n, names, args.context, args.profile))
                         for n, (what, names) in itertools.product(args.batch, requests)]
                times += [(way, "tokens", n, lambda n=n: prompt_of(engine, n)) for n in prompts if way != "each"]
                for what, kind, n, timed in times:
                    found = timed()
                    without = [row["ms"] for row in record.rows if row.get("way") == "none" and row.get(kind) == n]
                    record.keep({"way": what, "lora_dtype": None if way == "none" else lora_dtype, kind: n,
                                 "cost": found["ms"] / without[0] - 1 if without else None, **found})

        record.measure(f"{way}, {lora_dtype}", run, most=record.left * share)
        free_memory()

    measure("none", model, ("none", [None]))
    sites = args.sites.split(",")
    config = LoraConfig(r=args.rank, init_lora_weights=False, target_modules=args.sites if args.sites == "all-linear" else [
        site for site in sites if "." not in site], target_parameters=[site for site in sites if "." in site] or None)
    adapted: Any = get_peft_model(model, config, adapter_name="first", autocast_adapter_dtype=False)
    adapted.add_adapter("second", config)
    adapted.set_adapter("first")
    adapted.eval()
    for kind in kinds:
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.data = p.data.to(torch.float32 if kind == "float32" else dtype_of(args))
        if "one" in args.ways:
            measure("one", adapted, ("one", [None]))
        if "each" in args.ways:
            measure("each", adapted, ("each", ["first", "second", BASE]), ("nobody", [BASE]))


if __name__ == "__main__":
    main()
