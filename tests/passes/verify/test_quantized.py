"""Quantized weights in the passes: where they lie, that no rows meet in them, and that fusion leaves them alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

import quire.passes.compile.inductor
from quire.attn_ops.backend import UnsupportedAttention
from quire.graph_runner.model_guard import ModelGuard
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions
from quire.passes.verify.quantized import addresses, check_rows, num_bytes, parts
from tests.passes.models import HIDDEN, VOCAB, Attention, Tiny, inputs, tiny
from tests.steps import in_one_step


class Int8(torch.Tensor):
    """A weight (N, K) as int8 with a scale a row, as quantization libraries make them. ``activations`` says what it does to its
    input first: "none", "row" or "all": round it to 127 steps of the largest number of a row or of all of it; "NaN": make all
    of it NaN for one large number; "23" and "23 when compiled": look at whether it has 23 rows; "no kernel": fail on real
    tensors."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, activations: str) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, activations: str) -> None:
        self.integers, self.scale, self.activations = data, scale, activations

    @classmethod
    def of(cls, weight: torch.Tensor, activations: str = "none") -> Any:
        scale = weight.detach().abs().amax(1) / 127
        return cls((weight.detach() / scale[:, None]).round().to(torch.int8), scale, activations)

    def __repr__(self, **kwargs: Any) -> str:
        return f"Int8({tuple(self.shape)}, {self.activations})"

    def __tensor_flatten__(self) -> Any:
        return ["integers", "scale"], self.activations

    @staticmethod
    def __tensor_unflatten__(inner: Any, activations: str, size: Any, stride: Any) -> Any:
        return Int8(inner["integers"], inner["scale"], activations)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight = args[:2]
            if weight.activations in ("row", "all"):
                step = (x.abs().amax(-1, keepdim=True) if weight.activations == "row" else x.abs().amax()) / 127
                x = (x / step).round() * step
            elif weight.activations == "NaN":
                x = torch.where(x.abs().amax() > 100, float("nan"), x)
            elif weight.activations in ("23", "23 when compiled") and (
                    weight.activations == "23" or isinstance(x, FunctionalTensor)) and x.shape[-2] == 23:
                x = x + 0
            elif weight.activations == "no kernel" and not isinstance(x, FakeTensor):
                raise RuntimeError("not implemented for 'CPU'")
            return F.linear(x, weight.integers.to(x.dtype)) * weight.scale
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            return Int8(func(args[0].integers), func(args[0].scale), args[0].activations)
        raise NotImplementedError(f"{func} would need the weight as floating-point numbers")


def quantized(activations: str = "none") -> nn.Module:
    """Tiny with every projection without bias quantized."""
    model = tiny()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is None:
            module.weight = nn.Parameter(Int8.of(module.weight, activations), requires_grad=False)
    assert isinstance(model.head.weight, Int8) and isinstance(model.layers[0].out.weight, Int8)
    return model


def test_parts_bytes_and_addresses() -> None:
    plain = torch.zeros(3, 5)
    assert parts(plain)[0] is plain and addresses(plain) == (plain.data_ptr(),) and num_bytes(plain) == 60
    weight = Int8.of(torch.randn(6, 4))
    assert weight.data_ptr() == 0  # so it says nothing
    assert parts(weight)[0] is weight.integers and len(parts(weight)) == 2
    assert addresses(weight) == (weight.integers.data_ptr(), weight.scale.data_ptr())
    assert num_bytes(weight) == 6 * 4 + 6 * 4
    nested = Int8(weight, torch.ones(6), "none")
    assert num_bytes(nested) == 6 * 4 + 2 * 6 * 4


def test_the_watch_sees_quantized_weights_move() -> None:
    model = quantized()
    watch = ModelGuard(model, addresses=True)
    assert watch.change() is None
    model.head.weight.scale.mul_(2)
    assert watch.change() is None
    model.head.weight.scale = model.head.weight.scale.clone()
    assert watch.change() == "head.weight: another tensor, or moved in memory"
    watch = ModelGuard(model, addresses=False)
    model.head.weight = nn.Parameter(torch.zeros(VOCAB, HIDDEN))
    assert watch.change().startswith("head.weight: Int8 (torch.float32, cpu, version 0) -> Parameter (torch.float32, cpu")


def test_the_watch_sees_buffers_move() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2))
    loose, strict = ModelGuard(model, addresses=False), ModelGuard(model, addresses=True)
    model.scale.mul_(2)
    assert strict.change() is None
    model.scale = torch.ones(2)
    assert strict.change() == "Linear.scale: another tensor, or moved in memory" and loose.change() is None


@pytest.mark.parametrize(("activations", "compiler"), [
    ("none", "eager"), ("row", "eager"), *(pytest.param(a, "inductor", marks=pytest.mark.slow) for a in ("none", "row"))])
