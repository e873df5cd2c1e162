"""Requests per second of an evaluation: lm-eval's own HFLM, HFLM over a paged model, quire's QuireLM, and lm-eval's VLLM where
vLLM can be imported.

    pip install 'quire[integrations]'
    python benchmarks/evaluate.py --model tiny                       # a CPU will do
    python benchmarks/evaluate.py --model llama-8b --documents 128 --batch 64 --deadline 150 --json evaluate.json

Each document is a multiple choice of four options after the same examples (``--examples`` tokens), as few-shot tasks have
it, and then a text to continue. The weights are random unless ``--model`` is a path; the texts are tokenized by the tokenizer
of the model that ships with quire, or of the path. vLLM loads the same weights, saved to a temporary folder. Prints one JSON
line per way and kind of request, with the largest difference of a log-likelihood from HFLM's.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from quire.graph_runner.bench.models import ModelSpec, build, free_memory, layers_asked
from quire.graph_runner.bench.record import Record, add_arguments
from quire.graph_runner.loading import TINY_MODEL
from quire.integrations.lm_eval import QuireLM

WAYS = ("QuireLM", "HFLM", "HFLM-paged", "VLLM")
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
    """lm-eval's model of vLLM, beside the model that is measured before it."""
    if importlib.util.find_spec("vllm") is None:
        raise RuntimeError("vllm is not installed here")
    if not torch.cuda.is_available():
        raise RuntimeError("vllm is measured on a GPU only")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from lm_eval.models.vllm_causallms import VLLM

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return VLLM(pretrained=folder, dtype="bfloat16", batch_size="auto", max_model_len=max_model_len,
                gpu_memory_utilization=0.5, max_num_seqs=batch, enable_prefix_caching=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--examples", type=int, default=200, help="tokens that all documents begin with")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ways", default=",".join(WAYS))
    add_arguments(parser)
    args = parser.parse_args()
    if unknown := sorted(set(args.ways.split(",")) - set(WAYS)):
        parser.error(f"unknown ways {', '.join(unknown)}; there are: {', '.join(WAYS)}")
    args.layers = layers_asked(args.layers)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    record = Record(args.json, device, args.deadline, arguments=vars(args))
    tokenizer = AutoTokenizer.from_pretrained(args.model if Path(args.model).is_dir() else TINY_MODEL, padding_side="left")
    model: Any = build(ModelSpec(args.model, dtype, device, args.layers))
    model.generation_config.max_new_tokens = None
    asked = requests(args, tokenizer)
    options = dict(max_num_seqs=args.batch, max_model_len=args.examples + args.new_tokens + 64)

    def hflm(of: Any) -> HFLM:
        return HFLM(of, tokenizer=tokenizer, backend="causal", batch_size=args.batch)

    folder = tempfile.TemporaryDirectory()
    ways: dict[str, Callable[[], Any]] = {
        "QuireLM": lambda: QuireLM(model, tokenizer, **options),
        "HFLM": lambda: hflm(model),
        "HFLM-paged": lambda: hflm(quire.paged(model, **options)),
        "VLLM": lambda: vllm(model, tokenizer, folder.name, options["max_model_len"], args.batch)}
    scores: dict[str, list[float]] = {}

    def measure(name: str) -> None:
        lm = ways[name]()
        try:
            for kind, instances in asked.items():
                getattr(lm, kind)(instances[: args.batch], disable_tqdm=True)  # starts the engine
                began = time.perf_counter()
                found = getattr(lm, kind)(instances, disable_tqdm=True)
                row = {"way": name, "requests": kind, "requests_per_s": len(instances) / (time.perf_counter() - began)}
                if kind == "loglikelihood":
                    scores[name] = [score for score, _ in found]
                record.keep(row)
        finally:
            if isinstance(lm, QuireLM):
                lm.close()

    for name in args.ways.split(","):
        record.measure(name, lambda name=name: measure(name))
        if hasattr(model.generate, "close"):
            model.generate.close()
        free_memory()
        for row in record.rows:
            if row.get("requests") == "loglikelihood" and "HFLM" in scores:
                row["largest_difference"] = max(abs(a - b) for a, b in zip(scores[row["way"]], scores["HFLM"], strict=True))
        record.write()
    folder.cleanup()


if __name__ == "__main__":
    main()
