"""Models that give logits of the last token alone, as nanoGPT does without targets: those of the wanted tokens instead.

Before, where ``_forward`` of ``PagedModel`` asks for the only row as often as rows are wanted (idx: (B,))::

    h = x[:, [-1]];  logits = linear(h, w)[0][zeros_like(idx)]

After::

    h = x[:, idx];   logits = linear(h, w)[0]

Why it is right: of one sequence alone, with idx its last token, both are equal. For another token t the new graph gives what
the model gives for the beginning up to t, whose last token it is, as t sees no later one. And ``check_tokens`` proves of the
new graph that a row of its logits follows from one row of x. The last row is taken by ``[-1]``, ``-1:`` or ``narrow`` in the
dimension of the T tokens, also with T - 1 for -1; what is taken in another way, or is no row of a token, is refused.

A slice is a view in the model, and a copy in the new graph. So from there on its memory may be changed only through the slice,
and only if nothing but the slice and what is computed of it reads that memory. And some operations give a view of one row, and
a copy of several (``contiguous``): where anything is changed in place from the last row on, they are refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.fake_values import compute_value
from quire.passes.fx import (
    ancestors,
    argument,
    dims_of,
    erase_dead,
    is_function,
    is_tensor,
    items_of,
    placeholders,
    same_shape,
    source_name,
    storage_of,
    symbolic,
    torch_name,
    value,
    written_by,
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
    last = {n: taken for n in ancestors(rows) if (taken := _of_last(n, tokens, index)) is not None}
    if not last:
        raise UnsupportedAttention("the model gives logits of one token alone, which is not the last one, or is taken in a way "
                                   f"that quire does not follow. {_DO}.")
    env, nodes = value(index).fake_mode.shape_env, list(graph.nodes)
    after = nodes[nodes.index(next(iter(last))) : nodes.index(gather)]  # what follows reads the result of ``gather`` alone
    guards, changed, read = len(env.guards), set[fx.Node](), [x for n in last for x in n.all_input_nodes]
    views = _views(after, [n for n, (_, copies) in last.items() if not copies]) if any(map(written_by, after)) else None
    for node in after:
        if node in last:
            node.op, node.target, node.args, node.kwargs = "call_function", operator.getitem, last[node][0], {}
        elif changed.isdisjoint(node.all_input_nodes):
            continue
        changed.add(node)
        before = value(node)
        try:
            now = value(compute_value(node))
        except Exception as error:
            raise _fails(node, f"{type(error).__name__}: {error}") from error
        if isinstance(now, torch.Tensor) and now.dtype != before.dtype:  # the node is within torch.autocast, and this is not
            node.meta["example_value"] = now.to(before.dtype)
        if views is not None and node not in last and views[node] != _sharing(node, lambda n: _memory(value(n))):
            raise _fails(node, "whether it is a view of its input depends on their number, and something is changed in place")
    if len(env.guards) > guards or not same_shape(value(rows).shape[:1], value(index).shape):
        raise _fails(rows, "it depends on their number")
    gather.replace_all_uses_with(rows)
    erase_dead(graph, [gather, *read])
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


def _views(after: Sequence[fx.Node], slices: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Of each node from the first last row on the inputs in whose memory its value is. Raises UnsupportedAttention for a slice
    of which a copy would not do."""
    memory = _memory_of(after[0].graph)
    for node in slices:
        own, of, written, others = {node}, memory(node), False, False
        for n in after[after.index(node) + 1 :]:
            reads = {x for x in n.all_input_nodes if memory(x) & of}
            if reads and reads <= own and memory(n) & of:
                own.add(n)
            others |= not reads <= own
            written |= any(memory(x) & of for x in written_by(n))
        if written and others:
            raise UnsupportedAttention(
                f"the model takes the last row of its tokens by a slice ({node.name}), a view of memory that is changed in "
                "place later and not used by the slice alone; quire takes a copy of the rows that are wanted. Take the row by "
                "hidden[:, [-1], :], which is a copy, or compute out of place.")
    return {n: _sharing(n, memory) for n in after}


def _sharing(node: fx.Node, memory: Callable[[fx.Node], set[int]]) -> set[fx.Node]:
    return {x for x in node.all_input_nodes if memory(node) & memory(x)}


def _memory(val: Any) -> set[int]:
    return {storage_of(t) for t in tree_leaves(val) if isinstance(t, torch.Tensor) and not is_traceable_wrapper_subclass(t)}


def _memory_of(graph: fx.Graph) -> Callable[[fx.Node], set[int]]:
    """Which memory the value of a node is in. Where an earlier pass has put another node in the place of one, the views of that
    have values in the memory of the old one; so what seems to be in memory of its own is computed again, to see if it is."""
    joined: dict[int, int] = {}

    def memory(node: fx.Node) -> set[int]:
        found = _memory(value(node))
        while more := found & joined.keys():
            found = found - more | {joined[m] for m in more}
        return found

    for node in graph.nodes:
        given = [x for x in node.all_input_nodes if memory(x)]
        if not node.op.startswith("call") or not given or memory(node) <= set[int]().union(*map(memory, given)):
            continue
        before = value(node)
        try:
            now = _memory(value(compute_value(node)))
        except Exception:  # then it may be a view of any
            now = set[int]().union(*(_memory(value(x)) for x in given))
        finally:
            node.meta["example_value"] = before
        same = memory(node).union(*(memory(x) for x in given if now & _memory(value(x))))
        joined.update(dict.fromkeys(same - {min(same)}, min(same)))
    return memory


def _of_last(node: fx.Node, tokens: Any, index: fx.Node | None) -> tuple[tuple[Any, ...], bool] | None:
    """Of a node that takes the last row of the tokens: the arguments of ``operator.getitem`` that take those of ``index``
    instead, and the same of the other dimensions; and whether the row is a copy. None for any other node."""
    name = torch_name(node)
    if name not in ("getitem", "narrow") or not is_tensor(node) or not is_tensor(x := argument(node, 0, "input")):
        return None

    def is_end(n: Any, count: int) -> bool:
        """Whether this is T + ``count``."""
        return symbolic(tokens) and symbolic(value(n)) and str(value(n)) == str(tokens + count)

    def is_last(n: Any) -> bool:
        return n == -1 if type(n) is int else is_end(n, -1)

    shape = [str(n) for n in value(x).shape]
    if shape.count(str(tokens)) != 1:
        return None
    dim = shape.index(str(tokens))
    if name == "narrow":
        of, start, length = (argument(node, k, n) for k, n in enumerate(("dim", "start", "length"), 1))
        narrows = of in (dim, dim - len(shape)) and length == 1 and is_last(start)
        return ((x, (*[slice(None)] * dim, index)), False) if narrows else None
    items = items_of(node)
    at = next((at for at, d in dims_of(items, len(shape)) if d == dim), None)
    if at is None:
        return None
    item, others = items[at], [*items[:at], *items[at + 1 :]]
    copies = isinstance(item, (list, tuple)) and [*item] == [-1]
    cut = isinstance(item, slice) and is_last(item.start) and item.step in (None, 1) and (
        item.stop is None or is_end(item.stop, 0))
    if not (copies or cut) or not all(i is Ellipsis or type(i) is int or i == slice(None) for i in others):
        return None
    return (x, (*items[:at], index, *items[at + 1 :])), copies
