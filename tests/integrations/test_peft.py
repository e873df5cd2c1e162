"""PEFT's adapters on a model whose engine is open: each change is seen, and the tokens are those of the plain model."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

import quire
from quire.integrations.engines import engine_of
from tests.tiny import load_model, small_llama
from tests.zoo.configs import SERVED, build

IDS = torch.tensor([[5, 6, 7, 8]])
ADAPTERS = {
    "lora": LoraConfig(r=4, target_modules="all-linear"),
    "rslora": LoraConfig(r=4, target_modules="all-linear", use_rslora=True),
    "modules_to_save": LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], lora_dropout=0.1),
    "dora": LoraConfig(r=4, target_modules="all-linear", use_dora=True),
    "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def generated(model: Any, **options: Any) -> list[int]:
    return model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8, do_sample=False,
                          **options)[0, 4:].tolist()


def fill(model: Any, name: str, seed: int) -> None:
    """An adapter that does something: PEFT's begin as the identity."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if f".{name}" in key and any(part in key for part in ("lora_A", "lora_B", "ia3", "modules_to_save")):
                p.normal_(0, 2.0 if "ia3" in key else 0.2)
            elif f".{name}" in key and "magnitude" in key:
                p.mul_(torch.linspace(0.5, 1.5, p.numel()))


@contextlib.contextmanager
def paged_only() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not paged.*")
        yield


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_dora(kind) -> None:
    """PEFT's own code for it cannot be traced: here the formula stands for it, and PEFT's tokens and log probabilities for the
    test. Also with a bias, with weights that lie the other way round, and after an update of what the lengths depend on."""
    model = small_llama(0.3, attention_bias=True) if kind == "llama" else build(SERVED["gpt2"])
    names = "all-linear" if kind == "llama" else ["c_attn", "c_fc"]
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=names, use_dora=True, fan_in_fan_out=kind == "gpt2")).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_()
    params = quire.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    with quire.Engine(model, num_pages=20, max_num_seqs=2, max_model_len=50, fusions="all") as engine:
        runner, seen = engine.runner, []
        for seed in range(2):
            fill(peft, "default", seed)
            (out,) = engine.generate([IDS[0].tolist()], params)
            with torch.no_grad():
                want = peft(torch.tensor([[*IDS[0].tolist(), *out.token_ids]])).logits[0, 3:-1].log_softmax(-1)
            assert out.token_ids == want.argmax(-1).tolist()
            got = [next(iter(of.values())).logprob for of in out.logprobs or ()]
            assert got == pytest.approx(want.amax(-1).tolist(), abs=1e-5)
            seen.append(got)
        assert engine.runner is runner and seen[0] != seen[1]


@pytest.mark.slow
def test_dora_of_embeddings_is_refused_until_it_is_merged() -> None:
    """torch.compile cannot trace these layers; the error says so, and the engine goes on when they are gone."""
    model = quire.paged(load_model(num_layers=1), num_pages=40, max_num_seqs=2, max_model_len=128, cudagraph_capture_sizes=[])
    base = generated(model)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["embed_tokens"], use_dora=True))
    with pytest.raises(RuntimeError, match="embed_tokens was replaced.*, and cannot be served as it is now.*could not be "
                                           "traced.*merge the adapter with merge_adapter"):
        generated(peft)
    assert generated(peft.merge_and_unload()) == base
    model.generate.close()


def test_quire_on_pefts_wrapper() -> None:
    """The wrapper's generate, and what copies of it do, run on the engine of the model inside; all of it is given back."""
    plain, model = (get_peft_model(load_model(num_layers=1), copy.deepcopy(ADAPTERS["lora"])).eval() for _ in range(2))
    for peft in (plain, model):
        fill(peft, "default", 3)
    assert quire.paged(model, num_pages=40, max_num_seqs=2, max_model_len=128, cudagraph_capture_sizes=[]) is model
    with paged_only():
        assert generated(model) == generated(plain)
        engine = model.generate.engine
        assert engine.stats().generated_tokens == 8 and engine_of(model) is engine
        twin = copy.deepcopy(model)
        fill(plain, "default", 4), fill(twin, "default", 4)
        assert generated(twin) == generated(plain) != generated(model)
        assert twin.generate.engine is not engine
    twin.generate.close(), model.generate.close()
    fill(model, "default", 4)
    assert generated(model) == generated(plain) and engine_of(model) is None
    assert "generate" not in vars(model) and not hasattr(model.base_model.model.generate, "engine")


