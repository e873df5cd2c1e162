"""Attention that is written out, ``softmax(q @ k.transpose(-1, -2) * scale + mask) @ v``, as F.scaled_dot_product_attention.

GPT-J and other early models of transformers write it so, and users' modules do. ``find`` reads the chain from the product of
q and k to that with v: numbers that scale the scores, one tanh (a softcap), masks (``+ mask``, ``where``, ``masked_fill``), a
bound as low as what they hide, views that add or remove a batch of one, softmax over keys, dropout, and casts to dtypes that
hold q's numbers, behind softmax v's: others round. Queries may be in groups, (B, key heads, queries of each, S, D). Each step
must have no other reader and change nothing in place.

``insert`` puts a call of F.scaled_dot_product_attention with the same result beside the chain; ``raise_sdpa`` proves its mask,
and only then puts it in the chain's place. What is not such a chain stays as it is, and is refused later: it mixes tokens.
Products by torch.einsum are matmul by now, softmax is one node, and what could be is out of place: ``einsum_products.py``,
``written_softmax.py``, ``in_place_scores.py``.

The weight of a key that a mask hides is 0 either way: its score is at -inf, or half the least number of the scores' dtype or
less is added or takes its place, and the query sees a key, itself under every mask that is proven (``verify/mask_proof.py``).
A scale that comes after a mask leaves that so unless the dtype is float16, whose least number is not far from scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from quire.passes.fake_values import compute_value
from quire.passes.fx import (
    argument,
    constant,
    erase_dead,
    is_one,
    is_tensor,
    named_arguments,
    only_user,
    same_shape,
    symbolic,
    torch_name,
    value,
    written_between,
    written_by,
)

_CASTS = frozenset(("to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous"))
_WEIGHTS_STAY = _CASTS | {"nan_to_num"}  # none is NaN, where each query sees a key
_VIEWS = frozenset(("view", "reshape", "unsqueeze", "squeeze"))
_PRODUCTS = frozenset(("matmul", "bmm"))
_CONSTANTS = {"tensor": 0, "as_tensor": 0, "scalar_tensor": 0, "full": 1, "new_full": 2, "full_like": 1, "new_tensor": 1}
_FILLED = frozenset(("where", "masked_fill", "max", "maximum"))  # by a number that is a tensor
SOFTCAP = "quire_softcap"  # in the meta of the call, which has no such argument
_MOST = 1e6  # times or parts that the scores are scaled by, up to any step and from the first mask to any step
#: The scores' dtype there, and a tensor that is added; or a condition, and what is added where it holds and where it does not.
Mask = tuple[torch.dtype, fx.Node] | tuple[torch.dtype, fx.Node, float, float]


@dataclass
class Written:
    """A chain from the product of ``q`` and ``keys``, (..., S, D) and (..., D, S), to that with v: ``first`` to ``last``.

    Attributes:
        scale: the product of the constants that scale the scores, up to a tanh ``inner``.  behind: of those that come after a
            mask.  factors: other numbers that do, and whether they divide.
        masks: in the order of their use.
    """

    q: fx.Node
    keys: fx.Node
    first: fx.Node
    last: fx.Node
    scale: float = 1.0
    inner: float | None = None
    behind: float = 1.0
    factors: list[tuple[fx.Node, bool]] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    dropout: float = 0.0


def find(graph: fx.Graph) -> list[Written]:
    """The written-out attention in ``graph``."""
    found = [_of(n) for n in graph.nodes if torch_name(n) == "softmax"]
    return [w for w in found if isinstance(w, Written) and not written_between(w.first, w.last)]


def stopped_at(graph: fx.Graph) -> fx.Node | None:
    """The step of the first chain, from a product of all tokens with all, that ``find`` does not follow, or what is changed in
    place beside it; None if there is no such chain."""
    products = (n for n in graph.nodes if torch_name(n) in (*_PRODUCTS, "baddbmm", "einsum") and of_pairs(n))
    at = next((n for n in products if not any(map(of_pairs, n.all_input_nodes))), None)
    while at is not None and _scores(at) is not None and (reader := only_user(at)) is not None:
        at = reader
        if torch_name(at) == "softmax":
            found = _of(at)
            return written_between(found.first, found.last) if isinstance(found, Written) else found
    return at


def of_pairs(node: fx.Node) -> bool:
    """Whether two dimensions of a tensor count the same tokens."""
    sizes = [str(n) for n in value(node).shape if symbolic(n)] if is_tensor(node) else []
    return len(set(sizes)) < len(sizes)


def insert(written: Written) -> fx.Node:
    """F.scaled_dot_product_attention with the same result, for whoever reads the chain's."""
    graph, last = written.last.graph, written.last
    v: Any = last.args[1]

    def call(method: str, x: Any, *args: Any) -> fx.Node:
        return compute_value(graph.call_method(method, (x, *args)))

    def cast(x: Any, dtype: torch.dtype) -> Any:
        return x if value(x).dtype == dtype else call("to", x, dtype)

    with graph.inserting_before(last):
        k = _transposed(written.keys)
        q, k = (cast(x, value(v).dtype) for x in (written.q, call("transpose", written.keys, -1, -2) if k is None else k))
        for factor, divides in written.factors:
            q = call("div" if divides else "mul", q, factor)
        groups = value(q).shape[1:3] if value(q).dim() == 5 else ()
        if groups:
            k, v = (call("expand", x, -1, *groups, -1, -1) for x in (k, v))
            q, k, v = (call("flatten", x, 1, 2) for x in (q, k, v))
        q, k, v = (x if value(x).dim() == 4 else call("unsqueeze", x, 0) for x in (q, k, v))
        mask = None
        for dtype, tensor, *chosen in written.masks:
            if chosen:
                tensor = compute_value(graph.call_function(torch.where, (tensor, *chosen)))
            tensor = cast(call("squeeze", tensor, 0) if value(tensor).dim() == 5 else tensor, dtype)
            if mask is not None:  # what an earlier mask hides stays as low as it was, so that the proof sees how low that is,
                # unless this one may raise it: then the proof sees a bias
                shown, raises = (compute_value(graph.call_function(test, (x, 0))) for test, x in ((torch.eq, mask),
                                                                                                  (torch.gt, tensor)))
                either = compute_value(graph.call_function(torch.logical_or, (shown, raises)))
                tensor = compute_value(graph.call_function(torch.where, (either, tensor, mask)))
            mask = tensor
        new = result = graph.call_function(F.scaled_dot_product_attention, (q, k, v), {
            "attn_mask": mask, "dropout_p": written.dropout, "scale": written.scale * (written.inner or 1.0)})
        new.meta = {**last.meta, SOFTCAP: None if written.inner is None else written.scale}
        if value(last).dim() == 3:
            new.meta["example_value"] = value(last)[None]
            result = call("squeeze", new, 0)
        elif groups:
            result = call("unflatten", compute_value(new), 1, tuple(groups))
    last.replace_all_uses_with(result)
    return new


