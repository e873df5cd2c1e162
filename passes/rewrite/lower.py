"""The lowering pass: each semantic attention op becomes the paged op of the chosen backend.

Before::

    out = quire.attention(q, k, v, sinks, layer=3, scale=s, window=w, softcap=None, chunk=None, causal=True)

After, with the cache and the batch metadata as new graph inputs::

    prepared = quire.<backend>_prepare(slot_mapping, block_table, query_start_loc, seq_lens, page_size)   # once; a list
    q_, k_, v_ = (flatten(transpose(x, 1, 2), 0, 1) for x in (q, k, v))                                  # (T, heads, dim)
    out_ = quire.<backend>_paged_attention(q_, k_, v_, k_cache_3, v_cache_3, None, None, slot_mapping, ..., sinks, prepared,
                                           scale=s, ...)
    out = transpose(view(out_, B, -1, H, Dv), 1, 2)

An MLA layer on a latent cache (``raise_mla.py``), quire.mla_attention(q, c, k_rope, kv_b, ...), becomes
quire.<backend>_mla_paged_attention(q_, c_, k_rope_, kv_b, k_cache_3, slot_mapping, ..., prepared, scale=s). A quantized cache
has inputs k_scale_3 and v_scale_3 in the place of None and None. A layer that attends to an earlier one's keys and values takes
that one's cache, and None for k and v. Layers with a window that have page numbers of their own have the inputs
window_slot_mapping and window_block_table, and a second ``prepared``.

The new inputs come after the graph's own, in the order of ``LoweredInputs``, which collects their values from the current step.
Sizes that a batch or a cache decides are dynamic, so one compiled graph serves every batch shape and cache size. Each layer has
a K and a V input of its own, with as many pages: slices of one tensor would make Inductor copy it.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.kv_cache import Layout, PagedKVCache
from quire.attn_ops.kv_quant import is_fixed
from quire.attn_ops.step import Step
from quire.passes.fake_values import any_sizes, fake_beside, fake_input
from quire.passes.fx import add_input, fake_mode, placeholders, value
from quire.passes.rewrite.last_rows import LAST_ROWS, LastRows, one_query_each
from quire.passes.rewrite.length_rope import LIMITS, lower_lengths
from quire.passes.rewrite.raise_mla import raise_mla
from quire.passes.verify.shared_kv import KV_SOURCES
from quire.passes.verify.sites import site_nodes, site_of

logger = logging.getLogger(__name__)
#: In the meta of a raised graph and its copies: the fakes of the inputs that lowering added to one of them, by target and name.
ADDED_INPUTS = "quire_added_inputs"


@dataclass(frozen=True)
class LoweringTarget:
    """What to lower to: the backend, and the static facts of the cache. ``latent``: MLA layers are on latent vectors.
    ``window_tables``: layers with a window or chunk have slots and a block table of their own, if others have neither.
    ``shared``: layers that attend to another layer's keys and values read its cache, and store nothing."""

    backend: AttentionBackend
    page_size: int
    kv_dtype: torch.dtype | None = None
    layout: Layout = "NHD"
    latent: bool = False
    window_tables: bool = False
    shared: bool = False
    fixed_scale: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """To compare targets by, in all fields: the backend, which has no hash, by its name."""
        return self.backend.name, *(getattr(self, field.name) for field in fields(self) if field.name != "backend")


@dataclass(frozen=True)
class LoweredInputs:
    """The inputs that lowering adds: the four metadata tables, with ``window_tables`` two more, K and V (and scales) of each of
    the ``layers`` with their own, with ``lengths`` at last those of whole sequences (``length_rope.py``)."""

    layers: tuple[int, ...]
    window_tables: bool = False
    lengths: bool = False

    def of(self, step: Step) -> list[torch.Tensor]:
        """Their values in ``step``, in the graph's order."""
        meta, cache = step.metadata, step.cache
        tensors = [meta.slot_mapping, meta.block_table_tensor, meta.query_start_loc, meta.seq_lens]
        if self.window_tables:
            of_windows = step.window_metadata or meta
            tensors += [of_windows.slot_mapping, of_windows.block_table_tensor]
        tensors += [tensor for layer in self.layers for tensor in cache.of_layer(layer) if tensor is not None]
        return tensors + ([meta.seq_lens if meta.total_lens is None else meta.total_lens] if self.lengths else [])


