"""Fusion of sibling projections: what is matched and what is not, the numbers, whose memory the parameters are in."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn
from torch.nn import functional as F

from quire.passes.fusions.base import FusedInputs, FusedWeights, Fusion
from quire.passes.fusions.projections import fuse_projections
from quire.passes.fusions.registry import FUSIONS, FusionPass, apply_fusions
from quire.passes.fx import placeholders
from tests.passes.models import capture, changes, listing

WIDTH = 8


class Projections(nn.Module):
    """q, k, v with biases, and a gated MLP without."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.gate, self.up = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.q(x) + torch.cat([self.k(x), self.v(x)], dim=-1)
        return F.silu(self.gate(y)) * self.up(y)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def detached(weights: FusedWeights) -> int:
    """Parameters that are no longer views of their fused tensor."""
    return sum(p.untyped_storage().data_ptr() != weights.fused[key].untyped_storage().data_ptr()
               for key, group in weights.parameters.items() for p in group)


def fused(module: nn.Module, *args: torch.Tensor) -> tuple[int, fx.GraphModule, list[Any], FusedWeights]:
    """Matches, the rewritten graph, its inputs, and the weights; the graph must be sound and give the same numbers."""
    with torch.no_grad():
        want = module(*(a.clone() for a in args))
    gm, inputs = capture(module, *(a.clone() for a in args))
    weights = FusedWeights()
    fusion = Fusion(gm, inputs, weights)
    matches = fuse_projections(fusion)
    gm.graph.lint()
    gm.recompile()
    assert len(placeholders(gm.graph)) == len(inputs) + len(fusion.added)
    real = [copy.deepcopy(i) if i.shape == args[0].shape and not isinstance(i, nn.Parameter) else i for i in inputs]
    with torch.no_grad():
        (got,) = gm(*real, *fusion.added)
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-6)
    return matches, gm, [*inputs, *fusion.added], weights


def test_before_and_after(x) -> None:
    module = Projections()
    before = listing(capture(module, x)[0].graph)
    matches, gm, _, _ = fused(module, x)
    assert matches == 2
    assert_expected_inline(changes(before, listing(gm.graph)), """\
-linear = linear(l_x_, l_self_modules_q_parameters_weight_, l_self_modules_q_parameters_bias_)
-linear_1 = linear(l_x_, l_self_modules_k_parameters_weight_, l_self_modules_k_parameters_bias_)
-linear_2 = linear(l_x_, l_self_modules_v_parameters_weight_, l_self_modules_v_parameters_bias_)
-cat = cat([linear_1, linear_2], dim=-1)
-y = add(linear, cat)
-linear_3 = linear(y, l_self_modules_gate_parameters_weight_, None)
-silu = silu(linear_3)
-linear_4 = linear(y, l_self_modules_up_parameters_weight_, None)
-mul = mul(silu, linear_4)
+quire_fused_0: [16, 8]
+quire_fused_1: [16]
+quire_fused_2: [32, 8]
+linear_5 = linear(l_x_, quire_fused_0, quire_fused_1)
+split = split(linear_5, [8, 4, 4], dim=-1)
+getitem = getitem(split, 0)
+getitem_1 = getitem(split, 1)
+getitem_2 = getitem(split, 2)
+cat = cat([getitem_1, getitem_2], dim=-1)
+y = add(getitem, cat)
+linear_6 = linear(y, quire_fused_2, None)
+split_1 = split(linear_6, [16, 16], dim=-1)
+getitem_3 = getitem(split_1, 0)
+getitem_4 = getitem(split_1, 1)
+silu = silu(getitem_3)
+mul = mul(silu, getitem_4)""")


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """With other columns, sums may have another order: what cancels is as inexact as the largest."""
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6 * float(want.detach().abs().max()))


