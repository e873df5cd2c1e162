"""On a GPU, linear layers with quantized weights run in quire's kernels, which multiply the codes.

Before, where w is a tensor subclass that wraps codes (N, K) and one scale per row (torchao's Int8Tensor and Float8Tensor, as
weight-only quantization makes them)::

    y = linear(x, w, b)

After::

    y = small_linear(x, w.qdata, b, None, 0.0, None, False, w.scale.reshape(-1))

Of int4 weights in PyTorch's packed layout, with groups of 128 columns or more (torchao's Int4TilePackedTo4dTensor)::

    y = small_linear(x, w.qdata, b, None, 0.0, None, False, w.scale_and_zero)

Later passes fuse siblings (passes/fusions/projections.py), and SwiGLU and residual sums (passes/fusions/small_linear.py). The
codes are read from the parameter at every call, or are views of fused ones, so in-place updates are seen.

Left to Inductor or torchao: quantized activations, groups smaller than a row or, of int4, than 128 columns, zero points of
int8, other layouts of int4, int4 on GPUs of an architecture on which its kernel was not measured, and CPUs, where Inductor's
kernels are faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from quire.attn_ops.kernels import host
from quire.attn_ops.ops.small_linear import QUANTIZED_WEIGHT_DTYPES, small_linear
from quire.attn_ops.ops.small_linear_wide import INT4_COLUMNS
from quire.attn_ops.tuning.launch_config import INT4, measured
from quire.passes.fake_values import compute_value
from quire.passes.fusions.base import Fusion, bias_of
from quire.passes.fusions.small_linear import is_plain
from quire.passes.fx import LINEAR, is_function, replace_node, value


def wanted(weight: torch.Tensor) -> bool:
    """Whether it is on a device where quire's kernels are the faster ones."""
    return weight.device.type == "cuda"


def wanted_int4(weight: torch.Tensor) -> bool:
    """Whether quire's kernel for int4 was measured on that kind of GPU, or on one of its architecture, an H200."""
    return measured(weight.device, INT4) or host.is_hopper(weight.device)


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


def packed_int4(weight: Any) -> bool:
    """Whether a weight is int4 as the kernel reads it: whole tiles, and groups that end with them."""
    if type(weight).__name__ != "Int4TilePackedTo4dTensor" or not type(weight).__module__.startswith("torchao.") \
            or weight.dim() != 2 or getattr(weight, "act_pre_scale", None) is not None:
        return False
    codes, scales, (rows, columns) = weight.qdata, weight.scale_and_zero, weight.shape
    group = weight.block_size[-1]
    return (rows % 8 == 0 and columns % INT4_COLUMNS == 0 and group % INT4_COLUMNS == 0
            and codes.dtype == torch.int32 and codes.is_contiguous() and codes.dim() == 4
            and codes.shape[0] == rows // 8 and codes.shape[2:] == (32, 4)
            and scales.dtype == torch.bfloat16 and scales.is_contiguous()
            and scales.shape == (codes.shape[1] * INT4_COLUMNS // group, rows, 2))


def quantized_linear(fusion: Fusion) -> int:
    count = 0
    for node in list(fusion.graph.nodes):
        weight = fusion.tensor(node.args[1]) if is_function(node, LINEAR) and len(node.args) > 1 else None
        if weight is None or not wanted(weight) or not is_plain(node, weight):
            continue
        if by_rows(weight):
            _rewrite(node, "scale")
        elif wanted_int4(weight) and packed_int4(weight):
            _rewrite(node, "scale_and_zero")
        else:
            continue
        count += 1
    return count


def _rewrite(node: fx.Node, name: str) -> None:
    """``name``: of the weight's scales."""
    (x, weight), graph = node.args[:2], node.graph
    with graph.inserting_before(node):
        codes, scale = (graph.call_function(getattr, (weight, part)) for part in ("qdata", name))
        codes.meta["example_value"], scale.meta["example_value"] = value(weight).qdata, getattr(value(weight), name)
        if name == "scale":
            scale = compute_value(graph.call_method("reshape", (scale, -1)))
        replace_node(node, graph.call_function(small_linear, (
            x, codes, bias_of(node), None, 0.0, None, False, scale)))
