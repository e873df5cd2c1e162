"""Numbers of tokens that a transformers model makes itself, though it is given positions.

Llama 4 scales queries by their position, and takes ``arange`` of the row's length for it, whatever ``position_ids`` say. Run on
a sequence from its start the two are the same. In a ragged row only ``position_ids`` are right, so they take the place of an
``arange`` that the model computes with. One that only picks rows of a tensor stays: it means the row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.fx import compute_value, module_path, placeholders, source_name, value

#: What neither computes with a number nor picks by it: (functions and methods by name).
_PASSED_ON = frozenset({"view", "reshape", "unsqueeze", "squeeze", "expand", "flatten", "to", "long", "int", "contiguous",
                        "clone", "detach", "type", "transpose", "permute", "repeat_interleave", "expand_as", "view_as"})
_PICKING = frozenset({"index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_",
                      "index_copy", "index_copy_", "index_put", "index_put_", "take_along_dim", "index_fill", "setitem"})


def use_given_positions(gm: fx.GraphModule, tokens: Any) -> int:
    """Replace each ``arange`` over the row that the model computes with; returns how many.

    Args:
        gm: after raising, when what only served a mask is gone. Changed in place.
        tokens: the size of the token dimension.

    Raises:
        UnsupportedAttention: the numbers are used both ways, or do not count 0, 1, 2, ...
    """
    graph = gm.graph
    given = next((n for n in placeholders(graph) if n.users and "pos" in source_name(n) and _is_row(n, tokens)), None)
    if given is None:
        return 0  # whoever makes positions, and reads none, is refused: passes/verify/sites.py
    found = [n for n in graph.nodes if n.op == "call_function" and getattr(n.target, "__name__", "") == "arange" and n.users
             and tuple(map(str, value(n).shape)) == (str(tokens),)]
    replaced = 0
    for node in found:
        picks, counts = _uses(node)
        if not counts:
            continue
        where = module_path(node) or node.name
        start, step = _start_and_step(node)
        if picks or start != 0 or step != 1:
            raise UnsupportedAttention(
                f"{where} numbers the tokens of the row ({node.format_node()}) " + (
                    "and uses the numbers both to compute and to pick rows" if picks else "other than 0, 1, 2, ...")
                + "; in a ragged row every sequence has positions of its own, and quire cannot tell how to put them in.")
        with graph.inserting_before(node):
            flat = graph.call_method("reshape", (given, -1))
            compute_value(flat)
            if value(flat).dtype != value(node).dtype:
                flat = graph.call_method("to", (flat, value(node).dtype))
                compute_value(flat)
        flat.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        node.replace_all_uses_with(flat)
        graph.erase_node(node)
        replaced += 1
    if replaced:
        graph.lint()
        gm.recompile()
    return replaced


def _is_row(node: fx.Node, tokens: Any) -> bool:
    x = value(node)
    return isinstance(x, torch.Tensor) and not x.is_floating_point() and tuple(map(str, x.shape)) in (
        ("1", str(tokens)), (str(tokens),))


def _start_and_step(node: fx.Node) -> tuple[Any, Any]:
    numbers = list(node.args)
    start = node.kwargs.get("start", numbers[0] if len(numbers) > 1 else 0)
    return start, node.kwargs.get("step", numbers[2] if len(numbers) > 2 else 1)


def _uses(node: fx.Node) -> tuple[bool, bool]:
    """Are the numbers used to pick rows, and are they used to compute?"""
    picks = counts = False
    todo, seen = [node], set()
    while todo:
        n = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        for user in n.users:
            name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
            if name == "getitem" and user.args[0] is n or name in _PASSED_ON and user.args[0] is n:
                todo.append(user)
            elif name in _PICKING or name == "getitem":
                picks = True
            elif name in ("add", "sub") and _adds_zero(user):
                todo.append(user)
            else:
                counts = True
    return picks, counts


def _adds_zero(node: fx.Node) -> bool:
    return any(isinstance(a, int) and a == 0 for a in node.args)


__all__ = ["use_given_positions"]