def test_prompt_tuning_falls_back_and_says_why() -> None:
    model = quire.paged(load_model(num_layers=1), num_pages=40, max_num_seqs=2, max_model_len=128)
    peft = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.warns(UserWarning, match="not paged, because prepare_inputs_for_generation is PEFT's: prompt tuning"):
        peft.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, do_sample=False)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "chosen", "line"), [
    (torch.bfloat16, None, "lora_group: 14 matches"),  # seven layers in each of two
    (torch.float32, None, "lora_group: 14 matches"),
    (torch.float32, "default", "lora_group: 14 matches"),
], ids=["the model's dtype", "float32", "of each request"])
def test_an_adapter_in_the_fused_graph(dtype, chosen, line, tmp_path, caplog) -> None:
    """As on a GPU: the products of an adapter run in few kernels, with the tokens of the plain model; what is saved is the
    adapter."""
    peft = get_peft_model(load_model(num_layers=2, dtype=torch.bfloat16), copy.deepcopy(ADAPTERS["lora"]),
                          autocast_adapter_dtype=dtype == torch.float32)
    fill(peft, "default", 3)
    options: dict[str, Any] = dict(num_pages=40, max_num_seqs=2, max_model_len=128, cudagraph_capture_sizes=[])
    params = quire.SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    found = []
    caplog.set_level("INFO", logger="quire")
    for fusions in ("none", "all"):
        with quire.Engine(peft.base_model.model, fusions=fusions, **options) as engine:
            (out,) = engine.generate([IDS[0].tolist()], params, adapter=chosen)
            found.append([next(iter(of.values())).logprob for of in out.logprobs or ()])
            if fusions == "all":
                peft.save_pretrained(tmp_path)
    assert line in caplog.text
    assert found[0] == pytest.approx(found[1], abs=0.05)  # bf16 logits of other products: some 2**-8 of them
    saved = PeftModel.from_pretrained(load_model(num_layers=2, dtype=torch.bfloat16), str(tmp_path),
                                      autocast_adapter_dtype=dtype == torch.float32)
    for name, p in saved.named_parameters():
        assert torch.equal(p, peft.get_parameter(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("base", ["plain", "int8"])
def test_active_adapters_of_different_dtypes(base, monkeypatch, caplog) -> None:
    """A trained one in float32 beside one loaded in the model's dtype, of other layers and ranks: a layer has the sum of both.
    The prompt runs in the graph for large batches, in which the adapters have a launch, as beside a base in codes."""
    model = load_model(num_layers=2, dtype=torch.bfloat16)
    if base == "int8":
        monkeypatch.setattr("quire.passes.fusions.quantized_linear.wanted", lambda weight: True)  # as on a GPU
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(model.model, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    peft = get_peft_model(model, copy.deepcopy(ADAPTERS["lora"]))
    peft.add_adapter("loaded", LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True),
                     autocast_adapter_dtype=False)
    peft.base_model.set_adapter(["default", "loaded"])
    fill(peft, "default", 3), fill(peft, "loaded", 4)
    for name, p in peft.named_parameters():
        if "lora_" in name:
            assert p.dtype == (torch.bfloat16 if ".loaded." in name else torch.float32)
    params = quire.SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    ids, found = [5 + i % 90 for i in range(40)], []
    caplog.set_level("INFO", logger="quire")
    for fusions in ("none", "all", "all"):
        with quire.Engine(model, fusions=fusions, num_pages=40, max_num_seqs=2, max_model_len=128,
                          cudagraph_capture_sizes=[]) as engine:
            (out,) = engine.generate([ids], params)
        found.append([next(iter(of.values())).logprob for of in out.logprobs or ()])
        if len(found) == 2:
            peft.base_model.set_adapter("default")
    assert "lora_group: 14 matches" in caplog.text and f"lora_linear: {8 if base == 'plain' else 0} matches" in caplog.text
    assert found[0] == pytest.approx(found[1], abs=0.05)  # bf16 logits of other products: some 2**-8 of them
    assert found[2] != pytest.approx(found[1], abs=0.5), "the other adapter does nothing"


@pytest.mark.parametrize("dtype", [
    pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="the model's dtype", marks=pytest.mark.slow)])
def test_adapted_layers_are_compiled_once(dtype, monkeypatch, caplog) -> None:
    """Layers share what is made once for all adapters of a forward, and are alike all the same. In either dtype each launch of
    a layer computes its adapters too."""
    monkeypatch.setattr("quire.passes.compile.inductor.inductor", lambda gm, inputs: gm.forward)
    peft = get_peft_model(load_model(num_layers=3, dtype=torch.bfloat16), copy.deepcopy(ADAPTERS["lora"]),
                          autocast_adapter_dtype=dtype == torch.float32)
    fill(peft, "default", 3)
    caplog.set_level("INFO", logger="quire")
    with quire.Engine(peft.base_model.model, fusions="all", compiler="inductor", num_pages=40, max_num_seqs=2,
                      max_model_len=128, cudagraph_capture_sizes=[]) as engine:
        (out,) = engine.generate([IDS[0].tolist()], quire.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(out.token_ids) == 3
    assert "lora_linear: 12 matches" in caplog.text  # q k v, o, gate up, down
    found = [r.message for r in caplog.records if "regions: " in r.message]
    assert found and all("4 pieces, 3 different" in message for message in found)


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.slow)])
def test_switched_adapters_are_traced_once(kind, caplog) -> None:
    """A reference policy is the adapter switched off: a trace at each switch would cost more than what is generated with it."""
    plain = load_model(num_layers=1)
    model = quire.paged(load_model(num_layers=1), num_pages=40, max_num_seqs=2, max_model_len=128, cudagraph_capture_sizes=[])
    pair = [get_peft_model(m, copy.deepcopy(ADAPTERS[kind])) for m in (plain, model)]
    for peft in pair:
        peft.add_adapter("two", copy.deepcopy(ADAPTERS[kind]))
        fill(peft, "default", 3)
        fill(peft, "two", 9)
    with paged_only():
        want = [generated(pair[0])]
        pair[0].set_adapter("two")
        want.append(generated(pair[0]))
        with pair[0].disable_adapter():
            want.append(generated(pair[0]))
        assert len(set(map(str, want))) == 3
        traces = []
        for _ in range(2):
            for name, expected in zip(("default", "two"), want, strict=False):
                pair[1].set_adapter(name)
                assert generated(pair[1]) == expected
                traces.append(caplog.text.count("tracing it again"))
            with pair[1].disable_adapter():
                assert generated(pair[1]) == want[2]
            traces.append(caplog.text.count("tracing it again"))
    assert traces == [0, 1, 1, 1, 1, 1]
    model.generate.close()


