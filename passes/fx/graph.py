"""Rewriting and executing FX graphs traced by Dynamo."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch.utils._pytree import tree_leaves

from quire.passes.fx.nodes import placeholders, target_name, value


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy to rewrite: Dynamo reads the placeholders of its own module again after a backend returns."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, mapping))
    out = fx.GraphModule(gm, graph)
    for old, new in mapping.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    out.meta = dict(gm.meta)
    return out


def with_own_code(function: Any) -> Any:
    """The function with a code object of its own. Dynamo's cache is per code object and holds eight traces, so functions that
    are compiled for one model after another must not share it."""
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__,
                             function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def add_input(graph: fx.Graph, name: str, example: torch.Tensor) -> fx.Node:
    """A new placeholder after all others, with the fake value ``example``."""
    with graph.inserting_after(placeholders(graph)[-1]):
        node = graph.placeholder(name)
    node.meta["example_value"] = example
    node._dynamo_source = ConstantSource(name)
    return node


def replace_node(old: fx.Node, new: fx.Node) -> None:
    """Put ``new``, which has the same value, in the place of ``old``. ``old`` and inputs that only it used are erased."""
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    inputs = list(old.all_input_nodes)
    old.graph.erase_node(old)
    erase_dead(new.graph, inputs)


def is_pure(node: fx.Node) -> bool:
    """Whether a node without users may be erased. FX takes in-place methods for pure; erasing them corrupts the graph."""
    if node.op in ("placeholder", "output"):
        return False
    name = target_name(node)
    if node.op == "call_method" and name.endswith("_") and not name.endswith("__"):
        return False
    return name not in ("setitem", "copy_", "index_put_") and not node.is_impure()


def erase_dead(graph: fx.Graph, candidates: Iterable[fx.Node]) -> int:
    """Erase the candidates without users, then their inputs as they become unused; returns how many nodes were erased."""
    todo, erased = list(candidates), set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in erased or node.users or not is_pure(node):
            continue
        todo += node.all_input_nodes
        graph.erase_node(node)
        erased.add(node)
    return len(erased)


# Execution.


def ancestors(node: fx.Node, stop: Callable[[fx.Node], bool] = lambda n: False) -> list[fx.Node]:
    """The node and everything it is computed from, in graph order; nodes where ``stop`` holds are kept but not entered."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        n = todo.pop()
        if n in found:
            continue
        found.add(n)
        if not stop(n):
            todo += n.all_input_nodes
    return [n for n in node.graph.nodes if n in found]


def evaluate(nodes: Iterable[fx.Node], env: dict[fx.Node, Any],
             replace: Callable[[fx.Node, Any], Any] | None = None) -> None:
    """Run ``nodes`` (in graph order) on the values in ``env``, adding theirs. ``replace`` maps a node's numbers to others."""
    for node in nodes:
        if node in env:
            continue

        def look_up(arg: Any, node: fx.Node = node) -> Any:
            if isinstance(arg, fx.Node):
                return env[arg]
            return replace(node, arg) if replace is not None and type(arg) in (int, float) else arg

        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), look_up)
        if node.op == "call_function":
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        elif node.op == "call_method":
            env[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        elif node.op == "get_attr":
            env[node] = operator.attrgetter(str(node.target))(node.graph.owning_module)
        else:
            raise LookupError(f"no value for {node.op} {node.name}")


def compute_value(node: fx.Node) -> None:
    """Give a new node the fake value that follows from its inputs' fake values."""
    inputs = {n: value(n) for n in node.all_input_nodes}
    mode = next(m for x in tree_leaves(list(inputs.values())) if (m := getattr(x, "fake_mode", None)) is not None)
    with mode, enable_python_dispatcher(), torch.no_grad():
        evaluate([node], inputs)
    node.meta["example_value"] = inputs[node]
