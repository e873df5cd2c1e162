"""Backend ``flashinfer`` without FlashInfer: what it declares, its host-side arithmetic, and how it drives the library.

Stand-ins (``flashinfer_stand_ins.py``) take the library's place; the Triton kernels run in Triton's interpreter. tests/gpu has
the real library.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import logging
import math
import shutil
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire import AttentionSite, CommonAttentionMetadata, UnsupportedAttention
from quire.attn_ops import long_prefill
from quire.attn_ops.backends import flashinfer, torch_native
from quire.attn_ops.backends.flashinfer import BACKEND, FlashInferState, contiguous
from quire.attn_ops.backends.flashinfer import state as state_module
from quire.attn_ops.backends.flashinfer.pages import page_table
from quire.attn_ops.backends.flashinfer.state import Group
from quire.attn_ops.conformance.batches import check, lay_out, planned
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.step import Step, StepLimits, running
from quire.attn_ops.tuning.prefill import PrefillRule, PrefillTime
from tests.attn_ops.backends.flashinfer_stand_ins import Decode, Prefill, Ragged, fast_decode_plan, site, stand_in
from tests.attn_ops.cases import check_case, check_output, make_case, pass_kit
from tests.attn_ops.oracle import oracle_attention

CUDA = torch.device("cuda")
SMALL = dict(num_heads=4, num_kv_heads=2, head_dim=16, page_size=4)


@pytest.fixture
def on_cpu(monkeypatch):
    return stand_in(monkeypatch)


# What it declares.


@pytest.mark.parametrize("installed, nvcc, reason", [
    ((), True, "flashinfer is not installed: pip install 'quire[flashinfer]'"),
    (("flashinfer",), False, "flashinfer compiles its kernels at first use, and there is no nvcc"),
    (("flashinfer",), True, None), (("flashinfer", "flashinfer_jit_cache"), False, None),
])
def test_available(monkeypatch, installed, nvcc, reason) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: "nvcc" if nvcc else None)
    found = BACKEND.available(CUDA)
    assert found == reason or found.startswith(reason)
    assert BACKEND.available(torch.device("cpu")) == "runs on cuda, not cpu"


@pytest.mark.parametrize("changes, reason", [
    (dict(chunk=64), "no chunk"), (dict(causal=False), "no non-causal attention"),
    (dict(head_dim_v=64), "head dims 128/64 (has 64, 128 and 256, the same for values)"),
    (dict(head_dim=80, head_dim_v=80), "head dims 80/80 (has 64, 128 and 256, the same for values)"),
    (dict(dtype=torch.float32), "dtype float32 (has bfloat16, float16)"),
    *((changes, None) for changes in (dict(), dict(window=128, softcap=30.0, sinks=True), dict(num_kv_heads=8),
                                      dict(num_kv_heads=1), dict(head_dim=256, head_dim_v=256, dtype=torch.float16))),
])
def test_what_it_refuses(changes, reason) -> None:
    for layout in ("NHD", "HND"):
        found = BACKEND.capabilities.reasons_against(site(**changes), device=CUDA, page_size=1, layout=layout)
        assert found == ([] if reason is None else [reason])


# Host-side arithmetic.


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
def test_page_table_covers_exactly_the_keys_that_queries_see(page_size, window) -> None:
    seq_lens = np.array([1, page_size - 1, page_size, page_size + 1, 0, 50, 50, 50, 0], dtype=np.int32)
    query_lens = np.array([1, max(page_size - 1, 0), 1, 2, 0, 1, 50, 7, 0], dtype=np.int32)
    indptr, last, first = page_table(seq_lens, query_lens, page_size, window)
    assert indptr[0] == 0 and indptr.dtype == np.int32
    for row, (seq, query) in enumerate(zip(seq_lens.tolist(), query_lens.tolist(), strict=True)):
        pages = range(first[row], first[row] + indptr[row + 1] - indptr[row])
        assert len(pages) >= 1
        end = (pages[-1]) * page_size + last[row]
        assert end == seq, "the last key is the sequence's last token"
        lowest = 0 if window is None else max(0, seq - max(query, 1) - window + 1)
        assert pages[0] * page_size <= lowest or seq == 0, "the first query's window is covered"
        if seq:
            assert lowest < (pages[0] + 1) * page_size, "no page is read in vain"
            assert 1 <= last[row] <= page_size


@pytest.mark.parametrize("query_lens", [[], [1], [1, 1, 1], [1, 1, 0, 0], [0, 1], [2, 1], [1, 2, 1], [1, 0, 1]])
def test_leading_ones(query_lens) -> None:
    expected = 0
    while expected < len(query_lens) and query_lens[expected] == 1:
        expected += 1
    assert long_prefill.leading_ones(np.array(query_lens, dtype=np.int32)) == expected


def test_workspace_bytes() -> None:
    """Against FlashInfer's planner: tmp_v is (heads, tiles, queries a tile, dim) float32 and tmp_s has no dim."""
    llama = Group(32, 8, 128, torch.bfloat16, 0.1, None, None)
    assert llama.workspace_bytes(1, 132) >= 32 * 33 * 128 * 129 * 4  # prefill: 264 // 8 tiles of 128
    tiles = math.ceil(512 * 4 / 16) + 512 - 1  # decode in a graph of 512 rows
    assert tiles * 32 * 16 * 129 * 4 <= llama.workspace_bytes(512, 132) < 1.01 * tiles * 32 * 16 * 129 * 4
    multi_query = Group(24, 1, 64, torch.bfloat16, 0.1, None, None)  # 24 packed queries: tiles of 64
    assert multi_query.workspace_bytes(1, 132) >= 24 * 264 * 128 * 65 * 4


