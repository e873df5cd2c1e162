"""Whether a forward that a user wrote reads what transformers' ``generate`` gives it, and an engine does not."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from typing import Any

import torch

from quire.passes.capture.reads import is_code_of

_NOT_GIVEN = frozenset(("attention_mask", "past_key_values", "cache_position"))


def reads_inputs(model: torch.nn.Module, own_forward: Any) -> str | None:
    """Says that the model's forward reads an attention mask or a cache, if it is not transformers' own and does more with them
    than to pass them on; or None. ``own_forward``: one that the instance had before it was paged, or None."""
    for forward in (own_forward, *(vars(cls).get("forward") for cls in type(model).__mro__)):
        found = forward
        while found is not None and (plain := getattr(found, "__func__", found)) is not None:
            found = getattr(plain, "__wrapped__", None)
            if isinstance(plain, types.FunctionType) and not is_code_of(plain, "quire", "torch", "transformers"):
                names = _NOT_GIVEN & {*plain.__code__.co_varnames, *map(str, plain.__code__.co_consts)}
                read = sorted(name for name in names if not _passed_on(plain, name, model))
                if read:
                    return f"{plain.__qualname__} reads {read[0]}"
    return None


def _passed_on(function: types.FunctionType, name: str, model: torch.nn.Module) -> bool:
    """Whether a function does nothing with a variable but to give it to a module or to another forward."""
    try:  # of its code: a function that wraps another one has the other's source
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, SyntaxError, TypeError):
        return False
    nodes = [node for statement in _run_by_default(tree.body[0]) for node in ast.walk(statement)]
    passed = {id(value) for call in nodes if isinstance(call, ast.Call) and _is_forward(call.func, function, model)
              for value in (*call.args, *(keyword.value for keyword in call.keywords))}
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


def _is_forward(called: ast.expr, function: types.FunctionType, model: torch.nn.Module) -> bool:
    if isinstance(called, ast.Name):
        return called.id in function.__code__.co_freevars  # the forward that a wrapper calls
    if not isinstance(called, ast.Attribute):
        return False
    of_self = isinstance(called.value, ast.Name) and called.value.id == "self"
    return called.attr == "forward" or (of_self and isinstance(getattr(model, called.attr, None), torch.nn.Module))
