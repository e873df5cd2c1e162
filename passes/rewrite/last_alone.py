"""Models that give logits of the last token alone, as nanoGPT does without targets: those of the wanted tokens instead.

Before, where ``_forward`` of ``PagedModel`` asks for the only row as often as rows are wanted (idx: (B,))::

    h = x[:, [-1]];  logits = linear(h, w)[0][zeros_like(idx)]

After::

    h = x[:, idx];   logits = linear(h, w)[0]

Why it is right: of one sequence alone, with idx its last token, both are equal. For another token t the new graph gives what
the model gives for the beginning up to t, whose last token it is, as t sees no later one. And ``check_tokens`` proves of the
new graph that a row of its logits follows from one row of x. The last row is taken by ``[-1]`` or ``-1:`` in the dimension of
the tokens; what is taken in another way, or is no row of a token, is refused.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.fake_values import compute_value
from quire.passes.fx import (
    ancestors,
    dims_of,
    erase_dead,
    is_function,
    is_tensor,
    items_of,
    placeholders,
    same_shape,
    source_name,
    value,
)

#: In the meta of a graph whose model gives logits of one token alone.
LAST_ALONE = "quire_last_alone"
_DO = "Let it return the logits of all tokens (1, T, vocabulary), or of the last one by hidden[:, [-1], :] before the head"


def rows_of_last(logits: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
    """(1, 1, V) logits of one token -> (B, V): inside a trace, for ``take_wanted_rows`` to find."""
    return logits[0][torch.zeros_like(logits_indices)]


def take_wanted_rows(gm: fx.GraphModule, tokens: Any) -> None:
    """Rewrite the graph, after raising, in place, if its model gives logits of one token alone. Raises UnsupportedAttention
    if that is not the last one, if what follows it does not run on several rows, or if nothing says which rows are wanted."""
    graph = gm.graph
    index = next((n for n in placeholders(graph) if source_name(n) == "L['logits_indices']"), None)
    found = [] if index is None else [n for n in graph.nodes if is_function(n, (operator.getitem,)) and is_function(
        n.args[1], (torch.zeros_like,)) and n.args[1].args == (index,)]
    if not found:
        _check_whole_row(graph, tokens)
        return
    (gather,), gm.meta[LAST_ALONE] = found, True
    rows: Any = gather.args[0]
    above = ancestors(rows)
    last = {n: items for n in above if (items := _of_last(n, tokens, index)) is not None}
    if not last:
        raise UnsupportedAttention(f"the model gives logits of one token alone, and not of the last row of its tokens. {_DO}.")
    env = value(index).fake_mode.shape_env
    guards, changed = len(env.guards), set[fx.Node]()
    for node in above:
        if node in last:
            node.args = (node.args[0], last[node])
        elif changed.isdisjoint(node.all_input_nodes):
            continue
        changed.add(node)
        try:
            compute_value(node)
        except Exception as error:
            raise _fails(node, f"{type(error).__name__}: {error}") from error
    if len(env.guards) > guards or not same_shape(value(rows).shape[:1], value(index).shape):
        raise _fails(rows, "it depends on their number")
    gather.replace_all_uses_with(rows)
    erase_dead(graph, [gather])
    graph.lint()
    gm.recompile()


def _check_whole_row(graph: fx.Graph, tokens: Any) -> None:
    for out in graph.output_node().all_input_nodes:
        if is_tensor(out) and value(out).dim() == 3 and str(value(out).shape[1]) == "1" and any(
                _of_last(n, tokens, None) is not None for n in ancestors(out)):
            raise UnsupportedAttention(
                "the model gives logits of the last token alone, which in a ragged row is that of the last sequence. "
                "quire.Engine asks for those of each one, and serves it; for steps by hand, let it return the logits of all "
                "tokens (1, T, vocabulary).")


def _fails(node: fx.Node, why: str) -> UnsupportedAttention:
    first = why.strip().partition("\n")[0]
    return UnsupportedAttention("the model gives logits of its last token alone, and what it computes them by does not run on "
                                f"the last tokens of several sequences ({node.name}: {first}). {_DO}.")


def _of_last(node: fx.Node, tokens: Any, index: fx.Node | None) -> tuple[Any, ...] | None:
    """Of a node that takes the last row of the tokens, and all of the other dimensions: the index that takes those of ``index``
    instead; None for any other node."""
    if not is_function(node, (operator.getitem,)) or not is_tensor(node) or not is_tensor(x := node.args[0]):
        return None
    shape, items = [str(n) for n in value(x).shape], items_of(node)
    dim = shape.index(str(tokens)) if shape.count(str(tokens)) == 1 else None
    at = next((at for at, d in dims_of(items, len(shape)) if d == dim), None)
    if at is None or not (items[at] == slice(-1, None) or (isinstance(items[at], (list, tuple)) and [*items[at]] == [-1])):
        return None
    others = [*items[:at], *items[at + 1 :]]
    return (*items[:at], index, *items[at + 1 :]) if all(i is Ellipsis or i == slice(None) for i in others) else None
