"""A linear layer with LoRA's adapters becomes one op (attn_ops/ops/lora_linear.py), in graphs for all batches.

Before, as the passes of projections and of groups leave q and k of one product::

    wq, wk = split(linear(x, w), [Nq, Nk]);  q, k = split(lora_group([wq, wk], x, [A ...], [B ...], ..., counters), [Nq, Nk])

After::

    q, k = split(lora_linear(x, w, a=[A ...], b=[B ...], starts=[0, Nq], ..., counters), [Nq, Nk])

with a norm, SwiGLU or residual around it folded into the layer (passes/fusions/small_linear.py). Left alone: layers whose
weight is not plain bf16 or fp16, products of several inputs, and products that something reads without the adapters.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from quire.attn_ops.ops.lora_linear import lora_linear
from quire.attn_ops.ops.lora_rows import lora_group
from quire.passes.fake_values import made_like
from quire.passes.fusions.base import Fusion, bias_of, part_of
from quire.passes.fusions.small_linear import fold, is_half, is_plain
from quire.passes.fx import LINEAR, erase_dead, is_function, only_user, replace_node, schema_arguments, value, written_between


def fuse_lora_linear(fusion: Fusion) -> int:
    """Rewrite every layer whose product and adapters one op can compute; returns how many ops."""
    return sum(_join(fusion, node) for node in list(fusion.graph.nodes) if is_function(node, (lora_group,)))


def _join(fusion: Fusion, node: fx.Node) -> bool:
    """Put the adapters of ``node`` into the product that its bases are parts of."""
    given = schema_arguments(node)
    bases, layers = given["bases"], given["layers"]
    parts = [part_of(base) for base in bases]
    results = _results(node, len(bases))
    product: Any = parts[0].product if parts[0] else None
    if results is None or not is_function(product, LINEAR) \
            or any(part is None or part.product is not product for part in parts) \
            or not _only_read_by(node, product, bases) or len(product.args) < 2 or product.args[0] is not given["x"] \
            or not is_half(weight := fusion.tensor(product.args[1])) or not is_plain(product, weight) \
            or value(given["x"]).dim() != 3 or any(each.op != "placeholder" for each in (*given["a"], *given["b"])) \
            or written_between(product, node):
        return False
    starts = [part.start for part in parts if part]
    with fusion.graph.inserting_before(product):
        new = fusion.graph.call_function(lora_linear, (
            product.args[0], product.args[1], bias_of(product), None, 0.0, None, False, given["a"], given["b"],
            [starts[layer] for layer in layers], given["scaling"], given["bits"], given["counters"]))
        made_like(new, product)
    replace_node(product, new)
    for result, base in zip(results, bases, strict=True):
        result.replace_all_uses_with(new if base is product else base)
    erase_dead(fusion.graph, results)
    fold(fusion, new, new.args[1], new.args[2], adapters=new.args[7:])
    return True


def _only_read_by(node: fx.Node, product: fx.Node, bases: list[fx.Node]) -> bool:
    """Nothing else reads the columns of ``product`` that are ``bases``, each of them once: the adapters go into them."""
    if len(set(bases)) < len(bases) or any(set(base.users) != {node} for base in bases):
        return False
    split = only_user(product)
    if bases == [product] or split is None:
        return bases == [product]
    indices = [user.args[1] for user in split.users if is_function(user, (operator.getitem,))]
    return all(base.args[0] is split for base in bases) and len(set(indices)) == len(split.users)


def _results(node: fx.Node, number: int) -> list[fx.Node] | None:
    """What the ``number`` layers of ``node`` give, in their order; None if it is not read layer by layer."""
    if number == 1:
        return [node]
    split = only_user(node)
    if not is_function(split, (torch.split, torch.functional.split)) or split is None:
        return None
    found = {user.args[1]: user for user in split.users if is_function(user, (operator.getitem,))}
    return [found[i] for i in range(number)] if len(found) == len(split.users) == number else None
