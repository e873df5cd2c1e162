"""Behind the last attention, compute only the rows that the LM head reads.

A step of T tokens and B sequences wants B rows of logits, and what lies behind the last attention op (output projection,
residual, norms, MLP) treats each token by itself. So the rows are taken before it, and not after.

Before, in the last layer (idx: ``logits_indices``, (B,))::

    h2 = add(h, linear(a, w_o));  h3 = add(h2, mlp(norm(h2)));  y = norm(h3);  logits = linear(y[:, idx, :], w_head)

After::

    h2 = add(h[:, idx], linear(a[:, idx], w_o));  h3 = add(h2, mlp(norm(h2)));  logits = linear(norm(h3), w_head)

For a prefill of a Llama of 32 layers that is 2.8 % of all operations: nearly all of the last layer's but q/k/v and attention.

An operation is moved only if it is proved to be row-wise, from a table of operations, its arguments and the shapes of its
operands: the tokens are one dimension, T (a symbol, so that no weight's size is mistaken for it) in (1, ..., 1, T, ...), and
row i of the result needs row i of the operands. A value that is not made so, or that somebody else reads too, stays, and its
rows are taken. A region without a matrix product (a norm alone, behind a mixture of experts) is moved too: gathers are fused
into the element-wise operations that read them, and the norm goes over fewer rows.

Left alone: everything before the last attention op (so that pieces of passes/regions.py stay equal) or before something that
is changed in place, but for ``x += y`` on an x that is new and that nobody else has; quantised weights, whose code may assume
something about the number of rows; graphs whose T or B is a number.

Decode steps, T = B: nothing is gained, and no kernel is added. Before, the compiler made two kernels behind the last product:
residual with norm, then the gather. Now one for both gathers (the same index and size) comes behind attention, and the one at
the end is residual with norm alone. In the graph for small batches (at most 32 tokens) it would be one kernel more, because
``small_linear`` adds the residual and the norm is fused with the gather, and the products read all their weights whatever the
rows; so that graph is not rewritten. That keeps the head's kernel free of the norm, too: each program would compute it again,
for one row of 128256, and nobody has measured that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._ops import HigherOrderOperator, OpOverloadPacket
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from passes.fusion import Fusion
from passes.graph_tools import compute_value, erase_dead, is_function, symbolic, value, written_by
from passes.sites import site_nodes


class _Ops:
    """Operations by name: methods of a tensor, and the functions called so in these modules (others are not meant)."""

    def __init__(self, names: str) -> None:
        self.names = frozenset(names.split())
        modules = (operator, torch, F, torch._C._nn)
        self.functions = {f: n for n in self.names for m in modules if callable(f := getattr(m, n, None))}

    def name(self, node: fx.Node) -> str | None:
        if node.op == "call_method":
            return str(node.target) if node.target in self.names else None
        return self.functions.get(node.target) if node.op == "call_function" else None

    def __contains__(self, node: fx.Node) -> bool:
        return self.name(node) is not None


_ARITHMETIC = _Ops("add sub mul truediv div multiply")
_ELEMENTWISE = _Ops(
    "add sub rsub mul multiply truediv div divide true_divide neg pow square sqrt rsqrt reciprocal exp exp2 expm1 log log1p "
    "abs sign erf sin cos tanh sigmoid relu relu6 silu gelu mish softplus elu leaky_relu hardtanh clamp clamp_min clamp_max "
    "maximum minimum where masked_fill eq ne lt le gt ge logical_not logical_and logical_or invert bitwise_not to type type_as "
    "float half bfloat16 double contiguous clone detach")
_ALONG = _Ops("mean sum amax amin softmax log_softmax logsumexp topk chunk split cat concat")  # one or more dimensions
_PRODUCTS = _Ops("linear matmul mm addmm")
_NORMS = _Ops("layer_norm rms_norm")
_VIEWS = _Ops("view reshape flatten unflatten unsqueeze squeeze")
_SHAPELESS = _Ops("contiguous detach")  # nothing to compute, most often
_DROPOUT = _Ops("dropout")
_SIZE = _Ops("size")
_IN_PLACE: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul, operator.itruediv: operator.truediv}


def last_tokens(fusion: Fusion) -> int:
    """Move every gather of rows as far towards the last attention as it goes; returns how many have moved."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in fusion.graph.nodes:
        found = _index_of(node)
        if found is not None:
            groups.setdefault(found, []).append(node)
    return sum(_Region(fusion.graph, index, tokens, gathers).rewrite() for (index, tokens), gathers in groups.items())


