"""The checks of the conformance kit, for one backend on one device in one dtype."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, CudagraphSupport, dtype_name
from quire.attn_ops.conformance import real_shapes, states, sweeps
from quire.attn_ops.conformance.batches import Batch, Failure, bits, check, compare, lay_out, planned, prepared, run
from quire.attn_ops.kernels.launch import side_stream
from quire.attn_ops.kv_quant import FIXED_SCALE_KV_DTYPES, QMAX, QUANTIZED_KV_DTYPES, KVScales
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.ops.rope import PLAIN, RopeForm

#: Values of each feature; the first is the one used in combinations. Windows and chunks: also of one token, and longer than
#: most sequences.
FEATURES: dict[str, tuple[Any, ...]] = {"window": (5, 1, 29), "softcap": (4.0,), "chunk": (8, 1, 29), "sinks": (True,)}
DIMS = ((8, 8), (16, 16), (64, 64), (128, 128), (256, 256), (24, 16), (192, 128))
GROUPS = ((4, 4), (8, 2), (8, 1), (3, 1))  # query heads, key heads
FORMS = (RopeForm(interleaved=True), RopeForm(half_tables=True), RopeForm(interleaved=True, half_tables=True))
PAGE_SIZES = (1, 4, 16, 32, 64, 128, 256)

# Batches as (tokens scheduled, tokens in the cache after the step) of each sequence.
Rows = Sequence[tuple[int, int]]
DECODE = ((1, 20), (1, 1), (1, 33), (1, 16), (1, 17))
PREFILL = ((20, 20), (1, 1), (33, 33))
MIXED = ((1, 20), (7, 9), (0, 5), (33, 40), (1, 1), (18, 18), (4, 30))

REFUSED = "not declared: refused"
#: Of keys and of values, neither 1: random numbers fit, and codes below the smallest normal one are among them.
FIXED_SCALES = {0: (0.0625, 0.03)}
FIXED_SCALE = ", fixed scale"  # ends the names of checks on such a cache


def full_pages(page_size: int) -> Rows:
    """Sequences that fill their pages, and one that begins another."""
    return ((1, 2 * page_size + 1), (min(3, page_size), page_size))


class Skip(Exception):
    """A check that cannot be made here; the text says why."""


class Kit:
    """The checks, on caches of ``kv_dtype`` (None: ``dtype``). ``quick``: without large batches, and fewer real shapes."""

    def __init__(self, backend: AttentionBackend, device: torch.device, dtype: torch.dtype,
                 kv_dtype: torch.dtype | None = None, quick: bool = False, kv_scales: KVScales | None = None) -> None:
        self.kv_scales = kv_scales
        self.backend, self.device, self.dtype, self.kv_dtype, self.quick = backend, device, dtype, kv_dtype, quick
        self.caps = backend.capabilities
        self.dims = [(d, dv) for d, dv in DIMS if self.caps.head_dims(d, dv)]
        self.page_sizes = [p for p in PAGE_SIZES if self.caps.page_sizes(p)]
        # Not 1 where there is a choice: a decode does not depend on the order of its keys, so a page must hold several.
        self.usual_page_size = next((p for p in self.page_sizes if p > 1), 1)
        self.layouts = sorted(self.caps.layouts)
        self.values = {name: values for name, values in FEATURES.items() if getattr(self.caps, name)}
        usual, *others = FEATURES["chunk"]
        if self.caps.chunk and self.dims:  # the first on usual pages, the others on any that divide them, if it must be so
            usual = usual if self.page_for(chunk=usual) == self.usual_page_size else 2 * self.usual_page_size
            self.values["chunk"] = (usual, *(n for n in others if self.page_for(chunk=n) is not None))
        self.features = {name: values[0] for name, values in self.values.items()}
        self.op_name, self.op_options = "op", [{}, {"write": False}, self.features]  # what opcheck checks

    def checks(self) -> list[tuple[str, Callable[[], str | None]]]:
        """(name, function) of each check. A function returns a detail, or raises Failure or Skip."""
        return [
            ("decode batch", lambda: self.exact(DECODE)),
            ("prefill batch", lambda: self.exact(PREFILL)),
            ("mixed batch", lambda: self.exact(MIXED)),
            ("boundary lengths", self.boundaries),
            *((f"shape {name}", lambda name=name: sweeps.shape(self, name)) for name in sweeps.shapes(self.quick)),
            *((f"feature {name}", lambda name=name: self.feature(name)) for name in FEATURES),
            ("windows at page boundaries", lambda: sweeps.edges(self, "window")),
            ("chunks at page boundaries", lambda: sweeps.edges(self, "chunk")),
            ("features together", self.together),
            *real_shapes.checks(self),
            ("non-causal", self.non_causal),
            ("head dims", self.head_dims),
            ("query heads per key head", self.groups),
            *((f"page size {p}", lambda p=p: self.cache_of("page_size", p, self.page_sizes, full_pages(p)))
              for p in PAGE_SIZES),
            *((f"layout {name}", lambda name=name: self.cache_of("layout", name, self.layouts)) for name in ("NHD", "HND")),
            *((f"KV cache {dtype_name(d)}", lambda d=d: self.on_codes(d)) for d in sorted(QUANTIZED_KV_DTYPES, key=str)),
            *((f"KV cache {dtype_name(d)}{FIXED_SCALE}", lambda d=d: self.on_codes(d, FIXED_SCALES))
              for d in sorted(FIXED_SCALE_KV_DTYPES, key=str)),
            ("shared cache (no k, v)", lambda: self.exact(DECODE, MIXED, write=False)),
            ("rotary embedding (rope_op)", self.rope),
            ("shared prefix", self.shared),
            *states.checks(self),
            ("padding", self.padding),
            ("stale metadata in padding", self.stale),
            ("buffers used again", self.reused),
            ("garbage in unused slots", self.garbage),
            ("pages in another order", self.permuted),
            ("a batch in parts", lambda: sweeps.parts(self, list(MIXED))),
            ("decode steps made ahead", lambda: sweeps.drafts(self)),
            *([("the last tokens of a step", lambda: sweeps.last_tokens(self))] if self.backend.any_batch else []),
            ("strided q, k, v", lambda: self.exact(DECODE, MIXED, strided=True)),
            *self.frame_checks(),
        ]

    def frame_checks(self) -> list[tuple[str, Callable[[], str | None]]]:
        """The checks of how torch runs the op, the same for every op."""
        return [
            ("opcheck", self.opcheck),
            ("no synchronization", self.no_sync),
            ("CUDA graph of a decode batch", lambda: self.graph(
                CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, [(1, 90), (1, 70), (1, 80), (1, 60)],
                [(1, 20), (1, 1), (1, 33)], pad=(1, 1))),
            ("CUDA graph of a mixed batch", lambda: self.graph(
                CudagraphSupport.ALWAYS, [(1, 90), (30, 70), (5, 80), (1, 60)], [(9, 9), (1, 33), (20, 24)], pad=(7, 1))),
        ]

    def site(self, heads: int = 4, kv_heads: int = 2, dims: tuple[int, int] | None = None, **features: Any) -> AttentionSite:
        dim, dim_v = dims or self.dims[0]
        return AttentionSite(layer=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v,
                             dtype=self.dtype, scale=dim**-0.5, **features)

    def batch(self, rows: Rows, *, heads: int = 4, kv_heads: int = 2, dims: tuple[int, int] | None = None,
              page_size: int | None = None, layout: str | None = None, **options: Any) -> Batch:
        """A batch, see ``lay_out``; ``options``: of that, and features of the site."""
        features = {name: options.pop(name) for name in FEATURES if name in options}
        site = self.site(heads, kv_heads, dims, **features)
        return lay_out(site, [n for n, _ in rows], [t for _, t in rows], device=self.device, kv_dtype=self.kv_dtype,
                       kv_scales=self.kv_scales, page_size=page_size or self.usual_page_size, layout=layout or self.layouts[0],  # type: ignore[arg-type]
                       fast_tanh=True, **options)

    def page_for(self, wanted: int | None = None, **features: Any) -> int | None:
        """The page size on which to check features that are declared: ``wanted`` (the usual one by default) if the backend
        serves them there, else the largest on which it does; None if on none."""
        wanted = wanted or self.usual_page_size
        if not features:
            return wanted

        def refused(size: int) -> bool:
            with_them, without = (self.caps.reasons_against(self.site(**some), device=self.device, page_size=size)
                                  for some in (features, {}))
            return bool(set(with_them) - set(without))

        return next((p for p in (wanted, *reversed(self.page_sizes)) if not refused(p)), None)

    def exact(self, *batches: Rows, **options: Any) -> None:
        """Check batches of these rows; ``options``: of ``self.batch``."""
        for rows in batches:
            check(self.backend, self.batch(rows, **options))

    def refused(self, site: AttentionSite, **cache: Any) -> str:
        """What is not declared must be refused."""
        if not self.caps.reasons_against(site, device=self.device, **cache):
            raise Failure("not declared, and yet not refused")
        return REFUSED

    def boundaries(self) -> None:
        page = self.usual_page_size
        lens = sorted({n for n in (1, page - 1, page, page + 1, 2 * page, 2 * page + 1) if n > 0})
        self.exact([(1, n) for n in lens], [(n, n) for n in lens], [(n, n + 3) for n in lens])

    def feature(self, name: str) -> str | None:
        usual, *others = self.values.get(name, FEATURES[name])
        if name not in self.features:
            sweeps.ignored(self, name, **{name: usual})
            return self.refused(self.site(**{name: usual}))
        self.exact(DECODE, PREFILL, MIXED, **{name: usual})
        for value in others:
            self.exact(DECODE, MIXED, page_size=self.page_for(**{name: value}), **{name: value})
        page = self.usual_page_size
        for value in FEATURES[name]:
            if self.page_for(**{name: value}) != page:
                sweeps.ignored(self, f"{name}={value} on pages of {page} tokens", **{name: value})
                self.refused(self.site(**{name: value}), page_size=page)
        return None

    def together(self) -> str:
        if len(self.features) < 2:
            raise Skip("fewer than two features are declared")
        self.exact(DECODE, MIXED, pad=(3, 2), **self.features)
        return ", ".join(self.features)

    def non_causal(self) -> str:
        if self.caps.non_causal:
            raise Failure("declared, but a paged op has no argument for it: queries are the last tokens of a sequence")
        return self.refused(self.site(causal=False))

    def head_dims(self) -> str:
        for dims in self.dims:
            self.exact(DECODE, MIXED, dims=dims, seed=dims[0])
        return ", ".join(f"{d}" if d == dv else f"{d}/{dv}" for d, dv in self.dims)

    def groups(self) -> str:
        for heads, kv_heads in GROUPS:
            self.exact(DECODE, MIXED, heads=heads, kv_heads=kv_heads)
        return ", ".join(str(group) for group in sorted(heads // kv_heads for heads, kv_heads in GROUPS))

    def cache_of(self, option: str, value: Any, declared: Sequence[Any], *batches: Rows) -> str | None:
        """A cache of a page size or a layout."""
        if value not in declared:
            return self.refused(self.site(), **{option: value})
        self.exact(DECODE, MIXED, *batches, **{option: value})
        return None

    def on_codes(self, kv_dtype: torch.dtype, kv_scales: KVScales | None = None) -> str | None:
        """A decode and a mixed batch on a quantized cache, and a NaN. With --kv-dtype all checks run on one. With fixed scales:
        among pages full of NaN codes, as failed requests leave them, and what does not fit is a NaN too."""
        fixed, kit = kv_scales is not None, Kit(self.backend, self.device, self.dtype, kv_dtype, self.quick, kv_scales)
        which = "fixed_scale_kv_dtypes" if fixed else "kv_dtypes"
        declared, serving = kv_dtype in getattr(self.caps, which), getattr(self.caps, "serving", lambda site: ())
        parts = serving(self.site())  # of a composite: those that this site has may declare what others do not
        by_parts = bool(parts) and not isinstance(parts, str) and all(
            kv_dtype in getattr(part.capabilities, which) for part in parts)
        if not declared and not by_parts:
            sweeps.ignored(kit, f"a cache of {dtype_name(kv_dtype)}{' with fixed scales' if fixed else ''}")
            return self.refused(self.site(), kv_dtype=kv_dtype, fixed_scale=fixed)
        refusals = self.caps.reasons_against(self.site(), device=self.device, kv_dtype=kv_dtype, fixed_scale=fixed)
        if refusals:
            return f"refused: {'; '.join(refusals)}"
        for features in ({}, kit.features) if declared else ({},):
            kit.exact(DECODE, MIXED, pad=(2, 1), fill=math.nan if fixed else None, **features)
        kit.not_finite(math.nan)
        if fixed and declared:
            kit.not_finite(2 * QMAX[kv_dtype] * max(FIXED_SCALES[0]))
            if self.caps.lse:
                states.lse(kit)
                states.trees(kit)
        return None

    def not_finite(self, number: float) -> None:
        """A number that reads back as NaN in one sequence's last token: with a fixed scale alone, else with all its vector."""
        for count, which in itertools.product((1, 9), ("new_k", "new_v")):
            batch = self.batch([(count, 20), (1, 7)])
            getattr(batch, which)[count - 1, 1, 0] = number
            out, others = run(self.backend, batch), slice(count, None)
            alone = self.kv_scales is not None and which == "new_v"
            broken, rest = out[count - 1, 2:].split([1, out.shape[2] - 1] if alone else [out.shape[2], 0], dim=-1)
            if not broken.isnan().all() or not rest.isfinite().all() or not out[count - 1, :2].isfinite().all():
                raise Failure(f"{number} in a token's key or value must make its output NaN for the heads that read it, and "
                              "for no other")
            if not ((out[others] - batch.expected[others]).abs() <= batch.bound[others]).all():
                raise Failure(f"{number} in one sequence changed the output of another")

    def shared(self) -> None:
        """Sequences with pages in common, as a prefix cache leaves them: all that have queries, or all but one."""
        page = self.usual_page_size
        usual = [(1, 3 * page + 1), (1, 2 * page + 5), (3, 2 * page + 3), (1, 2 * page + 1)]
        whole = {name: value for name, value in self.features.items() if name not in ("window", "chunk")}
        with_others = [*usual, (0, 4)], [(0, 9), *usual, (1, page)], [(2, 2 * page), *usual]
        self.exact(usual[:2], *with_others, shared=2 * page, pad=(2, 1))
        self.exact(usual, shared=2 * page, **whole)

    def rope(self) -> None:
        if self.backend.rope_op is None:
            raise Skip("it has no rope_op; a kernel before it rotates")
        dim = self.dims[0][0]
        for rows in (DECODE[:1], DECODE, MIXED):
            for features in ({}, self.features):
                check(self.backend, self.batch(rows, pad=(2, 1), **features), dim)
            for form in (PLAIN, *FORMS) if self.backend.rope_forms else (PLAIN,):
                for rotary in (dim, dim // 2):
                    check(self.backend, self.batch(rows), rotary, form)

    def padding(self) -> None:
        for pad in ((0, 3), (2, 0), (5, 2), (40, 9)):
            self.exact(DECODE, MIXED, pad=pad)
        self.exact([(0, 4), (0, 9)])  # sequences that wait, and no token
        self.exact([(0, 4), (0, 9)], [], pad=(3, 1))

    def stale(self) -> None:
        """Padding rows of a static buffer still hold the page numbers of an earlier batch."""
        for rows in (DECODE, MIXED):
            batch = self.batch(rows, pad=(4, 3))
            table = batch.metadata.block_table_tensor
            table[len(rows) :] = torch.arange(table.shape[1], device=self.device, dtype=table.dtype) % batch.cache.num_pages
            for row, (_, total) in enumerate(rows):  # and so do the entries past a sequence's pages
                table[row, -(-total // batch.metadata.page_size) :] = batch.cache.num_pages - 1
            check(self.backend, batch)

    def reused(self) -> None:
        sweeps.reused(self, [(1, 90), (1, 70), (1, 80)], [(1, 20), (1, 33)])
        sweeps.reused(self, [(30, 70), (1, 90), (5, 80)], [(9, 9), (20, 24)])

    def garbage(self) -> None:
        """Pages are reused uncleared: NaN past a sequence's end, in the null page or in another's pages must not be seen."""
        for features in ({}, self.features):
            page = self.page_for(self.page_sizes[-1], **features)
            self.exact(DECODE, MIXED, fill=math.nan, page_size=page, pad=(2, 1), **features)
        for rows in ([(1, 33), (1, 17)], [(5, 33), (12, 17)]):
            batch = self.batch(rows)
            first = batch.metadata.block_table_tensor[0, : -(-33 // batch.metadata.page_size)].long()
            for name, tensor in batch.held.items():
                if tensor.dtype.itemsize > 1:  # of codes the scales are enough
                    batch.held[name][first] = math.nan
            others = slice(rows[0][0], None)
            out = run(self.backend, batch)[others]
            if not ((out - batch.expected[others]).abs() <= batch.bound[others]).all():
                raise Failure("a NaN in the pages of one sequence changed the output of another")

    def permuted(self) -> None:
        """The output must not depend on which pages a sequence has, not in the last bit."""
        for rows in (DECODE, MIXED):
            batch = self.batch(rows)
            first = run(self.backend, batch)
            order = torch.randperm(batch.cache.num_pages - 1, generator=torch.Generator().manual_seed(7)) + 1
            order = torch.cat([torch.zeros(1, dtype=torch.long), order]).to(self.device)
            for cache in map(bits, batch.held.values()):
                moved = torch.empty_like(cache)
                moved[order] = cache
                cache.copy_(moved)
            table = order[batch.metadata.block_table_tensor.long()].int()
            batch.metadata = CommonAttentionMetadata.build([n for n, _ in rows], [t for _, t in rows], table.cpu(),
                                                           page_size=batch.metadata.page_size, device=self.device)
            second = run(self.backend, batch)
            compare(second, batch)
            if not torch.equal(bits(first), bits(second)):
                raise Failure("the output depends on where the pages are")

    def opcheck(self) -> str:
        """Schema, mutation, fake and dispatch, by torch's own checker; the fake's strides against the real ones. Of fp8 only
        the fake: it detects mutations by comparisons that torch lacks for fp8."""
        tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        tests = tests[1:3] if self.kv_dtype is not None and self.kv_dtype.is_floating_point else tests
        for rows in (DECODE, MIXED):
            for options in self.op_options:
                batch = self.batch(rows, **options)
                with planned(self.backend, batch), torch.enable_grad():
                    given = prepared(self.backend, batch)
                    torch.library.opcheck(self.backend.op, batch.arguments(given), batch.options, test_utils=tests)
                    out = self.backend.op(*batch.arguments(given), **batch.options)
                if not out.is_contiguous():
                    raise Failure(f"the output has strides {out.stride()}, the fake says contiguous")
            if self.backend.prepare is not None:
                torch.library.opcheck(self.backend.prepare, (*batch.tables, batch.metadata.page_size))
        return self.op_name + (" and prepare" if self.backend.prepare is not None else "")

    def no_sync(self) -> None:
        """Nothing in the contract reads a device tensor on the host."""
        self.need_cuda()
        for rows in (DECODE, MIXED):
            batch = self.batch(rows)
            run(self.backend, batch)  # compiles kernels, which may synchronize
            with planned(self.backend, batch):
                torch.cuda.set_sync_debug_mode("error")
                try:
                    self.backend.op(*batch.arguments(prepared(self.backend, batch)), **batch.options)
                except RuntimeError as error:
                    raise Failure(f"the forward waits for the GPU: {error}") from error
                finally:
                    torch.cuda.set_sync_debug_mode("default")

    def graph(self, level: CudagraphSupport, captured: Rows, replayed: Rows, pad: tuple[int, int]) -> None:
        """Capture a batch of padding alone, as engines do; then copy batches into the same buffers, replay, and compare: one of
        that shape, and a shorter one, padded."""
        if self.caps.cudagraph_support < level:
            raise Skip(f"the backend declares {self.caps.cudagraph_support.name}")
        self.need_cuda()
        width = -(-max(total for _, total in captured) // self.usual_page_size)
        size = {"num_pages": len(captured) * width + 1, "table_width": width, **self.features}
        static, later = self.batch(captured, **size), self.batch(replayed, pad=pad, fill=math.nan, seed=1, **size)
        options = {"states": {}, "graph_key": "conformance"}

        def forward() -> torch.Tensor:
            return self.backend.op(*static.arguments(prepared(self.backend, static)), **static.options)

        kept, meta = [tensor.clone() for tensor in static.buffers()], static.metadata
        pages = meta.block_table_tensor.clone()
        for tensor, value in ((meta.query_start_loc, 0), (meta.seq_lens, 0), (meta.slot_mapping, -1),
                              (meta.block_table_tensor, 0)):
            tensor.fill_(value)
        idle = replace(static, metadata=replace(
            meta, query_start_loc_cpu=torch.zeros_like(meta.query_start_loc_cpu),
            seq_lens_cpu=torch.zeros_like(meta.seq_lens_cpu), max_query_len=1, max_seq_len=1))
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        with side_stream(self.device) as stream, planned(self.backend, idle, capturing=True, **options):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(2):
                    forward()
            current.wait_stream(stream)
            with torch.cuda.graph(graph, stream=stream):
                out = forward()
        table, live = later.metadata.block_table_tensor, len(replayed)
        table[live:] = pages[live:]  # stale: padding rows keep the pages of the batch before
        # Longer, shorter, then as at first: neither lengths nor a plan may stay from the step before.
        for batch, values in ((static, kept), (later, later.buffers()), (static, kept)):
            for mine, theirs in zip(static.buffers(), values, strict=True):
                mine.copy_(theirs)
            batch.cache = static.cache
            with planned(self.backend, batch, **options):
                graph.replay()
            compare(out, batch)

    def need_cuda(self) -> None:
        if self.device.type != "cuda":
            raise Skip(f"a {self.device.type} has none")
