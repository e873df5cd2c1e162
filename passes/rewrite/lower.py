"""The lowering pass: each semantic attention op becomes the paged op of the chosen backend.

Before::

    out = quire.attention(q, k, v, sinks, layer=3, scale=s, window=w, softcap=None, chunk=None, causal=True)

After, with the cache and the batch metadata as new graph inputs::

    prepared = quire.<backend>_prepare(slot_mapping, block_table, query_start_loc, seq_lens, page_size)   # once; a list
    q_, k_, v_ = (flatten(transpose(x, 1, 2), 0, 1) for x in (q, k, v))                                  # (T, heads, dim)
    out_ = quire.<backend>_paged_attention(q_, k_, v_, k_cache_3, v_cache_3, None, None, slot_mapping, ..., sinks, prepared,
                                           scale=s, ...)
    out = transpose(view(out_, B, -1, H, Dv), 1, 2)

A quantised cache has inputs k_scale_3 and v_scale_3 in the place of None and None.
The new inputs come after the graph's own, in the order of ``LoweredInputs``; ``LoweredInputs.of`` collects their values from
the current step. All their sizes that a batch or a cache decides are dynamic, so one compiled graph serves every batch
shape and every cache size. There is one K and one V input a layer: slices of one tensor would make Inductor copy it.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.kv_cache import Layout, PagedKVCache
from quire.attn_ops.step import Step
from quire.passes.fx import placeholders, value
from quire.passes.verify.sites import site_nodes, site_of

logger = logging.getLogger(__name__)
TABLES = ("slot_mapping", "block_table", "query_start_loc", "seq_lens")


@dataclass(frozen=True)
class LoweringTarget:
    """What to lower to: the backend, and the static facts of the cache it will find."""

    backend: AttentionBackend
    page_size: int
    kv_dtype: torch.dtype | None = None
    layout: Layout = "NHD"


@dataclass(frozen=True)
class LoweredInputs:
    """The inputs that lowering adds to a graph: the four metadata tables, then K and V (and their scales) of each layer."""

    layers: tuple[int, ...]

    def of(self, step: Step) -> list[torch.Tensor]:
        """Their values in ``step``, in the graph's order."""
        meta, cache = step.metadata, step.cache
        tensors = [meta.slot_mapping, meta.block_table_tensor, meta.query_start_loc, meta.seq_lens]
        for layer in self.layers:
            tensors += [tensor for tensor in cache.of_layer(layer) if tensor is not None]
        return tensors


@dataclass(frozen=True)
class Lowered:
    """A lowered graph. ``example_inputs`` are fakes of the added inputs, for the compiler."""

    gm: fx.GraphModule
    target: LoweringTarget
    inputs: LoweredInputs
    sites: tuple[AttentionSite, ...]
    example_inputs: tuple[torch.Tensor, ...]


def lower(gm: fx.GraphModule, target: LoweringTarget) -> Lowered:
    """Lower every semantic op of ``gm``, in place.

    Args:
        gm: a graph of ours (a copy of Dynamo's), whose nodes carry fake values.
        target: the backend, which the caller has checked against the sites.

    Returns:
        Lowered. The graph has len(example_inputs) more placeholders, at the end.
    """
    nodes = site_nodes(gm.graph)
    sites = [site_of(n) for n in nodes]
    device = value(nodes[0].args[0]).device
    fake = _fake_mode(gm.graph)
    shapes = PagedKVCache.for_sites(sites, num_pages=_FAKE_PAGES, page_size=target.page_size, device="meta",
                                    dtype=target.kv_dtype, layout=target.layout)
    last = placeholders(gm.graph)[-1]
    examples: list[torch.Tensor] = []

    def add_input(name: str, like: torch.Tensor, dynamic: tuple[bool, ...]) -> fx.Node:
        nonlocal last
        example = fake_input(fake, f"quire_{name}", like, dynamic, device)
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"quire_{name}")
        last.meta["example_value"] = example
        last._dynamo_source = ConstantSource(f"quire_{name}")
        examples.append(example)
        return last

    # Sizes are arbitrary, but all different and none 0 or 1, so that no symbol is merged with another or specialised.
    tables = [
        add_input("slot_mapping", torch.empty(_FAKE_TOKENS, dtype=torch.int64, device="meta"), (True,)),
        add_input("block_table", torch.empty(_FAKE_REQS, 11, dtype=torch.int32, device="meta"), (True, True)),
        add_input("query_start_loc", torch.empty(_FAKE_REQS + 1, dtype=torch.int32, device="meta"), (True,)),
        add_input("seq_lens", torch.empty(_FAKE_REQS, dtype=torch.int32, device="meta"), (True,)),
    ]
    names = ("k_cache", "v_cache", "k_scale", "v_scale")
    caches = [tuple(None if like is None else add_input(f"{name}_{site.layer}", like, (True, *[False] * (like.dim() - 1)))
                    for name, like in zip(names, shapes.of_layer(site.layer), strict=True)) for site in sites]
    prepared: Any = []
    if target.backend.prepare is not None:
        if fake.shape_env is not None:  # what it returns may have sizes of its own; Dynamo allows that with fullgraph only
            fake.shape_env.settings = replace(fake.shape_env.settings, allow_dynamic_output_shape_ops=True)
        with fake, enable_python_dispatcher(), any_sizes(fake):
            count = len(target.backend.prepare(*(t.meta["example_value"] for t in tables), target.page_size))
        with gm.graph.inserting_before(last.next):
            made = gm.graph.call_function(target.backend.prepare, (*tables, target.page_size))
            prepared = [gm.graph.call_function(operator.getitem, (made, i)) for i in range(count)]
    for node, site, cache in zip(nodes, sites, caches, strict=True):
        _lower_one(node, site, target.backend, tables, cache, prepared)
    gm.graph.lint()
    gm.recompile()
    logger.info("lower: %d sites to %s", len(nodes), target.backend.name)
    return Lowered(gm, target, LoweredInputs(tuple(s.layer for s in sites)), tuple(sites), tuple(examples))


