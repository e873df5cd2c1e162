"""Behind the last attention, compute only the rows that the LM head reads.

A step of T tokens and B sequences needs B rows of logits, and what follows the last attention op (output projection, residual,
norms, MLP) treats each token by itself. So the rows are taken before it instead of after.

Before, in the last layer (idx: ``logits_indices``, (B,))::

    h2 = add(h, linear(a, w_o));  h3 = add(h2, mlp(norm(h2)));  y = norm(h3);  logits = linear(y[:, idx, :], w_head)

After::

    h2 = add(h[:, idx], linear(a[:, idx], w_o));  h3 = add(h2, mlp(norm(h2)));  logits = linear(norm(h3), w_head)

For a long prefill of Llama-3.1-8B this saves 2.8 % of the multiplications in matrix products: 88 % of those of one layer in 32.

An operation moves only if it is proved to be row-wise (``passes/verify/row_wise.py``), also without a matrix product. A value
that is not made by one, or that has other readers, stays, and its rows are taken.

Left alone: everything before the last attention op (so that pieces of passes/compile/regions.py stay equal) and before
something that is changed in place, except ``x += y`` on a new x with no other reader; quantized weights, whose code may depend
on the number of rows; graphs whose T or B is a number; the graph for small batches, where this would add a kernel and have each
program of the head's ``small_linear`` compute the final norm again. Decode steps (T = B) gain nothing and need no more kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._ops import HigherOrderOperator, OpOverloadPacket

from quire.passes.fake_values import compute_value, made_like
from quire.passes.fusions.base import Fusion
from quire.passes.fx import erase_dead, is_function, is_method, is_tensor, same_shape, symbolic, value, written_by
from quire.passes.verify.row_wise import ARITHMETIC, IN_PLACE, PRODUCTS, VIEWS, RowWise, expression, picked
from quire.passes.verify.sites import site_nodes


def last_tokens(fusion: Fusion) -> int:
    """Move every gather of rows as far towards the last attention as it goes."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in fusion.graph.nodes:
        found = _index_of(node)
        if found is not None:
            groups.setdefault(found, []).append(node)
    return sum(_Region(fusion.graph, index, tokens, gathers).rewrite() for (index, tokens), gathers in groups.items())


def _index_of(node: fx.Node) -> tuple[fx.Node, Any] | None:
    """(index, symbol of T) of a node x[:, index, :] or x[index], index an input (B,) int64 and x (1, ..., 1, T, ...)."""
    dim, index = picked(node)
    if dim is None or not is_tensor(x := node.args[0]) or not is_tensor(index) or index.op != "placeholder":
        return None
    rows, tokens = value(index), expression(value(x).shape[dim])
    if rows.dtype != torch.int64 or rows.dim() != 1 or not symbolic(rows.shape[0]):
        return None
    if tokens is None or not tokens.is_Symbol or tokens == expression(rows.shape[0]):
        return None
    return (index, tokens) if RowWise(tokens).dim(x) == dim else None


