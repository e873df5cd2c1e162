"""PEFT's LoRA of experts and routers (``target_parameters``): an engine's tokens and log probabilities are those of PEFT's own
forward, which adds the adapters to the weights of all experts."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

from peft import LoraConfig, get_peft_model

import quire
from tests.integrations.test_peft import fill
from tests.zoo.configs import SERVED, build

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
PARAMS = quire.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
OPTIONS: dict[str, Any] = dict(num_pages=60, max_num_seqs=4, max_model_len=50)
#: Weights that lie the other way round, with biases, and a gate of their own: gpt-oss, whose parameters are named. In the
#: others "all-linear" has the experts and the router.
WHERE: dict[str, Any] = {"qwen3_moe": dict(target_modules="all-linear"), "gpt_oss": dict(
    target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])}


def adapted(kind: str, *more: str) -> Any:
    """The model of PEFT with the adapters "one" and ``more``."""
    config = WHERE.get(kind, WHERE["qwen3_moe"])
    model = get_peft_model(build(SERVED[kind]), LoraConfig(r=2, **config), adapter_name="one").eval()
    for i, name in enumerate(more):
        model.add_adapter(name, LoraConfig(r=3 + i, lora_alpha=20, use_rslora=True, **config))
    for i, name in enumerate(("one", *more)):
        fill(model, name, i)
    assert {type(m).__name__ for m in model.modules()} >= {"ParamWrapper"}
    return model


def check(out: Any, peft: Any) -> list[int]:
    """Against PEFT's forward in fp32; sums of some ten layers in another order, of logits up to 30: 1e-5 and less."""
    prompt = list(out.prompt_token_ids)
    with torch.no_grad():
        want = peft(torch.tensor([[*prompt, *out.token_ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert out.token_ids == want.argmax(-1).tolist()
    got = [next(iter(of.values())).logprob for of in out.logprobs]
    assert got == pytest.approx(want.amax(-1).tolist(), abs=5e-5)
    return list(out.token_ids)


QUICK = (("qwen3_moe", "auto"), ("gpt_oss", "all"))


@pytest.mark.parametrize("kind, fusions", [
    pytest.param(kind, fusions, marks=[pytest.mark.slow] * ((kind, fusions) not in QUICK))
    for kind in ("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v2", "deepseek_v3", "olmoe", "flex_olmo", "minimax_m2",
                 "glm4_moe", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "exaone_moe", "cohere2_moe", "afmoe", "solar_open")
    for fusions in ("auto", "all")])
def test_the_active_adapter(kind, fusions) -> None:
    peft = adapted(kind)
    with quire.Engine(peft.base_model.model, fusions=fusions, **OPTIONS) as engine:
        with_it = [check(out, peft) for out in engine.generate(PROMPTS, PARAMS)]
    with quire.Engine(build(SERVED[kind]), **OPTIONS) as engine:
        assert [out.token_ids for out in engine.generate(PROMPTS, PARAMS)] != with_it


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_a_batch_with_different_adapters(kind) -> None:
    """Requests with one adapter, with another and with none share their steps."""
    peft = adapted(kind, "two")
    with quire.Engine(peft.base_model.model, enable_lora=True, **OPTIONS) as engine:
        runner = engine.runner
        outs = engine.generate(PROMPTS, PARAMS, adapter=["two", "__base__", None])
        assert engine.runner is runner
        peft.set_adapter("two")
        check(outs[0], peft)
        with peft.disable_adapter():
            check(outs[1], peft)
        peft.set_adapter("one")
        check(outs[2], peft)


def test_a_life_with_adapters(caplog) -> None:
    """Switched, disabled, changed in place, merged and unmerged: the engine follows, with one new trace in all."""
    caplog.set_level(logging.WARNING, "quire")
    peft = adapted("qwen3_moe", "two")
    with quire.Engine(peft.base_model.model, **OPTIONS) as engine:
        def served() -> list[int]:
            return check(engine.generate(PROMPTS[:1], PARAMS)[0], peft)

        seen = [served()]
        peft.set_adapter("two")
        seen.append(served())
        runner = engine.runner
        with peft.disable_adapter():
            seen.append(served())
        fill(peft, "two", 5)
        seen.append(served())
        peft.merge_adapter()
        assert served() == seen[-1]
        peft.unmerge_adapter()
        peft.set_adapter("one")
        assert served() == seen[0] and engine.runner is runner
        assert len({tuple(tokens) for tokens in seen}) == 4
        peft.base_model.set_adapter(["one", "two"])
        assert served() not in seen and engine.runner is runner
        peft.set_adapter("one")
        peft.delete_adapter("two")
        assert served() == seen[0]


def test_places_have_no_adapters_of_experts(caplog) -> None:
    """Those are built into the trace, also one that comes later, beside adapters of linear layers in places."""
    caplog.set_level(logging.INFO, "quire")
    peft = adapted("qwen3_moe")
    with quire.Engine(peft.base_model.model, enable_lora=True, max_loras=2, max_lora_rank=8, **OPTIONS) as engine:
        check(engine.generate(PROMPTS[:1], PARAMS)[0], peft)
        assert "which are built into the trace: one" in caplog.text and "parameters of experts" in caplog.text
        runner = engine.runner
        peft.add_adapter("attention", LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        fill(peft, "attention", 4)
        outs = engine.generate(PROMPTS[:2], PARAMS, adapter=["one", "attention"])
        assert engine.runner is runner
        check(outs[0], peft)
        peft.set_adapter("attention")
        check(outs[1], peft)
        peft.add_adapter("two", LoraConfig(r=3, target_modules="all-linear"))
        fill(peft, "two", 2)
        out, = engine.generate(PROMPTS[:1], PARAMS, adapter="two")
        assert engine.runner is not runner
        peft.set_adapter("two")
        check(out, peft)


@pytest.mark.usefixtures("tokens_unchecked")
@pytest.mark.parametrize("first", ["experts", pytest.param("linear", marks=pytest.mark.slow)])
def test_places_where_all_adapters_are_of_experts(first, caplog) -> None:
    """No layer has places then, and the engine serves as without max_loras; adapters of linear layers that come later have
    places from the next trace on. A server of such a model would else not start, or stop when its adapters change. ``first``:
    what the model begins with."""
    caplog.set_level(logging.INFO, "quire")
    linear, of_experts = (LoraConfig(r=2, **where) for where in (
        dict(target_modules=["q_proj"]), dict(target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])))
    peft = get_peft_model(build(SERVED["qwen3_moe"]), linear if first == "linear" else of_experts, adapter_name="one").eval()
    fill(peft, "one", 0)
    with quire.Engine(peft.base_model.model, enable_lora=True, max_loras=2, **OPTIONS) as engine:
        def served(name: str | None) -> list[int]:
            (out,), before = engine.generate(PROMPTS[:1], PARAMS, adapter=name), peft.active_adapters
            peft.base_model.set_adapter(before if name is None else name)
            found = check(out, peft)
            peft.base_model.set_adapter(before)
            return found

        assert served("one") == served(None)
        if first == "linear":
            peft = get_peft_model(peft.unload(), of_experts, adapter_name="one").eval()
            fill(peft, "one", 0)
            assert served("one") == served(None)
        assert "which are built into the trace: one" in caplog.text
        for i, name in enumerate(("late", "later")):
            runner = engine.runner
            peft.add_adapter(name, linear)
            fill(peft, name, 3 + i)
            served(name)
            assert (engine.runner is runner) == (name == "later")
        if first == "linear":
            for name in ("late", "later"):
                peft.delete_adapter(name)
            peft.add_adapter("two", of_experts)
            fill(peft, "two", 2)
            assert served("two") != served("one")


@pytest.mark.parametrize("order", [1, -1])
def test_biases_of_experts(order) -> None:
    """Refused while adapted, whichever wrapper is outside; where they are not, the weights' adapters count on."""
    names = ["mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj"][::order]
    peft = get_peft_model(build(SERVED["gpt_oss"]), LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)).eval()
    fill(peft, "default", 1)
    with pytest.raises(quire.UnsupportedAttention):
        quire.Engine(peft.base_model.model, **OPTIONS)
    for module in peft.modules():
        if getattr(module, "parameter_name", "").endswith("bias"):
            module.enable_adapters(False)
    with quire.Engine(peft.base_model.model, **OPTIONS) as engine:
        check(engine.generate(PROMPTS[:1], PARAMS)[0], peft)


def test_what_is_refused_says_what_to_do() -> None:
    """Experts that are not computed by quire's op: PEFT's own code would be traced, which Dynamo cannot."""
    peft = get_peft_model(build(SERVED["longcat_flash"]), LoraConfig(r=2, target_modules="all-linear")).eval()
    with pytest.raises(quire.UnsupportedAttention, match="adapts a parameter of LongcatFlashExperts, which are no experts that "
                                                         "quire computes.*target_modules=.*merge_adapter") as caught:
        quire.Engine(peft.base_model.model, **OPTIONS)
    assert "Source" not in str(caught.value)  # of Dynamo's text, which says nothing more
    with pytest.raises(ValueError, match="adapters cannot be chosen .*: model.layers.0.mlp.*experts that quire computes"):
        quire.Engine(peft.base_model.model, enable_lora=True, **OPTIONS).generate(PROMPTS[0], PARAMS, adapter="default")
