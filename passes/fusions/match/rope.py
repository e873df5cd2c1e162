"""Rotary embedding in a graph: the known ways to write it, and the proof that one of them precedes attention.

The dimensions of a head turn in pairs, by the angle of the token's position. Known are

* a sum: ``x * cos + turned * sin``, with ``turned`` the pairs (-second, first) joined again, or its negative (nanochat);
* pairs: ``first * cos - second * sin`` and ``second * cos + first * sin``, joined again;
* complex numbers: ``view_as_real(view_as_complex(pairs) * freqs)``, whose tables are the real and the imaginary part (Llama 4),

where a pair is made of halves (``chunk``, ``split``, slices; joined by ``cat``) or of neighbours (slices of step 2; joined by
``stack`` and ``flatten``: Cohere, GLM, Ernie), and all or the first R dimensions turn. x is (B, H, S, D) or (B, S, H, D);
products may be made in float32 and the result cast back; tables may have half the width (gpt-oss), or be sliced or repeated.
Anything else is not matched: every slice, sign and shape is compared.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from quire.passes.fx import ADD, MUL, SUB, argument, is_function, is_method, is_tensor, operands, same_shape, value


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
    """The rotation whose result is ``node``, 4-D with the heads in that dimension, in the dtype of its x."""
    if not is_tensor(node):
        return None
    result = value(node)
    node = _before_casts(node, result.dtype)
    turn, joined = _turn(node), _joined(node)
    if turn is not None:
        x, size = turn.x, value(turn.x).shape[-1]
    elif joined is not None and not joined[2]:  # the first R dimensions of a head, joined with the others
        turn, rest = _turn(_before_casts(joined[0], result.dtype)), _piece(joined[1])
        part = _piece(turn.x) if turn is not None else None
        if turn is None or part is None or rest is None or rest.x is not part.x:
            return None
        x, size = part.x, value(turn.x).shape[-1]
        if part.columns != range(size) or rest.columns != range(size, value(x).shape[-1]):
            return None
    else:
        return None
    if value(x).dim() != 4 or value(x).dtype != result.dtype or not same_shape(result.shape, value(x).shape):
        return None
    tables = _tables(turn, x, heads_dim, size)
    return None if tables is None else Rotation(x, heads_dim, *tables)


def _turn(node: Any) -> _Turn | None:
    return (_match_sum(node) or _match_pairs(node) or _match_complex(node)) if isinstance(node, fx.Node) else None


def _match_sum(node: fx.Node) -> _Turn | None:
    """x * cos + turned * sin."""
    for direct, other in operands(node, ADD):
        for x, cos in _factors(direct, node):
            for turned, sin in _factors(other, node):
                found = _half_turn(_before_widening(turned))
                if found is not None and found[0] is _before_widening(x):
                    return _Turn(found[0], cos, sin, value(node).dtype, found[1], False, negated=found[2])
    return None


def _half_turn(node: fx.Node) -> tuple[fx.Node, bool, bool] | None:
    """(x, interleaved, negated) where ``node`` is x with each pair (first, second) made (-second, first), or the negative."""
    joined: Any = _joined(node)
    if joined is None or is_method(joined[0], "neg") == is_method(joined[1], "neg"):
        return None
    interleaved, negated = joined[2], is_method(joined[1], "neg")
    second, first = (_piece(n.args[0] if is_method(n, "neg") else n) for n in joined[:2])
    return (first.x, interleaved, negated) if _are_pairs(first, second, interleaved) else None  # type: ignore[union-attr]


def _match_pairs(node: fx.Node) -> _Turn | None:
    """(first * cos - second * sin, second * cos + first * sin), joined."""
    joined = _joined(node)
    if joined is None:
        return None
    minus, plus, interleaved = joined
    for direct, turned in operands(minus, SUB)[:1]:  # its order matters
        for a, cos in _factors(direct, node):
            for b, sin in _factors(turned, node):
                first, second = _piece(_before_widening(a)), _piece(_before_widening(b))
                if not _are_pairs(first, second, interleaved):
                    continue
                for of_second, of_first in operands(plus, ADD):
                    if any(_piece(_before_widening(y)) == second and t is cos for y, t in _factors(of_second, node)) \
                            and any(_piece(_before_widening(y)) == first and t is sin for y, t in _factors(of_first, node)):
                        return _Turn(first.x, cos, sin, value(node).dtype, interleaved, True)  # type: ignore[union-attr]
    return None


def _match_complex(node: fx.Node) -> _Turn | None:
    """flatten(view_as_real(view_as_complex(reshape(x, (..., R/2, 2))) * freqs))."""
    real: Any = node.args[0] if _flattens_last(node) else None
    product = real.args[0] if is_method(real, "view_as_real") else None
    for numbers, freqs in _factors(product, product):
        pairs: Any = numbers.args[0] if is_method(numbers, "view_as_complex") else None
        if is_method(pairs, "reshape", "view", "unflatten") and value(freqs).is_complex() and not value(freqs).is_conj():
            x = _before_widening(pairs.args[0])
            *lead, size = value(x).shape
            if _pairs(x, interleaved=True) and same_shape(value(pairs).shape, (*lead, size // 2, 2)):
                return _Turn(x, freqs, freqs, value(node).dtype, True, True, complex=True)
    return None


def _factors(node: Any, total: Any) -> list[tuple[Any, Any]]:
    """Both orders of the factors of a product of two tensors that is made in the dtype of ``total``."""
    found = operands(node, MUL)
    return found if found and all(map(is_tensor, node.args)) and value(node).dtype == value(total).dtype else []


def _pairs(x: fx.Node, interleaved: bool) -> tuple[range, range] | None:
    """The columns of the first and of the second of each pair."""
    size = value(x).shape[-1]
    if not isinstance(size, int) or size % 2:
        return None
    return (range(0, size, 2), range(1, size, 2)) if interleaved else (range(size // 2), range(size // 2, size))


def _are_pairs(first: _Piece | None, second: _Piece | None, interleaved: bool) -> bool:
    return first is not None and second is not None and first.x is second.x \
        and (first.columns, second.columns) == _pairs(first.x, interleaved)


def _piece(node: Any) -> _Piece | None:
    """x and the columns of ``x[..., begin:end:step]``, or of one result of chunk or split in halves."""
    if not is_function(node, (operator.getitem,)):
        return None
    of, index = node.args
    if isinstance(index, int) and is_method(of, "chunk", "split"):
        x = of.args[0]
        halves = _pairs(x, interleaved=False)
        if halves is None or index not in (0, 1) or argument(of, 2, "dim", 0) not in (-1, value(x).dim() - 1):
            return None
        half, sizes = len(halves[0]), of.args[1] if len(of.args) > 1 else None
        in_halves = sizes in ((2,) if is_method(of, "chunk") else (half, [half] * 2, (half,) * 2))
        return _Piece(_before_widening(x), halves[index]) if in_halves else None
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis or not isinstance(index[1], slice) \
            or not is_tensor(of):
        return None
    size, piece = value(of).shape[-1], index[1]
    if not isinstance(size, int) or any(not isinstance(n, (int, type(None))) for n in (piece.start, piece.stop, piece.step)):
        return None
    return _Piece(_before_widening(of), range(size)[piece])


def _joined(node: Any) -> tuple[fx.Node, fx.Node, bool] | None:
    """(first, second, interleaved) of ``cat((first, second), -1)`` or of ``flatten(stack((first, second), -1), -2)``."""
    interleaved = _flattens_last(node)
    if interleaved:
        node = node.args[0]
    if not is_method(node, "stack" if interleaved else "cat"):
        return None
    parts, dim = argument(node, 0, "tensors"), argument(node, 1, "dim", 0)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or dim not in (-1, value(node).dim() - 1):
        return None
    return parts[0], parts[1], interleaved


def _flattens_last(node: Any) -> bool:
    if not is_method(node, "flatten") or not is_tensor(node.args[0]):
        return False
    dims = value(node.args[0]).dim()
    return [argument(node, 1, "start_dim", 0) % dims, argument(node, 2, "end_dim", -1) % dims] == [dims - 2, dims - 1]


def _before_casts(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The value before one or more casts to ``dtype``."""
    while is_method(node, "to", "type_as", "float") and is_tensor(node) and value(node).dtype == dtype:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _before_widening(node: fx.Node) -> fx.Node:
    """The value before casts that lose nothing, that is to dtypes that hold every number of the narrower one."""
    while is_method(node, "to", "type_as", "float") and is_tensor(node) and is_tensor(node.args[0]):
        new, old = value(node), value(node.args[0])
        if new.device != old.device or new.is_complex() != old.is_complex() or not (
                old.is_complex() or old.is_floating_point()) or torch.promote_types(old.dtype, new.dtype) != new.dtype:
            break
        node = node.args[0]  # type: ignore[assignment]
    return node


