"""Requests per second of an evaluation: lm-eval's own HFLM, HFLM over a paged model, quire's QuireLM, and lm-eval's VLLM where
vLLM can be imported.

    pip install 'quire[integrations]'
    python benchmarks/evaluate.py --model tiny                       # a CPU will do
    python benchmarks/evaluate.py --model llama-8b --documents 128 --batch 64 --deadline 150 --json evaluate.json

Each document is a multiple choice of four options after the same examples (``--examples`` tokens), as few-shot tasks have
it, and then a text to continue. The weights are random (the same for all) unless ``--model`` is a path; the texts are tokenized
by the tokenizer of the model that ships with quire, or of the path. vLLM loads the same weights, saved to a temporary folder.
Each way runs in a process of its own and has its share of the time. Prints one JSON line per way and kind of request; the file
also has the largest difference of a log-likelihood from HFLM's.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

import quire
from quire.graph_runner.bench.record import Record, model_of, script
from quire.graph_runner.bench.report import Row
from quire.graph_runner.bench.systems import require_vllm
from quire.graph_runner.bench.workers import run_apart
from quire.graph_runner.loading import TINY_MODEL
from quire.integrations.lm_eval import QuireLM

SHARES = {"QuireLM": 2.0, "HFLM": 2.0, "HFLM-paged": 2.0, "VLLM": 4.0}  # of the time; vLLM compiles for over a minute
WORDS = "once upon a time the cat saw big red ball and ran to find her little friend who was in garden with old owl".split()


def requests(args: argparse.Namespace, tokenizer: Any) -> dict[str, list[Instance]]:
    chosen = random.Random(0)

    def text(count: int) -> str:
        return " ".join(chosen.choice(WORDS) for _ in range(count))

    examples = tokenizer.decode(tokenizer(text(args.examples))["input_ids"][: args.examples], skip_special_tokens=True)
    choices, continuations = [], []
    for i in range(args.documents):
        question = f"{examples} {text(12)}"
        choices += [Instance("loglikelihood", {}, (question, f" {text(3)}"), i) for _ in range(4)]
        continuations.append(Instance("generate_until", {}, (question, {"until": ["\n"], "max_gen_toks": args.new_tokens}), i))
    return {"loglikelihood": choices, "generate_until": continuations}


def vllm(model: Any, tokenizer: Any, folder: str, max_model_len: int, batch: int) -> Any:
    """lm-eval's model of vLLM, of the same weights."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from lm_eval.models.vllm_causallms import VLLM

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return VLLM(pretrained=folder, dtype="bfloat16", batch_size="auto", max_model_len=max_model_len,
                gpu_memory_utilization=0.5, max_num_seqs=batch, enable_prefix_caching=True)


def measure(name: str, results: Record, args: argparse.Namespace) -> None:
    """Add the way's rows."""
    if name == "VLLM":
        require_vllm(torch.device(args.device))
    tokenizer = AutoTokenizer.from_pretrained(args.model if Path(args.model).is_dir() else TINY_MODEL, padding_side="left")
    model = model_of(args)
    model.generation_config.max_new_tokens = None
    options: dict[str, Any] = dict(max_num_seqs=args.batch, max_model_len=args.examples + args.new_tokens + 64)

    def hflm(of: Any) -> HFLM:
        return HFLM(of, tokenizer=tokenizer, backend="causal", batch_size=args.batch)

    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], Any]] = {
            "QuireLM": lambda: QuireLM(model, tokenizer, **options),
            "HFLM": lambda: hflm(model),
            "HFLM-paged": lambda: hflm(quire.paged(model, gpu_memory_utilization=0.5, **options)),
            "VLLM": lambda: vllm(model, tokenizer, folder, options["max_model_len"], args.batch)}
        lm = ways[name]()
    for kind, instances in requests(args, tokenizer).items():
        row: Row = {"way": name, "requests": kind, "doing": "its start"}
        results.rows.append(row)
        results.write()
        getattr(lm, kind)(instances[: args.batch], disable_tqdm=True)
        row["doing"] = f"{len(instances)} requests"
        results.write()
        began = time.perf_counter()
        found = getattr(lm, kind)(instances, disable_tqdm=True)
        row["requests_per_s"] = len(instances) / (time.perf_counter() - began)
        del row["doing"]
        if kind == "loglikelihood":
            row["scores"] = [score for score, _ in found]
        results.write()
        print({of: value for of, value in row.items() if of != "scores"}, flush=True)


def compare(rows: list[Row]) -> None:
    """Add the largest difference from HFLM's scores."""
    scores = {row["way"]: row["scores"] for row in rows if "scores" in row}
    for row in rows:
        if "scores" in row and "HFLM" in scores:
            row["largest_difference"] = max(abs(a - b) for a, b in zip(row["scores"], scores["HFLM"], strict=True))


def main() -> None:
    parser = script(__doc__, documents=32, examples=(200, "tokens that all documents begin with"), new_tokens=32, batch=8)
    if (record := run_apart(parser, SHARES, measure, compare)) is not None:
        for row in record.rows:
            row.pop("scores", None)
        record.write()


if __name__ == "__main__":
    main()
