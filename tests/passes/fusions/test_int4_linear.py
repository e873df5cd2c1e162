"""Packed int4 weights of torchao run quire's op, where the kernel was measured; other int4 weights stay with torchao."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

from quire.attn_ops.ops.small_linear import small_linear
from quire.attn_ops.registry import get_backend
from quire.attn_ops.tuning import launch_config
from quire.passes.capture.paged_model import PagedModel
from quire.passes.fusions import quantized_linear
from quire.passes.fusions.quantized_linear import packed_int4, wanted_int4
from quire.passes.options import QuireOptions
from quire.passes.rewrite.lower import LoweringTarget
from quire.passes.verify.quantized import parts
from tests.attn_ops.int4 import packed, weights
from tests.steps import in_one_step
from tests.tiny import small_llama

pytest.importorskip("torchao")
from torchao.quantization.quantize_.workflows.int4.int4_tile_packed_to_4d_tensor import (
    Int4TilePackedTo4dTensor,
)

GROUP = 128


def quantized(weight: torch.Tensor, group: int = GROUP) -> tuple[Any, torch.Tensor]:
    """The weight in int4 as torchao packs it, which it does on GPUs only, columns padded to 1024; and what it stands for."""
    n, k = weight.shape
    wide = nn.functional.pad(weight.detach().float(), (0, -k % 1024))
    groups = wide.view(n, -1, group)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).clamp(min=1e-6).to(torch.bfloat16).float()
    zero = (low + 8 * scale).to(torch.bfloat16).float()
    codes = ((groups - zero[..., None]) / scale[..., None] + 8).round().clamp(0, 15).int().view(n, -1)
    pairs = torch.stack([scale.t(), zero.t()], -1).to(torch.bfloat16).contiguous()
    found = Int4TilePackedTo4dTensor(packed(codes), pairs, [1, group], weight.shape)
    return found, weights(codes, pairs)[:, :k].to(torch.bfloat16)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, torch.Tensor]]]:
    """As on a GPU where int4 was measured; torchao's product, which CPUs do not have, multiplies by the numbers in the list
    (weight, numbers)."""
    known: list[tuple[Any, torch.Tensor]] = []

    def product(x: torch.Tensor, codes: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
        numbers = next(n for w, n in known if w.qdata.data_ptr() == codes.data_ptr())
        return x[:, : numbers.shape[1]] @ numbers.t()

    library = torch.library.Library("aten", "IMPL")
    library.impl("_weight_int4pack_mm", product, "CPU")
    monkeypatch.setattr(quantized_linear, "wanted", lambda weight: True)
    monkeypatch.setattr(quantized_linear, "wanted_int4", lambda weight: True)
    yield known
    library._destroy()


def model_of(known: list[tuple[Any, torch.Tensor]]) -> tuple[Any, Any]:
    """A Llama with int4 layers, and the same with the numbers that they stand for."""
    options = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, std=0.05)
    model, plain = (small_llama(**options).to(torch.bfloat16) for _ in range(2))  # type: ignore[arg-type]
    for name, layer in model.model.named_modules():
        if isinstance(layer, nn.Linear):
            found, numbers = quantized(layer.weight)
            layer.weight = nn.Parameter(found, requires_grad=False)
            known.append((layer.weight, numbers))
            plain.model.get_submodule(name).weight.data = numbers
    return model, plain


def test_logits_and_fused_siblings(on_a_gpu: list[tuple[Any, torch.Tensor]]) -> None:
    """Four products a layer and not seven, the logits of the numbers that the codes stand for, and the same parameters after
    closing."""
    model, plain = model_of(on_a_gpu)
    tensors = lambda: [t for p in model.parameters() for t in parts(p)]  # noqa: E731
    before = [t.clone() for t in tensors()]
    sequences = [torch.arange(3, 3 + n) for n in (5, 9, 40)]
    paged = PagedModel(model, QuireOptions(compiler="eager", fusions="all"))
    for small in (False, True):
        lowered, _ = paged.graph.lowered(LoweringTarget(get_backend("torch_native"), 64), "all", small)
        found = [n for n in lowered.gm.graph.nodes if n.target is small_linear and _is_int4(n)]
        assert len(found) == 4 and sorted(len(n.args[8]) if len(n.args) > 8 else 0 for n in found) == [0, 0, 2, 3]
        assert sum(n.args[5] is not None for n in found) == 2 * small, "sums with the residual stream go into the kernel"
    attention = model.model.layers[0].self_attn
    held = [p.weight.scale_and_zero for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert len({t.untyped_storage().data_ptr() for t in held}) == 1 and all(t.is_contiguous() for t in held)
    assert all(torch.equal(a, b) for a, b in zip(tensors(), before, strict=True))
    for some in (sequences, sequences[:2]):
        for s, got in zip(some, in_one_step(paged, some), strict=True):
            wanted = plain(s[None]).logits[0].float()
            assert (got.float() - wanted).abs().max() <= 0.03 * wanted.abs().max()  # bf16, whose steps are 2**-8
    paged.close()
    assert all(torch.equal(a, b) for a, b in zip(tensors(), before, strict=True))
    assert len({t.untyped_storage().data_ptr() for t in tensors()}) == len(tensors())


def _is_int4(node: fx.Node) -> bool:
    return len(node.args) > 7 and node.args[1].meta["example_value"].dtype == torch.int32  # type: ignore[union-attr]


def without(what: str) -> Any:
    """A packed weight of 32 x 256, but for one thing that the kernel relies on."""
    if what == "whole tiles of columns":
        return quantized(nn.Linear(192, 32).weight)[0]
    if what == "groups of whole tiles":
        return quantized(nn.Linear(256, 32).weight, 64)[0]
    found, _ = quantized(nn.Linear(256, 32).weight)
    codes, pairs, shape = found.qdata, found.scale_and_zero, found.shape
    if what == "no scale of the activations":
        found.act_pre_scale = torch.ones(256)
        return found
    if what == "whole tiles of rows":
        pairs, shape = torch.cat([pairs, pairs[:, :4]], 1), torch.Size((36, 256))
    elif what == "eight inner tiles":
        codes, pairs = codes.reshape(codes.shape[0], -1, 32, 2), torch.cat([pairs, pairs])
    elif what == "adjacent codes":
        codes = torch.stack([codes, codes], -1)[..., 0]
    elif what == "scales in bfloat16":
        pairs = pairs.float()
    elif what == "adjacent scales":
        pairs = torch.stack([pairs, pairs], -1)[..., 0]
    elif what == "a scale per row":
        pairs = pairs[:, :8].contiguous()
    return Int4TilePackedTo4dTensor(codes, pairs, [1, GROUP], shape)


@pytest.mark.parametrize("what", [
    "whole tiles of columns", "groups of whole tiles", "whole tiles of rows", "no scale of the activations",
    "eight inner tiles", "adjacent codes", "scales in bfloat16", "adjacent scales", "a scale per row"])
def test_what_the_kernel_does_not_read_is_left_to_torchao(what: str) -> None:
    """It would compute something else, and nobody would know."""
    assert packed_int4(without("nothing")) and not packed_int4(without(what))


def test_other_tensors_are_no_packed_weights() -> None:
    found = without("nothing")
    assert not packed_int4(nn.Linear(256, 32).weight)
    found.__class__ = type("Int4TilePackedTo4dTensor", (Int4TilePackedTo4dTensor,), {"__module__": "elsewhere"})
    assert not packed_int4(found)


def test_only_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another kind of GPU torchao's kernel may be the faster one; GPUs of an H200's architecture run the same code."""
    found, _ = quantized(nn.Linear(256, 32).weight)
    monkeypatch.setattr(quantized_linear.host, "is_hopper", lambda device: False)
    monkeypatch.setattr(launch_config, "known", lambda device: {"8x64x64 int8": [1, 2, 3, 4]})
    assert not wanted_int4(found)
    monkeypatch.setattr(launch_config, "known", lambda device: {"8x64x64 int4": [1, 2, 3, 4]})
    assert wanted_int4(found)
    monkeypatch.setattr(launch_config, "known", lambda device: {})
    monkeypatch.setattr(quantized_linear.host, "is_hopper", lambda device: True)
    assert wanted_int4(found)
