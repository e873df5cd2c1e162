"""Rules of the row-wise proof for indexing, and for the routing of tokens to experts.

Routing sorts the pairs (token, expert) by expert, multiplies each expert's pairs by its weights, and puts the pairs back::

    sorted_ids, perm = sort(ids.reshape(-1))              perm: numbers of pairs, in an order of their own
    x = hidden[perm // k]                                  rows in that order
    y = grouped_mm(x, weights, cumsum(histc(sorted_ids)))  each row by the weights of its own expert: the order's own counts
    inverse[perm] = arange(pairs);  y = y[inverse]         rows in the order of the batch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from quire.passes.fx import argument, target_name
from quire.passes.verify.row_rules import Call, as_data, as_rows, rule, same
from quire.passes.verify.rows import CONST, NOTHING, Const, Counts, Group, Holds, Known, Mixes, Order, Rows

_BY_NUMBER = "rows are picked by numbers, which may be those of other tokens"


class _Index:
    """The index tensors of ``x[a, :, b]``: joined, and where the dimensions of x are in the result."""

    def __init__(self, call: Call, indices: Sequence[Any]) -> None:
        self.at = [d for d, i in enumerate(indices) if i is not None]
        self.tensors = [indices[d] for d in self.at]
        if any(i.dtype in (torch.bool, torch.uint8) for i in self.tensors):
            raise Mixes("how many rows a mask takes depends on the tokens")
        self.ndim = max((i.dim() for i in self.tensors), default=0)
        self.adjacent = self.at == list(range(self.at[0], self.at[-1] + 1)) if self.at else True
        self.start = self.at[0] if self.adjacent and self.at else 0
        self.known = [call.known(i) for i in self.tensors]
        for known in self.known:
            as_rows(known)

    @property
    def rows(self) -> Rows | None:
        """Of the joined index, in the dimensions of the result."""
        found = [Rows(k.dim + self.start + self.ndim - i.dim(), k.axis, k.inner, k.outer, k.order)
                 for k, i in zip(self.known, self.tensors, strict=True) if isinstance(k, Rows)]
        return same(found)

    def of_dim(self, dim: int) -> Known | None:
        """The index of a dimension of x; None where it is kept."""
        return self.known[self.at.index(dim)] if dim in self.at else None

    def holds_place(self, but: int | None = None) -> bool:
        """Whether an index (but that of one dimension) goes by the place in the batch."""
        return any(isinstance(k, Rows) and k.holds.depends_on_place
                   for d, k in zip(self.at, self.known, strict=True) if d != but)

    def kept(self, dim: int) -> int:
        """Where a dimension of x that is kept is in the result."""
        before = sum(d < dim for d in self.at)
        return dim - before + (self.ndim if not self.adjacent or self.start < dim else 0)


def _own_rows(x: Rows, index: Known | None) -> Rows | None:
    """The rows that ``x[index]`` gives along the tokens, in the dimension of the index; None if not those of its own tokens."""
    if not isinstance(index, Rows):
        return None
    holds = index.holds
    numbers = holds.what == "number" and x.order is None and x.outer == 1 and holds.inner == x.inner and index.axis == x.axis
    if numbers or (holds.what == "inverse" and holds.order is x.order and index.inner == x.inner and index.axis == x.axis):
        return replace(index, holds=NOTHING)
    if holds.what == "picks" and x.order is None and x.outer == x.inner == 1:
        return Rows(index.dim, index.axis)
    return None


def _take(call: Call, known: Known, indices: Sequence[Any]) -> Known:
    index, known = _Index(call, indices), as_rows(known) or CONST
    joined = index.rows
    if not isinstance(known, Rows):
        if index.holds_place():
            raise Mixes("a table is looked up by the place of the token in the batch; positions must come from position_ids")
        return joined or CONST
    own = index.of_dim(known.dim)
    if own is None:
        if joined is not None:
            raise Mixes("each token looks up numbers of all tokens")
        keeps = known.holds.is_blank or known.holds.what == "index"
        return (known.part if keeps else known.data).at(index.kept(known.dim))
    taken = _own_rows(known, own)
    known = known.data
    if taken is None or joined is None or index.holds_place(but=known.dim) or not taken.same_rows(joined):
        raise Mixes(_BY_NUMBER)
    return joined


@rule("index _unsafe_index")
def _index(call: Call) -> Known:
    return _take(call, call.of("self"), call["indices"])


@rule("index_select")
def _index_select(call: Call) -> Known:
    x = call["self"]
    indices: list[Any] = [None] * x.dim()
    indices[call["dim"] % max(1, x.dim())] = call["index"]
    return _take(call, call.of("self"), indices)


@rule("embedding")
def _embedding(call: Call) -> Known:
    if not isinstance(call.of("weight"), Const):
        raise Mixes("its table is made of tokens")
    return _take(call, CONST, [call["indices"]])


@rule("gather")
def _gather(call: Call) -> Known:
    x, index, dim = call.rows("self"), call.rows("index"), call["dim"] % max(1, call["self"].dim())
    if x is None:
        if index is not None and index.dim != dim:
            raise Mixes("a constant is read by the place of the token in the batch")
        return index or CONST
    if x.dim == dim or index is None:
        raise Mixes(_BY_NUMBER)
    return same([x, index]) or CONST


@rule("scatter scatter_add scatter_reduce")
def _scatter(call: Call) -> Known:
    x, index, dim = call.rows("self"), call.rows("index"), call["dim"] % max(1, call["self"].dim())
    src = call.rows("src")
    if x is None:
        if index is not None or src is not None:
            raise Mixes("tokens are written into what all share")
        return CONST
    if x.dim == dim or index is None or (src is None and isinstance(call["src"], torch.Tensor)):
        raise Mixes("tokens write to the rows of others")
    rows, known, ids = same([x, index, src]) or x, call.of("self"), call.of("index")
    if call.name == "scatter" and call["value"] == 1 and call["reduce"] is None and isinstance(known, Rows) and isinstance(
            ids, Rows) and known.holds == Holds("zeros") and ids.holds.what == "index":
        return replace(rows, holds=Holds("one hot", ids=ids.holds.ids))
    return rows


@rule("index_put _unsafe_index_put _index_put_impl")
def _put(call: Call) -> Known:
    x, target, values, indices = call.of("self"), call["self"], call["values"], call["indices"]
    given = [i for i in indices if i is not None]
    if len(given) == 1 and given[0].dtype == torch.bool and indices[0] is not None and values.numel() == 1:
        mask = as_data(call.known(given[0]))  # x[mask] = number
        rows = as_data(x)
        if as_data(call.known(values)) is not None or (mask is not None and rows is None):
            raise Mixes("tokens are written into what all share")
        return same([rows, mask]) or CONST
    index = _Index(call, indices)
    joined, known = index.rows, call.known(values)
    if isinstance(x, Rows) and x.holds.is_blank and target.dim() == 1 and index.at == [0] and not call["accumulate"]:
        own = index.known[0]
        if isinstance(own, Rows) and own.order is not None and own.holds == Holds("number", x.inner) == getattr(
                known, "holds", None) and isinstance(known, Rows) and known.order is None and known.inner == x.inner:
            return Rows(0, x.axis, x.inner, holds=Holds("inverse", order=own.order))
    rows, written = as_data(x), as_data(known)
    if rows is None:
        if joined is not None or written is not None or index.holds_place():
            raise Mixes("tokens are written into what all share")
        return CONST
    picked = index.of_dim(rows.dim)
    if picked is None:
        if joined is not None:
            raise Mixes("tokens write to the rows of others")
        at: Rows | None = rows.at(index.kept(rows.dim))
    else:
        at = joined if _own_rows(rows, picked) is not None and not index.holds_place(but=rows.dim) else None
    if at is None or (isinstance(picked, Rows) and picked.holds == Holds("picks")):
        raise Mixes("tokens write to the rows of others")
    if written is not None:
        ndim = index.ndim + target.dim() - len(index.at)
        same([at, written.at(written.dim + ndim - values.dim())])
    return rows


@rule("index_add index_copy index_reduce index_fill")
def _index_add(call: Call) -> Known:
    """The index of a dimension that is not the tokens' is constant; that of the tokens' holds their own numbers."""
    x, source, dim = call.rows("self"), call.rows("source"), call["dim"] % max(1, call["self"].dim())
    index = call.of("index")
    if isinstance(call["value"], torch.Tensor):
        source = call.rows("value")
    if x is None:
        if source is not None or not isinstance(index, Const):
            raise Mixes("tokens are written into what all share")
        return CONST
    if dim != x.dim:
        if not isinstance(index, Const):
            raise Mixes("tokens write to the rows of others")
        same([x, source])
        return x
    if call.name == "index_copy" and isinstance(known := call.of("self"), Rows) and known.holds.is_blank:
        x = replace(x, order=None)  # rows that hold nothing may be in any order
    own = _own_rows(x, index)
    if own is None or (isinstance(index, Rows) and index.holds.what != "number"):
        raise Mixes("tokens write to the rows of others")
    same([own.at(dim), source])
    return x


@rule("histc")
def _histc(call: Call) -> Known:
    known = call.of("self")
    if not isinstance(known, Rows):
        return known
    holds = known.holds
    whole = call["min"] == 0 and call["max"] == call["bins"] - 1
    if holds.what != "sorted" or holds.order is None or not holds.order.routes or not whole:
        raise Mixes("it counts the tokens")
    return Counts(holds.order)


def of_order(counts: Counts, order: Order | None) -> bool:
    """Whether these are the counts of what the order sorts."""
    return order is not None and (counts.order is order or (
        counts.ids is not None and counts.ids is order.ids and order.routes))


@rule("transformers::grouped_mm_fallback _grouped_mm")
def _grouped_mm(call: Call) -> Known:
    left, right = ("input", "weight") if call.name == "transformers::grouped_mm_fallback" else ("self", "mat2")
    x, weight = call.rows(left), call.rows(right)
    offsets, bias = call.of("offs"), call.rows("bias")
    if x is None or weight is not None or bias is not None or x.dim != 0 or x.order is None:
        raise Mixes("it multiplies groups of tokens")
    if not isinstance(offsets, Counts) or not offsets.summed or not of_order(offsets, x.order):
        raise Mixes("it multiplies groups of tokens that are not those routed to one expert each")
    return x


@rule("quire::expert_linear quire::expert_swiglu")
def _experts(call: Call) -> Known:
    """quire::expert_linear, quire::expert_swiglu: a row for each pair (token, expert), by that expert's weights."""
    x, ids = call.rows("x"), call.rows("expert_ids")
    shape = call["expert_ids"].shape
    weights = ("weight", "bias") if call.name == "quire::expert_linear" else ("gate_up", "down")
    if x is None or ids is None or x.dim != 0 or ids.dim != 0 or any(call.rows(name) for name in weights) or _of_rows(call):
        raise Mixes("its rows are not tokens")
    if any(call["bits"] or ()) and ids != Rows(0, call.axes[0]):
        raise Mixes("the rows of experts' adapters are not the tokens of the batch, in their order")
    pairs = ids.inner * (shape[1] if len(shape) > 1 else 1)
    if (x.order, x.outer, ids.order, ids.outer) != (None, 1, None, 1) or pairs % x.inner or x.axis != ids.axis:
        raise Mixes("its rows are not those of the expert ids")
    return Rows(0, x.axis, pairs)


