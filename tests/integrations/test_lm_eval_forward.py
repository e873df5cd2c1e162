"""Which calls of a paged model's forward by lm-eval come from the engine: those of which nobody sees more than the logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="pip install 'quire[integrations]'")

import lm_eval.models.huggingface  # noqa: F401
import torch
from transformers import DynamicCache, LlamaForCausalLM

import quire
from quire.graph_runner.model_runner import ModelRunner
from tests.tiny import assert_idle, hf_greedy, small_llama

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

OPTIONS = dict(num_pages=40, max_num_seqs=4, cudagraph_capture_sizes=[])
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 0, 0], [5, 6, 7, 8, 9]])
_SOURCE = """
def logits(model, *args, **kwargs):
    return model(*args, **kwargs).logits

def result(model, *args, **kwargs):
    out = model(*args, **kwargs)
    return out

def past(model, *args, **kwargs):
    return model(*args, **kwargs).past_key_values
"""


def code_of(module: str) -> Any:
    """Functions that call a model, as if they were of that module."""
    scope: dict[str, Any] = {"__name__": module}
    exec(_SOURCE, scope)
    return scope


LM_EVAL = code_of("lm_eval.models.made_up")


@pytest.fixture
def steps(monkeypatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(ModelRunner, "logits_of", lambda self, batch, own=ModelRunner.logits_of: found.append(batch) or own(
        self, batch))
    return found


def paged(**options: Any) -> Any:
    return quire.paged(small_llama(std=0.3), **(OPTIONS | options))


@pytest.fixture(scope="module")
def one_model() -> Iterator[Any]:
    made = paged()
    yield made
    made.generate.close()


@pytest.fixture
def shared(one_model) -> Any:
    """For tests that leave it as it is."""
    one_model.generate.warned.clear()
    return one_model


@torch.no_grad()
def test_logits_come_from_the_engine(steps) -> None:
    """Also beside requests, after a change of the weights, in inference mode, and of more rows than the engine runs at once."""
    model, plain = paged(), small_llama(std=0.3)
    ask = LM_EVAL["logits"]
    torch.testing.assert_close(ask(model, IDS), plain(IDS).logits, atol=1e-5, rtol=1e-5)
    assert sum(batch.num_tokens for batch in steps) == 10  # equal rows once
    for each in (model, plain):
        each.lm_head.weight.mul_(2)
    many = torch.arange(10 * 33).reshape(10, 33) % 64
    stream = model.generate.engine.stream([[5, 6, 7]], quire.SamplingParams(temperature=0, max_tokens=8))
    events = [next(stream)]
    with torch.inference_mode():
        torch.testing.assert_close(ask(model, many.int()), plain(many).logits, atol=1e-5, rtol=1e-5)
    events += stream
    assert [t for event in events for t in event.token_ids] == hf_greedy(plain, [5, 6, 7], 8)
    assert not model.generate.warned
    assert_idle(model.generate.engine)


@torch.no_grad()
def test_long_rows_in_chunks(monkeypatch, steps) -> None:
    """Memory for logits beside the result does not grow with the batch."""
    monkeypatch.setattr("quire.graph_runner.whole_logits.STEP_TOKENS", 16)
    model, plain = paged(), small_llama(std=0.3)
    ids = torch.arange(3 * 41).reshape(3, 41) % 64
    torch.testing.assert_close(LM_EVAL["logits"](model, ids), plain(ids).logits, atol=1e-5, rtol=1e-5)
    assert max(len(batch.rows) + batch.num_scored for batch in steps) == 16 and len(steps) >= 8


@pytest.mark.parametrize("given", [
    dict(labels=IDS), dict(attention_mask=torch.tensor([[0, 1, 1, 1, 1]] * 3)), dict(position_ids=torch.arange(3, 8)[None]),
    dict(past_key_values=DynamicCache()), dict(output_hidden_states=True), dict(output_attentions=True), dict(use_cache=True),
    dict(logits_to_keep=1)], ids=lambda given: next(iter(given)))
@torch.no_grad()
def test_calls_with_more_than_ids_are_the_forward(given, shared, steps) -> None:
    with pytest.warns(UserWarning, match=f"not paged, because it was given {next(iter(given))}"):
        got = LM_EVAL["logits"](shared, IDS, **given)
    if "past_key_values" in given:
        given = dict(past_key_values=DynamicCache())
    assert torch.equal(got, small_llama(std=0.3)(IDS, **given).logits) and not steps


@torch.no_grad()
def test_whoever_may_see_more_than_logits_gets_the_forward(shared, steps) -> None:
    """The cache of the result, which ``use_cache`` makes by default, must be there for those who go on with it."""
    model, plain = shared, small_llama(std=0.3)
    want = plain(IDS)
    kept, past = LM_EVAL["result"](model, IDS), LM_EVAL["past"](model, IDS)
    assert torch.equal(kept.logits, want.logits)
    for cache in (kept.past_key_values, past):
        assert cache.get_seq_length() == 5 and torch.equal(cache.layers[0].keys, want.past_key_values.layers[0].keys)
    for module in ("my_evaluation", "lm_evaluation", "torch.nn"):
        assert torch.equal(code_of(module)["logits"](model, IDS), want.logits)
    assert not steps and not model.generate.warned


class OwnForward(LlamaForCausalLM):
    """Masks the token 0, in a forward of the user's own."""

    def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is None:
            attention_mask = (input_ids != 0).long()
        return super().forward(input_ids, attention_mask=attention_mask, **kwargs)


