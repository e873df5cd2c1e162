"""The fusion of a linear layer with its adapters: what becomes one op, what folds into it, and that the numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quire.attn_ops.ops.lora_counters import lora_counters
from quire.attn_ops.ops.lora_linear import lora_linear
from quire.attn_ops.ops.lora_rows import lora_group, lora_rows
from quire.passes.fusions.base import FusedWeights
from quire.passes.fusions.lora_group import group_lora
from quire.passes.fusions.lora_linear import fuse_lora_linear
from quire.passes.fusions.projections import fuse_projections
from quire.passes.fusions.registry import apply_fusions
from quire.passes.fusions.small_linear import fuse_small_linear
from quire.passes.fx import LINEAR, copy_graph, is_function, schema_arguments
from tests.passes.fusions.test_lora_group import KINDS, OWN, WIDTH, Adapted, Chosen, layer, rewritten
from tests.passes.models import RMSNorm, capture


class Layer(nn.Module):
    """Half a decoder layer: q and k with a norm, gate and up with another and SwiGLU, down with the residual."""

    def __init__(self, kind: type[Adapted], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(RMSNorm(WIDTH, torch.bfloat16) for _ in range(2))
        self.q, self.k = kind(48, 2.0, **options), kind(16, 0.5, **options)
        self.gate, self.up, self.down = (kind(WIDTH, s, **options) for s in (1.0, 0.5, 0.3))
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k = self.q(y), self.k(y)
        x = x + nn.functional.pad(q[..., :16] * k, (0, 16))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def bare_product_read(m: Layer, x: torch.Tensor) -> torch.Tensor:
    bare = nn.Linear.forward(m.q, x)
    return adapted(m.q, bare, x) + bare


def part_of_the_bare_product_read(m: Layer, x: torch.Tensor) -> torch.Tensor:  # by another split
    bare = nn.Linear.forward(m.q, x)
    return adapted(m.k, torch.split(bare, [16, 32], -1)[0], x) + torch.split(bare, [16, 16, 16], -1)[0]


def input_changed(m: Layer, x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    bare = nn.Linear.forward(m.q, x)
    x.mul_(2)
    return adapted(m.q, bare, x)


def another_input(m: Layer, x: torch.Tensor) -> torch.Tensor:
    return adapted(m.q, nn.Linear.forward(m.q, x), x + 1)


def made_adapter(m: Layer, x: torch.Tensor) -> torch.Tensor:
    """An adapter that the graph computes is not there where the product is."""
    return lora_rows(nn.Linear.forward(m.q, x), x, [m.q.a[0].weight * 2], [m.q.b[0].weight], [1.0], [1])


def adapted(layer: Adapted, bare: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return lora_rows(bare, x, [layer.a[0].weight], [layer.b[0].weight], [1.0], [1])


def fused(model: nn.Module) -> tuple[int, list[dict], int, torch.Tensor, torch.Tensor]:
    """Matches, the arguments of the ops made, other products left, the graph's result, and the model's."""
    (*_, matches, _), graph, out, want = rewritten(model, fuse_projections, group_lora, fuse_lora_linear, fuse_small_linear)
    made = [schema_arguments(n) for n in graph.nodes if is_function(n, (lora_linear,))]
    return matches, made, sum(is_function(n, (lora_group, lora_rows, *LINEAR)) for n in graph.nodes), out, want


@pytest.mark.parametrize(("kind", "own"), KINDS, ids=str)
def test_layers_keep_what_folds_into_them(kind, own) -> None:
    """With adapters, in PEFT's float32 or the model's dtype, a layer is still one launch, its norm, SwiGLU and residual
    included."""
    matches, made, left, got, want = fused(Layer(kind, own=own))
    names = len(own)
    assert matches == 3 and left == 0
    qk, gate_up, down = made
    assert qk["norm_weight"] is not None and not qk["swiglu"] and sorted(qk["starts"]) == sorted([0, 48] * names)
    assert gate_up["norm_weight"] is not None and gate_up["swiglu"] and sorted(gate_up["starts"]) == sorted([0, WIDTH] * names)
    assert down["residual"] is not None and down["starts"] == [0] * names
    assert {is_function(given["counters"], (lora_counters,)) for given in made} == {True}
    assert len({given["counters"] for given in made}) == 1  # zeroed once per forward
    # One rounding where the layer has several: of results up to ``want``, and of what SwiGLU makes of them.
    torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 2**-6)


@pytest.mark.parametrize("own", OWN, ids=str)
def test_graphs_for_small_and_for_large_batches_have_the_same_weights(own) -> None:
    """A layer's weight is fused with its siblings', and with no adapter's, whatever graph is made first: the other one would
    find its parameters moved."""
    model, x = Layer(Adapted, own=own), torch.randn(1, 3, WIDTH).bfloat16()
    torch._dynamo.mark_dynamic(x, 1)
    gm, inputs = capture(model, x)
    want = {tuple(map(id, (first.weight, second.weight))) for first, second in ((model.q, model.k), (model.gate, model.up))}
    weights = FusedWeights()
    for small in (True, False, True):
        graph = copy_graph(gm)
        apply_fusions(graph, inputs, "all", weights, small)
        assert set(weights.fused) == want
        found = [n for n in graph.graph.nodes if is_function(n, (lora_linear, lora_group))]
        assert [n.target for n in found] == [lora_linear] * 3, "one op for layers with one input"
        made = [schema_arguments(n) for n in found]
        assert all(given["counters"] is not None for given in made)
        assert [(given["norm_weight"] is not None, given["swiglu"], given["residual"] is not None) for given in made] == [
            (True, False, False), (True, True, False), (False, False, True)]
    weights.restore()


@pytest.mark.parametrize("forward", [
    bare_product_read, part_of_the_bare_product_read, input_changed, another_input, made_adapter], ids=lambda f: f.__name__)
def test_what_is_left_alone(forward) -> None:
    matches, made, left, got, want = fused(layer(forward, Layer, kind=Chosen))
    assert (matches, made, left) == (0, [], 1)
    torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 2**-7)
