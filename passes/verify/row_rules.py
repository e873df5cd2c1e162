"""Which ATen operations are row-wise, by rules: elementwise, along dimensions, constructors.

A rule gets a ``Call`` and says what is known of its results (of all alike, or a list), or raises ``Mixes``. It proves that each
cell of a result depends on cells of one token only. An operation without a rule is decomposed (``proof.py``), or not row-wise.
Other rules: ``row_products.py`` (and norms, pooling), ``row_views.py``, ``row_index.py`` (and routing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from quire.passes.fx import is_one, same_shape, symbolic
from quire.passes.verify.rows import (
    CONST,
    EXACT,
    WHOLE,
    Const,
    Counts,
    Group,
    Holds,
    Ids,
    Known,
    Mixed,
    Mixes,
    Order,
    Rows,
    of_shape,
)


@dataclass(eq=False)
class Call:
    """One call of an ATen operation on fake tensors."""

    op: Any
    name: str  # without overload and without the underscore of those that work in place
    given: dict[str, Any]  # its arguments by the names of the schema, defaults included
    result: Any
    known: Callable[[Any], Known]
    axes: Any  # the symbols of the numbers of tokens, and of rows asked for

    def __getitem__(self, argument: str) -> Any:
        return self.given.get(argument)

    def of(self, argument: str) -> Known:
        """What is known of a tensor argument; of a number, that it is constant."""
        x = self.given.get(argument)
        return self.known(x) if isinstance(x, torch.Tensor) else CONST

    def rows(self, argument: str) -> Rows | None:
        """The tensor argument as data; None if it is constant. Raises Mixes."""
        return as_data(self.of(argument))

    def tensors(self) -> list[torch.Tensor]:
        return [x for x in tree_leaves(list(self.given.values())) if isinstance(x, torch.Tensor)]

    @property
    def first(self) -> str:
        """The name of the first tensor argument."""
        return next(name for name, x in self.given.items() if isinstance(x, torch.Tensor))

    @property
    def num_results(self) -> int:
        return len(self.result) if isinstance(self.result, (tuple, list)) else 1

    def dims(self, argument: str, of: torch.Tensor) -> list[int] | None:
        """The dimensions in an argument, counted from 0; None if it is left out."""
        found = self.given.get(argument)
        if found is None or (isinstance(found, (tuple, list)) and not found):
            return None
        return [int(d) % max(1, of.dim()) for d in (found if isinstance(found, (tuple, list)) else [found])]


def as_rows(known: Known) -> Rows | None:
    """Rows, with what they hold; None if constant. Raises Mixes."""
    if isinstance(known, (Counts, Group)):
        raise Mixes("it computes with the tokens routed to one expert, or with their number")
    return known if isinstance(known, Rows) else None


def as_data(known: Known) -> Rows | None:
    """Rows to compute with; None if constant. Raises Mixes."""
    rows = as_rows(known)
    return None if rows is None else rows.data


Rule = Callable[..., "Known | list[Known]"]
RULES: dict[str, Rule] = {}
#: Operations whose rule looks itself at numbers that depend on how many tokens there are; no other may be given one.
LENGTHS: set[str] = set()


def rule(*names: str, lengths: bool = False, of: str = "") -> Callable[[Rule], Rule]:
    """The rule of operations by name, all overloads; "namespace::name" if not PyTorch's own. ``lengths``: see LENGTHS. ``of``:
    an argument whose rows, with what they hold, the rule gets as well; where it is constant, the results are."""
    def add(function: Rule) -> Rule:
        def with_rows(call: Call) -> Known | list[Known]:
            rows = as_rows(call.of(of))
            return CONST if rows is None else function(call, rows)

        for name in " ".join(names).split():
            assert name not in RULES, name
            RULES[name] = with_rows if of else function
            if lengths:
                LENGTHS.add(name)
        return function
    return add


def same(found: Sequence[Rows | None]) -> Rows | None:
    """Of operands in which tokens are in the same dimension: that. Raises Mixes if they differ."""
    rows = [r for r in found if r is not None]
    if any(r.dim != rows[0].dim or not r.same_rows(rows[0]) for r in rows):
        raise Mixes("the tokens are in different dimensions, or in another order, in its operands")
    return rows[0] if rows else None


def counts_rows(number: Any, axes: Any) -> bool:
    """Whether a number depends on how many tokens there are."""
    return isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) and any(
        axis in number.node.expr.free_symbols for axis in axes)


def no_lengths(call: Call, but: tuple[str, ...] = ()) -> None:
    """Raises Mixes if a number among the arguments depends on the number of tokens."""
    for name, given in call.given.items():
        if name not in but and any(counts_rows(x, call.axes) for x in tree_leaves(given)):
            raise Mixes("arithmetic with the length of the row")


def broadcast(call: Call, operands: Sequence[Any], ndim: int) -> Rows | None:
    """Rows of the elementwise result with ``ndim`` dimensions; None if all operands are constant."""
    found = []
    for x in operands:
        rows = as_data(call.known(x))
        found.append(rows.at(rows.dim + ndim - x.dim()) if rows is not None else None)
    return same(found)


def elementwise(call: Call) -> Known:
    if call.name in ("add", "sub") and type(call["other"]) is int and call["other"] == 0:
        return call.of("self")
    no_lengths(call, but=("size", "dtype", "memory_format"))
    result = call.result[0] if isinstance(call.result, (tuple, list)) else call.result
    return broadcast(call, call.tensors(), result.dim()) or CONST


@rule("where", lengths=True)
def _where(call: Call) -> Known:
    if call.op._overloadname == "default":  # torch.where(condition)
        raise Mixes("how many results there are depends on the tokens")
    return elementwise(call)


rule("complex polar _prelu_kernel hardswish log_sigmoid_forward erfinv copysign atan2 bitwise_not nan_to_num masked_fill fill "
     "convert_element_type hardsigmoid", lengths=True)(elementwise)


@rule("clone _to_copy alias detach lift_fresh lift_fresh_copy lift contiguous convert_element_type_ device_put _conj conj")
def _copy_of(call: Call) -> Known:
    (x,) = call.tensors()
    return call.known(x)


@rule("copy")
def _copy_to(call: Call) -> Known:
    source = call["src"]
    known = call.known(source)
    if not isinstance(known, Rows):
        return known
    known = known if call.result.numel() == source.numel() else known.part
    return known.at(known.dim + call.result.dim() - source.dim())


@rule("floor_divide div", lengths=True)
def _divide(call: Call) -> Known:
    known, by = call.of("self"), call["other"]
    whole = call.name == "floor_divide" or call["rounding_mode"] in ("floor", "trunc")
    if isinstance(known, Rows) and known.holds.what == "number" and whole and type(by) is int and by == known.holds.inner:
        return replace(known, holds=Holds("number"))
    return elementwise(call)


@rule("bucketize searchsorted")
def _bucketize(call: Call) -> Known:
    table = call.of("boundaries" if call.name == "bucketize" else "sorted_sequence")
    if not isinstance(table, Const) or (call.name == "searchsorted" and call["sorted_sequence"].dim() > 1):
        raise Mixes("its boundaries differ from token to token")
    return call.rows("self") or CONST


@rule("isin")
def _isin(call: Call) -> Known:
    if call.rows("test_elements") is not None:
        raise Mixes("it looks the values up among those of all tokens")
    rows = call.rows("elements")
    if rows is not None and call["assume_unique"]:  # then PyTorch sorts the elements of all tokens
        raise Mixes("it takes the values of all tokens for different ones")
    return rows or CONST


@rule("sum nansum mean prod amax amin any all var std var_mean std_mean logsumexp norm linalg_vector_norm argmax argmin max "
      "min median nanmedian mode kthvalue count_nonzero aminmax")
def _reduction(call: Call) -> Known | list[Known]:
    """Some dimensions become one number each; ``max(x, y)`` is elementwise."""
    if call["other"] is not None:
        return elementwise(call)
    x = call.given[call.first]
    known = as_rows(call.known(x))
    if known is None:
        return CONST
    rows, dims = known.data, call.dims("dim", x)
    if call.name == "sum" and known.holds.what == "one hot" and dims == [rows.dim] and rows.dim == 0 and x.dim() == 2 \
            and not call["keepdim"] and call.result.dtype in EXACT:
        return Counts(ids=known.holds.ids)
    if dims is None or rows.dim in dims:
        raise Mixes("it is taken over the tokens")
    rows = rows.at(rows.dim if call["keepdim"] else rows.dim - sum(d < rows.dim for d in dims))
    if call.num_results > 1 and call.name in ("max", "min", "median", "nanmedian", "mode", "kthvalue"):
        return [rows, _index(rows)]
    return _index(rows) if call.name in ("argmax", "argmin") else rows


def _index(rows: Rows, ids: Ids | None = None) -> Rows:
    """Places in a dimension that is not the tokens'."""
    return Rows(rows.dim, rows.axis, rows.inner, rows.outer, rows.order, Holds("index", ids=ids))


