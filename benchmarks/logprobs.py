"""What log probabilities cost in a decode step: ms per step without them, with the sampled token's, and with the likeliest.

    python benchmarks/logprobs.py --model qwen3-0.6b --deadline 60 --json logprobs.json
    python benchmarks/logprobs.py --model tiny --batch 2 --context 16 --steps 4            # a dry run on a CPU

One engine serves all ways; each is the median of three runs of ``--steps`` steps, the ways in turn, at temperature 1. A run is
timed as a whole, so host work that the GPU hides costs nothing. ``cost`` is the time beside that without log probabilities.
``kernels_us``, on a GPU: what the graph of a step spends on those of sampled tokens, where no row asks for them and where all
do.
"""

from __future__ import annotations

import statistics

import torch

import quire
from quire.attn_ops.ops.logprobs import token_logprobs
from quire.graph_runner.bench.attention_op import on_the_device
from quire.graph_runner.bench.record import dtype_of, end, model_of, random_tokens, script, seconds, started, until_decoding

REPEATS = 3


def kernels_us(logits: torch.Tensor, heat: float) -> float:
    """In a graph, of rows that ask for log probabilities at temperature ``heat`` (0: that ask for none)."""
    tokens, temperature = logits.argmax(-1), torch.full((len(logits),), heat, device=logits.device)
    return on_the_device(lambda _: token_logprobs(logits, tokens, temperature)).us


def main() -> None:
    args = script(__doc__, "qwen3-0.6b", attention="auto", batch=[1, 8, 64, 256], context=1024, steps=128,
                  top=([0, 5], "logprobs= of each way; 0: the sampled token's only")).parse_args()
    record, length = started(args), args.context + 2 * args.steps
    ways: list[int | None] = [None, *args.top]
    model = model_of(args, positions=length)

    def run(engine: quire.Engine, batch: int, logprobs: int | None) -> float:
        params = quire.SamplingParams(temperature=1, max_tokens=2 * args.steps, ignore_eos=True, logprobs=logprobs)
        prompt = random_tokens(engine.runner.vocab_size)
        ids = [i for _ in range(batch) for i in engine.add_request(prompt(args.context), params)]
        until_decoding(engine)
        took = seconds(lambda: [engine.step() for _ in range(args.steps)])
        end(engine, ids)
        return took / args.steps * 1e3

    with quire.Engine(model, attention=args.attention, max_num_seqs=max(args.batch), max_model_len=length) as engine:
        for batch in args.batch:
            times: list[list[float]] = [[] for _ in ways]

            def measure(batch: int = batch, times: list[list[float]] = times) -> None:
                for way in ways:  # compiles what it needs
                    run(engine, batch, way)
                for _ in range(REPEATS):
                    for way, found in zip(ways, times, strict=True):
                        found.append(run(engine, batch, way))
                without = statistics.median(times[0])
                for way, found in zip(ways, times, strict=True):
                    ms = statistics.median(found)
                    record.keep({"logprobs": way, "batch": batch, "ms": ms, "cost": ms / without - 1, "repeats_ms": found})

            record.measure(f"batch {batch}", measure)
        vocabulary = engine.runner.vocab_size
    if record.device.type == "cuda":
        for batch in args.batch:
            logits = torch.randn(batch, vocabulary, device=record.device).to(dtype_of(args))
            for name, heat in (("none", 0.0), ("all", 1.0)):
                record.keep({"rows": name, "batch": batch, "kernels_us": kernels_us(logits, heat)})


if __name__ == "__main__":
    main()
