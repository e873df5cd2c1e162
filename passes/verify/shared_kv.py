"""Layers that attend to the keys and values of an earlier layer (gemma3n, gemma4), so that these are cached once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quire.attn_ops.attention import AttentionSite
from quire.passes.fx import storage_of, value, written_by
from quire.passes.verify.sites import site_nodes, site_of

KV_SOURCES = "quire_kv_sources"  # in the meta of a graph: what ``shared_layers`` found


def shared_layers(graph: fx.Graph) -> dict[int, int]:
    """Of each layer without keys and values of its own, the earlier layer that has them: both calls take the same two values,
    and nothing between changes their memory in place. Pages are freed alike: neither or both have a window or chunk."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    writes = [(order[n], memory(x)) for n in graph.nodes for x in written_by(n)]
    owners: dict[Any, tuple[int, int]] = {}  # by keys, values and whether the layer has a window: (place, layer)
    found: dict[int, int] = {}
    for node in site_nodes(graph):
        site, k, v = site_of(node), _itself(node.args[1]), _itself(node.args[2])
        if site.latent is None and site.causal:
            place, owner = owners.setdefault((k, v, site.bounded), (order[node], site.layer))
            if owner != site.layer and not any(
                    place < at < order[node] and where in (memory(k), memory(v)) for at, where in writes):
                found[site.layer] = owner
    return found


def _itself(node: Any) -> Any:
    """The value that ``to`` returns unchanged: transformers 5.17 moves shared keys and values to the device of the queries."""
    if isinstance(node, fx.Node) and (node.op, node.target, len(node.args)) == ("call_method", "to", 2) and not node.kwargs:
        before, after = value(node.args[0]), value(node)
        if (before.dtype, before.device) == (after.dtype, after.device):
            return _itself(node.args[0])
    return node


def memory(node: Any) -> int | None:
    """Identifies the memory behind a node's tensor, which views of it share; None: no tensor, or one made of several."""
    val = value(node)
    whole = isinstance(val, torch.Tensor) and not is_traceable_wrapper_subclass(val)
    return storage_of(val) if whole else None


def with_sources(gm: fx.GraphModule, sites: Sequence[AttentionSite]) -> list[AttentionSite]:
    """The sites with the ``kv_source`` of those that have one; not of MLA layers served from latent vectors."""
    dense = {s.layer for s in sites if s.latent is None}
    gm.meta[KV_SOURCES] = {a: b for a, b in gm.meta[KV_SOURCES].items() if {a, b} <= dense}
    return [replace(s, kv_source=gm.meta[KV_SOURCES].get(s.layer)) for s in sites]