def settle(written: Written, new: fx.Node, raised: bool) -> None:
    """Erase the chain if ``new`` was ``raised``, else ``new``, and put the chain back."""
    graph, last = written.last.graph, written.last
    if raised:
        erase_dead(graph, [last])
        return
    result = new if value(last).dim() == 4 else next(iter(new.users))
    result.replace_all_uses_with(last)
    erase_dead(graph, [result])


def _of(softmax: fx.Node) -> Written | fx.Node:
    """The chain around a softmax; or the step of it, from there on, that makes it none."""
    scores, dim = argument(softmax, 0, "input"), argument(softmax, 1, "dim")
    found = _scores(scores) if is_tensor(scores) and dim in (-1, value(scores).dim() - 1) else None
    if found is None or not _holds(softmax, found.q):
        return softmax
    node, dtypes = softmax, list[torch.dtype]()
    while not written_by(node):
        reader = only_user(node)
        if reader is None or not is_tensor(reader) or argument(reader, 0, "input") is not node:
            return node if reader is None else reader
        name = torch_name(reader)
        if name in _PRODUCTS:
            found.last, v = reader, argument(reader, 1, "other")
            plain = len(reader.args) == 2 and not reader.kwargs and _rows_of(reader, *reader.args)
            plain = plain and _dtypes_fit(found, v) and _masks_fit(found)
            return found if plain and all(_as_precise(d, value(v).dtype) for d in dtypes) else reader
        dtypes.append(value(reader).dtype)
        if name == "dropout":
            given = named_arguments(reader, ("input", "p", "training", "inplace"))
            found.dropout += _number(given.get("p", 0.5)) if given.get("training", True) is not False else 0.0
        elif name not in _WEIGHTS_STAY and not (name in _VIEWS and _same_scores(node, reader)):
            return reader
        node = reader
    return node