@pytest.mark.parametrize("before", [0, 1], ids=["first switch", "later switch"])
def test_who_runs_keeps_the_adapter_that_it_came_with(before) -> None:
    """Keys of one adapter under another give the tokens of neither, and nobody would notice."""
    plain = load_model(num_layers=1)
    model = quire.paged(load_model(num_layers=1), num_pages=60, max_num_seqs=4, max_model_len=128, cudagraph_capture_sizes=[])
    pair = [get_peft_model(m, copy.deepcopy(ADAPTERS["lora"])) for m in (plain, model)]
    for peft in pair:
        peft.add_adapter("two", copy.deepcopy(ADAPTERS["lora"]))
        fill(peft, "default", 3)
        fill(peft, "two", 9)
    ids, names = IDS[0].tolist(), ("default", "two")
    params = quire.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    want = {}
    for name in names:
        pair[0].set_adapter(name)
        want[name] = generated(pair[0])
    assert want["default"] != want["two"]
    for switch in range(before):
        pair[1].set_adapter(names[1 - switch])
        assert generated(pair[1]) == want[names[1 - switch]]
    pair[1].set_adapter("default")
    engine, got = engine_of(pair[1]), list[int]()
    for turn, event in enumerate(engine.stream([ids], params)):
        got += event.token_ids
        if turn == 2:
            pair[1].set_adapter("two")
    assert got == want["default"] and generated(pair[1]) == want["two"]

    def switches(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 7:
            pair[1].set_adapter("default")
        return scores

    assert generated(pair[1], logits_processor=[switches]) == want["two"]  # rows that advance together
    assert generated(pair[1]) == want["default"]
    model.generate.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_life_with_adapters(kind) -> None:
    """A trainer's model and its reference policy are one model: an engine that missed a switch would sample the wrong one."""
    plain = load_model(num_layers=1)
    model = quire.paged(load_model(num_layers=1), num_pages=40, max_num_seqs=2, max_model_len=128, cudagraph_capture_sizes=[])
    base = generated(plain)
    assert generated(model) == base
    engine = model.generate.engine
    pair = [get_peft_model(m, copy.deepcopy(ADAPTERS[kind])) for m in (plain, model)]
    seen = []

    def check(step: str) -> None:
        if kind == "modules_to_save":  # it has dropout, and PEFT's new modules are in training mode
            pair[0].eval(), pair[1].eval()
        before = engine.stats().generated_tokens
        with paged_only():
            want, got = generated(pair[0]), generated(pair[1])
        assert got == want, step
        assert engine.stats().generated_tokens > before
        seen.append(want)

    for peft in pair:
        fill(peft, "default", 3)
    check("added")
    with pair[0].disable_adapter(), pair[1].disable_adapter():
        check("disabled")
    assert seen[1] == base != seen[0]
    check("enabled again")
    for peft in pair:
        peft.add_adapter("two", copy.deepcopy(ADAPTERS[kind]))
        fill(peft, "two", 9)
        peft.set_adapter("two")
    check("switched")
    for peft in pair:
        peft.set_adapter("default")
        fill(peft, "default", 5)
    check("updated in place")
    for peft in pair:
        peft.merge_adapter()
    check("merged")
    for peft in pair:
        peft.unmerge_adapter()
    check("unmerged")
    if kind == "lora":
        with pytest.warns(UserWarning, match="because each row has an adapter of its own .PEFT's adapter_names"):
            assert generated(pair[1].eval(), adapter_names=["two"]) == generated(pair[0].eval(), adapter_names=["two"])
    for peft in pair:
        peft.delete_adapter("two")
    check("another adapter deleted")
    pair = [peft.merge_and_unload() for peft in pair]
    check("merged for good")
    pair[1].generate.close()