def _of_rows(call: Call) -> bool:
    """Whether adapters of the call are computed from rows of the batch."""
    return any(as_data(call.known(w)) is not None for w in (*(call["a"] or ()), *(call["b"] or ())))


@rule("quire::lora_rows")
def _lora_rows(call: Call) -> Known:
    """quire::lora_rows: a row for each token, by the adapters of that token, which the step has in the order of its tokens."""
    base, x = call.rows("base"), call.rows("x")
    if base is None or x is None or _of_rows(call):
        raise Mixes("its rows are not tokens")
    if not base == x == Rows(1, call.axes[0]):
        raise Mixes("an adapter's rows are not the tokens of the batch, in their order")
    return base


@rule("quire::sample_tokens")
def _sample_tokens(call: Call) -> Known:
    """quire::sample_tokens: a token of each row of logits, by the numbers of that row. The trace may not know that the logits
    have as many rows as the numbers: the sizes of the op's arguments agree when it runs."""
    logits, *numbers = [as_data(call.known(t)) for t in call.tensors()]
    if logits is None or logits.dim != 0 or any(
            n is None or replace(n, axis=logits.axis) != Rows(0, logits.axis) for n in numbers):
        raise Mixes("its rows are not those of the logits")
    return logits


def routed(node: fx.Node, known_of: Mapping[fx.Node, Any]) -> Any:
    """What is known of a node of experts in a loop, which splits rows sorted by expert and joins them again; else None. The
    numbers are read on the host, so that Dynamo knows the sizes of the parts as symbols of their own only. Raises Mixes."""
    name = target_name(node)
    known = [known_of.get(x) for x in node.all_input_nodes]
    if name in ("getitem", "item") and isinstance(counts := known[0], Counts) and len(known) == 1 and not counts.summed:
        at = node.args[1] if name == "getitem" else counts.at
        return replace(counts, at=at) if type(at) is int and (name == "item") == (counts.at is not None) else None
    if name == "split" and isinstance(rows := known[0], Rows) and any(isinstance(k, Counts) for k in known[1:]):
        sizes = node.args[1] if isinstance(node.args[1], (list, tuple)) else ()
        parts = [known_of.get(s) if isinstance(s, fx.Node) else None for s in sizes]
        if argument(node, 2, "dim", 0) == rows.dim == 0 and rows.data and all(
                isinstance(p, Counts) and p.at == i and of_order(p, rows.order) for i, p in enumerate(parts)):
            return [Group(rows.data, i, len(parts)) for i in range(len(parts))]
        raise Mixes("it splits the tokens")
    if name in ("cat", "concat") and any(isinstance(k, Group) for k in known):
        parts = [known_of[p] for p in node.args[0]]  # type: ignore[union-attr,index]
        groups = [p for p in parts if isinstance(p, Group)]
        all_of = len(groups) == len(parts) == groups[0].experts
        if all_of and all(g.at == i and g.rows == groups[0].rows for i, g in enumerate(groups)) and (
                argument(node, 1, "dim", 0) == 0):
            return groups[0].rows
        raise Mixes("it joins rows of tokens")
    return None