@rule("_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod cummax cummin logcumsumexp flip roll "
      "topk _fft_r2c _fft_c2c _fft_c2r glu linalg_cross")
def _along(call: Call) -> Known | list[Known]:
    """Numbers of one row along some dimensions, which keep their places; their sizes may change."""
    if call.name == "cumsum" and isinstance(counts := call.of("self"), Counts) and not counts.summed \
            and call.result.dtype in EXACT:
        return replace(counts, summed=True)
    x = call.given[call.first]
    rows = same([call.rows(n) for n, t in call.given.items() if isinstance(t, torch.Tensor)])
    if rows is None:
        return CONST
    dims = call.dims("dims" if "dims" in call.given else "dim", x)
    if dims is None or rows.dim in dims:
        raise Mixes("it goes along the tokens")
    if call.name not in ("topk", "cummax", "cummin"):
        return rows
    others = [n for d, n in enumerate(x.shape) if d not in (rows.dim, *dims)]
    each_once = call.name == "topk" and rows.inner == rows.outer == 1 and all(map(is_one, others))
    return [rows, _index(rows, Ids() if each_once else None)]


@rule("sort")
def _sort(call: Call) -> list[Known]:
    known, x = call.of("self"), call["self"]
    if not isinstance(known, Rows) or known.dim != (call["dim"] if call["dim"] is not None else -1) % max(1, x.dim()):
        rows = call.rows("self")
        return [rows or CONST, CONST if rows is None else _index(rows)]
    if x.dim() != 1 or known.outer != 1:
        raise Mixes("it sorts tokens")
    if known.order is not None:  # of row numbers, after a sort: where each row went
        if known.holds == Holds("number", known.inner) and not call["descending"]:
            return [Mixed("it sorts tokens twice"), Rows(0, known.axis, known.inner, holds=Holds("inverse", order=known.order))]
        raise Mixes("it sorts tokens twice")
    known.data  # noqa: B018
    ids = known.holds.what == "index" and not call["descending"]
    order = Order(ids, known.holds.ids if ids else None)
    return [Rows(0, known.axis, known.inner, order=order, holds=Holds("sorted", order=order)),
            Rows(0, known.axis, known.inner, order=order, holds=Holds("number", known.inner))]


