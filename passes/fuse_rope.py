"""Fusion of rotary embedding (and the norm of each head before it) with the KV cache write (attn_ops/rope.py).

Before, in a lowered graph, for one layer::

    q, k = (add(mul(x, cos), mul(cat((neg(x[..., D/2:]), x[..., :D/2]), -1), sin)) for x in (q0, k0))
    out = paged_attention(ragged(q), ragged(k), ragged(v), k_cache, v_cache, ...)

After::

    q = rope_kv_write(ragged(q0), ragged(k0), ragged(v), cos, sin, None, None, 0.0, k_cache, v_cache, slot_mapping)
    out = paged_attention(q, None, None, k_cache, v_cache, ...)

or, for a backend whose kernels rotate as well (``AttentionBackend.rope_op``)::

    out = rope_paged_attention(ragged(q0), ragged(k0), ragged(v), cos, sin, None, None, 0.0, k_cache, v_cache, ...)

with ``ragged`` the view of (B, H, S, D) as (B * S, H, D). Also matched: only the first R dimensions rotated (the others joined
again by cat), a cast of the result back to q's dtype, Llama's RMSNorm over each head right before (Qwen3). Left to the
compiler: other orders of dimensions (GPT-J, complex numbers), q and k with cos and sin of their own, layers that share
another's keys.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from attn_ops.rope import rope_kv_write
from passes.fuse_small_linear import match_rms_norm
from passes.graph_tools import erase_dead, is_function, is_method, value
from passes.lowering import Lowered, paged_arguments, set_paged_arguments

_MUL = (operator.mul, torch.mul)
_ADD = (operator.add, torch.add)


class _Rotation(NamedTuple):
    """x (B, H, S, D) rotated by cos and sin (B, S, R)."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node


