"""Bases of bitsandbytes in 4 bits, bare and with PEFT's LoRA: the tokens are transformers' own, in training mode too.

On a CPU with AVX512-BF16 bitsandbytes packs the weights at the first call in evaluation mode and computes in bfloat16 then.
Most tests run both ways where the machine has both.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("bitsandbytes", reason="pip install 'quire[integrations]'")
pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

import bitsandbytes as bnb
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import quire
from quire.graph_runner.loading import TINY_MODEL
from quire.graph_runner.own_forward import training_difference
from quire.graph_runner.weights import WeightUpdateError
from quire.passes.capture import four_bit
from quire.passes.verify.quantized import num_bytes, parts
from tests.integrations.test_peft import fill, paged_only
from tests.tiny import GREEDY, hf_greedy, prompt_ids, small_llama, tokens

pytestmark = pytest.mark.usefixtures("traces_kept")
OPTIONS: dict[str, Any] = dict(num_pages=60, max_num_seqs=8, max_model_len=128, compiler="eager", fusions="all")
NF4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4")
PACKS = bool(bnb.functional.has_avx512bf16())
IDS = [5, 6, 7, 8]


@pytest.fixture(params=["as they are", pytest.param("packed", marks=pytest.mark.skipif(
    not PACKS, reason="bitsandbytes packs weights on CPUs with AVX512-BF16 only"))])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param != "packed":
        monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: False)
    return bool(request.param == "packed")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompt_ids()


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: False)


def load(num_layers: int = 1, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any) -> Any:
    """The shipped model, quantized by transformers as it is loaded."""
    logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)  # layers that are left out
    model = AutoModelForCausalLM.from_pretrained(
        str(TINY_MODEL), dtype=dtype, num_hidden_layers=num_layers, device_map=device,
        quantization_config=BitsAndBytesConfig(**(options or NF4)))
    assert four_bit.layers(model)
    return model.eval()


def by_hand(model: Any, **options: Any) -> Any:
    """Every projection of a model in bitsandbytes' layers, which are quantized when they are moved."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                made = bnb.nn.Linear4bit(child.in_features, child.out_features, child.bias is not None, quant_type="nf4",
                                         **options)
                made.load_state_dict(child.state_dict())
                setattr(module, name, made.to("cpu"))
    return model.eval()


def with_adapter(model: Any, **options: Any) -> PeftModel:
    torch.manual_seed(1)
    peft: Any = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, p in peft.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    return peft


def generated(model: Any) -> list[int]:
    ids = torch.tensor([IDS], device=model.device)
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0, 4:].tolist()


KINDS = {
    "nf4": NF4,
    "nf4, double quantization": NF4 | dict(bnb_4bit_use_double_quant=True),
    "nf4 computed in bfloat16": NF4 | dict(bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16),
    "fp4 stored in bfloat16": dict(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_quant_storage=torch.bfloat16),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "nf4, double quantization"))
                                  for kind in KINDS])
def test_an_engine_gives_the_tokens_of_the_quantized_model(kind: str, packed: bool, prompts: list[list[int]]) -> None:
    """The engine's forward is the model's first one, and is the same as the model's own before it, and after it."""
    plain, model = load(**KINDS[kind]), load(**KINDS[kind])
    want = [hf_greedy(plain, p, GREEDY.max_tokens) for p in prompts[:4]]
    with quire.Engine(model, **OPTIONS) as engine:
        runner = engine.runner
        assert tokens(engine.generate(prompts[:4], GREEDY)) == want
        assert tokens(engine.generate(prompts[:1], GREEDY)) == want[:1]
        assert engine.runner is runner
    assert [hf_greedy(model, p, GREEDY.max_tokens) for p in prompts[:4]] == want
    assert all(four_bit.is_packed(layer) == packed for _, layer in four_bit.layers(model))


