"""More rules for reading a mask (``passes/verify/mask_rules.py``): joining, reductions over a dimension of constant size, sums
along positions, and functions of numbers that are the same everywhere."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from quire.passes.fx import symbolic, value
from quire.passes.verify import mask_formula as formula
from quire.passes.verify.mask_decision import never
from quire.passes.verify.mask_formula import Form, Infinite, Term, Unprovable
from quire.passes.verify.mask_rules import PARTS, greater, lesser, rule

if TYPE_CHECKING:
    from quire.passes.verify.mask_proof import MaskProver

_MOST = 64  # places of a dimension that is joined or reduced, and steps of a sum along positions


def _axis(x: Any, dim: Any) -> int:
    rank = value(x).dim()
    return int(dim) % rank - rank


def _cases(axis: int, found: list[Any], starts: list[int]) -> Any:
    """An element that is ``found[k]`` from place ``starts[k]`` of the dimension ``axis`` on."""
    if len(found) > _MOST:
        raise Unprovable("it joins too many tensors")
    result = found[-1]
    for k in range(len(found) - 2, -1, -1):
        here = formula.compare(formula.var(axis), "lt", starts[k + 1])
        if formula.is_condition(found[k]) and formula.is_condition(result):
            result = formula.select(here, found[k], result)
        else:
            result = formula.choose(here, formula.as_term(found[k]), formula.as_term(result))
    return result


@rule("stack")
def _stack(p: MaskProver, node: fx.Node, tensors: Any, dim: int = 0) -> Any:
    axis = _axis(node, dim)
    found = []
    for x in tensors[:_MOST + 1]:
        element = p.element(x)
        found.append(formula.substitute(element, {a: formula.var(a - 1) for a in formula.axes(element) if a <= axis}))
    return _cases(axis, found, list(range(len(found))))


@rule("cat", "concat", "concatenate")
def _cat(p: MaskProver, node: fx.Node, tensors: Any, dim: int = 0) -> Any:
    axis, found, starts, at = _axis(node, dim), list[Any](), list[int](), 0
    for x in tensors:
        size: Any = value(x).shape[axis]
        if symbolic(size):
            raise Unprovable("it joins rows of positions")
        found.append(formula.substitute(p.element(x), {axis: formula.add(formula.var(axis), -at)}))
        starts.append(at)
        at += size
    return _cases(axis, found, starts)


@rule("repeat_interleave")
def _repeat_interleave(p: MaskProver, node: fx.Node, x: Any, repeats: Any, dim: Any = None, **options: Any) -> Any:
    element, times = p.element(x), p.constant(repeats)
    if dim is None:
        raise Unprovable("it repeats positions")
    axis = _axis(x, dim)
    place = formula.floor(formula.times(formula.var(axis), Fraction(1, int(times))))
    return formula.substitute(element, {axis: place}) if axis in formula.axes(element) else element


def _meshgrid(p: MaskProver, node: fx.Node, tensors: Any, index: int) -> Any:
    if any(value(x).dim() != 1 for x in tensors):
        raise Unprovable("it makes a grid of something else than rows")
    at = index - len(tensors)
    if node.kwargs.get("indexing") == "xy" and index < 2:
        at = 1 - index - len(tensors)
    return formula.substitute(p.element(tensors[index]), {-1: formula.var(at)})


PARTS |= {"meshgrid": _meshgrid, "broadcast_tensors": lambda p, node, tensors, index: p.element(tensors[index])}


def _reduction(name: str, join: Callable[[Any, Any], Any], of: Callable[[Any], Any]) -> None:
    @rule(name)
    def reduce(p: MaskProver, node: fx.Node, x: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        if dim is None or dim == () or dim == [] or not isinstance(value(node), torch.Tensor):
            raise Unprovable("it is taken over all positions")
        if value(x).is_floating_point() and options.get("dtype") not in (None, value(x).dtype):
            raise Unprovable(f"it is taken in {options['dtype']}")
        element, rank = of(p.element(x)), value(x).dim()
        axes = sorted({int(d) % rank - rank for d in (dim if isinstance(dim, (tuple, list)) else [dim])})
        for axis in axes:
            size: Any = value(x).shape[axis]
            if symbolic(size) or size > _MOST:
                raise Unprovable("it is taken over positions")
            if join in (formula.add, formula.times) and value(node).is_floating_point() and size > 2:
                raise Unprovable("it adds or multiplies in an order that is not known, and is rounded")
            element = functools.reduce(join, [formula.substitute(element, {axis: k}) for k in range(size)])
        if keepdim:
            return element
        kept = [a for a in range(-rank, 0) if a not in axes]
        return formula.substitute(element, {a: formula.var(k - len(kept)) for k, a in enumerate(kept)})


_reduction("all", formula.both, formula.as_condition)
_reduction("any", formula.either, formula.as_condition)
_reduction("sum", formula.add, formula.as_term)
_reduction("prod", formula.times, formula.as_term)
_reduction("amax", greater, formula.as_term)
_reduction("amin", lesser, formula.as_term)


@rule("cumsum")
def _cumsum(p: MaskProver, node: fx.Node, x: Any, dim: Any, **options: Any) -> Any:
    """The sum of numbers that do not change any more beyond some position."""
    element, axis = formula.as_term(p.element(x)), _axis(x, dim)
    if axis not in formula.axes(element):
        return formula.times(element, formula.add(formula.var(axis), 1))
    if formula.axes(element) != {axis}:
        raise Unprovable("it sums over positions")
    each = [formula.substitute(element, {axis: k}) for k in range(_MOST + 1)]
    last = each[-1]
    beyond = formula.compare(formula.var(axis), "gt", _MOST)
    if not all(isinstance(t, Form) and t.is_const and t.const.denominator == 1 for t in each) or not never(
            formula.both(beyond, formula.compare(element, "ne", last))):
        raise Unprovable("it sums over positions")
    top = max((k for k, at in enumerate(each) if at != last), default=0)
    sums = list(itertools.accumulate(each[: top + 1], formula.add))
    beyond_top = formula.add(formula.times(last, formula.add(formula.var(axis), -top)), sums[top])
    return _cases(axis, [*sums[:top], beyond_top], list(range(top + 1)))


@rule("nan_to_num", "nan_to_num_")
def _nan_to_num(p: MaskProver, node: fx.Node, x: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    most = torch.finfo(value(node).dtype).max if value(node).is_floating_point() else 0

    def finite(leaf: Form | Infinite) -> Term:
        if not isinstance(leaf, Infinite):
            return leaf
        given = posinf if leaf.positive else neginf
        return formula.number((most if leaf.positive else -most) if given is None else p.constant(given))

    return formula.map_leaves(p.term(x), finite)


# Functions of numbers, where each of them is one of a few constants. The result must be one that every device computes exactly:
# infinite, 0, 1 or -1; of square roots and squares, whole.


def _of_constants(name: str, function: Callable[..., float]) -> None:
    @rule(name, f"{name}_")
    def apply(p: MaskProver, node: fx.Node, x: Any, *numbers: Any) -> Any:
        more = [float(p.constant(n)) for n in numbers]

        def one(leaf: Form | Infinite) -> Term:
            if isinstance(leaf, Form) and not leaf.is_const:
                raise Unprovable(f"it takes {name} of positions, which is not known to be exact")
            at = float(leaf.const) if isinstance(leaf, Form) else math.inf if leaf.positive else -math.inf
            try:
                result = function(at, *more)
            except (ValueError, OverflowError, ZeroDivisionError):
                result = math.nan
            whole = name in ("sqrt", "square", "round") or (name == "pow" and more == [2.0])
            if math.isfinite(result) and (result != int(result) or abs(result) > (2**20 if whole else 1)):
                raise Unprovable(f"it computes with {name} of {at:g}, which is rounded")
            return formula.number(result)

        return formula.map_leaves(p.term(x), one)


def _log(x: float) -> float:
    return -math.inf if x == 0 else math.log(x)


_FUNCTIONS: dict[str, Callable[..., float]] = {
    "log": _log, "log2": lambda x: -math.inf if x == 0 else math.log2(x), "log1p": lambda x: _log(1 + x), "exp": math.exp,
    "exp2": lambda x: 2.0**x, "sqrt": math.sqrt, "square": lambda x: x * x, "pow": operator.pow, "round": round,
}
for _name, _function in _FUNCTIONS.items():
    _of_constants(_name, _function)
