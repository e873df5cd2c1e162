"""Time to first token of requests that begin equally, with the prefix cache and without.

    python benchmarks/prefix.py --model llama-8b --json prefix.json
    python benchmarks/prefix.py --model tiny --device cpu --json cpu_prefix.json

All requests are given to the engine at once. ``none``: enable_prefix_caching=False, each computes its whole prompt.
``together``: the default, the first computes what they share and the others wait for it. ``kept``: enable_prefix_caching=True,
and an earlier request had the same beginning. Weights are random; tokens of every mode must be equal, or the run fails.
"""

from __future__ import annotations

import statistics
import sys
import time

from quire import Engine, SamplingParams
from quire.graph_runner.bench.record import model_of, random_tokens, script, started

MODES: dict[str, bool | None] = {"none": False, "together": None, "kept": True}


def first_tokens(engine: Engine, prompts: list[list[int]]) -> tuple[list[float], list[int]]:
    """Seconds from the call to the first token of each request, and the tokens."""
    times, tokens = [0.0] * len(prompts), [0] * len(prompts)
    began = time.perf_counter()
    for event in engine.stream(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), raise_on_error=True):
        times[event.index], tokens[event.index] = time.perf_counter() - began, event.token_ids[0]
    return times, tokens


def main() -> None:
    args = script(__doc__, requests=64, prefix=(4096, "tokens that all prompts share"),
                  own=(16, "tokens of each prompt beside them")).parse_args()
    record, length = started(args), args.prefix + args.own
    model = model_of(args, positions=length + 16)
    ids = random_tokens(model.config.get_text_config().vocab_size)
    common = ids(args.prefix)
    prompts = [common + ids(args.own) for _ in range(args.requests)]
    seen: list[list[int]] = []

    def measure(mode: str) -> None:
        with Engine(model, enable_prefix_caching=MODES[mode], max_num_seqs=args.requests, max_model_len=length + 16,
                    num_pages=None if model.device.type == "cuda" else args.requests * (length // 16 + 2)) as engine:
            first_tokens(engine, [ids(length)])  # not timed
            if mode == "kept":
                first_tokens(engine, [common + ids(args.own)])
            times, tokens = first_tokens(engine, prompts)
            saved = engine.stats().saved_tokens
        seen.append(tokens)
        mean = statistics.fmean(times)
        record.keep({"mode": mode, "mean_s": mean, "median_s": statistics.median(times), "last_s": max(times),
                     "saved_tokens": saved, "times_faster": (record.rows[0]["mean_s"] if record.rows else mean) / mean})

    done = [record.measure(mode, lambda mode=mode: measure(mode)) for mode in MODES]
    if any(tokens != seen[0] for tokens in seen):
        sys.exit("the first tokens differ between the modes")
    sys.exit(not all(done))


if __name__ == "__main__":
    main()
