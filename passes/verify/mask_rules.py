"""One rule per operator for reading a mask (``passes/verify/mask_proof.py``).

A rule takes the prover, the node and the node's arguments, and returns an element of the result: a term or condition whose
variables are the result's indices, named by dimension from the right, so that broadcasting needs no work. What a rule does not
understand raises ``Unprovable``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from quire.passes.fx import is_one, symbolic, target_name, torch_name, value
from quire.passes.verify import mask_formula as formula
from quire.passes.verify.mask_decision import never
from quire.passes.verify.mask_formula import Condition, Form, Infinite, Operand, Term, Unprovable

if TYPE_CHECKING:
    from quire.passes.verify.mask_proof import MaskProver

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
RULES: dict[str, Callable[..., Any]] = {}
#: Of operators that return several tensors: (prover, node, its tensors, which of the results) -> that one's element.
PARTS: dict[str, Callable[..., Any]] = {}


def rule(*names: str) -> Callable[[Any], Any]:
    """Registers the rule of the operators of these names."""
    def register(function: Any) -> Any:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _arithmetic(names: Sequence[str], combine: Callable[..., Term], truths: Callable[..., Condition] | None = None) -> None:
    @rule(*names)
    def apply(p: MaskProver, node: fx.Node, a: Any, b: Any) -> Any:
        dtype = value(node).dtype
        if dtype == torch.bool and truths is not None:
            return truths(p.condition(a), p.condition(b))
        return combine(p.term(a, dtype), p.term(b, dtype))


_arithmetic(("add", "iadd"), formula.add, formula.either)
_arithmetic(("sub", "isub", "subtract"), formula.minus)
_arithmetic(("mul", "imul", "multiply"), formula.times, formula.both)


def _quotient(p: MaskProver, node: fx.Node, a: Any, b: Any) -> tuple[Term, int]:
    """The quotient by a positive whole number, not rounded, and that number."""
    by = p.term(b)
    if not isinstance(by, Form) or not by.is_const or by.const < 1 or by.const.denominator != 1:
        raise Unprovable("it divides positions by something that is not a positive whole constant")
    dividend = p.term(a, value(node).dtype)
    return formula.times(dividend, 1 / by.const), int(by.const)


@rule("div", "divide", "truediv", "itruediv", "true_divide")
def _div(p: MaskProver, node: fx.Node, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    quotient, by = _quotient(p, node, a, b)
    if rounding_mode is None:
        if by & (by - 1):
            raise Unprovable("it divides positions with rounding (use // on integers)")
        return quotient
    return formula.floor(quotient) if rounding_mode == "floor" else _truncated(quotient)


def _truncated(term: Term) -> Term:
    if any(isinstance(leaf, Infinite) for leaf in formula.leaves(term)):
        raise Unprovable("it rounds an infinity")
    negative = formula.compare(term, "lt", 0)
    if term == formula.floor(term) or never(negative):
        return formula.floor(term)
    return formula.choose(negative, _ceil(term), formula.floor(term))


def _ceil(term: Term) -> Term:
    return formula.times(formula.floor(formula.times(term, -1)), -1)


def greater(a: Term, b: Operand) -> Term:
    return formula.choose(formula.compare(a, "lt", b), b, a)


def lesser(a: Term, b: Operand) -> Term:
    return formula.choose(formula.compare(a, "lt", b), a, b)


@rule("clamp", "clip", "clamp_min", "clamp_max", "clamp_")
def _clamp(p: MaskProver, node: fx.Node, a: Any, min: Any = None, max: Any = None) -> Any:
    if target_name(node) == "clamp_max":
        min, max = None, min if max is None else max
    dtype = value(node).dtype
    term = p.term(a, dtype)
    term = term if min is None else greater(term, p.term(min, dtype))
    return term if max is None else lesser(term, p.term(max, dtype))


@rule("maximum", "minimum", "max", "min", "fmax", "fmin")
def _max_min(p: MaskProver, node: fx.Node, a: Any, b: Any = None) -> Any:
    if not isinstance(value(b), torch.Tensor):
        raise Unprovable("it takes a maximum over positions")
    better = lesser if "min" in target_name(node) else greater
    return better(p.term(a, value(node).dtype), p.term(b, value(node).dtype))


def _comparison(op: str, *names: str) -> None:
    @rule(op, f"__{op}__", *names)
    def compare(p: MaskProver, node: fx.Node, a: Any, b: Any) -> Condition:
        dtype = torch.result_type(value(a), value(b))
        if dtype == torch.bool:
            left, right = p.condition(a), p.condition(b)
            if op in ("eq", "ne"):
                same = formula.select(left, right, formula.negate(right))
                return same if op == "eq" else formula.negate(same)
            return formula.compare(formula.as_term(left), op, formula.as_term(right))
        return formula.compare(formula.exact(p.term(a), dtype), op, formula.exact(p.term(b), dtype))


for _names in ("eq", "ne not_equal", "lt less", "le less_equal", "gt greater", "ge greater_equal"):
    _comparison(*_names.split())


def _logic(names: str, combine: Callable[[Condition, Condition], Condition], bits: str = "") -> None:
    """``bits``: of positions, in two's complement: the lower k are the remainder by 2**k, negative numbers included."""
    @rule(*names.split())
    def logic(p: MaskProver, node: fx.Node, a: Any, b: Any) -> Any:
        if value(node).dtype == torch.bool:
            return combine(p.condition(a), p.condition(b))
        for x, other in ((a, b), (b, a)) if bits else ():
            mask = p.term(other)
            if isinstance(mask, Form) and mask.is_const and value(node).dtype in _SIGNED:
                of, number = p.term(x), int(mask.const)
                ones = number if number >= 0 else ~number
                if ones & (ones + 1):  # not 2**k - 1
                    break
                high = formula.times(formula.floor(formula.times(of, Fraction(1, ones + 1))), ones + 1)
                if bits == "and":
                    return formula.minus(of, high) if number >= 0 else high
                if number >= 0:
                    return formula.add(high, number)
        raise Unprovable("it combines the bits of positions")


