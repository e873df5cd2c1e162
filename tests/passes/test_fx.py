"""Helpers on traced graphs: copies, sweeps, execution, constants, and guards on the number of tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from quire.passes.backend import QuireBackend
from quire.passes.fx import (
    ancestors,
    constant,
    copy_graph,
    erase_dead,
    evaluate,
    is_pure,
    module_path,
    number_constants,
    placeholders,
    shape_conditions,
    source_name,
    symbolic,
    value,
)
from quire.passes.options import QuireOptions


def traced(function, *args) -> fx.GraphModule:
    """The graph that Dynamo makes of a function; dimension 0 of each argument is dynamic."""
    backend = QuireBackend(QuireOptions(compiler="eager"))
    for arg in args:
        torch._dynamo.mark_dynamic(arg, 0)
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return backend.graphs[0].gm


def named(graph: fx.Graph, name: str) -> fx.Node:
    """The node whose target is called ``name``."""
    (node,) = [n for n in graph.nodes if getattr(n.target, "__name__", n.target) == name]
    return node


def test_values_and_placeholders() -> None:
    gm = traced(lambda x, y: x @ y.T, torch.zeros(5, 3), torch.zeros(7, 3))
    tensors = [n for n in placeholders(gm.graph) if isinstance(value(n), torch.Tensor)]
    assert sorted(source_name(n) for n in tensors) == ["L['x']", "L['y']"]
    assert value(3) == 3 and value(None) is None
    product = value(named(gm.graph, "matmul"))
    assert symbolic(product.shape[0]) and symbolic(product.shape[1]) and not symbolic(value(tensors[0]).shape[1])


def test_source_name_without_a_source() -> None:
    graph = fx.Graph()
    assert source_name(graph.placeholder("x")) == "x"


def test_module_path() -> None:
    class Inner(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Identity(), nn.Sequential(Inner())])

        def forward(self, x):
            return self.layers[1](x) + torch.sin(x)

    graph = traced(Outer(), torch.zeros(5)).graph
    assert module_path(named(graph, "tanh")) == "layers.1.0"
    assert module_path(named(graph, "sin")) == ""


def test_copy_graph() -> None:
    """Dynamo reads its own graph again, so passes work on a copy; the copy knows where its inputs come from."""
    gm = traced(lambda x: torch.sin(x) + 1, torch.zeros(5))
    gm.meta["mark"] = 1
    copy, before = copy_graph(gm), str(gm.graph)
    assert str(copy.graph) == before and copy.meta["mark"] == 1
    assert all(a._dynamo_source == b._dynamo_source for a, b in zip(placeholders(gm.graph), placeholders(copy.graph),
                                                                  strict=True))
    named(copy.graph, "sin").replace_all_uses_with(placeholders(copy.graph)[-1])
    erase_dead(copy.graph, [named(copy.graph, "sin")])
    assert str(gm.graph) == before != str(copy.graph)


# Sweeping.


def mutating(x, index, new):
    y = x.clone()
    y.scatter_(0, index, new)
    y[0] = 3.0
    unused = torch.sin(y).cos()  # noqa: F841
    return y + 1


def test_in_place_nodes_are_not_pure() -> None:
    """FX itself takes ``scatter_`` and ``setitem`` for pure: dropping them corrupts graphs."""
    graph = traced(mutating, torch.zeros(5), torch.zeros(2, dtype=torch.long), torch.ones(2)).graph
    pure = {getattr(n.target, "__name__", n.target): is_pure(n) for n in graph.nodes if n.op.startswith("call")}
    assert pure == {"clone": True, "scatter_": False, "setitem": False, "sin": True, "cos": True, "add": True}
    assert not any(is_pure(n) for n in placeholders(graph))


def test_erase_dead() -> None:
    """What nobody uses goes, and then its inputs; what has users, or an effect, stays."""
    gm = traced(mutating, torch.zeros(5), torch.zeros(2, dtype=torch.long), torch.ones(2))
    graph = gm.graph
    assert erase_dead(graph, [named(graph, "scatter_"), named(graph, "setitem"), named(graph, "add")]) == 0
    assert erase_dead(graph, [named(graph, "cos")]) == 2  # and sin, but not what sin reads
    graph.lint()
    assert [getattr(n.target, "__name__", n.target) for n in graph.nodes if n.op.startswith("call")] == [
        "clone", "scatter_", "setitem", "add"]
    assert erase_dead(graph, []) == 0


def test_double_underscore_methods_are_pure() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert is_pure(graph.call_method("__and__", (x, x))) and not is_pure(graph.call_method("add_", (x, x)))


def test_functions_that_write_by_an_argument_are_not_pure() -> None:
    """``inplace`` by position or name, and ``out``; a True in another place means something else."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for function, args, options, pure in [
            (F.relu, (x,), {}, True), (F.relu, (x, True), {}, False), (F.silu, (x,), {"inplace": True}, False),
            (F.leaky_relu, (x, 0.1, True), {}, False), (F.dropout, (x, 0.5, True), {}, True),
            (torch.add, (x, 1), {"out": x}, False)]:
        assert is_pure(graph.call_function(function, args, options)) == pure, (function, args, options)


