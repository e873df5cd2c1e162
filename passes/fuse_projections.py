"""Fusion of sibling projections: linear layers with the same input become one (q/k/v, gate/up).

Before::

    q = linear(x, w_q, b_q);  k = linear(x, w_k, b_k);  v = linear(x, w_v, b_v)

After, with w = [w_q; w_k; w_v] in one tensor, of which w_q, w_k and w_v are now views::

    q, k, v = split(linear(x, w, b), [Nq, Nk, Nv], dim=-1)

One matrix product of N = Nq + Nk + Nv columns reads x once, fills the GPU better than three small ones, and saves two
launches. Not fused: a weight with a second user, weights of different dtype, siblings of which only some have a bias, tensor
subclasses (quantised weights, passes/quantized.py), siblings between which something is changed in place (it may be their
input).
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from passes.fusion import Fusion
from passes.graph_tools import compute_value, value, written_by

_LINEAR = (torch.nn.functional.linear, torch._C._nn.linear)


def fuse_projections(fusion: Fusion) -> int:
    """Fuse every group of sibling projections; returns the number of groups."""
    groups: dict[tuple[fx.Node, bool, torch.dtype], list[fx.Node]] = {}
    for node in fusion.graph.nodes:
        if node.op == "call_function" and node.target in _LINEAR and _fusable(node, fusion):
            weight = fusion.real[node.args[1]]
            groups.setdefault((node.args[0], _bias(node) is not None, weight.dtype), []).append(node)
    fused = 0
    for nodes in groups.values():
        if len(nodes) > 1 and len({n.args[1] for n in nodes}) == len(nodes) and not _mutates_between(nodes[0], nodes[-1]):
            _fuse(nodes, fusion)
            fused += 1
    return fused


def _bias(node: fx.Node) -> fx.Node | None:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")  # type: ignore[return-value]


def _mutates_between(first: fx.Node, last: fx.Node) -> bool:
    node = first
    while (node := node.next) is not last:
        if written_by(node):
            return True
    return False


def _fusable(node: fx.Node, fusion: Fusion) -> bool:
    if len(node.args) < 2:  # by keyword
        return False
    parts = [node.args[1]] + ([_bias(node)] if _bias(node) is not None else [])
    for part in parts:
        tensor = fusion.real.get(part)  # type: ignore[arg-type]
        if not isinstance(part, fx.Node) or len(part.users) != 1 or not isinstance(tensor, torch.Tensor):
            return False
        plain = type(tensor) in (torch.nn.Parameter, torch.Tensor)
        if not plain or not tensor.is_floating_point() or not tensor.is_contiguous():
            return False
    shapes = [tuple(fusion.real[p].shape) for p in parts]  # type: ignore[index]
    if len(shapes[0]) != 2 or shapes[1:] not in ([], [shapes[0][:1]]):
        return False
    return isinstance(node.args[0], fx.Node)


def _fuse(nodes: list[fx.Node], fusion: Fusion) -> None:
    graph, first = fusion.graph, nodes[0]
    weight_nodes = [n.args[1] for n in nodes]
    weights = [fusion.real[w] for w in weight_nodes]  # type: ignore[index]
    weight = fusion.add_weight(fusion.weights.fuse(weights), weight_nodes[0])  # type: ignore[arg-type]
    bias = None
    bias_nodes = [b for n in nodes if (b := _bias(n)) is not None]
    if bias_nodes:
        bias = fusion.add_weight(fusion.weights.fuse([fusion.real[b] for b in bias_nodes]), bias_nodes[0])
    with graph.inserting_before(first):
        product = graph.call_function(torch.nn.functional.linear, (first.args[0], weight, bias))
        parts = graph.call_function(torch.split, (product, [w.shape[0] for w in weights]), {"dim": -1})
        product.meta["nn_module_stack"] = parts.meta["nn_module_stack"] = first.meta.get("nn_module_stack")
        alone = value(first)
        with alone.fake_mode:  # as computing it gives, which takes milliseconds with symbolic sizes
            product.meta["example_value"] = alone.new_empty((*alone.shape[:-1], sum(w.shape[0] for w in weights)))
        compute_value(parts)
        outputs = [graph.call_function(operator.getitem, (parts, i)) for i in range(len(nodes))]
    for node, out in zip(nodes, outputs, strict=True):
        out.meta = dict(node.meta)
        node.replace_all_uses_with(out)
        graph.erase_node(node)


__all__ = ["fuse_projections"]
