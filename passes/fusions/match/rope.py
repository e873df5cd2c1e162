"""Rotary embedding in a graph: which spellings are known, and the proof that one of them stands before attention.

The dimensions of a head turn in pairs, by the angle of the token's position. Known are

* a sum: ``x * cos + turned * sin``, with ``turned`` the pairs (-second, first) put together again;
* pairs: ``first * cos - second * sin`` and ``second * cos + first * sin``, put together again;
* complex numbers: ``view_as_real(view_as_complex(pairs) * freqs)``, whose tables are the real and the imaginary part,

where a pair is one of halves (``chunk``, ``split``, slices; joined by ``cat``) or of neighbours (slices of step 2; joined by
``stack`` and ``flatten``), and all or the first R dimensions turn. Around it: x of (B, H, S, D) or (B, S, H, D), products in
float32 and the result cast back, ``turned`` with the other sign (nanochat), tables of half width, sliced or repeated. Whatever
is not exactly one of these is not matched: every slice, sign and shape is compared.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from quire.passes.fx import is_function, is_method, value

_MUL = (operator.mul, torch.mul)
_ADD = (operator.add, torch.add)
_SUB = (operator.sub, torch.sub)


class Table(NamedTuple):
    """cos or sin (B, S, width): the first ``width`` columns of ``node``, or with ``part`` of its real or imaginary part, in
    ``dtype``, times -1 if ``negated``."""

    node: fx.Node
    width: int
    dtype: torch.dtype
    part: int | None = None
    negated: bool = False


class Rotation(NamedTuple):
    """x rotated by cos and sin. ``heads_dim``: 1 for x (B, H, S, D), 2 for (B, S, H, D). See RopeForm for the flags."""

    x: fx.Node
    heads_dim: int
    cos: Table
    sin: Table
    interleaved: bool
    half_tables: bool


class _Turn(NamedTuple):
    """A rotation of all of x's last dimension, with the tables as they are broadcast; ``dtype``: of the products."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    dtype: torch.dtype
    interleaved: bool
    half_tables: bool
    negated: bool = False
    complex: bool = False


class _Piece(NamedTuple):
    """x[..., columns]."""

    x: fx.Node
    columns: range


def match_rotation(node: Any, heads_dim: int) -> Rotation | None:
    """The rotation whose result is ``node``, 4-D and with the heads in that dimension; in the dtype of its x."""
    if not _is_tensor(node):
        return None
    dtype, whole = value(node).dtype, value(node).shape
    node = _before_casts(node, dtype)
    turn, passed = _turn(node), None
    if turn is None:  # the first R dimensions of a head, joined with the others
        joined = _joined(node)
        if joined is None or joined[2]:
            return None
        turn, passed = _turn(_before_casts(joined[0], dtype)), _piece(joined[1])
        if turn is None or passed is None:
            return None
    x, size = turn.x, value(turn.x).shape[-1]
    if passed is not None:
        part = _piece(x)
        if part is None or part.x is not passed.x or part.columns != range(size) \
                or passed.columns != range(size, value(part.x).shape[-1]):
            return None
        x = part.x
    if value(x).dim() != 4 or value(x).dtype != dtype or str(whole) != str(value(x).shape):
        return None
    tables = _tables(turn, x, heads_dim, size)
    return None if tables is None else Rotation(x, heads_dim, *tables)


def _turn(node: Any) -> _Turn | None:
    return (_match_sum(node) or _match_pairs(node) or _match_complex(node)) if isinstance(node, fx.Node) else None


def _match_sum(node: fx.Node) -> _Turn | None:
    """x * cos + turned * sin."""
    if not is_function(node, _ADD) or len(node.args) != 2 or node.kwargs:
        return None
    for direct, other in (node.args, node.args[::-1]):
        for x, cos in _factors(direct, node):
            for turned, sin in _factors(other, node):
                found = _half_turn(_widened_from(turned))
                if found is not None and found[0] is _widened_from(x):
                    return _Turn(found[0], cos, sin, value(node).dtype, found[1], False, negated=found[2])
    return None


