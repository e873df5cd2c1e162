"""KV-sharing fast prefill: behind the last layer with keys of its own, only the tokens whose logits are wanted.

Where the last layers of a model attend to the keys and values of earlier ones (gemma3n, gemma4), they write no cache, so they
run only on the tokens whose logits are read: B of a step of B sequences, by the input idx (B,).

Before (layer 2 attends to the keys and values of layer 0)::

    o1 = attention(q1, k1, v1, layer=1);  h2 = mlp(add(h1, linear(o1, w)));  o2 = attention(q(h2), k0, v0, layer=2)
    logits = linear(mlp(add(h2, o2))[:, idx, :], w_head)

After::

    o1 = attention(q1, k1, v1, layer=1).index_select(2, idx);  h2 = mlp(add(h1.index_select(1, idx), linear(o1, w)))
    o2 = attention(q(h2), k0, v0, layer=2)                       # lowered: one query per sequence, as in a decode step
    logits = linear(mlp(add(h2, o2)), w_head)

Why it is the same: each operation outside attention is proved to compute a token's row from that row alone
(``passes/verify/tokens.py``), and attention gives each query what its sequence's cache holds. A graph is refused if a value
that is not one row per token crosses the cut, if something visible elsewhere is changed in place behind it, if an operation
reads the token's index from the step, or if a value behind the cut still has T rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._pytree import tree_leaves

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.ops.experts import expert_linear, expert_swiglu
from quire.attn_ops.ops.lora_rows import lora_rows
from quire.passes.fake_values import compute_value, made_like
from quire.passes.fx import is_function, placeholders, schema_arguments, symbolic, value, written_by
from quire.passes.rewrite.length_rope import longer_than
from quire.passes.verify.row_wise import picked
from quire.passes.verify.rows import Const, Holds, Rows
from quire.passes.verify.shared_kv import KV_SOURCES, memory
from quire.passes.verify.sites import site_nodes, site_of
from quire.passes.verify.tokens import TokenPass, check_tokens

LAST_ROWS = "quire_last_rows"  # in the meta of a graph: a LastRows, for the lowering
#: Operations that find the token that they are at in the step.
_PLACED = (lora_rows, longer_than)


@dataclass(frozen=True)
class LastRows:
    """The layers that run on the rows of ``index``, a placeholder (B,) int64, alone."""

    layers: frozenset[int]
    index: fx.Node


def _chosen(node: fx.Node) -> bool:
    """Whether it is an op of experts with adapters that requests choose."""
    return is_function(node, (expert_linear, expert_swiglu)) and any(schema_arguments(node).get("bits", ()))


def keep_last_rows(gm: fx.GraphModule, row_data: Collection[fx.Node] = ()) -> None:
    """Rewrite a raised graph, in place. ``row_data``: as for ``check_tokens``. Raises UnsupportedAttention: what was not
    proved, or that no layers share keys and values at the end of the model."""
    graph, sites = gm.graph, site_nodes(gm.graph)
    layers, sources = [site_of(n).layer for n in sites], gm.meta.get(KV_SOURCES, {})
    first = next(i for i in reversed(range(len(sites))) if layers[i] not in sources) + 1
    if first == len(sites):
        raise UnsupportedAttention(
            "kv_sharing_fast_prefill=True needs last layers that attend to the keys and values of earlier ones, as gemma3n has "
            "them; in this model the last layer has its own. Leave the option out")
    tokens = value(sites[0].args[0]).shape[2]
    _Cut(graph, sites[first - 1], sites[first:], tokens, check_tokens(graph, tokens, row_data)).rewrite(gm, layers[first:])


class _Cut:
    """The graph behind ``last``, an attention op, and what of the first part it reads."""

    def __init__(self, graph: fx.Graph, last: fx.Node, sites: Sequence[fx.Node], tokens: Any, proof: TokenPass) -> None:
        self.graph, self.last, self.sites, self.tokens, self.proof = graph, last, set(sites), tokens, proof
        order = list(graph.nodes)
        at = order.index(last) + 1
        self.head, self.tail, self.output = set(order[:at]), order[at:-1], order[-1]
        self.index = self._index()
        self.narrow: dict[fx.Node, fx.Node] = {}  # value of the first part -> the same of the wanted rows

    def rewrite(self, gm: fx.GraphModule, layers: Collection[int]) -> None:
        crossing = {x: n for n in reversed(self.tail) for x in self._reads(n) if x in self.head and x is not self.index}
        gathers = [n for n in self.tail if self.index in n.all_input_nodes]
        for node in gathers:
            if not self._gathers(node):
                _refuse(node, "it uses the numbers of the wanted rows otherwise than to take rows")
        for node in self.tail:
            if node.target in _PLACED or _chosen(node):
                _refuse(node, "it reads from the step which token it is at" + (
                    "" if node.target is longer_than else " (adapters that requests choose)"))
        for x in self.output.all_input_nodes:
            if x in self.head:
                _refuse(x, "it is returned from before the last layer with keys of its own")
        before = self._written()
        env = value(self.index).fake_mode.shape_env
        guards = len(env.guards)
        with self.graph.inserting_after(self.last):
            rows = self.graph.call_method("size", (self.index, 0))
        compute_value(rows)
        for x, reader in crossing.items():
            self._take(x, reader, rows)
        for node in self.tail:
            for x in self._reads(node):
                if x in self.narrow:
                    node.replace_input_with(x, self.narrow[x])
        for node in gathers:
            node.replace_all_uses_with(node.args[0])
            self.graph.erase_node(node)
            self.tail.remove(node)
        self._compute()
        if len(env.guards) > guards:
            _refuse(self.last, f"what follows compares the number of rows: {env.guards[-1].expr}")
        after = self._written()
        for node, group in before.items():
            if group & self.head or after[node] != group:
                _refuse(node, "it changes a tensor in place that others see")
        gm.meta[LAST_ROWS] = LastRows(frozenset(layers), self.index)

    def _index(self) -> fx.Node:
        """The input that picks the rows of logits."""
        picks = Holds("picks")
        found = [n for n in placeholders(self.graph) if n.users and getattr(self.proof.known[n], "holds", None) == picks]
        if len(found) != 1 or not self.head.isdisjoint(found[0].users):
            raise UnsupportedAttention("kv_sharing_fast_prefill=True needs a model that is given the numbers of the tokens "
                                       "whose logits are wanted, and uses them behind its last layer; quire.Engine gives them")
        return found[0]

    def _reads(self, node: fx.Node) -> list[fx.Node]:
        """What a node of the second part reads, beside keys and values."""
        hidden = node.args[1:3] if node in self.sites else ()
        return [x for x in node.all_input_nodes if x not in hidden]

    def _gathers(self, node: fx.Node) -> bool:
        """Whether the node is x[:, index], with the index in the dimension of the tokens."""
        (dim, index), x = picked(node), node.all_input_nodes[0]
        return dim is not None and index is self.index and self.proof.known.get(x) == Rows(dim, self.proof.axes[0])

    def _take(self, x: fx.Node, reader: fx.Node, rows: fx.Node) -> None:
        """The wanted rows of a value of the first part, or itself where it has none."""
        val, known = value(x), self.proof.known.get(x)
        expr = self.tokens.node.expr
        if symbolic(val):
            if val.node.expr == expr:
                self.narrow[x] = rows
            elif expr in val.node.expr.free_symbols:
                _refuse(reader, f"it reads a size of {val.node.expr} for {expr} tokens")
        elif isinstance(known, Rows) and known.axis == self.proof.axes[0]:
            if known != Rows(known.dim, known.axis):
                _refuse(reader, f"what it reads ({x.name}) is not one row per token")
            with self.graph.inserting_after(rows):
                self.narrow[x] = made_like(self.graph.call_method("index_select", (x, known.dim, self.index)), reader)
        elif not isinstance(known, (Const, Rows)):
            _refuse(reader, f"what it reads ({x.name}) is not one row per token")

    def _compute(self) -> None:
        """The fake values behind the cut; none may be of T tokens."""
        for node in self.tail:
            if not node.all_input_nodes:
                continue
            try:
                compute_value(node)
            except Exception as error:
                _refuse(node, f"it cannot run on fewer rows: {type(error).__name__}: {error}")
            for t in tree_leaves(value(node)):
                sizes: Sequence[Any] = t.shape if isinstance(t, torch.Tensor) else (t,)
                if any(symbolic(s) and self.tokens.node.expr in s.node.expr.free_symbols for s in sizes):
                    _refuse(node, "it depends on the number of all tokens")

    def _written(self) -> dict[fx.Node, set[fx.Node]]:
        """By operation of the second part that changes a value in place: all values in that memory."""
        places: dict[Any, set[fx.Node]] = {}
        for node in self.graph.nodes:
            places.setdefault(memory(node), set()).add(node)
        return {n: set[fx.Node]().union(*(places[memory(x)] for x in written)) for n in self.tail if (written := written_by(n))}


def _refuse(node: fx.Node, why: str) -> None:
    raise UnsupportedAttention("kv_sharing_fast_prefill=True: the layers behind the last one with keys of its own are not "
                               f"proved to run on the wanted tokens alone ({node.name}: {why}). Leave the option out")


def one_query_each(query_start_loc: torch.Tensor) -> torch.Tensor:
    """(B + 1,) int32 for the last token of each sequence, from that of all tokens; padding rows stay empty."""
    return F.pad((query_start_loc.diff() > 0).cumsum(0, dtype=query_start_loc.dtype), (1, 0))
