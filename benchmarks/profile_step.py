"""GPU time of an engine step, kernel by kernel, from torch.profiler.

    python benchmarks/profile_step.py --model llama-8b --batch 1,8,32,128 --json profile.json
    python benchmarks/profile_step.py --model llama-8b --batch "" --prefill 8192,960
    python benchmarks/profile_step.py --model llama-1b --batch "" --prefill 16384 --prompt 16384
    python benchmarks/profile_step.py --model llama-8b --batch 128 --quantize int8wo

Decode: steps of ``batch`` sequences of about ``context`` tokens, replayed from CUDA graphs. Wall time comes from steps without
the profiler, which slows the host down; kernel times from as many steps with it. ``idle``: wall time minus kernel time.
Prefill: ``tokens`` tokens in prompts of ``prompt`` tokens (the last one shorter), with one new token each; all steps it takes.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

from quire.graph_runner.bench.kernel_times import kind, longest, profiled
from quire.graph_runner.bench.models import build
from quire.graph_runner.bench.record import end, random_tokens, script, seconds, spec_of, started, until_decoding
from quire.graph_runner.engine import Engine
from quire.graph_runner.sampling_params import SamplingParams


def row(workload: str, batch: int, tokens: int, wall: float, kernels: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """A result, also printed: the kernels by kind, and the longest one by one."""
    kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for name, (calls, us) in kernels.items():
        kinds[kind(name)][0] += calls
        kinds[kind(name)][1] += us
    busy = sum(us for _, us in kernels.values())
    print(f"{workload} batch {batch}, {tokens} tokens per step: {wall:.0f} us, kernels {busy:.0f} us, "
          f"{sum(c for c, _ in kernels.values()):.0f} launches, idle {wall - busy:.0f} us")
    for what, (calls, us) in sorted(kinds.items(), key=lambda item: -item[1][1]):
        print(f"  {us:9.1f} us {calls:7.1f} x  {what}")
    top = longest(kernels)
    for each in top:
        print(f"      {each['us']:9.1f} us {each['calls']:7.1f} x {each['us'] / each['calls']:8.2f} us  {each['name'][:100]}")
    return {"workload": workload, "batch": batch, "tokens": tokens, "wall_us": wall, "kernel_us": busy,
            "launches": sum(c for c, _ in kernels.values()), "kinds": {k: dict(calls=c, us=us) for k, (c, us) in kinds.items()},
            "kernels": top}


def main() -> None:
    args = script(__doc__, "llama-8b", limited=False, batch=[1, 8, 32, 128], context=1024, steps=20, attention="auto",
                  quantize="", prefill=([], "tokens of a prefill, comma-separated"),
                  prompt=(960, "tokens of one of its prompts")).parse_args()
    record = started(args)
    record.copy_bandwidth()
    model = build(dataclasses.replace(spec_of(args), quantization=args.quantize or None))
    prompt = random_tokens(model.config.get_text_config(decoder=True).vocab_size)

    rows = max([*args.batch, 16])
    longest = max(args.context, args.prompt if args.prefill else 0) + 256
    with Engine(model, attention=args.attention, max_num_seqs=rows, max_model_len=longest) as engine:
        def steps(count: int) -> None:
            for _ in range(count):
                engine.step()

        for batch in args.batch:
            params = SamplingParams(max_tokens=250, temperature=0, ignore_eos=True, detokenize=False)
            ids = [engine.add_request(prompt(args.context - 2 * args.steps), params)[0] for _ in range(batch)]
            until_decoding(engine)
            steps(8)
            wall = seconds(lambda: steps(args.steps)) / args.steps * 1e6
            record.keep(row("decode", batch, batch, wall, profiled(lambda: steps(args.steps), args.steps)))
            end(engine, ids)
        for tokens in args.prefill:
            lengths = [args.prompt] * (tokens // args.prompt) + ([tokens % args.prompt] if tokens % args.prompt else [])

            def once(lengths: list[int] = lengths) -> None:
                for length in lengths:
                    engine.add_request(prompt(length), SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
                end(engine, [])

            for _ in range(3):
                once()
            record.keep(row("prefill", len(lengths), tokens, seconds(once) * 1e6, profiled(once, 1)))


if __name__ == "__main__":
    main()
