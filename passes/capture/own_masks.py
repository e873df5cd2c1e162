"""Refuses masks of the user's: under quire's attention, transformers' mask functions build none, whatever they are given, and
layers get None for one."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.capture.followed import ATTENTION, functions_of, held_by, names_of, reached
from quire.passes.capture.reads import is_code_of

_MAKES_MASKS = re.compile(r".*\.create_\w*masks?\w*")
#: Arguments of these functions that leave it to attention which tokens see each other. Any other one that they take, in this
#: version of transformers or another, may change it.
_ALLOWED = frozenset(("config", "input_embeds", "inputs_embeds", "attention_mask", "cache_position", "past_key_values",
                      "position_ids", "layer_idx", "encoder_hidden_states", "allow_is_causal_skip",
                      "allow_is_bidirectional_skip", "allow_torch_fix", "device", "dtype"))
_KNOWN = ("quire", "torch", "transformers")
_MASK = "attention_mask"


class ChosenByUser(UnsupportedAttention):
    """Code outside transformers chooses the attention function of a layer, or makes the mask."""


def check_masks(model: torch.nn.Module, read: Mapping[str, Any]) -> None:
    """Refuse a model whose masks are not transformers' own. ``read``: of ``Reads.values``: the functions that its code calls.
    Raises UnsupportedAttention, which names the function, or the code that passes one to it; or ChosenByUser where the model
    may be traced as it is: its own forward or hooks make a mask, and nothing of the user's changes one of transformers', which
    makes more of them in a trace than elsewhere."""
    for name, function in _read_functions(read):
        if _MAKES_MASKS.fullmatch(name):
            raise UnsupportedAttention(f"{name} was replaced by {function.__qualname__}, which is not transformers' own. "
                                       "quire's attention builds no masks, so its mask would be lost; put transformers' back")
    changing = {p.name for f in _mask_makers() for p in inspect.signature(f).parameters.values()
                if p.kind is not p.VAR_KEYWORD} - _ALLOWED
    for where, function in own_functions(model, read):
        given = sorted(changing & strings_of(function.__code__)) or _by_position(function)
        if given:
            raise UnsupportedAttention(f"{where} passes {given[0]} to transformers' mask functions. quire's attention builds "
                                       "no masks, so it would be lost; masks with meaning of their own cannot be served")
    for where, function, module in _given_masks(model):
        if _reads_mask(function, module):
            raise UnsupportedAttention(f"{where} reads or changes the attention_mask that transformers hands to a layer. "
                                       "quire's attention builds no masks, so it would get None; let it only hand the mask on")
    around = [(where, _MakesMask(function, module)) for where, function, module in _around_masks(model)]
    for where, makes in around:
        if makes.found():
            of_transformers = any(each.calls_makers or (each.module is not model and each.found()) for _, each in around)
            kind = UnsupportedAttention if of_transformers else ChosenByUser
            raise kind(f"{where} makes an attention_mask of its own, or changes transformers'. "
                       "quire's attention builds no masks, so it would be lost; let it only hand masks on")


def own_functions(model: torch.nn.Module | None, read: Mapping[str, Any]) -> Iterator[tuple[str, types.FunctionType]]:
    """The user's code that a trace may run: functions that it ``read``, and methods and hooks of modules."""
    yield from _read_functions(read)
    if model is not None:
        yield from _own_methods(model)
        for module in model.modules():
            yield from _attached(module)


def _read_functions(read: Mapping[str, Any]) -> Iterator[tuple[str, types.FunctionType]]:
    for name, function in read.items():
        if isinstance(function, types.FunctionType) and not is_code_of(function, *_KNOWN):
            yield name, function


def read_by_masks() -> frozenset[str]:
    """The names that the code of transformers' mask functions reads, fields of configs among them."""
    return frozenset().union(*(strings_of(f.__code__) | names_of(f.__code__) for f in _functions()))


def _functions() -> list[types.FunctionType]:
    from transformers import masking_utils

    return [f for f in vars(masking_utils).values() if isinstance(f, types.FunctionType)
            and f.__module__ == masking_utils.__name__]


def _mask_makers() -> list[types.FunctionType]:
    return [f for f in _functions() if _MAKES_MASKS.fullmatch(f".{f.__name__}")]