def _half_turn(node: fx.Node) -> tuple[fx.Node, bool, bool] | None:
    """(x, interleaved, negated) where ``node`` is x with each pair (first, second) made (-second, first), or the negative."""
    joined: Any = _joined(node)
    if joined is None or is_method(joined[0], "neg") == is_method(joined[1], "neg"):
        return None
    interleaved, negated = joined[2], is_method(joined[1], "neg")
    second, first = (_piece(n.args[0] if is_method(n, "neg") else n) for n in joined[:2])
    if first is None or second is None or first.x is not second.x:
        return None
    ways = _pairs(first.x, interleaved)
    return (first.x, interleaved, negated) if (first.columns, second.columns) == ways else None


def _match_pairs(node: fx.Node) -> _Turn | None:
    """(first * cos - second * sin, second * cos + first * sin), put together."""
    joined = _joined(node)
    if joined is None or not is_function(joined[0], _SUB) or not is_function(joined[1], _ADD):
        return None
    minus, plus, interleaved = joined
    if any(len(n.args) != 2 or n.kwargs for n in (minus, plus)):
        return None
    products = [_factors(n, node) for n in (*minus.args, *plus.args)]
    for a, cos in products[0]:
        for b, sin in products[1]:
            first, second = _piece(_widened_from(a)), _piece(_widened_from(b))
            if first is None or second is None or first.x is not second.x \
                    or (first.columns, second.columns) != _pairs(first.x, interleaved):
                continue
            for of_second, of_first in (products[2:], products[:1:-1]):
                if any(_piece(_widened_from(y)) == second and t is cos for y, t in of_second) \
                        and any(_piece(_widened_from(y)) == first and t is sin for y, t in of_first):
                    return _Turn(first.x, cos, sin, value(node).dtype, interleaved, True)
    return None


