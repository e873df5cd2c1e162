"""Chunked attention by a backend that has none: the kit's outputs and cache, by virtual sequences that the backend plans for.
Else a llama4 served by such a backend sees tokens of other chunks, or not all of its own."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire import CudagraphSupport, UnsupportedAttention, current_step, define_paged_op
from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.backends import local, per_kind, torch_native
from quire.attn_ops.conformance.batches import Batch, Failure, compare, lay_out, planned, prepared, run
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.kernels.launch import recording
from quire.attn_ops.metadata import local as virtual
from quire.attn_ops.registry import get_backend, register_backend
from quire.attn_ops.selection import select_backend
from quire.attn_ops.step import Step, StepLimits, ensure_planned, running
from tests.attn_ops.cases import FEW, ChunkKit, make_backend, pass_kit, run_check
from tests.attn_ops.cases import SITE as SITE_3
from tests.attn_ops.draft_steps import draft_batches, plan_steps, run_steps

CPU = torch.device("cpu")
FULL = dataclasses.replace(SITE_3, layer=0)
CHUNKED = dataclasses.replace(FULL, chunk=8)
SIZE: dict[str, Any] = {"page_size": 4, "num_pages": 80, "table_width": 16}
calls: list[tuple[int, list[int]]] = []


def seen(*args, **options):
    """A backend without chunks that plans: it needs the plan of just this batch."""
    step = current_step()
    assert options["chunk"] is None and step is not None and step.states["seen"].plan is step.metadata
    meta = step.metadata
    assert meta.num_tokens == len(args[0]) and args[8].shape[0] == len(args[10]) == len(args[9]) - 1
    assert meta.seq_lens_cpu.tolist() == args[10].tolist() and meta.query_start_loc_cpu.tolist() == args[9].tolist()
    assert meta.max_seq_len >= int(meta.seq_lens_cpu.max()) and meta.max_query_len >= int(meta.query_lens_cpu.max())
    calls.append((len(args[0]), args[10].tolist()))
    return torch_native.paged_attention(*args, **options)


def plan(metadata, step) -> None:
    step.states["seen"].plan = metadata


made_for: list[list[int | None]] = []


def state(sites, cache, limits) -> SimpleNamespace:
    made_for.append([site.layer for site in sites])
    assert all(site.chunk is None for site in sites)
    return SimpleNamespace(plan=None, limits=limits)


SEEN = dataclasses.replace(
    torch_native.BACKEND, name="seen", op=define_paged_op("seen_in_local_test", seen), state_op=None, mla_op=None,
    priority=None, plan=plan, make_state=state, plans_windows=True,
    capabilities=dataclasses.replace(torch_native.BACKEND.capabilities, mla=False, lse=False, chunk=False))


@pytest.fixture(autouse=True)
def parts(entries) -> None:
    entries(local=lambda: local.FAMILY, per_kind=lambda: per_kind.FAMILY, torch_native=lambda: torch_native.BACKEND)
    register_backend(SEEN)
    calls.clear()
    made_for.clear()


@FEW
def test_it_passes_the_kit(only: str) -> None:
    pass_kit(get_backend("local:seen"), only)


@pytest.mark.parametrize("name", [
    "decode batch", "prefill batch", "mixed batch", "boundary lengths", "shape mixed_small", "feature window",
    "feature softcap", "feature chunk", "feature sinks", "chunks at page boundaries", "features together",
    "shared cache (no k, v)", "layout HND", "KV cache int8", "KV cache float8_e4m3fn, fixed scale", "page size 1",
    "page size 16", "shared prefix", "padding", "stale metadata in padding", "buffers used again", "garbage in unused slots",
    "pages in another order", "a batch in parts", "decode steps made ahead", "strided q, k, v",
    pytest.param("real shapes: chunk", marks=pytest.mark.slow),
    pytest.param("real shapes: window and chunk", marks=pytest.mark.slow)])
def test_layers_with_chunks_pass_each_check(name: str) -> None:
    """The kit's own batches have chunks in the checks of features alone."""
    run_check(ChunkKit(get_backend("local:seen"), CPU, torch.float32), name)
    assert calls


@pytest.mark.parametrize("name", ["feature chunk", pytest.param("chunks at page boundaries", marks=pytest.mark.slow),
                                  "features together", "rotary embedding (rope_op)"])
