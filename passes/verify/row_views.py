"""Rules of the row-wise proof for views, and for what joins or repeats: the dimension of the tokens is followed."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from quire.passes.fx import same_shape, symbolic
from quire.passes.verify.row_rules import Call, as_data, as_rows, counts_rows, no_lengths, rule, same
from quire.passes.verify.rows import CONST, NOTHING, Holds, Known, Mixes, Rows, of_shape, token_dims


@rule("view _unsafe_view reshape _reshape_alias _reshape_copy unsqueeze squeeze view_copy squeeze_copy unsqueeze_copy",
      lengths=True)
def _reshape(call: Call) -> Known:
    """What lies before and behind the tokens, in memory order, stays there: outer and inner are what is left of it."""
    x, shape = call["self"], call.result.shape
    rows = as_rows(call.of("self"))
    if call.name == "_reshape_alias" and not same_shape(call["stride"], x.reshape(shape).stride()):
        raise Mixes("it reads memory in another order")
    if call.name == "view" and call["dtype"] is not None:
        if rows is not None and (rows.dim == x.dim() - 1 or rows.holds != NOTHING):
            raise Mixes("it reads the bytes of several tokens as one number")
        return rows or CONST
    if rows is None:
        if token_dims(shape, call.axes):
            raise Mixes("a constant is given the shape of the tokens: its rows would go by the places of the tokens")
        return CONST
    found = token_dims(shape, call.axes)
    if len(found) != 1 or found[0][1] is not rows.axis:
        raise Mixes(f"{tuple(x.shape)} becomes {tuple(shape)}: tokens are folded into another dimension")
    dim, _, n = found[0]
    before, behind = prod(x.shape[: rows.dim]) * rows.outer, prod(x.shape[rows.dim + 1 :]) * rows.inner
    left, right = prod(shape[:dim]), prod(shape[dim + 1 :])
    outer, inner = _quotient(before, left), _quotient(behind, right)
    if outer is None or inner is None or outer * inner != n:
        raise Mixes(f"{tuple(x.shape)} becomes {tuple(shape)}: numbers of several tokens come into one row")
    holds = rows.holds
    if (outer, inner) != (rows.outer, rows.inner) and (
            rows.order is not None or not (holds == NOTHING or holds.what == "index" or holds.is_blank)):
        raise Mixes("rows that are sorted by expert are put into another shape")
    if holds.what == "one hot" and not same_shape(x.shape, shape):
        holds = NOTHING  # its columns are the experts no more
    return Rows(dim, rows.axis, inner, outer, rows.order, holds)


def _quotient(whole: Any, part: Any) -> int | None:
    """``whole / part`` if that is a number, else None."""
    if not symbolic(whole) and not symbolic(part):
        return whole // part if part and whole % part == 0 else None
    expr = (whole.node.expr if symbolic(whole) else whole) / (part.node.expr if symbolic(part) else part)
    return int(expr) if expr.is_Integer else None


@rule("permute transpose t numpy_T swapaxes", of="self")
def _permute(call: Call, rows: Rows) -> Known:
    x = call["self"]
    dims = list(range(x.dim()))
    if call.name == "permute":
        dims = [d % x.dim() for d in call["dims"]]
    elif x.dim() > 1:
        a, b = (0, 1) if call.name == "t" else (call["dim0"] % x.dim(), call["dim1"] % x.dim())
        dims[a], dims[b] = b, a
    return rows.at(dims.index(rows.dim))


@rule("expand expand_copy", lengths=True)
def _expand(call: Call) -> Known:
    x, rows = call["self"], as_rows(call.of("self"))
    if rows is None:
        return of_shape(call.result, call.axes)  # each row is the same
    return rows.part.at(rows.dim + call.result.dim() - x.dim())


@rule("repeat", lengths=True)
def _repeat(call: Call) -> Known:
    rows, x = as_rows(call.of("self")), call["self"]
    if rows is None:
        if any(counts_rows(r, call.axes) and c != 1 for r, c in zip(
                reversed(call["repeats"]), [*reversed(x.shape), *[1] * len(call["repeats"])], strict=False)):
            raise Mixes("it repeats several numbers as often as there are tokens")
        return of_shape(call.result, call.axes)
    dim = rows.dim + call.result.dim() - x.dim()
    times = call["repeats"][dim]
    if type(times) is not int or (times != 1 and (rows.order or rows.holds != NOTHING)):
        raise Mixes("it repeats the row")
    return Rows(dim, rows.axis, rows.inner, rows.outer * times, rows.order, rows.part.holds)


@rule("select", of="self")
def _select(call: Call, rows: Rows) -> Known:
    dim = call["dim"] % call["self"].dim()
    if dim == rows.dim:
        raise Mixes("one token is taken for all")
    return rows.part.at(rows.dim - (dim < rows.dim))


@rule("slice", lengths=True)
def _slice(call: Call) -> Known:
    x, rows = call["self"], as_rows(call.of("self"))
    dim = call["dim"] % x.dim()
    if rows is not None and dim == rows.dim:
        if not (call["start"] in (None, 0) and call["step"] in (None, 1) and _reaches(call["end"], x.shape[dim])):
            raise Mixes("the row is cut: some tokens are taken for all")
        return rows
    no_lengths(call)
    return rows.part if rows else CONST


def _reaches(end: Any, size: Any) -> bool:
    """Whether a slice up to ``end`` takes all, by its expression."""
    if end is None or (not symbolic(end) and end >= 2**62):
        return True
    return symbolic(end) and symbolic(size) and end.node.expr == size.node.expr


@rule("split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unsafe_chunk tensor_split unbind split_copy "
      "split_with_sizes_copy unbind_copy", of="self")
def _parts(call: Call, rows: Rows) -> Known:
    dim = (call["dim"] or 0) % call["self"].dim()
    if dim == rows.dim:
        raise Mixes("the row is cut into parts")
    rows = rows.part
    return rows.at(rows.dim - (dim < rows.dim)) if call.name.startswith("unbind") else rows


@rule("diagonal diagonal_copy", of="self")
def _diagonal(call: Call, rows: Rows) -> Known:
    dims = [call[n] % call["self"].dim() for n in ("dim1", "dim2")]
    if rows.dim in dims:
        raise Mixes("it takes the diagonal over tokens")
    return rows.part.at(rows.dim - sum(d < rows.dim for d in dims))


@rule("diag_embed", of="self")
def _diag_embed(call: Call, rows: Rows) -> Known:
    """The last dimension becomes two."""
    ndim = call.result.dim()
    if rows.dim == call["self"].dim() - 1:
        raise Mixes("it puts the tokens on a diagonal")
    kept = [d for d in range(ndim) if d not in (call["dim1"] % ndim, call["dim2"] % ndim)]
    return rows.data.at(kept[rows.dim])


@rule("unfold", of="self")
def _unfold(call: Call, rows: Rows) -> Known:
    if call["dimension"] % call["self"].dim() == rows.dim:
        raise Mixes("it takes windows of several tokens")
    return rows.part


@rule("view_as_real view_as_complex real imag view_as_real_copy view_as_complex_copy", of="self")
def _complex(call: Call, rows: Rows) -> Known:
    if call.name.startswith("view_as_complex") and rows.dim == call["self"].dim() - 1:
        raise Mixes("it reads two tokens as one number")
    return rows


@rule("cat stack")
def _cat(call: Call) -> Known:
    tensors: list[torch.Tensor] = call["tensors"]
    first = same([as_data(call.known(t)) for t in tensors])
    if first is None:
        return CONST
    dim = (call["dim"] or 0) % call.result.dim()
    if call.name == "stack":
        return first.at(first.dim + (dim <= first.dim))
    if dim == first.dim:
        raise Mixes("it joins rows of tokens")
    index = all(isinstance(k := call.known(t), Rows) and k.holds.what == "index" for t in tensors)
    return replace(first, holds=Holds("index")) if index else first


@rule("constant_pad_nd", of="self")
def _pad(call: Call, rows: Rows) -> Known:
    at = 2 * (call["self"].dim() - 1 - rows.dim)
    if any(n != 0 for n in call["pad"][at : at + 2]):
        raise Mixes("it shifts the tokens")
    return rows.data