def _index_of(node: fx.Node) -> tuple[fx.Node, Any] | None:
    """(index, symbol of T) of a node x[:, index, :] or x[index], index an input (B,) int64 and x (1, ..., 1, T, ...)."""
    if not is_function(node, (operator.getitem,)) or not isinstance(value(node.args[0]), torch.Tensor):
        return None
    at = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    dims = [d for d, part in enumerate(at) if not _whole(part)]
    index = at[dims[0]] if len(dims) == 1 else None
    if not isinstance(index, fx.Node) or index.op != "placeholder" or not isinstance(rows := value(index), torch.Tensor):
        return None
    if rows.dtype != torch.int64 or rows.dim() != 1 or not symbolic(rows.shape[0]):
        return None
    tokens = _expr(value(node.args[0]).shape[dims[0]])
    if tokens is None or not tokens.is_Symbol or tokens == _expr(rows.shape[0]):
        return None
    if _token_dim(value(node.args[0]), tokens) != dims[0]:
        return None
    return index, tokens


def _whole(part: Any) -> bool:
    return isinstance(part, slice) and (part.start, part.stop, part.step) == (None, None, None)


def _expr(size: Any) -> Any:
    """What a symbolic size is called; None for a number."""
    return size.node.expr if symbolic(size) else None


def _dims_with(val: torch.Tensor, tokens: Any) -> list[int]:
    """The dimensions in whose sizes T occurs."""
    return [d for d, s in enumerate(val.shape) if symbolic(s) and tokens in _expr(s).free_symbols]


def _token_dim(val: Any, tokens: Any) -> int | None:
    """d of a tensor (1, ..., 1, T, ...) with T in dimension d and nowhere else; None for all others."""
    if not isinstance(val, torch.Tensor) or is_traceable_wrapper_subclass(val):
        return None
    found = _dims_with(val, tokens)
    if len(found) != 1 or _expr(val.shape[found[0]]) != tokens or not all(map(_is_one, val.shape[: found[0]])):
        return None
    return found[0]


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1  # asking a symbol would make a guard


