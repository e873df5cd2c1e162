"""Follows arguments through users' code: which of them it does more with than to hand them on."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import functools
import inspect
import textwrap
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from quire.passes.capture.without_loss import all_of, without_loss

CACHE = frozenset(("past_key_values", "past_key_value", "layer_past", "cache_position", "use_cache"))
#: Packages whose hooks and wrappers are known: they read none of these, or only for adapters that are refused.
_KNOWN = ("quire", "torch", "transformers", "peft", "accelerate", "trl", "contextlib", "functools")
#: Names that transformers' models have for the attention function that they chose.
ATTENTION = ("attention_interface", "attention_fn")
_DEPTH = 3  # of calls of other functions of the user's that are followed
_ANY = "its keyword arguments in a way that cannot be followed"  # what is read, where it may be any of them
#: A user's function, and what its first parameter is: of a method the object, of a module's forward the module.
_Code = tuple[types.FunctionType, Any]


#: Functions of packages behind which there are none of the user's: ``generate`` asks at each call.
_clean: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()


def functions_of(given: Any) -> Sequence[_Code]:
    """The user's functions behind a hook or a forward, what they wrap among them, and the objects they are methods of."""
    if given is None or (isinstance(given, types.FunctionType) and given in _clean):
        return ()
    found = [*_unwrapped(given)]
    if not found and isinstance(given, types.FunctionType):
        _clean.add(given)
    return found


def _unwrapped(held: Any) -> Iterator[_Code]:
    owner: Any = None
    while held is not None:
        while isinstance(held, functools.partial):
            held = held.func
        if not isinstance(held, (types.FunctionType, types.MethodType)):
            owner, held = held, vars(type(held)).get("__call__")
        owner, held = getattr(held, "__self__", owner), getattr(held, "__func__", held)
        if not isinstance(held, types.FunctionType):
            return
        if not is_known(held.__globals__.get("__name__")):
            yield held, owner
        held = getattr(held, "__wrapped__", None)


def is_known(module: Any) -> bool:
    """Whether a module is of one of these packages, by its name."""
    return str(module).partition(".")[0] in _KNOWN


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


def reached(function: types.FunctionType, owner: Any, depth: int = _DEPTH) -> Iterator[_Code]:
    """A user's function, and those of the user's that it calls by a global name, from its closure, or as methods of ``owner``
    (of a module only where its class is the user's)."""
    yield function, owner
    names = names_of(function.__code__)
    called = [x for x in held_by(function).values() if isinstance(x, (types.FunctionType, types.MethodType, functools.partial))]
    called += [types.MethodType(found, owner) for name in names if owner is not None and name != "forward" and isinstance(
        found := getattr(type(owner), name, None), types.FunctionType)]
    for each, its_owner in (pair for found in called for pair in functions_of(found)) if depth else ():
        if each is not function:
            yield from reached(each, its_owner, depth - 1)