@dataclass(frozen=True)
class Lowered:
    """A lowered graph. ``example_inputs`` are fakes of the added inputs, for the compiler."""

    gm: fx.GraphModule
    target: LoweringTarget
    inputs: LoweredInputs
    sites: tuple[AttentionSite, ...]
    example_inputs: tuple[torch.Tensor, ...]


def lower(gm: fx.GraphModule, target: LoweringTarget) -> Lowered:
    """Lower every semantic op of ``gm``, a copy of Dynamo's graph, in place, for a ``target`` that was checked against the
    sites. Raises ValueError if the graph has no fake values."""
    if target.latent:
        raise_mla(gm)
    nodes, fake = site_nodes(gm.graph), fake_mode(gm.graph)
    if fake is None:
        raise ValueError("the graph has no fake tensor inputs; it must come from Dynamo")
    sources = gm.meta.get(KV_SOURCES, {}) if target.shared else {}
    sites = [replace(s, kv_source=sources.get(s.layer)) for s in map(site_of, nodes)]
    device = value(nodes[0].args[0]).device
    # Sizes are arbitrary, but all different and none 0 or 1, so that no symbol is merged with another or specialized.
    tokens, reqs, pages, width = 37, 5, 41, 11
    added: list[fx.Node] = []
    made = gm.meta.get(ADDED_INPUTS, {})

    def new_input(name: str, like: torch.Tensor, dynamic: tuple[bool, ...], first: fx.Node | None = None) -> fx.Node:
        """The same symbols in each graph for one target: they are the same numbers, and PyTorch takes milliseconds for one."""
        key = (target.key, name)
        if key not in made:
            made[key] = fake_beside(value(first), like) if first is not None else fake_input(
                fake, f"quire_{name}", like, dynamic, device)
        added.append(add_input(gm.graph, f"quire_{name}", made[key]))
        return added[-1]

    def table(name: str, dtype: torch.dtype, *shape: int) -> fx.Node:
        return new_input(name, torch.empty(shape, dtype=dtype, device="meta"), (True,) * len(shape))

    def cache(layer: int) -> list[fx.Node | None]:
        """A layer's tensors have as many pages, and one symbol for them: making one takes milliseconds."""
        of_layer = list[fx.Node | None]()
        for name, like in zip(("k_cache", "v_cache", "k_scale", "v_scale"), shapes.of_layer(layer), strict=True):
            first = of_layer[0] if of_layer and like is not None and not is_fixed(like) else None
            of_layer.append(None if like is None else new_input(
                f"{name}_{layer}", like, (not is_fixed(like), *[False] * (like.dim() - 1)), first))
        return of_layer

    tables = [table("slot_mapping", torch.int64, tokens), table("block_table", torch.int32, reqs, width),
              table("query_start_loc", torch.int32, reqs + 1), table("seq_lens", torch.int32, reqs)]
    own = target.window_tables and len({site.bounded for site in sites}) > 1
    window_tables = tables if not own else [
        table("window_slot_mapping", torch.int64, tokens), table("window_block_table", torch.int32, reqs, width), *tables[2:]]
    shapes = PagedKVCache.for_sites(sites, num_pages=pages, page_size=target.page_size, device="meta", dtype=target.kv_dtype,
                                    layout=target.layout, kv_scales=1.0 if target.fixed_scale else None)
    layers = tuple(s.layer for s in sites if s.kv_source is None)
    caches = {layer: cache(layer) for layer in layers}
    limits = gm.meta.get(LIMITS)
    if limits:
        lower_lengths(gm, tables[2], table("total_lens", torch.int32, reqs))
    last: LastRows | None = gm.meta.get(LAST_ROWS)
    batches: dict[tuple[bool, bool], Any] = {}  # tables and ``prepared``, by whether of windows, and of last rows alone
    for node, site in zip(nodes, sites, strict=True):
        key = own and site.bounded, last is not None and site.layer in last.layers
        if key not in batches:
            its: Sequence[fx.Node] = window_tables if key[0] else tables
            its = _of_last_rows(gm.graph, its, last.index) if last is not None and key[1] else its
            batches[key] = its, _prepare(gm.graph, target, its, fake)
        lower_site = _lower_mla if site.latent is not None else _lower_one
        lower_site(node, site, target.backend, batches[key][0],
                   caches[site.layer if site.kv_source is None else site.kv_source], batches[key][1])
    gm.graph.lint()
    gm.recompile()
    logger.info("lower: %d sites to %s", len(nodes), target.backend.name)
    inputs = LoweredInputs(layers, own, bool(limits))
    return Lowered(gm, target, inputs, tuple(sites), tuple(map(value, added)))


