"""Fusion for decode batches: linear layers with their norm, SwiGLU and residual sum in one kernel (attn_ops/ops/small_linear.py).

Only the graph for small batches (at most ``MAX_TOKENS`` tokens) is rewritten; prefills keep Inductor's fusions and cuBLAS.

Before, for one half of a Llama layer::

    x1 = to(h, float32);  y = mul(w_n, to(mul(x1, rsqrt(add(mean(pow(x1, 2), -1), eps))), bf16))
    gate, up = split(linear(y, w), [N, N]);  z = mul(silu(gate), up);  h2 = add(h, linear(z, w_down))

After::

    z = small_linear(h, w, norm_weight=w_n, eps=eps, swiglu=True);  h2 = small_linear(z, w_down, residual=h)

Folded only where nobody else needs what disappears, and nothing is changed in place on the way, as the kernel reads its inputs
where the last of its parts stood; norms stay outside of layers with codes. Not matched, and left to Inductor:
norms spelled otherwise (Gemma's 1 + w, LayerNorm), other activations, weights that are not plain bf16 or fp16.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from quire.attn_ops.ops.small_linear import small_linear
from quire.attn_ops.tuning.small_linear import LinearShape
from quire.passes.fusions.base import Fusion
from quire.passes.fusions.match.norm import RMSNorm, match_rms_norm
from quire.passes.fx import erase_dead, is_function, is_method, value, written_between

_LINEAR = (F.linear, torch._C._nn.linear)
_MUL = (operator.mul, torch.mul)
_ADD = (operator.add, torch.add, operator.iadd)


def fuse_small_linear(fusion: Fusion) -> int:
    """Rewrite every linear layer that the kernel can run, with what folds into it; returns how many."""
    count = 0
    for node in list(fusion.graph.nodes):
        quantised = node.target is small_linear  # by passes/fusions/quantized_linear.py
        if quantised or node.op == "call_function" and node.target in _LINEAR and _runnable(node, fusion):
            _rewrite(node, fusion, node.args[7] if quantised else None)
            count += 1
    return count


def _runnable(node: fx.Node, fusion: Fusion) -> bool:
    if len(node.args) < 2:
        return False  # linear(x, weight=...)
    weight = node.args[1]
    tensor = fusion.tensor(weight)  # type: ignore[arg-type]
    return (tensor is not None and type(tensor) in (torch.nn.Parameter, torch.Tensor) and tensor.dim() == 2
            and tensor.dtype in (torch.bfloat16, torch.float16) and tensor.stride(1) == 1 and isinstance(node.args[0], fx.Node))


def _rewrite(node: fx.Node, fusion: Fusion, scale: Any) -> None:
    graph = fusion.graph
    x, weight = node.args[0], node.args[1]
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    norm = _norm(x) if scale is None else None  # the kernel for codes has no instructions to spare
    end, swiglu, residual = node, False, None
    product = _match_swiglu(node)
    if product is not None:
        end, swiglu = product, True
    total = _match_residual(end, value(node).dtype)
    if total is not None:
        end, residual = total
    if written_between(norm.x if norm else node, end):
        end, norm, swiglu, residual = node, None, False, None
    with graph.inserting_before(end):
        new = graph.call_function(small_linear, (
            norm.x if norm else x, weight, bias, norm.weight if norm else None, norm.eps if norm else 0.0, residual, swiglu,
            *([] if scale is None else [scale])))
    rows, columns = (fusion.tensor(weight) if scale is None else value(weight)).shape  # type: ignore[arg-type,union-attr]
    fusion.weights.small_linears.add(LinearShape(
        rows, columns, norm is not None, residual is not None, swiglu, value(node).dtype,
        None if scale is None else value(weight).dtype))
    new.meta = dict(end.meta)
    end.replace_all_uses_with(new)
    inputs = list(end.all_input_nodes)
    graph.erase_node(end)
    erase_dead(graph, inputs)


def _norm(node: Any) -> RMSNorm | None:
    """Llama's RMSNorm, if this layer alone needs its result."""
    norm = match_rms_norm(node)
    return norm if norm is not None and norm.weight is not None and norm.offset is None and len(node.users) == 1 else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _match_swiglu(node: fx.Node) -> fx.Node | None:
    """linear -> split in two halves -> silu(first) * second: the product node."""
    split = _only_user(node)
    if split is None or not is_function(split, (torch.split, torch.functional.split)) or len(split.users) != 2:
        return None
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    if dim not in (-1, value(node).dim() - 1):
        return None
    sizes = split.args[1]
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 2 or sizes[0] != sizes[1]:
        return None
    halves = sorted(split.users, key=lambda n: n.args[1])  # type: ignore[arg-type,return-value]
    gate, up = halves
    if [h.args[1] for h in halves] != [0, 1]:
        return None
    active, product = _only_user(gate), _only_user(up)
    if active is None or product is None or not is_method(active, "silu") or _only_user(active) is not product:
        return None
    plain = is_function(product, _MUL) and not product.kwargs
    return product if plain and set(product.all_input_nodes) == {active, up} else None


def _match_residual(node: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, fx.Node] | None:
    """result + something of the same shape and dtype, and no other user: (the sum, the something)."""
    total = _only_user(node)
    if total is None or not is_function(total, _ADD) or len(total.args) != 2 or total.kwargs:
        return None
    other = total.args[1] if total.args[0] is node else total.args[0]
    if not isinstance(other, fx.Node) or other is node or total.target is operator.iadd and total.args[0] is not node:
        return None
    mine, its = value(total), value(other)
    same = isinstance(its, torch.Tensor) and str(tuple(its.shape)) == str(tuple(mine.shape))
    return (total, other) if same and its.dtype == mine.dtype == dtype else None


__all__ = ["fuse_small_linear"]
