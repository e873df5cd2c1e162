"""LoRA's second products and the sums become one kernel, for small batches (attn_ops/ops/lora.py).

Before, for q and k, whose first products are one already (passes/fusions/projections.py)::

    wq, aq, wk, ak = split(linear(x, [W_q; A_q; W_k; A_k]), [...])
    q = wq + linear(aq, B_q) * s_q;  k = wk + linear(ak, B_k) * s_k

After, with b = [B_q; B_k] in one tensor, of which B_q and B_k are now views::

    q, k = split(lora_expand(product, product, b, [Nq, Nk], ...), [Nq, Nk])

A following sum with the residual stream runs in the kernel too, after a single layer. Left alone: second products that
something else reads, factors that are not numbers, ranks above MAX_RANK, dtypes other than bf16 and fp16, and layers between
which something is changed in place. Adapters in float32 on a model in bf16, PEFT's default: passes/fusions/lora_group.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from quire.attn_ops.ops.lora import MAX_RANK, MAX_SEGMENTS, lora_expand
from quire.passes.fake_values import made_like
from quire.passes.fusions.base import Fusion, Part, columns, part_of
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
    same_shape,
    value,
    written_between,
)

DTYPES = (torch.bfloat16, torch.float16)


class _Layer(NamedTuple):
    """``total = base + linear(shrunk, b) * scaling``."""

    total: fx.Node
    base: Part
    shrunk: Part
    b: fx.Node
    real: torch.Tensor
    scaling: float


def fuse_lora(fusion: Fusion) -> int:
    """Rewrite every layer with an adapter; returns how many."""
    groups: dict[Any, list[_Layer]] = {}
    for node in fusion.graph.nodes:
        layer = _layer(node, fusion)
        if layer is not None:
            key = (layer.base.product, layer.shrunk.product, layer.real.shape[1])
            groups.setdefault(key, []).append(layer)
    return sum(_fuse(fusion, layers[i : i + MAX_SEGMENTS])
               for layers in groups.values() for i in range(0, len(layers), MAX_SEGMENTS))


def _layer(node: fx.Node, fusion: Fusion) -> _Layer | None:
    """The layer whose second product ``node`` is."""
    if not is_function(node, LINEAR) or len(node.args) < 2 or argument(node, 2, "bias") is not None:
        return None
    b: Any = node.args[1]
    real, shrunk, scaled = fusion.tensor(b), part_of(node.args[0]), only_user(node)
    if real is None or type(real) not in (torch.Tensor, torch.nn.Parameter) or real.dim() != 2 or real.dtype not in DTYPES \
            or real.shape[1] > MAX_RANK or not real.is_contiguous() or only_user(b) is None or shrunk is None:
        return None
    scaling = next((s for x, s in operands(scaled, MUL) if x is node and isinstance(s, (int, float))), None)
    total = only_user(scaled) if scaling is not None and scaled is not None else None
    other = next((x for x, y in operands(total, ADD) if y is scaled and x is not scaled), None)
    base = part_of(other)
    if total is None or base is None or scaling is None or not same_shape(value(other).shape, value(node).shape) \
            or {value(x).dtype for x in (total, other, node.args[0])} != {real.dtype}:
        return None
    return _Layer(total, base, shrunk, b, real, float(scaling))


def _fuse(fusion: Fusion, layers: list[_Layer]) -> int:
    """Compute the layers where the last of their products is there."""
    order = {node: i for i, node in enumerate(fusion.graph.nodes)}
    first = layers[0]
    last = max((first.base.product, first.shrunk.product), key=order.__getitem__)
    end = max((layer.total for layer in layers), key=order.__getitem__)
    reals = [layer.real for layer in layers]
    if written_between(last, end) or len(set(map(id, reals))) < len(reals) or (
            len(layers) > 1 and not fusion.weights.can_fuse(reals)):
        return 0
    residual, result = _residual(first.total) if len(layers) == 1 else (None, first.total)
    b = first.b if len(layers) == 1 else fusion.add_weight(fusion.weights.fuse(reals), first.b)
    sizes = [len(real) for real in reals]
    with fusion.graph.inserting_before(result if len(layers) == 1 else last.next):
        new = fusion.graph.call_function(lora_expand, (
            first.base.product, first.shrunk.product, b, sizes, [x.base.start for x in layers],
            [x.shrunk.start for x in layers], [x.scaling for x in layers], residual))
        parts = columns(made_like(new, first.total), sizes)
    for old, part in zip([result] if len(layers) == 1 else [layer.total for layer in layers], parts, strict=True):
        replace_node(old, part)
    return len(layers)


def _residual(total: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """The residual added to the layer's result, and the sum node: the kernel can do both."""
    result = total
    while (user := only_user(result)) is not None and is_method(user, "to") and value(user).dtype == value(total).dtype:
        result = user  # to the dtype that it has
    last = only_user(result)
    other = next((x for x, y in operands(last, ADD) if y is result and x is not result and is_tensor(x)), None)
    if last is None or other is None or value(other).dtype != value(total).dtype or value(last).dtype != value(total).dtype \
            or not same_shape(value(other).shape, value(total).shape) or written_between(total, last):
        return None, total
    return other, last