_logic("logical_and logical_and_", formula.both)
_logic("logical_or logical_or_", formula.either)
_logic("and_ iand __and__ __iand__ bitwise_and bitwise_and_", formula.both, bits="and")
_logic("or_ ior __or__ __ior__ bitwise_or bitwise_or_", formula.either, bits="or")
_logic("xor ixor __xor__ __ixor__ logical_xor bitwise_xor", lambda a, b: formula.select(a, formula.negate(b), b))


@rule("invert", "__invert__", "logical_not", "bitwise_not", "logical_not_")
def _not(p: MaskProver, node: fx.Node, a: Any) -> Condition:
    if value(node).dtype != torch.bool:
        raise Unprovable("it inverts the bits of positions")
    return formula.negate(p.condition(a))


def _choose(p: MaskProver, node: fx.Node, condition: Any, yes: Any, no: Any) -> Any:
    if value(node).dtype == torch.bool:
        return formula.select(p.condition(condition), p.condition(yes), p.condition(no))
    return formula.choose(p.condition(condition), p.term(yes), p.term(no))


@rule("where")
def _where(p: MaskProver, node: fx.Node, condition: Any, input: Any, other: Any) -> Any:
    if node.op == "call_method":  # x.where(condition, other)
        condition, input = input, condition
    return _choose(p, node, condition, input, other)


@rule("arange")
def _arange(p: MaskProver, node: fx.Node, *numbers: Any, **options: Any) -> Any:
    start = options.get("start", numbers[0] if len(numbers) > 1 or (numbers and "end" in options) else 0)
    step = options.get("step", numbers[2] if len(numbers) > 2 else 1)
    return formula.add(formula.times(formula.var(-1), p.constant(step)), p.constant(start))


@rule("tril", "tril_", "triu", "triu_")
def _triangle(p: MaskProver, node: fx.Node, x: Any, diagonal: Any = 0) -> Any:
    ahead = formula.minus(formula.var(-1), formula.var(-2))
    keep = formula.compare(ahead, "le" if "tril" in target_name(node) else "ge", p.constant(diagonal))
    element = p.element(x)
    return formula.both(keep, element) if formula.is_condition(element) else formula.choose(keep, element, 0)


@rule("to", "type", "type_as", "bool", "float", "long", "int", "half", "bfloat16", "double")
def _to(p: MaskProver, node: fx.Node, x: Any, *args: Any, **options: Any) -> Any:
    element = p.element(x)
    if not formula.is_condition(element) and value(x).is_floating_point() and not value(node).is_floating_point() and (
            value(node).dtype != torch.bool):
        return _truncated(element)
    return element


