"""What an attention mask means, derived from the graph that builds it.

``MaskProver`` reads the sub-graph of a mask as a condition on a query and a key position (``mask_formula.py``), for one
sequence at positions 0, 1, 2, ..., where ``arange`` over its tokens and ``position_ids`` are the same, and compares it with the
causal, sliding-window and chunked masks for all positions (``mask_decision.py``). Only operators with a rule
(``mask_rules.py``, ``mask_parts.py``) are understood; what depends on token ids, activations, other arguments of the call, or
the number of tokens is refused.

A float mask must be 0 where a key is visible and hide it everywhere else: -inf, or no more than half the least number of its
dtype, which absorbs any score. Arithmetic must be exact in its dtype for ``MAX_POSITIONS`` positions.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import fx

import quire.passes.verify.mask_parts  # noqa: F401  (it adds its rules)
from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.fx import (
    ancestors,
    erase_dead,
    evaluate,
    is_one,
    is_stored,
    is_tensor,
    last_key,
    module_path,
    placeholders,
    source_name,
    storage_of,
    symbolic,
    torch_name,
    value,
    written_by,
)
from quire.passes.tensor_version import version_of
from quire.passes.verify import mask_formula as formula
from quire.passes.verify.mask_decision import agree, first_hidden, reach
from quire.passes.verify.mask_formula import Condition, Operand, Term, Unprovable
from quire.passes.verify.mask_rules import RULES

_MAX_HEADS = 1024
_SMALL = 2**20  # entries of a stored tensor up to which a copy on the CPU is compared with it
_STATIC = frozenset("""
    add iadd sub isub rsub mul imul truediv div floordiv floor_divide mod remainder neg abs pow exp exp2 log log2 sqrt
    rsqrt floor ceil round clamp eq ne lt le gt ge and_ or_ xor invert logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_not where masked_fill arange linspace full full_like ones ones_like zeros zeros_like
    new_full new_ones new_zeros new_tensor tensor as_tensor eye tril triu cat stack getitem view reshape unsqueeze squeeze
    expand expand_as transpose permute flatten t repeat repeat_interleave cumsum cumprod flip roll outer to float bool
    long int half bfloat16 double type type_as clone contiguous detach index_select gather isin max min maximum minimum
    sum any all argsort sort
""".split())


class Refusal(Exception):
    """The mask, or the attention call, cannot be raised; the text says why."""


@dataclass(frozen=True)
class MaskKind:
    """What a mask was proven to mean."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None

    def condition(self) -> Condition:
        """The same on positions -2 (query) and -1 (key)."""
        query, key = formula.var(-2), formula.var(-1)
        keep: Condition = formula.compare(key, "le", query) if self.causal else True
        if self.window is not None:
            keep = formula.both(keep, formula.compare(formula.minus(query, key), "lt", self.window))
        if self.chunk is not None:
            of = [formula.floor(formula.times(p, Fraction(1, self.chunk))) for p in (query, key)]
            keep = formula.both(keep, formula.compare(of[0], "eq", of[1]))
        return keep


class StoredMasks:
    """Notices changes of the stored tensors of proven masks. ``tensors``: (place among the inputs, tensor). Not kept alive."""

    def __init__(self, tensors: list[tuple[int, torch.Tensor]]) -> None:
        self._seen = [
            (place, weakref.ref(t), version_of(t),
             t.detach().clone() if t.device.type == "cpu" and t.numel() <= _SMALL else None) for place, t in tensors]

    def check(self, args: Sequence[Any]) -> None:
        """Raises UnsupportedAttention if the graph is called with other values."""
        for place, ref, version, copy in self._seen:
            now = args[place]
            same = torch.equal(copy, now) if copy is not None else ref() is now and version_of(args[place]) == version
            if not same:
                raise UnsupportedAttention(
                    f"a stored tensor of shape {tuple(now.shape)} that an attention mask is made of has changed since the "
                    "model was traced; call torch._dynamo.reset(), or make a new engine, after changing it")


