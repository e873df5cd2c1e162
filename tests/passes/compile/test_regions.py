"""Compilation piece by piece: which pieces share code, that they compute what the whole graph does, and what is left whole."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import quire.passes.compile.inductor
from quire.passes.compile.regions import copies, each_once
from quire.passes.fake_values import fake_input
from tests.passes.models import HIDDEN, Attention, Tiny, served, trace

pytestmark = pytest.mark.usefixtures("tokens_unchecked")
TOLERANCE = 1e-5  # float32, sums of up to 22 numbers of order 1; eps is 1.2e-7


def check_fits(fakes: Sequence[Any], args: Sequence[Any]) -> None:
    """The arguments of a call are what the code was compiled for: fakes whose sizes may be symbols."""
    pairs: list[tuple[Any, Any]] = []
    for fake, arg in zip(fakes, args, strict=True):
        if isinstance(fake, torch.Tensor):
            assert (fake.dtype, fake.device, fake.dim()) == (arg.dtype, arg.device, arg.dim())
            pairs += zip((*fake.shape, *fake.stride(), fake.storage_offset()),
                         (*arg.shape, *arg.stride(), arg.storage_offset()), strict=True)
        elif isinstance(fake, (int, torch.SymInt)):
            pairs.append((fake, arg))
    exprs = [(fake.node.expr if isinstance(fake, torch.SymInt) else fake, number) for fake, number in pairs]
    sizes = {expr: number for expr, number in exprs if getattr(expr, "is_Symbol", False)}
    for expr, number in exprs:
        assert (expr if isinstance(expr, int) else int(expr.subs(sizes))) == number


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs given to the compiler, which here runs them op by op, on what they were compiled for only."""
    seen: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            check_fits(inputs, args)
            return gm.forward(*args)

        seen.append(gm)
        return run

    monkeypatch.setattr(quire.passes.compile.inductor, "inductor", keep)
    return seen


class Around(nn.Module):
    """Attention whose result ``combine(input, result, number)`` makes the layer's, with a number of its own."""

    def __init__(self, combine: Callable[..., torch.Tensor], number: float = 1.0, **options: Any) -> None:
        super().__init__()
        self.inner, self.combine, self.number = Attention(4, 2, is_causal=True, **options), combine, number

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.combine(x, self.inner(x, position_ids, extra), self.number)


def model(layers: int, **options: Any) -> Tiny:
    return Tiny(*(Attention(4, 2, is_causal=True, **options) for _ in range(layers))).eval()


def around(combine: Callable[..., torch.Tensor], *numbers: float) -> Tiny:
    return Tiny(*(Around(combine, number) for number in numbers)).eval()


def scaled(x: torch.Tensor, y: torch.Tensor, number: float) -> torch.Tensor:
    return y / number


def counted(x: torch.Tensor, y: torch.Tensor, number: float) -> torch.Tensor:
    """Computes with the number of tokens, as mixtures of experts do; Dynamo computes the product once for all layers."""
    tokens = x.shape[1]
    return y + x.new_ones(6 * tokens).view(1, tokens, 6)[..., :1]


def written_across(x: torch.Tensor, y: torch.Tensor, number: float) -> torch.Tensor:
    """Adds attention's result to its input in place: the memory belongs to the layer before."""
    x += y
    return x * 0.5


def written_within(x: torch.Tensor, y: torch.Tensor, number: float) -> torch.Tensor:
    y = y * 2
    y += x
    return y.mul_(0.25)


@pytest.mark.parametrize("layers, attention", [(6, "torch_native"), pytest.param(3, "triton", marks=pytest.mark.slow)])
def test_equal_layers_are_compiled_once(layers: int, attention: str, compiled: list[fx.GraphModule]) -> None:
    """Before the first attention, between two, behind the last: three, however many layers; each with its own weights."""
    net = model(layers)
    assert served(trace(net, compiler="inductor"), net, attention=attention) <= TOLERANCE
    assert len(compiled) == 3


