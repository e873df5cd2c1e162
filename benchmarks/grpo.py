"""A GRPO loop on one GPU: tokens per second of the rollouts, generation's share of a step, and peak memory, of quire,
transformers' ``generate_batch``, plain ``generate``, and vLLM in the same process (where it can be imported).

    python benchmarks/grpo.py --model qwen3-0.6b --deadline 140 --json grpo.json      # 64 prompts x 8, 512 new tokens; an H200
    python benchmarks/grpo.py --model tiny --prompts 2 --group 2 --new-tokens 8    # a dry run on a CPU

A step: ``group`` completions of each prompt at temperature 1, a reward (the share of tokens in the lower half of the
vocabulary, normalized in its group), GRPO's loss (Shao et al., "DeepSeekMath", 2024, section 4.1, one update per rollout, so
all ratios are 1, and no KL term), backward with gradient checkpointing, and AdamW. The weights are random and no token ends
a completion. All ways train one model. quire and ``generate_batch`` run the same call; vLLM gets the weights before each
rollout, and the time for that counts as its generation (``sync_s``).

Memory is the largest that PyTorch had allocated in a step. Of each way the first step is not counted (compilation, captures);
it is the row's only figure (``first: true``) where ``--deadline`` leaves no time for another.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

import quire
from quire.graph_runner.bench.models import ModelSpec, build, config_of, layers_asked
from quire.graph_runner.bench.record import Record, add_arguments


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Way:
    """A way to generate: ``rollout`` returns the completions of the prompts; ``close`` frees what it has."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self.model, self.args, self.sync_s = model, args, 0.0
        self.config = GenerationConfig(max_new_tokens=args.new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                       eos_token_id=-1, pad_token_id=0)
        self.open()

    def open(self) -> None:
        """Set up, before anything is measured."""

    def batch_config(self) -> ContinuousBatchingConfig:
        return ContinuousBatchingConfig()

    def rollout(self, prompts: list[list[int]]) -> list[list[int]]:
        found = self.model.generate_batch(prompts, generation_config=self.config,
                                          continuous_batching_config=self.batch_config(), progress_bar=False)
        return [output.generated_tokens for output in found.values()]

    def close(self) -> None:
        """Put the model back."""


