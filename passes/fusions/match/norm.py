"""RMSNorm in a graph, as transformers' models spell it.

With x32 = x in float32 and n = x32 * rsqrt(mean(x32 ** 2, -1) + eps), also spelled ``pow(..., -0.5)``::

    weight * n.to(dtype)                     Llama and its kin: offset None
    (n * (offset + weight.float())).to(dtype)    Gemma 3 (1.0), Gemma 4 and Flint (0.0: no sum)
    n.to(dtype)                              Llama 4's norm of q and k: no weight
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from quire.passes.fx import is_function, is_method, value

_MUL = (operator.mul, torch.mul)
_ADD = (operator.add, torch.add, operator.iadd)


class RMSNorm(NamedTuple):
    """An RMSNorm over the last dimension: its input, weight (None: it has none) and eps. ``offset``: None where the weight
    multiplies what was rounded to the dtype of x before, else what is added to the weight, in float32."""

    x: fx.Node
    weight: fx.Node | None
    eps: float
    offset: float | None = None


def match_rms_norm(node: Any) -> RMSNorm | None:
    """The norm whose result is ``node``, in the dtype of its x."""
    for weight, cast in _factors(node):
        if _is_parameter(weight) and is_method(cast, "to", "type_as"):
            found = _normed(cast.args[0])
            if found is not None and _fits(weight, found[0]) and value(cast).dtype == value(weight).dtype \
                    and value(found[0]).dtype == value(node).dtype == value(weight).dtype:
                return RMSNorm(found[0], weight, found[1])
    product = node.args[0] if is_method(node, "to", "type_as") else node  # in float32 the cast does nothing, and may be gone
    found = _normed(product)
    if found is not None:
        return RMSNorm(found[0], None, found[1]) if value(found[0]).dtype == value(node).dtype else None
    for scaled, factor in _factors(product):
        found, weight = _normed(scaled), _offset_weight(factor)
        if found is not None and weight is not None and _fits(weight[0], found[0]) and value(product).dtype == torch.float32 \
                and value(found[0]).dtype == value(node).dtype:
            return RMSNorm(found[0], weight[0], found[1], weight[1])
    return None


def _factors(node: Any) -> list[Any]:
    if not is_function(node, _MUL) or len(node.args) != 2 or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return []
    return [node.args, node.args[::-1]]


def _is_parameter(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and isinstance(value(node), torch.Tensor)


def _fits(weight: fx.Node, x: fx.Node) -> bool:
    """Is there a number for each dimension? One for all of them would be right too, but kernels read as many."""
    return tuple(value(weight).shape) == (value(x).shape[-1],)


def _offset_weight(node: Any) -> tuple[fx.Node, float] | None:
    """(weight, offset) of ``weight``, ``weight.float()`` or ``offset + weight.float()``, the sum made in float32."""
    offset = 0.0
    if is_function(node, _ADD) and len(node.args) == 2 and not node.kwargs and value(node).dtype == torch.float32:
        for number, other in (node.args, node.args[::-1]):
            if isinstance(number, (int, float)):
                offset, node = float(number), other
                break
    if is_method(node, "float", "to") and value(node).dtype == torch.float32:
        node = node.args[0]
    return (node, offset) if _is_parameter(node) and value(node).dtype.is_floating_point else None


def _normed(node: Any) -> tuple[fx.Node, float] | None:
    """(x, eps) if ``node`` is x in fp32, times rsqrt(mean(x ** 2, -1, keepdim) + eps)."""
    for wide, rsqrt in _factors(node):
        if not is_method(wide, "to", "float") or value(wide).dtype != torch.float32:
            continue
        if not is_method(rsqrt, "rsqrt") and not (is_method(rsqrt, "pow") and rsqrt.args[1:] == (-0.5,)):
            continue
        add: Any = rsqrt.args[0]
        if not is_function(add, _ADD) or len(add.args) != 2 or add.kwargs or not isinstance(add.args[1], float):
            continue
        mean: Any = add.args[0]
        if not is_method(mean, "mean") or mean.args[1:2] not in ((-1,), ([-1],)) or dict(mean.kwargs) != {"keepdim": True}:
            continue
        power: Any = mean.args[0]
        if is_method(power, "pow") and power.args == (wide, 2) and not power.kwargs:
            return wide.args[0], add.args[1]
    return None


__all__ = ["RMSNorm", "match_rms_norm"]
