"""Backends ``two_batch:NAME``: a batch cut between sequences into two of about equally many tokens, each attended to by NAME.

On a GPU the halves run on two streams, so that the end of one half's kernels, where few programs are left, overlaps with those
of the other; on a CPU one after the other. On an H200 a fifth to a quarter of the kernel time of decodes overlaps, and they
take 1.2 to 1.4 times as long as whole batches (``h200_composite.json``): it is for kernels that leave more of a GPU idle. All
keys of the step are stored before: a sequence may read pages that one of the other half fills. NAME plans for each half, and
prepares in every layer: sizes follow from the cut. A batch that has no border between sequences stays whole, and so does one
outside a step. In a CUDA graph the cut is the middle row: so only batches of one token per sequence are captured. Never chosen
by ``attention="auto"``.

Elsewhere two batches overlap over the whole model, so that one computes while the other waits for other GPUs. Here no pass
splits the graph of a model: quire has one GPU and nothing to wait for, and both halves would read all weights, whose bytes
decode steps are bound by. Prefill is bound by products that fill the GPU alone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, BackendFamily, CudagraphSupport, define_paged_op
from quire.attn_ops.composite import check_every_step, op_name, planned_child, states_of
from quire.attn_ops.kernels.launch import is_recording
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.kv_store import store_kv
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.plans import StepPlan, StepPlans
from quire.attn_ops.step import Step, StepLimits, current_step, running

NAME = "two_batch"


def find_cut(query_start_loc: np.ndarray, captured: bool) -> int | None:
    """The row at which a batch with these offsets (B + 1,) is cut, so that halves differ least in tokens; None: one half would
    have none. ``captured``: cut by the number of rows, which a replay does not change."""
    rows = query_start_loc.shape[0] - 1
    if captured:
        return rows // 2 or None
    total = int(query_start_loc[-1])
    row = int(np.abs(2 * query_start_loc.astype(np.int64) - total).argmin())
    return row if 0 < query_start_loc[row] < total else None


def part_of(meta: CommonAttentionMetadata, rows: slice, tokens: slice) -> CommonAttentionMetadata:
    """Some rows of a batch and their tokens, with padding rows and padding tokens as in NOTE [Padding]."""
    starts = meta.query_start_loc_cpu[rows.start : rows.stop + 1]
    starts = starts - starts[0]
    lens, queries = meta.seq_lens_cpu[rows], starts.diff()
    begin = meta.query_start_loc[rows.start : rows.stop + 1]
    return replace(
        meta, query_start_loc=begin - begin[0], query_start_loc_cpu=starts, seq_lens=meta.seq_lens[rows], seq_lens_cpu=lens,
        block_table_tensor=meta.block_table_tensor[rows], slot_mapping=meta.slot_mapping[tokens],
        num_reqs=min(max(meta.num_reqs - rows.start, 0), len(lens)), num_actual_tokens=int(starts[-1]),
        max_query_len=int(queries.max()), max_seq_len=int(lens.max()), logits_indices_padded=None, num_logits_indices=0,
        encoder_seq_lens=None if meta.encoder_seq_lens is None else meta.encoder_seq_lens[rows],
        total_lens=None if meta.total_lens is None else meta.total_lens[rows])


@dataclass(eq=False)
class Halves(StepPlan):
    """The halves of one step: rows, tokens and the step of each."""

    parts: list[tuple[slice, slice, Step]] = field(default_factory=list)


class TwoBatches:
    """The halves of an engine's steps in progress, and NAME's state for each."""

    def __init__(self, base: AttentionBackend, sites: Sequence[AttentionSite], cache: PagedKVCache, limits: StepLimits) -> None:
        self.base = base
        self.states = [states_of(base, sites, cache, limits) for _ in range(2)]
        self.plans = StepPlans(Halves)

    def plan(self, meta: CommonAttentionMetadata, step: Step) -> None:
        captured, rows, tokens = step.graph_key is not None, meta.seq_lens.shape[0], meta.num_tokens
        cut = find_cut(meta.query_start_loc_cpu.numpy(), captured)
        if cut is None:
            places = [(slice(0, rows), slice(0, tokens))]
        else:
            token = cut if captured else int(meta.query_start_loc_cpu[cut])
            places = [(slice(0, cut), slice(0, token)), (slice(cut, rows), slice(token, tokens))]
        plan = self.plans.begin(step)
        plan.parts = []
        for (of_rows, of_tokens), state in zip(places, self.states, strict=False):
            half = meta if cut is None else part_of(meta, of_rows, of_tokens)
            plan.parts.append((of_rows, of_tokens, planned_child(self.base, half, state, step)))
        plan.step = weakref.ref(step)


@functools.cache
def _stream(index: int, recorded: bool) -> torch.cuda.Stream:
    """The second half's; while a graph is recorded another one, so that no other thread's work is recorded with it."""
    return torch.cuda.Stream(index)


def _op(base: AttentionBackend, name: str) -> Callable[..., torch.Tensor]:
    def op(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> torch.Tensor:
        *caches, slot_mapping, block_table, start, seq_lens, sinks, _ = rest
        rows, count = seq_lens.shape[0], q.shape[0]

        def part(rows: slice, tokens: slice, child: Step | None) -> torch.Tensor:
            begin = start[rows.start : rows.stop + 1]
            own = (slot_mapping[tokens], block_table[rows], begin - begin[0], seq_lens[rows])
            with running(child):
                prepared = base.prepared(*own, caches[0].shape[1])
                return base.op(q[tokens], None, None, *caches, *own, sinks, prepared, **options)

        store_kv(k, v, *rest[:5])
        step = current_step()
        state = None if step is None else step.states.get(name)
        planned = None if step is None or state is None else state.plans.of(step)
        halves: list[tuple[slice, slice, Step | None]] = [(slice(0, rows), slice(0, count), step)]
        if is_recording():  # kernels are compiled ahead, for graphs
            cut = rows // 2 if count == rows else 0
            halves = [(slice(0, cut), slice(0, cut), step), (slice(cut, rows), slice(cut, count), step)] if cut else halves
        elif step is not None and planned is not None and step.metadata.num_tokens == count:
            halves = planned.parts
        if len(halves) == 1:
            return part(*halves[0])
        out = q.new_empty(count, q.shape[1], caches[1].shape[3])
        if not q.is_cuda or is_recording():
            for half in halves:
                out[half[1]] = part(*half)
            return out
        current = torch.cuda.current_stream(q.device)
        side = _stream(q.device.index, torch.cuda.is_current_stream_capturing())
        side.wait_stream(current)
        with torch.cuda.stream(side):  # both streams use only tensors that live until they are joined
            out[halves[1][1]] = part(*halves[1])
        out[halves[0][1]] = part(*halves[0])
        current.wait_stream(side)
        return out

    return op


def make(name: str, get: Callable[[str], AttentionBackend]) -> AttentionBackend:
    """The backend ``two_batch:NAME``. Raises ValueError for a name of another form, or an unknown backend."""
    base_name = name.partition(":")[2]
    if not base_name:
        raise ValueError(f"attention={name!r}: write {FAMILY.usage}")
    base = get(base_name)
    check_every_step(name, (base,))
    support = min(base.capabilities.cudagraph_support, CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
    op = define_paged_op(op_name(name), _op(base, name), launches="cuda" in base.capabilities.devices)
    return replace(
        base, name=name, op=op, rope_op=None, mla_op=None, state_op=None, prepare=None, priority=None,
        plans_windows=False, without_graph=None, prefill=None,
        capabilities=replace(base.capabilities, mla=False, lse=False, batch_invariant=False, cudagraph_support=support),
        make_state=lambda sites, cache, limits: TwoBatches(base, sites, cache, limits),
        plan=lambda metadata, step: step.states[name].plan(metadata, step),
        route=lambda site: f"{base.serves(site)} of two halves")


FAMILY = BackendFamily(NAME, "two_batch:NAME: each batch as two halves, on two streams of a GPU", make=make)
