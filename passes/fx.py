"""Helpers for FX graphs traced by Dynamo: values of nodes, matching, rewriting, execution, constants and guards."""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import operator
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._sympy.printers import PythonPrinter

LINEAR = (F.linear, torch._C._nn.linear)
ADD = (operator.add, torch.add)
SUB = (operator.sub, torch.sub)
MUL = (operator.mul, torch.mul)


def translator() -> Any:
    """What Dynamo is translating now, as its backends may ask; None outside a trace."""
    return getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)  # torch 2.11 leaves a None behind


def value(node: Any) -> Any:
    """The fake value of a node (Dynamo stores it as ``example_value``), or the argument itself if it is not a node."""
    if not isinstance(node, fx.Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def same_shape(x: Sequence[Any], y: Sequence[Any]) -> bool:
    """Whether two shapes are equal, symbols compared by name: comparing the symbols themselves could add a guard."""
    return [str(n) for n in x] == [str(n) for n in y]


def storage_of(tensor: torch.Tensor) -> int:
    """Which memory a tensor is in, also one of torch.vmap. Raises NotImplementedError for sparse tensors."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()._cdata


def sizes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides and offset, to compare: symbolic ones as expressions, which need no guard."""
    return tuple(n.node.expr if isinstance(n, torch.SymInt) else n
                 for n in (tensor.dim(), *tensor.shape, *tensor.stride(), tensor.storage_offset()))


def symbolic(size: Any) -> bool:
    """Whether a size is a symbol (a dynamic dimension) and not a number."""
    return isinstance(size, torch.SymInt)


def is_one(size: Any) -> bool:
    """Whether a size is the number 1; asking a symbol would make a guard."""
    return not symbolic(size) and size == 1


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode of the fake values of the graph's inputs; None if there are none."""
    return next((mode for n in placeholders(graph) if (mode := getattr(value(n), "fake_mode", None)) is not None), None)


def source_of(node: fx.Node) -> Any:
    """Where a placeholder comes from: Dynamo's ``Source``, or None."""
    return getattr(node, "_dynamo_source", None) or getattr(node.meta.get("grapharg"), "source", None)


def text_of(source: Any) -> str:
    """A ``Source`` as Python source: ``L['self']._modules['lm_head']._parameters['weight']``."""
    return str(source.name() if callable(source.name) else source.name)


def source_name(node: fx.Node) -> str:
    """``text_of`` the source of a placeholder; its name if it has none."""
    source = source_of(node)
    return node.name if source is None else text_of(source)


def last_key(node: fx.Node) -> str:
    """Of a placeholder the name of an argument of the call: ``position_ids`` of ``L['kwargs']['position_ids']``."""
    found = re.search(r"'(\w+)'\]$|^(\w+)$", source_name(node))
    return (found[1] or found[2]) if found else ""


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that made the node, such as ``model.layers.3.self_attn``; empty if unknown."""
    if not (stack := node.meta.get("nn_module_stack")):
        return ""
    path = re.sub(r"^[LG]\['\w+'\]", "", list(stack.values())[-1][0])
    path = re.sub(r"(\._modules)?\['(\w+)'\]", r".\2", path).replace("._modules", "").lstrip(".")
    path = path.removeprefix("self.").removeprefix("_call.")
    return "" if path in ("self", "_call") else path  # the model itself


def is_module_tensor(node: fx.Node) -> bool:
    """Whether a placeholder is a parameter or a buffer of a module, by its source: an attribute may have any name."""
    source = source_of(node)
    if source is None:
        return re.search(r"_(parameters|buffers)_", node.name) is not None
    return re.search(r"(\.|\[')_(parameters|buffers)('\])?\[", text_of(source)) is not None


def is_stored(node: fx.Node) -> bool:
    """Whether a placeholder is held by a module or a global name, and not an argument of the call."""
    name = source_name(node)
    return is_module_tensor(node) or re.match(r"G\[|L\['self'\]\.|L\['\w+'\]\._modules\b", name) is not None


def target_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def torch_name(node: fx.Node) -> str:
    """``target_name`` of a node that calls a method, or a function or operator of PyTorch or Python; empty for any other."""
    if isinstance(node.target, str):
        return node.target if node.op == "call_method" else ""
    name = getattr(node.target, "__name__", "")
    owners = (operator, torch, torch.Tensor, F, torch._C._nn, builtins)
    return name if any(getattr(owner, name, None) is node.target for owner in owners) else ""


def is_function(node: Any, targets: Collection[Any]) -> bool:
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
    two = is_function(node, targets) and len(node.args) == 2 and not node.kwargs
    return [node.args, node.args[::-1]] if two else []


def items_of(node: fx.Node) -> list[Any]:
    """The items of the index of ``x[...]``."""
    index: Any = node.args[1]
    return [*index] if isinstance(index, tuple) else [index]


def dims_of(items: Sequence[Any], ndim: int) -> Iterator[tuple[int, int]]:
    """(place, dimension) of each item of an index of a tensor of ``ndim`` dimensions that takes something of one. (A mask of
    several dimensions counts as one.)"""
    dim = 0
    for at, item in enumerate(items):
        if item is Ellipsis:
            dim = ndim - sum(i is not None for i in items[at + 1 :])
        elif item is not None:
            yield at, dim
            dim += 1


def only_user(node: fx.Node) -> fx.Node | None:
    """The user of the node, if it has exactly one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def named_arguments(node: fx.Node, names: Iterable[str]) -> dict[str, Any]:
    """The arguments that are given by name, of a function whose parameters have these ``names``."""
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def sdpa_arguments(node: fx.Node) -> dict[str, Any]:
    return named_arguments(node, ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"))


def schema_arguments(node: fx.Node) -> dict[str, Any]:
    """``named_arguments`` of a node that calls an op of torch.library."""
    return named_arguments(node, [a.name for a in node.target._schema.arguments])  # type: ignore[union-attr]


#: The functions that begin and end the operations of a torch.vmap.
VMAP = ("_vmap_increment_nesting", "_vmap_decrement_nesting")
_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "idiv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
             "ilshift", "irshift", "setitem"}


def written_by(node: fx.Node) -> list[fx.Node]:
    """The values that the node changes in place: ``x += y``, ``x.add_(y)``, ``x[i] = y``, ``out=``, ``inplace=True``, ops."""
    if not node.op.startswith("call"):
        return []
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):  # a body or a kernel of the user's: no schema says what it writes
        return [x for x in node.all_input_nodes if isinstance(value(x), torch.Tensor)]
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        overloads: list[Any] = [target]
        if isinstance(target, torch._ops.OpOverloadPacket):
            overloads = [getattr(target, name) for name in target.overloads()]
        written: list[Any] = []
        for schema in (overload._schema for overload in overloads):
            given = named_arguments(node, [a.name for a in schema.arguments])
            written += [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        written = [y for x in written for y in (x if isinstance(x, (list, tuple)) else [x])]
    else:
        name = target_name(node)
        plain = name.endswith("__") or getattr(target, "__module__", "") == "_operator"  # operator.not_ writes nothing
        bare = name[2:-2] if name.startswith("__") and name.endswith("__") else name  # x.__iadd__(y)
        parameters = _parameters(target) if getattr(target, "__module__", "") == F.__name__ else ()
        inplace = named_arguments(node, parameters).get("inplace")
        in_place = bare in _IN_PLACE or (name.endswith("_") and not plain) or bool(inplace)
        first = node.args[:1] if in_place else ()
        written = [*first[0]] if first and isinstance(first[0], (list, tuple)) else [*first]  # torch._foreach_add_([x], ...)
        out: Any = node.kwargs.get("out")
        written += out if isinstance(out, (list, tuple)) else [out]
    return list(dict.fromkeys(x for x in written if isinstance(x, fx.Node)))


@functools.lru_cache(maxsize=1024)
def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def written_memory(graph: fx.Graph) -> set[int]:
    """The memory (``storage_of``) that some node changes in place, through whatever view."""
    return {storage_of(value(x)) for n in graph.nodes for x in written_by(n) if is_tensor(x)}


def written_between(first: fx.Node, last: fx.Node, but: fx.Node | None = None) -> fx.Node | None:
    """The first node between the two ``but`` one that changes anything in place. (No matter what: it may be a view.)"""
    node = first.next
    while node is not last and first is not last:
        if node.op == "root":
            raise ValueError(f"{last} does not come after {first}")
        if node is not but and written_by(node):
            return node
        node = node.next
    return None


def constant(arg: Any) -> Any:
    """The number that an argument is known to be: itself, or what the trace proved a symbol to equal. Raises ValueError."""
    val = value(arg)
    if isinstance(val, (torch.SymInt, torch.SymFloat)):
        expr = val.node.shape_env.replace(val.node.expr)
        if not expr.is_number:
            raise ValueError(f"{arg} is not a constant of the trace")
        return int(expr) if isinstance(val, torch.SymInt) else float(expr)
    if isinstance(val, torch.Tensor):
        raise ValueError(f"{arg} is a tensor, not a number")
    return val


def shape_conditions(size: Any, longest: int | None = None) -> dict[str, int]:
    """Guards of the trace that hold for only some values of the dynamic ``size``, such as ``s27 <= 8``; of each, the least
    value from 2 on for which it does not hold. For other batch shapes the model may take another path, or not run at all.
    ``longest``: only sizes up to it matter; None: all."""
    if not symbolic(size):
        return {}
    env, symbol = size.node.shape_env, size.node.expr
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    found: dict[str, int] = {}
    for guard in env.guards:
        expr = env.replace(guard.expr)  # two inputs of one length have become one symbol
        if symbol not in expr.free_symbols or _of_layout(guard):
            continue
        of_size = expr.subs({s: known[s] for s in expr.free_symbols - {symbol} if s in known})
        holds = _on(of_size, symbol)
        last = longest or _LONGEST_STEP
        numbers = {int(n) for n in of_size.atoms() if n.is_Integer}
        if of_size.is_Relational and symbol in of_size.args and numbers & set(of_size.args):  # changes at that number only
            sizes: Iterable[int] = sorted({2, last, *(n + d for n in numbers for d in (-1, 0, 1))})
        else:
            sizes = range(2, last + 1)
        first = next((n for n in sizes if 2 <= n <= last and not holds(n)), None)
        if first is not None:
            found[str(expr)] = first
    return found


#: Rows of tokens of a step by hand, whose sequences may be of any length, are not expected to be longer.
_LONGEST_STEP = 2**16
#: In the meta of a graph: see ``longest_shown``.
LONGEST = "quire_longest"


def longest_shown(gm: fx.GraphModule) -> tuple[int, str] | None:
    """Of a graph that was raised without a greatest length: up to how many tokens of a sequence it is the model's path, and the
    conditions that end it there; None: for any number."""
    found: tuple[int, str] | None = gm.meta.get(LONGEST)
    return found


def _on(expr: Any, symbol: Any) -> Callable[[int], bool]:
    """A condition on one symbol as a function of its value."""
    code = compile(PythonPrinter().doprint(expr), "condition", "eval")
    given = {"math": math, "torch": torch}
    return lambda n: bool(eval(code, given, {str(symbol): n}))


#: Where operators choose by sizes how a result lies in memory, or the kernel that computes it: file of torch, part of a name.
_CHOICES = (("/torch/_prims_common/__init__.py", "contiguous"), ("/torch/_subclasses/fake_impls.py", "conv"),
            ("/torch/functional.py", "cdist"))


def _of_layout(guard: Any) -> bool:
    """Whether an operator made the guard to choose a layout (a slice that takes all of a stored tensor does) or a kernel: what
    is computed is the same, and the operator chooses again when it runs."""
    made_by: Any = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    path = Path(getattr(made_by, "filename", "")).as_posix()
    return any(path.endswith(file) and name in made_by.name for file, name in _CHOICES)


def graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module for ``graph`` whose code is written when it runs, or by ``written``: most are only rewritten and compiled."""
    return _LazyGraphModule(root, graph)


def written(gm: fx.GraphModule) -> fx.GraphModule:
    """The module, with the code of its graph, which changes no more."""
    _LazyGraphModule.force_recompile(gm)
    return gm


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy to rewrite: Dynamo reads the placeholders of its own module again after a backend returns."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, mapping))
    out = graph_module(gm, graph)
    for old, new in mapping.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    out.meta = dict(gm.meta)
    return out


def inline_checkpoints(gm: fx.GraphModule) -> None:
    """Put the bodies of torch.utils.checkpoint in its place, which has no effect without gradients."""
    for node in list(gm.graph.nodes):
        if node.target is not torch.ops.higher_order.tag_activation_checkpoint:
            continue
        of: Any = node.args[0]
        body = copy_graph(operator.attrgetter(str(of.target))(gm))
        inline_checkpoints(body)
        mapping: dict[fx.Node, fx.Node] = dict(zip(placeholders(body.graph), node.args[1:], strict=True))
        with gm.graph.inserting_before(node):
            results = gm.graph.graph_copy(body.graph, mapping)
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
        erase_dead(gm.graph, [of])


def with_own_code(function: Any) -> Any:
    """The function with a code object of its own: Dynamo's cache is per code object and holds eight traces."""
    code = function.__code__.replace()
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
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
    """Whether a node without users may be erased. FX counts what changes a value in place as pure (``x += y``, ``x.add_(y)``);
    other readers of that value would miss the change; and where a torch.vmap begins and ends."""
    return (node.op not in ("placeholder", "output") and not written_by(node) and not node.is_impure()
            and target_name(node) not in VMAP)


def erase_dead(graph: fx.Graph, candidates: Iterable[fx.Node], private: Collection[fx.Node] = ()) -> None:
    """Erase the candidates without users, then their inputs as they become unused. ``private``: nodes to erase
    even if they change a value in place: nothing else reads it."""
    todo, erased = list(candidates), set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in erased or node.users or not (node in private or is_pure(node)):
            continue
        todo += node.all_input_nodes
        graph.erase_node(node)
        erased.add(node)


def ancestors(node: fx.Node, stop: Callable[[fx.Node], bool] = lambda n: False) -> list[fx.Node]:
    """The node and everything it is computed from, in graph order; nodes where ``stop`` holds are kept but not entered."""
    found, todo = set[fx.Node](), [node]
    while todo:
        n = todo.pop()
        if n not in found and not stop(n):
            todo += n.all_input_nodes
        found.add(n)
    return [n for n in node.graph.nodes if n in found]


def evaluate(nodes: Iterable[fx.Node], env: dict[fx.Node, Any]) -> None:
    """Run ``nodes`` (in graph order) on the values in ``env``, adding theirs."""
    for node in nodes:
        if node in env:
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "call_function":
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        elif node.op == "call_method":
            env[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        elif node.op == "get_attr":
            env[node] = operator.attrgetter(str(node.target))(node.graph.owning_module)
        else:
            raise LookupError(f"no value for {node.op} {node.name}")