def _by_position(function: types.FunctionType) -> list[str]:
    """Arguments of a mask function that a call in ``function`` passes by position and that are not allowed, or not known."""
    makers = {f.__name__: list(inspect.signature(f).parameters) for f in _mask_makers()}
    makers |= {name: makers[f.__name__] for name, f in _reached(function) if f in _mask_makers()}
    if not makers.keys() & names_of(function.__code__):
        return []
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ["what its source, which cannot be read, says"]
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        parameters = makers.get(getattr(call.func, "id", getattr(call.func, "attr", "")))
        for at, arg in enumerate(call.args if parameters else ()):
            assert parameters
            if isinstance(arg, ast.Starred) or at >= len(parameters):
                return ["arguments of unknown number"]
            if parameters[at] not in _ALLOWED:
                return [parameters[at]]
        for given in (k.value for k in call.keywords if k.arg is None) if parameters else ():
            if not isinstance(given, (ast.Name, ast.Dict)) or getattr(given, "id", "") in names_of(function.__code__):
                return ["arguments of unknown names"]
    return []


def _reached(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals and closed-over variables of a function that are functions, by the names that its code has for them."""
    return ((name, f) for name, f in held_by(function).items() if isinstance(f, types.FunctionType))


def _around_masks(model: torch.nn.Module) -> Iterator[tuple[str, types.FunctionType, torch.nn.Module]]:
    """The user's code that may give a mask to transformers' models, or to their layers: forwards and hooks of these models."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            forwards = (found for found in _own_methods(module, deep=False) if found[1].__name__ == "forward")
            called = {f: f.__qualname__ for _, forward in forwards for f, _ in reached(forward, module)}
            yield from ((name, f, module) for f, name in called.items())
            yield from ((*found, module) for found in _attached(module))


def _given_masks(model: torch.nn.Module) -> Iterator[tuple[str, types.FunctionType, torch.nn.Module]]:
    """The user's code that may be given a layer's mask: methods and hooks of the modules inside transformers' models."""
    from transformers import PreTrainedModel

    parts = {id(m): m for whole in model.modules() if isinstance(whole, PreTrainedModel) for m in whole.modules()
             if not isinstance(m, PreTrainedModel)}
    for module in {type(m): m for m in parts.values()}.values():
        yield from ((*found, module) for found in _own_methods(module, deep=False))
    for module in parts.values():
        yield from ((*found, module) for found in _attached(module))


def _attached(module: torch.nn.Module) -> Iterator[tuple[str, types.FunctionType]]:
    """The user's hooks of a module, the forward in the place of its class's, and what these call."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values(), vars(module).get("forward")):
        for function in {called: None for first, owner in functions_of(hook) for called, _ in reached(first, owner)}:
            yield function.__qualname__, function


class _MakesMask:
    """Whether code of the user's, a forward or a hook of a transformers model ``module``, gives anything for an
    ``attention_mask`` but what it was given, None, or what transformers' mask functions made. ``found()`` says it."""

    def __init__(self, function: types.FunctionType, module: torch.nn.Module, depth: int = 3) -> None:
        self.function, self.module, self.depth = function, module, depth  # of methods that are followed
        self.makers = {f.__name__ for f in _mask_makers()} | {n for n, f in _reached(function) if f in _mask_makers()}
        self.calls_makers = bool(self.makers & names_of(function.__code__))
        self.assigned: dict[str, list[ast.expr | None]] = {}  # None: in a way that is not followed

    def found(self) -> bool:
        code = self.function.__code__
        if not any(_MASK in part for part in (code.co_varnames, names_of(code), strings_of(code))):
            return False
        return self._tree is None or not all(map(self._handed, self._given()))

    def returned(self) -> bool:
        """Whether all that the code returns is such a mask."""
        tree = self._tree
        each = [] if tree is None else [n.value for n in ast.walk(tree) if isinstance(n, ast.Return)]
        return bool(each) and all(value is not None and self._handed(value) for value in each)

    @functools.cached_property
    def _tree(self) -> ast.AST | None:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(self.function)))
        except (OSError, TypeError, SyntaxError):
            return None
        for node in ast.walk(tree):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, node.value)
            elif isinstance(node, (ast.AugAssign, ast.For, ast.comprehension)):
                self._assign(node.target, None)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._assign(node.optional_vars, None)
        return tree

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self.assigned.setdefault(target.id, []).append(value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            alike = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            for i, each in enumerate(target.elts):
                self._assign(each.value if isinstance(each, ast.Starred) else each,
                             value.elts[i] if alike else None)  # type: ignore[union-attr]

    def _given(self) -> Iterator[ast.expr]:
        """What is given for an attention_mask: to a call, in a dictionary, to a variable of that name."""
        for node in ast.walk(tree) if (tree := self._tree) is not None else ():
            if isinstance(node, ast.keyword) and node.arg == _MASK:
                yield node.value
            elif isinstance(node, ast.Dict):
                yield from (v for k, v in zip(node.keys, node.values, strict=True)
                            if isinstance(k, ast.Constant) and k.value == _MASK)
            elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Subscript) and isinstance(t.slice, ast.Constant)
                                                      and t.slice.value == _MASK for t in node.targets):
                yield node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) > 1 and (
                    (at := node.args[0]) and isinstance(at, ast.Constant) and at.value == _MASK):
                yield node.args[1]  # kwargs.setdefault, kwargs.pop
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "forward":
                yield from (x for x in node.args[1:2] if not isinstance(x, ast.Name))
        if _MASK in self.assigned:
            yield ast.Name(_MASK, ast.Load())

    def _handed(self, value: ast.expr, inside: frozenset[str] = frozenset()) -> bool:
        if isinstance(value, ast.Constant):
            return value.value is None
        if isinstance(value, ast.Name):
            each = self.assigned.get(value.id, [])
            return value.id in inside or (bool(each) or value.id == _MASK) and all(
                x is not None and self._handed(x, inside | {value.id}) for x in each)
        if isinstance(value, ast.Subscript):
            return self._handed(value.value, inside) or self._is_mask_of(value.slice)
        if isinstance(value, ast.Dict):
            return all(self._handed(x, inside) for x in value.values)
        if isinstance(value, ast.IfExp):
            return self._handed(value.body, inside) and self._handed(value.orelse, inside)
        if not isinstance(value, ast.Call):
            return False
        name = getattr(value.func, "id", getattr(value.func, "attr", ""))
        if name in self.makers or (name in ("get", "pop") and value.args and self._is_mask_of(value.args[0])):
            return True
        of_self = isinstance(value.func, ast.Attribute) and getattr(value.func.value, "id", "") == "self"
        method = getattr(type(self.module), name, None) if of_self else None
        return isinstance(method, types.FunctionType) and self.depth > 0 and _MakesMask(
            method, self.module, self.depth - 1).returned()

    @staticmethod
    def _is_mask_of(key: ast.expr) -> bool:
        return isinstance(key, ast.Constant) and key.value == _MASK


