"""The top-k of a router of experts as one kernel.

Before::

    values, indices = torch.topk(probabilities, 8, dim=-1)       # (T, 128)

After::

    values, indices = quire.topk_rows(probabilities, 8)          # attn_ops/ops/routing.py

Left alone: rows longer than ``MAX_ROW``, more than ``MAX_K`` results, the smallest instead of the largest, another dim, tensors
that are not on a GPU. ``sorted=False`` may be sorted.
"""

from __future__ import annotations

import torch
from torch import fx

from quire.attn_ops.ops.routing import KERNEL_DTYPES, MAX_K, MAX_ROW, topk_rows
from quire.passes.fusions.base import Fusion
from quire.passes.fx import is_method, named_arguments, replace_node, value

DEVICES = ("cuda",)


def fuse_topk(fusion: Fusion) -> int:
    found = [(node, k) for node in fusion.graph.nodes if (k := results(node)) is not None]
    for node, k in found:
        with fusion.graph.inserting_before(node):
            new = fusion.graph.call_function(topk_rows, (node.args[0] if node.args else node.kwargs["input"], k))
        replace_node(node, new)
    return len(found)


def results(node: fx.Node) -> int | None:
    """k of a top-k over the last dimension that the kernel computes; None for another node."""
    if not is_method(node, "topk"):
        return None
    names = ("input", "k", "dim", "largest", "sorted")
    given = named_arguments(node, names)
    x = value(given["input"]) if isinstance(given.get("input"), fx.Node) else None
    k, dim = given.get("k"), given.get("dim", -1)
    if not isinstance(x, torch.Tensor) or not set(given) <= set(names) or type(k) is not int or type(dim) is not int:
        return None
    columns = x.shape[-1] if x.dim() else None
    if (x.device.type not in DEVICES or x.dtype not in KERNEL_DTYPES or type(columns) is not int or columns > MAX_ROW
            or not 0 < k <= min(columns, MAX_K) or dim not in (-1, x.dim() - 1) or given.get("largest", True) is not True):
        return None
    return k
