"""Conditions on a query position i and a key position j, as data.

A *term* is a number: a linear ``Form`` in positions, floors and table entries, an ``Infinite``, or a ``Choice`` between two
terms. A *condition* is True, False, a ``Compare`` of a form with 0, ``Not`` of a condition or a ``Join`` of several. Positions
are ``Var``s, named by the dimension that they run along, counted from the right: the mask's i is -2 and its j is -1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

#: Positions are below this: the dense mask of a longer sequence, 2**44 entries, fits no memory, so that the model itself
#: could not run. Arithmetic must be exact below it.
MAX_POSITIONS = 2**22
_MAX_CHOICES = 64  # alternatives of one term
LARGE = 2**40  # constants up to here are compared in int64
_INF = float("inf")


class Unprovable(Exception):
    """It is not known how to decide this; the text says why."""


@dataclass(frozen=True, eq=False)
class Table:
    """A stored tensor of finite numbers."""

    data: torch.Tensor

    @functools.cached_property
    def range(self) -> tuple[Fraction, Fraction]:
        low, high = self.data.aminmax()
        return Fraction(low.item()), Fraction(high.item())

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether ``dtype`` holds every number as it is."""
        return bool((self.data.to(dtype).to(self.data.dtype) == self.data).all())


@dataclass(frozen=True)
class Var:
    """The index along a dimension, counted from the right."""

    axis: int


@dataclass(frozen=True)
class Floor:
    form: Form


@dataclass(frozen=True)
class Lookup:
    """An entry of a table; one index for each of its dimensions."""

    table: Table
    index: tuple[Term, ...]


@dataclass(frozen=True)
class Form:
    """A sum of bases times rational coefficients, plus a constant."""

    terms: frozenset[tuple[Var | Floor | Lookup, Fraction]] = frozenset()
    const: Fraction = Fraction(0)

    @property
    def is_const(self) -> bool:
        return not self.terms


@dataclass(frozen=True)
class Infinite:
    positive: bool


@dataclass(frozen=True)
class Choice:
    condition: Condition
    yes: Term
    no: Term


@dataclass(frozen=True)
class Compare:
    """``form op 0`` with op "lt", "le" or "eq"."""

    form: Form
    op: str


@dataclass(frozen=True)
class Not:
    condition: Condition


@dataclass(frozen=True)
class Join:
    """All of the conditions (``every``), or any of them."""

    every: bool
    conditions: frozenset[Condition]


Term = Form | Infinite | Choice
Operand = Term | float | Fraction  # what arithmetic takes
Condition = bool | Compare | Not | Join


def number(value: Operand) -> Term:
    """A constant, as a term; a term is itself."""
    if isinstance(value, (Form, Infinite, Choice)):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise Unprovable("it computes with NaN")
        return Infinite(value > 0)
    return Form(const=Fraction(value))


def var(axis: int) -> Form:
    return _form({Var(axis): Fraction(1)}, Fraction(0))


def negate(a: Condition) -> Condition:
    if isinstance(a, bool):
        return not a
    return a.condition if isinstance(a, Not) else Not(a)


def _join(every: bool, *conditions: Condition) -> Condition:
    flat = {c for a in conditions for c in (a.conditions if isinstance(a, Join) and a.every is every else (a,))} - {every}
    if (not every) in flat or any(negate(c) in flat for c in flat):
        return not every
    return flat.pop() if len(flat) == 1 else Join(every, frozenset(flat)) if flat else every


both = functools.partial(_join, True)
either = functools.partial(_join, False)


def select(condition: Condition, yes: Condition, no: Condition) -> Condition:
    return either(both(condition, yes), both(negate(condition), no))


def choose(condition: Condition, yes: Operand, no: Operand) -> Term:
    yes, no = number(yes), number(no)
    if isinstance(condition, bool):
        return yes if condition else no
    return yes if yes == no else Choice(condition, yes, no)


def leaves(term: Term) -> Iterator[Form | Infinite]:
    """The alternatives of a term."""
    if isinstance(term, Choice):
        yield from leaves(term.yes)
        yield from leaves(term.no)
    else:
        yield term


def map_leaves(term: Term, function: Callable[[Form | Infinite], Term]) -> Term:
    if isinstance(term, Choice):
        return choose(term.condition, map_leaves(term.yes, function), map_leaves(term.no, function))
    return function(term)


def _pairwise(a: Operand, b: Operand, function: Callable[[Any, Any], Term]) -> Term:
    a, b = number(a), number(b)
    if sum(1 for _ in leaves(a)) * sum(1 for _ in leaves(b)) > _MAX_CHOICES:
        raise Unprovable("it has too many cases")
    return map_leaves(a, lambda x: map_leaves(b, lambda y: function(x, y)))


def add(a: Operand, b: Operand) -> Term:
    def one(x: Form | Infinite, y: Form | Infinite) -> Term:
        if isinstance(x, Form) and isinstance(y, Form):
            terms = dict(x.terms)
            for basis, factor in y.terms:
                terms[basis] = terms.get(basis, Fraction(0)) + factor
            return _form(terms, x.const + y.const)
        if isinstance(x, Infinite) and isinstance(y, Infinite) and x != y:
            raise Unprovable("it adds infinities of both signs (NaN)")
        return x if isinstance(x, Infinite) else y

    return _pairwise(a, b, one)


