"""Linear layers with adapters of all tokens in a graph, as PEFT computes LoRA (Hu et al., 2021).

With ``s`` a number, and A and B in the model's dtype, or in float32, PEFT's default::

    q = base + linear(linear(x, A), B) * s
    q = (base + linear(linear(x.to(float32), A), B) * s).to(bfloat16)

Several adapters of a layer add one term each, in either dtype. Not a match: models that are not in half precision, terms that
something else reads a part of, factors that are not numbers, other ranks and numbers of adapters than the kernels take
(attn_ops/ops/lora_rows.py), and layers whose base is another's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from quire.attn_ops.ops.lora_rows import MAX_KERNEL_ADAPTERS, MAX_RANK
from quire.passes.fusions.base import Fusion, bias_of
from quire.passes.fx import ADD, LINEAR, MUL, is_function, is_method, is_tensor, only_user, operands, same_shape, value

HALF = (torch.bfloat16, torch.float16)


class Adapter(NamedTuple):
    """``bit``: which tokens have it, as of ``lora_rows``; 0: all."""

    a: fx.Node
    b: fx.Node
    scaling: float
    bit: int


class AdaptedLayer(NamedTuple):
    """``result = base + the sum of its adapters' products with x``. ``products``: the nodes of these that read x or what was
    computed of it; none where ``result`` is an op."""

    result: fx.Node
    base: fx.Node
    x: fx.Node
    adapters: list[Adapter]
    products: list[fx.Node]


class _Term(NamedTuple):
    adapter: Adapter
    x: fx.Node
    products: list[fx.Node]


def adapted_layers(fusion: Fusion) -> list[AdaptedLayer]:
    """The layers of the graph, in its order."""
    found, inner = list[AdaptedLayer](), set[fx.Node]()
    for node in reversed(fusion.graph.nodes):
        if node not in inner and (match := _layer(node, fusion)) is not None:
            found.append(match[0])
            inner.update(match[1])
    results = {layer.result for layer in found}
    return [layer for layer in reversed(found) if layer.base not in results and kernels_take(layer.adapters)]


def kernels_take(adapters: Sequence[Adapter]) -> bool:
    """Whether the kernels take as many adapters of a layer, of these ranks."""
    return 0 < len(adapters) <= MAX_KERNEL_ADAPTERS and all(value(each.a).shape[0] <= MAX_RANK for each in adapters)


def _layer(node: fx.Node, fusion: Fusion) -> tuple[AdaptedLayer, list[fx.Node]] | None:
    """The layer whose last sum is ``node``, and its sums."""
    if not operands(node, ADD) or not is_tensor(node):
        return None
    cast: Any = only_user(node)  # PEFT's, to the dtype that the base has; maybe the sum has it, too
    cast = is_method(cast, "to") and value(node).dtype in (torch.float32, value(cast).dtype)
    result: Any = only_user(node) if cast else node
    dtype, base = value(result).dtype, node
    terms, sums = list[_Term](), list[fx.Node]()
    while dtype in HALF and (base is node or only_user(base) is not None):
        found = next(((x, term) for x, y in operands(base, ADD) if is_tensor(x) and (term := _term(y, dtype, fusion))), None)
        if found is None:
            break
        sums.append(base)
        base, term = found
        terms.insert(0, term)
    if len({term.x for term in terms}) != 1 or value(base).dtype != dtype or value(base).dim() != 3:
        return None
    x, shape = terms[0].x, value(base).shape
    rows = [[*value(x).shape[:-1], value(term.adapter.b).shape[0]] for term in terms]
    if not all(same_shape(each, shape) for each in (*rows, value(result).shape)):
        return None
    return AdaptedLayer(result, base, x, [term.adapter for term in terms], [n for term in terms for n in term.products]), sums


def _term(node: Any, dtype: torch.dtype, fusion: Fusion) -> _Term | None:
    """An adapter's term of a sum, ``linear(linear(x, A), B) * s``, for an x of this dtype."""
    found = next(((x, s) for x, s in operands(node, MUL) if is_function(x, LINEAR) and isinstance(s, (int, float))), None)
    if found is None or only_user(node) is None:
        return None
    up, scaling = found
    down: Any = up.args[0]
    if not is_function(down, LINEAR):
        return None
    for product in (up, down):
        if only_user(product) is None or len(product.args) < 2 or bias_of(product) is not None:
            return None
        real = fusion.tensor(product.args[1])
        if real is None or type(real) not in (torch.Tensor, torch.nn.Parameter) or real.dim() != 2 \
                or real.dtype not in (dtype, torch.float32) or not real.is_contiguous():
            return None
    path = _casts(down.args[0], dtype)
    if not path:
        return None
    return _Term(Adapter(down.args[1], up.args[1], float(scaling), 0), path[-1], [*path[:-1], down, up])


def _casts(x: Any, dtype: torch.dtype) -> list[fx.Node]:
    """From x back to the tensor of this dtype behind its casts to float32, and (of a second adapter) back; empty if none."""
    path = [x]
    while is_method(path[-1], "to"):
        before = path[-1].args[0]
        dtypes = {value(before).dtype, value(path[-1]).dtype}
        if torch.float32 not in dtypes or not dtypes <= {dtype, torch.float32}:
            break
        path.append(before)
    while path and (not is_tensor(path[-1]) or value(path[-1]).dtype != dtype):
        path.pop()
    return path
