"""What of a model's forward runs where no loss is asked for: neither an engine nor ``generate`` gives labels.

Forwards of users, and those that Liger puts into models, read a mask, all keyword arguments or the mode of training behind
``if labels is not None``. What runs without labels is followed from the top, statement by statement: variables that are known
to be None or false, and branches that are not taken for it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from typing import Any

#: Arguments for a loss alone, which transformers' ``generate`` passes to no forward, nor does an engine.
LOSS = frozenset(("labels", "shift_labels", "num_items_in_batch", "skip_logits"))
#: What is known of a value: it is None; false, and maybe None; or true. Of others nothing is.
_NONE, _FALSE, _TRUE = "None", "false", "true"
_Known = dict[str, str]
#: Where variables are bound in other ways than are followed.
_UNKNOWN = (ast.Global, ast.Nonlocal, ast.Match)
_OWN_SCOPE = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp,
              ast.GeneratorExp)


def without_loss(function: ast.FunctionDef) -> list[ast.stmt]:
    """The statements of an outermost forward that may run without labels."""
    if any(isinstance(node, _UNKNOWN) for node in ast.walk(function)):
        return function.body
    arguments, rest = function.args, function.args.kwarg
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*zip(positional[len(positional) - len(arguments.defaults):], arguments.defaults, strict=True),
                *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    known = {a.arg: what for a, default in defaults if a.arg in LOSS and default is not None and (
        what := _constant(default)) in (_NONE, _FALSE)}
    run = _Run(function, None if rest is None else rest.arg)
    return run.block(function.body, {name: what for name, what in known.items() if name not in run.unknown})


def all_of(test: ast.expr) -> list[ast.expr]:
    """The conditions that must all hold for this one."""
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


class _Run:
    """``rest``: the parameter for all other keyword arguments."""

    def __init__(self, function: ast.FunctionDef, rest: str | None) -> None:
        nodes = [*ast.walk(function)]
        # Bound inside an expression, by an except or an import.
        self.unknown = {n.target.id for n in nodes if isinstance(n, ast.NamedExpr)} | {
            n.name for n in nodes if isinstance(n, ast.ExceptHandler) and n.name} | {
            (a.asname or a.name).partition(".")[0] for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom))
            for a in n.names}
        handed = {id(n.value) for n in nodes if isinstance(n, ast.keyword) and n.arg is None} | {
            id(n.func.value) for n in nodes if isinstance(n, ast.Call) and self._takes(n)}  # type: ignore[attr-defined]
        self.rest = rest if all(id(n) in handed for n in nodes if isinstance(n, ast.Name) and n.id == rest) else None

    def block(self, statements: Sequence[ast.stmt], known: _Known) -> list[ast.stmt]:
        """The statements that may run, with ``known`` before, and as it is then afterwards."""
        found = list[ast.stmt]()
        for statement in statements:
            found += self._statement(statement, known)
        return found

    def _statement(self, statement: ast.stmt, known: _Known) -> list[ast.stmt]:
        if isinstance(statement, ast.If):
            return self._if(statement, known)
        if isinstance(statement, _OWN_SCOPE):
            known.pop(statement.name, None)
            return [statement]
        stored = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        if isinstance(statement, (ast.For, ast.While, ast.With, ast.Try)):
            for name in stored:
                known.pop(name, None)
            parts = {field: self.block(part, dict(known)) for field in ("body", "orelse", "finalbody")
                     if (part := getattr(statement, field, None))}
            return [_with(statement, parts)]
        value = getattr(statement, "value", None)
        if isinstance(statement, (ast.Assign, ast.Return, ast.Expr)) and value is not None:
            what, statement = self._known(value, known), _with(statement, {"value": self._simpler(value, known)})
        else:
            what = None
        for name in stored:
            known.pop(name, None)
        if isinstance(statement, ast.Assign) and what is not None:
            known |= {t.id: what for t in statement.targets if isinstance(t, ast.Name) and t.id not in self.unknown}
        return [statement]

    def _if(self, statement: ast.If, known: _Known) -> list[ast.stmt]:
        what = self._known(statement.test, known)
        if what is not None:
            runs = statement.body if what == _TRUE else statement.orelse
            return [*self._asked(statement.test, known), *self.block(runs, known)]
        one, other = dict(known), dict(known)
        parts: dict[str, Any] = {"body": self.block(statement.body, one) or [ast.copy_location(ast.Pass(), statement)],
                                 "orelse": self.block(statement.orelse, other)}
        for name in [name for name in known if one.get(name) != known[name] or other.get(name) != known[name]]:
            del known[name]
        known |= {name: what for name, what in one.items() if other.get(name) == what}
        return [_with(statement, parts)]

    def _asked(self, test: ast.expr, known: _Known) -> list[ast.stmt]:
        """What runs of a condition that is known, for more than to be asked."""
        parts = [test]
        if isinstance(test, ast.BoolOp):  # up to the part that decides
            decides = isinstance(test.op, ast.Or)
            each = [self._known(x, known) for x in test.values]
            parts = test.values[: next((i for i, what in enumerate(each) if what is not None and (what == _TRUE) == decides),
                                       len(each))]
        return [ast.copy_location(ast.Expr(part), part) for part in parts if not _is_pure(part)]

    def _simpler(self, value: ast.expr, known: _Known) -> ast.expr:
        """The expression, of which a choice that is known is left out."""
        if isinstance(value, ast.IfExp) and _is_pure(value.test) and (what := self._known(value.test, known)) is not None:
            return self._simpler(value.body if what == _TRUE else value.orelse, known)
        if isinstance(value, ast.BoolOp) and _is_pure(value) and self._known(value, known) in (_NONE, _FALSE):
            return ast.copy_location(ast.Constant(False), value)
        return value

    def _known(self, value: ast.expr, known: _Known) -> str | None:
        if isinstance(value, ast.Name):
            return known.get(value.id)
        if isinstance(value, ast.Compare) and len(value.ops) == 1 and isinstance(value.ops[0], (ast.Is, ast.IsNot)):
            if _constant(value.comparators[0]) != _NONE or (what := self._known(value.left, known)) not in (_NONE, _TRUE):
                return None
            return _TRUE if (what == _NONE) == isinstance(value.ops[0], ast.Is) else _FALSE
        if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not):
            what = self._known(value.operand, known)
            return None if what is None else _FALSE if what == _TRUE else _TRUE
        if isinstance(value, ast.BoolOp):
            each, decides = [self._known(x, known) for x in value.values], isinstance(value.op, ast.Or)
            if any(what is not None and (what == _TRUE) == decides for what in each):
                return _TRUE if decides else _FALSE
            return None if None in each else _FALSE if decides else _TRUE
        if isinstance(value, ast.Call) and self._takes(value) and self.rest == value.func.value.id:  # type: ignore[attr-defined]
            default = value.args[1] if len(value.args) > 1 else ast.Constant(None)
            return _constant(default) if value.args[0].value in LOSS else None  # type: ignore[attr-defined]
        return _constant(value)

    @staticmethod
    def _takes(call: ast.Call) -> bool:
        """Whether this is ``kwargs.pop("name", ...)`` or ``kwargs.get("name")``."""
        of = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr in ("pop", "get") else None
        return isinstance(of, ast.Name) and bool(call.args) and isinstance(call.args[0], ast.Constant)


def _constant(value: ast.expr) -> str | None:
    if not isinstance(value, ast.Constant) or value.value not in (None, False, True):
        return None
    return _NONE if value.value is None else _TRUE if value.value else _FALSE


def _is_pure(value: ast.expr) -> bool:
    return not any(isinstance(n, (ast.Call, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for n in ast.walk(value))


def _with(node: Any, fields: dict[str, Any]) -> Any:
    """A copy of a statement with other fields."""
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made
