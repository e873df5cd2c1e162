"""The fusion of LoRA's layers with one input: what becomes one op, what must not, and that the numbers stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import quire
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.ops.lora_rows import MAX_RANK, lora_group, lora_rows
from quire.attn_ops.step import Step, running
from quire.passes.backend import QuireBackend
from quire.passes.fusions.base import Fusion
from quire.passes.fusions.lora_group import group_lora
from quire.passes.fusions.projections import fuse_projections
from quire.passes.fx import LINEAR, copy_graph, is_function
from quire.passes.options import QuireOptions

WIDTH, RANK, TOKENS = 32, 4, 3


class Adapted(nn.Linear):
    """A layer as PEFT computes it, with an active adapter in each dtype of ``own``."""

    def __init__(self, columns: int, scaling: float, own: tuple[torch.dtype, ...] = (torch.float32,), rank: int = RANK,
                 bias: bool = False) -> None:
        super().__init__(WIDTH, columns, bias=bias, dtype=torch.bfloat16)
        self.a = nn.ModuleList(nn.Linear(WIDTH, rank, bias=False, dtype=dtype) for dtype in own)
        self.b = nn.ModuleList(nn.Linear(rank, columns, bias=False, dtype=dtype) for dtype in own)
        self.drop, self.scaling = nn.Dropout(0.1), scaling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        for a, b in zip(self.a, self.b, strict=True):
            x = x if x.dtype == a.weight.dtype else x.to(a.weight.dtype)
            result = result + b(a(self.drop(x))) * self.scaling
        return result.to(torch.bfloat16)


class Chosen(Adapted):
    """As quire traces it where each token has adapters of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [[m.weight for m in of] for of in (self.a, self.b)]
        return lora_rows(nn.Linear.forward(self, x), x, *weights, [self.scaling] * len(self.a),
                         [1 << i for i in range(len(self.a))])


class Layer(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module] = Adapted, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = kind(48, 2.0, **options), kind(16, 0.5, **options), kind(16, 1.0, **options)
        self.o = kind(WIDTH, 0.3, **options)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return x + self.o(torch.nn.functional.pad(k * v, (0, 16)) + q[..., :32]).to(x.dtype)


def rewritten(model: nn.Module, *passes: Callable[[Fusion], int]) -> tuple[list[int], fx.Graph, torch.Tensor, torch.Tensor]:
    """What each pass returns, the graph after them, its result, and the model's, in a step whose tokens have adapters."""
    x = torch.randn(1, TOKENS, WIDTH).bfloat16()
    backend = QuireBackend(QuireOptions(compiler="eager"))
    torch._dynamo.mark_dynamic(x, 1)
    cache = PagedKVCache(num_layers=1, num_pages=2, page_size=4, num_kv_heads=1, head_dim=4, dtype=torch.float32, device="cpu")
    step = Step(cache, quire.CommonAttentionMetadata.build([1], [1], [[1]], page_size=4), adapters=torch.tensor([1, 0, 3]))
    with torch.no_grad():
        try:
            torch.compile(model, backend=backend, fullgraph=True)(x)
        except RuntimeError as e:  # outside a step; the graph is there
            assert "does not say which adapters" in str(e)
    with torch.no_grad(), running(step):
        want = model(x)
        graph = backend.graphs[0]
        gm = copy_graph(graph.gm)
        work, found = Fusion(gm, graph.inputs, backend.weights), []
        for run in passes:
            found.append(run(work))
            gm.graph.lint()
        gm.recompile()
        out = gm(*[x.shape[1] if isinstance(e, (int, torch.SymInt)) else e for e in graph.inputs], *work.added)[0]
        backend.weights.restore()
        return found, gm.graph, out, want


def fused(model: nn.Module, *before: Callable[[Fusion], int]) -> tuple[int, Counter, torch.Tensor, torch.Tensor]:
    """Matches, the ops of the graph, its result, and the model's."""
    (*_, matches), graph, out, want = rewritten(model, *before, group_lora)
    names = {lora_group: "group", lora_rows: "rows"} | dict.fromkeys(LINEAR, "linear")
    return matches, Counter(names[n.target] for n in graph.nodes if is_function(n, tuple(names))), out, want


