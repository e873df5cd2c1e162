"""A matrix that LoRA adapts as a parameter (PEFT's ``target_parameters``; a router's, say) where it multiplies rows.

Before, as ``passes/capture/expert_lora.py`` traces the module that has it::

    y = linear(x, to(adapted_matrix(W, [A ...], [B ...], [scaling ...], bits), float32))

After::

    y = lora_rows(linear(x, to(W, float32)), x, [A ...], [B ...], [scaling ...], bits)

PEFT adds ``B A * scaling`` to W, rounded to its dtype, in each forward; the small products are added here, for each token those
of its own adapters. Refused: any use of the matrix but products with rows, as it is or cast.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.library import define_op
from quire.attn_ops.ops.lora_rows import lora_rows
from quire.passes.fake_values import made_like
from quire.passes.fx import LINEAR, is_function, module_path, torch_name, value

#: Stands in a trace for ``weight`` (N, K) with adapters, given as of ``lora_rows``; it has no code.
adapted_matrix = define_op("adapted_matrix(Tensor weight, Tensor[] a, Tensor[] b, float[] scaling, int[] bits) -> Tensor",
                           cpu=None, cuda=None, fake=lambda weight, *adapters: weight.new_empty(weight.shape))


def multiply_adapted_matrices(gm: fx.GraphModule) -> int:
    """Rewrite a traced graph, in place; returns the number of products. Raises UnsupportedAttention: another use is met."""
    products = 0
    for node in list(gm.graph.nodes):
        if not is_function(node, (adapted_matrix,)):
            continue
        weight, *adapters = node.args
        found = _products(node)
        node.replace_all_uses_with(weight)
        gm.graph.erase_node(node)
        for product in found:
            _add(gm.graph, product, adapters)
        products += len(found)
    return products


def _products(matrix: fx.Node) -> list[fx.Node]:
    found = []
    for user in matrix.users:
        if torch_name(user) in ("to", "type", "float") and user.args[0] is matrix and matrix not in user.args[1:]:
            found += _products(user)
        elif is_function(user, LINEAR) and user.args[1] is matrix and user.args[0] is not matrix and user.kwargs == {}:
            found.append(user)
        else:
            raise UnsupportedAttention(
                f"{module_path(user) or user.name} computes otherwise with a parameter that an adapter adapts (PEFT's "
                "target_parameters) than to multiply rows by it: merge the adapter with merge_adapter(), or name the linear "
                'layers (target_modules=["q_proj", "v_proj", ...])')
    return found


def _add(graph: fx.Graph, product: fx.Node, adapters: list[Any]) -> None:
    x, flat, new = product.args[0], value(product).dim() == 2, list[fx.Node]()
    with graph.inserting_before(product.next):
        if flat:
            new += graph.call_method("unsqueeze", (product, 0)), graph.call_method("unsqueeze", (x, 0))
        new.append(graph.call_function(lora_rows, (*(new or (product, x)), *adapters)))
        if flat:
            new.append(graph.call_method("squeeze", (new[-1], 0)))
    for node in new:
        made_like(node, product)
    product.replace_all_uses_with(new[-1], delete_user_cb=lambda user: user not in new)