def _scores(node: Any) -> Written | None:
    """The chain up to ``node``, if these are such scores."""
    if not is_tensor(node) or value(node).dim() not in (3, 4, 5) or only_user(node) is None or written_by(node) \
            or not value(node).is_floating_point():
        return None
    name, args = torch_name(node), node.args
    found = _product(node, name) if name in _PRODUCTS or name == "baddbmm" else _changed(node, name, args)
    return found if found is not None and _holds(node, found.q) else None


def _changed(node: fx.Node, name: str, args: tuple[Any, ...]) -> Written | None:
    """The chain up to ``node``, which changes scores by elements."""
    found: Written | None = None
    if name in _CASTS or (name in _VIEWS and _same_scores(args[0], node)):
        found = _scores(args[0])
    elif node.kwargs:
        return None
    elif name == "tanh":
        found = _then(node, args[0])
        if found is None or found.masks or found.inner is not None:
            return None
        found.inner, found.scale = found.scale, 1.0
    elif name == "add":
        for scores, mask in _orders(args):
            if is_tensor(mask) and value(mask).is_floating_point() and found is None and (found := _then(node, scores)):
                found.masks.append((value(node).dtype, mask))
    elif name in ("mul", "multiply", "div", "divide", "truediv", "true_divide"):
        divides = not name.startswith("mul")
        for scores, factor in [*_orders(args)][: 2 - divides]:
            if found is None and (found := _then(node, scores)):
                return _scaled(found, factor, divides)
    elif name == "where" and len(args) == 3:
        condition, yes, no = (args[1], args[0], args[2]) if node.op == "call_method" else args
        found = _chosen(node, condition, yes, no, False) or _chosen(node, condition, no, yes, True)
    elif name in ("max", "maximum") and len(args) == 2:
        for scores, low in _orders(args):
            if found is None and _hides(low, node):
                found = _then(node, scores)
    elif name == "masked_fill" and len(args) == 3:
        found = _chosen(node, args[1], args[0], args[2], True)
    return found


def _scaled(found: Written, factor: Any, divides: bool) -> Written | None:
    number = _number(factor)
    if number > 0 and not any(mask[0] == torch.float16 for mask in found.masks):
        number = 1 / number if divides else number
        found.scale *= number
        found.behind *= number if found.masks else 1.0
        return found if all(1 / _MOST <= x <= _MOST for x in (found.scale, found.behind)) else None
    if math.isnan(number) and not found.masks and found.inner is None and (not is_tensor(factor) or value(factor).dim() == 0):
        found.factors.append((factor, divides))
        return found
    return None


def _chosen(node: fx.Node, condition: Any, scores: Any, low: Any, holds: bool) -> Written | None:
    """The chain up to ``node``, which puts the number ``low`` in the place of scores where the condition ``holds`` or not. It
    must hide them whatever they are: one that is added to them is a bias, one that replaces them is not."""
    number = _filling(low)
    if not is_tensor(condition) or not _hides(low, node):
        return None
    if (found := _then(node, scores)) is not None:
        found.masks.append((value(node).dtype, condition, *((number, 0.0) if holds else (0.0, number))))
    return found


def _hides(low: Any, scores: fx.Node) -> bool:
    """Whether it is a number so low that it hides a key, and no score of a key that is seen is lower."""
    return _filling(low) <= torch.finfo(value(scores).dtype).min / 2


def _filling(low: Any) -> float:
    """``_number`` of what takes the place of scores, which may be a tensor made of it."""
    if isinstance(low, fx.Node) and (place := _CONSTANTS.get(torch_name(low))) is not None and len(low.args) > place:
        changed = not value(low).is_floating_point() or any(torch_name(u) not in _FILLED for u in low.users)
        return math.nan if changed else _number(low.args[place])
    return _number(low)