@dataclass
class MaskProver:
    """Proves the masks of one graph, traced by Dynamo. ``tokens``: the size of the token dimension. ``inputs``: real tensors of
    placeholders by node name, for stored masks and numbers. ``used``: names of those that proofs rest on.  ``longest``: length
    up to which all proofs hold, that of the stored masks; None: any."""

    graph: fx.Graph
    tokens: Any
    inputs: dict[str, Any]
    used: set[str] = field(default_factory=set)
    longest: int | None = None

    def stored(self) -> StoredMasks:
        """What the proofs so far rest on."""
        return StoredMasks([(k, self.inputs[n.name]) for k, n in enumerate(placeholders(self.graph)) if n.name in self.used])

    def written_between(self, node: fx.Node, at: fx.Node) -> bool:
        """Whether the memory of a tensor is changed in place after ``node`` made it and before ``at`` reads it."""
        writes = self._writes.get(_storage(node), ()) if isinstance(value(node), torch.Tensor) else ()
        return any(self._order[node] < self._order.get(w, -1) < self._order[at] for w in writes)

    def erase_dead_writes(self) -> None:
        """Erase what is written in place and, now that the masks are gone, never read."""
        for storage in self._read_from & set(self._writes):
            group = {n for n in self.graph.nodes if isinstance(value(n), torch.Tensor) and _storage(n) == storage}
            group |= set(self._writes[storage])
            if all(n.op != "placeholder" and set(n.users) <= group and set(written_by(n)) <= group for n in group):
                inputs = [i for n in group for i in n.all_input_nodes if i not in group]
                for node in sorted(group, key=self._order.__getitem__, reverse=True):
                    self.graph.erase_node(node)
                erase_dead(self.graph, inputs)

    def __post_init__(self) -> None:
        self._order = {n: k for k, n in enumerate(self.graph.nodes)}
        self._kinds: dict[tuple[fx.Node, int], MaskKind] = {}
        self._known: dict[tuple[fx.Node, fx.Node | None], Any] = {}
        self._writes: dict[int, list[fx.Node]] = {}
        self._read_from: set[int] = set()
        for node in self.graph.nodes:
            for written in written_by(node):
                if isinstance(value(written), torch.Tensor):
                    self._writes.setdefault(_storage(written), []).append(node)
        self._at: fx.Node | None = None

    def prove(self, mask: fx.Node, at: fx.Node) -> MaskKind:
        """The kind of ``mask`` as the node ``at`` reads it. Raises Refusal if it is not proven to be of any."""
        writes = [w for w in self._writes.get(_storage(mask), ()) if self._order[w] < self._order[at]]
        key = mask, len(writes)
        if key not in self._kinds:
            self._kinds[key] = self._prove(mask, at)
        return self._kinds[key]

    def _prove(self, mask: fx.Node, at: fx.Node) -> MaskKind:
        if not symbolic(self.tokens):
            raise Refusal(f"the graph was traced for exactly {self.tokens} tokens, too few to tell what its mask means for "
                          "longer sequences; compile with dynamic=True")
        self._at = None
        try:
            heads = self._of_each_head(mask, self._read(mask, at))
            kinds = [_classify(keep) for keep in heads]
            self.longest = min((n for n in (self.longest, *map(reach, heads)) if n is not None), default=None)
        except Exception as error:  # an operator called in a way that its rule does not know
            why = str(error) if isinstance(error, Unprovable) else f"it could not be read ({type(error).__name__}: {error})"
            node = self._at or mask
            where = module_path(node)
            raise Refusal(f"its mask is not proven to be one of positions: {why} (node {node.name}"
                          f"{f' of {where}' if where else ''}); a causal, sliding-window or chunked mask made of position_ids "
                          "and constants can be served") from None
        if any(kind != kinds[0] for kind in kinds):
            raise Refusal("its mask differs between heads (ALiBi, or a window per head?)")
        return kinds[0]

    def _of_each_head(self, mask: fx.Node, element: Any) -> list[Condition]:
        """The conditions under which a key is visible, for each head or other leading index that the mask depends on."""
        dtype, shape = value(mask).dtype, value(mask).shape
        if len(shape) < 2 or not all(self.is_row(s) or is_one(s) for s in shape[-2:]):
            raise Unprovable(f"it has shape {tuple(shape)}, not (..., {self.tokens}, {self.tokens})")
        heads: list[dict[int, Operand]] = [{}]
        for axis in sorted(formula.axes(element) - {-2, -1}):
            size = shape[axis]
            if symbolic(size) or size * len(heads) > _MAX_HEADS:
                raise Unprovable("it differs between sequences")
            heads = [{**h, axis: k} for h in heads for k in range(size)]
        found: list[Condition] = []
        for each in heads:
            one = formula.substitute(element, each)
            if dtype != torch.bool:
                hidden = formula.compare(one, "le", torch.finfo(dtype).min / 2)
                keep = formula.compare(one, "eq", 0)
                if not agree(formula.either(keep, hidden), True):
                    raise Unprovable("it adds a bias to the scores (ALiBi, relative positions, or hidden keys that are not at "
                                     f"-inf or torch.finfo({dtype}).min, which a large score would outweigh)")
                one = keep
            if one not in found:
                found.append(one)
        return found

    def element(self, node: fx.Node) -> Any:
        """An element of a node's tensor, as a term or condition on its indices, as ``self._at`` reads it."""
        return self._read(node, self._at)

    def _read(self, node: fx.Node, at: fx.Node | None) -> Any:
        val = value(node)
        if not isinstance(node, fx.Node) or not isinstance(val, torch.Tensor):
            self._at = node if isinstance(node, fx.Node) else at
            size = isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool))
            raise Unprovable(f"it depends on {'the number of tokens' if size else node}")
        end = self._order[at] if at is not None else len(self._order)
        self._read_from.add(_storage(node))
        writes = [w for w in self._writes.get(_storage(node), ()) if self._order[node] < self._order[w] < end]
        if any(node not in written_by(w) for w in writes) or (writes and node.op == "placeholder"):
            self._at = writes[0]
            raise Unprovable("a tensor that it is made of is changed in place")
        by = writes[-1] if writes else node
        if (by, node) not in self._known:
            before, self._at = self._at, by
            self._known[by, node] = self._checked(by, node)
            self._at = before
        return self._known[by, node]

    def _checked(self, by: fx.Node, node: fx.Node) -> Any:
        """What ``by`` computes, or writes to ``node``; its numbers exact in their dtype."""
        found = self._stored(by) if by is node else None
        if found is None:
            found = self._input(by) if by.op == "placeholder" else self._call(by)
        dtype = value(node).dtype
        single = [axis for axis in formula.axes(found) if is_one(value(node).shape[axis])]
        found = formula.substitute(found, dict.fromkeys(single, 0)) if single else found
        if dtype == torch.bool:
            return formula.as_condition(found)
        return formula.exact(formula.as_term(found), dtype)

    def _input(self, node: fx.Node) -> Any:
        val, name = value(node), source_name(node)
        if is_stored(node):
            raise Unprovable(f"it depends on {name}, whose values are not known")
        given = {last_key(n) for n in placeholders(self.graph)}
        names = {"position_ids", "cache_position"} if "position_ids" in given else {"positions", "cache_position"}
        if last_key(node) in names:
            if not val.is_floating_point() and val.dim() in (1, 2) and self.is_row(val.shape[-1]):
                return formula.var(-1)
            raise Unprovable(f"it depends on {name} of shape {tuple(val.shape)}")
        if "attention_mask" in name:
            raise Unprovable("an attention_mask was passed; a paged batch is ragged and takes none")
        raise Unprovable(f"it depends on {name}" + (", token ids" if "ids" in name else ""))

    def _stored(self, node: fx.Node) -> Any:
        """An entry of a tensor that is the same in every call: a buffer, a constant, or computed from such; else None."""
        val = value(node)
        if node.op != "placeholder" and any(symbolic(s) for s in val.shape):
            return None  # an attribute may have symbolic sizes, but it is compared with its value in each call
        nodes = ancestors(node)
        env: dict[fx.Node, Any] = {}
        for n in nodes:
            if n.op == "placeholder":
                if not is_stored(n) or not isinstance(self.inputs.get(n.name), torch.Tensor):
                    return None
                if self._writes.get(_storage(n)):
                    raise Unprovable(f"{source_name(n)} is changed in place")
                env[n] = self.inputs[n.name].detach()
            elif n.op != "get_attr" and (torch_name(n) not in _STATIC or written_by(n)):
                return None
            elif isinstance(value(n), torch.Tensor) and self._writes.get(_storage(n)):
                return None
        try:
            with torch.no_grad():
                evaluate(nodes, env)
        except Exception as error:
            raise Unprovable(f"its constants could not be computed ({type(error).__name__}: {error})") from error
        self.used |= {n.name for n in nodes if n.op == "placeholder"}
        return formula.entry(env[node])

    def _call(self, node: fx.Node) -> Any:
        rule = RULES.get(torch_name(node)) if node.op.startswith("call") else None
        if rule is None:
            tensors = [n for n in ancestors(node, stop=lambda n: not is_tensor(n)) if n.op == "placeholder"]  # not of a size
            ids = next((n for n in tensors if "input_ids" in source_name(n)), None)
            name = torch_name(node) or getattr(node.target, "__name__", node.op)
            raise Unprovable(f"it uses {name}" + (", on token ids" if ids is not None else
                             ", which is not known to keep to positions"))
        return rule(self, node, *node.args, **node.kwargs)

    def term(self, arg: Any, dtype: torch.dtype | None = None) -> Term:
        """An argument as a number: a tensor's element or a constant; as it is after conversion to ``dtype``."""
        if isinstance(arg, fx.Node) and isinstance(value(arg), torch.Tensor):
            found = formula.as_term(self.element(arg))
            return found if dtype is None else formula.exact(found, dtype)
        number, result = formula.number(self.constant(arg)), value(self._at)
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return number
        # Arithmetic rounds a Python number first: to float32 for narrower dtypes, which are computed in it.
        return formula.exact(number, torch.promote_types(result.dtype, torch.float32))

    def condition(self, arg: Any) -> Condition:
        if isinstance(arg, fx.Node) and isinstance(value(arg), torch.Tensor):
            return formula.as_condition(self.element(arg))
        return bool(self.constant(arg))

    def constant(self, arg: Any) -> Any:
        """A Python number that is the same in every call."""
        number = value(arg)
        if isinstance(number, (torch.SymInt, torch.SymFloat)):
            expr = number.node.shape_env.replace(number.node.expr)
            if expr.is_number:
                return int(expr) if isinstance(number, torch.SymInt) else float(expr)
            source: Any = arg.args[0] if isinstance(arg, fx.Node) and torch_name(arg) == "item" else None
            stored = self.inputs.get(source.name) if isinstance(source, fx.Node) and is_stored(source) else None
            if not isinstance(stored, torch.Tensor):
                raise Unprovable("it depends on the number of tokens")
            self.used.add(source.name)  # a float that a module holds, which Dynamo passes as a tensor
            number = stored.item()
        if not isinstance(number, (int, float)):
            raise Unprovable(f"it depends on {arg}, which is not constant")
        return number

    def is_row(self, size: Any) -> bool:
        return str(size) == str(self.tokens)


def _classify(keep: Condition) -> MaskKind:
    candidates = [MaskKind()]
    hidden = first_hidden(keep)
    if hidden:
        candidates = [MaskKind(window=hidden), MaskKind(chunk=hidden)]
    elif hidden == 0:
        candidates = []
    for kind in (*candidates, MaskKind(causal=False)):
        if agree(keep, kind.condition()):
            return kind
    raise Unprovable("it is none of causal, sliding window, chunk")


def _storage(node: fx.Node) -> int:
    try:
        return storage_of(value(node))
    except NotImplementedError:  # sparse
        return -1
