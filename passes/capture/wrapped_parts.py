"""What users put around parts of a model, hooks and forwards that call the part's own, and what it reads of a cache.

An engine's steps have no cache object: attention keeps its keys by itself. A model's own code asks for one in order to make or
update it, which a trace without cache leaves out rightly. But code around a part of transformers' that asks whether there is a
cache, or how long it is, computes something else with ``generate`` of transformers than in a step here, and a trace does not
show it: "steer only tokens after the prompt" would steer none. So such code may pass these arguments on, and no more.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from quire.attn_ops.backend import UnsupportedAttention

CACHE = frozenset(("past_key_values", "past_key_value", "cache_position", "use_cache"))
#: Packages whose hooks and wrappers are known: they read none of these, or only for adapters that are refused.
_KNOWN = ("quire", "torch", "transformers", "peft", "accelerate", "trl", "contextlib", "functools")
_DEPTH = 3  # of calls of other functions of the user's that are followed


def check_wrapped_parts(model: torch.nn.Module) -> None:
    """Raises UnsupportedAttention if code around a part of the model reads the cache or ``use_cache``."""
    if (found := reader_around_parts(model, CACHE)) is not None:
        raise UnsupportedAttention(
            f"{found}, which an engine does not give it: its steps have no cache object. Decide by what a step has (positions, "
            "hidden states), or use the model's own generate")


def reader_around_parts(model: torch.nn.Module, names: frozenset[str]) -> str | None:
    """Says which hook, or which forward that calls the one it overrides, reads one of the arguments ``names``; or None."""
    for path, module in model.named_modules():
        where = path or type(model).__name__
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            for function in _functions(hook):
                if read := _mentions(function, names):
                    return f"a hook of {where}, {function.__qualname__}, reads {read[0]}"
        for forward in (vars(module).get("forward"), *(vars(cls).get("forward") for cls in type(module).__mro__)):
            for function in filter(_wraps, _functions(forward)):
                for name in sorted(names & names_in(function.__code__)):
                    if not passed_on(function, name, module):
                        return f"{function.__qualname__} of {where} reads {name}"
    return None


#: Functions of packages behind which there are none of the user's: ``generate`` asks at each call.
_clean: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()


def _functions(given: Any) -> Sequence[types.FunctionType]:
    """The user's functions behind a hook or a forward, those that others wrap among them."""
    if given is None or (isinstance(given, types.FunctionType) and given in _clean):
        return ()
    found = [*_unwrapped(given)]
    if not found and isinstance(given, types.FunctionType):
        _clean.add(given)
    return found


def _unwrapped(held: Any) -> Iterator[types.FunctionType]:
    while held is not None:
        while isinstance(held, functools.partial):
            held = held.func
        if not isinstance(held, (types.FunctionType, types.MethodType)):
            held = vars(type(held)).get("__call__")
        held = getattr(held, "__func__", held)
        if not isinstance(held, types.FunctionType):
            return
        if str(held.__globals__.get("__name__")).partition(".")[0] not in _KNOWN:
            yield held
        held = getattr(held, "__wrapped__", None)


def _wraps(function: types.FunctionType) -> bool:
    """Whether a forward calls another one, of ``super()`` or of a class or object: a part written anew does not."""
    return "__class__" in function.__code__.co_freevars or "forward" in function.__code__.co_names


def names_in(code: types.CodeType) -> set[str]:
    """Variables, attributes and strings in code, those of nested functions included."""
    found = {*code.co_varnames, *code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_in(constant)
        elif isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, tuple):
            found |= {item for item in constant if isinstance(item, str)}
    return found


def _mentions(function: types.FunctionType, names: frozenset[str], depth: int = _DEPTH) -> list[str]:
    """Those of ``names`` that a function mentions, or one that it calls by a global name or from its closure."""
    found = names & names_in(function.__code__)
    if depth and not found:
        for called in _called(function):
            found |= set(_mentions(called, names, depth - 1))
    return sorted(found)


def _called(function: types.FunctionType) -> Iterator[types.FunctionType]:
    reached = [function.__globals__.get(name) for name in function.__code__.co_names]
    for cell in function.__closure__ or ():
        try:
            reached.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    for held in reached:
        if isinstance(held, (types.FunctionType, types.MethodType, functools.partial)):
            yield from _functions(held)


def passed_on(function: types.FunctionType, name: str, owner: torch.nn.Module) -> bool:
    """Whether a function does nothing with a variable but to give it to a module or to another forward. ``owner``: the module
    whose forward it is."""
    try:  # of its code: a function that wraps another one has the other's source
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, SyntaxError, TypeError):
        return False
    nodes = [node for statement in _run_by_default(tree.body[0]) for node in ast.walk(statement)]
    passed = {id(value) for call in nodes if isinstance(call, ast.Call) and _is_forward(call.func, function, owner)
              for value in (*call.args, *(keyword.value for keyword in call.keywords))}
    # Keys of a dict that is written, and of an entry that is set.
    passed |= {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    passed |= {id(node.slice) for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)}
    return all(id(node) in passed for node in nodes
               if (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Constant) and node.value == name))


def _run_by_default(function: ast.stmt) -> list[ast.stmt]:
    """The statements of a function up to ``if not option: ... return ...``, where ``option`` is a keyword of its own that is
    False by default: TRL's forward does more only where a trainer asks for it, and ``generate`` does not."""
    if not isinstance(function, ast.FunctionDef):
        return [function]
    off = {argument.arg for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
           if isinstance(default, ast.Constant) and default.value is False}
    for i, statement in enumerate(function.body):
        stored = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        off -= stored
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return) and isinstance(
                statement.test, ast.UnaryOp) and isinstance(statement.test.op, ast.Not) and isinstance(
                statement.test.operand, ast.Name) and statement.test.operand.id in off:
            return function.body[: i] + statement.body
    return function.body


def _is_forward(called: ast.expr, function: types.FunctionType, owner: torch.nn.Module) -> bool:
    if isinstance(called, ast.Name):
        return called.id in function.__code__.co_freevars  # the forward that a wrapper calls
    if not isinstance(called, ast.Attribute):
        return False
    of_self = isinstance(called.value, ast.Name) and called.value.id == "self"
    return called.attr == "forward" or (of_self and isinstance(getattr(owner, called.attr, None), torch.nn.Module))