def test_parameters_become_views(x) -> None:
    module = Projections()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    objects = {name: id(p) for name, p in module.named_parameters()}
    _, gm, inputs, weights = fused(module, x)
    assert len(weights.fused) == 3  # the weights and the biases of q, k and v; the weights of gate and up
    for names in (("q.weight", "k.weight", "v.weight"), ("q.bias", "k.bias", "v.bias"), ("gate.weight", "up.weight")):
        parts = [module.get_parameter(n) for n in names]
        (whole,) = [t for t in weights.fused.values() if t.data_ptr() == parts[0].data_ptr()]
        assert torch.equal(whole, torch.cat(parts))
        assert {p.untyped_storage().data_ptr() for p in parts} == {whole.untyped_storage().data_ptr()}
        assert whole.untyped_storage().nbytes() == sum(p.nbytes for p in parts)  # nothing is stored twice
    assert list(module.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert {name: id(p) for name, p in module.named_parameters()} == objects  # optimizers hold them
    assert all(p.requires_grad and p.is_contiguous() for p in module.parameters())

    # Updates in place reach the fused tensor, and so the graph.
    other = {k: torch.randn_like(v) for k, v in before.items()}
    module.load_state_dict(other)
    assert detached(weights) == 0
    with torch.no_grad():
        want = module(x)
        index = next(i for i, t in enumerate(inputs) if t.shape == x.shape and torch.equal(t, x))
        assert index is not None
        close(gm(*inputs)[0], want)
        module.q.weight.data = torch.zeros_like(module.q.weight)
    assert detached(weights) == 1


def test_two_graphs_of_one_model_share_the_fused_weights(x) -> None:
    module, weights = Projections(), FusedWeights()
    for _ in range(2):
        gm, inputs = capture(module, x)
        added = apply_fusions(gm, inputs, "all", weights).tensors
        torch._dynamo.reset()
        assert len(weights.fused) == 3 and added[0] is next(iter(weights.fused.values()))


# -- what must not be fused


class Case(nn.Module):
    """A module made of a dict of members and a function (self, x) -> tensor."""

    def __init__(self, forward: Any, **members: Any) -> None:
        super().__init__()
        self.run = forward
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def linear(bias: bool = False, dtype: torch.dtype | None = None) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias, dtype=dtype)


def two(forward: Any, **options: Any) -> Case:
    return Case(forward, a=linear(**options), b=linear(**options))


def tied(name: str, forward: Any, **options: Any) -> Case:
    """Both layers have one weight or bias."""
    made = two(forward, **options)
    setattr(made.b, name, getattr(made.a, name))
    return made


def matrices(forward: Any, make: Callable[[], torch.Tensor]) -> Case:
    return Case(forward, a=nn.Parameter(make()), b=nn.Parameter(make()))