def names_of(code: types.CodeType) -> set[str]:
    """Names of globals, attributes and closed-over variables that the code reads, nested functions included."""
    return {*code.co_names, *code.co_freevars}.union(
        *(names_of(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def held_by(function: types.FunctionType) -> dict[str, Any]:
    """The globals and closed-over variables that a function has names for, and its defaults that are called, by these names."""
    held = {name: function.__globals__[name] for name in names_of(function.__code__) if name in function.__globals__}
    last = dict(zip(parameters_of(function.__code__)[::-1], (function.__defaults__ or ())[::-1], strict=False))
    held |= {name: x for name, x in (last | (function.__kwdefaults__ or {})).items() if callable(x)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            held[name] = cell.cell_contents
    return held


def parameters_of(code: types.CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount]


def rest_of(code: types.CodeType, kind: int) -> str:
    """The name of the parameter for all other arguments, by position or by keyword; "": it has none."""
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS & ~kind)
    return code.co_varnames[count] if code.co_flags & kind else ""


def reads_of(function: types.FunctionType, names: frozenset[str], owner: Any, given: set[str] | frozenset[str] = frozenset(),
             held: Mapping[str, Any] = types.MappingProxyType({}), depth: int = _DEPTH, called: bool = False) -> list[str]:
    """What of its arguments ``names`` a user's function uses otherwise than allowed, for an error. ``owner``: its first
    parameter. ``given``: parameters that may hold such an argument, whatever their names. ``held``: what others are.
    ``called``: it is what a call of the model calls, with no labels."""
    code = function.__code__
    tracked = {name: name for name in names} | {name: _ANY for name in given}
    if rest := rest_of(code, inspect.CO_VARKEYWORDS):
        tracked[rest] = _ANY
    if not given and not rest and not names & names_in(code):
        return []
    try:  # of its code: a function that wraps another one has the other's source
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return [*sorted(names & names_in(code)), _ANY]
    if called and isinstance(tree.body[0], ast.FunctionDef):
        tree.body[0].body = without_loss(tree.body[0])
    bodies: list[Sequence[ast.AST]] = [_run_by_default(tree.body[0])]
    if code.co_name == "<lambda>":
        bodies = [[ast.copy_location(ast.Return(x.body), x)] for x in ast.walk(tree) if isinstance(x, ast.Lambda)
                  and [a.arg for a in x.args.args] == [*parameters_of(code)]]
    known = {name: x for name, x in held_by(function).items() if name not in parameters_of(code)} | {**held}
    known |= {name: owner for name in parameters_of(code)[:1] if owner is not None and name not in held}
    found = [read for body in bodies for read in _Uses(body, names, tracked, known, depth).others()]
    return found if bodies else [_ANY]


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


class _Uses:
    """How code uses variables that hold arguments ``names``, or all keyword arguments. ``tracked``: each such variable, and
    what it holds, for an error. ``known``: objects behind names. ``others()`` gives what is used otherwise than allowed."""

    def __init__(self, body: Sequence[ast.AST], names: frozenset[str], tracked: dict[str, str], known: Mapping[str, Any],
                 depth: int) -> None:
        self.body, self.names, self.tracked, self.known, self.depth = body, names, tracked, known, depth
        self.derived = dict[str, str]()  # variables that were computed from such ones
        self.nodes = [node for statement in body for node in ast.walk(statement)]
        self.assigned: dict[str, list[ast.AST]] = {}
        for node in self.nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name) and node.value is not None:
                        self.assigned.setdefault(target.id, []).append(node.value)
            elif isinstance(node, (ast.For, ast.comprehension)):
                for name in (x for x in ast.walk(node.target) if isinstance(x, ast.Name)):
                    self.assigned.setdefault(name.id, []).append(node)

    def others(self) -> list[str]:
        while True:
            self.allowed, self.refused = set[int](), list[str]()
            self.new_tracked, self.new_derived = dict[str, str](), dict[str, str]()  # from the next round on
            for node in self.nodes:
                self._use(node)
            for node in self.nodes:
                self._assignment(node)
            self.new_derived = {name: what for name, what in self.new_derived.items() if name not in self.new_tracked}
            if not (self.new_tracked.keys() - self.tracked.keys() or self.new_derived.keys() - self.derived.keys()):
                break
            self.tracked, self.derived = self.new_tracked | self.tracked, self.new_derived | self.derived
        return self.refused + [what for node in self.nodes if (what := self._left(node))]

    def _held(self, node: ast.AST) -> str | None:
        """What of the arguments a node is: a variable that holds it, or its name as a key."""
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                return node.id if node.id in self.names else None
            return self.derived.get(node.id, self.tracked.get(node.id))
        return node.value if isinstance(node, ast.Constant) and node.value in self.names else None

    def _left(self, node: ast.AST) -> str | None:
        return None if id(node) in self.allowed else self._held(node)

    def _allow(self, *nodes: ast.AST) -> None:
        self.allowed |= {id(part) for node in nodes for part in ast.walk(node)}

    def _hand_on(self, value: ast.AST) -> None:
        """Allow what is itself such an argument, or a tuple or dict of them, as something that is handed on."""
        if self._is_one(value):
            self._allow(value)
        elif isinstance(value, (ast.Tuple, ast.List, ast.Dict)):
            for each in value.values if isinstance(value, ast.Dict) else value.elts:
                self._hand_on(each)
        elif isinstance(value, (ast.Starred, ast.keyword)):
            self._hand_on(value.value)
        elif isinstance(value, ast.BinOp) and self._is_dict_of(value):
            self._allow(value)
        elif isinstance(value, ast.IfExp):
            self._hand_on(value.body)
            self._hand_on(value.orelse)

    def _is_one(self, value: ast.AST) -> bool:
        """Whether this is an argument itself: a variable that holds one, ``kwargs["name"]``, ``kwargs.get("name")``."""
        if isinstance(value, ast.Name):
            return value.id in self.tracked and value.id not in self.derived
        if isinstance(value, ast.Subscript):
            return self._is_one(value.value) and isinstance(value.slice, ast.Constant)
        return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("get", "pop") and (
            self._is_one(value.func.value) and isinstance(value.args[0] if value.args else None, ast.Constant))

    def _use(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Dict):
            self.allowed |= {id(key) for key in node.keys}
        elif isinstance(node, ast.Subscript):
            if not isinstance(node.ctx, ast.Load):
                self.allowed.add(id(node.slice))  # an entry that is set
            if self._is_all(node.value) and self._is_other(node.slice) or not isinstance(node.ctx, ast.Load):
                self._allow(node.value)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)) and self._is_other(node.left):
            self._allow(*filter(self._is_all, node.comparators))
        elif isinstance(node, ast.Return) and node.value is not None:
            self._hand_on(node.value)
        elif isinstance(node, (ast.If, ast.IfExp)) and "position_ids is None" in map(ast.unparse, all_of(node.test)):
            # A step gives positions, and so does ``generate``.
            self._allow(node.test, *(node.body if isinstance(node, ast.If) else [node.body]))
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "not return_dict":
            self._allow(*node.body)  # which ``generate`` asks for

    def _is_all(self, value: ast.AST) -> bool:
        return isinstance(value, ast.Name) and self.tracked.get(value.id) is _ANY

    def _is_other(self, key: ast.AST) -> bool:
        return isinstance(key, ast.Constant) and key.value not in self.names

    def _call(self, call: ast.Call) -> None:
        of = call.func.value if isinstance(call.func, ast.Attribute) else None
        attribute = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if of is not None and self._is_one(of):
            if attribute == "update":
                self._allow(of)
                for each in (*call.args, *call.keywords):
                    self._hand_on(each)
            elif attribute in ("get", "pop", "setdefault") and self._is_all(of) and call.args and self._is_other(call.args[0]):
                self._allow(of)
            return
        given = [each for each in (*call.args, *call.keywords) if self._handed(each)]
        if not given:
            return
        callees = self._callees(call.func)
        if callees is None:
            return
        for function, owner in callees:
            self.refused += self._followed(call, function, owner)
        for each in given:
            if isinstance(each, ast.keyword) and each.arg in self.names & CACHE:
                self._allow(each)
            self._hand_on(each)

    def _followed(self, call: ast.Call, function: types.FunctionType, owner: Any) -> list[str]:
        """What a function that is called uses otherwise than allowed."""
        if not self.depth:
            return [_ANY]
        parameters, code = parameters_of(function.__code__)[owner is not None :], function.__code__
        given = set[str]()
        for i, each in enumerate(call.args):
            if self._handed(each):
                given.add(parameters[i] if i < len(parameters) and not isinstance(each, ast.Starred) else
                          rest_of(code, inspect.CO_VARARGS))
        for keyword in call.keywords:
            if keyword.arg and self._handed(keyword.value):
                given.add(keyword.arg if keyword.arg in code.co_varnames else rest_of(code, inspect.CO_VARKEYWORDS))
        return reads_of(function, self.names, owner, given - {""}, depth=self.depth - 1)

    def _callees(self, called: ast.expr) -> list[_Code] | None:
        """The user's functions behind what is called; none: code of known packages, or a module, which is looked at itself;
        None: it is not known."""
        if (isinstance(called, ast.Attribute) and called.attr in ("forward", "_gradient_checkpointing_func")) or (
                isinstance(called, ast.Name) and called.id in ATTENTION):
            return []
        if isinstance(called, ast.Name) and called.id in self.assigned:
            found = [self._callees_of(value) for value in self.assigned[called.id]]
            return None if None in found else [each for some in found for each in some or ()]
        held = self._resolved(called)
        if isinstance(held, torch.nn.Module):
            return [(function, held) for function, _ in functions_of(vars(held).get("forward", type(held).forward))]
        if isinstance(held, type):
            return [] if is_known(held.__module__) or dataclasses.is_dataclass(held) or held is dict else None
        module = str(getattr(held, "__module__", None) or type(held).__module__)
        return [*_unwrapped(held)] or ([] if is_known(module) and not module.startswith("torch") else None)

    def _callees_of(self, value: ast.AST) -> list[_Code] | None:
        """The same of a variable: of a loop over modules, and of what transformers' functions and registries gave."""
        if isinstance(value, (ast.For, ast.comprehension)):
            return [] if any(isinstance(self._resolved(x), torch.nn.Module) for x in ast.walk(value.iter)
                             if isinstance(x, (ast.Attribute, ast.Name))) else None
        if isinstance(value, ast.Call):
            return None if self._callees(value.func) != [] else []
        if isinstance(value, ast.IfExp):
            both = [self._callees_of(value.body), self._callees_of(value.orelse)]
            return None if None in both else [each for some in both for each in some or ()]
        return self._callees(value) if isinstance(value, ast.expr) else None

    def _resolved(self, value: ast.AST) -> Any:
        """The object behind an expression, from what is known; None: it is not known."""
        with contextlib.suppress(Exception):  # whatever a property of the user's raises
            if isinstance(value, ast.Name) and value.id not in self.assigned:
                return self.known.get(value.id, getattr(builtins, value.id, None))
            if isinstance(value, ast.Attribute) and (of := self._resolved(value.value)) is not None:
                return getattr(of, value.attr)
            if isinstance(value, ast.Subscript) and isinstance(of := self._resolved(value.value), torch.nn.Module):
                return of  # its children are modules
            if isinstance(value, ast.Subscript) and is_known(type(of).__module__):
                return of  # a registry of transformers'
            if isinstance(value, ast.Call) and ast.unparse(value) == "super()":
                return super(self.known["__class__"], self.known["self"])
        return None

    def _assignment(self, node: ast.AST) -> None:
        """Follow what is left into the variables that get it, and into a branch that depends on it."""
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
            value, targets = node.value, node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                self._assign(target, value)
            if self._held_in(value) in CACHE:
                self._allow(*(x for target in targets for x in ast.walk(target) if self._held(x) in CACHE))
            if all(isinstance(x, (ast.Name, ast.Tuple)) for x in targets):
                self._allow_followed(value)
            elif self._sets_one(targets):
                self._hand_on(value)
        elif isinstance(node, ast.If) and (what := self._left_in(node.test)):
            if all(self._keeps(statement, what) for statement in (*node.body, *node.orelse)):
                self._allow_followed(node.test)

    def _sets_one(self, targets: Sequence[ast.expr]) -> bool:
        """Whether an entry of that name is set."""
        return all(isinstance(x, ast.Subscript) and isinstance(x.slice, ast.Constant) and x.slice.value in self.names
                   for x in targets)

    def _held_in(self, value: ast.AST) -> str:
        return next((what for part in ast.walk(value) if (what := self._held(part))), "")

    def _handed(self, value: ast.AST) -> str:
        """The same of what a call is given, without what a call of known code in it was given: results do not hold it."""
        if isinstance(value, ast.Call) and self._callees(value.func) == []:
            return ""
        return self._held(value) or next((what for part in ast.iter_child_nodes(value) if (what := self._handed(part))), "")

    def _left_in(self, value: ast.AST) -> str:
        return next((what for part in ast.walk(value) if (what := self._left(part))), "")

    def _allow_followed(self, value: ast.AST) -> None:
        """Allow what is followed: an argument itself, or what was computed from one that is no mask, and not from all."""
        if self._is_one(value) or self._is_dict_of(value):
            self._allow(value)
        else:
            self._allow(*(x for x in ast.walk(value) if isinstance(x, (ast.Name, ast.Constant)) and self._held(x) in CACHE))
            self._allow(*(x for x in ast.walk(value) if self._is_one(x) and not isinstance(x, ast.Name)
                          and self._what(x) in CACHE))

    def _what(self, value: ast.AST) -> str | None:
        """Which argument ``kwargs["name"]`` or ``kwargs.get("name")`` is."""
        if isinstance(value, ast.Name):
            return self.tracked.get(value.id)
        key = value.slice if isinstance(value, ast.Subscript) else value.args[0]  # type: ignore[attr-defined]
        return key.value if isinstance(key, ast.Constant) and key.value in self.names else None

    def _is_dict_of(self, value: ast.AST) -> bool:
        """Whether this is a dict of arguments, or what a followed function made of them."""
        if isinstance(value, ast.Dict):
            return all(self._is_one(x) or not self._left_in(x) for x in value.values)
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):  # one side is written as a dict
            sides = value.left, value.right
            return any(isinstance(x, ast.Dict) for x in sides) and all(self._is_all(x) or self._is_dict_of(x) for x in sides)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "copy":
            return self._is_all(value.func.value)
        return isinstance(value, ast.Call) and ast.unparse(value.func) == "dict" and all(
            self._is_one(x) for x in (*value.args, *(k.value for k in value.keywords)) if self._left_in(x))

    def _assign(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple):
            alike = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            for i, each in enumerate(target.elts):
                self._assign(each, value.elts[i] if alike else value)  # type: ignore[attr-defined]
        if not isinstance(target, ast.Name):
            return
        if self._is_one(value) and (what := self._what(value)):
            self.new_tracked.setdefault(target.id, what)
        elif self._is_dict_of(value) and self._left_in(value) or self._from_followed(value):
            self.new_tracked.setdefault(target.id, _ANY)
        elif (what := self._left_in(value)) and target.id not in self.tracked:
            self.new_derived.setdefault(target.id, what)

    def _from_followed(self, value: ast.AST) -> bool:
        return isinstance(value, ast.Call) and bool(self._callees(value.func)) and any(
            map(self._handed, (*value.args, *value.keywords)))

    def _keeps(self, statement: ast.AST, what: str) -> bool:
        """Whether a statement of a branch that depends on the cache does nothing but update or make it, or warn. Variables that
        it sets depend on it too."""
        if what not in CACHE:
            return False
        if isinstance(statement, (ast.Pass, ast.Raise)):
            return True
        if isinstance(statement, ast.Expr):
            called = ast.unparse(statement.value.func) if isinstance(statement.value, ast.Call) else "logger."
            return called.startswith(("logger.", "warnings.")) or self._updates(statement.value)
        if isinstance(statement, ast.AugAssign) and isinstance(statement.value, ast.Tuple):
            return True  # a tuple of results gets longer
        if isinstance(statement, ast.If):
            return all(self._keeps(each, what) for each in (*statement.body, *statement.orelse))
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and (value := statement.value) is not None:
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if not isinstance(each, ast.Name):
                        return False
                    self.allowed.add(id(each))
                    one = self._held_in(value) and (self._is_one(value) or self._is_dict_of(value))
                    if not one and not self._updates(value) and each.id not in self.tracked:
                        self.new_derived.setdefault(each.id, what)
            return True
        return False

    def _updates(self, value: ast.AST) -> bool:
        return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "update" \
            and self._is_one(value.func.value)
