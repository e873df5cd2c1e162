"""Time a backend's paged op alone, for ``quire bench attention`` and developers' benchmarks; of MLA on the latent cache the op
with both products with kv_b.

On a GPU the result is the median over replays of a CUDA graph, where the backend allows such a batch in a graph; else of calls
between events. On a CPU it is the median of single calls. Calls rotate through caches that on a GPU are together at least 8
times its L2 cache, so that keys come from memory as in a model. Host work before a step (``plan``, ``prepare``) is not timed.
"""

from __future__ import annotations

import functools
import itertools
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, CudagraphSupport
from quire.attn_ops.conformance.batches import Batch, lay_out, planned, prepared, scattered
from quire.attn_ops.kv_cache import Layout, PagedKVCache, pages_for, token_bytes
from quire.attn_ops.tuning.prefill import EAGER

GRAPH = 10  # milliseconds
HOST_CALLS, CPU_CALLS = 3, 7
COPIES = 20  # of the cache, at most


@dataclass(frozen=True)
class Point:
    """One batch to measure: scheduled tokens and total tokens after the step, per sequence. ``graph``: in a CUDA graph, where
    the backend allows it."""

    kind: str  # "decode" or "extend"
    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    graph: bool = True


def decode_point(batch: int, context: int) -> Point:
    return Point("decode", f"{batch}x{context}", (1,) * batch, (context,) * batch)


