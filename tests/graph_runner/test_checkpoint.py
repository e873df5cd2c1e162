"""Checkpoints whose weights fit a model that computes otherwise: served, they would give another model's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.graph_runner.checkpoint import CheckpointError, read_checkpoint

LLAMA = dict(vocab_size=60, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)
GPT = dict(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64)
NEO = dict(vocab_size=60, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4,
           max_position_embeddings=64)


def make(name: str, sizes: dict[str, Any], **changed: Any) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    return cls(getattr(transformers, f"{name}Config")(**{**sizes, **changed})).eval()


@pytest.mark.parametrize("name, sizes, changed", [
    ("Starcoder2", LLAMA, dict(norm_epsilon=0.5)), ("GPTJ", {**GPT, "rotary_dim": 4}, dict(rotary_dim=8)),
    ("GPTNeo", NEO, dict(window_size=9)), ("GPT2", GPT, dict(n_head=8)), ("GPT2", GPT, dict(activation_function="relu")),
    ("Granite", LLAMA, dict(logits_scaling=2.0)), ("GPTNeoX", LLAMA, dict(use_parallel_residual=False)),
    ("Llama", LLAMA, dict(num_attention_heads=8, num_key_value_heads=4, head_dim=4)),
    ("Llama", LLAMA, dict(sliding_window=4)),  # of no use to its class, but to functions of transformers that it calls
    ("Phimoe", {**LLAMA, "num_local_experts": 2}, dict(router_jitter_noise=0.5)),  # by which it masks experts
    ("Llama", {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
     dict(max_position_embeddings=32)),
], ids=lambda x: x if isinstance(x, str) else next(iter(x)))
def test_settings_that_weights_do_not_show(name, sizes, changed, tmp_path: Path) -> None:
    model, setting = make(name, sizes), next(iter(changed))
    make(name, sizes, **changed).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"its config has {setting}=.*Make an engine from that path"):
        read_checkpoint(tmp_path, model)


def test_another_type_of_model(tmp_path: Path) -> None:
    """With the names and shapes of the model's parameters."""
    make("Mistral", LLAMA, sliding_window=4).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="it is of a mistral, the model that is served a llama"):
        read_checkpoint(tmp_path, make("Llama", LLAMA))


@pytest.mark.parametrize("changed", [
    dict(bos_token_id=3, eos_token_id=[4, 5], pad_token_id=6), dict(attention_dropout=0.1), dict(use_cache=False),
    dict(max_position_embeddings=128), dict(num_labels=3), dict(dtype="bfloat16"), dict(_name_or_path="of a user")])
def test_settings_by_which_no_model_computes(changed, tmp_path: Path) -> None:
    model = make("Llama", LLAMA)
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))
    found = read_checkpoint(tmp_path, model)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in found.items()) and found


def test_older_names_of_a_rope(tmp_path: Path) -> None:
    model = make("Llama", LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    new = json.loads(config.read_text())
    del new["rope_parameters"]
    for rope in ({"type": "linear"}, {"rope_type": "linear", "type": "linear"}, {"rope_type": "linear"}):
        config.write_text(json.dumps({**new, "rope_theta": 1e4, "rope_scaling": {**rope, "factor": 2.0}}))
        assert read_checkpoint(tmp_path, model)
    config.write_text(json.dumps({**new, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}))
    with pytest.raises(CheckpointError, match="its config has rope_parameters=.*dynamic"):
        read_checkpoint(tmp_path, model)


def test_the_language_model_of_one_with_images(tmp_path: Path) -> None:
    """Their configs have that of the language model inside."""
    model = make("Llama", LLAMA)
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    text = json.loads(config.read_text())
    config.write_text(json.dumps({"model_type": "llava", "text_config": text}))
    assert read_checkpoint(tmp_path, model)
    config.write_text(json.dumps({"model_type": "llava", "text_config": {**text, "rms_norm_eps": 0.5}}))
    with pytest.raises(CheckpointError, match="its config has rms_norm_eps=0.5"):
        read_checkpoint(tmp_path, model)


def test_a_head_in_float32_is_not_rounded(tmp_path: Path) -> None:
    """A body in bfloat16, of a checkpoint in float32 whose experts transformers merges."""
    sizes = {**LLAMA, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "head_dim": 8}
    saved = make("Qwen3Moe", sizes)
    saved.save_pretrained(tmp_path)
    model = make("Qwen3Moe", sizes).to(torch.bfloat16)
    model.lm_head.float()
    assert torch.equal(read_checkpoint(tmp_path, model)["lm_head.weight"], saved.lm_head.weight)
