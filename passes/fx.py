"""Small helpers on FX graphs traced by Dynamo."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._pytree import tree_leaves


def value(node: Any) -> Any:
    """The fake value of a node (Dynamo stores it as ``example_value``), or the argument itself if it is no node."""
    if not isinstance(node, fx.Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def source_name(node: fx.Node) -> str:
    """Where a placeholder comes from, as Python source: ``L['self']._modules['lm_head']._parameters['weight']``."""
    source = getattr(node, "_dynamo_source", None)
    if source is None and "grapharg" in node.meta and node.meta["grapharg"] is not None:
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
    """Is the placeholder a parameter or a buffer of the traced module?"""
    return re.search(r"_(parameters|buffers)_", node.name) is not None


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy to rewrite. Dynamo reads its own module's placeholders again after a backend returns, so that one stays."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, mapping)
    graph.output(result)
    out = fx.GraphModule(gm, graph)
    for old, new in mapping.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    out.meta = dict(gm.meta)
    return out


def with_own_code(function: Any) -> Any:
    """The function with a code object of its own. Dynamo keeps its cache by code object, and traces one at most eight times, so
    what is compiled for one model after another must not share it."""
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__,
                             function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def is_pure(node: fx.Node) -> bool:
    """May the node be dropped when nobody uses it? In-place methods look pure to FX, and dropping them corrupts graphs."""
    if node.op in ("placeholder", "output"):
        return False
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_method" and target.endswith("_") and not target.endswith("__"):
        return False
    return target not in ("setitem", "copy_", "index_put_") and not node.is_impure()


def is_function(node: Any, targets: tuple[Any, ...]) -> bool:
    """Is it a node that calls one of these functions?"""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_method(node: Any, *names: str) -> bool:
    """Is it a node that calls a tensor's method of one of these names, or a function called so?"""
    return isinstance(node, fx.Node) and ((node.op == "call_method" and node.target in names) or (
        node.op == "call_function" and getattr(node.target, "__name__", "") in names))


_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "setitem"}


def written_by(node: fx.Node) -> list[fx.Node]:
    """The values that the node changes in place: ``x += y``, ``x.add_(y)``, ``x[i] = y``, ``out=``, ops that say so."""
    if not node.op.startswith("call"):
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        arguments = node.target._schema.arguments
        given = {a.name: x for a, x in zip(arguments, node.args, strict=False)} | node.kwargs
        written: list[Any] = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    else:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        plain = name.endswith("__") or getattr(node.target, "__module__", "") == "_operator"  # operator.not_ writes nothing
        in_place = name in _IN_PLACE or (name.endswith("_") and not plain)
        written = [node.args[0]] if in_place and node.args else []
        written.append(node.kwargs.get("out"))
    return [x for x in written if isinstance(x, fx.Node)]


def written_between(first: fx.Node, last: fx.Node) -> bool:
    """Is anything changed in place behind ``first`` and before ``last``? (What, does not matter: it may be a view.)"""
    node = first
    while node is not last:
        if node is not first and written_by(node):
            return True
        node = node.next
        if node.op == "root":
            raise ValueError(f"{last} does not come after {first}")
    return False


def erase_dead(graph: fx.Graph, candidates: Iterable[fx.Node]) -> int:
    """Erase those candidates that have no user, then their inputs as they become unused. Never a full dead-code sweep."""
    todo, erased = list(candidates), 0
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen or node.users or not is_pure(node):
            continue
        seen.add(node)
        inputs = list(node.all_input_nodes)
        graph.erase_node(node)
        erased += 1
        todo += inputs
    return erased


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

    def look_up(arg: Any, node: fx.Node) -> Any:
        if isinstance(arg, fx.Node):
            return env[arg]
        if isinstance(arg, (list, tuple)):
            return type(arg)(look_up(a, node) for a in arg)
        if isinstance(arg, slice):
            return slice(look_up(arg.start, node), look_up(arg.stop, node), look_up(arg.step, node))
        if isinstance(arg, dict):
            return {k: look_up(v, node) for k, v in arg.items()}
        if replace is not None and type(arg) in (int, float):
            return replace(node, arg)
        return arg

    for node in nodes:
        if node in env:
            continue
        args, kwargs = look_up(tuple(node.args), node), look_up(dict(node.kwargs), node)
        if node.op == "call_function":
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        elif node.op == "call_method":
            env[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        elif node.op == "get_attr":
            owner: Any = node.graph.owning_module
            for part in str(node.target).split("."):
                owner = getattr(owner, part)
            env[node] = owner
        else:
            raise LookupError(f"no value for {node.op} {node.name}")


def compute_value(node: fx.Node) -> None:
    """Give a new node the fake value that its inputs' fake values lead to."""
    inputs = {n: value(n) for n in node.all_input_nodes}
    mode = next(m for x in tree_leaves(list(inputs.values())) if (m := getattr(x, "fake_mode", None)) is not None)
    with mode, enable_python_dispatcher(), torch.no_grad():
        evaluate([node], inputs)
    node.meta["example_value"] = inputs[node]


def number_constants(node: fx.Node) -> list[int | float]:
    """Every number written in the arguments of the node (booleans apart)."""
    found: list[int | float] = []

    def visit(arg: Any) -> None:
        if type(arg) in (int, float):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            for a in arg:
                visit(a)
        elif isinstance(arg, slice):
            for a in (arg.start, arg.stop, arg.step):
                visit(a)
        elif isinstance(arg, dict):
            for a in arg.values():
                visit(a)

    if node.op != "placeholder":
        visit(list(node.args))
        visit(dict(node.kwargs))
    return found


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


def symbolic(size: Any) -> bool:
    """Is this size a symbol (a dynamic dimension) and not a number?"""
    return isinstance(size, torch.SymInt)


def shape_conditions(graph: fx.Graph, size: Any, limits: Iterable[int] = ()) -> list[str]:
    """Guards of the trace that hold for some values of the dynamic ``size`` only, such as ``s27 <= 8``.

    A graph with one is the model's path for some batch shapes; another path may compute something else. ``limits``: sizes
    beyond which the model cannot run at all, whose guards are left out.
    """
    if not symbolic(size):
        return []
    env = size.node.shape_env
    symbol = size.node.expr
    hints = {s: env.backed_var_to_val[s] if hasattr(env, "backed_var_to_val") else env.var_to_val[s]
             for g in env.guards for s in g.expr.free_symbols}
    found = []
    for guard in env.guards:
        expr = env.replace(guard.expr)  # two inputs of one length have become one symbol
        if symbol in expr.free_symbols:
            others = {s: v for s, v in hints.items() if s != symbol}

            def holds(n: int, expr: Any = expr, others: Any = others) -> bool:
                return bool(expr.subs(others).subs({symbol: n}))

            below = next((n for n in limits if holds(n) and not holds(n + 1)), None)
            if not all(holds(n) for n in (2, 3, 7, 31, 257, 4099, 65537) if below is None or n < below):
                found.append(str(expr))
    return found