@torch.no_grad()
def test_a_forward_that_makes_its_own_mask(steps) -> None:
    plain = OwnForward(small_llama().config).eval()
    model = quire.paged(copy.deepcopy(plain), **OPTIONS)
    ids = IDS.flip(1)
    with pytest.warns(UserWarning, match="OwnForward.forward reads attention_mask"):
        assert torch.equal(LM_EVAL["logits"](model, ids), plain(ids).logits)
    assert not steps


def hooked(at: str, pre: bool = False) -> Any:
    def change(model: Any) -> None:
        module = model.get_submodule(at)
        if pre:
            module.register_forward_pre_hook(lambda module, args: None)
        else:
            module.register_forward_hook(lambda module, args, output: None)

    return change


def with_dropout(model: Any) -> None:
    model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.1
    model.train()


@pytest.mark.parametrize(("change", "why"), [
    (hooked("model.layers.0"), "model.layers.0 has a hook"), (hooked("", pre=True), "LlamaForCausalLM has a hook"),
    (with_dropout, "the model is in training mode, and config.attention_dropout is 0.1"),
    (lambda model: model.generate.engine.close(), "the engine is closed")])
@torch.no_grad()
def test_a_model_that_an_engine_may_see_otherwise(change, why, steps) -> None:
    model, plain = paged(), small_llama(std=0.3)
    change(model)
    with pytest.warns(UserWarning, match=f"log-likelihoods run on transformers' own code, not paged, because {why}"):
        got = LM_EVAL["logits"](model, IDS)
    assert got.shape == plain(IDS).logits.shape and not steps
    if change is not with_dropout:
        assert torch.equal(got, plain(IDS).logits)
    LM_EVAL["logits"](model, IDS)  # warned once


@pytest.mark.parametrize(("options", "why"), [
    (dict(dtype=torch.bfloat16), "the engine computes in torch.bfloat16, and the forward does not"),
    (dict(kv_cache_dtype="int8"), "the engine's KV cache is in int8"),
    (dict(max_model_len=4), "a row has 5 tokens, and the engine holds 4"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (dict(attention="flashmla"), "flashmla"),
        (dict(max_model_len=2000), "max_model_len=2000, but the model has 1024 positions")))])
@torch.no_grad()
def test_an_engine_with_other_numbers(options, why, steps) -> None:
    """Scores are those of the model as it is, whatever its rollouts are computed in."""
    model = paged(**options)
    with pytest.warns(UserWarning, match=why):
        assert torch.equal(LM_EVAL["logits"](model, IDS), small_llama(std=0.3)(IDS).logits)
    assert not steps


def test_modes_of_the_caller(shared, steps) -> None:
    model, plain = shared, small_llama(std=0.3)
    with pytest.warns(UserWarning, match="because gradients are wanted"):
        assert LM_EVAL["logits"](model, IDS).requires_grad
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="because torch.autocast is on"):
            got = LM_EVAL["logits"](model, IDS)
        with torch.autocast("cpu", torch.bfloat16):
            assert got.dtype == torch.bfloat16 and torch.equal(got, plain(IDS).logits)
        for ids in (torch.tensor([[5, 64]]), torch.tensor([[-1, 3]])):
            with pytest.raises(IndexError), pytest.warns(UserWarning, match="a token id is outside the vocabulary"):
                LM_EVAL["logits"](model, ids)
            model.generate.warned.clear()
        with pytest.raises(TypeError, match="argument"):
            LM_EVAL["logits"](model, IDS, *[None] * 20)
    assert not steps
    assert_idle(model.generate.engine)


@torch.no_grad()
def test_through_pefts_wrapper_and_after_close(steps) -> None:
    """HFLM may be given PEFT's model; what is closed is plain again."""
    peft = pytest.importorskip("peft")
    model = quire.paged(peft.get_peft_model(small_llama(std=0.3), peft.LoraConfig(
        target_modules=["q_proj"], init_lora_weights=False)).eval(), **OPTIONS)
    got = LM_EVAL["logits"](model, IDS)
    assert steps
    steps.clear()
    seen: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, output: seen.append(output.past_key_values))
    LM_EVAL["logits"](model, IDS)
    assert not steps and seen[0].get_seq_length() == 5
    handle.remove()
    model.generate.close()
    want = LM_EVAL["logits"](model, IDS)
    assert not steps
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