def test_equal_layers_are_computed_once(compiled: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake values, too: that takes as long for six layers as for three."""
    run, computed = fx.Interpreter.run_node, []
    monkeypatch.setattr(fx.Interpreter, "run_node", lambda self, node: computed.append(node) or run(self, node))
    counts = []
    for layers in (3, 6):
        torch._dynamo.reset()
        computed.clear()
        net = model(layers)
        served(trace(net, compiler="inductor"), net)
        counts.append(len(computed))
    assert counts[0] == counts[1] > 20


def test_each_kind_of_layer_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a step is recorded: six layers launch what three do, and afterwards all run again."""
    ran: list[fx.GraphModule] = []

    def compile_fx(gm: fx.GraphModule, inputs: list[Any], config_patches: dict[str, Any]) -> Callable[..., Any]:
        return lambda *args: (ran.append(gm), gm(*args))[1]

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    net = model(6)
    graph = trace(net, compiler="inductor")
    assert served(graph, net) <= TOLERANCE
    whole, _ = len(ran), ran.clear()
    with each_once():
        served(graph, net)
    assert len({id(gm) for gm in ran}) == 3 and len(ran) * 7 == whole * 3
    assert served(graph, net) <= TOLERANCE


def test_layers_that_differ_are_compiled_apart(compiled: list[fx.GraphModule]) -> None:
    """A constant, a shape or an operation that differs is another piece: no layer runs with another's."""
    scaled, wide = (Attention(4, 2, is_causal=True, scale=0.9), Attention(8, 2, is_causal=True))
    same = [Attention(4, 2, is_causal=True) for _ in range(3)]
    net = Tiny(*same, scaled, wide, nn.Sequential()).eval()
    net.layers = net.layers[:5]
    assert served(trace(net, compiler="inductor"), net) <= TOLERANCE
    # embed + 0; 0 -> 1, 1 -> 2; 2 -> scaled; scaled -> wide; wide -> logits
    assert len(compiled) == 5


def test_sizes_are_computed_by_each_piece(compiled: list[fx.GraphModule]) -> None:
    net = around(counted, 1, 1, 1, 1)
    graph = trace(net, compiler="inductor")
    products = [n for n in graph.gm.graph.nodes if n.target is operator.mul]
    assert len(products) == 1 and len(products[0].users) == 4
    assert served(graph, net) <= TOLERANCE
    assert len(compiled) == 3


@pytest.mark.parametrize("net, compiler, pieces, why", [
    # Constants between sites are compared.
    pytest.param(around(scaled, 2, 2, 2, 4, 2), "inductor", 4, "", marks=pytest.mark.slow),
    (around(scaled, 0.5, 0.25, 0.75, 0.125, 0.5), "inductor", 3, ""),  # Dynamo makes floats inputs (dynamic=True)
    (around(written_across, 1, 1, 1, 1), "inductor", 1, "changes in place what it did not make"),
    pytest.param(around(written_within, 1, 1, 1, 1), "inductor", 3, "", marks=pytest.mark.slow),
    (model(2), "inductor", 1, "all differ"),  # three pieces: nothing is to be had by cutting
    (model(4), "inductor-whole", 1, ""),
], ids=["constants", "floats", "written across pieces", "written within pieces", "few layers", "by choice"])
def test_what_is_cut(net: Tiny, compiler: str, pieces: int, why: str, compiled: list[fx.GraphModule],
                     caplog: pytest.LogCaptureFixture) -> None:
    """Each piece is compiled once, and what cannot be cut is compiled whole, with the reason in the log."""
    with caplog.at_level(logging.INFO, "quire.passes.compile.regions"):
        assert served(trace(net, compiler=compiler), net) <= TOLERANCE
    assert len(compiled) == pieces and why in caplog.text


def test_values_are_copied_only_where_that_is_right() -> None:
    """Not of what shares memory, and not where the sizes have other symbols."""
    fake = FakeTensorMode(shape_env=ShapeEnv())
    one, two = (fake_input(fake, name, torch.empty(size, 4, device="meta"), (True, False), torch.device("cpu"))
                for name, size in (("one", 11), ("two", 13)))
    with fake:
        made, fixed = one + 1, torch.empty(3, 4)
        (copy,) = copies([made], [(one, one)])
        assert str(copy.shape) == str(made.shape) and copy.stride() == made.stride() and copy is not made
        assert copies([fixed], [(two, one)])[0].shape == (3, 4)
        assert copies([made], [(two, one)]) is None  # the tokens of the other piece are another number
        assert copies([one.view(-1)], [(one, one)]) is None  # a view of an input
        assert copies([fixed, fixed.view(-1)], [(one, one)]) is None  # two views of one tensor
        assert copies([fixed[1:]], [(one, one)]) is None  # a part of a tensor
        assert copies([fixed.requires_grad_()], [(one, one)]) is None


@pytest.mark.slow
def test_inductor() -> None:
    """With the real compiler: views, lists and sizes cross the cuts, and the caches are written in place."""
    net = around(scaled, 0.5, 0.25, 0.75, 0.125, 0.5)
    assert served(trace(net, compiler="inductor"), net, attention="torch_native") <= TOLERANCE


class Gated(nn.Module):
    """A product outside autocast and the same one inside, both read behind attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = Attention(4, 2, is_causal=True), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, extra: Any) -> torch.Tensor:
        outside = self.gate(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = self.gate(x)
        return self.inner(x, position_ids, extra) + 0.1 * outside + inside.float()


def test_dtypes_across_cuts_are_those_of_autocast(compiled: list[fx.GraphModule]) -> None:
    """A piece that is compiled for float32 and gets bfloat16 reads past its memory: NaN, and no error."""
    net = Tiny(*(Gated() for _ in range(3))).eval()
    # The inner product may round to the next bfloat16, 2**-8 of numbers of order 1.
    assert served(trace(net, compiler="inductor"), net, attention="torch_native") < 1e-2
    assert len(compiled) == 3


def test_values_are_dropped_after_their_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The joined pieces keep no activation alive longer than a whole graph would."""
    alive: list[weakref.ref[torch.Tensor]] = []
    counts = []

    def compile(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            out = gm(*args)
            counts.append(sum(r() is not None for r in alive))
            alive.extend(weakref.ref(t) for t in out if t.dim() == 3 and t.shape[-1] == HIDDEN)
            return out
        return run

    monkeypatch.setattr(quire.passes.compile.inductor, "inductor", compile)
    net = model(5)
    assert served(trace(net, compiler="inductor"), net) <= TOLERANCE
    assert len(counts) == 12 and 1 <= max(counts) <= 3  # the residual stream that goes in, and what is just made