def _tables(turn: _Turn, x: fx.Node, heads_dim: int, size: int) -> tuple[Table, Table, bool, bool] | None:
    """(cos, sin, interleaved, half_tables), if both tables have one row per token."""
    half, found = turn.half_tables, list[Table]()
    nodes: list[Any] = [_before_widening(n) for n in (turn.cos, turn.sin)]
    if turn.interleaved and not half and all(map(_repeats_twice, nodes)):
        half, nodes = True, [_before_widening(n.args[0]) for n in nodes]
    width = size // 2 if half else size
    for node, part in zip(nodes, (0, 1) if turn.complex else (None, None), strict=True):
        node = _first_columns(node, width)
        if not _unsqueezed(node, heads_dim):
            return None
        node = _first_columns(_before_widening(node.args[0]), width)  # type: ignore[arg-type]
        shape = value(node).shape
        if len(shape) != 3 or not same_shape(shape[:2], (value(x).shape[0], value(x).shape[3 - heads_dim])) \
                or not isinstance(shape[2], int) or shape[2] < width:
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
    return is_method(node, "repeat_interleave") and argument(node, 1, "repeats") == 2 \
        and argument(node, 2, "dim") in (-1, value(node).dim() - 1)


def _first_columns(node: fx.Node, width: int) -> fx.Node:
    """y of ``y[..., :width]``, else the node."""
    piece = _piece(node)
    return piece.x if piece is not None and piece.columns == range(width) else node


def _unsqueezed(node: fx.Node, dim: int) -> bool:
    """Whether this is a table with a new dimension for the heads at ``dim``, by unsqueeze or by indexing with None."""
    if is_method(node, "unsqueeze"):
        return argument(node, 1, "dim") in (dim, dim - 4) and value(node).dim() == 4
    if not is_function(node, (operator.getitem,)) or not isinstance(node.args[1], tuple) or value(node).dim() != 4:
        return False
    index = list(node.args[1])
    return index[:dim] == [slice(None)] * dim and index[dim : dim + 1] == [None] \
        and all(i in (slice(None), Ellipsis) for i in index[dim + 1 :])