# How it drives the library.

BATCHES = {
    "decode": ([1, 1, 1, 1], [1, 17, 40, 16]), "prefill": ([5, 33, 16], [5, 33, 40]),
    "mixed": ([1, 1, 7, 1, 20], [9, 33, 7, 50, 37]), "prefill first": ([7, 1, 1], [20, 5, 18]),
    "with idle rows": ([1, 0, 3, 0], [5, 12, 3, 40]),
}


@pytest.mark.parametrize("only, dtype", [
    ("batch", torch.float32), ("fixed scale", torch.float16), ("fixed scale", torch.bfloat16),
    pytest.param("", torch.float16, marks=pytest.mark.slow)], ids=str)
def test_the_kit_passes_on_the_stand_ins(on_cpu, only, dtype) -> None:
    """With fixed scales too: keys and values by numbers of their own, NaN for what does not fit, in either dtype."""
    capabilities = dataclasses.replace(
        BACKEND.capabilities, devices=frozenset({"cpu"}), dtypes=frozenset({dtype}),
        head_dims=lambda d, dv: d == dv == 16, page_sizes=lambda size: size in (1, 4, 32))
    backend = dataclasses.replace(on_cpu, capabilities=capabilities, available=lambda device: None)
    pass_kit(backend, only)  # but opcheck: the op here is a plain function


@pytest.mark.parametrize("batch", BATCHES)
def test_batches(on_cpu, batch) -> None:
    """Pages of no power of two, and a wide block table."""
    check_case(on_cpu, make_case(*BATCHES[batch], num_heads=4, num_kv_heads=2, head_dim=16, page_size=3, layout="HND",
                                 softcap=2.0, window=17, scale=0.7, table_width=60))


def state_for(case, *more: AttentionSite, rows: int = 8) -> FlashInferState:
    return BACKEND.make_state([case.site, *more], case.cache, StepLimits(rows, 64, 16))


def planned_step(case, *more: AttentionSite, rows: int = 8) -> tuple[FlashInferState, Step]:
    state = state_for(case, *more, rows=rows)
    step = Step(case.cache, case.metadata, states={"flashinfer": state})
    BACKEND.plan(case.metadata, step)
    return state, step


def test_decode_rows_at_the_head_go_to_the_decode_kernel(on_cpu) -> None:
    case = make_case(*BATCHES["mixed"], num_heads=8, num_kv_heads=2, head_dim=16, page_size=16)
    state, step = planned_step(case)
    (segments,) = state.plans.held[0].segments.values()
    assert [(type(w), begin, end) for w, begin, end in segments] == [(Decode, 0, 2), (Prefill, 2, 30)]
    assert segments[0][0].tensor_cores and segments[1][0].backend == "fa3"
    with running(step):
        check_output(flashinfer.paged_attention(*case.arguments(), **case.options), case)


