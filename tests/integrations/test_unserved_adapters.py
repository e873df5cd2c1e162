"""What of PEFT's an engine cannot serve: the reason is given by its name, not by what the trace happens to meet first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

import peft

import quire
from quire.integrations.engines import engine_of
from tests.integrations.test_peft import fill
from tests.tiny import hf_greedy, small_llama, tokens

OPTIONS: dict[str, Any] = dict(num_pages=60, max_num_seqs=4, max_model_len=100)
PROMPT = [5, 6, 14, 15, 7, 8]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]} | options)


@pytest.mark.parametrize("config, reason", [
    (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PROMPT_TUNING: prompt tuning, p-tuning and prefix"),
    (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PREFIX_TUNING: prompt tuning, p-tuning and prefix"),
    (lora(alora_invocation_tokens=[14, 15]), "self_attn.q_proj has an active aLoRA"),
    (lora(target_parameters=["lm_head.weight"]), "the head is adapted as a parameter")], ids=lambda x: str(x)[:30])
def test_the_reason(config: Any, reason: str) -> None:
    model = peft.get_peft_model(small_llama(std=0.3), config).eval()
    with pytest.raises(quire.UnsupportedAttention, match=reason):
        quire.Engine(model, **OPTIONS)


@pytest.mark.parametrize("config", [
    peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)], ids=lambda config: type(config).__name__)
def test_what_the_wrapper_does_is_not_lost(config: Any) -> None:
    """The engine behind a wrapper's generate is that of the model inside, which knows of no prompt: lm-eval's scores and TRL's
    rollouts were those of the model without it."""
    model = quire.paged(peft.get_peft_model(small_llama(std=0.3), config).eval(), **OPTIONS)
    for engine in (lambda: model.generate.engine, lambda: engine_of(model)):
        with pytest.raises(quire.UnsupportedAttention, match="prompt tuning, p-tuning and prefix"):
            engine()
    with model.disable_adapter():
        assert engine_of(model) is not None
    model.generate.close()


@pytest.mark.parametrize("serve", [
    quire.Engine, lambda model, **options: quire.paged(model, **options).generate.engine,
    lambda model, **options: quire.Engine(model.base_model.lora_model.model, **options)], ids=["wrapper", "paged", "inside"])
def test_xlora(serve: Any, tmp_path: Path) -> None:
    """The wrapper runs the model twice; by itself the model inside gives other tokens."""
    for name in ("a", "b"):
        peft.get_peft_model(small_llama(std=0.3), lora(init_lora_weights=False)).save_pretrained(tmp_path / name)
    plain = small_llama(std=0.3)
    plain.config.use_cache = False
    adapters = {name: str(tmp_path / name) for name in ("a", "b")}
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=plain.config.hidden_size, adapters=adapters)
    model = peft.get_peft_model(plain, config).eval()
    with pytest.raises(quire.UnsupportedAttention, match="self_attn.q_proj is X-LoRA's"):
        serve(model, **OPTIONS)


@pytest.mark.parametrize("tied", [False, True])
def test_trained_tokens_are_served(tied: bool) -> None:
    """PEFT gives F.embedding all arguments by name, a padding index among them: that ended with an IndexError."""
    plain = small_llama(std=0.3, tie_word_embeddings=tied, pad_token_id=0)
    model = peft.get_peft_model(plain, lora(trainable_token_indices=[5, 6])).eval()
    fill(model, "default", 0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "trainable_tokens_delta" in name:
                p.normal_(generator=torch.Generator().manual_seed(3))
    inner, params = model.get_base_model(), quire.SamplingParams(temperature=0, max_tokens=8)
    want = hf_greedy(inner, PROMPT, 8)
    with quire.Engine(inner, **OPTIONS) as engine:
        assert tokens(engine.generate([PROMPT], params)) == [want]


@pytest.mark.parametrize("config", [
    lora(alora_invocation_tokens=[14, 15]), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)],
    ids=lambda config: type(config).__name__)
def test_a_disabled_one_is_served(config: Any) -> None:
    model = peft.get_peft_model(small_llama(std=0.3), config).eval()
    inner, served = model.get_base_model(), model
    if isinstance(config, peft.LoraConfig):
        fill(model, "default", 0)
        served = inner  # the wrapper looks for an aLoRA's tokens when it is disabled, too
    with model.disable_adapter():
        want = hf_greedy(inner, PROMPT, 8)
        with quire.Engine(served, **OPTIONS) as engine:
            params = quire.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            assert tokens(engine.generate([PROMPT], params)) == [want]


def test_one_that_is_not_active_is_served() -> None:
    """The active adapter leaves the head alone, which another one has wrapped."""
    plain = small_llama(std=0.3)
    model = peft.get_peft_model(plain, lora(target_parameters=["lm_head.weight"])).eval()
    model.add_adapter("other", lora())
    model.set_adapter("other")
    fill(model, "other", 0)
    with quire.Engine(model.get_base_model(), **OPTIONS) as engine:
        params = quire.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        assert tokens(engine.generate([PROMPT], params)) == [hf_greedy(model.get_base_model(), PROMPT, 8)]


def test_generate_says_that_an_alora_is_one() -> None:
    model = peft.get_peft_model(small_llama(std=0.3), lora(alora_invocation_tokens=[14, 15])).eval()
    fill(model, "default", 0)
    ids, options = torch.tensor([PROMPT]), dict(max_new_tokens=6, do_sample=False)
    expected = model.generate(input_ids=ids, **options)
    quire.paged(model, **OPTIONS)
    with pytest.warns(UserWarning, match="an aLoRA is active"):
        assert torch.equal(model.generate(input_ids=ids, **options), expected)


def test_an_adapter_with_the_name_of_none() -> None:
    model = peft.get_peft_model(small_llama(std=0.3), lora()).eval()
    model.add_adapter("__base__", lora())
    with quire.Engine(model.get_base_model(), **OPTIONS) as engine:
        with pytest.raises(ValueError, match="an adapter named '__base__', which means none here"):
            engine.add_request(PROMPT, adapter="__base__")
        assert len(engine.generate([PROMPT], quire.SamplingParams(max_tokens=2), adapter="default")[0].token_ids) == 2
