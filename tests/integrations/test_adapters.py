"""Requests of one batch with adapters of their own: each gets what the PEFT model gives with that adapter active alone."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

from peft import IA3Config, LoraConfig, get_peft_model
from peft.utils.hotswap import prepare_model_for_compiled_hotswap

import quire
from quire.passes.capture.lora import check_adapters
from tests.integrations.test_peft import fill
from tests.tiny import GREEDY, assert_idle, hf_greedy, small_llama, tokens
from tests.zoo.configs import SERVED, build

pytestmark = pytest.mark.usefixtures("traces_kept")

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10, 11], [20, 21]]
CONFIGS = {"one": LoraConfig(r=4, target_modules="all-linear"),
           "two": LoraConfig(r=8, target_modules=["q_proj", "v_proj"], use_rslora=True, lora_alpha=3)}


def adapted(model: Any) -> Any:
    peft = get_peft_model(model, CONFIGS["one"], adapter_name="one")
    peft.add_adapter("two", CONFIGS["two"])
    for i, name in enumerate(CONFIGS):
        fill(peft, name, i)
    return peft


@functools.cache
def want(adapter: str, prompt: int, count: int = 12) -> list[int]:
    """By PEFT and transformers, with one adapter active, or none."""
    plain = small_llama(std=0.3)
    peft = adapted(plain)
    if adapter == "__base__":
        with peft.disable_adapter():
            return hf_greedy(plain, PROMPTS[prompt], count)
    peft.set_adapter(adapter)
    return hf_greedy(plain, PROMPTS[prompt], count)


PARAMS = quire.SamplingParams(temperature=0, max_tokens=12)
OPTIONS: dict[str, Any] = dict(num_pages=60, max_num_seqs=8, max_model_len=100)
ROWS = [("one", 0), ("two", 0), ("__base__", 0), ("two", 1), ("one", 2), ("__base__", 1)]


@pytest.mark.slow  # test_an_engine_that_expects_adapters has the same batch
@pytest.mark.parametrize("schedule", [
    dict(cudagraph_capture_sizes=[4]),
    dict(prefill_chunk_size=2, page_size=2, async_stepping=True, enable_prefix_caching=True)])
def test_a_batch_with_different_adapters(schedule) -> None:
    """Prompts are equal on purpose: pages of another adapter must not be read. PEFT's wrapper, too, is traced again once."""
    model = small_llama(std=0.3)
    peft = adapted(model)
    with quire.Engine(peft if "cudagraph_capture_sizes" in schedule else model, **OPTIONS | schedule) as engine:
        assert tokens(engine.generate(PROMPTS[:1], PARAMS)) == [want("one", 0)]  # the active one, as ever
        for _ in range(2):
            outputs = engine.generate([PROMPTS[i] for _, i in ROWS], PARAMS, adapter=[name for name, _ in ROWS])
            assert tokens(outputs) == [want(name, i) for name, i in ROWS]
        assert len({tuple(o.token_ids) for o in outputs[:3]}) == 3
        peft.set_adapter("two")
        assert tokens(engine.generate([PROMPTS[0]] * 2, PARAMS, adapter=[None, "one"])) == [want("two", 0), want("one", 0)]
        with peft.disable_adapter():
            assert tokens(engine.generate([PROMPTS[0]] * 2, PARAMS, adapter=[None, "two"])) == [
                want("__base__", 0), want("two", 0)]


def test_an_engine_that_expects_adapters(caplog) -> None:
    """With ``enable_lora`` the first request with an adapter does not wait for a new trace; it is refused without adapters."""
    with quire.Engine(adapted(small_llama(std=0.3)), enable_lora=True, **OPTIONS) as engine:
        outputs = engine.generate([PROMPTS[i] for _, i in ROWS], PARAMS, adapter=[name for name, _ in ROWS])
        assert tokens(outputs) == [want(name, i) for name, i in ROWS]
        assert tokens(engine.generate(PROMPTS[:1], PARAMS)) == [want("one", 0)]
    assert "tracing it again" not in caplog.text
    with pytest.raises(ValueError, match="no adapters of PEFT.*enable_lora"):
        quire.Engine(small_llama(), enable_lora=True, **OPTIONS)


