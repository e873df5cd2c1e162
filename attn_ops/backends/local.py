"""Backends ``local:NAME``: chunked attention (Llama 4) by a backend that has none. Each chunk that a sequence has queries in
becomes a sequence of its own (``metadata/local.py``), to which NAME attends; layers without chunks are NAME's as they are.

Positions within a chunk and within its sequence differ by the chunk's beginning, for queries and keys alike. So causal order,
windows, softcap, sinks and all that belongs to a slot stay what they were, and rotations are those of the tokens. Chunks must
consist of whole pages.

NAME plans for the virtual sequences in a step of its own, with a state of its own: layers without chunks use both of the real
ones. In eager steps the tables of the virtual sequences are made when the step is planned, once for all layers. Steps of a CUDA
graph have one token per sequence at most, so one virtual sequence for each, in the chunk of its last token: planning
works out its table and length on the device, from the step's, into buffers that the graph reads, and allocates nothing at a
replay. Graphs of other batches would need a number of sequences that follows from lengths. Never chosen by
``attention="auto"``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import (
    AttentionBackend,
    AttentionCapabilities,
    BackendFamily,
    CudagraphSupport,
    UnsupportedAttention,
)
from quire.attn_ops.composite import Composite, check_every_step, common_capabilities, declared, planned_child, states_of
from quire.attn_ops.kernels.launch import is_recording
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.metadata import CommonAttentionMetadata, make_local_attention_virtual_batches
from quire.attn_ops.metadata.local import check_chunk
from quire.attn_ops.plans import StepPlan, StepPlans, planned_step
from quire.attn_ops.step import Step, StepLimits, current_step, ensure_planned, running

NAME = "local"


@dataclass(frozen=True)
class ChunkCapabilities(AttentionCapabilities):
    """Of the part that serves layers with chunks: what ``base`` declares for the same layers without, on pages that divide the
    chunk."""

    base: AttentionCapabilities = field(kw_only=True)

    def reasons_against(self, site: AttentionSite, *, page_size: int | None = None, **cache: Any) -> list[str]:
        why = self.base.reasons_against(replace(site, chunk=None), page_size=page_size, **cache)
        if site.chunk is not None and page_size is not None and site.chunk % page_size:
            why.append(f"chunks of {site.chunk} tokens on pages of {page_size}: each chunk becomes a sequence of its own, of "
                       "whole pages; choose a page_size that divides the chunk")
        return why


class ChunkBuffers:
    """What CUDA graphs read of their virtual sequences: ``table`` (rows, columns) and ``lens`` (rows,), int32."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.table = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self.lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._first = torch.zeros(rows, dtype=torch.int64, device=device)
        self._index = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        self._column = torch.arange(columns, device=device)

    def fill(self, meta: CommonAttentionMetadata, chunk: int) -> CommonAttentionMetadata:
        """The virtual sequences of a batch of one token per sequence at most, in the first rows of the buffers. Device work
        that allocates nothing. Raises ValueError for a batch that is too large."""
        rows, columns, page = meta.seq_lens.shape[0], chunk // meta.page_size, meta.page_size
        last = (meta.seq_lens_cpu - 1).clamp_min(0)
        lens_cpu = meta.seq_lens_cpu - last // chunk * chunk
        longest = int(lens_cpu.max()) if rows else 0
        if rows > self.table.shape[0] or -(-longest // page) > self.table.shape[1]:
            raise ValueError(f"{NAME}: a batch of {rows} sequences with chunks of up to {longest} tokens exceeds the "
                             f"StepLimits of its state ({self.table.shape[0]} sequences of {self.table.shape[1]} pages)")
        table, lens, first, index = self.table[:rows], self.lens[:rows], self._first[:rows], self._index[:rows]
        first.copy_(meta.seq_lens).sub_(1).clamp_(min=0).div_(chunk, rounding_mode="floor")
        lens.copy_(first).mul_(-chunk).add_(meta.seq_lens)
        torch.add(first.mul_(columns)[:, None], self._column, out=index)
        torch.gather(meta.block_table_tensor, 1, index.clamp_(max=meta.block_table_tensor.shape[1] - 1), out=table)
        return replace(meta, seq_lens=lens, seq_lens_cpu=lens_cpu, block_table_tensor=table, max_seq_len=longest)


@dataclass(eq=False)
class ChunkPlan(StepPlan):
    """The virtual sequences of one step, by chunk: ``steps`` of the backend that attends, and what it ``prepared``. ``buffers``
    stay from step to step."""

    steps: dict[int, Step] = field(default_factory=dict)
    prepared: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    buffers: dict[int, ChunkBuffers] = field(default_factory=dict)


class Chunks:
    """The plans of an engine's steps in progress, and ``base``'s state for each size of chunks."""

    def __init__(self, base: AttentionBackend, sites: Sequence[AttentionSite], cache: PagedKVCache, limits: StepLimits) -> None:
        self.base, self.cache, self.limits = base, cache, limits
        self.plans = StepPlans(ChunkPlan)
        self.states: dict[int, dict[str, Any]] = {}
        for chunk in dict.fromkeys(site.chunk for site in sites if site.chunk is not None):
            self._add(chunk, [replace(site, chunk=None) for site in sites if site.chunk == chunk])

    def _add(self, chunk: int, sites: Sequence[AttentionSite]) -> None:
        tokens = self.limits.max_num_tokens
        limits = StepLimits(_most_rows(self.limits.max_num_seqs, tokens, chunk), tokens,
                            self._columns(chunk, self.limits.max_pages_per_seq))
        self.states[chunk] = states_of(self.base, sites, self.cache, limits)

    def _columns(self, chunk: int, pages: int) -> int:
        return max(1, min(chunk // self.cache.page_size, pages))

    def plan(self, meta: CommonAttentionMetadata, step: Step) -> None:
        """Raises ValueError for chunks that do not consist of whole pages, or a batch that exceeds the limits, RuntimeError for
        a CUDA graph of more than one token per sequence."""
        plan = self.plans.begin(step)
        plan.steps, plan.prepared = {}, {}
        for chunk in self.states:
            self._plan_chunk(plan, chunk, meta, step)
        plan.step = weakref.ref(step)

    def _plan_chunk(self, plan: ChunkPlan, chunk: int, meta: CommonAttentionMetadata, step: Step) -> None:
        meta = step.window_metadata or meta
        if step.graph_key is None:
            virtual = make_local_attention_virtual_batches(
                chunk, meta, keep_empty=True, width=self._columns(chunk, meta.block_table_tensor.shape[1]))
        else:
            check_chunk(chunk, meta.page_size)
            if int(meta.query_lens_cpu.max()) > 1:
                raise RuntimeError(f"{NAME}:{self.base.name}: CUDA graphs of chunked attention have one token per sequence at "
                                   f"most; graph {step.graph_key!r} has a sequence of {int(meta.query_lens_cpu.max())}")
            if chunk not in plan.buffers:
                columns = self._columns(chunk, self.limits.max_pages_per_seq)
                plan.buffers[chunk] = ChunkBuffers(self.limits.max_num_seqs, columns, meta.seq_lens.device)
            virtual = plan.buffers[chunk].fill(meta, chunk)
        plan.steps[chunk] = planned_child(self.base, virtual, self.states[chunk], step)

    def step_of(self, plan: ChunkPlan, chunk: int, step: Step) -> Step:
        """The step of the virtual sequences. Chunks of a layer that is new are planned now."""
        if chunk not in plan.steps:
            if chunk not in self.states:
                self._add(chunk, [])
            self._plan_chunk(plan, chunk, step.metadata, step)
        return plan.steps[chunk]


def _most_rows(rows: int, tokens: int, chunk: int) -> int:
    """Virtual sequences of a batch, at most: a row of n tokens has queries in n // chunk + 2 chunks at most."""
    return 2 * rows + tokens // chunk


def _part(base: AttentionBackend) -> AttentionBackend:
    """The backend that serves layers with chunks."""
    name = f"chunks of {base.name}"

    def attend(run: Any, first: int, *args: Any, **options: Any) -> torch.Tensor:
        """``run``, an op of ``base``, on virtual sequences; the arguments from ``first`` on are caches, tables, sinks and
        ``prepared``."""
        before, (*caches, slot_mapping, table, start, lens, sinks, _) = args[:first], args[first:]
        page, q = caches[0].shape[1], args[0]
        chunk, options["chunk"] = options["chunk"], None
        check_chunk(chunk, page)
        if is_recording():  # kernels are compiled ahead: shapes are enough
            rows = lens.shape[0] if q.shape[0] <= lens.shape[0] else _most_rows(lens.shape[0], q.shape[0], chunk)
            tables = (slot_mapping, table.new_empty(rows, min(chunk // page, table.shape[1])), start.new_empty(rows + 1),
                      lens.new_empty(rows))
            return run(*before, *caches, *tables, sinks, base.prepared(*tables, page), **options)
        step, state, plan = planned_step(name, f"{NAME}:{base.name}")
        if q.is_cuda and torch.cuda.is_current_stream_capturing() and (step.graph_key is None or chunk not in plan.steps):
            raise RuntimeError(f"{NAME}:{base.name}: a CUDA graph is being captured, but none was planned for chunks of "
                               f"{chunk} tokens; call plan with graph_key and capturing=True before the capture")
        child = state.step_of(plan, chunk, step)
        virtual = child.metadata
        if q.shape[0] != virtual.num_tokens:
            raise RuntimeError(f"{NAME}:{base.name}: the step was planned for {virtual.num_tokens} tokens, q has {q.shape[0]}")
        tables = slot_mapping, virtual.block_table_tensor, virtual.query_start_loc, virtual.seq_lens
        with running(child):
            prepared = plan.prepared.get(chunk)
            if prepared is None:
                prepared = base.prepared(*tables, page)
            if step.graph_key is None:  # else it is a part of the graph, and read from the buffers as they are then
                plan.prepared[chunk] = prepared
            return run(*before, *caches, *tables, sinks, prepared, **options)

    support = min(base.capabilities.cudagraph_support, CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
    capabilities = ChunkCapabilities(**declared(
        base, chunk=True, mla=False, lse=False, batch_invariant=False, cudagraph_support=support), base=base.capabilities)
    return replace(
        base, name=name, capabilities=capabilities, op=functools.partial(attend, base.op, 3),
        rope_op=None if base.rope_op is None else functools.partial(attend, base.rope_op, 8), mla_op=None, state_op=None,
        prepare=None, priority=None, plans_windows=True,
        make_state=lambda sites, cache, limits: Chunks(base, sites, cache, limits),
        plan=lambda metadata, step: step.states[name].plan(metadata, step))


@dataclass(frozen=True, eq=False)
class Local(Composite):
    """States and plans only of parts that serve a layer: ``full=A,chunk=local:A`` has one of A for the full layers."""

    def make_state(self, sites: Sequence[AttentionSite], cache: PagedKVCache, limits: StepLimits) -> dict[str, Any]:
        return {part.name: part.make_state(own, cache, limits) for part in self.parts if part.make_state is not None
                and (own := [s for s in sites if self._part_of(s.window, s.chunk) is part])}

    def _part_of(self, window: int | None, chunk: int | None) -> AttentionBackend:
        return self.choose(0, 0, window, chunk)

    def plan(self, metadata: CommonAttentionMetadata, step: Step) -> None:
        own = step.states.get(self.name, {})
        step.states.update(own)
        for part in self.parts:
            if part.plan is not None and (part.make_state is None or part.name in own):
                part.plan(metadata, step)
                step.planned.add(part.name)

    def _attending(self, q: torch.Tensor, tensors: Sequence[Any], options: dict[str, Any]) -> tuple[AttentionBackend, ...]:
        part, step = self._part_of(options.get("window"), options.get("chunk")), current_step()
        if step is not None and part.plan is not None and not is_recording():
            ensure_planned(step, part, [])  # done before, but for a layer of a kind that no layer before had
        return (part,)


def make(name: str, get: Callable[[str], AttentionBackend]) -> AttentionBackend:
    """The backend ``local:NAME``. Raises ValueError for a name of another form or an unknown backend, UnsupportedAttention for
    a backend without an op on keys and values of all heads, or one whose data or scores belong to positions."""
    base_name = name.partition(":")[2]
    if not base_name:
        raise ValueError(f"attention={name!r}: write {FAMILY.usage}")
    base = get(base_name)
    check_every_step(name, (base,))
    if base.op is None or base.unrotated:
        raise UnsupportedAttention(f"attention={name!r}: {base.name} " + (
            "serves MLA alone, which has no chunks" if base.op is None else
            "rotates by positions of its own, which chunks would change") + "; name another backend")
    part = _part(base)

    def serving(site: AttentionSite) -> Sequence[AttentionBackend]:
        return (base,) if site.chunk is None else (part,)

    def choose(tokens: int, rows: int, window: int | None, chunk: int | None) -> AttentionBackend:
        return base if chunk is None else part

    def route(site: AttentionSite) -> str:
        return base.serves(site) if site.chunk is None else f"{base.serves(replace(site, chunk=None))} on each chunk"

    made = Local(name, (base, part), choose, lambda *of_step: (base, part), serving)
    support = part.capabilities.cudagraph_support
    return made.backend(common_capabilities(made.parts, serving, support, chunk=True), route)


FAMILY = BackendFamily(NAME, "local:NAME: layers with chunks by a backend that has none, each chunk, which must consist of "
                       "whole pages, as a sequence of its own", make=make)