def test_chunks_by_triton(name: str) -> None:
    """Its kernels in the interpreter, rotation included."""
    pytest.importorskip("triton")
    from quire.attn_ops.backends import triton

    register_backend(triton.BACKEND)
    run_check(ChunkKit(get_backend("local:triton"), CPU, torch.float32), name)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    """``local:flashinfer`` on FlashInfer's stand-ins, which check the plans."""
    pytest.importorskip("triton")
    from tests.attn_ops.backends.flashinfer_stand_ins import stand_in

    backend = stand_in(monkeypatch)
    caps = dataclasses.replace(
        backend.capabilities, devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32}),
        head_dims=lambda d, dv: d == dv == 16, page_sizes=lambda size: size in (1, 4))
    register_backend(dataclasses.replace(backend, capabilities=caps, available=lambda device: None))
    return get_backend("local:flashinfer")


@pytest.mark.parametrize("name", ["decode batch", "mixed batch", "feature chunk", "chunks at page boundaries",
                                  "features together", "padding", "buffers used again", "decode steps made ahead"])
def test_chunks_by_flashinfer(name: str, flashinfer: AttentionBackend) -> None:
    """It plans on the host, for the virtual sequences, and reads the pages of its plan alone."""
    run_check(ChunkKit(flashinfer, CPU, torch.float32), name)


@pytest.mark.parametrize("key", [None, "drafts"])
def test_steps_made_ahead_by_flashinfer(key: str | None, flashinfer: AttentionBackend) -> None:
    """Its plans for the virtual sequences have the numbers of the steps."""
    states: dict[str, Any] = {}
    batches = draft_batches(ChunkKit(flashinfer, CPU, torch.float32), [18, 5, 28], 3, 4, **SIZE)
    steps = plan_steps(flashinfer, batches, states, graph_key=key, capturing=key is not None)
    for out, batch in zip(run_steps(flashinfer, batches, steps), batches, strict=True):
        compare(out, batch)


def test_replays_by_flashinfer(flashinfer: AttentionBackend) -> None:
    site = dataclasses.replace(CHUNKED, num_heads=4, head_dim=16, head_dim_v=16)
    static = lay_out(site, [1] * 4, [60, 33, 8, 17], **SIZE)
    later = lay_out(site, [1, 1], [9, 16], pad=(2, 2), seed=1, fill=float("nan"), **SIZE)
    replayed(flashinfer, static, [later], site)


