"""Numbers of tokens that a model makes itself, though it is given positions.

Llama 4 scales queries by their position, and takes ``arange`` of the row's length for it, whatever ``position_ids`` say. In a
ragged row only these are right, so they replace an ``arange`` that the model computes with. One that only picks rows of a
tensor stays: it means the row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.fake_values import made_like
from quire.passes.fx import (
    argument,
    longest_shown,
    module_path,
    placeholders,
    same_shape,
    source_name,
    storage_of,
    symbolic,
    target_name,
    value,
    written_memory,
)
from quire.passes.rewrite.length_rope import LIMITS

#: Functions and methods that pass numbers on as they are.
_PASSED_ON = frozenset({"view", "reshape", "unsqueeze", "squeeze", "expand", "flatten", "to", "long", "int", "contiguous",
                        "clone", "detach", "type", "transpose", "permute", "repeat_interleave", "expand_as", "view_as"})
#: Those that index a dimension: where the dimension and the index stand among the arguments.
_PICKING = {**dict.fromkeys(("index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add",
                             "index_add_", "index_copy", "index_copy_", "index_fill"), (1, 2)), "take_along_dim": (2, 1)}
_OWN = "quire_own_positions"


def use_given_positions(gm: fx.GraphModule, tokens: Any) -> int:
    """Replace each ``arange`` over the row (of size ``tokens``) that the model computes with, in place; returns how many. For a
    graph after raising. Raises UnsupportedAttention if the numbers are used both ways, or do not count 0, 1, 2, ..."""
    graph = gm.graph
    given = next((n for n in placeholders(graph) if n.users and "pos" in source_name(n) and _is_row(n, tokens)), None)
    if given is None:
        return 0  # a model that makes positions and reads none is refused: passes/verify/sites.py
    found = [n for n in graph.nodes if n.op == "call_function" and target_name(n) == "arange" and n.users
             and same_shape(value(n).shape, (tokens,))]
    replaced, written = list[str](), written_memory(graph) if found else set()
    for node in found:
        picks, counts = _uses(node)
        if not counts:
            continue
        where = module_path(node) or node.name
        start = argument(node, 0, "start", 0) if len(node.args) > 1 or "end" in node.kwargs else node.kwargs.get("start", 0)
        step = argument(node, 2, "step", 1)
        if not written.isdisjoint(storage_of(value(n)) for n in (node, given)):
            raise UnsupportedAttention(
                f"{where} numbers the tokens of the row ({node.format_node()}), and these numbers, or position_ids, are "
                "changed in place; in a ragged row every sequence has positions of its own. Compute with position_ids, and out "
                "of place.")
        if picks or start != 0 or step != 1:
            raise UnsupportedAttention(
                f"{where} numbers the tokens of the row ({node.format_node()}) " + (
                    "and uses the numbers both to compute and to pick rows" if picks else "other than 0, 1, 2, ...")
                + "; in a ragged row every sequence has positions of its own. Compute with position_ids instead.")
        with graph.inserting_before(node):
            flat = made_like(graph.call_method("reshape", (given, -1)), node)
            if value(flat).dtype != value(node).dtype:
                flat = made_like(graph.call_method("to", (flat, value(node).dtype)), node)
        node.replace_all_uses_with(flat)
        graph.erase_node(node)
        replaced.append(where)
    if replaced:
        gm.meta[_OWN] = replaced
        graph.lint()
        gm.recompile()
    return len(replaced)


def check_uncompiled(gm: fx.GraphModule) -> None:
    """Raises UnsupportedAttention for a graph that ``use_given_positions`` or ``choose_per_sequence`` had to rewrite, or that
    is the model's path up to some number of tokens only: uncompiled, those of the whole batch would decide."""
    if (shown := longest_shown(gm)) is not None:
        raise UnsupportedAttention(
            f"the model takes a path of its own, or cannot run, for some numbers of tokens ({shown[1]}), so an uncompiled "
            f"paged step of several sequences would be wrong. quire.Engine(model, max_model_len={shown[0]}) and "
            "torch.compile(model, backend='quire') serve sequences up to that length.")
    if gm.meta.get(LIMITS):
        raise UnsupportedAttention(
            "the model chooses its rotary frequencies by the longest sequence of the batch (longrope), so an uncompiled paged "
            "step would be wrong for the others. quire.Engine, quire.paged's generate() and torch.compile(model, "
            "backend='quire') choose them for each sequence.")
    own = gm.meta.get(_OWN)
    if own:
        raise UnsupportedAttention(
            f"{own[0]} numbers the tokens of the row itself, instead of using position_ids, so an uncompiled paged step "
            "would be wrong for all sequences but the first. quire.Engine and quire.paged's generate() compile the model, and "
            "serve it.")


def _is_row(node: fx.Node, tokens: Any) -> bool:
    x = value(node)
    return isinstance(x, torch.Tensor) and not x.is_floating_point() and (
        same_shape(x.shape, (tokens,)) or same_shape(x.shape, (1, tokens)))


def _uses(node: fx.Node) -> tuple[bool, bool]:
    """Whether the numbers, or whole numbers computed from them, pick rows; and whether anything is computed from them."""
    picks = counts = False
    todo, seen = [node], set()
    while todo:
        n = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        for user in n.users:
            name = target_name(user)
            data = user.args[0] if user.args else None
            if name in ("setitem", "index_put_") and isinstance(data, fx.Node):
                if data is n:
                    continue
                if not _indexes(user, name, n):  # written into a tensor: an inverse permutation, say
                    todo.append(data)
                    continue
            indexing = name in ("getitem", "setitem", "index_put", "index_put_", *_PICKING)
            if indexing and data is not n and _indexes(user, name, n):
                if _picks_rows(user, name, n):
                    picks = True
                else:
                    counts = True  # looks a table up
                continue
            adds_zero = name in ("add", "sub") and any(isinstance(a, int) and a == 0 for a in user.args)
            if not (name == "getitem" or name in _PASSED_ON or adds_zero):
                counts = True
            result = value(user)
            of_numbers = all(x in seen for x in user.all_input_nodes if isinstance(value(x), torch.Tensor))  # and constants
            if isinstance(result, torch.Tensor) and (not result.is_floating_point() or of_numbers):
                todo.append(user)
    return picks, counts


def _indexes(user: fx.Node, name: str, index: fx.Node) -> bool:
    """Whether ``index`` is among the indices of ``user``, and not its data."""
    at = _PICKING[name][1] if name in _PICKING else 1
    given = user.args[at] if len(user.args) > at else user.kwargs.get("indices" if name.startswith("index_put") else "index")
    return index in (given if isinstance(given, (tuple, list)) else (given,))


def _picks_rows(user: fx.Node, name: str, index: fx.Node) -> bool:
    """Whether ``user`` indexes a dimension as long as the row, or a multiple of it; a table's has a fixed size."""
    shape = value(user.args[0]).shape
    if name in _PICKING:
        dim = user.args[_PICKING[name][0]] if len(user.args) > _PICKING[name][0] else user.kwargs.get("dim")
        return symbolic(shape[dim]) if isinstance(dim, int) else True
    items = user.args[1] if isinstance(user.args[1], (tuple, list)) else [user.args[1]]
    if any(i is Ellipsis or i is None for i in items):
        return True
    return any(i is index and symbolic(shape[k]) for k, i in enumerate(items))