@pytest.mark.parametrize("heads, kv_heads, tensor_cores", [(8, 8, False), (6, 2, False), (8, 2, True), (7, 1, True)])
def test_tensor_cores_from_four_query_heads_a_key_head(on_cpu, heads, kv_heads, tensor_cores) -> None:
    state, _ = planned_step(make_case([1], [5], num_heads=heads, num_kv_heads=kv_heads, head_dim=16, page_size=16))
    assert [w.tensor_cores for w in state.wrappers.values()] == [tensor_cores]


def test_layers_share_plans_and_groups_are_met_late(on_cpu) -> None:
    """Gemma-like: windowed and full layers. Only the first layer's site is known when the state is made."""
    local = make_case([1, 6], [40, 30], window=8, **SMALL)
    full = make_case([1, 6], [40, 30], **SMALL)  # same seed: same queries, keys and pages
    assert torch.equal(local.cache.k[0], full.cache.k[0])
    state, step = planned_step(local)
    with running(step):
        for case in (local, full, local, full):
            check_output(flashinfer.paged_attention(*case.arguments(), **case.options), case)
    assert len(state.groups) == 2 and len(state.plans.held[0].tables) == 2
    assert [w.plans for w in state.wrappers.values()] == [1, 1, 1, 1]
    assert len({w.workspace.data_ptr() for w in state.wrappers.values() if isinstance(w, Decode)}) == 1
    windowed, whole = (state.plans.held[0].tables[window].host[0, 1] for window in (8, None))
    assert windowed == 2 and whole == 10, "pages before the window are left out"
    BACKEND.plan(local.metadata, step)
    assert [w.plans for w in state.wrappers.values()] == [2, 2, 2, 2], "a group met late is planned with the others"


def test_layers_with_a_window_on_pages_of_their_own(on_cpu) -> None:
    """A user of gemma-like models: pages behind the window are freed, so windowed layers have another block table."""
    local, full = make_case([1, 6], [40, 30], window=8, seed=1, **SMALL), make_case([1, 6], [40, 30], **SMALL)
    assert not torch.equal(local.metadata.block_table_tensor, full.metadata.block_table_tensor)
    state = state_for(full, local.site)
    step = Step(full.cache, full.metadata, states={"flashinfer": state}, window_metadata=local.metadata)
    BACKEND.plan(full.metadata, step)
    with running(step):
        for case in (local, full):
            check_output(flashinfer.paged_attention(*case.arguments(), **case.options), case)


def test_groups_of_one_window_share_its_page_table(on_cpu, monkeypatch) -> None:
    fills = []
    fill = state_module.PageTable.fill
    monkeypatch.setattr(state_module.PageTable, "fill", lambda self, *args: (fills.append(args[-1]), fill(self, *args)))
    case = make_case([1, 6], [40, 30], **SMALL, window=8)
    state = state_for(case, dataclasses.replace(case.site, softcap=3.0), dataclasses.replace(case.site, window=None))
    step = Step(case.cache, case.metadata, states={"flashinfer": state})
    for _ in range(2):
        BACKEND.plan(case.metadata, step)
        assert len(state.plans.held[0].segments) == 3 and fills == [8, None]
        fills.clear()


def test_fa2_serves_where_fa3_fails_and_says_so_once(on_cpu, monkeypatch, caplog) -> None:
    monkeypatch.setattr(Prefill, "broken", ("fa3",))
    case = make_case([5], [5], **SMALL)
    state = state_for(case)
    step = Step(case.cache, case.metadata, states={"flashinfer": state})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            BACKEND.plan(case.metadata, step)
    assert [w.backend for w in state.wrappers.values()] == ["fa2"]
    assert len(caplog.records) == 1 and "RuntimeError: no such kernel" in caplog.text
    monkeypatch.setattr(Prefill, "broken", ("fa3", "fa2"))
    with pytest.raises(RuntimeError, match="no such kernel"):
        BACKEND.plan(case.metadata, step)


# CUDA graphs: the "graph" is the wrapper's run, called again on the same tensors.


