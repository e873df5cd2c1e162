"""Softmax of scores of all tokens with all that is written out, as torch.softmax, for ``raise_written`` to read.

Before::

    e = exp(scores - amax(scores, -1, keepdim=True));  weights = e / e.sum(-1, keepdim=True)
    safe = masked_fill(weights, isnan(weights), 0)     # or where(...)

After::

    weights = softmax(scores, -1)
    safe = nan_to_num(weights, 0, inf, -inf)

Left as it is: one without the maximum, whose exponentials are infinite or all 0 for large scores; one with anything else in the
sum; and one of several dimensions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from quire.passes.fake_values import compute_value
from quire.passes.fx import erase_dead, is_tensor, named_arguments, torch_name, value, written_between
from quire.passes.rewrite.raise_written import of_pairs

_QUOTIENTS = frozenset(("div", "divide", "truediv", "true_divide"))
_REDUCTION = ("input", "dim", "keepdim")
#: A function and its arguments, and the first node of what it stands for.
_Found = tuple[Any, tuple[Any, ...], fx.Node]


def join_softmax(graph: fx.Graph) -> int:
    """Replace them in place; returns how many."""
    return sum([_join(node) for node in graph.nodes if node.op.startswith("call") and of_pairs(node)])


def _join(node: fx.Node) -> bool:
    found = _softmax(node) or _without_nan(node)
    if found is None or written_between(found[2], node):
        return False
    function, arguments, _ = found
    with node.graph.inserting_before(node):
        new = node.graph.call_function(function, arguments)
        new.meta = dict(node.meta)  # the place in the user's code
        compute_value(new)
    node.replace_all_uses_with(new)
    erase_dead(node.graph, [node])
    return True


def _softmax(node: fx.Node) -> _Found | None:
    quotient: Any = node.args if torch_name(node) in _QUOTIENTS and len(node.args) == 2 and not node.kwargs else (None, None)
    exp, total = quotient
    if not _calls(exp, "exp") or exp.kwargs or not _calls(exp.args[0], "sub") or exp.args[0].kwargs:
        return None
    x, most = exp.args[0].args
    while _calls(most, "detach"):
        most = most.args[0]
    if _calls(most, "getitem") and most.args[1] == 0 and _calls(most.args[0], "max"):
        most = most.args[0]
    elif not _calls(most, "amax"):
        return None
    dim = _kept_in(most, x)
    if dim is None or not _calls(total, "sum") or _kept_in(total, exp) != dim or value(x).dtype != value(node).dtype:
        return None
    return torch.softmax, (x, dim), most


def _without_nan(node: fx.Node) -> _Found | None:
    name, args = torch_name(node), list[Any](node.args)
    if len(args) != 3 or node.kwargs or name not in ("masked_fill", "where") or (name == "where" and node.op == "call_method"):
        return None
    x, at, low = args if name == "masked_fill" else (args[2], args[0], args[1])
    low = 0.0 if _calls(low, "zeros_like") else low
    if not _calls(at, "isnan") or at.args[0] is not x or type(low) not in (int, float) or value(x).dtype != value(node).dtype:
        return None
    return torch.nan_to_num, (x, low, math.inf, -math.inf), at


def _kept_in(node: fx.Node, x: Any) -> int | None:
    """The one dimension, counted from the right, that a node reduces of ``x`` and keeps; None if it does anything else."""
    given = named_arguments(node, _REDUCTION)
    dim = given.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not given.keys() <= {*_REDUCTION} or given["input"] is not x or not is_tensor(x) or type(dim) is not int:
        return None
    return dim % value(x).dim() - value(x).dim() if given.get("keepdim") is True else None


def _calls(node: Any, *names: str) -> bool:
    return isinstance(node, fx.Node) and torch_name(node) in names
