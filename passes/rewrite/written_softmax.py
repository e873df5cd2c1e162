"""Softmax of scores of all tokens with all that is written out, as torch.softmax, for ``raise_written`` to read.

Before::

    e = exp(scores - amax(scores, -1, keepdim=True));  weights = e / e.sum(-1, keepdim=True)
    safe = masked_fill(weights, isnan(weights), 0)     # or where(...)

After::

    weights = softmax(scores, -1)                      # as of softmax(scores - amax(scores, -1, keepdim=True), -1)
    safe = nan_to_num(weights, 0, inf, -inf)

Left as it is: one without the maximum, whose exponentials are infinite or all 0 for large scores; one with anything else in the
sum; and one of several dimensions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor

from quire.passes.fake_values import compute_value
from quire.passes.fx import argument, erase_dead, is_tensor, named_arguments, torch_name, value, written_between
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
    if found is None or written_between(found[2], node) or is_functorch_wrapped_tensor(value(node)):
        return False
    function, arguments, _ = found
    with node.graph.inserting_before(node):
        new = node.graph.call_function(function, arguments)
        new.meta = dict(node.meta)  # the place in the user's code
        compute_value(new)
    node.replace_all_uses_with(new)
    erase_dead(node.graph, [node])
    return True


def _softmax(node: Any) -> _Found | None:
    if torch_name(node) == "softmax":
        found = _less_its_largest(argument(node, 0, "input"))
        given = named_arguments(node, ("input", "dim"))
        joins = found is not None and given.keys() <= {"input", "dim", "dtype"} and (
            given.get("dim") in (found[1], value(node).dim() + found[1]))
    else:
        plain = torch_name(node) in _QUOTIENTS and len(node.args) == 2 and not node.kwargs
        parts: Any = node.args if plain else (None, None)
        exp, total = parts
        found = _less_its_largest(exp.args[0]) if _calls(exp, "exp") and not exp.kwargs else None
        joins = found is not None and _calls(total, "sum") and _kept_in(total, exp) == found[1]
    if found is None or not joins or value(found[0]).dtype != value(node).dtype:
        return None
    return torch.softmax, found[:2], found[2]


def _less_its_largest(node: Any) -> tuple[Any, int, fx.Node] | None:
    """The tensor of which a node takes away the largest numbers along a dimension, that dimension, and the first node of it."""
    if not _calls(node, "sub") or node.kwargs:
        return None
    x, most = node.args
    while _calls(most, "detach"):
        most = most.args[0]
    if _calls(most, "getitem") and most.args[1] == 0 and _calls(most.args[0], "max"):
        most = most.args[0]
    elif not _calls(most, "amax"):
        return None
    dim = _kept_in(most, x)
    return None if dim is None else (x, dim, most)


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