def times(a: Operand, b: Operand) -> Term:
    def one(x: Form | Infinite, y: Form | Infinite) -> Term:
        if isinstance(x, Form) and isinstance(y, Form):
            if not x.is_const and not y.is_const:
                raise Unprovable("it multiplies positions (a bias, such as ALiBi?)")
            form, factor = (y, x.const) if x.is_const else (x, y.const)
            return _form({basis: f * factor for basis, f in form.terms}, form.const * factor)
        infinite, other = (x, y) if isinstance(x, Infinite) else (y, x)
        if isinstance(other, Infinite):
            return Infinite(infinite == other)
        if not isinstance(other, Form) or not other.is_const or other.const == 0:
            raise Unprovable("it multiplies by infinity (NaN)")
        return Infinite(infinite == Infinite(other.const > 0))

    return _pairwise(a, b, one)


def minus(a: Operand, b: Operand) -> Term:
    return add(a, times(b, -1))


def floor(a: Term) -> Term:
    def one(x: Form | Infinite) -> Term:
        if isinstance(x, Infinite):
            return x
        whole = {b: f for b, f in x.terms if f.denominator == 1 and is_whole(b)}
        part = {b: f for b, f in x.terms if b not in whole}
        if not part:
            return _form(whole, Fraction(math.floor(x.const)))
        if len(part) == 1:
            (basis, factor), = part.items()
            if isinstance(basis, Floor) and factor.numerator == 1 and (x.const * factor.denominator).denominator == 1:
                # floor((floor(y) + k) / n) = floor((y + k) / n)
                inner = add(times(basis.form, factor), x.const)
                assert isinstance(inner, Form)
                return add(_form(whole, Fraction(0)), _form({Floor(inner): Fraction(1)}, Fraction(0)))
        whole_const = math.floor(x.const)
        rest = _form(part, x.const - whole_const)
        return _form({**whole, Floor(rest): Fraction(1)}, Fraction(whole_const))

    return map_leaves(a, one)


def compare(a: Operand, op: str, b: Operand) -> Condition:
    """``a op b`` with op one of lt, le, eq, ne, ge, gt."""
    a, b = number(a), number(b)
    if op in ("ne", "ge", "gt"):
        return negate(compare(a, {"ne": "eq", "ge": "lt", "gt": "le"}[op], b))
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Choice):
            return select(x.condition, *(compare(z, op, y) if x is a else compare(y, op, z) for z in (x.yes, x.no)))
    if isinstance(a, Infinite) or isinstance(b, Infinite):
        sign = [(1 if x.positive else -1) if isinstance(x, Infinite) else 0 for x in (a, b)]
        return {"lt": sign[0] < sign[1], "le": sign[0] <= sign[1], "eq": sign[0] == sign[1]}[op]
    form = minus(a, b)
    assert isinstance(form, Form)
    low, high = bounds(form, MAX_POSITIONS if abs(form.const) > LARGE else _INF)
    if op == "eq":
        return False if low > 0 or high < 0 else bool(form.const == 0) if form.is_const else Compare(form, op)
    if high < 0 or (op == "le" and high <= 0):
        return True
    if low > 0 or (op == "lt" and low >= 0):
        return False
    return Compare(form, op)


def bounds(form: Form, top: float = _INF) -> tuple[Any, Any]:
    """Least and greatest value for positions 0 to ``top``."""
    low: Any = form.const
    high: Any = form.const
    for basis, factor in form.terms:
        if isinstance(basis, Var):
            least: Any = 0
            most: Any = top
        elif isinstance(basis, Floor):
            least, most = (x if abs(x) == _INF else math.floor(x) for x in bounds(basis.form, top))
        else:
            least, most = basis.table.range
        ends = (factor * least, factor * most)
        low, high = low + min(ends), high + max(ends)
    return low, high


def substitute(it: Any, values: Mapping[int, Operand]) -> Any:
    """A term or condition with the variables of some axes replaced."""
    if isinstance(it, (bool, Infinite)):
        return it
    if isinstance(it, Choice):
        return choose(substitute(it.condition, values), substitute(it.yes, values), substitute(it.no, values))
    if isinstance(it, Compare):
        return compare(substitute(it.form, values), it.op, 0)
    if isinstance(it, Not):
        return negate(substitute(it.condition, values))
    if isinstance(it, Join):
        return _join(it.every, *(substitute(c, values) for c in it.conditions))
    total: Term = number(it.const)
    for basis, factor in it.terms:
        if isinstance(basis, Var):
            new: Operand = values.get(basis.axis, var(basis.axis))
        elif isinstance(basis, Floor):
            new = floor(substitute(basis.form, values))
        else:
            new = look_up(basis.table, tuple(substitute(i, values) for i in basis.index))
        total = add(total, times(new, factor))
    return total


