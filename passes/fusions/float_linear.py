"""A linear layer that is computed in float32 from half-precision numbers runs in one kernel, in the graph for few tokens.

Before, in a router of experts::

    logits = linear(to(x, float32), to(weight, float32))

After::

    logits = quire.float_linear(x, weight)                       # attn_ops/ops/small_linear.py

Left alone: layers with a bias, operands of other dtypes, weights that the forward computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from quire.attn_ops.ops.small_linear import HALVES, float_linear
from quire.passes.fusions.base import Fusion
from quire.passes.fx import LINEAR, is_function, is_method, replace_node, value, written_between


def fuse_float_linear(fusion: Fusion) -> int:
    count = 0
    for node in list(fusion.graph.nodes):
        if not is_function(node, LINEAR) or len(node.args) != 2 or node.kwargs:
            continue
        x, weight = map(_before_widening, node.args)
        real = fusion.tensor(weight)
        if x is None or real is None or type(real) not in (torch.nn.Parameter, torch.Tensor) or real.dim() != 2 \
                or real.dtype != value(x).dtype or any(written_between(wide, node) for wide in node.args) \
                or value(node).dtype != torch.float32:  # under torch.autocast
            continue
        with fusion.graph.inserting_before(node):
            replace_node(node, fusion.graph.call_function(float_linear, (x, weight)))
        count += 1
    return count


def _before_widening(node: Any) -> fx.Node | None:
    """The half-precision tensor of which this is the float32 copy."""
    named = is_method(node, "to", "type") and node.args[1:] == (torch.float32,)
    if not (named or (is_method(node, "float") and len(node.args) == 1)) or node.kwargs:
        return None
    x = node.args[0]
    return x if isinstance(value(x), torch.Tensor) and value(x).dtype in HALVES and value(node).dtype == torch.float32 else None
