"""Rotations written with complex numbers, in real ones: Inductor fuses no operation on complex tensors.

Before (rotary embeddings of DeepSeek V2 and its relatives)::

    turned = torch.view_as_real(torch.view_as_complex(pairs) * freqs)        # pairs (..., R/2, 2) float32, freqs complex64

After, with ``table = torch.view_as_real(freqs)``, made once for all layers::

    a, b, c, d = pairs[..., 0], pairs[..., 1], table[..., 0], table[..., 1]
    turned = torch.stack([a * c - b * d, a * d + b * c], -1)

Left alone: other precisions, conjugated views, products that are read as complex numbers. Runs after ``rope``, which puts what
it can into the op that writes the cache.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from quire.passes.fusions.base import Fusion
from quire.passes.fx import (
    MUL,
    is_method,
    only_user,
    operands,
    placeholders,
    replace_node,
    storage_of,
    target_name,
    value,
    written_between,
    written_memory,
)


def real_products(fusion: Fusion) -> int:
    """Replace each product of complex numbers that is read as real ones."""
    graph, tables, count = fusion.graph, dict[fx.Node, fx.Node](), 0
    written = written_memory(graph)
    for node in list(graph.nodes):  # matched one after the other: what one reads may be another's product
        if (match := _match(node)) is None:
            continue
        pairs, freqs = match
        if storage_of(value(freqs)) in written or written_between(node.args[0], node):
            continue
        table = _table(graph, freqs, tables)
        with graph.inserting_before(node):
            places: list[Any] = [(x, (..., part)) for x in (pairs, table) for part in (0, 1)]
            a, b, c, d = (graph.call_function(operator.getitem, place) for place in places)
            ac, bd, ad, bc = (graph.call_function(operator.mul, of) for of in ((a, c), (b, d), (a, d), (b, c)))
            real, imaginary = graph.call_function(operator.sub, (ac, bd)), graph.call_function(operator.add, (ad, bc))
            new = graph.call_function(torch.stack, ([real, imaginary], -1))
        replace_node(node, new)
        count += 1
    return count


def _match(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """pairs and freqs of ``view_as_real(view_as_complex(pairs) * freqs)``."""
    product: Any = node.args[0] if is_method(node, "view_as_real") and len(node.args) == 1 else None
    if product is None or only_user(product) is not node:
        return None
    for numbers, freqs in operands(product, MUL):
        if is_method(numbers, "view_as_complex") and isinstance(freqs, fx.Node) and isinstance(numbers.args[0], fx.Node) \
                and all(_is_plain(value(x)) for x in (numbers, freqs, product)):
            return numbers.args[0], freqs
    return None


def _is_plain(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.complex64 and not x.is_conj()


def _table(graph: fx.Graph, freqs: fx.Node, tables: dict[fx.Node, fx.Node]) -> fx.Node:
    """``view_as_real(freqs)``, with what every layer does to freqs done to the real numbers."""
    if freqs not in tables:
        source, argument = freqs.args if len(freqs.args) == 2 and not freqs.kwargs else (None, None)
        if is_method(freqs, "unsqueeze") and type(argument) is int and argument >= 0 \
                or is_method(freqs, "to") and isinstance(argument, torch.device):
            of: Any = _table(graph, source, tables)  # type: ignore[arg-type]
            with graph.inserting_after(freqs):
                tables[freqs] = graph.call_method(target_name(freqs), (of, argument))
        else:
            with graph.inserting_after(freqs if freqs.op != "placeholder" else placeholders(graph)[-1]):
                tables[freqs] = graph.call_function(torch.view_as_real, (freqs,))
    return tables[freqs]