def extend_point(text: str, divisor: int = 1) -> Point:
    """A prefill: "8x1024+4096" is 8 sequences with 1024 scheduled tokens each, after 4096 computed before. ``divisor`` shortens
    it. Raises ValueError for other texts."""
    if (found := re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+))?", text)) is None:
        raise ValueError(f"{text!r} is not sequences x tokens, or sequences x tokens + tokens before, such as 64x1024 or "
                         "1x512+16384")
    batch, new, before = (int(n or 0) for n in found.groups())
    new, before = max(2, new // divisor), before // divisor
    return Point("extend", f"{batch}x{new}" + (f"+{before}" if before else ""), (new,) * batch, (new + before,) * batch)


def extend_points(divisor: int = 1) -> list[Point]:
    """Prefills of prompts and of chunks, and a mixed batch: 63 decodes and a chunk of 448. ``divisor`` shortens them."""
    texts = ("1x4096", "8x1024+4096", "1x960", "1x64+8128", "1x8192+8192", "4x2048+30720")
    chunk, length = max(2, 448 // divisor), max(2, 2048 // divisor)
    return [*(extend_point(text, divisor) for text in texts),
            Point("extend", f"63x1,{chunk}", (1,) * 63 + (chunk,), (length,) * 64)]


def without_graphs(points: list[Point]) -> list[Point]:
    """The prefills among ``points``, in steps without a graph."""
    return [replace(p, name=p.name + EAGER, graph=False) for p in points if p.kind == "extend" and min(p.query_lens) > 1]


@dataclass
class OpBatch(Batch):
    """A batch, and copies of its cache (k, v and their scales) to go through in turn."""

    caches: list[tuple[torch.Tensor | None, ...]] = field(default_factory=list)


def op_batch(site: AttentionSite, point: Point, *, page_size: int, device: torch.device, layout: Layout = "NHD",
             max_len: int = 0, kv_dtype: torch.dtype | None = None) -> OpBatch:
    """Random queries, keys and values for ``point``; the pages of each sequence are scattered over the cache, of ``kv_dtype``
    (None: the site's). The step's own keys are there too: not every kernel that is timed stores them, and products with zeros
    take less power, and may take less time. ``max_len``: tokens that the block table has room for, at least (an engine's is as
    wide as its longest sequence)."""
    batch = lay_out(site, point.query_lens, point.seq_lens, page_size=page_size, device=device, layout=layout, write=False,
                    kv_dtype=kv_dtype, table_width=pages_for(max_len, page_size), fill=0.0, expect=False)
    batch.write = True
    own, copies = batch.cache.of_layer(0), 2
    if device.type == "cuda":
        cold = 8 * torch.cuda.get_device_properties(device).L2_cache_size
        copies = max(1, min(COPIES, -(-cold // batch.cache.num_bytes)))
    more = [tuple(None if t is None else t.clone() for t in own) for _ in range(copies - 1)]
    return OpBatch(**vars(batch), caches=[own, *more])


def require(backend: AttentionBackend, site: AttentionSite, device: torch.device, page_size: int,
            kv_dtype: torch.dtype | None = None, layout: Layout = "NHD") -> None:
    """Raises NotImplementedError, with the reasons, where the backend does not serve the site."""
    if why := backend.available(device) or "; ".join(backend.capabilities.reasons_against(
            site, device=device, page_size=page_size, kv_dtype=kv_dtype, layout=layout)):
        raise NotImplementedError(why)


@dataclass(frozen=True)
class Timing:
    """``us`` and ``host_us`` of one call (device and host time; the same on a CPU); ``how``: "graph", "events" or "host"."""

    us: float
    host_us: float
    how: str


def measure(backend: AttentionBackend, batch: OpBatch, graph: bool = True, states: dict[str, Any] | None = None) -> Timing:
    """Time the backend on the batch. Errors of its op propagate. Prompts are served as beside another backend, where there is a
    way for that (``AttentionBackend.prefill``). ``graph``: in a CUDA graph if the backend allows it. ``states``: the step's."""
    m = batch.metadata
    if backend.prefill is not None and m.max_query_len > 1 and not m.has_single_queries:
        backend = replace(backend, make_state=backend.prefill.make_state)

    def call(given: Any, i: int) -> None:
        backend.op(batch.q, batch.k, batch.v, *batch.caches[i % len(batch.caches)], *batch.tables, batch.sinks, given,
                   **batch.options)

    return _measured(backend, batch, call, graph, states)


def measure_latent(backend: AttentionBackend, site: AttentionSite, point: Point, *, page_size: int, device: torch.device,
                   layout: Layout = "NHD", max_len: int = 0) -> Timing:
    """Time the MLA op on random latent vectors; arguments as of ``op_batch``. Errors of the op propagate."""
    latent, op = site.latent, backend.mla_op
    assert latent is not None and op is not None
    tokens, heads, nope = sum(point.query_lens), site.num_heads, site.head_dim - latent.rope
    _, meta, pages = scattered(point.query_lens, point.seq_lens, page_size=page_size, device=device,
                               table_width=pages_for(max_len, page_size))
    cache = PagedKVCache.for_sites([site], num_pages=pages, page_size=page_size, device=device, layout=layout)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    caches = [cache.k[0], *(torch.randn_like(cache.k[0]) for _ in range(max(1, min(COPIES, 4 * l2 // cache.num_bytes))))]
    q, new, kv_b = (torch.randn(*size, dtype=site.dtype, device=device) for size in (
        (tokens, heads, site.head_dim), (tokens, sum(latent)), (heads * (nope + site.head_dim_v), latent.rank)))
    kv_b *= latent.rank**-0.5
    tables = (meta.slot_mapping, meta.block_table_tensor, meta.query_start_loc, meta.seq_lens)
    batch: Any = SimpleNamespace(cache=cache, metadata=meta, site=site, tables=tables)

    def call(given: Any, i: int) -> None:
        op(q, *new.split(latent, dim=1), kv_b, caches[i % len(caches)], *tables, given, scale=site.scale)

    return _measured(backend, batch, call, point.graph)


def _measured(backend: AttentionBackend, batch: Any, call: Callable[[Any, int], None], graph: bool,
              states: dict[str, Any] | None = None) -> Timing:
    """Time of ``call(what the backend prepared, number)``."""
    m, device = batch.metadata, batch.metadata.seq_lens.device
    decode = m.num_actual_tokens == m.num_reqs and m.max_query_len == 1
    least = CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE if decode else CudagraphSupport.ALWAYS
    captured = graph and device.type == "cuda" and backend.capabilities.cudagraph_support >= least
    # A backend that plans must know that a graph is captured, to give it buffers that stay.
    with planned(backend, batch, states=states or {}, graph_key="bench" if captured else None, capturing=captured):
        return timed(functools.partial(call, prepared(backend, batch)), device, captured)


def timed(call: Callable[[int], Any], device: torch.device, captured: bool = False) -> Timing:
    """Time of one call, which takes its number; ``captured``: in a CUDA graph. On a CPU the median."""
    if device.type == "cuda":
        return on_the_device(call, captured)
    seconds = []
    for i in range(CPU_CALLS):
        began = time.perf_counter()
        call(i)
        seconds.append(time.perf_counter() - began)
    us = statistics.median(seconds) * 1e6
    return Timing(us, us, "host")


def on_the_device(call: Callable[[int], Any], captured: bool = True) -> Timing:
    """Device time of one call: in a CUDA graph of as many calls as take about GRAPH ms; if not ``captured``, between events.
    ``call`` takes the number of the call."""
    from triton.testing import do_bench, do_bench_cudagraph

    numbers = itertools.count()
    for _ in range(2):  # the first compiles
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(HOST_CALLS):
            call(next(numbers))
        host_us = (time.perf_counter() - began) * 1e6 / HOST_CALLS
    torch.cuda.synchronize()
    bench = do_bench_cudagraph if captured else do_bench
    us = bench(lambda: call(next(numbers)), rep=GRAPH, return_mode="median") * 1e3
    return Timing(us, host_us, "graph" if captured else "events")


def work(site: AttentionSite, point: Point, kv_dtype: torch.dtype | None = None) -> tuple[int, int]:
    """Minimum (bytes, floating-point operations) of the call: keys, values (of MLA latent vectors and kv_b), queries and
    outputs; the two matrix products over visible keys. ``kv_dtype``: of the cache; None: the site's."""
    keys = pairs = 0
    for query, seq in zip(point.query_lens, point.seq_lens, strict=True):
        visible = [min(p + 1, site.window or p + 1, p % site.chunk + 1 if site.chunk else p + 1)
                   for p in range(seq - query, seq)]
        pairs += sum(visible)
        keys += seq - min(p + 1 - n for p, n in zip(range(seq - query, seq), visible, strict=True))
    dims = site.head_dim + site.head_dim_v
    numbers = sum(point.query_lens) * site.num_heads * dims
    if site.latent is not None:
        numbers += site.num_heads * (site.head_dim - site.latent.rope + site.head_dim_v) * site.latent.rank
    size = keys * token_bytes(site, kv_dtype) + numbers * site.dtype.itemsize
    return size, 2 * pairs * site.num_heads * dims