def decode_metadata(seq_lens, table, page_size, *, rows, device="cpu") -> CommonAttentionMetadata:
    built = CommonAttentionMetadata.build([1] * len(seq_lens), seq_lens, table, page_size=page_size, device=device)
    wide = torch.zeros(len(seq_lens), 16, dtype=torch.int32, device=device)
    wide[:, : built.block_table_tensor.shape[1]] = built.block_table_tensor
    return dataclasses.replace(built, block_table_tensor=wide).padded(rows, rows)


@pytest.mark.parametrize("window", [None, 5])
def test_replay_reads_the_new_plan_from_the_same_buffers(on_cpu, window) -> None:
    page_size, rows, limits = 4, 4, StepLimits(8, 8, 16)
    facts = dict(num_heads=4, num_kv_heads=2, head_dim=16, head_dim_v=16, dtype=torch.float32, scale=0.25)
    cache = PagedKVCache(num_layers=1, num_pages=40, page_size=page_size, num_kv_heads=2, head_dim=16,
                         dtype=torch.float32, device="cpu")
    cache.k[0].normal_()
    cache.v[0].normal_()
    state = BACKEND.make_state([site(window=window, **facts)], cache, limits)
    q = torch.randn(rows, 4, 16)
    out = torch.full_like(q, math.nan)
    options = dict(scale=0.25, window=window, softcap=None, chunk=None)

    first = decode_metadata([1, 1, 1, 1], [[1], [2], [3], [4]], page_size, rows=rows)
    step = Step(cache, first, states={"flashinfer": state}, graph_key=("decode", 4), capturing=True)
    BACKEND.plan(first, step)
    (group,) = state.groups
    wrapper = state.wrappers[group, ("decode", 4), 0]
    assert wrapper.graph and wrapper.int_workspace is state.plans.held[0].workspaces[group]
    with running(step):
        captured = flashinfer.paged_attention(
            q, None, None, *cache.of_layer(0), first.slot_mapping, first.block_table_tensor, first.query_start_loc,
            first.seq_lens, None, [], **options)
    assert torch.isfinite(captured).all()
    addresses = [t.data_ptr() for t in (wrapper.indptr, wrapper.indices, wrapper.last_page_len)]

    long, short = [list(range(1, 11)), list(range(11, 26))], [[9], [1, 2, 3, 4], [7, 8]]
    for lengths, table in (([37, 60], long), ([2, 16, 5], short)):
        metadata = decode_metadata(lengths, table, page_size, rows=rows)
        step = Step(cache, metadata, states={"flashinfer": state}, graph_key=("decode", 4))
        BACKEND.plan(metadata, step)
        q.normal_()
        q[len(lengths):] = math.nan
        wrapper.run(q, (cache.k[0], cache.v[0]), out=out)
        for row, (length, pages) in enumerate(zip(lengths, table, strict=True)):
            keys, values = (c[torch.tensor(pages)].flatten(0, 1)[:length] for c in (cache.k[0], cache.v[0]))
            expected = oracle_attention(q[row : row + 1], keys, values, scale=0.25, window=window)
            torch.testing.assert_close(out[row : row + 1].double(), expected, rtol=1e-5, atol=1e-5)
        assert not out[len(lengths):].any(), "padding rows come out as zeros, whatever their queries are"
    assert addresses == [t.data_ptr() for t in (wrapper.indptr, wrapper.indices, wrapper.last_page_len)]
    assert wrapper.plans == 3 and wrapper.fast_plans == 2
    assert state.wrappers == {(group, ("decode", 4), 0): wrapper}


def test_graph_errors(on_cpu, monkeypatch) -> None:
    case = make_case([1, 1, 1], [9, 3, 4], **SMALL)
    state = state_for(case)

    def plan(metadata, key, capturing=False) -> None:
        states = {"flashinfer": state}
        BACKEND.plan(metadata, Step(case.cache, metadata, states=states, graph_key=key, capturing=capturing))

    with pytest.raises(RuntimeError, match="graph 'a' was not captured with a plan of flashinfer; these were: none"):
        plan(case.metadata, "a")
    plan(case.metadata, "a", capturing=True)
    plan(case.metadata, "a")
    with pytest.raises(RuntimeError, match="was captured for 3 sequences, padding included; the batch has 4"):
        plan(case.metadata.padded(4, 4), "a")
    with pytest.raises(RuntimeError, match="'b' was not captured with a plan of flashinfer; these were: 'a'"):
        plan(case.metadata, "b")
    mixed = make_case([1, 2], [9, 3], **SMALL).metadata
    with pytest.raises(RuntimeError, match="for one token per sequence; graph 'a' has 3 tokens of 2 sequences"):
        plan(mixed, "a")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    _, step = planned_step(case)
    with running(step), pytest.raises(RuntimeError, match="a CUDA graph is being captured, but none was planned for"):
        flashinfer.paged_attention(*case.arguments(), **case.options)


