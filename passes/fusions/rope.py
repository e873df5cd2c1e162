"""Rotary embedding, the norm of each head before or after it, and the KV cache write become one op (attn_ops/ops/rope.py).

Before, in a lowered graph, for one layer::

    q, k = (add(mul(x, cos), mul(cat((neg(x[..., D/2:]), x[..., :D/2]), -1), sin)) for x in (q0, k0))
    out = paged_attention(ragged(q), ragged(k), ragged(v), k_cache, v_cache, ...)

After::

    q = rope_kv_write(ragged(q0), ragged(k0), ragged(v), cos, sin, None, None, 0.0, k_cache, v_cache, slot_mapping)
    out = paged_attention(q, None, None, k_cache, v_cache, ...)

or, for a backend whose attention kernels also rotate (``AttentionBackend.rope_op``)::

    out = rope_paged_attention(ragged(q0), ragged(k0), ragged(v), cos, sin, None, None, 0.0, k_cache, v_cache, ...)

``ragged`` is the view of (B, H, S, D) as (B * S, H, D). Other forms of the rotation (``passes/fusions/match/rope.py``) set
options of the ops; a ``rope_op`` that does not declare them (``rope_forms``) only gets the first form. An RMSNorm over each
head right before (Qwen3, Gemma 3) or right after (HunYuan), with or without weights (Llama 4), is fused too
(``passes/fusions/match/norm.py``).

Left to the compiler: heads or tables that are changed in place after the rotation; q and k with different tables; layers that
share another layer's keys; heads of which some dimensions come from elsewhere (DeepSeek's latent attention); q scaled by
position after the rotation (Ministral 3); norms over all heads at once (OLMo 2) and LayerNorms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from quire.attn_ops.ops.rope import PLAIN, RopeForm, rope_kv_write
from quire.passes.fusions.base import Fusion
from quire.passes.fusions.match.norm import RMSNorm, match_rms_norm
from quire.passes.fusions.match.rope import Rotation, Table, match_rotation
from quire.passes.fx import (
    erase_dead,
    is_method,
    replace_node,
    schema_arguments,
    storage_of,
    value,
    written_between,
    written_memory,
)


class _Heads(NamedTuple):
    """q or k: the rotation, and a norm before or after it, of ``x``, whose heads are in dimension ``heads_dim``."""

    rotation: Rotation
    x: fx.Node
    heads_dim: int
    norm: RMSNorm | None = None
    norm_after: bool = False

    def form(self) -> tuple[Any, ...]:
        """The facts that must be equal for q and k."""
        r, norm = self.rotation, self.norm
        return r.cos, r.sin, r.interleaved, r.half_tables, self.norm_after, norm and (norm.eps, norm.offset)

    def without_norm_before(self) -> _Heads:
        return self if self.norm_after else _Heads(self.rotation, self.rotation.x, self.rotation.heads_dim)


def fuse_rope(fusion: Fusion) -> int:
    """Rewrite every attention op whose q and k are rotated alike."""
    assert fusion.backend is not None, "a pass of the lowered graph"
    if fusion.backend.op is None:  # of the latent cache alone
        return 0
    count, shared = 0, _Shared(fusion.graph)
    written = written_memory(fusion.graph)
    for node in list(fusion.graph.find_nodes(op="call_function", target=fusion.backend.op)):
        args = schema_arguments(node)
        if args["k"] is None or args["v"] is None:
            continue
        q, k = (_heads(_before_ragged(args[name])) for name in ("q", "k"))
        if q is None or k is None:
            continue
        if q.form() != k.form():
            q, k = q.without_norm_before(), k.without_norm_before()
        if q.form() != k.form() or not written.isdisjoint(
                storage_of(value(table.node)) for table in (q.rotation.cos, q.rotation.sin)) \
                or any(written_between(heads.x, node) for heads in (q, k)):  # the op reads them where it stands
            continue
        _rewrite(fusion, node, q, k, shared)
        count += 1
    return count


def _rewrite(fusion: Fusion, node: fx.Node, q: _Heads, k: _Heads, shared: _Shared) -> None:
    graph, args, backend = fusion.graph, schema_arguments(node), fusion.backend
    rotation, norm = q.rotation, q.norm
    form = RopeForm(rotation.interleaved, rotation.half_tables, q.norm_after, norm.offset if norm else None)
    tables = [shared.table(table) for table in (rotation.cos, rotation.sin)]
    weights = [shared.weight(heads.norm) for heads in (q, k)]
    with graph.inserting_before(node):
        cos, sin = (graph.call_method("flatten", (x, 0, 1)) for x in tables)
        rows = [h.x if h.heads_dim == 2 else graph.call_method("transpose", (h.x, 1, 2)) for h in (q, k)]
        ragged = [graph.call_method("flatten", (x, 0, 1)) for x in rows]
        rope = (*ragged, args["v"], cos, sin, *weights, norm.eps if norm else 0.0)
        if backend.rope_op is not None and (backend.rope_forms or form == PLAIN):  # type: ignore[union-attr]
            options = {**node.kwargs, **form.options()}
            replace_node(node, graph.call_function(backend.rope_op, (*rope, *node.args[3:]), options))  # type: ignore
        else:
            caches = (args[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale"))
            rotated = graph.call_function(rope_kv_write, (*rope, *caches, args["slot_mapping"]), {**form.options()})
            node.args = (rotated, None, None, *node.args[3:])
            erase_dead(graph, [args["q"], args["k"]])


class _Shared:
    """Nodes that every layer reads, made once, right behind their inputs."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._made: dict[Any, fx.Node] = {}

    def table(self, table: Table) -> fx.Node:
        """The table (B, S, R or R/2) as the op takes it. A slice stays a view; the others are copies."""
        if table in self._made:
            return self._made[table]
        node, made = table.node, value(table.node)
        with self._after(node):
            if table.part is not None:
                node = self.graph.call_method("select", (self.graph.call_function(torch.view_as_real, (node,)), -1, table.part))
                node = self.graph.call_method("contiguous", (node,))
            if made.shape[-1] != table.width:
                node = self.graph.call_method("narrow", (node, -1, 0, table.width))
            if table.dtype not in (made.dtype, made.dtype.to_real()):
                node = self.graph.call_method("to", (node, table.dtype))
            if table.negated:
                node = self.graph.call_method("neg", (node,))
        self._made[table] = node
        return node

    def weight(self, norm: RMSNorm | None) -> fx.Node | None:
        """The weight (D,) of a norm: ones, if it has none."""
        if norm is None or norm.weight is not None:
            return norm and norm.weight
        x = value(norm.x)
        key = (x.shape[-1], x.dtype)
        if key not in self._made:
            with self._after(None):
                self._made[key] = self.graph.call_function(torch.ones, (x.shape[-1],), dict(dtype=x.dtype, device=x.device))
        return self._made[key]

    def _after(self, node: fx.Node | None) -> Any:
        """Insert behind the node, but never among the inputs."""
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        return self.graph.inserting_before(first if node is None or node.op == "placeholder" else node.next)


