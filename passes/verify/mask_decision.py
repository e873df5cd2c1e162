"""Whether two conditions on a query position i and a key position j agree for all i, j >= 0.

NOTE [Mask proof]: ``agree`` decides on finitely many points, which is enough because of what it accepts. With j fixed, each
comparison contains i in one place only, so that its truth changes at computable values of i, and testing both sides of each
change covers every i; likewise with i fixed. A comparison of one position with constants no longer changes beyond some A. Any
other must be invariant when i and j both grow by m, the common multiple of the divisors (``i - j < w``, ``i // c == j // c``).
So it suffices to fix j, and then i, at 0..A+m: a pair further out can be moved there along the diagonal without changing any
comparison. Conditions on stored tables are evaluated for every pair of positions that the tables have entries for: beyond
them the model itself raises an IndexError, and ``reach`` says up to where the proof goes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from fractions import Fraction

import torch

from quire.passes.verify import mask_formula as formula
from quire.passes.verify.mask_formula import Compare, Condition, Floor, Form, Lookup, Term, Unprovable, Var

_MAX_TABLE = 8192  # positions up to which stored tables are compared entry by entry: 64 Mi pairs
_MAX_POINTS = 2**23  # pairs that ``agree`` tests
_BLOCK = 2**20


def agree(a: Condition, b: Condition) -> bool:
    """Whether two conditions on the axes -2 and -1 are equal for all positions. See NOTE [Mask proof]. Raises Unprovable if
    they contain something that the proof does not cover."""
    if not formula.axes(a) | formula.axes(b) <= {-2, -1}:
        raise Unprovable("it differs between heads or sequences")
    inside = [*formula.parts(a), *formula.parts(b)]
    tables = {p for p in inside if isinstance(p, Lookup)}
    if tables:
        return _agree_up_to(a, b, _reach(tables))
    forms = {p.form for p in inside if isinstance(p, Compare)}
    period = math.lcm(1, *(f.denominator for p in inside if isinstance(p, Floor) for _, f in p.form.terms))
    settled = 0
    for form in forms:
        of = formula.axes(form)
        if len(of) == 1:
            settled = max(settled, int(_changes(form, of.pop(), torch.zeros(1, dtype=torch.int64)).max()))
        elif _drift(form, period) != 0:
            raise Unprovable("it compares positions in a way that depends on how far into the sequence they are")
    rows = settled + period + 1
    if rows * 4 * (len(forms) + 1) > _MAX_POINTS:
        raise Unprovable(f"its numbers are too large ({settled + period})")
    fixed = torch.arange(rows)
    for free, other in ((-2, -1), (-1, -2)):
        points = [torch.zeros(1, rows, dtype=torch.int64)]
        points += [_changes(form, free, fixed) for form in forms if free in formula.axes(form)]
        at = torch.cat(points)
        at = torch.cat([at, at.max(0, keepdim=True).values + 1]).clamp(min=0)
        if not _equal_at(a, b, {free: at, other: fixed[None]}):
            return False
    return True


def never(condition: Condition) -> bool:
    """Whether a condition on the positions of at most two axes is proven to hold nowhere."""
    found = sorted(formula.axes(condition))
    renamed = {axis: formula.var(-1 - k) for k, axis in enumerate(found)}
    try:
        return len(found) <= 2 and agree(formula.substitute(condition, renamed), False)
    except Unprovable:
        return False


def first_hidden(visible: Condition) -> int | None:
    """The first query position that does not see key 0; None: all do."""
    inside = list(formula.parts(visible))
    tables = {p for p in inside if isinstance(p, Lookup)}
    zero = torch.zeros(1, dtype=torch.int64)
    if tables:
        at = torch.arange(_reach(tables))
    else:
        points = [_changes(p.form, -2, zero).flatten() for p in inside if isinstance(p, Compare) and -2 in formula.axes(p.form)]
        at = torch.cat([zero, *points]).clamp(min=0).unique()
        at = torch.cat([at, at[-1:] + 1])
    hidden = at[~evaluate(visible, {-2: at, -1: zero}).expand(at.shape)]
    return int(hidden[0]) if len(hidden) else None


def reach(condition: Condition) -> int | None:
    """Positions of a sequence up to which stored tables in ``condition`` have entries; None: there are no tables."""
    tables = {p for p in formula.parts(condition) if isinstance(p, Lookup)}
    return _reach(tables) if tables else None


def _agree_up_to(a: Condition, b: Condition, last: int) -> bool:
    blocks = torch.arange(last)[:, None].split(max(1, _BLOCK // max(last, 1)))
    return all(_equal_at(a, b, {-2: queries, -1: torch.arange(last)[None]}) for queries in blocks)


def _equal_at(a: Condition, b: Condition, env: Mapping[int, torch.Tensor]) -> bool:
    return bool((evaluate(a, env) == evaluate(b, env)).all())


def _reach(tables: set[Lookup]) -> int:
    """How many positions a sequence can have before an index leaves a table."""
    last = _MAX_TABLE + 1
    for lookup in sorted(tables, key=lambda table: sum(1 for _ in formula.parts(table))):  # those inside others first
        for index, size in zip(lookup.index, lookup.table.data.shape, strict=True):
            of = formula.axes(index)
            if len(of) > 1:
                raise Unprovable("it looks up a table by two positions at once")
            values = _value(index, dict.fromkeys(of, torch.arange(last))).expand(last)
            if bool((values < 0).any()):
                raise Unprovable("it looks up a table at negative places")
            outside = (values >= size).nonzero()
            last = int(outside[0]) if len(outside) else last
    if last > _MAX_TABLE:
        raise Unprovable(f"its table serves more than {_MAX_TABLE} positions, too many to compare")
    return last


def evaluate(condition: Condition, env: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """A condition at the positions of ``env`` (axis -> int64 tensor), as booleans that broadcast with them."""
    if isinstance(condition, bool):
        return torch.tensor(condition)
    if isinstance(condition, formula.Not):
        return ~evaluate(condition.condition, env)
    if isinstance(condition, Compare):
        return getattr(torch, condition.op)(_numerator(condition.form, env)[0], 0)
    join = operator.and_ if condition.every else operator.or_
    return functools.reduce(join, (evaluate(c, env) for c in condition.conditions))


def _value(term: Term, env: Mapping[int, torch.Tensor]) -> torch.Tensor:
    if isinstance(term, formula.Choice):
        return torch.where(evaluate(term.condition, env), _value(term.yes, env), _value(term.no, env))
    if isinstance(term, formula.Infinite):
        raise Unprovable("it computes with an infinite position")
    total, denominator = _numerator(term, env)
    if denominator != 1:
        raise Unprovable("it looks up a table at fractions")
    return total


def _numerator(form: Form, env: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The values of ``form`` times a positive integer, and that integer."""
    scale = math.lcm(form.const.denominator, *(f.denominator for _, f in form.terms))
    if any(abs(x * scale) > formula.LARGE for x in (Fraction(1), form.const, *(f for _, f in form.terms))):
        raise Unprovable("its numbers are too large")
    total = torch.tensor(int(form.const * scale))
    for basis, factor in form.terms:
        if isinstance(basis, Var):
            value = env[basis.axis]
        elif isinstance(basis, Floor):
            value = torch.div(*_numerator(basis.form, env), rounding_mode="floor")
        else:
            value = basis.table.data[tuple(_value(i, env) for i in basis.index)]
            value = value.double() if value.is_floating_point() else value.long()
        total = total + int(factor * scale) * value
    return total, scale