# Errors.


def test_op_errors(on_cpu) -> None:
    case = make_case([1, 1], [9, 3], **SMALL)
    arguments, options = case.arguments(), case.options
    with pytest.raises(RuntimeError, match="needs a paged step that was planned"):
        flashinfer.paged_attention(*arguments, **options)
    step = Step(case.cache, case.metadata)
    with pytest.raises(RuntimeError, match="no state; set step.states"):
        BACKEND.plan(case.metadata, step)
    step.states["flashinfer"] = state = state_for(case)
    with running(step), pytest.raises(RuntimeError, match="needs a paged step that was planned"):
        flashinfer.paged_attention(*arguments, **options)
    BACKEND.plan(case.metadata, step)
    other = Step(case.cache, case.metadata, states={"flashinfer": state})
    with running(other), pytest.raises(RuntimeError, match="needs a paged step that was planned"):
        flashinfer.paged_attention(*arguments, **options)
    with running(step):
        with pytest.raises(RuntimeError, match="planned for 2 tokens, q has 1"):
            flashinfer.paged_attention(arguments[0][:1], *arguments[1:], **options)
        with pytest.raises(UnsupportedAttention, match="no chunked attention"):
            flashinfer.paged_attention(*arguments, **(options | {"chunk": 8}))
        with pytest.raises(UnsupportedAttention, match="one scale for a whole cache.*or kv_scales=, one fixed scale per layer"):
            flashinfer.paged_attention(*arguments[:5], torch.ones(1), torch.ones(1), *arguments[7:], **options)
    mine, other = (make_case([1, 1], [9, 3], **SMALL, kv_dtype=torch.float8_e5m2, kv_scales=scale) for scale in (0.06, 0.5))
    with running(planned_step(mine)[1]), pytest.raises(RuntimeError, match="for another KV cache than the one with these"):
        flashinfer.paged_attention(*mine.arguments(), **mine.options)
        flashinfer.paged_attention(*other.arguments(), **other.options)  # the number would be that of other keys


def test_batches_larger_than_the_limits_leave_no_plan(on_cpu) -> None:
    case = make_case([1, 1], [9, 3], **SMALL)
    for limits in (StepLimits(1, 64, 16), StepLimits(2, 64, 1)):
        step = Step(case.cache, case.metadata)
        step.states["flashinfer"] = BACKEND.make_state([case.site], case.cache, limits)
        with pytest.raises(ValueError, match="2 sequences on 4 pages, at most 3 each, exceeds the StepLimits"):
            BACKEND.plan(case.metadata, step)
    narrow = dataclasses.replace(case.metadata, block_table_tensor=case.metadata.block_table_tensor[:, :2])
    step = Step(case.cache, narrow, states={"flashinfer": state_for(case)})
    with pytest.raises(ValueError, match="block_table, which has 2 columns"):
        BACKEND.plan(narrow, step)
    case = make_case([1, 1], [9, 3], **SMALL)
    state, step = planned_step(case, rows=2)
    large = make_case([1, 1, 1], [9, 3, 1], **SMALL).metadata
    with pytest.raises(ValueError, match="StepLimits"):
        BACKEND.plan(large, step)
    with running(step), pytest.raises(RuntimeError, match="needs a paged step that was planned"):
        flashinfer.paged_attention(*case.arguments(), **case.options)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_the_stand_ins_have_the_signatures_of_the_library() -> None:
    import flashinfer as library

    for ours, theirs in ((Decode.__init__, library.BatchDecodeWithPagedKVCacheWrapper.__init__),
                         (Decode.plan, library.BatchDecodeWithPagedKVCacheWrapper._plan_impl),
                         (Decode.run, library.BatchDecodeWithPagedKVCacheWrapper.run),
                         (Prefill.plan, library.BatchPrefillWithPagedKVCacheWrapper.plan),
                         (Prefill.__init__, library.BatchPrefillWithPagedKVCacheWrapper.__init__),
                         (Prefill.run, library.BatchPrefillWithPagedKVCacheWrapper.run),
                         (Ragged.__init__, library.BatchPrefillWithRaggedKVCacheWrapper.__init__),
                         (Ragged.plan, library.BatchPrefillWithRaggedKVCacheWrapper.plan),
                         (Ragged.run, library.BatchPrefillWithRaggedKVCacheWrapper.run),
                         (fast_decode_plan, library.fast_decode_plan)):
        assert set(inspect.signature(ours).parameters) <= set(inspect.signature(theirs).parameters)