def filled_with(node: fx.Node) -> float | None:
    """The number below 0 that a step puts in the place of scores; None if it does nothing of that kind."""
    name, rest = torch_name(node), node.args[1:]
    return min((x for x in map(_filling, rest) if x < 0), default=None) if name in ("where", "masked_fill") else None


def _product(node: fx.Node, name: str) -> Written | None:
    """The first of a chain."""
    names = ("input", "batch1", "batch2") if name == "baddbmm" else ("batch1", "batch2")
    given = {"beta": 1, "alpha": 1, **named_arguments(node, names)}
    bias, q, keys = (given.pop(x, None) for x in ("input", "batch1", "batch2"))
    beta, alpha = _number(given.pop("beta")), _number(given.pop("alpha"))
    if given or not _rows_of(node, q, keys) or beta not in (0, 1) or not 1 / _MOST <= alpha <= _MOST:
        return None
    found = Written(q, keys, node, node, alpha)
    if name == "baddbmm" and beta:
        if not is_tensor(bias) or not value(bias).is_floating_point():
            return None
        found.masks.append((value(node).dtype, bias))
    return found


def _rows_of(product: fx.Node, left: Any, right: Any) -> bool:
    """Whether a product has the rows of ``left``, and no others: what is on the right may have one head for all, not more."""
    if not is_tensor(left) or not is_tensor(right) or left is right:
        return False
    x, y = value(product).shape, value(left).shape
    in_groups = len(x) == 5 and (any(map(symbolic, x[1:3])) or not same_shape(x[:1], value(right).shape[:1]))
    return len(x) == len(y) == value(right).dim() and same_shape(x[:-1], y[:-1]) and not in_groups


def _transposed(x: fx.Node) -> fx.Node | None:
    """What ``x`` is a transpose of, in its last two dimensions."""
    name, of, rank = torch_name(x), x.args[0] if x.args else None, value(x).dim()
    dims = {int(d) % rank for d in x.args[1:] if isinstance(d, int)}
    swaps = name in ("transpose", "swapaxes") and dims == {rank - 2, rank - 1} and len(x.args) == 3
    return of if isinstance(of, fx.Node) and (swaps or (name == "getattr" and x.args[1] == "mT")) else None


def _dtypes_fit(found: Written, v: Any) -> bool:
    """Whether q and k have the dtype of v, or are the float32 of a half-precision model, whose cache has v's dtype."""
    of_q, of_k, of_v = (value(x).dtype for x in (found.q, found.keys, v))
    return of_q == of_k and (of_q == of_v or (of_q == torch.float32 and of_v in (torch.float16, torch.bfloat16)))


def _masks_fit(found: Written) -> bool:
    """Whether masks of queries in groups are the same for all heads."""
    return value(found.q).dim() < 5 or all(all(map(is_one, value(mask[1]).shape[:-2])) for mask in found.masks)


def _then(node: fx.Node, scores: Any) -> Written | None:
    """``_scores`` of what ``node`` changes by elements."""
    return _scores(scores) if is_tensor(scores) and same_shape(value(scores).shape, value(node).shape) else None


def _as_precise(dtype: torch.dtype, as_dtype: torch.dtype) -> bool:
    """Whether every number of ``as_dtype`` is one of ``dtype``, both of floats."""
    return dtype == as_dtype or dtype == torch.float64 or (dtype == torch.float32 and as_dtype.itemsize < 4)


def _holds(scores: fx.Node, q: fx.Node) -> bool:
    return _as_precise(value(scores).dtype, value(q).dtype)


def _same_scores(before: Any, after: fx.Node) -> bool:
    """Whether a view gives all dimensions as they are, but for a batch of one."""
    x, y = sorted((value(before).shape, value(after).shape), key=len)
    return 3 <= len(x) <= len(y) <= 4 and same_shape(x, y[len(y) - len(x) :]) and (len(x) == len(y) or is_one(y[0]))


def _orders(args: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    if len(args) == 2:
        yield from (args, args[::-1])


def _number(arg: Any) -> float:
    """A number that is the same in every call; NaN if it is none."""
    try:
        number = constant(arg)
    except ValueError:
        return math.nan
    return float(number) if isinstance(number, (int, float)) and not isinstance(number, bool) else math.nan