class Quire(Way):
    def open(self) -> None:
        args = self.args
        pages = args.prompts * args.group * -(-(args.prompt_tokens + args.new_tokens) // 16) + 1
        quire.paged(self.model, num_pages=pages, page_size=16, max_num_seqs=min(512, args.prompts * args.group),
                    max_model_len=args.prompt_tokens + args.new_tokens)

    def rollout(self, prompts: list[list[int]]) -> list[list[int]]:
        found = super().rollout(prompts)
        if not self.model.generate.engine.stats().generated_tokens:
            raise RuntimeError("the rollout was not paged")
        return found

    def close(self) -> None:
        self.model.generate.close()


class GenerateBatch(Way):
    def batch_config(self) -> ContinuousBatchingConfig:
        each = -(-(self.args.prompt_tokens + self.args.new_tokens) // 256)
        small = {} if torch.cuda.is_available() else {"max_batch_tokens": 256}
        return ContinuousBatchingConfig(num_blocks=self.args.prompts * self.args.group * each + 8, **small)

    def open(self) -> None:
        self.attention = self.model.config._attn_implementation

    def close(self) -> None:
        self.model.set_attn_implementation(self.attention)  # its manager has set a paged one


class Generate(Way):
    def open(self) -> None:
        self.config.eos_token_id = None

    def rollout(self, prompts: list[list[int]]) -> list[list[int]]:
        self.model.eval()
        self.model.gradient_checkpointing_disable()  # in training mode with it there is no cache
        ids = torch.tensor(prompts, device=self.model.device)
        found = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=self.config)
        self.model.gradient_checkpointing_enable()
        self.model.train()
        return found[:, ids.shape[1]:].tolist()


class Vllm(Way):
    def open(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise RuntimeError("vllm is not installed here")
        if not torch.cuda.is_available():
            raise RuntimeError("vllm is measured on a GPU only")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that it can be given the weights
        from vllm import LLM

        self.folder = tempfile.TemporaryDirectory()
        config = config_of(ModelSpec(self.args.model, self.model.dtype, self.model.device, self.args.layers))
        config.architectures, config.dtype = [type(self.model).__name__], self.model.dtype
        config.save_pretrained(self.folder.name)
        self.llm: Any = LLM(model=self.folder.name, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
                            max_model_len=self.args.prompt_tokens + self.args.new_tokens, max_num_seqs=512,
                            gpu_memory_utilization=self.args.vllm_memory, enable_prefix_caching=True)

    def rollout(self, prompts: list[list[int]]) -> list[list[int]]:
        from vllm import SamplingParams

        began = time.perf_counter()
        inner = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
        inner.load_weights((name, p.data) for name, p in self.model.named_parameters())
        self.llm.reset_prefix_cache()
        synchronize()
        self.sync_s = time.perf_counter() - began
        params = SamplingParams(max_tokens=self.args.new_tokens, temperature=1.0, ignore_eos=True, detokenize=False)
        found = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in found]

    def close(self) -> None:
        core: Any = getattr(self.llm.llm_engine, "engine_core", None)
        if hasattr(core, "shutdown"):
            core.shutdown()
        self.llm = None
        self.folder.cleanup()


WAYS = {"quire": Quire, "generate_batch": GenerateBatch, "generate": Generate, "vllm": Vllm}


def train(model: Any, optimizer: Any, prompts: list[list[int]], completions: list[list[int]], args: argparse.Namespace
          ) -> None:
    """One update on a rollout, in micro-batches."""
    ids = torch.tensor([p + c for p, c in zip(prompts, completions, strict=True)], device=model.device)
    vocab = model.config.get_text_config().vocab_size
    reward = (ids[:, args.prompt_tokens:] < vocab // 2).float().mean(1).view(args.prompts, args.group)
    advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
    for rows, weight in zip(ids.split(args.micro_batch), advantage.split(args.micro_batch), strict=True):
        logits = model(input_ids=rows, use_cache=False, logits_to_keep=args.new_tokens + 1).logits[:, :-1]
        chosen = -F.cross_entropy(logits.flatten(0, 1), rows[:, args.prompt_tokens:].flatten(), reduction="none")
        ratio = (chosen - chosen.detach()).exp().view(len(rows), -1)
        (-(ratio * weight[:, None]).mean() * len(rows) / len(ids)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(name: str, model: Any, optimizer: Any, prompts: list[list[int]], args: argparse.Namespace, record: Record) -> None:
    """Add the way's row, and bring it up to date after each step."""
    way, many = WAYS[name](model, args), [p for p in prompts for _ in range(args.group)]
    steps: list[tuple[float, float, float]] = []
    row: dict[str, Any] = {"way": name}
    try:
        while len(steps) <= args.steps and (not steps or record.left > 1.2 * steps[-1][1]):
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            synchronize()
            began = time.perf_counter()
            completions = way.rollout(many)
            synchronize()
            generated = time.perf_counter() - began
            if [len(c) for c in completions] != [args.new_tokens] * len(many):
                raise RuntimeError(f"{name} returned completions of other lengths than {args.new_tokens}")
            train(model, optimizer, many, completions, args)
            synchronize()
            steps.append((generated, time.perf_counter() - began, way.sync_s))
            generated, total, sync = (statistics.median(of) for of in zip(*(steps[1:] or steps), strict=True))
            peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
            row |= {"rollout_s": generated, "step_s": total, "share_generating": generated / total,
                    "tokens_per_s": len(many) * args.new_tokens / generated, "sync_s": sync, "peak_gib": peak,
                    "first": len(steps) == 1, "steps": max(1, len(steps) - 1)}
            if len(steps) == 1:
                record.keep(row)
            record.write()
        print(json.dumps(row), flush=True)
    finally:
        way.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2, help="after a first one that is not counted, as far as time allows")
    parser.add_argument("--vllm-memory", type=float, default=0.4, help="share of the GPU's memory for vLLM")
    add_arguments(parser)
    args = parser.parse_args()
    if unknown := sorted(set(args.ways.split(",")) - WAYS.keys()):
        parser.error(f"unknown ways {', '.join(unknown)}; there are: {', '.join(WAYS)}")
    args.layers = layers_asked(args.layers)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    record = Record(args.json, device, args.deadline, arguments=vars(args))
    model: Any = build(ModelSpec(args.model, dtype, device, args.layers))
    model.train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.get_text_config().vocab_size
    prompts = torch.randint(vocab, (args.prompts, args.prompt_tokens), generator=generator).tolist()
    for name in args.ways.split(","):
        record.measure(name, lambda name=name: measure(name, model, optimizer, prompts, args, record))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
