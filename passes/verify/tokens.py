"""Tokens meet in attention and nowhere else: proved for every operation of a traced graph, or the model is refused.

Sequences are packed into one ragged row of T tokens, and only attention knows where each begins. So every other operation must
compute each token's row from that row alone. The pass walks the graph and keeps for each value what is known of it
(``rows.py``). Each node of the Dynamo graph is run once more on fake tensors with a symbolic T, under a dispatch mode that sees
the ATen operations which it consists of and applies a rule to each (``row_rules.py``; ``proof.py`` has the mode).

Why ATen: Dynamo graphs hold hundreds of functions and methods, each with its own spelling of ``dim``. Below them is one closed
set with schemas; elementwise operations are tagged; composite operations take themselves apart; the rest have a rule, a
registered decomposition, or are refused. Why node by node: equal nodes of equal layers are run once, so that the proof of a
deep model takes as long as that of one layer.

A value that mixes tokens is refused only where it is returned, attended to, or written into another tensor, so that an
auxiliary loss that is thrown away costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from quire.attn_ops.attention import attention
from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.fx import (
    LINEAR,
    VMAP,
    ancestors,
    is_module_tensor,
    is_stored,
    module_path,
    sdpa_arguments,
    sizes_of,
    storage_of,
    symbolic,
    target_name,
    value,
    written_by,
)
from quire.passes.rewrite.raise_sdpa import SDPA
from quire.passes.verify.breaks import check_whole
from quire.passes.verify.proof import Proof, Sizes, balanced, execute
from quire.passes.verify.row_index import routed
from quire.passes.verify.row_rules import as_data, same
from quire.passes.verify.rows import (
    CONST,
    NOTHING,
    Const,
    Counts,
    Group,
    Holds,
    Known,
    Mixed,
    Mixes,
    Rows,
    Writes,
    of_shape,
    unsure,
)

_ATTENTION = (attention, torch.ops.quire.attention, torch.ops.quire.attention.default)


class TokenPass:
    """The proof for one graph; call ``check``. ``tokens``: the symbol T of the trace. ``rows``: symbols of the numbers of rows
    that the caller picks by an input. ``row_data``: see ``check_tokens``."""

    def __init__(self, tokens: Any, rows: Sequence[Any] = (), row_data: Collection[fx.Node] = ()) -> None:
        self.row_data = row_data
        self.sizes = Sizes()
        self.axes = tuple(self.sizes.symbol(s).node.expr for s in (tokens, *rows))
        self.known: dict[fx.Node, Any] = {}
        self._seen: dict[Any, Any] = {}
        self._state: set[int] = set()  # memory of the model's own tensors
        self._memory: dict[int, list[fx.Node]] = {}

    def check(self, graph: fx.Graph) -> None:
        """Raises UnsupportedAttention, which names the operation and the module."""
        with torch.inference_mode(False), torch.no_grad():
            for nodes in _operations(graph):
                if len(nodes) > 1:
                    self.known |= self._of_vmap(nodes)
                elif nodes[0].op == "output":
                    self._check_used(nodes[0], nodes[0], "is returned")
                else:
                    self.known[nodes[0]] = self._of(nodes[0])
                for node in nodes:
                    for t in tree_leaves(value(node)):
                        if isinstance(t, torch.Tensor) and not is_traceable_wrapper_subclass(t) and not is_functorch(t):
                            self._memory.setdefault(storage_of(t), []).append(node)

    def proved(self, node: fx.Node) -> Any:
        """What is known of the result of one operation; None if it mixes tokens. ``known`` must have its operands."""
        with torch.inference_mode(False), torch.no_grad():
            try:
                return self._run([node], [node])[0][0]
            except Exception:
                return None

    def _of(self, node: fx.Node) -> Any:
        """What is known of the value of a node: as nested as the value."""
        if node.op in ("placeholder", "get_attr"):
            return self._of_input(node)
        if any(isinstance(t, torch.Tensor) and is_functorch(t) for t in tree_leaves(value(node))):
            return _mixed("quire does not look into torch.func", node)
        if node.target in _ATTENTION:
            self._check_used(node, node, "is attended to")
            return self._attended(node)
        writes = bool(written_by(node))
        mixed = self._mixed_among(node.all_input_nodes)
        if mixed is not None:
            if writes or self._writes(node):
                self._refuse(node, mixed, "is written into another tensor")
            return mixed
        try:
            known = routed(node, self.known)
            if known is not None:
                return known
            if not any(isinstance(t, torch.Tensor) for x in (node, *node.all_input_nodes) for t in tree_leaves(value(x))):
                return CONST  # sizes, contexts
            if node.target in SDPA:
                return _attends_within(node, self.known.__getitem__)
            return self._run_once(node)
        except Exception as error:
            found, writes = _mixed(_why(error), node), writes or isinstance(error, Writes)
        if writes:
            self._refuse(node, found, "is written into another tensor")
        return found

    def _writes(self, node: fx.Node) -> bool:
        """Whether the node writes to one of its inputs, in a way that ``written_by`` does not know."""
        try:
            return bool(self._run([node], [node])[1])
        except Exception as error:
            return isinstance(error, Writes)

    def _mixed_among(self, nodes: Sequence[fx.Node]) -> Mixed | None:
        return next((k for x in nodes for k in tree_leaves(self.known[x], is_leaf=_is_known) if isinstance(k, Mixed)), None)

    def _of_vmap(self, nodes: list[fx.Node]) -> dict[fx.Node, Any]:
        """Of the operations of one torch.vmap: they run together, and the rules see what they are below it."""
        inside = set(nodes)
        inputs = list(dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in inside))
        results = [n for n in nodes if set(n.users) - inside]
        outside = {storage_of(t) for x in inputs for t in tree_leaves(value(x)) if isinstance(t, torch.Tensor)}
        for node in nodes:
            if any(storage_of(value(w)) in outside for w in written_by(node)):
                self._refuse(node, _mixed("torch.vmap writes into a tensor from outside it", node), "is written")
        mixed = self._mixed_among(inputs)
        found: list[Any] = []
        try:
            if mixed is None:
                found, _ = self._run(nodes, results)
        except Exception as error:
            mixed = _mixed(_why(error), nodes[0])
        return dict.fromkeys(nodes, mixed or CONST) | dict(zip(results, found, strict=False))

    def _of_input(self, node: fx.Node) -> Any:
        val = value(node)
        if not isinstance(val, torch.Tensor) or is_traceable_wrapper_subclass(val):
            return CONST
        own, sizes = node.op == "get_attr" or is_stored(node), list[Any](val.shape)
        try:
            known = of_shape(self.sizes.tensor(val), self.axes)
            if isinstance(known, Rows) and own:
                raise Mixes("a parameter or buffer as long as the row")
            if isinstance(known, Const) and not own and any(symbolic(s) and s.node.expr.free_symbols for s in sizes):
                # position_ids that no operation puts beside the tokens: nothing tells the trace that they are as long
                raise Mixes("an input of a length that is not known to be that of the row of tokens")
        except Mixes as why:
            return _mixed(str(why), node)
        if isinstance(known, Const):
            self._state.add(storage_of(val))
        elif (isinstance(known, Rows) and known.axis != self.axes[0] and val.dtype == torch.int64 and val.dim() == 1
                and node not in self.row_data):
            return replace(known, holds=Holds("picks"))
        return known

    def _attended(self, node: fx.Node) -> Known:
        q, k, v = (self.known[x] for x in node.args[:3])  # type: ignore[index]
        wanted = Rows(2, self.axes[0])
        for known in (q, k, v):
            if not isinstance(known, Rows) or replace(known, holds=NOTHING) != wanted:
                self._refuse(node, _mixed("its queries, keys or values are not one row per token", node), "attends")
        return wanted

    def _run_once(self, node: fx.Node) -> Any:
        """Run the node on fakes; equal nodes once. Raises Mixes."""
        if any(is_traceable_wrapper_subclass(t) for x in node.all_input_nodes for t in tree_leaves(value(x))
               if isinstance(t, torch.Tensor)):
            return self._quantized(node)
        nodes = node.all_input_nodes
        key = self._key(node)
        if key is not None and key in self._seen:
            found, changes = self._seen[key]
        else:
            (found,), changes = self._run([node], [node])
            if key is not None and not _has_order(found):
                self._seen[key] = found, changes
        if changes and not written_by(node):  # other passes would not see it
            raise Writes("it changes a tensor in a way that quire does not follow")
        for at, known in changes:
            x = nodes[at]
            memory = storage_of(value(x))
            if memory in self._state:
                if not isinstance(known, Const) or not self._leaves_no_trace(node, x, memory):
                    raise Mixes("it changes a buffer or parameter of the model")
                continue
            others = [n for n in self._memory[memory] if n is not x]
            if known != self.known[x]:
                if getattr(known, "holds", NOTHING) != NOTHING or replace(self.known[x], holds=NOTHING) != known:
                    if others:
                        raise Mixes("it changes a tensor of which others are views")
                assert self.known[x].holds != NOTHING
                self.known[x] = known
            for n in others:  # what they hold may be other numbers now
                each = self.known[n]
                self.known[n] = list(map(unsure, each)) if isinstance(each, list) else unsure(each)
        return found

    def _leaves_no_trace(self, node: fx.Node, buffer: fx.Node, memory: int) -> bool:
        """Whether writing a constant to the model's own ``buffer`` changes no result: each call writes the same numbers
        (``copy_`` of something else) before it reads them, or nothing reads them (a counter)."""
        if node.target == "copy_" and isinstance(node.args[1], fx.Node):
            reads = [u for n in self._memory.get(memory, [buffer]) for u in n.users if u in self.known]
            made_of = [value(n) for n in ancestors(node.args[1])]
            return not reads and all(storage_of(t) != memory for t in made_of if isinstance(t, torch.Tensor))
        group = self._memory.get(memory, [buffer])
        return not node.users and all(u is node or u in group for n in group for u in n.users)

    def _run(self, nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> tuple[list[Any], list[tuple[int, Known]]]:
        """Run the nodes at once: what is known of the ``results``, and of the inputs that were written to, by their place."""
        inputs = list(dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in nodes))
        proof = Proof(self.axes, any(isinstance(value(x), (torch.SymInt, torch.SymFloat)) for x in inputs))
        fakes: dict[fx.Node, Any] = {}
        for x in inputs:
            flat, spec = tree_flatten(value(x))
            known = self._flat_known(x, len(flat))
            made = [self.sizes.tensor(t, k) if isinstance(t, torch.Tensor) else self.sizes.of(t)
                    for t, k in zip(flat, known, strict=True)]
            for t, k in zip(made, known, strict=True):
                if isinstance(t, torch.Tensor):
                    proof.learn(t, k)
                    proof.given.add(storage_of(t))
            fakes[x] = tree_unflatten(made, spec)
        with self.sizes.fake, enable_python_dispatcher(), self.sizes.env.ignore_fresh_unbacked_symbols(), proof, balanced():
            for node in nodes:
                fakes[node] = execute(node, fakes)
        written = {storage_of(t) for t in proof.written if isinstance(t, torch.Tensor)}
        changes = [(at, proof.known(fakes[x])) for at, x in enumerate(inputs)
                   if isinstance(fakes[x], torch.Tensor) and storage_of(fakes[x]) in written]
        return [self._found(node, fakes[node], proof) for node in results], changes

    @staticmethod
    def _found(node: fx.Node, result: Any, proof: Proof) -> Any:
        leaves, _ = tree_flatten(result)
        if any(isinstance(t, torch.Tensor) and type(t) is not FakeTensor for t in leaves):
            raise Mixes("quire cannot follow it")
        if proof.lengths and any(isinstance(t, torch.Tensor) and not proof.knows(t) for t in leaves):
            raise Mixes("a tensor made of the length of the row")
        found: list[Known] = [proof.known(t) if isinstance(t, torch.Tensor) else CONST for t in leaves]
        mixed = next((k for k in found if isinstance(k, Mixed)), None)
        if mixed is not None and len(found) == 1:
            raise Mixes(mixed.why)
        found = [_mixed(k.why, node) if isinstance(k, Mixed) else k for k in found]
        return found[0] if len(found) == 1 and not isinstance(value(node), (tuple, list)) else found

    def _flat_known(self, node: fx.Node, count: int) -> list[Known]:
        known = self.known[node]
        return list(known) if isinstance(known, list) else [known] * count

    def _key(self, node: fx.Node) -> Any:
        """Equal for nodes that compute the same on inputs of which the same is known; None: run it in any case."""
        parts: list[Any] = [node.op, node.target]
        for x in node.all_input_nodes:
            flat = tree_leaves(value(x))
            known = self._flat_known(x, len(flat))
            if _has_order(known):
                return None
            for t, k in zip(flat, known, strict=True):
                parts.append((sizes_of(t), t.dtype, t.device, k) if isinstance(t, torch.Tensor) else str(t))
        number = {x: f"%{i}" for i, x in enumerate(node.all_input_nodes)}
        spelled = fx.node.map_arg((node.args, node.kwargs), lambda n: number[n])
        return (*parts, repr(spelled))

    def _quantized(self, node: fx.Node) -> Known:
        """A product with a tensor subclass, which ``quantized.check_rows`` tries out; nothing else of it is known."""
        of_tokens = [x for x in node.all_input_nodes if not isinstance(self.known[x], Const)]
        if not of_tokens:
            return CONST
        x, linear = self.known[of_tokens[0]], node.target in LINEAR and len(node.args) > 1
        if not linear or of_tokens != [node.args[0]] or not isinstance(x, Rows) or x.dim >= value(node.args[0]).dim() - 1:
            raise Mixes("quire knows of a quantized weight only that linear layers multiply rows by it")
        return x.data

    def _check_used(self, node: fx.Node, user: fx.Node, how: str) -> None:
        for x in node.all_input_nodes:
            for known in tree_leaves(self.known[x], is_leaf=_is_known):
                if isinstance(known, Rows) and user.op == "output":
                    if known.order is not None or known.holds.depends_on_place:
                        known = _mixed("the tokens are left in another order, or numbered by their place in the batch", x)
                elif isinstance(known, (Counts, Group)):
                    known = _mixed("it counts the tokens", x)
                if isinstance(known, Mixed):
                    self._refuse(user, known, how)

    def _refuse(self, node: fx.Node, mixed: Mixed, how: str) -> None:
        raise UnsupportedAttention(
            f"{mixed.module or 'the model'} mixes the tokens of the batch outside attention ({mixed.node}: {mixed.why}), or "
            f"quire cannot prove that it does not, so sequences of a packed batch would see each other: the result {how} "
            f"({node.name}). Tokens may meet in F.scaled_dot_product_attention and transformers' attention interface; "
            "convolutions over tokens, SSMs, linear attention and recurrences cannot be served.")


def check_tokens(graph: fx.Graph, tokens: Any, row_data: Collection[fx.Node] = ()) -> TokenPass:
    """Refuse a graph (after raising) in which tokens meet outside the attention sites, or are not proved not to. Returns the
    proof. ``row_data``: inputs of one number for each row that the caller picks, which are not numbers of rows themselves.
    Raises UnsupportedAttention, which names the operation and the module."""
    check_whole(graph)
    if not symbolic(tokens):
        raise UnsupportedAttention(
            f"the graph was traced for exactly {tokens} tokens, so it cannot be proved that they meet in attention only; "
            "compile with dynamic=True and give at least 2 tokens, and let no operation take the length of the row as a plain "
            "number (torch.linspace does)")
    expr = tokens.node.expr
    if expr.is_number:
        raise UnsupportedAttention(
            f"an operation of the model takes the length of the row as a plain number{_fixed_at(tokens)}, so that its graph is "
            f"for exactly {expr} tokens and not proved for others; the length of a packed row means nothing to its sequences: "
            "compute with position_ids, or with constants")
    rows = dict.fromkeys(s.node.expr for n in graph.find_nodes(op="placeholder") if _is_pick(n) for s in value(n).shape)
    proof = TokenPass(expr, [r for r in rows if r != expr], row_data)
    proof.check(graph)
    return proof


def _attends_within(node: fx.Node, known: Callable[[Any], Known]) -> Known:
    """What is known of the result of an F.scaled_dot_product_attention in which each token attends over its own heads, or to a
    memory that all share, by what is ``known`` of its arguments. Raises Mixes if tokens may meet."""
    arg = sdpa_arguments(node)
    if arg.get("dropout_p") or arg.get("enable_gqa"):
        raise Mixes("it drops scores at random, or repeats heads")

    def rows(name: str, counted: int) -> Rows | None:
        """Of an argument, its dimension counted from the right; those from ``counted`` on are not the batch's."""
        if not isinstance(arg.get(name), fx.Node):
            return None
        found = as_data(known(arg[name]))
        if found is None:
            return None
        dim = found.dim - value(arg[name]).dim()
        if dim >= counted:
            raise Mixes("it attends over tokens")
        return found.at(dim)

    queries = rows("query", -2 if arg.get("is_causal") else -1)  # a causal mask goes by the place of the query
    joined = same([queries, rows("key", -2), rows("value", -2), rows("attn_mask", -1)])
    result = value(node)
    assert isinstance(result, torch.Tensor)
    return joined.at(joined.dim + result.dim()) if joined is not None else CONST


