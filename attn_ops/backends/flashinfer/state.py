"""What one engine keeps of the backend ``flashinfer``, and the planning of a step."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backends.flashinfer import contiguous, routes
from quire.attn_ops.backends.flashinfer.contiguous import OwnKeys
from quire.attn_ops.backends.flashinfer.modules import HOPPER
from quire.attn_ops.backends.flashinfer.pages import PageTable
from quire.attn_ops.backends.flashinfer.routes import Way
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.long_prefill import leading_ones
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.plans import StepPlan, StepPlans
from quire.attn_ops.step import Step, StepLimits

MIN_WORKSPACE = 128 << 20  # bytes; FlashInfer's recommendation
INT_WORKSPACE = 1 << 20  # bytes, of a graph's plan; about 13 per tile, and at most some thousand tiles
PREFIX = "prefix"  # the page table of cached prefixes
RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"

logger = logging.getLogger(__name__)


class Group(NamedTuple):
    """What a plan depends on: sites that agree in it share one."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None
    kv_dtype: torch.dtype | None = None  # of an fp8 cache; None: that of q

    @property
    def options(self) -> dict[str, Any]:
        """Arguments common to FlashInfer's plan functions. Its ``window_left`` does not count the query itself."""
        return {"window_left": -1 if self.window is None else self.window - 1, "logits_soft_cap": self.softcap or 0.0,
                "sm_scale": self.scale, "q_data_type": self.dtype, "kv_data_type": self.kv_dtype or self.dtype}

    def workspace_bytes(self, rows: int, processors: int) -> int:
        """Room for the partial results of the worst plan: (H, tiles, queries per tile, D + 1) float32. A tile is 16, 64 or 128
        queries, each of the H // Hkv heads that share a key head counting as one. An eager plan has as many tiles as run at
        once, two per processor; one for a CUDA graph has as many as its rows need, if more."""
        packed, wide = self.heads // self.kv_heads, 64 if self.dim >= 256 else 128
        tile = 16 if packed <= 16 else 64 if packed <= 64 else wide
        resident = max(1, 2 * processors // self.kv_heads)
        queries = max(resident * wide, (-(-rows * packed // tile) + rows) * tile)
        return 4 * self.heads * queries * (self.dim + 1) + 4096


Segments = list[tuple[Any, int, int]]  # (wrapper, first token, token after the last)


class FlashInferPlan(StepPlan):
    """The plan of one step, and what graphs read of it: ``tables`` by window (and PREFIX), and ``workspaces`` of integers by
    group. Graphs share these, because each is planned anew before its replay. ``copied`` is needed because torch's allocator
    does not know of FlashInfer's own copies from pinned memory."""

    def __init__(self, device: torch.device, groups: Iterable[Group], number: int) -> None:
        super().__init__(number, torch.cuda.Event())
        self.device = device
        self.tables: dict[int | str | None, PageTable] = {}
        self.workspaces: dict[Group, torch.Tensor] = {}
        for group in groups:
            self.add(group)

    def add(self, group: Group) -> None:
        self.workspaces[group] = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=self.device)

    def begin(self, metadata: CommonAttentionMetadata, step: Step) -> None:
        """What of the step all groups have in common; no group is planned."""
        starts = metadata.query_start_loc_cpu.numpy()
        self.metadata, self.num_tokens, self.key, self.capturing = (
            metadata, metadata.num_tokens, step.graph_key, step.capturing)
        self.window_metadata = step.window_metadata or metadata  # of layers with a window: the same but for the pages
        self.decodes, self.rows = leading_ones(np.diff(starts)), metadata.num_reqs
        self.last_token = 0  # of the rows that are planned, set when their number is known
        self.filled: set[int | str | None] = set()
        self.segments: dict[tuple[Group, bool], Segments] = {}


class FlashInferState:
    """Workspace, wrappers and plans of one engine. ``prompts_only``: decodes at the head of a batch are another backend's, and
    nothing is compiled in a step (``PrefillPart``). ``key_scales``: of a cache with fixed scales, by the address of a layer's
    keys: the kernels take a number, and the op must not read one from the GPU."""

    def __init__(self, sites: Sequence[AttentionSite], cache: PagedKVCache, limits: StepLimits, prompts_only: bool = False
                 ) -> None:
        self.lib, self.prompts_only = importlib.import_module("flashinfer"), prompts_only
        k_cache, self.copies = cache.k[0], cache.quantized and prompts_only
        self.limits, self.page_size, self.device = limits, cache.page_size, k_cache.device
        # Caches have the logical shape (pages, page, Hkv, D); FlashInfer calls it HND if heads lie outside tokens.
        self.layout = "HND" if k_cache.stride(2) > k_cache.stride(1) else "NHD"
        self.gpu = torch.cuda.get_device_properties(self.device)
        self.workspace = torch.zeros(MIN_WORKSPACE, dtype=torch.uint8, device=self.device)
        self.fixed_kv_dtype = cache.dtype if cache.fixed_scale else None
        self.key_scales = {cache.of_layer(layer)[0].data_ptr(): scale for layer, (scale, _) in (cache.kv_scales or {}).items()}
        #: In the order in which they were met; of each, what ``own`` says of its layers.
        self.groups: dict[Group, set[bool]] = {}
        self.without_fa3: set[Group] = set()  # whose kernels for Hopper GPUs do not build
        self.plans = StepPlans(functools.partial(FlashInferPlan, self.device, self.groups))
        for s in sites:
            group = self.group(s.num_heads, s.num_kv_heads, s.head_dim, s.dtype, s.scale, s.window, s.softcap)
            self._add(group, self.own(group, s.kv_source is None))
        self.wrappers: dict[Any, Any] = {}  # by kernel, group, graph and number of the step
        self.graph_rows: dict[tuple[Any, int], int] = {}  # by graph and number of the step

    def group(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, scale: float, window: int | None,
              softcap: float | None) -> Group:
        """The group of a site; over an fp8 cache the kernels get queries in float16, see NOTE [NaN codes and float16]."""
        if self.fixed_kv_dtype is not None:
            dtype = torch.float16
        return Group(heads, kv_heads, dim, dtype, scale, window, softcap, self.fixed_kv_dtype)

    def own(self, group: Group, given: bool) -> bool:
        """Whether a layer's own k and v may be read, where they are ``given``: they must read as those of the cache, every
        query must see all of its sequence's prefix, and such kernels must have been seen right on a GPU."""
        return given and group.window is None and self.fixed_kv_dtype is None and not self.copies and routes.seen_right(
            group.dtype, group.dim, group.softcap)

    def key_scale(self, k_cache: torch.Tensor) -> float:
        """The fixed scale of these keys. Raises RuntimeError for those of another cache."""
        if k_cache.data_ptr() not in self.key_scales:
            raise RuntimeError("flashinfer: the state was made for another KV cache than the one with these fixed scales")
        return self.key_scales[k_cache.data_ptr()]

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # pinned memory must outlive the copies from it
            for plan in self.plans.held.values():
                plan.wait()

    def _add(self, group: Group, own: bool) -> None:
        """All wrappers share one float workspace: it is written while kernels run, one after the other, and by no plan."""
        if group not in self.groups:
            size = group.workspace_bytes(self.limits.max_num_seqs, self.gpu.multi_processor_count)
            if size > self.workspace.shape[0]:
                self.workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self.groups[group] = set()
            for plan in self.plans.held.values():
                plan.add(group)
        self.groups[group].add(own)

    def plan(self, metadata: CommonAttentionMetadata, step: Step) -> None:
        """Plan every known group, after the copies of the last plan of this number are done. The GPU makes those before the
        forward that follows, so the host can prepare one step while the GPU runs the previous one."""
        plan = self.plans.begin(step)
        plan.begin(metadata, step)
        starts = metadata.query_start_loc_cpu.numpy()
        if plan.key is not None:
            self._check_graph(plan, int(starts[-1]), min(starts.shape[0] - 1, plan.num_tokens))
        plan.last_token = int(starts[plan.rows])
        plan.wait()
        for group in self.groups:
            self._plan_group(plan, group)
        plan.step = weakref.ref(step)

    def _check_graph(self, plan: FlashInferPlan, tokens: int, rows: int) -> None:
        """A step of a graph is for one number of rows, its padding rows included."""
        place, name = (plan.key, plan.number), f"{plan.key!r}" + (f" (step number {plan.number})" if plan.number else "")
        if tokens != plan.decodes:
            raise RuntimeError(f"flashinfer plans CUDA graphs for one token per sequence; graph {name} has "
                               f"{tokens} tokens of {plan.rows} sequences")
        if not plan.capturing and place not in self.graph_rows:
            known = [repr(key) for key, number in self.graph_rows if number == plan.number]
            raise RuntimeError(f"CUDA graph {name} was not captured with a plan of flashinfer; these were: "
                               f"{', '.join(known) or 'none'}")
        plan.rows = self.graph_rows.setdefault(place, rows)
        if rows != plan.rows:
            raise RuntimeError(f"CUDA graph {name} was captured for {plan.rows} sequences, padding included; the "
                               f"batch has {rows}")

    def _plan_group(self, plan: FlashInferPlan, group: Group) -> None:
        if plan.key is not None and not plan.capturing and (group, plan.key, plan.number) not in self.wrappers:
            return  # first seen after this graph was captured: the graph does not run it
        try:
            if self.copies:
                plan.segments[group, False] = self._plan_copies(plan, group)
                return
            table = self._table(plan, group.window)
            n = plan.decodes if plan.key is None else plan.rows
            decodes = [(self._plan_decode(plan, group, table, n), 0, n)] if n and not self.prompts_only else []
            prompts: dict[Way, Any] = {}
            for own in self.groups[group] if plan.last_token > n else ():
                prompt = self._plan_prompts(plan, group, table, n, own, prompts)
                plan.segments[group, own] = [*decodes, (prompt, n, plan.last_token)]
            if plan.last_token <= n:
                plan.segments |= {(group, own): decodes for own in (True, False)}
        finally:
            plan.copied.record(torch.cuda.current_stream(self.device))

    def _table(self, plan: FlashInferPlan, window: int | None, prefixes: np.ndarray | None = None) -> PageTable:
        """The page table for a window, or of ``prefixes``, (rows,) tokens, filled once a step."""
        name = window if prefixes is None else PREFIX
        if name not in plan.tables:
            plan.tables[name] = PageTable(self.limits, self.device)
        if name not in plan.filled:
            metadata = plan.metadata if window is None else plan.window_metadata
            plan.tables[name].fill(metadata, plan.rows, plan.decodes, window, *(() if prefixes is None else (prefixes,)))
            plan.filled.add(name)
        return plan.tables[name]

    def _plan_decode(self, plan: FlashInferPlan, group: Group, table: PageTable, rows: int) -> Any:
        place, graph = (group, plan.key, plan.number), plan.key is not None
        wrapper = self.wrappers.get(place)
        args = (table.host[0, : rows + 1], table.indices[:0] if graph else table.indices, table.host[1, :rows],
                group.heads, group.kv_heads, group.dim, self.page_size)
        if wrapper is not None and graph:  # a plan without its copies: the graph reads ``table``
            self.lib.fast_decode_plan(wrapper, *args, global_override_indptr_cpu=args[0], **group.options)
            return wrapper
        if wrapper is None:
            logger.info("flashinfer: decode kernel for %s (compiled at its first use on a machine)", group)
            buffers = {} if not graph else {
                "use_cuda_graph": True, "paged_kv_indptr_buffer": table.device[0, : rows + 1],
                "paged_kv_indices_buffer": table.indices, "paged_kv_last_page_len_buffer": table.device[1, :rows]}
            # Tensor cores pay off from four query heads per key head; the other kernel has few group sizes above that.
            wrapper = self.wrappers[place] = self.lib.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, self.layout, use_tensor_cores=group.heads // group.kv_heads >= 4, **buffers)
            if graph:
                wrapper.reset_workspace_buffer(self.workspace, plan.workspaces[group])
        wrapper.plan(*args, **group.options)
        return wrapper

    def _kernels(self, group: Group) -> str:
        """fa3 on Hopper GPUs if they build, else fa2, as over an fp8 cache: fa3 takes it with fp8 queries alone."""
        return "fa3" if self.gpu.major == HOPPER and group.kv_dtype is None and group not in self.without_fa3 else "fa2"

    def _plan_prompts(self, plan: FlashInferPlan, group: Group, table: PageTable, first: int, own: bool,
                      planned: dict[Way, Any]) -> Any:
        """Plan the rows from ``first`` on, the way that takes least time, or take what is ``planned``."""
        query_lens, seq_lens = contiguous.lengths(plan.metadata, first, plan.rows)
        hopper = self._kernels(group) == "fa3"
        runs = routes.runs(query_lens, whole_tiles=hopper) if own else []
        way = routes.choose(query_lens, seq_lens, group.heads, group.kv_heads, group.dim, hopper=hopper, own_runs=len(runs),
                            copies=self.prompts_only and hopper and group.window is None)
        if way not in planned:
            planned[way] = (
                self._contiguous(plan, group, first, plan.rows) if way is Way.COPIES else
                self._plan_own(plan, group, first, query_lens, seq_lens - query_lens, runs) if way is Way.OWN else
                self._plan_pages(plan, group, table, first, causal=True))
        return planned[way]

    def _plan_own(self, plan: FlashInferPlan, group: Group, first: int, query_lens: np.ndarray, prefixes: np.ndarray,
                  runs: list[tuple[int, int]]) -> OwnKeys:
        """Plan the rows from ``first`` on, of (rows - first,) query tokens and cached tokens before them, by the step's own
        keys in these runs, and the prefixes by pages."""
        starts, planned = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32), []
        for part, (begin, end) in enumerate(runs):
            own = torch.from_numpy(starts[begin : end + 1] - starts[begin])
            wrapper = self._planned(
                ("own", group, part, plan.number), RAGGED, "NHD", group, own, own, group.heads, group.kv_heads, group.dim,
                causal=True, **group.options)
            planned.append((wrapper, int(starts[begin]), int(starts[end])))
        if not prefixes.any():
            return OwnKeys(planned, None)
        table = self._table(plan, None, np.concatenate((np.zeros(first, prefixes.dtype), prefixes)))
        return OwnKeys(planned, self._plan_pages(plan, group, table, first, causal=False))

    def _plan_pages(self, plan: FlashInferPlan, group: Group, table: PageTable, first: int, causal: bool) -> Any:
        """Plan the rows from ``first`` on by the pages of ``table``."""
        return self._planned(
            ("prefill" if causal else PREFIX, group, plan.number), "BatchPrefillWithPagedKVCacheWrapper", self.layout, group,
            table.host[3, first : plan.rows + 1], table.host[0, first : plan.rows + 1], table.indices,
            table.host[1, first : plan.rows], group.heads, group.kv_heads, group.dim, self.page_size, causal=causal,
            max_token_per_sequence=plan.metadata.max_query_len, **group.options)

    def _planned(self, place: tuple[Any, ...], kind: str, layout: str, group: Group, *args: Any, **options: Any) -> Any:
        """The wrapper of a kind of FlashInfer's for prompts, kept at ``place``, after its ``plan`` with these arguments."""
        wrapper, kernels = self.wrappers.get(place), self._kernels(group)
        if wrapper is None:
            logger.info("flashinfer: %s prefill kernel for %s%s", kernels, group,
                        "" if self.prompts_only else " (compiled at its first use on a machine)")
            wrapper = getattr(self.lib, kind)(self.workspace, layout, backend=kernels)
        try:
            wrapper.plan(*args, **options)
        except Exception as error:
            if kernels == "fa2" or place in self.wrappers or self.prompts_only:
                raise
            logger.warning("flashinfer: fa2 prefill for %s, as fa3 failed: %s: %s", group, type(error).__name__, error)
            self.without_fa3.add(group)
            return self._planned(place, kind, layout, group, *args, **options)
        self.wrappers[place] = wrapper
        return wrapper

    def _plan_copies(self, plan: FlashInferPlan, group: Group) -> Segments:
        """The prompts of a quantized cache, whose keys are copied: in parts that have room."""
        starts, n, found = plan.metadata.query_start_loc_cpu.numpy(), plan.decodes, Segments()
        _, seq_lens = contiguous.lengths(plan.metadata, n, plan.rows)
        for part, (first, end) in enumerate(contiguous.parts(seq_lens, group.kv_heads, group.dim, n)):
            if starts[end] > starts[first]:
                found.append((self._contiguous(plan, group, first, end, part), int(starts[first]), int(starts[end])))
        return found

    def _contiguous(self, plan: FlashInferPlan, group: Group, first: int, rows: int, part: int = 0) -> contiguous.Contiguous:
        """Plan the rows from ``first`` to ``rows`` by contiguous keys. Plans of one step are of different ``part``s."""
        planned = functools.partial(self._planned, ("copies", group, part, plan.number), RAGGED, "NHD", group)
        return contiguous.plan(planned, plan.metadata, first, rows, group.heads, group.kv_heads, group.dim,
                               self.layout == "HND", **group.options)

    def segments(self, plan: FlashInferPlan, group: Group, given: bool) -> Segments:
        """What the step runs for a group, of layers whose k and v are ``given`` or not. A new group is planned now."""
        own = self.own(group, given)
        if torch.cuda.is_current_stream_capturing() and (plan.key is None or (group, own) not in plan.segments):
            raise RuntimeError(f"flashinfer: a CUDA graph is being captured, but none was planned for {group}; call plan with "
                               "graph_key and capturing=True, and run a forward, before the capture")
        if (group, own) not in plan.segments:
            self._add(group, own)
            self._plan_group(plan, group)
        return plan.segments[group, own]