# Prompts beside another backend.

FASTER = PrefillRule(PrefillTime(0, 0, 0), PrefillTime(1e6, 0, 0))


def beside(on_cpu, name: str):
    able = dataclasses.replace(on_cpu.capabilities, devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32}),
                               head_dims=lambda d, dv: True)
    prompts = dataclasses.replace(on_cpu, capabilities=able, prefill=dataclasses.replace(
        on_cpu.prefill, ready=lambda *args: None))
    return long_prefill.make(name, prompts, torch_native.BACKEND, rule=lambda *args, **where: FASTER)


@pytest.mark.parametrize("batch", BATCHES)
def test_prompts_beside_another_backend(on_cpu, monkeypatch, batch) -> None:
    """Decodes at the head of a batch are the other's: FlashInfer's decode kernels are not even compiled for them."""
    monkeypatch.setattr(sys.modules["flashinfer"], "BatchDecodeWithPagedKVCacheWrapper", None)
    case = make_case(*BATCHES[batch], **SMALL, window=17, sinks=True)
    check_case(beside(on_cpu, f"flashinfer_long_{batch}"), case)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_prompts_of_a_quantized_cache(on_cpu, monkeypatch, kv_dtype) -> None:
    """By copies of the keys as they read back, in several parts where all would take too much memory; the decodes of the step
    are the other's."""
    ran = []

    class Copied(Ragged):
        def run(self, q, *args, **options):
            ran.append(len(q))
            super().run(q, *args, **options)

    monkeypatch.setattr(sys.modules["flashinfer"], "BatchPrefillWithRaggedKVCacheWrapper", Copied, raising=False)
    monkeypatch.setattr(contiguous.host, "MAX_GATHERED", 4 * 2 * 16 * 200)  # each takes a whole tile
    backend = beside(on_cpu, f"flashinfer_copies_{kv_dtype}".replace(".", "_"))
    for layout in ("NHD", "HND"):
        case = lay_out(site(num_heads=4, head_dim=16, head_dim_v=16, dtype=torch.float32, scale=0.25, softcap=20.0),
                       [1, 1, 9, 0, 5], [9, 30, 40, 7, 31], page_size=4, kv_dtype=kv_dtype, layout=layout, pad=(3, 2))
        check(backend, case)
        assert ran == [9, 5]
        ran.clear()
    windowed = lay_out(site(num_heads=4, head_dim=16, head_dim_v=16, dtype=torch.float32, window=7), [9], [40], page_size=4,
                       kv_dtype=kv_dtype)
    check(backend, windowed)  # pages behind a window hold other sequences' keys: the other backend reads them
    whole = dataclasses.replace(BACKEND, op=flashinfer.paged_attention)
    with pytest.raises(UnsupportedAttention, match="NAME@long"), planned(whole, case):
        whole.op(*case.arguments(), **case.options)
    assert not ran


def test_nothing_is_compiled_in_a_step(on_cpu, monkeypatch) -> None:
    """A kernel that fails is not replaced by another one, which FlashInfer would compile for a minute while requests wait: the
    start finds out, and the other backend serves all."""
    monkeypatch.setattr(Prefill, "broken", ("fa3",))
    case = make_case([5], [5], **SMALL)
    backend = beside(on_cpu, "flashinfer_long_broken")
    assert "no such kernel" in backend.warm_up([case.site], torch.device("cpu"), 1.0)
    check_case(backend, case)