class _Region:
    """The operations above some gathers with one index that can run on its rows alone."""

    def __init__(self, graph: fx.Graph, index: fx.Node, tokens: Any, gathers: Sequence[fx.Node]) -> None:
        self.graph, self.index, self.tokens, self.gathers = graph, index, tokens, set(gathers)
        self.rows = value(index).shape[0]
        self.nodes = self._collect()

    def _collect(self) -> set[fx.Node]:
        """From the last gather upwards, what is row-wise and read by no one outside the region."""
        order, sites = list(self.graph.nodes), set(site_nodes(self.graph))
        found: set[fx.Node] = set()
        sizes: set[fx.Node] = set()  # read by views only, which are written anew
        last = max(order.index(g) for g in self.gathers)
        for node in reversed(order[:last]):
            if node in sites or node.op == "placeholder" or (_may_write(node) and not self._is_private_sum(node)):
                break
            if not node.users:
                continue
            if node in _SIZE and all(u in found and u in _VIEWS for u in node.users):
                sizes.add(node)
            elif all(u in found or u in sizes or u in self.gathers for u in node.users) and self._row_wise(node):
                found.add(node)
        for node in order:  # views at the top compute nothing: rows are taken behind them
            if node in found and not any(i in found for i in node.all_input_nodes) and (
                    node in _VIEWS or node in _SHAPELESS or is_function(node, (operator.getitem,))):
                found.remove(node)
        return found

    # -- what is row-wise -----------------------------------------------------------------------------------------------

    def _dim(self, x: Any) -> int | None:
        return _token_dim(value(x), self.tokens)

    def _constant(self, x: fx.Node) -> bool:
        """Is it a tensor that is the same for all tokens?"""
        val = value(x)
        plain = isinstance(val, torch.Tensor) and not is_traceable_wrapper_subclass(val)
        return plain and not _dims_with(val, self.tokens)

    def _row_wise(self, node: fx.Node) -> bool:
        val = value(node)
        parts = val if isinstance(val, (tuple, list)) and not isinstance(val, torch.Size) else [val]
        if not parts or any(self._dim(p) is None for p in parts):
            return False
        if is_function(node, (operator.getitem,)):
            return self._part(node)
        if node in _ELEMENTWISE or node.target in _IN_PLACE:
            return self._element_wise(node)
        if node in _DROPOUT:
            training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
            return training is False and self._element_wise(node)
        if node in _PRODUCTS:
            at = 1 if _PRODUCTS.name(node) == "addmm" else 0
            matrices = [a for a in node.args[at + 1 : at + 2] if value(a).dim() == 2]
            return len(matrices) == 1 and self._reads_last(node, at, 1) and all(value(b).dim() == 1 for b in node.args[:at])
        if node in _NORMS:
            shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
            return isinstance(shape, (tuple, list, torch.Size)) and self._reads_last(node, 0, len(shape))
        if node in _ALONG:
            return self._along(node)
        return node in _VIEWS and self._view(node)

    def _element_wise(self, node: fx.Node) -> bool:
        """Operands are broadcast from the right: each has the tokens where the result has them, or is the same for all."""
        behind = len(value(node).shape[self._dim(node) :])  # dimensions from T to the last
        for x in node.all_input_nodes:
            val, dim = value(x), self._dim(x)
            if isinstance(val, torch.Tensor):
                same_for_all = self._constant(x) and (val.dim() < behind or _is_one(val.shape[-behind]))
                if not same_for_all and (dim is None or val.dim() - dim != behind):
                    return False
            elif not isinstance(val, (int, float, torch.SymInt, torch.SymFloat)):
                return False
        return True

    def _reads_last(self, node: fx.Node, at: int, count: int) -> bool:
        """Argument ``at`` is the only one with tokens, and they are not in its last ``count`` dimensions."""
        x = node.args[at] if len(node.args) > at else None
        dim = self._dim(x)
        others = [*node.args[:at], *node.args[at + 1 :], *node.kwargs.values()]
        if dim is None or dim >= value(x).dim() - count:
            return False
        return all(self._constant(o) for o in others if isinstance(o, fx.Node))

    def _along(self, node: fx.Node) -> bool:
        """A reduction, split or concatenation along dimensions behind that of the tokens."""
        name, operands = _ALONG.name(node), node.all_input_nodes
        place = 2 if name in ("topk", "chunk", "split") else 1
        dims = node.kwargs.get("dim", node.args[place] if len(node.args) > place else -1 if name == "topk" else None)
        dims = list(dims) if isinstance(dims, (tuple, list)) else [dims]
        at: set[Any] = {(self._dim(x), value(x).dim() if isinstance(value(x), torch.Tensor) else None) for x in operands}
        if len(at) != 1:
            return False
        token_dim, count = at.pop()
        return token_dim is not None and bool(dims) and all(type(d) is int and token_dim < d % count for d in dims)

    def _view(self, node: fx.Node) -> bool:
        """(1, ..., T, *r) becomes (1, ..., T, *s): with only ones before T, each row is given the shape s."""
        x = node.args[0]
        before, after = value(x), value(node)
        if self._dim(x) is None or before.dtype != after.dtype:
            return False
        r, s = before.shape[self._dim(x) + 1 :], after.shape[self._dim(node) + 1 :]  # type: ignore[operator]
        return all(isinstance(n, int) and n > 0 for n in (*r, *s)) and prod(r) == prod(s)

    def _part(self, node: fx.Node) -> bool:
        """An element of a tuple, x[0] of (1, ..., T, ...), or a cut behind the tokens."""
        x, at = node.args
        dim = self._dim(x)
        if isinstance(value(x), (tuple, list)):
            return type(at) is int
        if dim is None or type(at) is int:
            return dim is not None and dim > 0 and bool(at == 0)
        cuts: list[Any] = list(at) if isinstance(at, tuple) else [at]
        if Ellipsis in cuts:
            i = cuts.index(Ellipsis)
            cuts[i : i + 1] = [slice(None)] * (value(x).dim() - len(cuts) + 1)
        return all(isinstance(c, slice) and not any(isinstance(e, fx.Node) for e in (c.start, c.stop, c.step)) for c in cuts) \
            and all(map(_whole, cuts[: dim + 1]))

    def _is_private_sum(self, node: fx.Node) -> bool:
        """``x += y`` and the like, x a tensor that an operation has just made and that nothing else reads: as good as x + y."""
        if node.target not in _IN_PLACE or not isinstance(x := node.args[0], fx.Node):
            return False
        return (x in _PRODUCTS or x in _ARITHMETIC) and set(x.users) == {node}

    # -- the rewrite ----------------------------------------------------------------------------------------------------

    def rewrite(self) -> int:
        """The region again, on the rows of the index; returns how many gathers it replaces."""
        moved = [g for g in self.graph.nodes if g in self.gathers and g.args[0] in self.nodes]
        if not moved:
            return 0
        narrow: dict[fx.Node, fx.Node] = {}  # of a value: the one with B rows
        env = value(self.index).fake_mode.shape_env
        guards = len(env.guards)
        for node in [n for n in self.graph.nodes if n in self.nodes]:
            with self.graph.inserting_before(node):
                if node in _VIEWS:
                    d, shape = self._dim(node), value(node).shape
                    reads: Any = self._rows_of(node.args[0], narrow, node)
                    new = self.graph.call_method("reshape", (reads, (*[1] * d, -1, *shape[d + 1 :])))  # type: ignore[operator]
                else:
                    target: Any = _IN_PLACE.get(node.target, node.target)
                    known = {x: self._rows_of(x, narrow, node) for x in node.all_input_nodes}
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                    new = self.graph.create_node(node.op, target, args, kwargs)
            narrow[node] = new
            new.meta = {k: v for k, v in node.meta.items() if k not in ("example_value", "val", "tensor_meta")}
            compute_value(new)
            if not self._same_but_rows(value(node), value(new)) or len(env.guards) > guards:
                for each in reversed(list(narrow.values())):
                    self.graph.erase_node(each)
                return 0
        for gather in moved:
            gather.replace_all_uses_with(narrow[gather.args[0]])
        erase_dead(self.graph, moved)
        return len(moved)

    def _rows_of(self, x: Any, narrow: dict[fx.Node, fx.Node], reader: fx.Node) -> Any:
        if x not in narrow and self._dim(x) is not None:
            at: Any = (*[slice(None)] * self._dim(x), self.index)  # type: ignore[operator]
            narrow[x] = self.graph.call_function(operator.getitem, (x, at if len(at) > 1 else self.index))
            narrow[x].meta["nn_module_stack"] = reader.meta.get("nn_module_stack")
            compute_value(narrow[x])
        return narrow.get(x, x)

    def _same_but_rows(self, old: Any, new: Any) -> bool:
        if isinstance(old, (tuple, list)):
            return len(old) == len(new) and all(self._same_but_rows(o, n) for o, n in zip(old, new, strict=True))
        dim = _token_dim(old, self.tokens)
        wanted = [self.rows if d == dim else s for d, s in enumerate(old.shape)]
        return old.dtype == new.dtype and str(wanted) == str(list(new.shape))


def _may_write(node: fx.Node) -> bool:
    """Might it change something in place? Not known of operations that run others."""
    if node.op == "call_module" or isinstance(node.target, (HigherOrderOperator, OpOverloadPacket)):
        return True
    return bool(written_by(node) or node.kwargs.get("inplace") or (
        getattr(node.target, "__module__", "") == F.__name__ and any(a is True for a in node.args)))  # relu(x, True)


__all__ = ["last_tokens"]
