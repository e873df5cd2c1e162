"""The trial batch: it sees any way by which tokens of one sequence reach another, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.masking_utils import find_packed_sequence_indices
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

import quire.passes.pipeline
from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.registry import get_backend
from quire.graph_runner.engine import Engine
from quire.graph_runner.packing_check import check_packing
from quire.passes.capture.evaluating import ChangedWhileTraced
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions
from tests.adversarial import harness
from tests.adversarial.harness import VOCAB, WIDTH
from tests.tiny import small_llama

Mix = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MIXES: dict[str, Mix] = {
    # RWKV's: half of each token comes from the one before.
    "shift": lambda x, positions: torch.cat([x[..., : WIDTH // 2], F.pad(x, (0, 0, 1, -1))[..., WIDTH // 2 :]], dim=-1),
    "centre": lambda x, positions: x - x.mean(1, keepdim=True),
    "ahead": lambda x, positions: x + F.pad(x, (0, 0, -1, 1)),  # looks at the token after
    "unfolded": lambda x, positions: F.pad(x, (0, 0, 1, 0)).unfold(1, 2, 1).mean(-1),  # a window of two tokens
    "counted": lambda x, positions: x + torch.ones_like(x).cumsum(1).sin(),  # positions counted from the start of the row
    "gated": lambda x, positions: x + 1e-2 * x.mean(1, keepdim=True),  # faint
    # Only where many tokens have large numbers, and where more of them have than tokens at random.
    "rare": lambda x, positions: x * torch.where((x.abs().amax(-1) > 3.5).sum() >= 5, 2.0, 1.0),
    "rarer": lambda x, positions: x * torch.where((x.abs().amax(-1) > 3.5).sum() >= 8, 2.0, 1.0),
    "compiled only": lambda x, positions: x if torch.compiler.is_compiling() else x.tanh(),  # another forward when it is traced
    "fourier": lambda x, positions: torch.fft.fft(x, dim=1).real,
    "innocent": lambda x, positions: F.layer_norm(x, (WIDTH,)).roll(1, dims=-1),
}


class Model(harness.Model):
    """``mix(x, positions)`` behind one layer of attention, and ``after(logits)``."""

    def __init__(self, mix, dtype: torch.dtype = torch.float32, after=None) -> None:
        super().__init__(lambda model, x, positions: mix(x, positions))
        self.after = after
        self.to(dtype)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input_ids, position_ids)
        return logits if self.after is None else self.after(logits)


def try_packing(paged: PagedModel, **options) -> None:
    given = dict(page_size=4, kv_dtype=None, layout="NHD", device=torch.device("cpu"), vocab_size=VOCAB, max_model_len=64)
    check_packing(paged, paged.sites, get_backend("torch_native"), **{**given, **options})


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch):
    """The trial of a model whose graph was not searched for operations that mix tokens."""
    for check in ("check_tokens", "check_positions"):
        monkeypatch.setattr(quire.passes.pipeline, check, lambda *args: None)

    def run(mix, dtype: torch.dtype = torch.float32, after=None, **options) -> None:
        torch._dynamo.reset()
        try_packing(PagedModel(Model(mix, dtype, after), QuireOptions(compiler="eager")), **options)

    return run


@pytest.mark.parametrize("mix, dtype", [
    *((mix, torch.float32) for mix in ("centre", "ahead", "unfolded", "gated", "rare", "fourier")),
    *((mix, torch.bfloat16) for mix in ("shift", "gated", "rare"))])
def test_leaks_are_found(mix, dtype, trial) -> None:
    with pytest.raises(UnsupportedAttention, match="a trial batch of two short sequences"):
        trial(MIXES[mix], dtype)


def ahead_at_the_start(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # never into the next sequence
    return x + F.pad(x, (0, 0, -1, 1)) * (positions < 3)[..., None]


@pytest.mark.parametrize("mix, dtype, what", [
    (MIXES["shift"], torch.float32, "its neighbour in the batch"),
    (MIXES["counted"], torch.float32, "its place in the batch"),
    (ahead_at_the_start, torch.float32, "tokens after it"),
    (MIXES["rarer"], torch.float32, "its neighbour in the batch"),  # only a sequence of large numbers shows it
    # Far below what rounding to bfloat16 does to logits between batches of other shapes.
    (lambda x, positions: x + 2e-2 * F.pad(x, (0, 0, -1, 1)) * (positions < 3)[..., None], torch.bfloat16, "tokens after it"),
    # Equal kernels on equal shapes give equal bits, so that a neighbour is not allowed what the order of summation does.
    (lambda x, positions: x + 3e-6 * x.mean(1, keepdim=True), torch.bfloat16, "its neighbour in the batch"),
], ids=["neighbour", "place", "ahead", "rarer", "faintly_ahead", "below_float32_rounding"])
def test_what_kind(mix, dtype, what, trial) -> None:
    with pytest.raises(UnsupportedAttention, match=f"depend on {what}: they change by"):
        trial(mix, dtype)


def counted_faintly(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return x + 1e-3 * torch.ones_like(x).cumsum(1).sin()


def routed(x: torch.Tensor) -> torch.Tensor:
    """Rows by expert and back, so that the order of sums may depend on other rows."""
    order = (x[0] @ x.new_ones(WIDTH, 4)).argmax(-1).argsort()
    return torch.zeros_like(x[0]).index_add(0, order, x[0, order])[None]


def routed_and_gated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return routed(x) + 1e-3 * x.mean(1, keepdim=True)


def routed_and_rare(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # 1.002 is 1 in bfloat16
    return routed(x) * torch.where((x.abs().amax(-1) > 3.5).sum() >= 8, 1.002, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mix", [counted_faintly, routed_and_gated, routed_and_rare])
def test_leaks_below_rounding(mix, dtype, trial) -> None:
    """A thousandth of a number in half precision is its rounding: they are found in float32."""
    with pytest.raises(UnsupportedAttention, match="a trial batch of two short sequences|other logits paged than by"):
        trial(mix, dtype)


@pytest.mark.parametrize("mix, ok", [("innocent", True), ("shift", False)])
def test_infinite_logits(mix, ok, trial) -> None:
    """Vocabulary that a model masks hides nothing."""
    after = lambda logits: logits.masked_fill(torch.arange(VOCAB) % 7 == 0, float("-inf"))  # noqa: E731
    with nullcontext() if ok else pytest.raises(UnsupportedAttention, match="a trial batch of two short sequences"):
        trial(MIXES[mix], after=after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", [MIXES["innocent"], lambda x, positions: routed(F.layer_norm(x, (WIDTH,)))],
                         ids=["plain", "experts"])
def test_nothing_is_found_where_nothing_is(mix, dtype, trial) -> None:
    trial(mix, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_forward_when_compiled(dtype, trial) -> None:
    """What is served must be what the model's own forward gives."""
    with pytest.raises(UnsupportedAttention, match="other logits paged than by the model's own forward"):
        trial(MIXES["compiled only"], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_path_for_one_token(dtype, trial) -> None:
    """No trace shows a branch on a length of 1, and a prompt may be one token."""
    with pytest.raises(UnsupportedAttention, match="something else for a row of one token"):
        trial(lambda x, positions: x * 2 if x.shape[1] == 1 else x, dtype)
    trial(lambda x, positions: x.contiguous() if x.shape[1] == 1 else x, dtype)


@pytest.mark.parametrize("backend", ["mkldnn", "cuda"])
def test_products_of_one_backend_in_tf32(backend, trial) -> None:
    """torch.get_float32_matmul_precision() raises an error then, and no engine would start. The trial does without TF32."""
    products = getattr(torch.backends, backend).matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        trial(MIXES["innocent"])
        with pytest.raises(UnsupportedAttention, match="other logits paged than by the model's own forward"):
            trial(MIXES["compiled only"])
        assert products.fp32_precision == "tf32"
    finally:
        products.fp32_precision = before


@pytest.mark.parametrize("options", [dict(max_model_len=2), dict(vocab_size=1)])
def test_too_short_to_tell(options, trial, caplog) -> None:
    with caplog.at_level(logging.INFO, "quire.graph_runner.packing_check"):
        trial(MIXES["shift"], **options)
    assert "left out" in caplog.text


def test_logits_that_depend_on_nothing(trial, caplog) -> None:
    with caplog.at_level(logging.INFO, "quire.graph_runner.packing_check"):
        trial(lambda x, positions: x * 0)
    assert "the trial batch tells nothing" in caplog.text


class Counting(Model):
    """Its own positions begin at ``first``; ``needed``: it has none."""

    def __init__(self, first: int, needed: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(MIXES["innocent"], dtype)
        self.first, self.needed = first, needed

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:
            if self.needed:
                raise TypeError("position_ids please")
            position_ids = torch.arange(self.first, self.first + input_ids.shape[1])[None]
        return super().forward(input_ids, position_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "needed", "refused"), [(0, False, False), (2, False, True), (2, True, False)])
def test_positions_of_its_own(first: int, needed: bool, refused: bool, dtype: torch.dtype) -> None:
    """What quire gives a model must be what the model means when nothing is given."""
    model = Counting(first, needed, dtype).train()
    paged = PagedModel(model, QuireOptions(compiler="eager"))
    with pytest.raises(UnsupportedAttention, match="counts positions in a way of its own") if refused else nullcontext():
        try_packing(paged)
    assert model.training and model.attention.training


@pytest.mark.parametrize("call", [1, 2])
def test_training_set_meanwhile_is_no_excuse(call: int, monkeypatch) -> None:
    """Another thread's ``model.train()`` spoils a forward of the check: the model is traced again, not served unchecked."""
    paged = PagedModel(Counting(2), QuireOptions(compiler="eager"))
    calls, by_itself = [], paged.by_itself

    def spoiled(*args):
        calls.append(args)
        if len(calls) == call:
            raise ChangedWhileTraced("training: False -> True, by another thread")
        return by_itself(*args)

    monkeypatch.setattr(paged, "by_itself", spoiled)
    with pytest.raises(ChangedWhileTraced):
        try_packing(paged)


class Near(LlamaDecoderLayer):
    """Sees the last 20 tokens only, where it gets a mask; ``always``: without one too."""

    always = False

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        place = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        back = place[:, None] - place
        if attention_mask is not None:
            attention_mask = attention_mask & (back < 20)
        elif self.always:
            attention_mask = ((back >= 0) & (back < 20))[None, None]
        return super(type(self), self).forward(hidden_states, attention_mask=attention_mask, **kwargs)


class NearOfMistral(MistralDecoderLayer):
    forward = Near.forward
    always = False


class Inside(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("always, length, refused", [(False, 64, True), (True, 64, False), (False, 20, False)],
                         ids=["where there is a mask", "always", "too short to matter"])
def test_a_window_that_is_there_only_in_a_trace(always: bool, length: int, refused: bool, dtype, monkeypatch) -> None:
    """transformers makes no mask for a plain causal sequence, but where it is traced, so that layers that change it compute
    something else there. Short sequences do not show it."""
    monkeypatch.setattr(Near, "always", always)
    model = small_llama(0.3).to(dtype)
    for layer in model.model.layers:
        layer.__class__ = Near
    with pytest.raises(UnsupportedAttention, match="longer than the window of 20") if refused else nullcontext():
        Engine(Inside(model).eval(), num_pages=16, max_model_len=length, compiler="eager").close()


def near(model: torch.nn.Module, layers: slice, layer: type) -> Inside:
    for each in model.model.layers[layers]:
        each.__class__ = layer
    return Inside(model).eval()


@pytest.mark.parametrize("window", [40, 100, 5000])
def test_each_window_is_tried(window: int) -> None:
    """Also one below a larger one, which is longer than any sequence, or than those that are tried."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        max_position_embeddings=8192, sliding_window=window)).eval()
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.3)
    with pytest.raises(UnsupportedAttention, match="longer than the window of 20"):
        Engine(near(model, slice(1), NearOfMistral), num_pages=16, max_model_len=64, compiler="eager")


def test_windows_of_a_model_with_adapters_for_each_token() -> None:
    peft = pytest.importorskip("peft")
    model = small_llama(0.3)
    wrapped = near(model, slice(None), Near)
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(UnsupportedAttention, match="longer than the window of 20"):
        Engine(wrapped, num_pages=16, max_model_len=64, compiler="eager", enable_lora=True)


def test_windows_of_a_model_with_quantized_activations() -> None:
    """A last bit moves an activation by a whole step: no reason to refuse a model with a hook of the user's."""
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, sliding_window=64)).eval().bfloat16()
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    model.model.norm.register_forward_hook(lambda module, args, output: output * 2)
    Engine(model, num_pages=16, max_model_len=128, compiler="eager").close()


class Makes(LlamaForCausalLM):
    """Makes a mask of a window of 40 where ``wanted``."""

    wanted = staticmethod(lambda position_ids: True)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        back = position_ids[:, :, None] - position_ids[:, None]
        window = 40 if self.wanted(position_ids) else 1000
        mask = torch.where((back >= 0) & (back < window), 0.0, torch.finfo(torch.float32).min)[:, None]
        return super().forward(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, **kwargs)


@pytest.mark.parametrize("wanted, why", [
    (lambda position_ids: True, "where it has a KV cache"),
    (lambda position_ids: find_packed_sequence_indices(position_ids) is None, "a trial sequence of 64 tokens"),
], ids=["not with a cache", "not in a trace"])
def test_a_mask_that_short_sequences_do_not_show(wanted: Callable, why: str, monkeypatch) -> None:
    """With a cache, the mask of one query is one number and hides nothing; in a trace transformers answers otherwise."""
    monkeypatch.setattr(Makes, "wanted", staticmethod(wanted))
    model = small_llama(0.3)
    model.__class__ = Makes
    with pytest.raises(UnsupportedAttention, match=why):
        Engine(model, num_pages=16, max_model_len=64, compiler="eager")
