"""Evaluation mode while a model is traced, and what another thread sets meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from quire.passes.capture.evaluating import ChangedWhileTraced, evaluating, without_backward


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)).train()


def test_the_modes_come_back() -> None:
    m = model()
    m[0].eval()
    with evaluating(m):
        assert not any(module.training for module in m.modules())
    assert m.training and m[1].training and not m[0].training and "train" not in vars(m)
    m = model()
    with evaluating(m):
        m.eval()
    assert not any(module.training for module in m.modules())


@pytest.mark.parametrize("part", ["model", "layer"])
def test_training_set_meanwhile_spoils_the_trace(part: str) -> None:
    """It may have dropout in it, so it is made again."""
    m = model()
    with pytest.raises(ChangedWhileTraced, match="training: False -> True, by another thread"), evaluating(m):
        (m if part == "model" else m[1]).train()
    assert m.training and m[1].training


def test_training_set_for_a_moment_spoils_the_trace() -> None:
    m = model()
    with pytest.raises(ChangedWhileTraced, match="by another thread"), evaluating(m):
        m.train()
        m.eval()
    assert not m.training


def test_hooks_that_only_mark_outputs_for_autograd() -> None:
    """What gradient checkpointing leaves on the embedding (TRL's GRPOTrainer, PEFT) does not keep a model from being traced on
    torch 2.11; any other hook is traced, whatever its name."""
    def make_inputs_require_grads(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return (out * 2).requires_grad_(True)

    for register in (transformers.PreTrainedModel.enable_input_require_grads, peft_marks):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
        hooks = model.model.embed_tokens._forward_hooks
        register(model)
        own = model.model.embed_tokens.register_forward_hook(make_inputs_require_grads)
        before = dict(hooks)
        with without_backward(model):
            assert list(model.model.embed_tokens._forward_hooks) == [own.id]
            later = model.model.embed_tokens.register_forward_hook(print)  # by another thread
        assert model.model.embed_tokens._forward_hooks is hooks and {**before, later.id: print} == dict(hooks)
        del hooks[own.id], hooks[later.id]
        assert len(hooks) == 1 and model.get_input_embeddings()(torch.tensor([1])).requires_grad


def peft_marks(model: Any) -> None:
    def make_inputs_require_grad(module, input, output):
        output.requires_grad_(True)

    model.get_input_embeddings().register_forward_hook(make_inputs_require_grad)
