"""RMSNorm in a graph, as transformers' models write it.

With x32 = x in float32 and n = x32 * rsqrt(mean(x32 ** 2, -1) + eps), also written ``pow(..., -0.5)``::

    weight * n.to(dtype)                         Llama and most others: offset None
    (n * (offset + weight.float())).to(dtype)    Gemma 3 (1.0), Gemma 4 and Flint (0.0: no sum)
    n.to(dtype)                                  Llama 4's norm of q and k: no weight
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from quire.passes.fx import ADD, MUL, is_method, is_tensor, operands, value


class RMSNorm(NamedTuple):
    """An RMSNorm of x over the last dimension. ``weight``: None if it has none. ``eps``: added to the mean square. ``offset``:
    added to the weight, in float32; None if the weight multiplies what was rounded to the dtype of x before."""

    x: fx.Node
    weight: fx.Node | None
    eps: float
    offset: float | None = None


def match_rms_norm(node: Any) -> RMSNorm | None:
    """The norm whose result is ``node``, in the dtype of its x."""
    if not is_tensor(node):
        return None
    dtype = value(node).dtype
    for weight, cast in operands(node, MUL):
        if is_method(cast, "to", "type_as") and (found := _normalized(cast.args[0])) is not None \
                and _is_weight(weight, found[0]) and {value(n).dtype for n in (cast, weight, found[0])} == {dtype}:
            return RMSNorm(found[0], weight, found[1])
    product = node.args[0] if is_method(node, "to", "type_as") else node  # in float32 the cast does nothing, and may be gone
    if (found := _normalized(product)) is not None:
        return RMSNorm(found[0], None, found[1]) if value(found[0]).dtype == dtype else None
    for scaled, factor in operands(product, MUL):
        if (found := _normalized(scaled)) is not None and value(found[0]).dtype == dtype \
                and value(product).dtype == torch.float32:
            weight, offset = _offset_weight(factor)
            if _is_weight(weight, found[0]):
                return RMSNorm(found[0], weight, found[1], offset)
    return None


def _is_weight(node: Any, x: fx.Node) -> bool:
    """Whether this is an input with one number per dimension. One for all would be right too, but kernels read D numbers."""
    return is_tensor(node) and node.op == "placeholder" and value(node).dtype.is_floating_point \
        and tuple(value(node).shape) == (value(x).shape[-1],)


def _offset_weight(node: Any) -> tuple[Any, float]:
    """(weight, offset) of ``weight``, ``weight.float()`` or ``offset + weight.float()``, the sum made in float32."""
    offset = 0.0
    for number, other in operands(node, (*ADD, operator.iadd)):
        if isinstance(number, (int, float)) and value(node).dtype == torch.float32:
            offset, node = float(number), other
            break
    return (node.args[0] if is_method(node, "float", "to") and value(node).dtype == torch.float32 else node), offset


def _normalized(node: Any) -> tuple[fx.Node, float] | None:
    """(x, eps) if ``node`` is x in float32, times rsqrt(mean(x ** 2, -1, keepdim) + eps)."""
    for wide, rsqrt in operands(node, MUL):
        if not is_method(wide, "to", "float") or value(wide).dtype != torch.float32:
            continue
        if not is_method(rsqrt, "rsqrt") and not (is_method(rsqrt, "pow") and rsqrt.args[1:] == (-0.5,)):
            continue
        mean: Any
        mean, eps = next(iter(operands(rsqrt.args[0], (*ADD, operator.iadd))), (None, None))
        if not isinstance(eps, float) or not is_method(mean, "mean") or mean.args[1:2] not in ((-1,), ([-1],)) \
                or dict(mean.kwargs) != {"keepdim": True}:
            continue
        power = mean.args[0]
        if is_method(power, "pow") and power.args == (wide, 2) and not power.kwargs:
            return wide.args[0], eps
    return None
