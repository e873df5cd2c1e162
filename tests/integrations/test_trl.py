"""TRL's trainers on a paged model: every rollout runs on the engine, and the policy that it samples is the trainer's."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="pip install 'quire[integrations]'")

from datasets import Dataset
from peft import LoraConfig
from transformers import MixtralConfig, MixtralForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

import quire
from quire.graph_runner.continuous import Manager
from quire.graph_runner.engine import Engine
from quire.integrations.trl import rollout_func
from tests.tiny import load_model, load_tokenizer

PROMPTS = ["Once upon a time", "The cat", "Tom and Lucy", "Dear Anna,"]


def share_of_e(completions: list[str], **_: Any) -> list[float]:
    return [text.count("e") / max(1, len(text)) for text in completions]


def trained(folder: Any, kind: str = "grpo", steps: int = 1, rate: float = 1e-4, layers: int = 1, lora: bool = False,
            paged: dict[str, Any] | None = None, moe: bool = False, base: Any = None, **options: Any) -> tuple[Any, list[int]]:
    """A trainer after some steps with its default settings, and the number of requests of each call of its engine. No call may
    fall back to transformers."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    base = load_model(num_layers=layers) if base is None else base
    if moe:
        base = MixtralForCausalLM(MixtralConfig(vocab_size=len(tokenizer), num_hidden_layers=1, **sizes))
    model = quire.paged(base, num_pages=400, max_num_seqs=32, max_model_len=128, **(paged or {}))
    trainer_class, config_class = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig),
                                   "online_dpo": (OnlineDPOTrainer, OnlineDPOConfig)}[kind]
    lengths = {"max_new_tokens": 12} if kind == "online_dpo" else {"max_completion_length": 12, "num_generations": 4}
    rollout = {"rollout_func": options.pop("rollout_func")} if "rollout_func" in options else {}
    config = {
        "output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": 8, "logging_steps": 1,
        "max_steps": steps, "learning_rate": rate, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, **lengths,
        **options}
    trainer = trainer_class(
        model=model, args=config_class(**config), train_dataset=Dataset.from_dict({"prompt": PROMPTS * 32}),
        reward_funcs=share_of_e, processing_class=tokenizer, **rollout,
        **({"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")} if lora else {}))
    calls: list[int] = []
    own = Engine._add
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not paged.*")
        patch.setattr(Engine, "_add", lambda self, ask, *rest: calls.append(len(ask.prompt)) or own(self, ask, *rest))
        trainer.train()
    return trainer, calls


@pytest.mark.parametrize("options", [
    {}, dict(lora=True), dict(kind="rloo"), dict(kind="online_dpo"), dict(use_transformers_continuous_batching=True),
    dict(rollout_func=rollout_func), dict(paged=dict(dtype=torch.bfloat16)), dict(moe=True), dict(repetition_penalty=1.3),
], ids=["grpo", "lora", "rloo", "online dpo", "continuous batching", "rollout_func", "bf16 rollouts", "experts", "penalty"])
@pytest.mark.slow
def test_every_rollout_is_paged(options, tmp_path, monkeypatch) -> None:
    """Defaults: training mode, gradient checkpointing, accelerate, bf16 autocast in the forward."""
    managers = []
    monkeypatch.setattr(Manager, "start", lambda self, own=Manager.start: managers.append(self) or own(self))
    trainer, calls = trained(tmp_path, steps=2, **options)
    # 8 prompts in each of 2 steps, with two completions each for Online DPO
    assert len(calls) == (32 if options.get("kind") == "online_dpo" else 16)
    assert trainer.args.gradient_checkpointing and trainer.model.training
    assert bool(managers) == ("use_transformers_continuous_batching" in options)


@pytest.mark.slow
def test_grpo_learns_on_paged_rollouts(tmp_path) -> None:
    """20 steps: the reward rises, which it does not where rollouts come from other weights than the trainer's."""
    trainer, calls = trained(tmp_path, steps=20, rate=3e-4, layers=4, per_device_train_batch_size=32, num_generations=8,
                             temperature=1.5, bf16=False, lr_scheduler_type="constant")
    assert len(calls) == 20 * 32
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 20 and sum(rewards[-5:]) > 1.2 * sum(rewards[:5])