def _reads_mask(function: types.FunctionType, module: torch.nn.Module) -> bool:
    """Whether code does anything with ``attention_mask`` but hand it to another module's or attention's forward."""
    code = function.__code__
    if not any(_MASK in part for part in (code.co_varnames, names_of(code), strings_of(code))):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return True
    handed = {id(arg) for call in ast.walk(tree) if isinstance(call, ast.Call) and _hands_on(call.func, module)
              for arg in (*call.args, *(k.value for k in call.keywords if k.arg == _MASK))}
    return any((isinstance(n, ast.Name) and n.id == _MASK and id(n) not in handed)
               or (isinstance(n, ast.Constant) and n.value == _MASK) for n in ast.walk(tree))


def _hands_on(called: ast.expr, module: torch.nn.Module) -> bool:
    """Whether this is ``super().forward``, ``self.module``, ``Class.forward``, the attention function of transformers, or a
    method that takes an attention_mask, and is looked at itself."""
    if isinstance(called, ast.Name):
        return called.id in ATTENTION
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self":
        method = getattr(type(module), called.attr, None)
        if isinstance(method, types.FunctionType) and called.attr != "forward":
            return _MASK in inspect.signature(method).parameters
    while isinstance(called, ast.Attribute):
        if called.attr == "forward":
            return True
        called = called.value
    return isinstance(called, ast.Name) and called.id == "self"


def _own_methods(model: torch.nn.Module, deep: bool = True) -> Iterator[tuple[str, types.FunctionType]]:
    for cls in {cls: None for module in (model.modules() if deep else (model,)) for cls in type(module).__mro__}:
        if cls.__module__.partition(".")[0] in ("quire", "torch", "builtins"):
            continue
        for method in vars(cls).values():
            while hasattr(method, "__wrapped__"):
                method = method.__wrapped__
            if isinstance(method, types.FunctionType) and not is_code_of(method, *_KNOWN):
                yield method.__qualname__, method


def strings_of(code: types.CodeType) -> set[str]:
    """Strings among the constants of the code, names of keyword arguments and those of nested functions included."""
    found: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= strings_of(constant)
        elif isinstance(constant, (str, tuple)):
            found.update(x for x in ([constant] if isinstance(constant, str) else constant) if isinstance(x, str))
    return found
