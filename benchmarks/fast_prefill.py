"""Prefill of a model whose last layers share keys and values, with kv_sharing_fast_prefill and without.

    python benchmarks/fast_prefill.py --device cpu --json benchmarks/results/cpu_fast_prefill.json

Gemma3n's layers with random weights, 3 of 7 sharing as in E4B (15 of 35). Seconds from the call to the first token, of prompts
given one at a time; the two engines take turns, so that both meet the same load. The exit code is 1 where first tokens differ.
Rows are written after the first pair and at the end; ``--deadline`` ends the run where it is.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from typing import Any

import torch

from quire import Engine, SamplingParams
from quire.graph_runner.bench.record import Record, dtype_of, random_tokens, script, started


def model_of(args: argparse.Namespace) -> Any:
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    torch.manual_seed(0)
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(args.layers)]
    config = Gemma3nTextConfig(
        vocab_size=1024, vocab_size_per_layer_input=1024, hidden_size=args.hidden, hidden_size_per_layer_input=args.hidden // 8,
        intermediate_size=4 * args.hidden, num_hidden_layers=args.layers, num_kv_shared_layers=args.shared, layer_types=kinds,
        num_attention_heads=args.hidden // 64, num_key_value_heads=max(1, args.hidden // 256), head_dim=64, sliding_window=128,
        activation_sparsity_pattern=None, laurel_rank=args.hidden // 32, max_position_embeddings=args.prompt + 64)
    with torch.device(args.device):  # on the device: a host takes long for a billion random numbers
        return Gemma3nForCausalLM._from_config(config, dtype=dtype_of(args)).eval()


def measure(args: argparse.Namespace, record: Record) -> None:
    model, tokens_of = model_of(args), random_tokens(1024)
    prompts = [tokens_of(args.prompt) for _ in range(args.prompts + 1)]
    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    times: dict[bool, list[float]] = {False: [], True: []}
    tokens: dict[bool, list[int]] = {False: [], True: []}
    with contextlib.ExitStack() as stack:
        engines = {fast: stack.enter_context(Engine(
            model, attention=args.attention, kv_sharing_fast_prefill=fast, max_num_seqs=4, num_pages=args.prompt,
            max_model_len=args.prompt + 16, enable_prefix_caching=False, cudagraph_capture_sizes=[])) for fast in times}
        for n, prompt in enumerate(prompts):
            for fast, engine in engines.items():
                began = time.perf_counter()
                out = engine.generate([prompt], once)[0]
                if n:  # the first is not timed
                    times[fast].append(time.perf_counter() - began)
                tokens[fast] += out.token_ids
            if n in (1, len(prompts) - 1):  # something is written early
                record.rows.clear()
                medians = {fast: statistics.median(seen) for fast, seen in times.items()}
                for fast, seen in times.items():
                    record.keep({"kv_sharing_fast_prefill": fast, "median_s": medians[fast], "min_s": min(seen),
                                 "max_s": max(seen), "times_s": list(seen), "times_faster": medians[False] / medians[fast],
                                 "tokens_equal": tokens[True] == tokens[False]})


def main() -> int:
    args = script(__doc__, None, hidden=256, layers=14, shared=(6, "last layers that have the keys and values of earlier ones"),
                  prompt=(1024, "tokens of a prompt"), prompts=7,
                  attention=("auto", "on a GPU one that plans nothing on the host, such as triton")).parse_args()
    record = started(args)
    record.facts["model"] = "gemma3n, random weights"
    done = record.measure("fast_prefill", lambda: measure(args, record))
    return int(not done or not all(row["tokens_equal"] for row in record.rows))


if __name__ == "__main__":
    sys.exit(main())