def _operations(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Each node by itself; those of a torch.vmap together, which one function begins and another one ends."""
    nodes, depth = list[fx.Node](), 0
    for node in graph.nodes:
        nodes.append(node)
        depth += (target_name(node) == VMAP[0]) - (target_name(node) == VMAP[1])
        if depth == 0:
            yield nodes
            nodes = []


def _fixed_at(tokens: Any) -> str:
    """Where in the user's code Dynamo made the number of tokens a constant, if it says so."""
    for guard in tokens.node.shape_env.guards:
        place = getattr(getattr(guard, "sloc", None), "maybe_user_loc", None)
        if place and guard.expr.func.__name__ == "Equality" and tokens.node.expr in guard.expr.args:
            return f" ({place})"
    return ""


def _is_pick(node: fx.Node) -> bool:
    """An input of one symbolic dimension: numbers of rows, or one number for each of them."""
    val = value(node)
    size: Any = val.shape[0] if isinstance(val, torch.Tensor) and val.dim() == 1 else None
    return not is_module_tensor(node) and symbolic(size) and size.node.expr.is_Symbol


def _mixed(why: str, node: fx.Node) -> Mixed:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return Mixed(why, module_path(node), node.name if node.name.startswith(name) else f"{node.name}, {name}")


def _why(error: Exception) -> str:
    if isinstance(error, Mixes):
        return str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"quire cannot follow it: {type(error).__name__}: {first[:200]}"


def _is_known(x: Any) -> bool:
    return isinstance(x, (Const, Rows, Counts, Group, Mixed))


def _has_order(found: Any) -> bool:
    """Whether something is known that is equal to itself only."""
    return any(isinstance(k, (Counts, Group)) or (isinstance(k, Rows) and (
        k.order or k.holds.order or k.holds.ids) is not None) for k in tree_leaves(found, is_leaf=_is_known))