def fuse_rope(lowered: Lowered) -> int:
    """Rewrite every attention op whose q and k are rotated alike; returns how many."""
    count = 0
    for node in [n for n in lowered.gm.graph.nodes if n.target is lowered.target.backend.op]:
        args = paged_arguments(node)
        if args["k"] is None or args["v"] is None:
            continue
        q, k = (_match(_before_ragged(args[name])) for name in ("q", "k"))
        if q is None or k is None or q.cos is not k.cos or q.sin is not k.sin:
            continue
        graph, old = lowered.gm.graph, [args["q"], args["k"]]
        norms = [_norm_of_heads(r.x) for r in (q, k)]
        with graph.inserting_before(node):
            cos, sin = (graph.call_method("flatten", (x, 0, 1)) for x in (q.cos, q.sin))
            if norms[0] is not None and norms[1] is not None and norms[0].eps == norms[1].eps:
                sources, weights, eps = [n.x for n in norms], [n.weight for n in norms], norms[0].eps
            else:
                sources, weights, eps = [graph.call_method("transpose", (r.x, 1, 2)) for r in (q, k)], [None, None], 0.0
            ragged = [graph.call_method("flatten", (x, 0, 1)) for x in sources]
            rope = (*ragged, args["v"], cos, sin, *weights, eps)
            rope_op = lowered.target.backend.rope_op
            if rope_op is not None:
                new = graph.call_function(rope_op, (*rope, *node.args[3:]), dict(node.kwargs))
                new.meta = dict(node.meta)
                node.replace_all_uses_with(new)
                graph.erase_node(node)
            else:
                caches = (args[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale"))
                rotated = graph.call_function(rope_kv_write, (*rope, *caches, args["slot_mapping"]))
                set_paged_arguments(node, q=rotated, k=None, v=None)
        erase_dead(graph, old)
        count += 1
    return count


def _norm_of_heads(x: fx.Node) -> Any:
    """The RMSNorm over the last dimension of (B, S, H, D) whose result, transposed, is x; None if there is none."""
    if not is_method(x, "transpose") or x.args[1:] != (1, 2):
        return None
    norm = match_rms_norm(x.args[0])  # type: ignore[arg-type]
    size = value(x).shape[-1]
    return norm if norm is not None and value(norm.x).dim() == 4 and tuple(value(norm.weight).shape) == (size,) else None


def _before_ragged(node: Any) -> Any:
    """x of flatten(transpose(x, 1, 2), 0, 1), as the lowering writes it."""
    if is_method(node, "flatten") and node.args[1:] == (0, 1) and is_method(node.args[0], "transpose") \
            and node.args[0].args[1:] == (1, 2):
        return node.args[0].args[0]
    return None


def _match(node: Any) -> _Rotation | None:
    """The rotation whose result is ``node`` (B, H, S, D)."""
    if not isinstance(node, fx.Node):
        return None
    dtype = value(node).dtype
    while is_method(node, "to") or is_method(node, "type_as"):
        node = node.args[0]
    passed, whole = None, node
    if is_method(node, "cat") and node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0) == -1 \
            and isinstance(node.args[0], (list, tuple)) and len(node.args[0]) == 2:
        node, passed = node.args[0]
    if not is_function(node, _ADD) or len(node.args) != 2:
        return None
    for direct, turned in (node.args, node.args[::-1]):
        for x, cos in _factors(direct):
            for half_turned, sin in _factors(turned):
                if _rotate_half(half_turned) is x:
                    return _checked(x, passed, cos, sin, whole, dtype)
    return None


def _factors(node: Any) -> list[tuple[fx.Node, fx.Node]]:
    if not is_function(node, _MUL) or len(node.args) != 2 or not all(isinstance(a, fx.Node) for a in node.args):
        return []
    return [(node.args[0], node.args[1]), (node.args[1], node.args[0])]


def _part(node: Any) -> tuple[fx.Node, int, int] | None:
    """(x, begin, end) of x[..., begin:end]."""
    if not is_function(node, (operator.getitem,)) or not isinstance(node.args[1], tuple) or len(node.args[1]) != 2:
        return None
    dots, piece = node.args[1]
    if dots is not Ellipsis or not isinstance(piece, slice) or piece.step not in (None, 1):
        return None
    size = value(node.args[0]).shape[-1]
    if any(not isinstance(edge, (int, type(None))) for edge in (piece.start, piece.stop)):
        return None
    begin, end, _ = piece.indices(size)
    return node.args[0], begin, end


def _rotate_half(node: Any) -> fx.Node | None:
    """x of cat((-x[..., R/2:], x[..., :R/2]), -1)."""
    if not is_method(node, "cat") or not isinstance(node.args[0], (list, tuple)) or len(node.args[0]) != 2 \
            or node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0) != -1:
        return None
    minus, first = node.args[0]
    if not is_method(minus, "neg"):
        return None
    second, first = _part(minus.args[0]), _part(first)
    if second is None or first is None or first[0] is not second[0]:
        return None
    size = value(first[0]).shape[-1]
    return first[0] if first[1:] == (0, size // 2) and second[1:] == (size // 2, size) and size % 2 == 0 else None


def _checked(x: fx.Node, passed: Any, cos: fx.Node, sin: fx.Node, whole: fx.Node, dtype: torch.dtype) -> _Rotation | None:
    """The rotation, if what was found is one of whole heads by tables that are one a token."""
    size = value(x).shape[-1]
    if passed is not None:  # x is the first R dimensions of a head, and ``passed`` the others
        part, rest = _part(x), _part(passed)
        if part is None or rest is None or part[0] is not rest[0] or part[1:] != (0, size) \
                or rest[1:] != (size, value(part[0]).shape[-1]):
            return None
        x = part[0]
    if value(x).dim() != 4 or value(x).dtype != dtype or str(value(whole).shape) != str(value(x).shape):
        return None
    tables = []
    for table in (cos, sin):
        if not is_method(table, "unsqueeze") or table.args[1:] != (1,):
            return None
        table, wanted = table.args[0], (value(x).shape[0], value(x).shape[2], size)  # type: ignore[assignment]
        if str(tuple(value(table).shape)) != str(wanted) or not value(table).dtype.is_floating_point:
            return None
        tables.append(table)
    return _Rotation(x, tables[0], tables[1])


__all__ = ["fuse_rope"]
