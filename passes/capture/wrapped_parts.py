"""What users' code, hooks and forwards of their own, reads of a cache.

An engine's steps have no cache object: attention keeps its keys by itself. A forward asks for one in order to make or update
it, which a trace without cache leaves out rightly. But code that asks whether there is a cache, or how long it is, and computes
something else then, does so with ``generate`` of transformers and not in a step here, and a trace does not show it: "steer only
tokens after the prompt" would steer none. So users' code may hand these arguments on to what is known or looked at itself,
update the cache, make one, and work out positions where it was given none. Anything else is refused.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.capture.followed import CACHE, functions_of, names_in, parameters_of, reached, reads_of, rest_of
from quire.passes.capture.without_loss import without_loss


def check_wrapped_parts(model: torch.nn.Module) -> None:
    """Raises UnsupportedAttention if users' code in the model reads the cache or ``use_cache``."""
    if (found := reader_around_parts(model, CACHE)) is not None:
        raise UnsupportedAttention(
            f"{found}, which an engine does not give it: its steps have no cache object. Decide by what a step has (positions, "
            "hidden states), or use the model's own generate")


def reader_around_parts(model: torch.nn.Module, names: frozenset[str]) -> str | None:
    """Says which hook, or which forward, reads one of the arguments ``names``; or None. Those of ``names`` that are no cache
    are looked for where a forward calls the one that it overrides."""
    seen, called = set[tuple[types.FunctionType, type]](), outermost(model)
    for path, module in model.named_modules():
        where = path or type(model).__name__
        with_kwargs = {*module._forward_pre_hooks_with_kwargs, *module._forward_hooks_with_kwargs}
        for at, hook in (*module._forward_pre_hooks.items(), *module._forward_hooks.items()):
            for function, owner in functions_of(hook):
                read = _mentions(function, names, owner)
                if not read and at in with_kwargs:
                    read = _read_by_hook(hook, function, owner, module, names)
                if read:
                    return f"a hook of {where}, {function.__qualname__}, reads {read[0]}"
        for forward in (vars(module).get("forward"), *(vars(cls).get("forward") for cls in type(module).__mro__)):
            for function, owner in functions_of(forward):
                owner = module if owner is None and forward is not vars(module).get("forward") else owner
                if (function, type(module)) in seen:
                    continue  # of another layer of this kind
                seen.add((function, type(module)))
                if read := reads_of(function, names if _wraps(function) else names & CACHE, owner,
                                    called=module is model and function is called):
                    return f"{function.__qualname__} of {where} reads {read[0]}"
    return None


def outermost(model: torch.nn.Module) -> types.FunctionType | None:
    """The user's function that gets the arguments of a call of the model as they are; None: others may change them."""
    if model._forward_pre_hooks or torch_module._global_forward_pre_hooks or (
            type(model).__call__ is not torch.nn.Module.__call__):
        return None
    own: Any = vars(model).get("forward")
    if type(own).__module__.startswith("quire."):
        own = own.original  # of a paged model
    found = functions_of(type(model).forward if own is None else own)
    return found[0][0] if found else None


def names_without_loss(function: types.FunctionType) -> set[str]:
    """Variables, attributes and strings in the code of what ``outermost`` gave, but for what only labels make run."""
    names, seen = names_in(function.__code__), set[str]()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__))).body[0]
    except (OSError, SyntaxError, TypeError):
        return names
    if not isinstance(tree, ast.FunctionDef):
        return names
    for node in (part for statement in without_loss(tree) for part in ast.walk(statement)):
        each = (getattr(node, name, None) for name in ("id", "attr", "arg", "value", "name"))
        seen |= {x for x in each if isinstance(x, str)}
    return names & seen


def _wraps(function: types.FunctionType) -> bool:
    """Whether a forward calls another one, of ``super()`` or of a class or object: a part written anew does not."""
    return "__class__" in function.__code__.co_freevars or "forward" in function.__code__.co_names


def _mentions(function: types.FunctionType, names: frozenset[str], owner: Any) -> list[str]:
    """Those of ``names`` that a function mentions, or one that it calls."""
    return sorted(set().union(*(names & names_in(f.__code__) for f, _ in reached(function, owner))))


def _read_by_hook(hook: Any, function: types.FunctionType, owner: Any, module: torch.nn.Module,
                  names: frozenset[str]) -> list[str]:
    """What of ``names`` a hook may read that is given all keyword arguments, as the third of its own."""
    before = 0
    while isinstance(hook, functools.partial):
        before, hook = before + len(hook.args), hook.func
    parameters, at = parameters_of(function.__code__), before + (owner is not None)
    held = {parameters[at]: module} if at < len(parameters) else {}
    given = parameters[at + 2] if at + 2 < len(parameters) else rest_of(function.__code__, inspect.CO_VARARGS)
    return reads_of(function, names, owner, {given} - {""}, held)