@pytest.mark.slow
def test_the_example(tmp_path, monkeypatch, capsys) -> None:
    """examples/grpo/train.py as it stands, with fewer steps."""
    pytest.importorskip("matplotlib")
    calls = []
    monkeypatch.setattr(Engine, "_add", lambda self, ask, *rest, own=Engine._add: calls.append(1) or own(self, ask, *rest))
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "2", "--out", str(tmp_path / "grpo.png")])
    monkeypatch.setenv("MPLBACKEND", "Agg")
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "grpo" / "train.py"), run_name="__main__")
    assert len(calls) == 2 * 32  # of the paged run; the other one has none
    said = capsys.readouterr().out
    assert all(f"{way}: reward 0." in said for way in ("quire", "transformers' generate"))
    assert (tmp_path / "grpo.png").stat().st_size > 10_000


@pytest.mark.slow
def test_log_probabilities_are_the_trainers(tmp_path) -> None:
    """The ratio of a policy step is exp of their difference: an importance correction needs them equal."""
    trainer, _ = trained(tmp_path, steps=3, rate=1e-3, layers=2, bf16=False, temperature=0.7, rollout_func=rollout_func)
    model = trainer.accelerator.unwrap_model(trainer.model)
    trainer.processing_class.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    found = rollout_func([*PROMPTS[:3], [{"role": "user", "content": "hi"}]], trainer)
    assert found["prompt_ids"][3] == trainer.processing_class(text="user: hi\n")["input_ids"]
    for prompt, completion, logprobs in zip(found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True):
        assert len(completion) == len(logprobs) > 0
        ids = torch.tensor([prompt + completion])
        of_trainer = trainer._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), len(completion))[0]
        assert (of_trainer[0] - torch.tensor(logprobs)).abs().max() < 1e-4


def test_options_of_a_rollout() -> None:
    """Those of the trainer's config, and of SamplingParams in generation_kwargs, as TRL has it with vLLM."""
    model = quire.paged(load_model(num_layers=1), num_pages=40, max_num_seqs=4, max_model_len=64, cudagraph_capture_sizes=[])

    def rolled(processing_class: Any = None, **more: Any) -> list[int]:
        args = dict(max_completion_length=8, temperature=1.0, top_p=1.0, top_k=1, min_p=None, repetition_penalty=1.0,
                    generation_kwargs=None)
        trainer = SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=lambda model: model),
                                  args=SimpleNamespace(**{**args, **more}),
                                  processing_class=processing_class or load_tokenizer())
        return rollout_func(PROMPTS[:1], trainer)["completion_ids"][0]

    plain = rolled()
    assert rolled(repetition_penalty=5.0) == rolled(generation_kwargs={"repetition_penalty": 5.0}) != plain
    assert plain[0] not in rolled(generation_kwargs={"logit_bias": {plain[0]: -100.0}})
    with pytest.raises(ValueError, match="rollout_func sets n itself; leave it out of generation_kwargs"):
        rolled(generation_kwargs={"n": 2})
    with pytest.raises(TypeError, match="options of quire.SamplingParams, which has no no_repeat_ngram_size"):
        rolled(generation_kwargs={"no_repeat_ngram_size": 2})
    endless = load_tokenizer()
    endless.eos_token = None
    assert rolled(endless)[: len(plain)] == plain
    with pytest.raises(ValueError, match="gives the model text alone, and the processing_class, a SimpleNamespace, is for ima"):
        rolled(SimpleNamespace(tokenizer=endless))
    third = load_tokenizer().decode(plain[2])
    assert rolled(generation_kwargs={"stop": [third]}) == plain[:3]  # the engine was made without a tokenizer
    model.generate.close()


def test_a_rollout_of_a_model_that_is_not_paged() -> None:
    trainer = SimpleNamespace(model=load_model(num_layers=1), args=None,
                              accelerator=SimpleNamespace(unwrap_model=lambda model: model))
    with pytest.raises(ValueError, match="the trainer's model is not paged; make the trainer with model=quire.paged"):
        rollout_func(["a"], trainer)


def test_a_rollout_with_tools() -> None:
    """The policy would never hear of them."""
    model = quire.paged(load_model(num_layers=1), num_pages=40, max_num_seqs=4, max_model_len=64, cudagraph_capture_sizes=[])
    trainer = SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=lambda model: model), tools=[share_of_e],
                              args=SimpleNamespace(generation_kwargs=None))
    with pytest.raises(ValueError, match="rollout_func renders no tools, .* the trainer's own rollouts are paged"):
        rollout_func([[{"role": "user", "content": "a"}]], trainer)
    model.generate.close()