@pytest.mark.slow
def test_compiled(packed: bool, prompts: list[list[int]]) -> None:
    model = load()
    want = [hf_greedy(model, p, GREEDY.max_tokens) for p in prompts]
    with quire.Engine(model, **OPTIONS | dict(compiler="inductor")) as engine:
        assert tokens(engine.generate(prompts, GREEDY)) == want
    assert [site.layer for site in quire.explain(model).sites] == [0]


@pytest.mark.parametrize(("sizes", "options"), [
    (dict(attention_bias=True, mlp_bias=True), dict(compute_dtype=torch.bfloat16)),
    pytest.param(dict(hidden_size=40, intermediate_size=72), {}, marks=pytest.mark.slow),
    pytest.param(dict(attention_bias=True, dtype=torch.bfloat16), dict(compute_dtype=torch.float32), marks=pytest.mark.slow),
], ids=["biases, cast by the first call", "no whole blocks, dtype chosen by the first call", "half a model, whole products"])
def test_layers_made_by_hand(sizes: dict[str, Any], options: dict[str, Any], unpacked: None) -> None:
    """What the first call settles is settled before the trace; the logits are those of the model's own forward."""
    dtype = sizes.get("dtype", torch.float32)
    model = by_hand(small_llama(0.3, **{k: v for k, v in sizes.items() if k != "dtype"}).to(dtype), **options)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.quant_state = None  # as FSDP loses it; the layer has it, too
    with quire.Engine(model, **OPTIONS) as engine:
        (out,) = engine.generate([IDS], quire.SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True))
    with torch.no_grad():
        want = model(torch.tensor([[*IDS, *out.token_ids]])).logits[0, 3:-1].float().log_softmax(-1)
    got = torch.tensor([out.logprobs[i][token].logprob for i, token in enumerate(out.token_ids)])
    # The same products of the same numbers; in bfloat16 their rows may be summed in another order, in a step of 2**-8.
    halves = torch.bfloat16 in (dtype, options.get("compute_dtype"))
    assert (got - want[range(6), out.token_ids]).abs().max() < (0.05 if halves else 1e-4)
    assert layer.compute_type_is_set and layer.weight.quant_state is layer.quant_state