def look_up(table: Table, index: tuple[Term, ...]) -> Form:
    if all(isinstance(i, Form) and i.is_const and 0 <= i.const < n for i, n in zip(index, table.data.shape, strict=True)):
        entry = table.data[tuple(int(i.const) for i in index)].item()  # type: ignore[union-attr]
        return Form(const=Fraction(entry))
    return _form({Lookup(table, index): Fraction(1)}, Fraction(0))


def axes(it: Any) -> set[int]:
    """The axes that a term or condition depends on."""
    return {part.axis for part in parts(it) if isinstance(part, Var)}


def parts(it: Any) -> Iterator[Any]:
    """Everything inside a term or condition."""
    yield it
    inside: list[Any] = []
    if isinstance(it, Choice):
        inside = [it.condition, it.yes, it.no]
    elif isinstance(it, Join):
        inside = list(it.conditions)
    elif isinstance(it, Not):
        inside = [it.condition]
    elif isinstance(it, (Compare, Floor)):
        inside = [it.form]
    elif isinstance(it, Form):
        inside = [basis for basis, _ in it.terms]
    elif isinstance(it, Lookup):
        inside = list(it.index)
    for part in inside:
        yield from parts(part)


def _form(terms: Mapping[Var | Floor | Lookup, Fraction], const: Fraction) -> Form:
    return Form(frozenset((b, f) for b, f in terms.items() if f), const)


def is_whole(basis: Var | Floor | Lookup) -> bool:
    return not isinstance(basis, Lookup) or not basis.table.data.is_floating_point()


def is_condition(element: Any) -> bool:
    return not isinstance(element, (Form, Infinite, Choice))


def as_term(element: Any) -> Term:
    """Truths as 1 and 0."""
    return choose(element, 1, 0) if is_condition(element) else element


def as_condition(element: Any) -> Condition:
    """A number as whether it is not 0."""
    return element if is_condition(element) else compare(element, "ne", 0)


def exact(term: Term, dtype: torch.dtype) -> Term:
    """``term`` as ``dtype`` holds it, constants rounded. Raises Unprovable if that is not exact for MAX_POSITIONS positions."""

    def one(leaf: Form | Infinite) -> Term:
        if isinstance(leaf, Infinite):
            return leaf
        if leaf.is_const and dtype.is_floating_point:
            if abs(leaf.const) > Fraction(torch.finfo(dtype).max) * Fraction(3, 2):
                return Infinite(leaf.const > 0)
            return number(torch.tensor(float(leaf.const), dtype=torch.float64).to(dtype).item())
        low, high = bounds(leaf, MAX_POSITIONS - 1)
        whole = all(is_whole(basis) for basis, _ in leaf.terms)
        scale = math.lcm(leaf.const.denominator, *(f.denominator for _, f in leaf.terms))
        if dtype.is_floating_point:
            entry_alone = leaf.const == 0 and [f for _, f in leaf.terms] == [1] and all(
                isinstance(basis, Lookup) and basis.table.fits(dtype) for basis, _ in leaf.terms)
            fits = (whole or entry_alone) and scale & (scale - 1) == 0 and scale <= 2**10 and (
                entry_alone and not whole or max(abs(low), abs(high)) * scale <= 1 / torch.finfo(dtype).eps)
        else:
            info = torch.iinfo(dtype)
            fits = whole and scale == 1 and info.min <= low and high <= info.max
        if not fits:
            raise Unprovable(f"its arithmetic on positions in {dtype} is not exact for long sequences (use int64; "
                             "ALiBi and other biases are not supported)")
        return leaf

    return map_leaves(term, one)


def entry(tensor: torch.Tensor) -> Any:
    """An entry of a constant tensor, on its indices."""
    data = tensor.detach().cpu()
    if data.numel() == 0 or data.is_complex():
        raise Unprovable("it has an empty or complex tensor")
    if tensor.dtype == torch.bool:
        return compare(entry(data.to(torch.uint8)), "ne", 0)
    first = data.flatten()[0].item()
    if bool((data == first).all()):
        return number(first)
    if data.dim() == 1 and not data.is_floating_point():
        steps = data.long().diff()
        if bool((steps == steps[0]).all()):  # arange, as a buffer
            return add(times(var(-1), int(steps[0])), int(data[0]))
    index = tuple(number(0) if n == 1 else var(k - data.dim()) for k, n in enumerate(data.shape))
    hidden = data == -math.inf
    if bool(hidden.any()):
        return choose(entry(hidden), -math.inf, entry(data.masked_fill(hidden, 0)))
    if data.is_floating_point() and not bool(data.isfinite().all()):
        raise Unprovable("it has a table with inf or NaN")
    least = data.min()
    if data.is_floating_point() and least < -LARGE:  # the like of torch.finfo(dtype).min: too large to compute with
        rest = data.masked_fill(data == least, 0)
        if bool((rest < -LARGE).any()):
            raise Unprovable("it has a table with several very large numbers")
        return choose(entry(data == least), least.item(), entry(rest))
    return look_up(Table(data), index)