def product(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.a(x) * m.b(x)


class Quantized(torch.Tensor):
    """A stand-in for the tensor subclasses of quantized weights."""


def subclass() -> nn.Module:
    made = two(product)
    for m in (made.a, made.b):
        m.weight = nn.Parameter(m.weight.detach().as_subclass(Quantized))
    return made


def integers() -> nn.Module:
    members = {n: nn.Buffer(torch.randint(-3, 3, (WIDTH, WIDTH))) for n in "ab"}
    return Case(lambda m, x: (F.linear(x.long(), m.a) + F.linear(x.long(), m.b)).float(), **members)


def changed(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    y = m.a(x)
    x.add_(1)
    return y * m.b(x)


def changed_through_a_view(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    row = x[0]
    y = m.a(x)
    row[2] = 7.0
    return y * m.b(x)


def one_under_autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.a(x)
    return y.float() * m.b(x)


def added(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    whole = x
    y = m.a(x)
    whole += 1
    return y * m.b(x)


MUST_NOT: dict[str, Callable[[], nn.Module]] = {
    "shared_weight": lambda: tied("weight", lambda m, x: m.a(x) + m.b(x) * 2),
    "shared_bias": lambda: tied("bias", product, bias=True),
    "weight_used_elsewhere": lambda: two(lambda m, x: m.a(x) + m.b(x) + m.a.weight.sum()),
    "one_has_a_bias": lambda: Case(product, a=linear(bias=True), b=linear()),
    "different_inputs": lambda: two(lambda m, x: m.a(x) * m.b(x + 1)),
    "one_after_the_other": lambda: two(lambda m, x: m.b(m.a(x))),
    "subclass": subclass,
    "integers": integers,
    "computed_weights": lambda: matrices(lambda m, x: F.linear(x, m.a * 2) + F.linear(x, m.b * 2),
                                         lambda: torch.randn(WIDTH, WIDTH)),
    "not_contiguous": lambda: matrices(lambda m, x: F.linear(x[:, :8], m.a) + F.linear(x[:, :8], m.b),
                                       lambda: torch.randn(WIDTH, 4).T),
    "vectors": lambda: matrices(lambda m, x: F.linear(x, m.a) * F.linear(x, m.b), lambda: torch.randn(WIDTH)),
    "by_keyword": lambda: matrices(lambda m, x: F.linear(input=x, weight=m.a) * F.linear(x, weight=m.b),
                                   lambda: torch.randn(8, WIDTH)),
    "changed_in_place_between": lambda: two(changed),
    "changed_through_a_view_between": lambda: two(changed_through_a_view),
    "added_in_place_between": lambda: two(added),
    "one_under_autocast": lambda: two(one_under_autocast),
}


@pytest.mark.parametrize("name", MUST_NOT)
def test_must_not_match(name, x) -> None:
    module = MUST_NOT[name]().eval()
    pointers = [p.data_ptr() for p in module.parameters()]
    matches, _, _, weights = fused(module, x)
    assert matches == 0 and not weights.fused
    assert [p.data_ptr() for p in module.parameters()] == pointers


@pytest.mark.parametrize(("count", "matches"), [(1, 0), (5, 1)])
def test_number_of_siblings(count, matches, x) -> None:
    layers = nn.ModuleList(nn.Linear(WIDTH, 4 + i, bias=True) for i in range(count))
    module = Case(lambda m, x: torch.cat([layer(x) for layer in m.layers], -1), layers=layers)
    assert fused(module, x)[0] == matches


# -- the list of passes


@pytest.mark.parametrize("each", FUSIONS, ids=lambda p: p.name)
def test_contract(each: FusionPass) -> None:
    """One signature, and a docstring that shows the graph before and after (CONTRIBUTING, "Adding a fusion pass")."""
    assert list(get_type_hints(each.run).values()) == [Fusion, int]
    text = inspect.getmodule(each.run).__doc__
    assert re.search(r"^Before", text, re.MULTILINE) and re.search(r"^After", text, re.MULTILINE)


@pytest.mark.parametrize(("names", "matches"), [("all", 1), ("none", 0), (["projections"], 1), (["rope"], 0)], ids=str)
def test_choice_of_passes(names: Any, matches: int, x: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    """Those chosen run in the order of the list, and each logs one line."""
    module, weights = two(product), FusedWeights()
    gm, inputs = capture(module, x)
    with caplog.at_level(logging.INFO, "quire.passes.fusions"):
        added = apply_fusions(gm, inputs, names, weights).tensors
    assert len(added) == len(weights.fused) == matches
    ran = [r.getMessage() for r in caplog.records if "fusions" in r.name]
    raised = [each.name for each in FUSIONS if each.stage == "raised" and each.batches != "small"]
    chosen = [name for name in raised if names == "all" or name in names]
    assert ran == [f"{name}: {int(name == 'projections')} matches" for name in chosen]


def test_hold(x) -> None:
    """Whether the parameters of a call are those that were fused."""
    module, other = Projections(), Projections()
    gm, inputs = capture(module, x)
    assert FusedInputs().hold(inputs)  # nothing was fused
    fused = apply_fusions(gm, inputs, "all", FusedWeights())
    assert fused.hold(inputs)
    torch._dynamo.reset()
    assert not fused.hold(capture(other, x)[1])
    module.load_state_dict(other.state_dict())
    assert fused.hold(inputs)
    module.up.weight.data = module.up.weight.detach().clone()
    assert not fused.hold(inputs)