WIDE, HALF = torch.float32, torch.bfloat16
#: Dtypes of a layer's active adapters: PEFT casts x before each that has another than the one before.
OWN = [(WIDE,), (WIDE, WIDE), (HALF,), (HALF, HALF), (WIDE, HALF), (HALF, WIDE, HALF)]
KINDS = [*((Adapted, own) for own in OWN), (Chosen, (WIDE,)), (Chosen, (HALF, WIDE))]


@pytest.mark.parametrize(("kind", "own"), KINDS, ids=str)
@pytest.mark.parametrize("bias", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_with_one_input(kind, own, bias) -> None:
    """q, k and v are one op, o is another: two launches, where a decode step had a dozen. The numbers are the layers' own: one
    rounding where they have one or several."""
    model = Layer(kind, own=own, bias=bias)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    matches, ops, got, want = fused(model, fuse_projections)
    assert matches == 4 and ops == {"linear": 2, "group": 2}
    # A product of another shape, and adapters' sums that bf16 rounds at each step.
    torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 2**(-8 if HALF not in own else -7))
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1])


def test_layers_of_adapters_in_different_dtypes() -> None:
    """One op for q with float32, k with the model's dtype and v with both."""
    model = Layer()
    model.k, model.v = Adapted(16, 0.5, (HALF,)).eval(), Adapted(16, 1.0, (HALF, WIDE)).eval()
    matches, ops, got, want = fused(model, fuse_projections)
    assert matches == 4 and ops == {"linear": 2, "group": 2}
    torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 2**-7)


def early(m: Layer, x: torch.Tensor) -> torch.Tensor:
    """k's base needs q's result: they cannot be computed together."""
    q = m.q(x)
    k = nn.Linear.forward(m.k, x) * q.sum(-1, keepdim=True)
    adapted = m.k.b[0](m.k.a[0](x.to(torch.float32))) * 0.5
    return q[..., :16] + (k + adapted).to(torch.bfloat16)


def in_place(m: Layer, x: torch.Tensor) -> torch.Tensor:
    """x changes between two layers that read it."""
    x = x.clone()
    q = m.q(x)
    x.mul_(2)
    return q[..., :16] + m.k(x)


def input_in_place(m: Layer, x: torch.Tensor) -> torch.Tensor:
    """x changes between an adapter's products and the layer's own."""
    x = x.clone()
    added = m.q.b[0](m.q.a[0](x)) * 2.0
    x.mul_(2)
    return nn.Linear.forward(m.q, x) + added


def base_in_place(m: Layer, x: torch.Tensor) -> torch.Tensor:
    """The layer's own product changes before the adapter's is added."""
    base = nn.Linear.forward(m.q, x)
    added = m.q.b[0](m.q.a[0](x)) * 2.0
    base.mul_(2)
    return base + added


def read(m: Layer, x: torch.Tensor) -> torch.Tensor:
    """An adapter's product is read elsewhere too."""
    added = m.k.b[0](m.k.a[0](x.to(torch.float32))) * 0.5
    return (nn.Linear.forward(m.k, x) + added).to(torch.bfloat16) + added.sum().to(torch.bfloat16)


def layer(forward: Callable[..., torch.Tensor], of: type[nn.Module] = Layer, **options: Any) -> Any:
    """A layer of that class with another forward."""
    return type(forward.__name__, (of,), {"forward": forward})(**options)


@pytest.mark.parametrize(("model", "groups"), [
    (layer(early), 2), (layer(in_place), 2), (layer(in_place, own=(HALF,)), 2), (layer(input_in_place, own=(HALF,)), 0),
    (layer(base_in_place, own=(HALF,)), 0), (layer(read), 0), (Layer(rank=MAX_RANK + 1), 0),
    (Layer(own=(HALF,), rank=MAX_RANK + 1), 0)],
    ids=["one needs the other", "written in place", "written in place, bf16", "the input in place", "the base in place",
         "read elsewhere", "a large rank", "a large rank, bf16"])
def test_what_is_not_computed_together(model, groups) -> None:
    matches, ops, got, want = fused(model)
    assert matches == ops["group"] == groups
    torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 2**-7)
