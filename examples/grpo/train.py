"""GRPO on the model that ships with quire: TRL's trainer, rollouts by quire and by plain ``generate``; plots both.

    pip install 'quire[integrations,bench]'
    python examples/grpo/train.py --steps 30 --out grpo.png

The reward is the share of the letter e. The plot has the reward of each step, and the share of its time spent generating: first
with the model's ``generate`` paged by quire, then the same run with transformers' own. On a CPU this shows that training works;
quire runs op by op there and generates more slowly.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, ProgressCallback
from trl import GRPOConfig, GRPOTrainer

import quire
from quire.graph_runner.loading import TINY_MODEL

PROMPTS = ["Once upon a time", "The cat", "Tom and Lucy", "Dear Anna,"]


def share_of_e(completions: list[str], **_: Any) -> list[float]:
    return [text.count("e") / max(1, len(text)) for text in completions]


class Timed(GRPOTrainer):
    """Measures the seconds that each rollout takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generating: list[float] = []

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_single_turn(*args, **kwargs)
        self.generating.append(time.perf_counter() - start)
        return result


def run(steps: int, paged: bool) -> tuple[list[float], list[float], float]:
    """The reward of each step, the share of its time spent generating, and the median seconds of a rollout."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    if paged:
        model = quire.paged(model, max_num_seqs=64, max_model_len=256)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=model, processing_class=tokenizer, reward_funcs=share_of_e,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS * 64}), args=GRPOConfig(
                output_dir=folder, use_cpu=not torch.cuda.is_available(), max_steps=steps, per_device_train_batch_size=32,
                num_generations=8, max_completion_length=64, learning_rate=3e-4, lr_scheduler_type="constant", temperature=1.5,
                bf16=False, logging_steps=1, report_to="none", save_strategy="no"))
        trainer.remove_callback(ProgressCallback)  # which prints every entry of the log
        trainer.train()
    if paged:
        model.generate.close()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    shares = [seconds / entry["step_time"] for seconds, entry in zip(trainer.generating, logs, strict=True)]
    return [entry["reward"] for entry in logs], shares, statistics.median(trainer.generating)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default="grpo.png")
    args = parser.parse_args()
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7, 6), layout="constrained")
    for name, paged in (("quire", True), ("transformers' generate", False)):
        rewards, shares, seconds = run(args.steps, paged)
        print(f"{name}: reward {rewards[0]:.3f} -> {rewards[-1]:.3f}; generating takes {statistics.median(shares):.0%} of a "
              f"step, {seconds:.2f} s (medians of {args.steps} steps)")
        steps = range(1, args.steps + 1)
        above.plot(steps, rewards, label=name)
        below.plot(steps, shares, label=name)
    above.set(title="GRPO on the model that ships with quire", ylabel="reward: share of the letter e")
    below.set(xlabel="step", ylabel="share of a step spent generating", ylim=(0, 1))
    above.legend()
    figure.savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
