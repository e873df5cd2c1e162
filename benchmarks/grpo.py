"""A GRPO loop on one GPU: tokens per second of the rollouts, generation's share of a step, and peak memory, of quire,
transformers' ``generate_batch``, plain ``generate``, and vLLM in the same process (where it can be imported).

    python benchmarks/grpo.py --model qwen3-0.6b --deadline 320 --json grpo.json      # 64 prompts x 8, 512 new tokens; an H200
    python benchmarks/grpo.py --model tiny --prompts 2 --group 2 --new-tokens 8 --deadline 200      # a dry run on a CPU

A step: ``group`` completions of each prompt at temperature 1, a reward (the share of tokens in the lower half of the
vocabulary, normalized in its group), GRPO's loss (Shao et al., "DeepSeekMath", 2024, section 4.1, one update per rollout, so
all ratios are 1, and no KL term), backward with gradient checkpointing, and AdamW. The weights are random and no token ends
a completion. Each way is measured in a process of its own, beside the model that it trains, and has its share of the time.
quire and ``generate_batch`` run the same call; vLLM gets the weights before each rollout, and the time for that counts as its
generation (``sync_s``).

Memory is the largest that PyTorch had allocated in a step. Before the first step each way warms up (``warm_up_s``: compilation
and captures), with a rollout of a few tokens and the update of a micro-batch. ``generate_batch`` and ``generate`` end a rollout
for which there is no time: ``tokens`` of ``tokens_asked`` were made in ``rollout_s``, the rest is filled up for the update, and
``share_generating`` is a lower bound (``cut: true``).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

import quire
from quire.graph_runner.bench.record import Record, model_of, random_tokens, script, seconds, spec_of, synchronize
from quire.graph_runner.bench.systems import require_vllm, save_config, shut_down
from quire.graph_runner.bench.workers import run_apart

TRAINING_S = 30.0  # of a way's time, left for the update when a rollout is cut
WARM_UP_TOKENS = 8


class Way:
    """A way to generate: ``rollout`` returns the completions of the prompts; ``close`` frees what it has."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self.model, self.args, self.sync_s = model, args, 0.0
        self.open()

    def config(self, new_tokens: int, eos_token_id: int | None = -1) -> GenerationConfig:
        return GenerationConfig(max_new_tokens=new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                eos_token_id=eos_token_id, pad_token_id=0)

    def open(self) -> None:
        """Set up, before anything is measured."""

    def rollout(self, prompts: list[list[int]], new_tokens: int, limit: float) -> list[list[int]]:
        """The completions, of ``new_tokens`` each; shorter ones where they would take more than ``limit`` seconds, if the way
        can end them."""
        raise NotImplementedError

    def close(self) -> None:
        """Put the model back."""


class Quire(Way):
    def open(self) -> None:
        args = self.args
        pages = args.prompts * args.group * -(-(args.prompt_tokens + args.new_tokens) // 16) + 1
        quire.paged(self.model, num_pages=pages, page_size=16, max_num_seqs=min(512, args.prompts * args.group),
                    max_model_len=args.prompt_tokens + args.new_tokens)

    def rollout(self, prompts: list[list[int]], new_tokens: int, limit: float) -> list[list[int]]:
        found = self.model.generate_batch(prompts, generation_config=self.config(new_tokens),
                                          continuous_batching_config=ContinuousBatchingConfig(), progress_bar=False)
        if not self.model.generate.engine.stats().generated_tokens:
            raise RuntimeError("the rollout was not paged")
        return [output.generated_tokens for output in found.values()]

    def close(self) -> None:
        self.model.generate.close()


class GenerateBatch(Way):
    def rollout(self, prompts: list[list[int]], new_tokens: int, limit: float) -> list[list[int]]:
        """What ``generate_batch`` does, with its manager, so that requests can be ended: it then has their tokens so far."""
        began, args = time.perf_counter(), self.args
        each = -(-(args.prompt_tokens + args.new_tokens) // 256)
        small = {} if torch.cuda.is_available() else {"max_batch_tokens": 256}
        config = ContinuousBatchingConfig(num_blocks=args.prompts * args.group * each + 8, **small)
        hints = WorkloadHints(max_prompt_length=args.prompt_tokens, max_generated_length=new_tokens,
                              num_requests=len(prompts))
        found: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
                generation_config=self.config(new_tokens), continuous_batching_config=config, workload_hints=hints,
                timeout=5) as manager:
            ids = manager.add_requests(prompts, max_new_tokens=new_tokens)
            while len(found) < len(ids) and manager.is_running():
                if time.perf_counter() - began > limit:
                    manager.stop(hard_stop=True, timeout=20)
                while (result := manager.get_result(timeout=0.2 if manager.is_running() else 0)) is not None:
                    if result.is_finished():
                        found[result.request_id] = result.generated_tokens
        return [found.get(name, []) for name in ids]


class Generate(Way):
    def rollout(self, prompts: list[list[int]], new_tokens: int, limit: float) -> list[list[int]]:
        self.model.eval()
        self.model.gradient_checkpointing_disable()  # in training mode with it there is no cache
        ids = torch.tensor(prompts, device=self.model.device)
        found = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=self.config(new_tokens, None),
                                    max_time=None if limit == float("inf") else max(limit, 1.0))
        self.model.gradient_checkpointing_enable()
        self.model.train()
        return found[:, ids.shape[1]:].tolist()


