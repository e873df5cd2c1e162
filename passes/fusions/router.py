"""A router of experts, from its logits to the experts and their weights, as one kernel.

Before, for deepseek_v3 (the groups are one of several parts that may be missing)::

    scores = sigmoid(logits);  choice = add(scores, bias)
    best = sum(getitem(topk(view(choice, -1, G, E / G), 2), 0), -1);  mask = zeros_like(best)
    scatter_(mask, 1, getitem(topk(best, 4), 1), 1)
    choice1 = masked_fill(choice, ~bool(reshape(expand(unsqueeze(mask, -1), -1, G, E / G), -1, E)), -inf)
    ids = getitem(topk(choice1, 8), 1);  w = gather(scores, 1, ids);  w /= add(sum(w, -1, keepdim=True), 1e-20)

After::

    routed = quire.route_rows(logits, bias, 8, ...)              # attn_ops/ops/routing.py
    w = getitem(routed, 0);  ids = getitem(routed, 1)

Also softmax(logits) and its top-k (qwen3_moe, mixtral, deepseek_v2 with groups by their maximum), and the top-k of the logits
with a softmax over these (gpt_oss). With softmax and groups, experts of the other groups have the score 0 in the model's own
form and are never chosen here: that differs only where chosen scores are 0 too, and there all of these weights are 0.

Only in the graph for few tokens. Left to the other passes: scores that are not float32 (of the softmax over all experts and of
the sigmoid), a softmax with a bias, weights that are chosen in another way, what is larger than the kernel's limits.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from quire.attn_ops.ops.routing import KERNEL_DTYPES, MAX_GROUPS, MAX_K, MAX_ROW, route_rows
from quire.passes.fake_values import made_like
from quire.passes.fusions import routing
from quire.passes.fusions.base import Fusion
from quire.passes.fx import ADD, argument, erase_dead, is_method, only_user, operands, replace_node, value, written_between

DIV = (operator.truediv, torch.div, torch.true_divide, operator.itruediv)


class _Groups(NamedTuple):
    """Of ``route_rows``: groups, top_groups, group_best; the scatter_ that makes the mask."""

    number: int = 1
    top: int = 1
    best: int = 1
    scatter: fx.Node | None = None


class _Router(NamedTuple):
    """The node of the weights before any division, and what gives them."""

    weights: fx.Node
    logits: fx.Node
    bias: fx.Node | None
    sigmoid: bool
    chosen_first: bool  # the softmax is over the k chosen ones
    groups: _Groups


def fuse_router(fusion: Fusion) -> int:
    count = 0
    for node in list(fusion.graph.nodes):
        if (k := routing.results(node)) is None or node not in fusion.graph.nodes:
            continue
        found = _softmax(node) or _sigmoid(node) or _of_the_chosen(node)
        if found is not None and _fits(found, k) and set(node.users) <= {_item(node, 0), _item(node, 1)} \
                and not _changed(found):
            _rewrite(fusion.graph, node, found, k)
            count += 1
    return count


def _changed(found: _Router) -> bool:
    """Whether anything is changed in place between logits and weights, but by the mask's scatter_ and the weights' division."""
    divided = _division(found.weights)
    return written_between(found.logits, divided[0] if divided else found.weights, but=found.groups.scatter) is not None


def _fits(found: _Router, k: int) -> bool:
    experts, groups = value(found.logits).shape[-1], found.groups
    size = experts // groups.number
    return (value(found.logits).dtype in KERNEL_DTYPES and experts <= MAX_ROW and k <= MAX_K and groups.number <= MAX_GROUPS
            and k <= groups.top * size and groups.best <= size and value(found.logits).dim() == 2)


def _rewrite(graph: fx.Graph, topk: fx.Node, found: _Router, k: int) -> None:
    divided = None if found.chosen_first else _division(found.weights)
    last, eps = divided or (found.weights, 0.0)
    ids = _item(topk, 1)
    users = list(ids.users) if ids is not None else []
    with graph.inserting_before(topk):
        new = made_like(graph.call_function(route_rows, (
            found.logits, found.bias, k, found.sigmoid, divided is not None or found.chosen_first, eps, found.groups.number,
            found.groups.top, found.groups.best)), topk)
        weights, new_ids = (made_like(graph.call_function(operator.getitem, (new, i)), topk) for i in range(2))
        if value(last).dtype != torch.float32:
            weights = made_like(graph.call_method("to", (weights, value(last).dtype)), topk)
    for user in users:
        user.replace_input_with(ids, new_ids)  # type: ignore[arg-type]
    replace_node(last, weights)
    dead = [n for n in (ids, topk, found.groups.scatter) if n is not None]
    erase_dead(graph, dead, private=[n for n in (found.groups.scatter,) if n is not None])


def _item(node: fx.Node, index: int) -> fx.Node | None:
    """``node[index]``, if that is one node."""
    found = [n for n in node.users if n.target is operator.getitem and n.args[1] == index]
    return found[0] if len(found) == 1 else None


def _is_item(node: Any, index: int, *names: str) -> fx.Node | None:
    """The call of one of ``names`` whose result ``index`` this is."""
    if getattr(node, "target", None) is operator.getitem and node.args[1] == index and is_method(node.args[0], *names):
        return node.args[0]
    return None


def _last_dim(node: fx.Node, dim: Any) -> bool:
    return isinstance(dim, int) and dim in (-1, value(node).dim() - 1)


def _before_float(node: Any) -> Any:
    """x of ``x.float()``: the kernel widens logits itself."""
    return node.args[0] if is_method(node, "float") and len(node.args) == 1 else node


def _logits_of_softmax(node: Any) -> fx.Node | None:
    """The logits of a softmax over the last dimension that is made in float32."""
    if not is_method(node, "softmax") or value(node).dtype != torch.float32:
        return None
    x = argument(node, 0, "input")
    dtype = argument(node, 3 if node.op == "call_function" and len(node.args) > 3 else 2, "dtype")
    if not _last_dim(node, argument(node, 1, "dim")) or dtype not in (None, torch.float32):
        return None
    return _before_float(x)


def _softmax(topk: fx.Node) -> _Router | None:
    """The top-k of a softmax: its values are the weights."""
    masked = _masked(argument(topk, 0, "input"), fill=(0.0,))
    scores, groups = masked or (argument(topk, 0, "input"), _Groups())
    logits, weights = _logits_of_softmax(scores), _item(topk, 0)
    if logits is None or weights is None or (groups.number > 1 and groups.best != 1):
        return None
    return _Router(weights, logits, None, False, False, groups)


def _sigmoid(topk: fx.Node) -> _Router | None:
    """The top-k of a sigmoid, perhaps with a bias: the weights are gathered from the sigmoid by the ids."""
    masked = _masked(argument(topk, 0, "input"), fill=(float("-inf"),))
    choice, groups = masked or (argument(topk, 0, "input"), _Groups())
    scores, bias = choice, None
    for a, b in operands(choice, ADD):
        if is_method(a, "sigmoid") and isinstance(b, fx.Node):
            scores, bias = a, b
            break
    ids = _item(topk, 1)
    if not is_method(scores, "sigmoid") or ids is None or value(scores).dtype != torch.float32 or _item(topk, 0) is not None:
        return None
    if bias is not None and (tuple(value(bias).shape) != (value(scores).shape[-1],) or value(choice).dtype != torch.float32):
        return None
    gathers = [n for n in ids.users if is_method(n, "gather") and argument(n, 0, "input") is scores
               and argument(n, 2, "index") is ids and _last_dim(scores, argument(n, 1, "dim"))]
    if len(gathers) != 1:
        return None
    return _Router(gathers[0], _before_float(scores.args[0]), bias, True, False, groups)


def _of_the_chosen(topk: fx.Node) -> _Router | None:
    """The top-k of the logits, and a softmax over these."""
    values = _item(topk, 0)
    softmax = only_user(values) if values is not None else None
    if values is None or softmax is None or not is_method(softmax, "softmax") or argument(softmax, 0, "input") is not values \
            or not _last_dim(values, argument(softmax, 1, "dim")):
        return None
    return _Router(softmax, argument(topk, 0, "input"), None, False, True, _Groups())


def _division(weights: fx.Node) -> tuple[fx.Node, float] | None:
    """(quotient, eps), if all that becomes of the weights is a division by their sum and eps."""
    total = next((n for n in weights.users if is_method(n, "sum")), None)
    if total is None or argument(total, 0, "input") is not weights or argument(total, 2, "keepdim") is not True:
        return None
    dim, below, eps = argument(total, 1, "dim"), total, 0.0
    if not _last_dim(weights, dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim) \
            or "dtype" in total.kwargs or len(total.args) > 3:
        return None
    added = only_user(total)
    for a, b in operands(added, ADD):
        if a is total and isinstance(b, (int, float)):
            below, eps = added, float(b)  # type: ignore[assignment]
    quotient = only_user(below)
    if quotient is None or quotient.target not in DIV or tuple(quotient.args) != (weights, below) or quotient.kwargs \
            or set(weights.users) != {total, quotient}:
        return None
    return quotient, eps


def _masked(node: Any, fill: tuple[float, ...]) -> tuple[fx.Node, _Groups] | None:
    """(choice, groups), where the choices of experts outside the best groups were replaced by ``fill``."""
    if not is_method(node, "masked_fill") or len(node.args) != 3 or node.args[2] not in fill:
        return None
    choice, inverted = node.args[:2]
    flag: Any = inverted.args[0] if getattr(inverted, "target", None) is operator.invert else None
    flat: Any = flag.args[0] if is_method(flag, "bool") else None
    wide: Any = flat.args[0] if is_method(flat, "reshape", "view") else None
    column: Any = wide.args[0] if is_method(wide, "expand") else None
    mask: Any = column.args[0] if is_method(column, "unsqueeze") and column.args[1:] == (-1,) else None
    if not is_method(mask, "zeros_like") or len(value(wide).shape) != 3 or value(flat).dim() != 2:
        return None
    best, scatters = mask.args[0], [n for n in mask.users if is_method(n, "scatter_")]
    if len(scatters) != 1 or set(mask.users) != {scatters[0], column} or scatters[0].users:
        return None
    scatter = scatters[0]
    count = value(best).shape[-1]
    if len(scatter.args) != 4 or scatter.kwargs or scatter.args[1] not in (1, -1) or scatter.args[3] != 1 \
            or type(count) is not int:
        return None
    top = _is_item(scatter.args[2], 1, "topk")
    experts = value(choice).shape[-1]
    if top is None or argument(top, 0, "input") is not best or value(best).dim() != 2 or type(experts) is not int \
            or experts % count or value(wide).shape[1:] != (count, experts // count) or value(flat).shape[-1] != experts:
        return None
    number, of = _group_choice(best)
    k = routing.results(top)
    if of is None or k is None or not is_method(of, "view", "reshape") or of.args[0] is not choice \
            or value(of).shape[1:] != (count, experts // count):
        return None
    return choice, _Groups(count, k, number, scatter)


def _group_choice(best: fx.Node) -> tuple[int, Any]:
    """(how many of the largest of each group are added up for its rank, the choices by group); 0 and None for another form."""
    if (largest := _is_item(best, 0, "max")) is not None and argument(largest, 1, "dim") in (-1, 2):
        return 1, largest.args[0]
    plain = "dtype" not in best.kwargs and len(best.args) <= 3
    if plain and is_method(best, "sum") and argument(best, 1, "dim") in (-1, 2) and not argument(best, 2, "keepdim", False):
        some = _is_item(argument(best, 0, "input"), 0, "topk")
        k = argument(some, 1, "k") if some is not None else None
        if some is not None and type(k) is int and argument(some, 2, "dim", -1) in (-1, 2) and argument(
                some, 3, "largest", True) is True:
            return k, argument(some, 0, "input")
    return 0, None
