"""Linear layers with weights quantized per row run quire's op, in both graphs; other quantized weights stay as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from quire.attn_ops.ops.small_linear import MAX_TOKENS, small_linear
from quire.attn_ops.registry import get_backend
from quire.passes.capture.paged_model import PagedModel
from quire.passes.fusions import quantized_linear
from quire.passes.fusions.quantized_linear import by_rows
from quire.passes.options import QuireOptions
from quire.passes.rewrite.lower import LoweringTarget
from quire.passes.verify.quantized import parts
from tests.passes.models import Tiny, inputs, tiny
from tests.steps import in_one_step
from tests.tiny import load_model

torchao = pytest.importorskip("torchao.quantization")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "wanted", lambda weight: True)


def quantized(config: str, dtype: torch.dtype = torch.float16, **options: Any) -> nn.Module:
    model = tiny().to(dtype)
    torchao.quantize_(model, getattr(torchao, config)(set_inductor_config=False, **options))
    return model


def ops(paged: PagedModel, small: bool) -> list[fx.Node]:
    """The op in the lowered graph, with scales."""
    lowered, _ = paged.graph.lowered(LoweringTarget(get_backend("torch_native"), 64), "all", small)
    return [n for n in lowered.gm.graph.nodes if n.target is small_linear and len(n.args) == 8]


def close(model: nn.Module, paged: PagedModel, sequences: list[torch.Tensor]) -> None:
    """The logits are the model's own, up to rounding in float16."""
    for s, got in zip(sequences, in_one_step(paged, sequences), strict=True):
        with torch.no_grad():
            out = model(s[None], torch.arange(len(s))[None]) if isinstance(model, Tiny) else model(s[None]).logits
        assert (got - out[0]).abs().max() <= 4e-3 * out[0].abs().max()


@pytest.mark.parametrize("config, compiler", [
    ("Int8WeightOnlyConfig", "eager"), ("Float8WeightOnlyConfig", "eager"),
    *(pytest.param(c, "inductor", marks=pytest.mark.slow) for c in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig"))])
def test_logits(config: str, compiler: str) -> None:
    """Those of torchao's own layers, up to the rounding of float16 (it rounds before the scale too); also after an update."""
    model = quantized(config)
    sequences = inputs(5, 9, 1, MAX_TOKENS + 8)
    paged = PagedModel(model, QuireOptions(compiler=compiler, fusions="all"))
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and by_rows(m.weight)]
    assert len(layers) > 4 and len(ops(paged, small=False)) == len(ops(paged, small=True)) == len(layers)
    assert any(n.args[5] for n in ops(paged, small=True)), "sums with the residual stream go into the kernel"
    for some in (sequences, sequences[:3]):  # the graph for many tokens, and the one for few
        close(model, paged, some)
    before = in_one_step(paged, sequences[:1])[0]
    layers[0].weight.qdata.copy_(-layers[0].weight.qdata.float())
    layers[0].weight.scale.mul_(2)
    close(model, paged, sequences[:1])
    assert (in_one_step(paged, sequences[:1])[0] - before).abs().max() > 4e-3 * before.abs().max()
    paged.close()


def test_weights_with_a_scale_of_the_activations_are_left_to_torchao() -> None:
    """As AWQ and SmoothQuant leave them: the kernel would leave the scale out."""
    model = quantized("Int8WeightOnlyConfig")
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear) and by_rows(m.weight))
    layer.weight.act_pre_scale = torch.rand(layer.weight.shape[1], dtype=layer.weight.dtype) + 0.5
    assert not by_rows(layer.weight)
    paged = PagedModel(model, QuireOptions(compiler="eager", fusions="all"))
    close(model, paged, inputs(5, 9))
    paged.close()


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", pytest.param("Float8WeightOnlyConfig", marks=pytest.mark.slow)])
def test_siblings_are_one_layer_and_stored_once(config: str) -> None:
    """q/k/v, and gate/up with SwiGLU: their codes and their scales become views, and memory of their own at the end."""
    model = load_model(dtype=torch.float16, num_layers=3)
    torchao.quantize_(model, getattr(torchao, config)(set_inductor_config=False))
    layers, tensors = model.model.layers, lambda: [t for p in model.parameters() for t in parts(p)]
    before, objects = [t.clone() for t in tensors()], [id(p) for p in model.parameters()]
    sequences = [torch.arange(3, 3 + n) for n in (5, 9)]
    paged = PagedModel(model, QuireOptions(compiler="eager", fusions="all"))
    for small in (False, True):
        found = ops(paged, small)
        assert len(found) == 4 * len(layers) + 1 and sum(bool(n.args[6]) for n in found) == len(layers) * small
    for block in layers:
        attention, mlp = block.self_attn, block.mlp
        for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            for kind in ("qdata", "scale"):
                views = [getattr(m.weight, kind) for m in group]
                storage = views[0].untyped_storage()
                assert {v.untyped_storage().data_ptr() for v in views} == {storage.data_ptr()}
                assert storage.nbytes() == sum(v.nbytes for v in views)
    assert all(torch.equal(a, b) for a, b in zip(tensors(), before, strict=True))

    close(model, paged, sequences)
    layers[0].self_attn.v_proj.weight.scale.mul_(1.5)
    layers[1].mlp.up_proj.weight.qdata.copy_(-layers[1].mlp.up_proj.weight.qdata.float())
    close(model, paged, sequences)
    torchao_weight = layers[2].mlp.gate_proj.weight
    layers[2].mlp.gate_proj.weight = nn.Parameter(copy.deepcopy(torchao_weight), requires_grad=False)  # no view any more
    layers[2].mlp.gate_proj.weight.scale.mul_(0.5)
    close(model, paged, sequences)
    layers[2].mlp.gate_proj.weight = torchao_weight
    changed = [t.clone() for t in tensors()]
    paged.close()
    assert [id(p) for p in model.parameters()] == objects
    assert all(torch.equal(a, b) for a, b in zip(tensors(), changed, strict=True))
    assert len({t.untyped_storage().data_ptr() for t in tensors()}) == len(tensors())