def _lower_one(node: fx.Node, site: AttentionSite, backend: AttentionBackend, tables: Sequence[fx.Node],
               cache: Sequence[fx.Node | None], prepared: Any) -> None:
    graph = node.graph
    q, k, v, sinks = node.args
    batch = value(q).shape[0]
    with graph.inserting_before(node):
        ragged = [graph.call_method("flatten", (graph.call_method("transpose", (x, 1, 2)), 0, 1)) for x in (q, k, v)]
        out = graph.call_function(backend.op, (*ragged, *cache, *tables, sinks, prepared), {
            "scale": site.scale, "window": site.window, "softcap": site.softcap, "chunk": site.chunk})
        first = batch if isinstance(batch, int) else graph.call_method("size", (q, 0))
        out = graph.call_method("view", (out, first, -1, site.num_heads, site.head_dim_v))
        out = graph.call_method("transpose", (out, 1, 2))
    out.meta = {k: v for k, v in node.meta.items() if k != "quire_route"}
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def paged_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a paged op, by name."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def set_paged_arguments(node: fx.Node, **changes: Any) -> None:
    """Give some arguments of a paged op other values."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    node.args = tuple(changes.get(name, a) for name, a in zip(names, node.args, strict=False))
    node.kwargs = {name: changes.get(name, a) for name, a in node.kwargs.items()}


_FAKE_TOKENS, _FAKE_REQS, _FAKE_PAGES = 37, 5, 41


def _fake_mode(graph: fx.Graph) -> FakeTensorMode:
    for node in placeholders(graph):
        mode = getattr(value(node), "fake_mode", None)
        if mode is not None:
            return mode
    raise ValueError("the graph has no fake tensor inputs; it must come from Dynamo")


def any_sizes(fake: FakeTensorMode) -> contextlib.AbstractContextManager[Any]:
    """Sizes that depend on data may come and go here without anybody keeping track of them."""
    return fake.shape_env.ignore_fresh_unbacked_symbols() if fake.shape_env is not None else contextlib.nullcontext()


def fake_input(fake: FakeTensorMode, name: str, like: torch.Tensor, dynamic: tuple[bool, ...],
                device: torch.device) -> torch.Tensor:
    """A fake of ``like`` on ``device`` whose sizes marked ``dynamic`` are symbols."""
    context: Any = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC if d else DimDynamic.STATIC for d in dynamic])
    with fake:
        real = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    if fake.shape_env is None:
        return real
    meta = fake.shape_env.create_symbolic_sizes_strides_storage_offset(real, ConstantSource(name), symbolic_context=context)
    with fake:
        return torch.empty_strided(meta[0], meta[1], dtype=like.dtype, device=device)


__all__ = ["Lowered", "LoweredInputs", "LoweringTarget", "any_sizes", "fake_input", "lower", "paged_arguments",
           "set_paged_arguments"]
