"""Sibling projections, linear layers with the same input, become one (q/k/v, gate/up).

Before::

    q = linear(x, w_q, b_q);  k = linear(x, w_k, b_k);  v = linear(x, w_v, b_v)

After, with w = [w_q; w_k; w_v] in one tensor, of which w_q, w_k and w_v are now views::

    q, k, v = split(linear(x, w, b), [Nq, Nk, Nv], dim=-1)

One product reads x once, fills the GPU better than three small ones and saves two launches. Of quantized layers
(passes/fusions/quantized_linear.py) the codes are fused into one tensor and the scales into another.

Not fused: weights with a second user or that share memory (NOTE [Memory of fused parameters]), weights of different dtypes,
siblings of which only some have a bias, other tensor subclasses, siblings between which something is changed in place, and
LoRA's A and B of a layer whose adapters are part of its op, or have a launch together (passes/fusions/lora_linear.py,
lora_group.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from quire.attn_ops.ops.small_linear import small_linear
from quire.attn_ops.ops.small_linear_wide import is_int4, rows_of
from quire.passes.fake_values import compute_value
from quire.passes.fusions.base import Fusion, bias_of, columns
from quire.passes.fusions.match.lora import adapted_layers
from quire.passes.fx import LINEAR, is_function, is_method, only_user, replace_node, schema_arguments, value, written_between


class _Tensor(NamedTuple):
    """A tensor of a linear layer, and a node that has its fake value."""

    node: fx.Node
    real: torch.Tensor


#: "weight", and "bias" and "scale" where the layer has them.
_Tensors = dict[str, _Tensor]


def fuse_projections(fusion: Fusion) -> int:
    siblings: dict[Any, list[tuple[fx.Node, _Tensors]]] = {}
    of_adapters = {node for layer in adapted_layers(fusion) for node in layer.products}
    for node in fusion.graph.nodes:
        tensors = None if node in of_adapters else _tensors(node, fusion)
        if tensors is not None:
            weight, scale = tensors["weight"].real, tensors.get("scale")
            groups = len(scale.real) if scale is not None and is_int4(weight) else None
            # Under torch.autocast two layers of one dtype may give two.
            key = node.args[0], *tensors, weight.dtype, value(node).dtype, groups
            siblings.setdefault(key, []).append((node, tensors))
    return sum(_fuse(fusion, *zip(*group, strict=True)) for group in siblings.values() if len(group) > 1)


def _tensors(node: fx.Node, fusion: Fusion) -> _Tensors | None:
    """The tensors of a linear layer that can be fused; None for any other node."""
    if is_function(node, LINEAR) and len(node.args) > 1:
        nodes = {"weight": node.args[1], "bias": bias_of(node)}
        real = {name: _only_here(x, fusion) for name, x in nodes.items()}
    elif is_function(node, (small_linear,)) and (given := schema_arguments(node)).get("scale") is not None \
            and given["norm_weight"] is None and not given["swiglu"]:
        scale, name = given["scale"], "scale_and_zero"
        if not is_int4(value(given["weight"])):
            scale, name = scale.args[0] if is_method(scale, "reshape") and only_user(scale) is not None else None, "scale"
        nodes = {"weight": given["weight"], "bias": given["bias"], "scale": scale}
        real = {"weight": _part_only_here(given["weight"], "qdata", fusion), "bias": _only_here(given["bias"], fusion),
                "scale": _part_only_here(scale, name, fusion)}
    else:
        return None
    if nodes["bias"] is None:
        del nodes["bias"]
    found: _Tensors = {}
    for name, x in nodes.items():
        tensor = real[name]
        if not isinstance(node.args[0], fx.Node) or tensor is None or _rows(name, tensor) != value(node).shape[-1] \
                or not tensor.is_contiguous():
            return None
        found[name] = _Tensor(x, tensor)
    return found


def _rows(name: str, tensor: torch.Tensor) -> int | None:
    """Outputs of the layer that has this tensor; None for a tensor of another form."""
    if tensor.dim() == 3:  # scales and zeros of int4: (groups, N, 2)
        return tensor.shape[1]
    return rows_of(tensor) if tensor.dim() == (1 if name == "bias" else 4 if is_int4(tensor) else 2) else None


def _only_here(node: Any, fusion: Fusion) -> torch.Tensor | None:
    """The real tensor behind a placeholder with one user, if it is plain and of floating point."""
    tensor = fusion.tensor(node)
    if tensor is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_floating_point():
        return None
    return tensor if only_user(node) is not None else None


def _part_only_here(node: Any, name: str, fusion: Fusion) -> torch.Tensor | None:
    """The codes or the scales of a quantized weight that only one layer reads."""
    weight: Any = node.args[0] if is_function(node, (getattr,)) and node.args[1] == name else None
    if weight is None or only_user(node) is None or len(weight.users) != 2:  # its codes and its scales
        return None
    tensor = getattr(fusion.tensor(weight), name, None)
    return tensor if type(tensor) in (torch.Tensor, torch.nn.Parameter) else None


def _fuse(fusion: Fusion, nodes: tuple[fx.Node, ...], tensors: tuple[_Tensors, ...]) -> bool:
    """Fuse the siblings, unless that could change a result or other tensors."""
    graph, first = fusion.graph, nodes[0]
    groups = {name: [each[name].real for each in tensors] for name in tensors[0]}
    if len(set(map(id, groups["weight"]))) < len(nodes) or written_between(first, nodes[-1]) \
            or not all(map(fusion.weights.can_fuse, groups.values())):
        return False
    sizes = [rows_of(weight) for weight in groups["weight"]]
    whole = {name: fusion.add_weight(fusion.weights.fuse(group), tensors[0][name].node) for name, group in groups.items()}
    x = first.args[0]
    with graph.inserting_before(first):
        if "scale" in whole:
            scale, widths = whole["scale"], [sizes]
            if not is_int4(groups["weight"][0]):
                scale, widths = compute_value(graph.call_method("reshape", (scale, -1))), []
            product = graph.call_function(small_linear, (
                x, whole["weight"], whole.get("bias"), None, 0.0, None, False, scale, *widths))
        else:
            product = graph.call_function(torch.nn.functional.linear, (x, whole["weight"], whole.get("bias")))
        product.meta["nn_module_stack"] = first.meta.get("nn_module_stack")
        like = value(first)
        with like.fake_mode:  # what computing it gives, which takes milliseconds with symbolic sizes
            product.meta["example_value"] = like.new_empty((*like.shape[:-1], sum(sizes)))
        parts = columns(product, sizes)
    for node, part in zip(nodes, parts, strict=True):
        replace_node(node, part)
    return True
