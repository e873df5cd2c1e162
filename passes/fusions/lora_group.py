"""LoRA's products of layers with one input run in one launch together (attn_ops/ops/lora_rows.py).

Before, where each token has adapters of its own::

    q = lora_rows(base_q, x, [A ...], [B ...], scaling, bits);  k = lora_rows(base_k, x, ...)

or with adapters of all tokens (passes/fusions/match/lora.py)::

    q = (base_q + linear(linear(x.to(float32), A), B) * s).to(bfloat16);  k = ...

After::

    counters = lora_counters(A)    # once, before all layers
    q, k = split(lora_group([base_q, base_k], x, [A ...], [B ...], layers, scaling, bits, counters), [Nq, Nk])

so q, k and v have one launch, or two, and not six or more. Left alone: other ranks and numbers of adapters than the
kernels take; layers of which one's result is read before another's base is there have a launch each.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from quire.attn_ops.ops.lora_counters import lora_counters
from quire.attn_ops.ops.lora_rows import MAX_KERNEL_ADAPTERS, lora_group, lora_rows
from quire.passes.fake_values import compute_value, made_like
from quire.passes.fusions.base import Fusion, columns
from quire.passes.fusions.match.lora import AdaptedLayer, Adapter, adapted_layers, kernels_take
from quire.passes.fx import is_function, replace_node, schema_arguments, value, written_between

MAX_LAYERS = 4


def group_lora(fusion: Fusion) -> int:
    """Rewrite the layers with adapters; returns how many."""
    groups: dict[fx.Node, list[AdaptedLayer]] = {}
    for layer in (*adapted_layers(fusion), *filter(None, map(_of_tokens, fusion.graph.nodes))):
        groups.setdefault(layer.x, []).append(layer)
    counters = _counters(fusion, groups)
    return sum(_rewrite(fusion, part, counters) for layers in groups.values() for part in _parts(layers))


def _counters(fusion: Fusion, groups: dict[fx.Node, list[AdaptedLayer]]) -> fx.Node | None:
    """Made before all other nodes, on the device of a weight. None without one: each launch then zeroes its own."""
    weights = (adapter.a for layers in groups.values() for layer in layers for adapter in layer.adapters)
    like = next((a for a in weights if a.op == "placeholder"), None)
    if like is None:
        return None
    first = next(node for node in fusion.graph.nodes if node.op != "placeholder")
    with fusion.graph.inserting_before(first):
        return compute_value(fusion.graph.call_function(lora_counters, (like,)))


def _of_tokens(node: fx.Node) -> AdaptedLayer | None:
    """A layer whose tokens have adapters of their own."""
    if not is_function(node, (lora_rows,)):
        return None
    given = schema_arguments(node)
    adapters = [*map(Adapter, given["a"], given["b"], given["scaling"], given["bits"])]
    return AdaptedLayer(node, given["base"], given["x"], adapters, []) if kernels_take(adapters) else None


def _parts(layers: Sequence[AdaptedLayer]) -> list[list[AdaptedLayer]]:
    """The layers of one input in groups that the kernels take."""
    found: list[list[AdaptedLayer]] = []
    for layer in layers:
        last = found[-1] if found else []
        if 0 < len(last) < MAX_LAYERS and sum(len(x.adapters) for x in (*last, layer)) <= MAX_KERNEL_ADAPTERS:
            last.append(layer)
        else:
            found.append([layer])
    return found


def _rewrite(fusion: Fusion, layers: list[AdaptedLayer], counters: fx.Node | None) -> int:
    """Compute the layers where the last of their bases is there; one by one where that is too late for a reader."""
    order = {node: i for i, node in enumerate(fusion.graph.nodes)}
    read = [node for layer in layers for node in (layer.base, layer.x, *(m for a in layer.adapters for m in (a.a, a.b)))]
    last = max(read, key=order.__getitem__)
    end = max((layer.result for layer in layers), key=order.__getitem__)
    first = min((node for layer in layers for node in (layer.base, *layer.products)), key=order.__getitem__)
    readers = [user for layer in layers for user in layer.result.users]
    if last.op == "placeholder" or any(order[user] < order[last] for user in readers) or written_between(first, end):
        return sum(_rewrite(fusion, [layer], counters) for layer in layers) if len(layers) > 1 else 0
    adapters = [(i, adapter) for i, layer in enumerate(layers) for adapter in layer.adapters]
    with fusion.graph.inserting_before(last.next):
        new = fusion.graph.call_function(lora_group, (
            [layer.base for layer in layers], layers[0].x, [a.a for _, a in adapters], [a.b for _, a in adapters],
            [i for i, _ in adapters], [a.scaling for _, a in adapters], [a.bit for _, a in adapters],
            counters))
        parts = columns(made_like(new, layers[0].result), [value(layer.base).shape[-1] for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        replace_node(layer.result, part)
    return len(layers)
