"""Fusion of sibling projections: linear layers with the same input become one (q/k/v, gate/up).

Before::

    q = linear(x, w_q, b_q);  k = linear(x, w_k, b_k);  v = linear(x, w_v, b_v)

After, with w = [w_q; w_k; w_v] in one tensor, of which w_q, w_k and w_v are now views::

    q, k, v = split(linear(x, w, b), [Nq, Nk, Nv], dim=-1)

One matrix product of N = Nq + Nk + Nv columns reads x once, fills the GPU better than three small ones, and saves two
launches. Layers with codes and a scale for each row (passes/fusions/quantized_linear.py) are fused alike: their codes become views of
one tensor, and their scales of another. Not fused: a weight with a second user, weights of different dtype, siblings of which
only some have a bias, other tensor subclasses, siblings between which something is changed in place (it may be their input).
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import fx

from quire.attn_ops.ops.small_linear import small_linear
from quire.passes.fusions.base import Fusion
from quire.passes.fx import compute_value, erase_dead, is_function, value, written_between

_LINEAR = (torch.nn.functional.linear, torch._C._nn.linear)


class _Projection(NamedTuple):
    """A linear layer: the node, and its tensors by name, each with a node that has its fake value."""

    node: fx.Node
    tensors: dict[str, tuple[fx.Node, torch.Tensor]]

    @property
    def weight(self) -> torch.Tensor:
        return self.tensors["weight"][1]


def fuse_projections(fusion: Fusion) -> int:
    """Fuse every group of sibling projections; returns the number of groups."""
    groups: dict[tuple[fx.Node, tuple[str, ...], torch.dtype], list[_Projection]] = {}
    for node in fusion.graph.nodes:
        found = _projection(node, fusion)
        if found is not None:
            groups.setdefault((node.args[0], tuple(found.tensors), found.weight.dtype), []).append(found)
    fused = 0
    for group in groups.values():
        nodes = [each.node for each in group]
        different = len({id(each.weight) for each in group}) == len(group)
        if len(group) > 1 and different and not written_between(nodes[0], nodes[-1]):
            _fuse(group, fusion)
            fused += 1
    return fused


def _projection(node: fx.Node, fusion: Fusion) -> _Projection | None:
    """``node`` as one that can be fused, or None."""
    if node.op != "call_function" or len(node.args) < 2 or not isinstance(node.args[0], fx.Node):
        return None
    parts: dict[str, tuple[object, str]]
    if node.target in _LINEAR:
        parts = {"weight": (node.args[1], ""), "bias": (node.args[2] if len(node.args) > 2 else node.kwargs.get("bias"), "")}
    elif node.target is small_linear and len(node.args) == 8 and node.args[3] is None and not node.args[6]:
        parts = {"weight": (node.args[1], "qdata"), "bias": (node.args[2], ""), "scale": (_viewed(node.args[7]), "scale")}
    else:
        return None
    tensors = {}
    for name, (part, attribute) in parts.items():
        if part is None and name == "bias":
            continue
        tensor = _only_here(part, attribute, fusion)
        if not isinstance(part, fx.Node) or tensor is None or tensor.dim() != (1 if name == "bias" else 2) \
                or tensor.shape[0] != value(node).shape[-1]:
            return None
        tensors[name] = (part, tensor)
    return _Projection(node, tensors)


def _viewed(node: object) -> object:
    """The argument of a reshape that nobody else needs."""
    return node.args[0] if isinstance(node, fx.Node) and node.target == "reshape" and len(node.users) == 1 else None


def _only_here(node: object, attribute: str, fusion: Fusion) -> torch.Tensor | None:
    """The real tensor behind a placeholder, or behind an attribute of a quantised one, that is needed in this one place."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    if attribute:
        of = node.args[0] if is_function(node, (getattr,)) and node.args[1] == attribute else None
        if not isinstance(of, fx.Node) or len(of.users) != 2:  # its codes and its scale
            return None
        tensor = getattr(fusion.real.get(of), attribute, None)
    else:
        tensor = fusion.real.get(node)
    if not isinstance(tensor, torch.Tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return tensor if tensor.is_contiguous() and (attribute or tensor.is_floating_point()) else None


def _fuse(group: list[_Projection], fusion: Fusion) -> None:
    graph, first = fusion.graph, group[0].node
    sizes = [each.weight.shape[0] for each in group]
    whole = {name: fusion.add_weight(fusion.weights.fuse([each.tensors[name][1] for each in group]), like)
             for name, (like, _) in group[0].tensors.items()}
    with graph.inserting_before(first):
        if "scale" in whole:
            scale = graph.call_method("reshape", (whole["scale"], -1))
            compute_value(scale)
            product = graph.call_function(small_linear, (
                first.args[0], whole["weight"], whole.get("bias"), None, 0.0, None, False, scale))
        else:
            product = graph.call_function(torch.nn.functional.linear, (first.args[0], whole["weight"], whole.get("bias")))
        parts = graph.call_function(torch.split, (product, sizes), {"dim": -1})
        product.meta["nn_module_stack"] = parts.meta["nn_module_stack"] = first.meta.get("nn_module_stack")
        alone = value(first)
        with alone.fake_mode:  # as computing it gives, which takes milliseconds with symbolic sizes
            product.meta["example_value"] = alone.new_empty((*alone.shape[:-1], sum(sizes)))
        compute_value(parts)
        outputs = [graph.call_function(operator.getitem, (parts, i)) for i in range(len(group))]
    for each, out in zip(group, outputs, strict=True):
        out.meta = dict(each.node.meta)
        each.node.replace_all_uses_with(out)
        inputs = [n for n in each.node.all_input_nodes if n.op != "placeholder"]
        graph.erase_node(each.node)
        if "scale" in whole:
            erase_dead(graph, inputs)


__all__ = ["fuse_projections"]