@rule("unsqueeze", "squeeze", "view", "reshape", "flatten", "view_as", "reshape_as", "repeat", "unflatten")
def _reshape(p: MaskProver, node: fx.Node, x: Any, *args: Any, **options: Any) -> Any:
    """Dimensions of size 1 may come and go; the others keep their order, and none is split, joined or repeated."""
    if value(x).dtype != value(node).dtype:
        raise Unprovable(f"it reads the bytes of {value(x).dtype} as {value(node).dtype}")
    old, new = ([(k - t.dim(), n) for k, n in enumerate(t.shape) if not is_one(n)] for t in (value(x), value(node)))
    element = p.element(x)
    if str(node.target) == "repeat":
        used = formula.axes(element)
        if any(str(value(x).shape[a]) != str(value(node).shape[a]) for a in used):
            raise Unprovable("it repeats positions")
        return element
    if [str(n) for _, n in old] != [str(n) for _, n in new]:
        raise Unprovable(f"it changes shape from {tuple(value(x).shape)} to {tuple(value(node).shape)}")
    return formula.substitute(element, {a: formula.var(b) for (a, _), (b, _) in zip(old, new, strict=True)})


@rule("transpose", "permute", "t", "swapaxes", "movedim", "getattr")
def _transpose(p: MaskProver, node: fx.Node, x: Any, *dims: Any, **options: Any) -> Any:
    rank, name = value(x).dim(), target_name(node)
    if name == "getattr" and (dims[0] not in ("T", "mT") or rank < 2 or (dims[0] == "T" and rank > 2)):
        raise Unprovable(f"it reads .{dims[0]}")
    if name in ("getattr", "t"):
        dims = (-2, -1)
    if options or name == "movedim":
        raise Unprovable("it moves dimensions in a way that is not understood")
    order = list(range(rank))
    if name == "permute":
        order = [d % rank for d in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]
    elif rank > 1:
        a, b = (d % rank for d in dims)
        order[a], order[b] = order[b], order[a]
    return formula.substitute(p.element(x), {old - rank: formula.var(new - rank) for new, old in enumerate(order)})


@rule("getitem", "__getitem__")
def _getitem(p: MaskProver, node: fx.Node, x: Any, index: Any) -> Any:
    if not isinstance(value(x), torch.Tensor):
        part = PARTS.get(torch_name(x))
        if part is None or type(index) is not int:
            raise Unprovable("it uses a part of a tuple")
        return part(p, x, x.args[0] if isinstance(x.args[0], (list, tuple)) else x.args, index)
    shape, rank = value(x).shape, value(node).dim()
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [i for i in items if not isinstance(i, fx.Node)]:
        at = next(k for k, i in enumerate(items) if i is Ellipsis)
        taken = sum(i is not None and i is not Ellipsis for i in items)
        items[at : at + 1] = [slice(None)] * (len(shape) - taken)
    items += [slice(None)] * (len(shape) - sum(i is not None for i in items))
    tensors = [k for k, i in enumerate(items) if isinstance(value(i), torch.Tensor)]
    if tensors and (tensors[-1] - tensors[0] >= len(tensors) or any(value(items[k]).dtype == torch.bool for k in tensors)):
        raise Unprovable("it is indexed in a way that is not understood")
    wide = max((value(items[k]).dim() for k in tensors), default=0)
    values: dict[int, Operand] = {}
    source = result = 0
    for k, item in enumerate(items):
        if item is None:
            result += 1
            continue
        size: Any = shape[source]
        if k in tensors:
            axis = result + wide - rank  # the index's last dimension is this one's left neighbour
            term = formula.substitute(p.term(item), {a: formula.var(a + axis) for a in range(-wide, 0)})
            values[source - len(shape)] = _in_range(p, term, size, node)
            result += wide if k == tensors[-1] else 0
        elif isinstance(item, slice):
            start = _start(p, item, value(node).shape[result])
            values[source - len(shape)] = formula.add(formula.var(result - rank), start)
            result += 1
        else:
            if isinstance(item, bool):
                raise Unprovable("it is indexed with a truth")
            place = p.constant(item)
            if place < 0 and symbolic(size):
                raise Unprovable("it takes the last position")
            values[source - len(shape)] = place if place >= 0 else place + size
        source += 1
    return formula.substitute(p.element(x), values)


def _start(p: MaskProver, cut: slice, kept: Any) -> int:
    """Where a slice begins that keeps ``kept`` places."""
    start = 0 if cut.start is None else p.constant(cut.start)
    if (cut.step is not None and p.constant(cut.step) != 1) or start < 0:
        raise Unprovable("it is cut from the end, or with a step")
    if symbolic(kept) and not p.is_row(kept):
        raise Unprovable("it cuts the row of tokens")
    return start