def _of_last_rows(graph: fx.Graph, tables: Sequence[fx.Node], index: fx.Node) -> list[fx.Node]:
    """The tables of a batch of the tokens of ``index``, the last of each sequence."""
    slot_mapping, block_table, query_start_loc, seq_lens = tables
    with graph.inserting_before(placeholders(graph)[-1].next):
        made = [graph.call_method("index_select", (slot_mapping, 0, index)),
                graph.call_function(one_query_each, (query_start_loc,))]
    values = value(slot_mapping), value(query_start_loc)
    with values[0].fake_mode, enable_python_dispatcher():
        made[0].meta["example_value"] = values[0].index_select(0, value(index))
        made[1].meta["example_value"] = one_query_each(values[1])
    return [made[0], block_table, made[1], seq_lens]


def _prepare(graph: fx.Graph, target: LoweringTarget, tables: Sequence[fx.Node], fake: FakeTensorMode) -> list[fx.Node]:
    """The tensors that the backend's ``prepare`` makes of the tables, once per forward."""
    prepare = target.backend.prepare
    if prepare is None:
        return []
    if fake.shape_env is not None:  # their sizes may depend on data; Dynamo allows that with fullgraph only
        fake.shape_env.settings = replace(fake.shape_env.settings, allow_dynamic_output_shape_ops=True)
    with fake, enable_python_dispatcher(), any_sizes(fake):
        count = len(prepare(*map(value, tables), target.page_size))
    made_last = [n for n in tables if n.op != "placeholder"]
    with graph.inserting_before((max(made_last) if made_last else placeholders(graph)[-1]).next):
        made = graph.call_function(prepare, (*tables, target.page_size))
        return [graph.call_function(operator.getitem, (made, i)) for i in range(count)]


def _lower_one(node: fx.Node, site: AttentionSite, backend: AttentionBackend, tables: Sequence[fx.Node],
               cache: Sequence[fx.Node | None], prepared: Any) -> None:
    graph = node.graph
    q, k, v, sinks = node.args
    batch = value(q).shape[0]
    with graph.inserting_before(node):
        ragged: list[Any] = [graph.call_method("flatten", (graph.call_method("transpose", (x, 1, 2)), 0, 1))
                             for x in ((q, k, v) if site.kv_source is None else (q,))]
        ragged += [None] * (3 - len(ragged))
        out = graph.call_function(backend.op, (*ragged, *cache, *tables, sinks, prepared), {
            "scale": site.scale, "window": site.window, "softcap": site.softcap, "chunk": site.chunk})
        first = batch if isinstance(batch, int) else graph.call_method("size", (q, 0))
        _replace(node, out, first, site)


def _lower_mla(node: fx.Node, site: AttentionSite, backend: AttentionBackend, tables: Sequence[fx.Node],
               cache: Sequence[fx.Node | None], prepared: Any) -> None:
    graph, op = node.graph, backend.mla_op
    assert op is not None  # the backend declares mla
    q, c, k_rope, kv_b = node.args
    with graph.inserting_before(node):
        ragged = graph.call_method("flatten", (graph.call_method("transpose", (q, 1, 2)), 0, 1))
        rows = [graph.call_method("flatten", (x, 0, 1)) for x in (c, k_rope)]
        scales = cache[2:] if cache[2] is not None else []
        out = graph.call_function(op, (ragged, *rows, kv_b, cache[0], *tables, prepared, *scales), {"scale": site.scale})
        _replace(node, out, 1, site)


def _replace(node: fx.Node, out: fx.Node, batch: Any, site: AttentionSite) -> None:
    """Put the paged op's result (T, H, Dv) in the place of a semantic op's (B, H, S, Dv)."""
    graph = node.graph
    out = graph.call_method("view", (out, batch, -1, site.num_heads, site.head_dim_v))
    out = graph.call_method("transpose", (out, 1, 2))
    out.meta = {k: v for k, v in node.meta.items() if k != "quire_route"}
    node.replace_all_uses_with(out)
    graph.erase_node(node)
