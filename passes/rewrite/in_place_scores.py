"""Scores of all tokens with all that are changed in place, as the same out of place, for ``raise_written`` to read.

Before::

    scores = matmul(q, k.mT);  filled = scores.masked_fill_(hidden, -inf);  weights = softmax(div(scores, 8))

After::

    scores = matmul(q, k.mT);  filled = scores.masked_fill(hidden, -inf);  weights = softmax(div(filled, 8))

Later readers of that memory get the new value, whatever name they have for it. Left as it is: memory of the call or the model,
or that a view made before is read through afterwards; changes of a part; and operations that out of place have another dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quire.passes.fake_values import compute_value
from quire.passes.fx import is_function, is_tensor, same_shape, storage_of, value, written_by
from quire.passes.rewrite.raise_written import of_pairs

_OPERATORS: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add, operator.imul: operator.mul, operator.itruediv: operator.truediv}
_METHODS = frozenset(("add_", "mul_", "div_"))


def change_scores_out_of_place(graph: fx.Graph) -> int:
    """Rewrite them; returns the number of changes."""
    writes: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for x in written_by(node):
            if (memory := _memory(x)) is not None:
                writes.setdefault(memory, []).append(node)
    return sum([_rewrite(graph, memory, nodes) for memory, nodes in writes.items()])


def _rewrite(graph: fx.Graph, memory: int, writes: Sequence[fx.Node]) -> int:
    """``writes``: all that change one memory, in graph order."""
    scores: Any = writes[0].args[0] if writes[0].args else None
    if not is_tensor(scores) or not of_pairs(scores) or not value(scores).is_floating_point() \
            or is_functorch_wrapped_tensor(value(scores)) or any(
                written_by(w) != [w.args[0]] or not _is_known(w) for w in writes):
        return 0
    changed = {scores, *writes}
    for name in (n for n in graph.nodes if _memory(n) == memory):
        outdated = name not in changed and name < writes[-1] and not all(user < writes[0] for user in name.users)
        if outdated or not name.op.startswith("call"):
            return 0
    for write in writes:
        with graph.inserting_before(write):
            new = _out_of_place(graph, write)
        new.meta = dict(write.meta)  # the place in the user's code
        compute_value(new)
        for user in {user for x in changed for user in x.users if user > write}:
            for x in changed.intersection(user.all_input_nodes):
                user.replace_input_with(x, new)
        changed.add(new)
    for write in reversed(writes):
        graph.erase_node(write)
    return len(writes)


def _is_known(write: fx.Node) -> bool:
    """Whether the change is of all of x, by an operation that out of place has a result of x's dtype (and shape, as it could
    not be in place)."""
    x, *others = write.args
    name = write.target if write.op == "call_method" else ""
    if write.kwargs:
        return False
    if len(others) == 1 and (write.target in _OPERATORS or name in _METHODS):
        return _is_number(others[0]) or (
            is_tensor(others[0]) and torch.result_type(value(x), value(others[0])) == value(x).dtype)
    mask = others[0] if len(others) == 2 else None
    if not is_tensor(mask) or value(mask).dtype != torch.bool or not _is_number(others[1]):
        return False
    return name == "masked_fill_" or (
        is_function(write, (operator.setitem,)) and same_shape(value(x).shape, value(mask).shape))


def _out_of_place(graph: fx.Graph, write: fx.Node) -> fx.Node:
    if write.target in _OPERATORS:
        return graph.call_function(_OPERATORS[write.target], write.args)
    return graph.call_method("masked_fill" if write.target is operator.setitem else str(write.target)[:-1], write.args)


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)


def _memory(node: Any) -> int | None:
    """Where the data of a tensor are; None for no tensor, and for those that hold others."""
    val = value(node)
    plain = isinstance(val, torch.Tensor) and val.layout == torch.strided and not is_traceable_wrapper_subclass(val)
    return storage_of(val) if plain else None