@pytest.mark.slow
def test_a_life_with_adapters() -> None:
    """A server's adapters come and go; trained ones change in place; a request of a deleted one fails by name."""
    model = small_llama(std=0.3)
    peft = adapted(model)
    with quire.Engine(model, **OPTIONS) as engine:
        stream = engine.stream(PROMPTS[0], PARAMS)  # began before any had an adapter of its own
        first = next(stream).token_ids
        assert tokens(engine.generate(PROMPTS[0], PARAMS, adapter="two")) == [want("two", 0)]
        assert first + [t for event in stream for t in event.token_ids] == want("one", 0)
        peft.add_adapter("three", CONFIGS["two"])
        fill(peft, "three", 1)
        assert tokens(engine.generate([PROMPTS[0]] * 2, PARAMS, adapter=["three", "one"])) == [want("two", 0), want("one", 0)]
        fill(peft, "three", 0)  # in place, as an optimizer does
        peft.set_adapter("three")
        changed = hf_greedy(model, PROMPTS[0], 12)
        assert changed != want("two", 0)
        assert tokens(engine.generate([PROMPTS[0]] * 2, PARAMS, adapter=["three", "one"])) == [changed, want("one", 0)]
        peft.set_adapter("one")
        stream = engine.stream([PROMPTS[0], PROMPTS[1]], PARAMS, adapter=["three", "two"], raise_on_error=False)
        next(stream)
        peft.delete_adapter("three")
        ended = {event.index: event.output for event in stream if event.finished}
        got = engine.generate([PROMPTS[0]], PARAMS, adapter="two")
        assert tokens(got) == [want("two", 0)] and ended[1].token_ids == want("two", 1)
        with pytest.raises(ValueError, match="the model has no adapter 'three'; it has 'one', 'two', and '__base__' for none"):
            engine.generate(PROMPTS[0], PARAMS, adapter="three")
        peft.merge_adapter(["one"])
        with pytest.raises(ValueError, match="has merged 'one' into its weights"):
            engine.generate(PROMPTS[0], PARAMS, adapter="two")
        assert tokens(engine.generate(PROMPTS[0], PARAMS)) == [want("one", 0)]
        peft.unmerge_adapter()
        assert tokens(engine.generate(PROMPTS[0], PARAMS, adapter="two")) == [want("two", 0)]
        assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["layers", "order"])
def test_active_adapters_that_no_request_can_have(which, caplog) -> None:
    """One layer switched by hand, and DoRA beside another in the order of activation: the model's own forward has a result, and
    requests without ``adapter=`` get it, also after others had adapters of their own; so has ``generate`` in lockstep."""
    plain, model = small_llama(std=0.3), small_llama(std=0.3)
    pair = [adapted(plain), adapted(model)]
    for peft in pair:
        peft.add_adapter("dora", LoraConfig(r=4, target_modules="all-linear", use_dora=True))
        fill(peft, "dora", 7)
    quire.paged(model, **OPTIONS, cudagraph_capture_sizes=[])
    engine = model.generate.engine
    assert tokens(engine.generate(PROMPTS[:1], PARAMS, adapter="two")) == [want("two", 0)]
    for peft in pair:
        if which == "layers":
            peft.base_model.model.model.layers[0].self_attn.q_proj.set_adapter("two")
        else:
            peft.base_model.set_adapter(["two", "dora"])
    expected = hf_greedy(plain, PROMPTS[0], 12)
    assert expected not in (want("one", 0), want("two", 0))
    assert hf_greedy(model, PROMPTS[0], 12, no_repeat_ngram_size=2) == hf_greedy(plain, PROMPTS[0], 12, no_repeat_ngram_size=2)
    assert tokens(engine.generate(PROMPTS[:1], PARAMS)) == [expected]
    with pytest.raises(ValueError, match="which set_adapter makes equal|their result depends on the order"):
        engine.generate(PROMPTS[0], PARAMS, adapter="two")
    pair[1].set_adapter("one")
    assert tokens(engine.generate(PROMPTS[:1] * 2, PARAMS, adapter=["two", None])) == [want("two", 0), want("one", 0)]
    stream = engine.stream(PROMPTS[0], PARAMS, adapter="two")
    first = next(stream).token_ids
    if which == "layers":
        pair[1].base_model.model.model.layers[0].self_attn.q_proj.set_adapter("two")
    else:
        pair[1].base_model.set_adapter(["two", "dora"])
    assert tokens(engine.generate(PROMPTS[:1], PARAMS)) == [expected]  # beside one that has its own adapter
    with pytest.raises(RuntimeError, match="adapters cannot be chosen for each request any more"):
        list(stream)
    assert first and "its active adapters are such as no request can have" in caplog.text
    model.generate.close()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "names"), [
    ("opt", ["q_proj", "fc1", "fc2"]), ("deepseek_v3", ["q_b_proj", "kv_b_proj"])])