def test_what_is_quantized_otherwise_is_left_alone() -> None:
    linear = lambda: nn.Linear(64, 32).to(torch.bfloat16)  # noqa: E731
    for config, kept in (("Int8WeightOnlyConfig", False), ("Float8WeightOnlyConfig", False),
                         ("Int8DynamicActivationInt8WeightConfig", True), ("IntxWeightOnlyConfig", True)):
        layer = nn.Sequential(linear())
        options = dict(weight_dtype=torch.int4) if config.startswith("Intx") else dict(set_inductor_config=False)
        torchao.quantize_(layer, getattr(torchao, config)(**options))
        assert by_rows(layer[0].weight) != kept, config
    shifted = nn.Sequential(linear())
    torchao.quantize_(shifted, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    changed = copy.deepcopy(shifted)[0].weight
    changed.zero_point[3] = 1
    assert by_rows(shifted[0].weight) and not by_rows(changed) and not by_rows(linear().weight)
    wide = nn.Sequential(nn.Linear(64, 32))
    torchao.quantize_(wide, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    assert not by_rows(wide[0].weight)  # float32: the kernels are for half of it


@pytest.mark.parametrize("what", ["scales of groups", "codes by columns", "scales in bfloat16", "codes of two bytes"])
def test_codes_and_scales_of_other_forms_are_left_to_torchao(what: str) -> None:
    """The kernels would read other numbers."""
    layer = nn.Sequential(nn.Linear(64, 32).to(torch.bfloat16))
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    weight = layer[0].weight
    assert by_rows(weight)
    if what == "scales of groups":
        weight.scale = weight.scale.expand(32, 2).contiguous()
    elif what == "codes by columns":
        weight.qdata = weight.qdata.t().contiguous().t()
    elif what == "scales in bfloat16":
        weight.scale = weight.scale.to(torch.bfloat16)
    else:
        weight.qdata = weight.qdata.short()
    assert not by_rows(weight)


def test_not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    paged = PagedModel(quantized("Int8WeightOnlyConfig"), QuireOptions(compiler="eager", fusions="all"))
    assert not ops(paged, small=False)
    paged.close()
