"""Mixed steps with graphs in pieces, and launched one kernel after the other: milliseconds, for backends whose attention allows
no graph of a batch with prompts.

    python benchmarks/pieces.py --model qwen3-0.6b,llama-8b --attention flashinfer --json pieces.json --deadline 110
    python benchmarks/pieces.py --model tiny --attention torch_native --tokens 16,32 --decodes 4 --repeats 2    # on a CPU

A mixed step decodes ``--decodes`` sequences beside a prompt, and has as many tokens as its bucket (``--tokens``). Without
``cudagraph_piecewise`` decode steps have graphs where the backend allows it, as by default. Both ways should sample the same
tokens; a row says how many differ (rounding may, as the kernels' shapes do). With an ``error`` in a row the exit code is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import quire
from quire.graph_runner.bench.models import build, free_memory
from quire.graph_runner.bench.record import Record, random_tokens, script, seconds, spec_of, started, until_decoding

CONTEXT = 256  # of the sequences that decode


def steps_ms(engine: quire.Engine, args: argparse.Namespace) -> tuple[dict[int, float], list[int]]:
    """The median time of a mixed step by its tokens, and the first token of each prompt."""
    prompt = random_tokens(engine.runner.vocab_size)

    def params(new: int) -> quire.SamplingParams:
        return quire.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)

    for _ in range(args.decodes):
        engine.add_request(prompt(CONTEXT), params(args.most))
    until_decoding(engine)
    found, firsts = {}, []
    for tokens in args.tokens:
        times = []
        for _ in range(args.repeats + 1):
            (number,) = engine.add_request(prompt(tokens - args.decodes), params(1))
            request = engine.requests[number]
            times.append(seconds(engine.step) * 1e3)
            while number in engine.requests:
                engine.step()
            firsts += request.output.token_ids
        found[tokens] = statistics.median(times[1:])  # the first warms up
    return found, firsts


def measure(name: str, args: argparse.Namespace, record: Record) -> None:
    began = time.perf_counter()
    spec = spec_of(argparse.Namespace(**{**vars(args), "model": name}))
    model = build(spec)
    said: dict[bool, list[int]] = {}
    before: dict[int, float] = {}
    for pieces in (False, True):
        with quire.Engine(model, attention=args.attention, cudagraph_piecewise=pieces, max_num_seqs=args.decodes + 1,
                          cudagraph_capture_sizes=[args.decodes + 1], enable_prefix_caching=False, async_stepping=False,
                          cudagraph_token_sizes=args.tokens if pieces else [], max_model_len=args.length) as engine:
            start, stats = time.perf_counter() - began, engine.runner.graphs.stats
            times, said[pieces] = steps_ms(engine, args)
            for tokens, ms in times.items():
                record.keep({"row": "pieces", "model": spec.label, "attention": engine.runner.backend.name, "piecewise": pieces,
                             "tokens": tokens, "decodes": args.decodes, "ms_per_step": ms, "start_s": start,
                             "graphs": stats.captured, "pieces": stats.pieces, "capture_s": stats.capture_seconds,
                             "capture_mib": stats.capture_bytes / 2**20, "fell_back": dict(stats.fell_back),
                             "times_faster": before[tokens] / ms if pieces else 1.0})
            before = times
        del engine
        free_memory()
        began = time.perf_counter()
    if said[True] != said[False]:
        different = sum(a != b for a, b in zip(said[True], said[False], strict=True))
        record.keep({"row": "tokens", "model": spec.label, "different": different, "of": len(said[True])})


def main() -> int:
    parser = script(__doc__, attention="flashinfer", tokens=[128, 256, 512, 1024], decodes=32, repeats=9)
    args = parser.parse_args()
    if min(args.tokens) <= args.decodes:
        parser.error("--tokens must be more than --decodes")
    args.most = 4 * len(args.tokens) * (args.repeats + 2)  # tokens that the decodes go on for
    args.length = max(CONTEXT + args.most, *args.tokens) + 1
    record, took = started(args), 0.0
    for name in args.model.split(","):
        began = time.perf_counter()
        record.measure(name, lambda name=name: measure(name, args, record), needs=took)
        took = time.perf_counter() - began
        free_memory()
    return int(record.failed)


if __name__ == "__main__":
    sys.exit(main())