class _Region:
    """The operations above some gathers with one index that can run on its rows alone."""

    def __init__(self, graph: fx.Graph, index: fx.Node, tokens: Any, gathers: Sequence[fx.Node]) -> None:
        self.graph, self.index, self.gathers, self.row_wise = graph, index, set(gathers), RowWise(tokens)
        self.order = list(graph.nodes)
        self.nodes = self._collect()
        self.narrow: dict[fx.Node, fx.Node] = {}  # value with T rows -> the same with B rows

    def _collect(self) -> set[fx.Node]:
        """From the last gather upwards, row-wise operations that nothing outside the region reads."""
        sites = set(site_nodes(self.graph))
        found: set[fx.Node] = set()
        sizes: set[fx.Node] = set()  # read only by views, which get new shapes
        last = max(map(self.order.index, self.gathers))
        for node in reversed(self.order[:last]):
            if node in sites or node.op == "placeholder" or (_may_write(node) and not _is_private_sum(node)):
                break
            if not node.users:
                continue
            if is_method(node, "size") and all(u in found and u in VIEWS for u in node.users):
                sizes.add(node)
            elif all(u in found or u in sizes or u in self.gathers for u in node.users) and self.row_wise.proves(node):
                found.add(node)
        for node in self.order:  # views at the top compute nothing: rows are taken behind them
            view = node in VIEWS or is_method(node, "contiguous", "detach") or is_function(node, (operator.getitem,))
            if view and node in found and found.isdisjoint(node.all_input_nodes):
                found.remove(node)
        return found

    def rewrite(self) -> int:
        """Compute the region on the rows of the index; returns how many gathers that replaces."""
        moved = [g for g in self.order if g in self.gathers and g.args[0] in self.nodes]
        if len(moved) > 1 and any(map(_may_write, self.order[self.order.index(moved[0]) :])):
            return 0  # each gather is a copy, and one tensor would replace them all
        env = value(self.index).fake_mode.shape_env
        guards = len(env.guards)
        for node in [n for n in self.order if n in self.nodes]:
            with self.graph.inserting_before(node):
                new = self._on_rows(node)
            if not self._same_but_rows(value(node), value(new)) or len(env.guards) > guards:
                for each in reversed(self.narrow.values()):
                    self.graph.erase_node(each)
                return 0
        for gather in moved:
            gather.replace_all_uses_with(self.narrow[gather.args[0]])
        erase_dead(self.graph, moved, self.nodes)  # of those that write, only private sums are in the region
        return len(moved)

    def _on_rows(self, node: fx.Node) -> fx.Node:
        if node in VIEWS:
            dim, shape = self.row_wise.dim(node) or 0, value(node).shape
            new = self.graph.call_method("reshape", (self._rows_of(node.args[0], node), (*[1] * dim, -1, *shape[dim + 1 :])))
        else:
            rows = {x: self._rows_of(x, node) for x in node.all_input_nodes}
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), rows.__getitem__)
            target: Any = IN_PLACE.get(node.target, node.target)
            new = self.graph.create_node(node.op, target, args, kwargs)
        new.meta = {k: v for k, v in node.meta.items() if k not in ("example_value", "val", "tensor_meta")}
        self.narrow[node] = new
        return compute_value(new)

    def _rows_of(self, x: Any, reader: fx.Node) -> Any:
        dim = self.row_wise.dim(x)
        if x not in self.narrow and dim is not None:
            at: Any = (*[slice(None)] * dim, self.index) if dim else self.index
            self.narrow[x] = made_like(self.graph.call_function(operator.getitem, (x, at)), reader)
        return self.narrow.get(x, x)

    def _same_but_rows(self, old: Any, new: Any) -> bool:
        """Whether the new value is like the old one, with B in the place of T."""
        if isinstance(old, (tuple, list)):
            return len(old) == len(new) and all(map(self._same_but_rows, old, new))
        shape = list(old.shape)
        shape[self.row_wise.dim(old)] = value(self.index).shape[0]  # type: ignore[index]
        return old.dtype == new.dtype and same_shape(shape, new.shape)


def _is_private_sum(node: fx.Node) -> bool:
    """Whether this is ``x += y`` or the like, where x is a new tensor with no other reader: the same as x + y."""
    if node.target not in IN_PLACE or not isinstance(x := node.args[0], fx.Node):
        return False
    return (x in PRODUCTS or x in ARITHMETIC) and set(x.users) == {node}


def _may_write(node: fx.Node) -> bool:
    """Whether the operation may change something in place. Operations that run others are not known."""
    if node.op == "call_module" or isinstance(node.target, (HigherOrderOperator, OpOverloadPacket)):
        return True
    return bool(written_by(node) or node.kwargs.get("inplace") or (
        getattr(node.target, "__module__", "") == F.__name__ and any(a is True for a in node.args)))  # relu(x, True)
