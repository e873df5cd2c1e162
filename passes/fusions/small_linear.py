"""For small batches, linear layers run with their norm, SwiGLU and residual sum in one kernel (attn_ops/ops/small_linear.py).

Only the graph for at most ``MAX_TOKENS`` tokens is rewritten; others keep Inductor's fusions and cuBLAS, but around layers with
LoRA's adapters (passes/fusions/lora_linear.py).

Before, for one half of a Llama layer::

    x1 = to(h, float32);  y = mul(w_n, to(mul(x1, rsqrt(add(mean(pow(x1, 2), -1), eps))), bf16))
    gate, up = split(linear(y, w), [N, N]);  z = mul(silu(gate), up);  h2 = add(h, linear(z, w_down))

After::

    z = small_linear(h, w, norm_weight=w_n, eps=eps, swiglu=True);  h2 = small_linear(z, w_down, residual=h)

So does GELU in its tanh form in the place of silu (Gemma), but for layers with adapters.

An operation is folded only if nothing else reads its result, and if nothing is changed in place on the way: the kernel reads
its inputs where the last folded operation stood. Norms stay outside layers with codes. Left to Inductor: other norms (Gemma's
1 + w, LayerNorm), other activations, weights that are not plain bf16 or fp16.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from quire.attn_ops.ops.lora_linear import lora_linear
from quire.attn_ops.ops.small_linear import small_linear
from quire.attn_ops.ops.small_linear_wide import is_int4, rows_of
from quire.attn_ops.tuning.launch_config import INT4
from quire.attn_ops.tuning.small_linear import LinearShape
from quire.passes.fusions.base import Fusion, bias_of
from quire.passes.fusions.match.norm import RMSNorm, match_rms_norm
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
    schema_arguments,
    value,
    written_between,
)


def fuse_small_linear(fusion: Fusion) -> int:
    """Rewrite every linear layer that the kernel can run, with what folds into it."""
    count = 0
    for node in list(fusion.graph.nodes):
        if is_function(node, (small_linear,)):  # by passes/fusions/quantized_linear.py
            given = schema_arguments(node)
            fold(fusion, node, given["weight"], given["bias"], given["scale"], given.get("widths", ()))
        elif is_function(node, LINEAR) and len(node.args) > 1 and is_half(weight := fusion.tensor(node.args[1])) \
                and is_plain(node, weight):
            fold(fusion, node, node.args[1], bias_of(node))
        else:
            continue
        count += 1
    return count


def is_half(weight: torch.Tensor | None) -> bool:
    """Whether the kernels take this tensor as a weight without scales."""
    return weight is not None and type(weight) in (torch.nn.Parameter, torch.Tensor) and weight.dim() == 2 \
        and weight.stride(1) == 1 and weight.dtype in (torch.bfloat16, torch.float16)


def is_plain(node: fx.Node, weight: torch.Tensor | None) -> bool:
    """Whether a linear layer of the weight (N, K) has input and result of its dtype (``torch.autocast`` casts on the way), and
    N numbers as its bias, if any (one for all is broadcast): what the kernels take."""
    bias = bias_of(node)
    return weight is not None and value(node.args[0]).dtype == value(node).dtype == weight.dtype and (
        bias is None or value(bias).dtype == weight.dtype and tuple(value(bias).shape) == (weight.shape[0],))


def fold(fusion: Fusion, node: fx.Node, weight: Any, bias: Any, scale: Any = None, widths: Any = (),
         adapters: Sequence[Any] = ()) -> None:
    """Put a linear layer ``node``, and the norm, SwiGLU and residual sum around it that fold into it, into one op."""
    x, dtype = node.args[0], value(node).dtype
    norm = _norm(x) if scale is None else None  # the kernel for codes has no instructions to spare
    real = fusion.tensor(weight)
    held = value(weight) if real is None else real
    product, gelu = (None, False) if is_int4(held) else _gated(node)
    if gelu and adapters:
        product, gelu = None, False
    total, residual = _residual(product or node, dtype) or (product or node, None)
    end, swiglu = total, product is not None
    if written_between(norm.x if norm else node, end):
        end, norm, swiglu, gelu, residual = node, None, False, False, None
    with fusion.graph.inserting_before(end):
        new = fusion.graph.call_function(lora_linear if adapters else small_linear, (
            norm.x if norm else x, weight, bias, norm.weight if norm else None, norm.eps if norm else 0.0, residual, swiglu,
            *adapters, *([] if scale is None else [scale]), *([widths] if widths else [])), {"gelu": True} if gelu else {})
    replace_node(end, new)
    codes = None if scale is None else INT4 if is_int4(held) else held.dtype
    fusion.weights.small_linears.add(LinearShape(
        rows_of(held), value(x).shape[-1], norm is not None, residual is not None, swiglu, dtype, codes))


def _norm(node: Any) -> RMSNorm | None:
    """Llama's RMSNorm, if only this layer needs its result."""
    norm = match_rms_norm(node)
    return norm if norm and norm.weight is not None and norm.offset is None and only_user(node) is not None else None


def _gated(node: fx.Node) -> tuple[fx.Node | None, bool]:
    """The product in linear -> split in two halves -> silu(first) * second, if nothing else reads what is between; and whether
    it has GELU, in its tanh form, in the place of silu."""
    none, split = (None, False), only_user(node)
    if split is None or not _is_in_halves(split, node) or len(split.users) != 2 \
            or not all(is_function(n, (operator.getitem,)) for n in split.users):
        return none
    gate, up = sorted(split.users, key=lambda n: n.args[1])  # type: ignore[arg-type,return-value]
    active, product = only_user(gate), only_user(up)
    if (gate.args[1], up.args[1]) != (0, 1) or active is None or only_user(active) is not product \
            or (active, up) not in operands(product, MUL):
        return none
    gelu = is_method(active, "gelu") and argument(active, 1, "approximate", "none") == "tanh"
    return (product, gelu) if gelu or is_method(active, "silu") else none


def _is_in_halves(split: fx.Node, node: fx.Node) -> bool:
    """Whether ``split`` cuts ``node`` into two equal parts along its last dimension."""
    width = value(node).shape[-1]
    if not is_method(split, "chunk", "split") or argument(split, 2, "dim", 0) not in (-1, value(node).dim() - 1):
        return False
    if is_method(split, "chunk"):
        return argument(split, 1, "chunks") == 2 and width % 2 == 0
    sizes = argument(split, 1, "split_size_or_sections", argument(split, 1, "split_size"))
    return 2 * sizes == width if isinstance(sizes, int) else isinstance(sizes, (list, tuple)) and [*sizes] == [width // 2] * 2


def _residual(node: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, fx.Node] | None:
    """(sum, other operand), if the only user of the node adds it to a tensor of its shape and ``dtype``."""
    total = only_user(node)
    orders = operands(total, ADD) or operands(total, (operator.iadd,))[:1]  # x += node changes x
    other = next((b for a, b in orders if a is node and b is not node and is_tensor(b)), None)
    if total is None or other is None or not same_shape(value(total).shape, value(other).shape):
        return None
    return (total, other) if value(other).dtype == value(total).dtype == dtype else None