def _changes(form: Form, axis: int, fixed: torch.Tensor) -> torch.Tensor:
    """Values (k, len(fixed)) of the position along ``axis`` around changes of a comparison of ``form``, the other ``fixed``."""
    found = [(b, f) for b, f in form.terms if axis in formula.axes(Form(frozenset({(b, f)})))]
    if len(found) != 1:
        raise Unprovable("it takes remainders of positions, or the like")
    (basis, factor), = found
    rest = Form(form.terms - {(basis, factor)}, form.const)
    env = {-3 - axis: fixed}
    total, scale = _numerator(rest, env)
    # factor * basis + total / scale crosses 0 at basis = limit
    limit = torch.div(-total * factor.denominator, factor.numerator * scale, rounding_mode="floor").expand(fixed.shape)
    if isinstance(basis, Var):
        places = [limit]
    else:
        assert isinstance(basis, Floor)
        inner = dict(basis.form.terms)
        slope = inner.pop(Var(axis), None)
        if slope is None or axis in formula.axes(Form(frozenset(inner.items()))):
            raise Unprovable("it divides positions more than once")
        total, scale = _numerator(Form(frozenset(inner.items()), basis.form.const), env)
        places = [torch.div((step * scale - total) * slope.denominator, slope.numerator * scale, rounding_mode="floor").expand(
            fixed.shape) for step in (limit, limit + 1)]
    return torch.stack([place + near for place in places for near in (-1, 0, 1, 2)])


def _drift(form: Form, period: int) -> Fraction:
    """By how much ``form`` grows when both positions grow by ``period``."""
    total = Fraction(0)
    for basis, factor in form.terms:
        grows = Fraction(period) if isinstance(basis, Var) else _drift(basis.form, period)  # type: ignore[union-attr]
        if grows.denominator != 1:
            raise Unprovable("it divides positions more than once")
        total += factor * grows
    return total