def off_by_one(field: str, change: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = virtual.ChunkRows.of

    def wrong(*args):
        found = exact(*args)
        value = getattr(found, field) + change
        if field == "query_start_loc":  # the border between two virtual sequences, not the ends
            value = np.concatenate([[0], value[1:-1], found.query_start_loc[-1:]]).astype(np.int32).clip(0, value[-1])
        return found._replace(**{field: value.clip(0)})

    monkeypatch.setattr(virtual.ChunkRows, "of", wrong)


@pytest.mark.parametrize("field, change", [
    ("chunk", 1), ("chunk", -1), ("seq_lens", 1), ("seq_lens", -1), ("query_start_loc", 1), ("query_start_loc", -1)])
def test_the_kit_sees_a_wrong_chunk(field: str, change: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that begins a page or a token too early or too late."""
    off_by_one(field, change, monkeypatch)
    with pytest.raises(Failure, match="wrong|not finite|not a number"):
        run_check(Kit(get_backend("local:torch_native"), CPU, torch.float32), "feature chunk")


@pytest.mark.parametrize("wrong", [lambda lens, chunk: lens % chunk, lambda lens, chunk: (lens - 1) % chunk + 2])
def test_a_replay_with_wrong_lengths_is_seen(wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the graph's buffers hold is what the outputs come from."""
    fill = local.ChunkBuffers.fill

    def changed(self, meta, chunk):
        found = fill(self, meta, chunk)
        found.seq_lens.copy_(wrong(meta.seq_lens, chunk).clamp_min(0))
        return found

    monkeypatch.setattr(local.ChunkBuffers, "fill", changed)
    with pytest.raises(Failure, match="wrong"):
        batch = lay_out(CHUNKED, [1, 1, 1], [16, 8, 13], **SIZE)
        compare(run(get_backend("local:torch_native"), batch, graph_key="a graph"), batch)


@pytest.mark.parametrize("queries, seqs, lens", [
    ([1, 1, 1], [17, 8, 1], [1, 8, 1]), ([1, 0, 1], [9, 12, 16], [1, 4, 8]), ([5, 1], [10, 8], [8, 2, 8]),
    ([20], [20], [8, 8, 4]), ([0, 0], [3, 9], [3, 1])])
def test_virtual_sequences(queries, seqs, lens) -> None:
    """Rows without queries stay, so that a decode batch has as many sequences as rows, in a graph as outside."""
    batch = lay_out(CHUNKED, queries, seqs, page_size=4)
    compare(run(get_backend("local:seen"), batch), batch)
    assert calls == [(sum(queries), lens)]
    if max(queries) <= 1:
        compare(run(get_backend("local:seen"), batch, graph_key="a graph"), batch)
        assert calls == [(sum(queries), lens)] * 2


def replayed(backend, static: Batch, batches, site) -> None:
    """Capture ``static``, then replay: the op again in the captured step, after the step of each batch was planned."""
    states: dict[str, Any] = {}
    kept = [tensor.clone() for tensor in static.buffers()]
    key = {"states": states, "graph_key": "a graph"}
    captured = Step(static.cache, static.metadata, attention=backend, capturing=True, **key)
    ensure_planned(captured, backend, [site])
    state = states[f"chunks of {backend.name.partition(':')[2]}"]
    before = state.plans.held[0].steps[site.chunk].metadata
    for batch, values in [(static, kept), *((b, [t.clone() for t in b.buffers()]) for b in batches), (static, kept)]:
        for mine, theirs in zip(static.buffers(), values, strict=True):
            mine.copy_(theirs)
        batch.cache = static.cache
        step = Step(batch.cache, batch.metadata, attention=backend, **key)
        ensure_planned(step, backend, [site])
        now = state.plans.held[0].steps[site.chunk].metadata
        for name in ("block_table_tensor", "seq_lens"):  # what a graph has recorded
            assert getattr(before, name).data_ptr() == getattr(now, name).data_ptr(), name
        state.plans.held[0].step = weakref.ref(captured)
        with running(captured), torch.no_grad():
            out = backend.op(*static.arguments(prepared(backend, static)), **static.options)
        compare(out, batch)


@pytest.mark.parametrize("features", [{}, {"window": 5, "softcap": 4.0, "sinks": True}], ids=str)
def test_replays_read_the_new_lengths_and_pages(features) -> None:
    """Longer, shorter and padded batches in the buffers of one graph, whose padding rows keep the pages of the batch before."""
    site = dataclasses.replace(CHUNKED, **features)
    static = lay_out(site, [1] * 4, [60, 33, 8, 17], **SIZE)
    later = lay_out(site, [1, 1], [9, 16], pad=(2, 2), seed=1, fill=float("nan"), **SIZE)
    later.metadata.block_table_tensor[2:] = static.metadata.block_table_tensor[2:]
    longer = lay_out(site, [1] * 4, [64, 24, 25, 1], seed=2, **SIZE)
    replayed(get_backend("local:seen"), static, [later, longer], site)


def test_what_a_graph_prepares_is_of_the_buffers_as_they_are_then() -> None:
    """A capture after a warm-up holds the work that prepares, not its result of the warm-up."""
    static, later = (lay_out(CHUNKED, [1, 1], lens, seed=n, **SIZE) for n, lens in enumerate(([17, 8], [31, 20])))
    backend, states = get_backend("local:torch_native"), {}
    with planned(backend, static, states=states, graph_key="a graph", capturing=True):
        compare(backend.op(*static.arguments(), **static.options), static)
        states["chunks of torch_native"].plans.held[0].buffers[8].fill(later.metadata, 8)
        for mine, theirs in zip(static.buffers(), later.buffers(), strict=True):
            mine.copy_(theirs)
        compare(backend.op(*static.arguments(), **static.options), later)


def test_a_graph_is_of_single_tokens_and_within_its_buffers() -> None:
    backend = get_backend("local:seen")
    with pytest.raises(RuntimeError, match="one token per sequence at most; graph 'a graph' has a sequence of 5"):
        run(backend, lay_out(CHUNKED, [5], [9], page_size=4), graph_key="a graph")
    states: dict[str, Any] = {}
    run(backend, lay_out(CHUNKED, [1], [9], page_size=4), states=states, graph_key="a graph")
    with pytest.raises(ValueError, match="a batch of 2 sequences.*exceeds the StepLimits"):
        run(backend, lay_out(CHUNKED, [1, 1], [9, 9], page_size=4), states=states, graph_key="a graph")


@pytest.mark.parametrize("key", [None, "drafts"])
def test_steps_made_ahead_run_by_their_own_plans(key) -> None:
    """All are planned before the first of them runs; chunks begin at the second, and at no step."""
    kit, states = Kit(get_backend("local:torch_native"), CPU, torch.float32), {}
    batches = draft_batches(kit, [18, 5, 28], 3, 4, chunk=8, **SIZE)
    steps = plan_steps(kit.backend, batches, states, graph_key=key, capturing=key is not None)
    held = states["chunks of torch_native"].plans.held
    assert [held[n].steps[8].metadata.seq_lens.tolist() for n in range(3)] == [[8, 3, 2, 0], [1, 4, 3, 0], [2, 5, 4, 0]]
    for out, batch in zip(run_steps(kit.backend, batches, steps), batches, strict=True):
        compare(out, batch)


def batches_of(*sites: AttentionSite) -> list[Batch]:
    """One batch of layers of these kinds, which differ in nothing else."""
    return [lay_out(site, [7, 1], [21, 9], page_size=4) for site in sites]


@pytest.mark.parametrize("name", ["local:seen", "full=seen,chunk=local:seen", "chunk=local:seen,full=seen"])
def test_full_and_chunked_layers_have_plans_of_their_own(name: str) -> None:
    """In one step: one state of the backend for the full layers, and one for the virtual sequences."""
    sites = [FULL, dataclasses.replace(CHUNKED, layer=1)]
    backend, batches = get_backend(name), batches_of(FULL, CHUNKED)
    step = Step(batches[0].cache, batches[0].metadata, attention=backend)
    with running(step), torch.no_grad():
        ensure_planned(step, backend, sites)
        for batch in (*batches, batches[0]):
            compare(backend.op(*batch.arguments(), **batch.options), batch)
    assert sorted(made_for) == [[0], [1]]
    assert [lens for _, lens in calls] == [[21, 9], [8, 5, 1], [21, 9]]
    assert select_backend(name, sites, device=CPU, page_size=4).backend is backend


def test_layers_that_come_one_by_one_are_planned_then() -> None:
    """As in a model that is not compiled: a step knows only the layers that it has met."""
    backend, (full, chunked, later) = get_backend("local:seen"), batches_of(FULL, CHUNKED, dataclasses.replace(FULL, chunk=16))
    step = Step(chunked.cache, chunked.metadata, attention=backend)
    for batch in (chunked, full, later, chunked):
        with running(step), torch.no_grad():
            ensure_planned(step, backend, [batch.site])
            compare(backend.op(*batch.arguments(), **batch.options), batch)
    assert [lens for _, lens in calls] == [[8, 5, 1], [21, 9], [16, 5, 9], [8, 5, 1]]


def test_chunks_have_the_pages_of_bounded_layers() -> None:
    """Where those have page numbers of their own, also those of pages that are left behind are null."""
    batch = lay_out(CHUNKED, [1, 3], [21, 12], page_size=4)
    others = dataclasses.replace(batch.metadata, block_table_tensor=torch.full_like(batch.metadata.block_table_tensor, 1))
    batch.metadata.block_table_tensor[0, :4] = batch.metadata.block_table_tensor[1, :1] = 0
    backend = get_backend("local:seen")
    step = Step(batch.cache, others, attention=backend, window_metadata=batch.metadata)
    with running(step), torch.no_grad():
        ensure_planned(step, backend, [CHUNKED])
        compare(backend.op(*batch.arguments(), **batch.options), batch)


def test_the_block_table_is_no_wider_than_the_batch_needs() -> None:
    """A chunk of 8192 tokens would read 2048 columns of a sequence of 6 pages."""
    batch = lay_out(dataclasses.replace(FULL, chunk=8192), [1, 3], [21, 12], page_size=4)
    states: dict[str, Any] = {}
    compare(run(get_backend("local:seen"), batch, states=states), batch)
    (step,) = states["chunks of seen"].plans.held[0].steps.values()
    assert step.metadata.block_table_tensor.shape == batch.metadata.block_table_tensor.shape
    limits = states["chunks of seen"].states[8192]["seen"].limits
    assert limits == StepLimits(4, 4, 6)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8])