def test_adapters_and_training_mode(packed: bool) -> None:
    """As prepare_model_for_kbit_training and TRL leave a model. In training mode no weight is packed, which would cost its
    gradients, and in evaluation mode it is, as bitsandbytes does it; the engine is traced again then, and not before."""
    plain, model = (with_adapter(prepare_model_for_kbit_training(load())) for _ in range(2))
    plain.gradient_checkpointing_disable()  # with it, transformers' generate has no cache
    quire.paged(model, **OPTIONS)
    for mode in (True, False):
        model.train(mode), plain.train(mode)
        assert training_difference(model) is None
        with paged_only():
            assert generated(model) == generated(plain)
            runner = model.generate.engine.runner
            assert generated(model) == generated(plain) and model.generate.engine.runner is runner
        assert {four_bit.is_packed(layer) for _, layer in four_bit.layers(model)} == {packed and not mode}
        if mode:  # training goes on
            model(input_ids=torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.backward()
            assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    with paged_only(), model.disable_adapter(), plain.disable_adapter():
        base = generated(model)
        assert base == generated(plain)
    engine = model.generate.engine
    both = engine.generate([IDS] * 2, quire.SamplingParams(temperature=0, max_tokens=8), adapter=["default", "__base__"])
    assert tokens(both) == [generated(plain), base] and tokens(both)[0] != base
    assert engine.stats().generated_tokens >= 5 * 8
    model.generate.close()


@pytest.mark.parametrize("door", ["engine", pytest.param("lockstep", marks=pytest.mark.slow)])
def test_a_merge_while_requests_run(door: str, unpacked: None, caplog: pytest.LogCaptureFixture) -> None:
    """A merge quantizes the weights anew, so that tokens change: from then on they are those of the merged model, with keys
    that it has computed. It needs no trace, although the codes lie elsewhere: no CUDA graph reads them."""

    def make() -> Any:
        model = by_hand(small_llama(0.3, eos_token_id=None, hidden_size=64, intermediate_size=64))
        model.is_loaded_in_4bit = True  # for PEFT
        return with_adapter(model).eval()

    plain, model = make(), make()
    alone = hf_greedy(plain, IDS, 12)
    plain.merge_adapter()
    expected = alone[:4] + hf_greedy(plain, IDS + alone[:4], 8)
    assert expected != alone
    plain.unmerge_adapter()  # of the codes, which are not what they were
    engine = quire.paged(model, **OPTIONS | dict(enable_lora=True)).generate.engine
    if door == "engine":
        stream = engine.stream(IDS, quire.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        got = [next(stream).token_ids[0] for _ in range(4)]
        model.merge_adapter()
        got += [token for event in stream for token in event.token_ids]
    else:
        def merges(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == len(IDS) + 3:  # the fourth token is drawn of these scores
                model.merge_adapter()
            return scores
        with paged_only():
            got = hf_greedy(model, IDS, 12, logits_processor=[merges])
    assert got == expected
    model.unmerge_adapter()
    with paged_only():
        assert generated(model) == generated(plain)
    assert "tracing it again" not in caplog.text
    model.generate.close()


@pytest.mark.skipif(not PACKS, reason="bitsandbytes packs weights on CPUs with AVX512-BF16 only")
def test_weights_that_state_dict_unpacks(caplog: pytest.LogCaptureFixture) -> None:
    """Steps of the trace of packed weights would read them in the wrong order."""
    model = load(**KINDS["nf4, double quantization"])
    with quire.Engine(model, **OPTIONS) as engine:
        engine.generate([IDS], GREEDY)
        model.state_dict()
        assert not four_bit.is_packed(model.model.layers[0].mlp.up_proj)
        assert tokens(engine.generate([IDS], GREEDY)) == [hf_greedy(model, IDS, GREEDY.max_tokens)]
        assert "packing_format_for_cpu: True -> False): tracing it again" in caplog.text
    assert "gradients" not in caplog.text
    with quire.Engine(with_adapter(load()).eval(), **OPTIONS):  # which may be trained later
        assert "does not give gradients through packed weights: load the model again" in caplog.text


def test_scales_updated_in_place_reach_a_running_engine(unpacked: None) -> None:
    model = load()
    with quire.Engine(model, **OPTIONS, enable_prefix_caching=True) as engine:
        before = tokens(engine.generate([IDS * 8], GREEDY))
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.quant_state.absmax.mul_(-3)
        after = tokens(engine.generate([IDS * 8], GREEDY))
        assert after != before and after == [hf_greedy(model, IDS * 8, GREEDY.max_tokens)]
    assert [x is y for x, y in zip(parts(weight)[:2], (weight, weight.quant_state.absmax), strict=True)] == [True, True]
    assert num_bytes(weight) > weight.numel() + 4 * weight.quant_state.absmax.numel()


def test_codes_are_no_values(unpacked: None) -> None:
    """Whatever dtype the codes are stored in, nothing casts or writes them as weights."""
    model = load(**KINDS["fp4 stored in bfloat16"])
    with pytest.raises(quire.UnsupportedAttention, match=r"q_proj.weight is quantized or distributed \(Params4bit"):
        quire.Engine(model, **OPTIONS, dtype=torch.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    with quire.Engine(model, **OPTIONS) as engine:
        weight = model.get_parameter(name)
        with pytest.raises(WeightUpdateError, match=r"up_proj.weight' is quantized \(Params4bit\): its memory holds codes"):
            engine.update_weights_from_tensors({name: torch.zeros(weight.shape)})


def test_a_default_dtype_is_not_taken_for_an_old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a program with ``torch.set_default_dtype`` is told to install what it has."""
    model = load()
    for _, layer in four_bit.layers(model):
        layer.support_avx512bf16_for_cpu = True
    monkeypatch.setattr(four_bit, "_takes_rows", inspect.unwrap(four_bit._takes_rows))  # not as another test has found it
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        four_bit.check_version(model)
    finally:
        torch.set_default_dtype(before)


def test_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(quire.UnsupportedAttention, match=r"q_proj is an 8-bit layer .*LLM.int8.*load_in_4bit=True"):
        quire.Engine(AutoModelForCausalLM.from_pretrained(
            str(TINY_MODEL), num_hidden_layers=1, device_map="cpu", quantization_config=BitsAndBytesConfig(load_in_8bit=True)))
    model = load()
    for _, layer in four_bit.layers(model):
        layer.support_avx512bf16_for_cpu = True
    monkeypatch.setattr(four_bit, "_takes_rows", lambda: False)  # as in 0.49
    with pytest.raises(quire.UnsupportedAttention, match=rf"q_proj is a layer in 4 bits.*one token at a time in bitsandbytes "
                                                         rf"{bnb.__version__}.*Install bitsandbytes>=0.50"):
        quire.Engine(model, **OPTIONS)
    assert not four_bit.is_packed(model.model.layers[0].mlp.up_proj)
    monkeypatch.undo()
    if PACKS:  # whose kernel takes whole blocks only
        odd = by_hand(small_llama(hidden_size=40, intermediate_size=72))
        with pytest.raises(quire.UnsupportedAttention, match="fails before it is traced: AssertionError: N must be"):
            quire.Engine(odd, **OPTIONS)


def test_training_mode_is_read_for_packing_alone() -> None:
    class Noisy(bnb.nn.Linear4bit):  # type: ignore[misc, name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if self.training else 1)

    assert four_bit.only_packs(bnb.nn.Linear4bit.forward) and not four_bit.only_packs(Noisy.forward)
    model = small_llama()
    model.model.layers[0].mlp.up_proj = Noisy(32, 32, bias=False).to("cpu")
    assert training_difference(model.train()) == f"{Noisy.__qualname__}.forward asks whether it is in training mode"


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_grpo_on_a_qlora_model(checkpointing: bool, tmp_path: Any, packed: bool) -> None:
    """TRL with its defaults: every rollout is paged, and the adapters learn."""
    pytest.importorskip("trl", reason="pip install 'quire[integrations]'")
    from tests.integrations.test_trl import trained

    model = prepare_model_for_kbit_training(load(**KINDS["nf4, double quantization"]),
                                            use_gradient_checkpointing=checkpointing)
    trainer, calls = trained(tmp_path, base=model, lora=True, steps=3, gradient_checkpointing=checkpointing)
    assert len(calls) == 24 and trainer.model.training
    assert not any(four_bit.is_packed(layer) for _, layer in four_bit.layers(trainer.model))
    assert any(p.abs().max() > 0 for name, p in trainer.model.named_parameters() if "lora_B" in name)


@pytest.mark.slow
def test_an_adapter_added_to_an_open_engine(unpacked) -> None:
    """Its place in the trace (``max_loras``) is beside a base in 4 bits, too."""
    plain, model = (get_peft_model(load(), LoraConfig(r=4, target_modules="all-linear"), adapter_name="one").eval()
                    for _ in range(2))
    for each in (plain, model):
        fill(each, "one", 0)
    with quire.Engine(model.base_model.model, enable_lora=True, max_loras=2, **OPTIONS) as engine:
        runner = engine.runner
        for each in (plain, model):
            each.add_adapter("two", LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "down_proj"]))
            fill(each, "two", 1)
        got = tokens(engine.generate([IDS] * 2, GREEDY, adapter=["two", "one"]))
        for name, found in zip(("two", "one"), got, strict=True):
            plain.set_adapter(name)
            assert found == hf_greedy(plain.base_model.model, IDS, len(found))
        assert got[0] != got[1] and engine.runner is runner