def test_paged_logits_are_those_of_plain_forwards(activations: str, compiler: str) -> None:
    """And a token's logits do not depend on what is beside it."""
    model = quantized(activations)
    weights = {n: (id(p), type(p)) for n, p in model.named_parameters()}
    sequences = inputs(5, 9, 1)
    with torch.no_grad():
        want = [model(s[None], torch.arange(len(s))[None])[0] for s in sequences]
    model_of_steps = PagedModel(model, QuireOptions(compiler=compiler, fusions="all"))
    assert not model_of_steps.weights.parameters
    got = in_one_step(model_of_steps, sequences)
    model_of_steps.close()
    for g, w in zip(got, want, strict=True):
        assert (g - w).abs().max() <= 1e-5 * w.abs().max()
    assert {n: (id(p), type(p)) for n, p in model.named_parameters()} == weights


@pytest.mark.parametrize("activations", ["all", "NaN"])
def test_activations_scaled_all_together_are_refused(activations: str) -> None:
    with pytest.raises(UnsupportedAttention, match=r"layers.0.out mixes the tokens of the batch outside attention: its weight "
                                                   r"\(Int8\) quantizes the activations of all tokens by one scale"):
        PagedModel(quantized(activations), QuireOptions(compiler="eager"))


def test_kernels_for_four_bits_are_tried_out() -> None:
    """A version of bitsandbytes whose product quantizes the activations, all by one scale."""
    pytest.importorskip("bitsandbytes", reason="pip install 'quire[integrations]'")
    own = torch.ops.bitsandbytes.gemm_4bit.default
    real = {"codes": torch.randint(0, 255, (32, 1), dtype=torch.uint8), "scale": torch.ones(1)}

    class Product:
        _schema = own._schema
        __name__, __module__, __qualname__ = "gemm_4bit", "bitsandbytes", "gemm_4bit"

        def __init__(self, mixes: bool) -> None:
            self.mixes = mixes

        def __str__(self) -> str:
            return "bitsandbytes.gemm_4bit.default"

        def __call__(self, A: torch.Tensor, **given: Any) -> torch.Tensor:
            step = A.abs().max() / 127
            return own(A=(A / step).round() * step if self.mixes else A, **given)

    for mixes in (False, True):
        graph = torch.fx.Graph()
        x, *weights = (graph.placeholder(name) for name in ("x", *real))
        x.meta["example_value"] = torch.zeros(1, 9, 8)
        codes = graph.call_method("view", (weights[0], -1, 1))
        graph.call_function(Product(mixes), (x, codes, [8, 8], weights[1], 64, "nf4"))
        tensors = dict(zip(weights, real.values(), strict=True))
        if mixes:
            with pytest.raises(UnsupportedAttention, match="bitsandbytes.gemm_4bit.default. quantizes the activations of all"):
                check_rows(graph, tensors)
        else:
            check_rows(graph, tensors)


def test_a_weight_that_cannot_be_multiplied_is_named() -> None:
    with pytest.raises(UnsupportedAttention, match=r"layers.0.out: its quantized weight \(Int8\) cannot be multiplied on cpu: "
                                                   r"RuntimeError: not implemented for 'CPU'"):
        PagedModel(quantized("no kernel"), QuireOptions(compiler="eager"))


def test_a_layer_that_settles_the_number_of_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedAttention, match="an operation takes the length of the row as a plain number"):
        PagedModel(quantized("23"), QuireOptions(compiler="eager"))


@pytest.mark.slow
def test_a_layer_that_settles_it_when_it_is_compiled_is_refused() -> None:
    """By Inductor, which runs the layer's own code; tests/passes/compile/test_size_guards.py has a compiler that does it."""
    model = quantized("23 when compiled")
    with pytest.raises(UnsupportedAttention, match="compiling the model settled a size that changes from batch to batch"):
        PagedModel(model, QuireOptions(page_size=4, attention="torch_native"))
    eager = PagedModel(model, QuireOptions(compiler="eager"))
    assert torch.isfinite(torch.cat(in_one_step(eager, inputs(5, 9, 1)))).all()
    eager.close()


def test_layers_quantized_differently_share_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a graph are equal only if their weights wrap the same: three layers each of two schemes."""
    compiled: list[Any] = []
    monkeypatch.setattr(quire.passes.compile.inductor, "inductor", lambda gm, fakes: compiled.append(gm) or gm.forward)

    def pieces(*schemes: str | None) -> int:
        torch._dynamo.reset()
        compiled.clear()
        model = Tiny(*(Attention(4, 2, is_causal=True) for _ in schemes)).eval()
        for layer, scheme in zip(model.layers, schemes, strict=True):
            for linear in (layer.qkv, layer.out) if scheme else ():
                linear.weight = nn.Parameter(Int8.of(linear.weight, scheme), requires_grad=False)
        PagedModel(model, QuireOptions(page_size=4, attention="torch_native")).close()
        return len(compiled)

    assert pieces("none", "none", "none", "none", "none", "none") == 3
    # Up to the first attention; "none" to "none"; "none" to "row"; "row" to "row"; the last.
    assert pieces("none", "none", "none", "row", "row", "row") == 5
    assert pieces("none", "none", "none", None, None, None) == 5