# Executing a part of a graph.


def test_ancestors() -> None:
    graph = traced(lambda x, y: (torch.sin(x) * torch.cos(y)).tanh() + torch.exp(x), torch.zeros(5), torch.zeros(5)).graph
    names = [getattr(n.target, "__name__", n.target) for n in ancestors(named(graph, "tanh")) if n.op != "placeholder"]
    assert names == ["sin", "cos", "mul", "tanh"]  # in graph order, without exp
    stopped = ancestors(named(graph, "tanh"), stop=lambda n: n is named(graph, "mul"))
    assert [getattr(n.target, "__name__", n.target) for n in stopped] == ["mul", "tanh"]


def test_evaluate() -> None:
    """Functions, methods, nested arguments and slices; numbers may be replaced, booleans are none."""

    def function(x):
        return torch.cat([x[1:4], x.sum(0, keepdim=True)], dim=0).clamp(2.0, 9.0)

    gm = traced(function, torch.zeros(9))
    nodes = [n for n in gm.graph.nodes if n.op.startswith("call")]
    (x,) = [n for n in placeholders(gm.graph) if isinstance(value(n), torch.Tensor)]
    env = {x: torch.arange(9.0)}
    evaluate(nodes, env)
    assert torch.equal(env[nodes[-1]], function(torch.arange(9.0)))
    env = {x: torch.arange(9.0)}
    evaluate(nodes, env, lambda node, number: {4: 7, 9.0: 5.0}.get(number, number))
    assert env[nodes[-1]].tolist() == [2, 2, 3, 4, 5, 5, 5]


def test_evaluate_reads_attributes_and_misses_inputs() -> None:
    root = nn.Module()
    root.inner = nn.Module()
    root.inner.register_buffer("table", torch.arange(3))
    graph = fx.Graph(root)
    x = graph.placeholder("x")
    both = graph.call_function(torch.add, (graph.get_attr("inner.table"), x))
    graph.output(both)
    env = {x: torch.ones(3, dtype=torch.long)}
    evaluate(ancestors(both), env)
    assert env[both].tolist() == [1, 2, 3]
    with pytest.raises(LookupError, match="no value for placeholder x"):
        evaluate(ancestors(both), {})


def test_number_constants() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x", default_value=5)
    node = graph.call_function(torch.clamp, (x, [1, (2, 3.5)], slice(None, 4, x)), {"k": {"a": 6}, "flag": True})
    assert sorted(number_constants(node)) == [1, 2, 3.5, 4, 6]
    assert number_constants(x) == []


# Constants and guards.


def test_constant() -> None:
    assert constant(3) == 3 and constant(None) is None and constant(0.5) == 0.5
    seen = {}

    def backend(gm, example_inputs):
        x = next(n for n in placeholders(gm.graph) if isinstance(value(n), torch.Tensor))
        size = fx.Graph().placeholder("size")
        size.meta["example_value"] = value(x).shape[0]
        for name, node in (("size", size), ("tensor", x)):
            with pytest.raises(ValueError, match="is not a constant of the trace|is a tensor, not a number") as error:
                constant(node)
            seen[name] = str(error.value)
        assert value(x).shape[0] == 9  # a guard: from here on the size is known
        seen["known"] = constant(size)
        return gm.forward

    x = torch.zeros(9)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(Exception, match="specialized|Constraints violated|marked"):
        torch.compile(lambda x: x + 1, backend=backend)(x)
    assert seen == {"size": "size is not a constant of the trace", "tensor": "l_x_ is a tensor, not a number", "known": 9}


def conditions(function, *args, limits=()) -> list[str]:
    gm = traced(function, *args)
    row = next(value(n) for n in placeholders(gm.graph) if isinstance(value(n), torch.Tensor))
    return shape_conditions(gm.graph, row.shape[0], limits)


def test_shape_conditions() -> None:
    """Guards that hold for some numbers of tokens only."""
    (found,) = conditions(lambda x: x + 1 if x.shape[0] <= 64 else x, torch.zeros(23))
    assert found.endswith("<= 64")
    assert conditions(lambda x: x + 1 if x.shape[0] > 1 else x, torch.zeros(23)) == []  # holds for all that are traced
    assert conditions(lambda x: x * 2, torch.zeros(23)) == []
    assert shape_conditions(fx.Graph(), 23) == []  # a number, and no symbol


def test_shape_conditions_of_two_inputs_of_one_length() -> None:
    assert conditions(lambda x, y: x + y, torch.zeros(23), torch.zeros(23)) == []


def test_shape_conditions_beyond_a_limit() -> None:
    """A stored table is as long as the model can go: the guard that says so is no other path."""
    table = torch.zeros(64)

    def cut(x):
        return x + table[: x.shape[0]]

    assert len(conditions(cut, torch.zeros(23))) == 1
    assert conditions(cut, torch.zeros(23), limits=[64]) == []
    assert len(conditions(cut, torch.zeros(23), limits=[63, 128])) == 1