def test_the_limit_of_rows_is_one(chunk: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        queries = rng.integers(0, 20, rng.integers(1, 6))
        seqs = queries + rng.integers(0, 20, len(queries))
        start = np.concatenate([[0], queries.cumsum()])
        rows = len(virtual.ChunkRows.of(start, seqs, chunk, True).row)
        assert len(queries) <= rows <= local._most_rows(len(queries), int(queries.sum()), chunk)
        assert queries.max() > 1 or rows == len(queries)


def test_kernels_of_the_part_that_attends_are_compiled_ahead() -> None:
    """Outside a step, from shapes alone."""
    shapes: list[tuple[int, ...]] = []

    def op(*args, **options):
        shapes.append((*args[8].shape, *args[9].shape, *args[10].shape))
        return args[0]

    register_backend(dataclasses.replace(SEEN, name="recorded", op=define_paged_op("recorded_in_local_test", op)))
    backend = get_backend("local:recorded")
    for queries in ([1, 1], [9, 4]):
        batch = lay_out(CHUNKED, queries, [20, 9], page_size=4)
        with recording():
            backend.op(*batch.arguments(), **batch.options)
    assert shapes == [(2, 2, 3, 2), (5, 2, 6, 5)]


def test_an_op_without_its_plan() -> None:
    backend, batch = get_backend("local:seen"), lay_out(CHUNKED, [1], [9], page_size=4)
    with pytest.raises(RuntimeError, match="local:seen needs a paged step that was planned"):
        backend.op(*batch.arguments(), **batch.options)
    with planned(backend, lay_out(CHUNKED, [2], [9], page_size=4)), pytest.raises(
            RuntimeError, match="the step was planned for 2 tokens, q has 1"):
        backend.op(*batch.arguments(), **batch.options)


def test_pages_must_divide_chunks() -> None:
    """Refused where a model is built, by plans, and by the op; sites without chunks have any page size."""
    backend = get_backend("local:seen")
    odd = dataclasses.replace(FULL, chunk=6)
    (why,) = backend.capabilities.reasons_against(odd, device=CPU, page_size=4)
    assert why == ("chunks of seen: chunks of 6 tokens on pages of 4: each chunk becomes a sequence of its own, of whole "
                   "pages; choose a page_size that divides the chunk")
    with pytest.raises(UnsupportedAttention, match="choose a page_size that divides the chunk"):
        select_backend("local:seen", [FULL, odd], device=CPU, page_size=4)
    assert not backend.capabilities.reasons_against(odd, device=CPU, page_size=3)
    assert not backend.capabilities.reasons_against(FULL, device=CPU, page_size=4)
    with pytest.raises(ValueError, match="not a multiple of the page size 4"):
        run(backend, lay_out(odd, [1], [9], page_size=4))
    with planned(backend, lay_out(CHUNKED, [1], [9], page_size=4)), pytest.raises(ValueError, match="not a multiple"):
        batch = lay_out(odd, [1], [9], page_size=4)
        backend.op(*batch.arguments(), **batch.options)


def test_capabilities_and_names() -> None:
    register_backend(make_backend("plain", window=False, softcap=False))
    register_backend(dataclasses.replace(make_backend("keeps"), every_step=True))
    register_backend(dataclasses.replace(SEEN, name="turns", unrotated=True))
    backend = get_backend("local:seen")
    assert backend.capabilities.chunk and not SEEN.capabilities.chunk
    assert backend.capabilities.cudagraph_support is CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert backend.serves(FULL) == "seen_paged_attention"
    assert backend.serves(CHUNKED) == "seen_paged_attention on each chunk" and backend.priority is None
    for site in (dataclasses.replace(CHUNKED, causal=False), dataclasses.replace(CHUNKED, dtype=torch.float64)):
        assert backend.capabilities.reasons_against(site, device=CPU, page_size=4)
    assert not backend.capabilities.mla and not backend.any_batch and backend.plans_windows
    for name, message in (
            ("local", "write local:NAME"), ("local:", "write local:NAME"),
            ("local:nobody", "unknown attention backend 'nobody'"),
            ("local:keeps", "every step must run whole through keeps"), ("local:plain", "plain serves MLA alone"),
            ("local:turns", "turns rotates by positions of its own")):
        with pytest.raises(ValueError, match=message):
            get_backend(name)


def test_features_are_those_of_the_backend() -> None:
    register_backend(dataclasses.replace(SEEN, name="few", capabilities=dataclasses.replace(
        SEEN.capabilities, window=False, softcap=False, sinks=False)))
    caps = get_backend("local:few").capabilities
    for feature in ({"window": 5}, {"softcap": 2.0}, {"sinks": True}):
        assert caps.reasons_against(dataclasses.replace(CHUNKED, **feature), device=CPU, page_size=4)
    assert not caps.reasons_against(CHUNKED, device=CPU, page_size=4)


def test_the_kit_sees_pages_that_chunks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that takes pages which do not divide a chunk, though that is not declared."""
    for module in (local, virtual):
        monkeypatch.setattr(module, "check_chunk", lambda *sizes: None)
    with pytest.raises(Failure, match="chunk=29 on pages of 4 tokens is not declared, and the op ignores it"):
        kit = Kit(get_backend("local:torch_native"), CPU, torch.float32)
        monkeypatch.setitem(kit.values, "chunk", (8,))
        monkeypatch.setattr("quire.attn_ops.conformance.checks.FEATURES", {"chunk": (29,)})
        kit.feature("chunk")