@rule("tril triu", of="self")
def _triangle(call: Call, rows: Rows) -> Known:
    if rows.dim >= call["self"].dim() - 2:
        raise Mixes("it zeroes by the place of the token in the row")
    return rows.data


@rule("zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like empty_strided "
      "new_empty_strided zero", lengths=True)
def _filled(call: Call) -> Known:
    """All cells are equal: each row is, whatever the dimensions."""
    value = call["fill_value"]
    if counts_rows(value, call.axes) or isinstance(value, torch.Tensor):
        raise Mixes("it is filled with the length of the row")
    known = of_shape(call.result, call.axes)
    if "strided" in call.name and isinstance(known, Rows) and not _rows_apart(call.result, known.dim):
        raise Mixes("tokens share memory in it")
    like, holds = call.of("self"), Holds("zeros" if "zero" in call.name or value == 0 else "blank")
    if isinstance(like, Rows) and same_shape(call.result.shape, call["self"].shape):
        return replace(like, holds=holds)
    return of_shape(call.result, call.axes, holds)


def _rows_apart(x: torch.Tensor, dim: int) -> bool:
    """Whether the cells of one row of ``dim`` lie closer together than two rows of it, so that no two rows share memory."""
    shape, stride = x.shape, x.stride()
    others = [(n, s) for d, (n, s) in enumerate(zip(shape, stride, strict=True)) if d != dim and not is_one(n)]
    if any(symbolic(n) or symbolic(s) for n, s in others) or symbolic(stride[dim]):
        return False
    return stride[dim] > sum((n - 1) * s for n, s in others)


@rule("arange", lengths=True)
def _arange(call: Call) -> Known:
    known = of_shape(call.result, call.axes)
    if not isinstance(known, Rows):
        no_lengths(call)
        return known
    start, step = call["start"] or 0, 1 if call["step"] is None else call["step"]
    if symbolic(start) or symbolic(step) or start != 0 or step != 1 or call.result.dtype not in WHOLE:
        raise Mixes("it numbers the tokens of the batch; positions must come from position_ids")
    return Rows(0, known.axis, known.inner, holds=Holds("number", known.inner))
