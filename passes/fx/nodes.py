"""Nodes of FX graphs traced by Dynamo: their values and names, matching, constants and guards."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

LINEAR = (F.linear, torch._C._nn.linear)
ADD = (operator.add, torch.add)
SUB = (operator.sub, torch.sub)
MUL = (operator.mul, torch.mul)


# Values and names.


def value(node: Any) -> Any:
    """The fake value of a node (Dynamo stores it as ``example_value``), or the argument itself if it is not a node."""
    if not isinstance(node, fx.Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def is_tensor(node: Any) -> bool:
    """Whether this is a node whose value is a tensor."""
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def same_shape(x: Sequence[Any], y: Sequence[Any]) -> bool:
    """Whether two shapes are equal, symbols compared by name: comparing the symbols themselves could add a guard."""
    return [str(n) for n in x] == [str(n) for n in y]


def symbolic(size: Any) -> bool:
    """Whether a size is a symbol (a dynamic dimension) and not a number."""
    return isinstance(size, torch.SymInt)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode of the fake values of the graph's inputs; None if there are none."""
    modes = (getattr(value(n), "fake_mode", None) for n in placeholders(graph))
    return next((mode for mode in modes if mode is not None), None)


def source_name(node: fx.Node) -> str:
    """Where a placeholder comes from, as Python source: ``L['self']._modules['lm_head']._parameters['weight']``."""
    source = getattr(node, "_dynamo_source", None)
    if source is None and node.meta.get("grapharg") is not None:
        source = node.meta["grapharg"].source
    if source is None:
        return node.name
    name = source.name
    return name() if callable(name) else str(name)


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that made the node, such as ``model.layers.3.self_attn``; empty if unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = re.sub(r"^[LG]\['\w+'\]", "", list(stack.values())[-1][0])
    path = re.sub(r"(\._modules)?\['(\w+)'\]", r".\2", path).replace("._modules", "").lstrip(".")
    path = path.removeprefix("self.").removeprefix("_call.")
    return "" if path in ("self", "_call") else path  # the model itself


def is_module_tensor(node: fx.Node) -> bool:
    """Whether a placeholder is a parameter or a buffer of the traced module."""
    return re.search(r"_(parameters|buffers)_", node.name) is not None


def target_name(node: fx.Node) -> str:
    """Name of the method or function that the node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


# Matching.


def is_function(node: Any, targets: tuple[Any, ...]) -> bool:
    """Whether this is a node that calls one of these functions."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_method(node: Any, *names: str) -> bool:
    """Whether this is a node that calls a tensor's method of one of these names, or a function of that name."""
    return isinstance(node, fx.Node) and node.op in ("call_method", "call_function") and target_name(node) in names


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument that is passed by position or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def operands(node: Any, targets: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """The operands of ``targets(a, b)``, in both orders; empty for other nodes, and with more arguments (alpha=, out=)."""
    if not is_function(node, targets) or len(node.args) != 2 or node.kwargs:
        return []
    return [node.args, node.args[::-1]]


def only_user(node: fx.Node) -> fx.Node | None:
    """The user of the node, if it has exactly one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def schema_arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments by name of a node that calls an op of torch.library."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "setitem"}


def written_by(node: fx.Node) -> list[fx.Node]:
    """The values that the node changes in place: ``x += y``, ``x.add_(y)``, ``x[i] = y``, ``out=``, mutable ops."""
    if not node.op.startswith("call"):
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        given = schema_arguments(node)
        written: list[Any] = [given.get(a.name) for a in node.target._schema.arguments
                              if a.alias_info is not None and a.alias_info.is_write]
    else:
        name = target_name(node)
        plain = name.endswith("__") or getattr(node.target, "__module__", "") == "_operator"  # operator.not_ writes nothing
        in_place = name in _IN_PLACE or (name.endswith("_") and not plain)
        written = [node.args[0]] if in_place and node.args else []
        written.append(node.kwargs.get("out"))
    return [x for x in written if isinstance(x, fx.Node)]


def written_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether anything is changed in place between the two nodes. (It does not matter what: it may be a view.)"""
    node = first.next
    while node is not last and first is not last:
        if node.op == "root":
            raise ValueError(f"{last} does not come after {first}")
        if written_by(node):
            return True
        node = node.next
    return False


# Constants and guards.


def number_constants(node: fx.Node) -> list[int | float]:
    """Every number in the arguments of the node, booleans excluded."""
    found: list[Any] = []
    if node.op != "placeholder":
        fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return [x for x in found if type(x) in (int, float)]


def constant(arg: Any) -> Any:
    """The number that an argument of a node is known to be: itself, or what the trace proved a symbolic scalar to equal.

    Raises:
        ValueError: it can change from call to call.
    """
    val = value(arg)
    if isinstance(val, (torch.SymInt, torch.SymFloat)):
        expr = val.node.shape_env.replace(val.node.expr)
        if not expr.is_number:
            raise ValueError(f"{arg} is not a constant of the trace")
        return int(expr) if isinstance(val, torch.SymInt) else float(expr)
    if isinstance(val, torch.Tensor):
        raise ValueError(f"{arg} is a tensor, not a number")
    return val


def shape_conditions(graph: fx.Graph, size: Any, limits: Iterable[int] = ()) -> list[str]:
    """Guards of the trace that hold for only some values of the dynamic ``size``, such as ``s27 <= 8``.

    A graph with one is the model's path for some batch shapes; another path may compute something else.

    Args:
        limits: sizes beyond which the model cannot run at all; guards against them are left out.
    """
    if not symbolic(size):
        return []
    env = size.node.shape_env
    symbol = size.node.expr
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    found = []
    for guard in env.guards:
        expr = env.replace(guard.expr)  # two inputs of one length have become one symbol
        if symbol not in expr.free_symbols:
            continue
        expr_of_size = expr.subs({s: known[s] for s in expr.free_symbols - {symbol} if s in known})

        def holds(n: int, expr: Any = expr_of_size) -> bool:
            return bool(expr.subs({symbol: n}))

        below = next((n for n in limits if holds(n) and not holds(n + 1)), None)
        if not all(holds(n) for n in (2, 3, 7, 31, 257, 4099, 65537) if below is None or n < below):
            found.append(str(expr))
    return found