def _heads(node: Any) -> _Heads | None:
    """q or k (B, H, S, D): rotated as it is, or before heads and tokens are transposed."""
    for heads, heads_dim in ((node, 1), (node.args[0] if _is_transposed(node) else None, 2)):
        rotation = match_rotation(heads, heads_dim)
        if rotation is not None:
            x = rotation.x
            if heads_dim == 1 and _is_transposed(x) and _norm(x) is None:
                x, heads_dim = x.args[0], 2  # type: ignore[assignment]
            if (norm := _norm(x)) is not None:
                return _Heads(rotation, norm.x, heads_dim, norm)
            return _Heads(rotation, rotation.x, rotation.heads_dim)
        norm = _norm(heads)
        rotation = match_rotation(norm.x, heads_dim) if norm is not None else None
        if rotation is not None:
            return _Heads(rotation, rotation.x, heads_dim, norm, norm_after=True)
    return None


def _norm(node: Any) -> RMSNorm | None:
    """The RMSNorm over the last of four dimensions whose result is ``node``."""
    norm = match_rms_norm(node)
    return norm if norm is not None and value(norm.x).dim() == 4 else None


def _is_transposed(node: Any) -> bool:
    return is_method(node, "transpose") and node.args[1:] == (1, 2)


def _before_ragged(node: Any) -> Any:
    """x of flatten(transpose(x, 1, 2), 0, 1), as the lowering writes it."""
    if is_method(node, "flatten") and node.args[1:] == (0, 1) and _is_transposed(node.args[0]):
        return node.args[0].args[0]
    return None