def _match_complex(node: fx.Node) -> _Turn | None:
    """flatten(view_as_real(view_as_complex(reshape(x, (..., R/2, 2))) * freqs))."""
    real: Any = node.args[0] if _flattens_last(node) else None
    product = real.args[0] if is_method(real, "view_as_real") else None
    for numbers, freqs in _factors(product, product):
        pairs: Any = numbers.args[0] if is_method(numbers, "view_as_complex") else None
        if is_method(pairs, "reshape", "view", "unflatten") and value(freqs).is_complex() and not value(freqs).is_conj():
            x = _widened_from(pairs.args[0])
            *lead, size = value(x).shape
            if _pairs(x, interleaved=True) and str(tuple(value(pairs).shape)) == str((*lead, size // 2, 2)):
                return _Turn(x, freqs, freqs, value(node).dtype, True, True, complex=True)
    return None


def _factors(node: Any, total: Any) -> list[tuple[fx.Node, fx.Node]]:
    """Both orders of the factors of a product that is made in the dtype of ``total``."""
    if not is_function(node, _MUL) or len(node.args) != 2 or node.kwargs or not all(map(_is_tensor, node.args)):
        return []
    return [node.args, node.args[::-1]] if value(node).dtype == value(total).dtype else []


def _pairs(x: fx.Node, interleaved: bool) -> tuple[range, range] | None:
    """The columns of the first and of the second of each pair."""
    size = value(x).shape[-1]
    if not isinstance(size, int) or size % 2:
        return None
    return (range(0, size, 2), range(1, size, 2)) if interleaved else (range(size // 2), range(size // 2, size))


def _piece(node: Any) -> _Piece | None:
    """x and the columns of ``x[..., begin:end:step]``, or of one result of chunk or split in halves."""
    if not is_function(node, (operator.getitem,)) or not isinstance(node.args[0], fx.Node):
        return None
    of, index = node.args
    if isinstance(index, int) and is_method(of, "chunk", "split"):
        x: Any = of.args[0]
        halves = _pairs(x, interleaved=False)
        if halves is None or index not in (0, 1) or _argument(of, 2, "dim", 0) not in (-1, value(x).dim() - 1):
            return None
        half = len(halves[0])
        wanted = (2,) if is_method(of, "chunk") else (half, [half] * 2, (half,) * 2)
        sizes = of.args[1] if len(of.args) > 1 else None
        return _Piece(_widened_from(x), halves[index]) if sizes in wanted else None
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis or not isinstance(index[1], slice) \
            or not _is_tensor(of):
        return None
    size, piece = value(of).shape[-1], index[1]
    if not isinstance(size, int) or any(not isinstance(n, (int, type(None))) for n in (piece.start, piece.stop, piece.step)):
        return None
    return _Piece(_widened_from(of), range(size)[piece])


def _joined(node: Any) -> tuple[fx.Node, fx.Node, bool] | None:
    """(first, second, interleaved) of ``cat((first, second), -1)`` or of ``flatten(stack((first, second), -1), -2)``."""
    interleaved = _flattens_last(node)
    if interleaved:
        node = node.args[0]
    if not is_method(node, "stack" if interleaved else "cat"):
        return None
    parts, dim = _argument(node, 0, "tensors", None), _argument(node, 1, "dim", 0)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or dim not in (-1, value(node).dim() - 1):
        return None
    return parts[0], parts[1], interleaved


def _flattens_last(node: Any) -> bool:
    """Is it the flattening of the last two dimensions?"""
    if not is_method(node, "flatten") or not _is_tensor(node.args[0]):
        return False
    dims = value(node.args[0]).dim()
    return [_argument(node, 1, "start_dim", 0) % dims, _argument(node, 2, "end_dim", -1) % dims] == [dims - 2, dims - 1]


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _before_casts(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """What was cast to ``dtype``, by one cast or by several."""
    while is_method(node, "to", "type_as", "float") and _is_tensor(node) and value(node).dtype == dtype:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _widened_from(node: fx.Node) -> fx.Node:
    """What ``node`` is a cast of, if it is one to a dtype that holds every number of the other's."""
    while is_method(node, "to", "type_as", "float") and _is_tensor(node) and _is_tensor(node.args[0]):
        new, old = value(node), value(node.args[0])
        if new.device != old.device or new.is_complex() != old.is_complex() or not (
                old.is_complex() or old.is_floating_point()) or torch.promote_types(old.dtype, new.dtype) != new.dtype:
            break
        node = node.args[0]  # type: ignore[assignment]
    return node


def _tables(turn: _Turn, x: fx.Node, heads_dim: int, size: int) -> tuple[Table, Table, bool, bool] | None:
    """(cos, sin, interleaved, half_tables), if both tables are one row a token."""
    half, found = turn.half_tables, list[Table]()
    nodes = [_widened_from(n) for n in (turn.cos, turn.sin)]
    if turn.interleaved and not half and all(_repeats_twice(n) for n in nodes):
        half, nodes = True, [_widened_from(n.args[0]) for n in nodes]  # type: ignore[arg-type]
    width = size // 2 if half else size
    for node, part in zip(nodes, (0, 1) if turn.complex else (None, None), strict=True):
        node = _first_columns(node, width)
        if not _unsqueezed(node, heads_dim):
            return None
        node = _first_columns(_widened_from(node.args[0]), width)  # type: ignore[arg-type]
        shape, tokens = tuple(value(node).shape), (value(x).shape[0], value(x).shape[3 - heads_dim])
        if len(shape) != 3 or str(shape[:2]) != str(tokens) or not isinstance(shape[2], int) or shape[2] < width:
            return None
        # The definition makes the products in the dtype that x and the tables promote to: it must be that of the model.
        dtype = value(node).dtype.to_real() if turn.complex else value(node).dtype
        if not dtype.is_floating_point:
            return None
        if torch.promote_types(value(x).dtype, dtype) != turn.dtype:
            dtype = turn.dtype
        found.append(Table(node, width, dtype, part, turn.negated and len(found) == 1))
    return found[0], found[1], turn.interleaved, half


def _repeats_twice(node: fx.Node) -> bool:
    return is_method(node, "repeat_interleave") and _argument(node, 1, "repeats", None) == 2 \
        and _argument(node, 2, "dim", None) in (-1, value(node).dim() - 1)


def _first_columns(node: fx.Node, width: int) -> fx.Node:
    """y of ``y[..., :width]``, else the node."""
    piece = _piece(node) if is_function(node, (operator.getitem,)) else None
    return piece.x if piece is not None and piece.columns == range(width) else node


def _unsqueezed(node: fx.Node, dim: int) -> bool:
    """Is it a table with a new dimension for the heads at ``dim``, by unsqueeze or by indexing with None?"""
    if is_method(node, "unsqueeze"):
        return _argument(node, 1, "dim", None) in (dim, dim - 4) and value(node).dim() == 4
    if not is_function(node, (operator.getitem,)) or not isinstance(node.args[1], tuple) or value(node).dim() != 4:
        return False
    index = list(node.args[1])
    return index[:dim] == [slice(None)] * dim and index[dim : dim + 1] == [None] \
        and all(i in (slice(None), Ellipsis) for i in index[dim + 1 :])


__all__ = ["Rotation", "Table", "match_rotation"]
