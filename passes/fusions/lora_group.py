"""LoRA's products of layers with one input run in two kernels together, for small batches (attn_ops/ops/lora_rows.py).

Before, where each token has adapters of its own::

    q = lora_rows(base_q, x, [A ...], [B ...], scaling, bits);  k = lora_rows(base_k, x, ...)

or with adapters of all tokens in another dtype than the model's (PEFT's default is float32)::

    q = (base_q + linear(linear(x.to(float32), A), B) * s).to(bfloat16);  k = ...

After::

    q, k = split(lora_group([base_q, base_k], x, [A ...], [B ...], layers, scaling, bits), [Nq, Nk])

so q, k and v have two launches and not six or more. Adapters in the model's own dtype have a kernel that reads less:
passes/fusions/lora.py. Left alone: adapters that something else reads a part of, factors that are not numbers, other ranks and
numbers of adapters than the kernels take, and layers of which one's result is read before another's base is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from quire.attn_ops.ops.lora_rows import MAX_KERNEL_ADAPTERS, MAX_RANK, lora_group, lora_rows
from quire.passes.fake_values import made_like
from quire.passes.fusions.base import Fusion, before_dropout, columns
from quire.passes.fx import (
    ADD,
    LINEAR,
    MUL,
    argument,
    is_function,
    is_method,
    is_tensor,
    only_user,
    operands,
    replace_node,
    schema_arguments,
    value,
    written_between,
)

HALF = (torch.bfloat16, torch.float16)
MAX_LAYERS = 4


class _Adapter(NamedTuple):
    a: fx.Node
    b: fx.Node
    scaling: float
    bit: int


class _Layer(NamedTuple):
    """``result = base + the sum of its adapters' products with x``."""

    result: fx.Node
    base: fx.Node
    x: fx.Node
    adapters: list[_Adapter]


def group_lora(fusion: Fusion) -> int:
    """Rewrite the layers that a group gains from; returns how many."""
    groups: dict[fx.Node, list[_Layer]] = {}
    for node in fusion.graph.nodes:
        layer = _of_tokens(node) or _of_all(node, fusion)
        if layer is not None:
            groups.setdefault(layer.x, []).append(layer)
    return sum(_rewrite(fusion, part) for layers in groups.values() for part in _parts(layers))


def _of_tokens(node: fx.Node) -> _Layer | None:
    """A layer whose tokens have adapters of their own."""
    if not is_function(node, (lora_rows,)):
        return None
    given = schema_arguments(node)
    each = zip(given["a"], given["b"], given["scaling"], given["bits"], strict=True)
    return _Layer(node, given["base"], given["x"], [_Adapter(a, b, s, bit) for a, b, s, bit in each])


def _of_all(node: fx.Node, fusion: Fusion) -> _Layer | None:
    """A layer whose adapters are those of all tokens, in another dtype than its own; ``node`` casts their sum back."""
    if not is_method(node, "to") or value(node) is None or value(node).dtype not in HALF or not is_tensor(node.args[0]):
        return None
    total: Any = node.args[0]
    adapters, source = list[_Adapter](), None
    while only_user(total) is not None and value(total).dtype == torch.float32:
        found = next(((x, term) for x, y in operands(total, ADD) if is_tensor(x) and (term := _term(y, fusion))), None)
        if found is None:
            return None
        total, (adapter, x) = found
        adapters.insert(0, adapter)
        if source not in (None, x):
            return None
        source = x
    if not adapters or source is None or value(total).dtype != value(node).dtype or value(total).dim() != 3 \
            or value(total).shape[-1] != value(adapters[0].b).shape[0] or value(source).dtype != value(node).dtype:
        return None
    return _Layer(node, total, source, adapters)


def _term(node: Any, fusion: Fusion) -> tuple[_Adapter, fx.Node] | None:
    """An adapter's term of a sum, ``linear(linear(x.to(float32), A), B) * s``, and x."""
    found = next(((x, s) for x, s in operands(node, MUL) if is_function(x, LINEAR) and isinstance(s, (int, float))), None)
    if found is None or only_user(node) is None:
        return None
    up, scaling = found
    down: Any = up.args[0]
    if not is_function(down, LINEAR):
        return None
    for product in (up, down):
        if only_user(product) is None or len(product.args) < 2 or argument(product, 2, "bias") is not None:
            return None
        real = fusion.tensor(product.args[1])
        if real is None or type(real) not in (torch.Tensor, torch.nn.Parameter) or real.dim() != 2 \
                or real.dtype != torch.float32 or not real.is_contiguous():
            return None
    x = before_dropout(down.args[0])
    while is_method(x, "to") and value(x).dtype == torch.float32:  # of a second adapter: twice
        x = x.args[0]
    if not is_tensor(x) or value(x).dim() != 3 or value(down.args[0]).dtype != torch.float32:
        return None
    return _Adapter(down.args[1], up.args[1], float(scaling), 0), x


def _parts(layers: Sequence[_Layer]) -> list[list[_Layer]]:
    """The layers of one input in groups that the kernels take."""
    found: list[list[_Layer]] = []
    for layer in layers:
        if any(value(adapter.a).shape[0] > MAX_RANK for adapter in layer.adapters) or not layer.adapters \
                or len(layer.adapters) > MAX_KERNEL_ADAPTERS:
            continue
        last = found[-1] if found else []
        if 0 < len(last) < MAX_LAYERS and sum(len(x.adapters) for x in (*last, layer)) <= MAX_KERNEL_ADAPTERS:
            last.append(layer)
        else:
            found.append([layer])
    return found


def _rewrite(fusion: Fusion, layers: list[_Layer]) -> int:
    """Compute the layers where the last of their bases is there; one by one where that is too late for a reader."""
    order = {node: i for i, node in enumerate(fusion.graph.nodes)}
    if len(layers) == 1 and is_function(layers[0].result, (lora_rows,)):
        return 0  # it is two kernels already
    read = [node for layer in layers for node in (layer.base, layer.x, *(m for a in layer.adapters for m in (a.a, a.b)))]
    last = max(read, key=order.__getitem__)
    end = max((layer.result for layer in layers), key=order.__getitem__)
    first = min((layer.base for layer in layers), key=order.__getitem__)
    readers = [user for layer in layers for user in layer.result.users]
    if last.op == "placeholder" or any(order[user] < order[last] for user in readers) or written_between(first, end):
        return sum(_rewrite(fusion, [layer]) for layer in layers) if len(layers) > 1 else 0
    adapters = [(i, adapter) for i, layer in enumerate(layers) for adapter in layer.adapters]
    with fusion.graph.inserting_before(last.next):
        new = fusion.graph.call_function(lora_group, (
            [layer.base for layer in layers], layers[0].x, [a.a for _, a in adapters], [a.b for _, a in adapters],
            [i for i, _ in adapters], [a.scaling for _, a in adapters], [a.bit for _, a in adapters]))
        parts = columns(made_like(new, layers[0].result), [value(layer.base).shape[-1] for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        replace_node(layer.result, part)
    return len(layers)
