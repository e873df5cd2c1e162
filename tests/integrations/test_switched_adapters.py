"""Adapters that are switched, or turned off, beside a running request: a request that comes then has what is active then.

A reference policy's log probabilities (``with peft.disable_adapter(): engine.score(...)``) would else be the policy's own, and
the KL divergence between them 0.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

import peft

import quire
from tests.tiny import GREEDY, hf_greedy, small_llama

PROMPT, CONTINUATION = [5, 6, 14, 15, 7, 8], [9, 3, 11]
CONFIGS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules="all-linear"),
    "saved head": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def made(kind: str) -> Any:
    """A model with adapters "a", which is active, and "b", of other numbers."""
    model = peft.get_peft_model(small_llama(0.3, eos_token_id=None), CONFIGS[kind](), adapter_name="a")
    model.add_adapter("b", CONFIGS[kind]())
    for name, parameter in model.named_parameters():
        if ".a" in name or ".b" in name:
            numbers = torch.Generator().manual_seed(len(name) + 100 * (".b" in name))
            with torch.no_grad():
                parameter += 0.3 * torch.randn(parameter.shape, generator=numbers)
    return model.eval()


def total(model: Any) -> float:
    with torch.no_grad():
        rows = model(torch.tensor([PROMPT + CONTINUATION])).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    return sum(row[token].item() for row, token in zip(rows, CONTINUATION, strict=True))


@pytest.mark.parametrize("kind", CONFIGS)
def test_beside_a_running_request(kind: str) -> None:
    model = made(kind)
    params = quire.SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with quire.Engine(model, num_pages=100, max_num_seqs=4, max_model_len=100) as engine:
        engine.add_request([1, 2, 3], params)
        engine.step()
        before = total(model)
        with model.disable_adapter():
            assert engine.score([PROMPT], [CONTINUATION])[0].total == pytest.approx(total(model), abs=1e-4)
            assert abs(total(model) - before) > 0.01
        assert engine.score([PROMPT], [CONTINUATION])[0].total == pytest.approx(before, abs=1e-4)
        model.set_adapter("b")
        (out,) = engine.generate(PROMPT, GREEDY)
        assert out.token_ids == hf_greedy(model, PROMPT, GREEDY.max_tokens) and engine.requests
        assert engine.score([PROMPT], [CONTINUATION])[0].total == pytest.approx(total(model), abs=1e-4) != before
        engine.abort(0)


def test_some_layers_alone() -> None:
    """PEFT switches all layers; who switches one by hand is seen when the next request comes."""
    model = made("lora")
    with quire.Engine(model, num_pages=100, max_num_seqs=4, max_model_len=100) as engine:
        engine.add_request([1, 2, 3], quire.SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        engine.step()
        model.base_model.model.model.layers[0].mlp.gate_proj.set_adapter("b")
        assert engine.score([PROMPT], [CONTINUATION])[0].total == pytest.approx(total(model), abs=1e-4)
