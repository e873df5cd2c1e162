"""On a GPU, linear layers with weights quantised row by row run in quire's own kernels, which multiply the codes.

Before, where w is a tensor subclass that wraps codes (N, K) and a scale for each row (torchao's Int8Tensor and Float8Tensor,
as weight-only quantisation makes them)::

    y = linear(x, w, b)

After::

    y = small_linear(x, w.qdata, b, None, 0.0, None, False, w.scale.reshape(-1))

A step of few tokens then reads a byte a weight; siblings are fused (passes/fusions/projections.py), and SwiGLU and residual sums
go into the kernel (passes/fusions/small_linear.py). Inductor makes ``_weight_int8pack_mm`` of such a layer with int8, for any
number of tokens. Everything else is left to it: activations that are quantised too, groups smaller than a row, zero points, 4
bits. On a CPU its kernels are better.

The codes are read off the parameter at every call, or are views of the fused ones, so nothing is stored twice, and an update in
place is seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from quire.attn_ops.ops.small_linear import QUANTIZED_WEIGHT_DTYPES, small_linear
from quire.passes.fusions.base import Fusion
from quire.passes.fx import compute_value, value

_LINEAR = (torch.nn.functional.linear, torch._C._nn.linear)
_KINDS = ("Int8Tensor", "Float8Tensor")


def wanted(weight: torch.Tensor) -> bool:
    """Is it on a device where our kernels are the faster ones?"""
    return weight.device.type == "cuda"


def by_rows(weight: Any) -> bool:
    """Is it codes times a scale for each row, and nothing else?"""
    if type(weight).__name__ not in _KINDS or not type(weight).__module__.startswith("torchao."):
        return False
    codes, scale, zero = weight.qdata, weight.scale, getattr(weight, "zero_point", None)
    return (weight.act_quant_kwargs is None and weight.dtype in (torch.bfloat16, torch.float16) and codes.dtype in QUANTIZED_WEIGHT_DTYPES
            and codes.dim() == 2 and codes.shape == weight.shape and codes.stride() == (codes.shape[1], 1)
            and scale.dtype == torch.float32 and scale.shape == (codes.shape[0], 1)
            and (zero is None or not bool(zero.any()))
            and getattr(weight, "act_pre_scale", None) is None)  # of the activations (AWQ, SmoothQuant)


def quantized_linear(fusion: Fusion) -> int:
    """Rewrite every linear layer whose weight is quantised ``by_rows``; returns how many."""
    count = 0
    for node in list(fusion.graph.nodes):
        if node.op != "call_function" or node.target not in _LINEAR or len(node.args) < 2:
            continue
        weight = fusion.tensor(node.args[1])
        if weight is not None and wanted(weight) and by_rows(weight):
            _rewrite(fusion.graph, node)
            count += 1
    return count


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    x, weight = node.args[:2]
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    with graph.inserting_before(node):
        codes = graph.call_function(getattr, (weight, "qdata"))
        scales = graph.call_function(getattr, (weight, "scale"))
        scale = graph.call_method("reshape", (scales, -1))
        codes.meta["example_value"], scales.meta["example_value"] = value(weight).qdata, value(weight).scale
        compute_value(scale)
        new = graph.call_function(small_linear, (x, codes, bias, None, 0.0, None, False, scale))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


__all__ = ["by_rows", "quantized_linear", "wanted"]
