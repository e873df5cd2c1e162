"""Helpers on traced graphs: copies, sweeps, execution, constants, and guards on the number of tokens."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from quire.passes.fx import copy_graph, erase_dead, is_pure, placeholders, shape_conditions, value, written
from tests.passes.models import capture


def traced(function, *args) -> fx.GraphModule:
    """The graph that Dynamo makes of a function; dimension 0 of each argument is dynamic."""
    for arg in args:
        torch._dynamo.mark_dynamic(arg, 0)
    return capture(function, *args)[0]


def named(graph: fx.Graph, name: str) -> fx.Node:
    """The node whose target is called ``name``."""
    (node,) = [n for n in graph.nodes if getattr(n.target, "__name__", n.target) == name]
    return node


# Copies.


def test_a_copy_runs_as_it_was_rewritten() -> None:
    """Its code is written when it is first run, not when it is copied: a start copies graphs that never run."""
    gm = traced(lambda x: x + 1, torch.zeros(3))
    copy = copy_graph(gm)
    assert "_code" not in vars(copy)
    named(copy.graph, "add").args = (placeholders(copy.graph)[-1], 5)
    x = torch.zeros(4)
    args = [4 if isinstance(value(n), torch.SymInt) else x for n in placeholders(gm.graph)]
    assert copy(*args)[0].tolist() == written(copy).forward(*args)[0].tolist() == [5.0] * 4
    assert gm(*args)[0].tolist() == [1.0] * 4


# Sweeping.


def mutating(x, index, new):
    y = x.clone()
    y.scatter_(0, index, new)
    y[0] = 3.0
    z = y * 1
    z += 1
    unused = torch.sin(y).cos()  # noqa: F841
    return y + 1


def test_what_writes_is_not_pure() -> None:
    """FX itself takes ``scatter_``, ``setitem`` and ``iadd`` for pure: dropping them corrupts graphs."""
    graph = traced(mutating, torch.zeros(5), torch.zeros(2, dtype=torch.long), torch.ones(2)).graph
    pure = {getattr(n.target, "__name__", n.target): is_pure(n) for n in graph.nodes if n.op.startswith("call")}
    assert pure == {"clone": True, "scatter_": False, "setitem": False, "mul": True, "iadd": False, "sin": True, "cos": True,
                    "add": True}
    assert not any(is_pure(n) for n in placeholders(graph))
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert is_pure(graph.call_method("__and__", (x, x))) and not is_pure(graph.call_method("add_", (x, x)))
    # ``inplace`` by position or name, and ``out``; a True in another place means something else.
    graph = fx.Graph()
    x = graph.placeholder("x")
    for function, args, options, pure in [
            (F.relu, (x,), {}, True), (F.relu, (x, True), {}, False), (F.silu, (x,), {"inplace": True}, False),
            (F.leaky_relu, (x, 0.1, True), {}, False), (F.dropout, (x, 0.5, True), {}, True),
            (torch.add, (x, 1), {"out": x}, False), (torch.frexp, (x,), {"out": (x, x)}, False),
            (operator.ilshift, (x, 1), {}, False), (operator.irshift, (x, 1), {}, False), (operator.lshift, (x, 1), {}, True)]:
        assert is_pure(graph.call_function(function, args, options)) == pure, (function, args, options)
    assert not any(is_pure(graph.call_method(f"__{name}__", (x, x))) for name in ("iadd", "idiv", "ilshift"))


def test_erase_dead() -> None:
    """A node without users is erased, and then its inputs; one with users, or an effect, stays."""
    gm = traced(mutating, torch.zeros(5), torch.zeros(2, dtype=torch.long), torch.ones(2))
    graph = gm.graph
    erase_dead(graph, [named(graph, "scatter_"), named(graph, "setitem"), named(graph, "add")])  # nothing
    erase_dead(graph, [named(graph, "cos")])  # and sin, but not what sin reads
    graph.lint()
    assert [getattr(n.target, "__name__", n.target) for n in graph.nodes if n.op.startswith("call")] == [
        "clone", "scatter_", "setitem", "mul", "iadd", "add"]


def conditions(function, *args, longest=None) -> dict[str, int]:
    gm = traced(function, *args)
    row = next(value(n) for n in placeholders(gm.graph) if isinstance(value(n), torch.Tensor))
    return shape_conditions(row.shape[0], longest)


def test_shape_conditions() -> None:
    """Guards that hold for some numbers of tokens only."""
    (found,) = conditions(lambda x: x + 1 if x.shape[0] <= 64 else x, torch.zeros(23))
    assert found.endswith("<= 64")
    assert conditions(lambda x: x + 1 if x.shape[0] > 1 else x, torch.zeros(23)) == {}  # holds for all that are traced
    assert conditions(lambda x: x * 2, torch.zeros(23)) == {}
    assert len(conditions(lambda x: x * 2 if x.shape[0] == 64 else x, torch.zeros(23))) == 1
    assert shape_conditions(23) == {}  # a number, and no symbol
    # A stored table is as long as the model can go: what the trace shows is for sequences up to it.
    table = torch.zeros(64)

    def cut(x):
        return x + table[: x.shape[0]]

    assert len(conditions(cut, torch.zeros(23))) == 1
    assert conditions(cut, torch.zeros(23), longest=64) == {}
    assert len(conditions(cut, torch.zeros(23), longest=65)) == 1


@pytest.mark.parametrize("condition, first", [
    (lambda x: 2 * x.shape[0] + 1 == 51, 25), (lambda x: x.numel() * 16 == 400, 25), (lambda x: x.shape[0] * 3 % 60 == 15, 5),
    (lambda x: x.shape[0] ** 2 == 625, 25), (lambda x: abs(x.shape[0] - 25) < 2, 24),
    (lambda x: x.shape[0] // 100 == 50, 5000)])
def test_shape_conditions_are_not_sampled(condition, first: int) -> None:
    """Whatever the arithmetic: where the path changes is at none of the numbers in it."""
    found = conditions(lambda x: x + 1 if condition(x) else x, torch.zeros(23))
    assert min(found.values()) == first