def test_layers_that_get_tokens_in_other_shapes(kind, names) -> None:
    """opt's MLP flattens the batch into the tokens before its linear layers; DeepSeek-V3's latents have a dimension more."""
    peft = get_peft_model(build(SERVED[kind]), LoraConfig(r=4, target_modules=names), adapter_name="one")
    model = peft.base_model.model.eval()
    fill(peft, "one", 0)
    with peft.disable_adapter():
        plain = hf_greedy(model, PROMPTS[0], 6)
    expected = [hf_greedy(model, PROMPTS[0], 6), plain]
    with quire.Engine(model, num_pages=30, max_num_seqs=4, max_model_len=50, cudagraph_capture_sizes=[]) as engine:
        got = engine.generate([PROMPTS[0]] * 2, quire.SamplingParams(temperature=0, max_tokens=6), adapter=["one", "__base__"])
        assert tokens(got) == expected and expected[0] != plain


@pytest.mark.slow
def test_dora_beside_lora() -> None:
    """Each request of a batch gets what PEFT gives with its adapter alone, whichever is active; a bias counts once."""
    model = small_llama(std=0.3, attention_bias=True)
    peft = get_peft_model(model, CONFIGS["two"], adapter_name="plain")
    peft.add_adapter("dora", LoraConfig(r=4, target_modules="all-linear", use_dora=True))
    peft.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "o_proj"], use_dora=True))
    names = ["dora", "plain", "__base__", "other"]
    for i, name in enumerate(names):
        fill(peft, name, i)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "magnitude" in key or key.endswith("bias"):
                p.add_(torch.rand_like(p))
    alone = []
    for name in names:
        with peft.disable_adapter() if name == "__base__" else contextlib.nullcontext():
            if name != "__base__":
                peft.set_adapter(name)
            alone.append(hf_greedy(model, PROMPTS[0], 12))
    assert len(set(map(tuple, alone))) == 4
    with quire.Engine(peft, **OPTIONS, cudagraph_capture_sizes=[4]) as engine:
        for active in ("dora", "plain"):
            peft.set_adapter(active)
            assert tokens(engine.generate([PROMPTS[0]] * 4, PARAMS, adapter=names)) == alone
            assert tokens(engine.generate(PROMPTS[0], PARAMS)) == [alone[names.index(active)]]
        scores = engine.score([PROMPTS[0]] * 2, [alone[1][:4]] * 2, adapter=["plain", "__base__"])
        assert scores[0].is_greedy and not scores[1].is_greedy
        peft.base_model.set_adapter(["plain", "dora"])
        with pytest.raises(ValueError, match="several are active together, of which some are DoRA"):
            check_adapters(model)


@pytest.mark.parametrize(("config", "message"), [
    (LoraConfig(target_modules=["embed_tokens"]), "embed_tokens is a peft.tuners.lora.layer.Embedding, and .* knows LoRA"),
    (LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "lm_head is a peft.utils.other.ModulesToSaveWrapper"),
    (LoraConfig(target_modules=["lm_head", "q_proj"]), "lm_head is the head"),
    (IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
     "k_proj is a peft.tuners.ia3.layer.Linear, and .* knows LoRA"),
])
def test_adapters_that_are_refused(config, message) -> None:
    model = small_llama(tie_word_embeddings=False)
    get_peft_model(model, config)
    with pytest.raises(ValueError, match=message):
        check_adapters(model)


def test_a_scaling_that_is_a_tensor_is_refused() -> None:
    """For hot swaps PEFT makes the scaling a tensor, which may change in place: a constant of the trace would go stale."""
    model = small_llama()
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    check_adapters(model)
    prepare_model_for_compiled_hotswap(peft, target_rank=8)
    with pytest.raises(ValueError, match="q_proj has an adapter 'default' whose scaling is a tensor.*set_adapter chooses one"):
        check_adapters(model)


@pytest.mark.slow
def test_refused_by_an_engine(monkeypatch) -> None:
    """Others are served as before, also where the trace finds what no check of the layers does: rows that are not tokens."""
    model = small_llama(tie_word_embeddings=False)
    with quire.Engine(model, num_pages=20, max_num_seqs=2, max_model_len=50, cudagraph_capture_sizes=[]) as engine:
        with pytest.raises(ValueError, match="the model has no adapters of PEFT"):
            engine.add_request([3, 4], GREEDY, adapter="default")
        with pytest.raises(TypeError, match="adapter must be the name of an adapter or None, got 3"):
            engine.add_request([3, 4], GREEDY, adapter=3)
        get_peft_model(model, LoraConfig(target_modules=["lm_head", "q_proj"]))
        before = tokens(engine.generate([3, 4], GREEDY))
        monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
        with pytest.raises(RuntimeError, match="an adapter's rows are not the tokens of the batch"):
            engine.add_request([3, 4], GREEDY, adapter="default")
        assert tokens(engine.generate([3, 4], GREEDY)) == before
        assert_idle(engine)