class Vllm(Way):
    def open(self) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that it can be given the weights
        from vllm import LLM

        self.folder = tempfile.TemporaryDirectory()
        save_config(spec_of(self.args, self.model.dtype), type(self.model), self.folder.name)
        self.llm: Any = LLM(model=self.folder.name, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
                            max_model_len=self.args.prompt_tokens + self.args.new_tokens, max_num_seqs=512,
                            gpu_memory_utilization=self.args.vllm_memory, enable_prefix_caching=True)

    def rollout(self, prompts: list[list[int]], new_tokens: int, limit: float) -> list[list[int]]:
        from vllm import SamplingParams

        began = time.perf_counter()
        inner = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
        inner.load_weights((name, p.data) for name, p in self.model.named_parameters())
        self.llm.reset_prefix_cache()
        synchronize()
        self.sync_s = time.perf_counter() - began
        params = SamplingParams(max_tokens=new_tokens, temperature=1.0, ignore_eos=True, detokenize=False)
        found = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in found]

    def close(self) -> None:
        shut_down(self.llm)
        self.llm = None
        self.folder.cleanup()


WAYS = {"quire": Quire, "generate_batch": GenerateBatch, "generate": Generate, "vllm": Vllm}
SHARES = {"quire": 4.0, "generate_batch": 2.0, "generate": 2.0, "vllm": 5.0}  # of the time; vLLM starts in 90 s


def train(model: Any, optimizer: Any, prompts: list[list[int]], completions: list[list[int]], args: argparse.Namespace,
          micro_batches: int | None = None) -> None:
    """One update on a rollout, in micro-batches, of which the first ``micro_batches`` are done (None: all)."""
    ids = torch.tensor([p + c for p, c in zip(prompts, completions, strict=True)], device=model.device)
    vocab = model.config.get_text_config().vocab_size
    reward = (ids[:, args.prompt_tokens:] < vocab // 2).float().mean(1).view(args.prompts, args.group)
    advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
    for rows, weight in list(zip(ids.split(args.micro_batch), advantage.split(args.micro_batch), strict=True))[:micro_batches]:
        logits = model(input_ids=rows, use_cache=False, logits_to_keep=args.new_tokens + 1).logits[:, :-1]
        chosen = -F.cross_entropy(logits.flatten(0, 1), rows[:, args.prompt_tokens:].flatten(), reduction="none")
        ratio = (chosen - chosen.detach()).exp().view(len(rows), -1)
        (-(ratio * weight[:, None]).mean() * len(rows) / len(ids)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(name: str, results: Record, args: argparse.Namespace) -> None:
    """Add the way's row, and bring it up to date after each step."""
    if name == "vllm":
        require_vllm(torch.device(args.device))
    row: dict[str, Any] = {"way": name, "doing": "its start"}
    results.rows.append(row)
    results.write()
    model = model_of(args)
    model.train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=model.device.type == "cuda")
    prompt = random_tokens(model.config.get_text_config().vocab_size)
    prompts = [prompt(args.prompt_tokens) for _ in range(args.prompts)]
    many, asked = [p for p in prompts for _ in range(args.group)], args.prompts * args.group * args.new_tokens
    way, steps = WAYS[name](model, args), list[tuple[float, float, float, int]]()
    row["start_s"] = args.deadline - results.left if args.deadline else None

    def update(completions: list[list[int]], micro_batches: int | None = None) -> None:
        if not model.training:  # a manager of continuous batching has set eval mode, which ends gradient checkpointing
            model.train()
        train(model, optimizer, many, [c + [0] * (args.new_tokens - len(c)) for c in completions], args, micro_batches)
        synchronize()

    def doing(what: str) -> None:
        row["doing"] = what
        results.write()

    try:
        doing("its warm-up")
        row["warm_up_s"] = seconds(lambda: update(
            way.rollout(many, min(WARM_UP_TOKENS, args.new_tokens), float("inf")), micro_batches=1))
        while not steps or (len(steps) < args.steps and not row["cut"] and results.left > 1.2 * steps[-1][1]):
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            doing("a rollout")
            synchronize()
            began = time.perf_counter()
            completions = way.rollout(many, args.new_tokens, results.left - min(TRAINING_S, results.left / 2))
            synchronize()
            rollout = time.perf_counter() - began
            completions = [[token for token in c if token >= 0] for c in completions]  # -1: transformers' for one in flight
            tokens = sum(map(len, completions))
            if not tokens or len(completions) != len(many):
                raise RuntimeError(f"{name} returned {len(completions)} completions of {tokens} tokens")
            doing("an update")
            update(completions)
            steps.append((rollout, time.perf_counter() - began, way.sync_s, tokens))
            rollout, total, sync, tokens = (statistics.median(of) for of in zip(*steps, strict=True))
            peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
            row |= {"rollout_s": rollout, "step_s": total, "share_generating": rollout / total, "tokens": int(tokens),
                    "tokens_asked": asked, "tokens_per_s": tokens / rollout, "cut": tokens < asked, "sync_s": sync,
                    "peak_gib": peak, "steps": len(steps)}
            del row["doing"]
            results.write()
    finally:
        way.close()
        print(row, flush=True)


def main() -> None:
    run_apart(script(__doc__, "qwen3-0.6b", prompts=64, group=(8, "completions of each prompt"), prompt_tokens=128,
                     new_tokens=512, micro_batch=16, steps=(2, "as far as time allows"),
                     vllm_memory=(0.4, "share of the GPU's memory for vLLM")), SHARES, measure)


if __name__ == "__main__":
    main()