def _in_range(p: MaskProver, index: Term, size: Any, node: fx.Node) -> Term:
    """The index, proven not to be negative, and below the number of tokens where it indexes those."""
    if not never(formula.compare(index, "lt", 0)):
        raise Unprovable("it is indexed with negative places")
    if symbolic(size):
        place = next(iter(formula.axes(index)), None)
        constant = isinstance(index, Form) and index.is_const and index.const == 0
        if not constant and (place is None or index != formula.var(place) or not p.is_row(value(node).shape[place])):
            raise Unprovable("it takes other positions than those of the queries and keys")
    return index


def _in_dimension(p: MaskProver, node: fx.Node, x: Any, dim: int, item: Any) -> Any:
    items: list[Any] = [slice(None)] * value(x).dim()
    items[dim] = item
    return _getitem(p, node, x, tuple(items))


@rule("setitem")
def _setitem(p: MaskProver, node: fx.Node, x: Any, index: Any, new: Any) -> Any:
    if not isinstance(index, fx.Node) or value(index).dtype != torch.bool or value(index).dim() != value(x).dim() or (
            isinstance(value(new), torch.Tensor) and value(new).dim()):
        raise Unprovable("a part of it is overwritten")
    return _choose(p, x, index, new, x)


@rule("diff")
def _diff(p: MaskProver, node: fx.Node, x: Any, n: Any = 1, dim: Any = -1, prepend: Any = None, append: Any = None) -> Any:
    """Differences of neighbours, as transformers takes them of the positions to find packed sequences."""
    if n != 1 or append is not None or prepend is None or value(prepend).shape[dim] != 1:
        raise Unprovable("it takes differences along the row")
    axis = dim % value(x).dim() - value(x).dim()
    element, first = p.term(x), formula.substitute(p.term(prepend), {axis: 0})
    before = formula.substitute(element, {axis: formula.add(formula.var(axis), -1)})
    if formula.substitute(before, {axis: 0}) != first:
        before = formula.choose(formula.compare(formula.var(axis), "eq", 0), first, before)
    return formula.minus(element, before)


# Rules of one expression.
_EXPRESSIONS: dict[str, Callable[..., Any]] = {
    "rsub": lambda p, node, a, b: RULES["sub"](p, node, b, a),
    "neg negative": lambda p, node, a: formula.times(p.term(a), -1),
    "floordiv floor_divide ifloordiv": lambda p, node, a, b: formula.floor(_quotient(p, node, a, b)[0]),
    "index_select": lambda p, node, x, dim, index: _in_dimension(p, node, x, dim, index),
    "narrow": lambda p, node, x, dim, start, length: _in_dimension(p, node, x, dim, slice(start, None)),
    "mod remainder": lambda p, node, a, b: formula.minus(
        p.term(a), formula.times(formula.floor(_quotient(p, node, a, b)[0]), p.term(b))),
    "lshift bitwise_left_shift __lshift__": lambda p, node, a, b: formula.times(p.term(a), 2 ** int(p.constant(b))),
    "rshift bitwise_right_shift __rshift__": lambda p, node, a, b: formula.floor(
        formula.times(p.term(a), Fraction(1, 2 ** int(p.constant(b))))),
    "abs absolute __abs__": lambda p, node, a: formula.choose(
        formula.compare(term := p.term(a), "lt", 0), formula.times(term, -1), term),
    "sign sgn": lambda p, node, a: formula.choose(
        formula.compare(term := p.term(a), "lt", 0), -1, formula.choose(formula.compare(0, "lt", term), 1, 0)),
    "floor": lambda p, node, a: formula.floor(p.term(a)),
    "ceil": lambda p, node, a: _ceil(p.term(a)),
    "trunc fix": lambda p, node, a: _truncated(p.term(a)),
    "relu relu_": lambda p, node, a, inplace=False: greater(p.term(a), 0),
    "masked_fill masked_fill_": lambda p, node, x, mask, value: _choose(p, node, mask, value, x),
    "ones ones_like new_ones": lambda p, node, *args, **options: formula.number(1),
    "zeros zeros_like new_zeros zero_": lambda p, node, *args, **options: formula.number(0),
    "full full_like": lambda p, node, *args, **options: p.term(options.get("fill_value", args[1] if len(args) > 1 else None)),
    "new_full": lambda p, node, *args, **options: p.term(options.get("fill_value", args[2] if len(args) > 2 else None)),
    "fill_ fill": lambda p, node, *args, **options: p.term(args[1]),
    "eye": lambda p, node, *args, **options: formula.compare(formula.var(-1), "eq", formula.var(-2)),
    "clone contiguous detach detach_ expand expand_as broadcast_to lift_fresh": lambda p, node, x, *a, **options: p.element(x),
}
for _names, _expression in _EXPRESSIONS.items():
    rule(*_names.split())(_expression)
