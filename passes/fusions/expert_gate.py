"""Experts with the gate of gpt-oss as one op.

Before, as transformers' ``GptOssExperts`` computes it::

    y = quire.expert_linear(x, gate_up, gate_up_bias, ids, transposed)
    gate = clamp(getitem(y, (..., ::2)), max=7.0);  up = clamp(getitem(y, (..., 1::2)), min=-7.0, max=7.0)
    z = mul(add(up, 1), mul(gate, sigmoid(mul(gate, 1.702))))
    out = quire.expert_linear(z, down, down_bias, ids, transposed)

After::

    out = quire.expert_clamped_swiglu(x, gate_up, gate_up_bias, down, down_bias, ids, transposed, 1.702, 7.0)

The pairs are sorted by expert once instead of twice, and gate and up are not stored. The op takes the adapters of both products
(LoRA: attn_ops/ops/expert_lora.py). Left alone: any other order of operations,
parts that something else reads, numbers that are not constants, other dtypes than one floating one throughout.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch import fx

from quire.attn_ops.ops.expert_lora import ExpertLora
from quire.attn_ops.ops.experts import KERNEL_DTYPES, expert_clamped_swiglu, expert_linear
from quire.passes.fusions.base import Fusion
from quire.passes.fx import ADD, MUL, is_function, named_arguments, operands, replace_node, torch_name, value, written_between

_COUNTS = (5, 9)  # arguments of a product, without and with adapters


class _Gate(NamedTuple):
    """The first product, the numbers, and the nodes from there to the activation."""

    product: fx.Node
    alpha: float
    limit: float
    inner: tuple[fx.Node, ...]


def fuse_expert_gate(fusion: Fusion) -> int:
    count = 0
    for node in list(fusion.graph.nodes):
        gate = _gate(node) if is_function(node, (expert_linear,)) else None
        if gate is None:
            continue
        x, gate_up, gate_up_bias, ids, transposed, *up_lora = gate.product.args
        _, down, down_bias, _, _, *down_lora = node.args
        first, second = (ExpertLora(*lora) for lora in (up_lora, down_lora))
        adapters = (*first.joined(second), len(first.a)) if up_lora or down_lora else ()
        with fusion.graph.inserting_before(node):
            new = fusion.graph.call_function(expert_clamped_swiglu, (
                x, gate_up, gate_up_bias, down, down_bias, ids, transposed, gate.alpha, gate.limit, *adapters))
        replace_node(node, new)
        count += 1
    return count


def _gate(down: fx.Node) -> _Gate | None:
    """What the input of the second product ``down`` is made of; None if it is not this gate of the same pairs."""
    if len(down.args) not in _COUNTS or down.kwargs:
        return None
    cast = _casts(down.args[0])
    for grown, active in operands(cast[-1], MUL):
        for up, one in operands(grown, ADD):
            for gate, sigmoid in operands(active, MUL):
                found = _parts(up, gate, sigmoid) if _is_number(one) and one == 1 else None
                if found is None:
                    continue
                found = found._replace(inner=(*cast, grown, active, *found.inner))
                if _is_closed(found, down):
                    return found
    return None


def _parts(up: Any, gate: Any, sigmoid: Any) -> _Gate | None:
    """``gate`` and ``up`` are cut off at one limit, and ``sigmoid`` is of a multiple of the gate."""
    high, both = _bounds(gate), _bounds(up)
    if high is None or both is None or not _calls(sigmoid, "sigmoid") or len(sigmoid.args) != 1 or sigmoid.kwargs:
        return None
    multiple = sigmoid.args[0]
    alpha = next((b for a, b in operands(multiple, MUL) if a is gate and _is_number(b)), None)
    (halves, products), limit = zip(_half(high[0], 0), _half(both[0], 1), strict=True), high[2]
    if alpha is None or high[1] is not None or limit is None or limit <= 0 or both[1:] != (-limit, limit) \
            or products[0] is None or products[0] is not products[1]:
        return None
    return _Gate(products[0], float(alpha), float(limit), (up, gate, sigmoid, multiple, *halves))


def _bounds(node: Any) -> tuple[Any, Any, Any] | None:
    """(x, min, max) of a clamp by numbers."""
    if not _calls(node, "clamp", "clip"):
        return None
    given = named_arguments(node, ("input", "min", "max"))
    low, high = given.get("min"), given.get("max")
    if not set(given) <= {"input", "min", "max"} or not all(n is None or _is_number(n) for n in (low, high)):
        return None
    return given.get("input"), low, high


def _half(node: Any, first: int) -> tuple[Any, fx.Node | None]:
    """(node, y) of ``y[..., first::2]`` with y a product of experts."""
    every = [(Ellipsis, slice(start, None, 2)) for start in ((0, None) if first == 0 else (first,))]
    if is_function(node, (operator.getitem,)) and node.args[1] in every and is_function(node.args[0], (expert_linear,)):
        return node, node.args[0]
    return node, None


def _casts(node: Any) -> list[Any]:
    """The node, and what it is cast from to the dtype that it has already."""
    found = [node]
    while (_calls(node, "to") and node.op == "call_method" and len(node.args) == 2 and not node.kwargs
           and node.args[1] == value(node.args[0]).dtype):
        node = node.args[0]
        found.append(node)
    return found


def _is_closed(found: _Gate, down: fx.Node) -> bool:
    """Whether nothing else reads or changes what is between the products, and their pairs, shapes and dtypes go together."""
    product, nodes = found.product, {*found.inner, found.product}
    if len(product.args) not in _COUNTS or product.kwargs or product.args[3:5] != down.args[3:5] \
            or type(down.args[4]) is not bool:
        return False
    wide, narrow = (tuple(value(node.args[1]).shape) for node in (product, down))
    fit = wide[0] == narrow[0] and wide[1 + down.args[4]] == 2 * narrow[2 - down.args[4]]
    alone = all(set(node.users) <= {*nodes, down} for node in nodes)
    dtypes = {value(node).dtype for node in (*nodes, product.args[0], down.args[1])}
    return fit and alone and len(dtypes) == 1 and dtypes <= {*KERNEL_DTYPES} and not written_between(product, down)


def _calls(node: Any, *names: str) -> bool:
    return isinstance(node, fx.Node) and torch_name(node) in names


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)
