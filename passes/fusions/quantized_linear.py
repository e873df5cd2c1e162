"""On a GPU, linear layers with weights quantized per row run in quire's kernels, which multiply the codes.

Before, where w is a tensor subclass that wraps codes (N, K) and one scale per row (torchao's Int8Tensor and Float8Tensor, as
weight-only quantization makes them)::

    y = linear(x, w, b)

After::

    y = small_linear(x, w.qdata, b, None, 0.0, None, False, w.scale.reshape(-1))

A step of few tokens then reads one byte per weight. Later passes fuse siblings (passes/fusions/projections.py), and SwiGLU and
residual sums (passes/fusions/small_linear.py). The codes are read from the parameter at every call, or are views of the fused
ones, so nothing is stored twice and in-place updates are seen.

Left to Inductor: quantized activations, groups smaller than a row, zero points, 4 bits, and CPUs, where its kernels are faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from quire.attn_ops.ops.small_linear import QUANTIZED_WEIGHT_DTYPES, small_linear
from quire.passes.fusions.base import Fusion
from quire.passes.fx import LINEAR, argument, compute_value, is_function, replace_node, value


def wanted(weight: torch.Tensor) -> bool:
    """Whether it is on a device where quire's kernels are the faster ones."""
    return weight.device.type == "cuda"


def by_rows(weight: Any) -> bool:
    """Whether a weight is codes times one scale per row, and nothing else."""
    if type(weight).__name__ not in ("Int8Tensor", "Float8Tensor") or not type(weight).__module__.startswith("torchao."):
        return False
    codes, scale, zero = weight.qdata, weight.scale, getattr(weight, "zero_point", None)
    return (weight.act_quant_kwargs is None and weight.dtype in (torch.bfloat16, torch.float16)
            and codes.dtype in QUANTIZED_WEIGHT_DTYPES and codes.dim() == 2
            and codes.shape == weight.shape and codes.stride() == (codes.shape[1], 1)
            and scale.dtype == torch.float32 and scale.shape == (codes.shape[0], 1)
            and (zero is None or not bool(zero.any()))
            and getattr(weight, "act_pre_scale", None) is None)  # of the activations (AWQ, SmoothQuant)


def quantized_linear(fusion: Fusion) -> int:
    """Rewrite every linear layer whose weight is quantized ``by_rows``."""
    count = 0
    for node in list(fusion.graph.nodes):
        weight = fusion.tensor(node.args[1]) if is_function(node, LINEAR) and len(node.args) > 1 else None
        if weight is not None and wanted(weight) and by_rows(weight):
            _rewrite(node)
            count += 1
    return count


def _rewrite(node: fx.Node) -> None:
    (x, weight), graph = node.args[:2], node.graph
    with graph.inserting_before(node):
        codes, scales = (graph.call_function(getattr, (weight, name)) for name in ("qdata", "scale"))
        codes.meta["example_value"], scales.meta["example_value"] = value(weight).qdata, value(weight).scale
        scale = compute_value(graph.call_method("reshape", (scales, -1)))
        replace_node(node, graph.call_function(small_linear, (
            x, codes, argument(node, 2, "bias"), None, 0.0, None, False, scale)))
