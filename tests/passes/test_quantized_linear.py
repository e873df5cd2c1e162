"""Linear layers with weights quantised by rows run quire's op, in both graphs; what is quantised otherwise stays as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from attn_ops.backend import get_backend
from attn_ops.kv_cache import PagedKVCache
from attn_ops.metadata import CommonAttentionMetadata
from attn_ops.small_linear import MAX_TOKENS, small_linear
from attn_ops.step import Step
from passes import quantized_linear
from passes.capture import PagedModel
from passes.lowering import LoweringTarget
from passes.options import QuireOptions
from passes.quantized_linear import by_rows
from tests.passes.models import inputs, tiny

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


def serve(model: PagedModel, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """All sequences in one step: the logits of each."""
    lengths = [len(s) for s in sequences]
    cache = PagedKVCache.for_sites(model.sites, num_pages=1 + len(lengths), page_size=64, device="cpu")
    table = [[i + 1] for i in range(len(lengths))]
    metadata = CommonAttentionMetadata.build(lengths, lengths, table, page_size=64)
    ids = torch.cat(sequences)
    logits = model(Step(cache, metadata), ids, metadata.positions, torch.arange(len(ids)))
    return list(logits.split(lengths))


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_logits(config: str, compiler: str) -> None:
    """Those of torchao's own layers, up to the rounding of float16: it rounds before the scale too."""
    model = quantized(config)
    sequences = inputs(5, 9, 1, MAX_TOKENS + 8)
    with torch.no_grad():
        want = [model(s[None], torch.arange(len(s))[None])[0] for s in sequences]
    paged = PagedModel(model, QuireOptions(compiler=compiler, fusions="all"))
    count = sum(isinstance(m, nn.Linear) and by_rows(m.weight) for m in model.modules())
    assert count > 4 and len(ops(paged, small=False)) == len(ops(paged, small=True)) == count
    assert any(n.args[5] for n in ops(paged, small=True)), "sums with the residual stream go into the kernel"
    for some in (sequences, sequences[:3]):  # the graph for many tokens, and the one for few
        for g, w in zip(serve(paged, some), want, strict=False):
            assert (g - w).abs().max() <= 4e-3 * w.abs().max()
    paged.close()


def test_an_update_in_place_is_seen() -> None:
    model = quantized("Int8WeightOnlyConfig")
    paged = PagedModel(model, QuireOptions(compiler="inductor", fusions="all"))
    (sequence,) = inputs(5)
    before = serve(paged, [sequence])[0]
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear) and by_rows(m.weight))
    layer.weight.qdata.neg_()
    layer.weight.scale.mul_(2)
    with torch.no_grad():
        want = model(sequence[None], torch.arange(5)[None])[0]
    got = serve(paged, [sequence])[0]
    paged.close()
    assert (got - want).abs().max() <= 4e-3 * want.abs().max() < (got - before).abs().max()


def test_what_is_quantised_otherwise_is_left_alone() -> None:
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


def test_not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    paged = PagedModel(quantized("Int8WeightOnlyConfig"), QuireOptions(compiler="eager", fusions="all"))
    assert not ops(paged, small=False)
    paged.close()
