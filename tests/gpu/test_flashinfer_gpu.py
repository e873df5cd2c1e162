"""Backend ``flashinfer`` on a GPU: sizes, kernels and CUDA graphs that the conformance kit does not run.

FlashInfer compiles kernels per (dtype, head dim, windowed or not, capped or not), two minutes for each the first time on a
machine. So the tests share two, PLAIN and LOCAL; those marked slow have some of the others.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from quire.attn_ops.backends.flashinfer import BACKEND, routes
from quire.attn_ops.backends.flashinfer.routes import Way
from quire.attn_ops.step import Step, StepLimits, running
from tests.attn_ops.cases import Case, check_case, check_output, make_case, run_case

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")

SHAPE = dict(head_dim=128, page_size=16, dtype=torch.bfloat16, device="cuda")
PLAIN, LOCAL = {}, dict(window=300, softcap=30.0)
FEATURES = pytest.mark.parametrize("features", [PLAIN, LOCAL], ids=["plain", "local"])
HEADS = pytest.mark.parametrize("heads", [(32, 32), (16, 8), (32, 8), (32, 4)], ids=str)  # groups of 1, 2, 4, 8
LAYOUT = pytest.mark.parametrize("layout", ["NHD", "HND"])


def case_of(query_lens, seq_lens, heads=(32, 8), **options) -> Case:
    case = make_case(query_lens, seq_lens, num_heads=heads[0], num_kv_heads=heads[1], **(SHAPE | options))
    if case.options["softcap"] is not None:
        # The kernels' tanh is off by up to 2**-11 of its value (tanh.approx), and the logits of these cases reach 4.
        case.bound *= 1 + 4 * 2**-11 / torch.finfo(case.q.dtype).eps
    return case


def with_fa2(sites, cache, limits):
    """The state, as on a GPU that is no Hopper."""
    state = BACKEND.make_state(sites, cache, limits)
    state.gpu = SimpleNamespace(major=8, multi_processor_count=state.gpu.multi_processor_count)
    return state


FA2 = dataclasses.replace(BACKEND, make_state=with_fa2)
PREFILL = pytest.mark.parametrize("backend", [BACKEND, FA2], ids=["hopper_if_it_is", "fa2"])

LENS = [1, 15, 16, 17, 32, 63, 64, 65, 127, 500, 1023, 1024, 1025, 2049, 4000, 6007]


@FEATURES
@HEADS
@LAYOUT
def test_decode(features, heads, layout) -> None:
    check_case(BACKEND, case_of([1] * 16, LENS, heads, layout=layout, **features))
    check_case(BACKEND, case_of([1], [9001], heads, layout=layout, **features))
    check_case(BACKEND, case_of([1] * 150, [1 + 7 * i for i in range(150)], heads, layout=layout, pad_tokens=6,
                                pad_reqs=6, poison=float("nan"), **features))


@FEATURES
@HEADS
@LAYOUT
@PREFILL
def test_prefill_and_mixed(features, heads, layout, backend) -> None:
    options = dict(layout=layout, **features)
    check_case(backend, case_of([1500], [1500], heads, **options))
    check_case(backend, case_of([64, 3], [5000, 2000], heads, **options))
    check_case(backend, case_of([1, 1, 1, 300, 1, 64, 2, 129], [4000, 33, 700, 900, 1, 64, 2000, 1129], heads,
                                pad_tokens=14, pad_reqs=3, poison=float("nan"), **options))
    check_case(backend, case_of([300, 1, 0, 1], [900, 4000, 70, 33], heads, **options, strided=True))


# Where prompts' keys are read, whatever takes the least time.

WAYS = pytest.mark.parametrize("way", Way, ids=lambda way: way.value)
#: Prompts without a prefix, whole tiles among them; with one, of one token and of whole pages too; behind decodes, with single
#: tokens and idle rows; long ones.
PROMPTS = [
    ([1500], [1500]), ([256, 1024, 77], [256, 1024, 77]), ([64, 3, 128], [65, 2000, 1024]),
    ([1, 1, 300, 0, 64, 1, 129], [4000, 33, 900, 70, 64, 2000, 1129]), ([2048], [6144]), ([512, 1], [8704, 1])]


def forced(monkeypatch, way: Way) -> None:
    monkeypatch.setattr(routes, "MOST_RUNS", 8)
    monkeypatch.setattr(routes, "seen_right", lambda *of_layer: True)
    monkeypatch.setattr(routes, "choose", lambda *sizes, **possible: way)


@WAYS
@LAYOUT
@PREFILL
@pytest.mark.parametrize("features", [
    PLAIN, dict(sinks=True), pytest.param(dict(softcap=20.0, sinks=True), marks=pytest.mark.slow),
    pytest.param(dict(dtype=torch.float16), marks=pytest.mark.slow), pytest.param(dict(head_dim=64), marks=pytest.mark.slow),
    pytest.param(dict(head_dim=64, dtype=torch.float16), marks=pytest.mark.slow),
    pytest.param(dict(head_dim=256, softcap=30.0), marks=pytest.mark.slow)], ids=str)
def test_each_way(monkeypatch, way, layout, backend, features) -> None:
    forced(monkeypatch, way)
    for heads in ((32, 8), (16, 8), (8, 1)):
        for batch in PROMPTS:
            check_case(backend, case_of(*batch, heads, layout=layout, poison=float("nan"), pad_tokens=9, pad_reqs=2,
                                        **features))
    check_case(backend, case_of(*PROMPTS[3], layout=layout, strided=True, **features))


@WAYS
@PREFILL
def test_a_neighbours_nan_stays_where_it_is(monkeypatch, way, backend) -> None:
    """Kernels for Hopper GPUs multiply what lies behind a sequence by 0, which is no help against a NaN."""
    forced(monkeypatch, way)
    for batch in (([77, 40, 130], [77, 40, 130]), ([77, 40, 130], [177, 340, 131])):
        case = case_of(*batch)
        case.v[77] = case.k[78] = float("nan")  # of the second sequence
        out = run_case(backend, case)
        assert out[79:117].isnan().all()
        for own in (slice(0, 77), slice(117, 247)):
            assert ((out[own].double() - case.expected[own]).abs() <= case.bound[own]).all()


@WAYS
def test_no_way_waits_for_the_gpu(monkeypatch, way) -> None:
    forced(monkeypatch, way)
    for batch in PROMPTS[1], PROMPTS[3]:
        case = case_of(*batch, sinks=True)
        check_case(BACKEND, case)  # compiles the kernels
        state = BACKEND.make_state([case.site], case.cache, StepLimits(8, 2048, 512))
        step = Step(case.cache, case.metadata, states={"flashinfer": state})
        BACKEND.plan(case.metadata, step)
        with running(step):
            torch.cuda.set_sync_debug_mode("error")
            try:
                out = BACKEND.op(*case.arguments(), **case.options)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        check_output(out, case)


def test_steps_of_each_way_queued_behind_a_busy_gpu(monkeypatch) -> None:
    """The wrappers of one way and the next one's share a workspace, and each way's plans go through pinned memory."""
    cases = [(way, case_of(*batch, seed=n)) for n, batch in enumerate(PROMPTS[:4]) for way in Way]
    state = BACKEND.make_state([cases[0][1].site], cases[0][1].cache, StepLimits(16, 4096, 1024))
    for repeat in range(2):
        outs = []
        torch.cuda.synchronize()
        if repeat:  # the kernels are compiled
            torch.cuda._sleep(400_000_000)  # about 0.2 s
        for way, case in cases:
            forced(monkeypatch, way)
            step = Step(case.cache, case.metadata, states={"flashinfer": state})
            BACKEND.plan(case.metadata, step)
            with running(step):
                outs.append(BACKEND.op(*case.arguments(), **case.options))
        for out, (_, case) in zip(outs, cases, strict=True):
            check_output(out, case)


def test_hopper_has_its_own_prefill() -> None:
    case = case_of([5], [9])
    state = BACKEND.make_state([case.site], case.cache, StepLimits(8, 64, 64))
    BACKEND.plan(case.metadata, Step(case.cache, case.metadata, states={"flashinfer": state}))
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert [w._backend for w in state.wrappers.values()] == ["fa3" if hopper else "fa2"]


@FEATURES
def test_pages_of_no_power_of_two(features) -> None:
    for heads in ((32, 8), (32, 32)):
        options = dict(page_size=3, **features)
        check_case(BACKEND, case_of([1] * 5, [1, 255, 257, 311, 3000], heads, layout="HND", **options))
        check_case(BACKEND, case_of([1, 300], [700, 900], heads, **options))


def test_cache_of_more_than_2_31_elements() -> None:
    for query_lens in ([1, 1, 1], [1, 500, 64]):
        case = case_of(query_lens, [3000, 5000, 4000], num_pages=150_000, poison=0.0)  # 4.9 GB of keys
        assert int(case.metadata.block_table_tensor.max()) * case.cache.k[0].stride(0) > 2**31
        check_case(BACKEND, case)


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    dict(head_dim=64, dtype=torch.float16), dict(head_dim=256, **LOCAL), dict(window=1), dict(softcap=20.0),
    dict(dtype=torch.float16, window=1000, softcap=20.0)], ids=str)
def test_other_kernels(options) -> None:
    for heads in ((8, 8), (16, 4)):
        check_case(BACKEND, case_of([1] * 4, [1, 129, 1500, 4000], heads, **options))
        check_case(BACKEND, case_of([1, 400, 130], [3000, 1700, 130], heads, **options))


def test_windowed_and_full_layers_in_one_step() -> None:
    """As in Gemma. Only the first layer's site is known at first; the other group is planned when the op meets it."""
    batch = [1, 1, 200, 40], [4000, 20, 900, 40]
    local, full = case_of(*batch, **LOCAL), case_of(*batch, **PLAIN)  # same seed: same queries, keys and pages
    for sites in ([local.site], [local.site, full.site]):
        state = BACKEND.make_state(sites, local.cache, StepLimits(8, 512, 512))
        step = Step(local.cache, local.metadata, states={"flashinfer": state})
        BACKEND.plan(local.metadata, step)
        with running(step):
            for case in (local, full, full, local):
                check_output(BACKEND.op(*case.arguments(), **case.options), case)
        assert len(state.wrappers) == 4


def test_eager_steps_queued_behind_a_busy_gpu() -> None:
    """Plans go through pinned memory that is used again: a step must not overwrite what the last has yet to send."""
    cases = [case_of([1] * n + [20], [100 + 311 * n] * n + [90], seed=n) for n in (3, 1, 8, 2, 5)]
    for case in cases:
        run_case(BACKEND, case)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # about 0.2 s
    outs = [run_case(BACKEND, case) for case in cases]
    for out, case in zip(outs, cases, strict=True):
        check_output(out, case)


# CUDA graphs: one capture at length 1, any lengths later.

ROWS, WIDTH = 8, 512
LONG = [8192, 1, 17, 500, 4096, 16, 3000, 1025]
BATCHES = [LONG, [20, 8000, 1], [5] * 8, [8192], LONG]


class Captured:
    """A decode graph with its buffers and the state that plans for it."""

    def __init__(self, heads, layout="NHD", **features) -> None:
        self.heads, self.features = heads, features | dict(layout=layout)
        self.static = self.batch([1] * ROWS, seed=0)
        m = self.static.metadata
        self.buffers = self.static.buffers()
        self.states = {"flashinfer": BACKEND.make_state(
            [self.static.site], self.static.cache, StepLimits(2 * ROWS, 2 * ROWS, WIDTH))}
        step = Step(self.static.cache, m, states=self.states, graph_key=("decode", ROWS), capturing=True)
        BACKEND.plan(m, step)
        self.graph = torch.cuda.CUDAGraph()
        with running(step):
            check_output(BACKEND.op(*self.static.arguments(), **self.static.options), self.static)
            with torch.cuda.graph(self.graph):
                self.out = BACKEND.op(*self.static.arguments(), **self.static.options)

    def batch(self, seq_lens, seed) -> Case:
        pad = ROWS - len(seq_lens)
        return case_of([1] * len(seq_lens), seq_lens, self.heads, seed=seed, num_pages=3000, table_width=WIDTH,
                       pad_tokens=pad, pad_reqs=pad, poison=float("nan"), **self.features)

    def copy_in(self, case: Case) -> None:
        for buffer, new in zip(self.buffers, case.buffers(), strict=True):
            buffer.copy_(new, non_blocking=True)

    def replay(self, case: Case) -> None:
        step = Step(self.static.cache, case.metadata, states=self.states, graph_key=("decode", ROWS))
        BACKEND.plan(case.metadata, step)
        self.graph.replay()

    def check_replay(self, case: Case) -> None:
        """Replay with the batch of ``case``, without waiting for the GPU and without allocating; its output is right."""
        self.copy_in(case)
        torch.cuda.synchronize()
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.replay(case)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations, "a replay must not allocate"
        check_output(self.out, case)


@FEATURES
@pytest.mark.parametrize("heads", [(32, 32), (32, 8)], ids=str)
@LAYOUT
def test_graph_captured_at_length_1_and_replayed_at_any(features, heads, layout) -> None:
    """Padding rows have NaN queries, and slots that no sequence owns hold NaN; both must stay where they are."""
    captured = Captured(heads, layout, **features)
    previous = None
    for seed, seq_lens in enumerate(BATCHES, 1):
        case = captured.batch(seq_lens, seed)
        captured.check_replay(case)
        assert previous is None or not torch.equal(captured.out, previous), "the replay changed nothing"
        previous = captured.out.clone()
        live = case.metadata.slot_mapping >= 0
        slots = case.metadata.slot_mapping[live]
        static = captured.static.cache
        mine = case.cache
        for cache, filled, new in ((static.k[0], mine.k[0], case.new_k), (static.v[0], mine.v[0], case.new_v)):
            filled[slots // 16, slots % 16] = new[live]
            assert torch.equal(cache.view(torch.int16), filled.view(torch.int16)), "the cache holds something else"


def test_replays_queued_behind_a_busy_gpu() -> None:
    captured = Captured((32, 8))
    cases = [captured.batch(seq_lens, seed) for seed, seq_lens in enumerate(BATCHES, 1)]
    outs = []
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # about 0.2 s
    for case in cases:
        captured.copy_in(case)
        captured.replay(case)
        outs.append(captured.out.clone())
    for out, case in zip(outs, cases, strict=True):
        check_output(out, case)


def test_a_graph_for_each_bucket_and_eager_steps_between() -> None:
    small, shape = {}, dict(num_pages=3000, table_width=WIDTH)
    static = case_of([1] * 4, [700, 3000, 1, 90], **shape)
    state = BACKEND.make_state([static.site], static.cache, StepLimits(8, 256, WIDTH))
    states = {"flashinfer": state}
    for rows in (4, 2, 1):
        part = case_of([1] * rows, [1] * rows, **shape)
        step = Step(part.cache, part.metadata, states=states, graph_key=rows, capturing=True)
        BACKEND.plan(part.metadata, step)
        graph = torch.cuda.CUDAGraph()
        with running(step):
            BACKEND.op(*part.arguments(), **part.options)
            with torch.cuda.graph(graph):
                out = BACKEND.op(*part.arguments(), **part.options)
        small[rows] = part, graph, out
    for seed, rows in enumerate((1, 4, 2, 4, 1)):
        eager = case_of([1, 1, 30], [900, 30, 50], seed=seed, **shape)
        step = Step(eager.cache, eager.metadata, states=states)
        BACKEND.plan(eager.metadata, step)
        with running(step):
            check_output(BACKEND.op(*eager.arguments(), **eager.options), eager)
        part, graph, out = small[rows]
        case = case_of([1] * rows, [50 + 900 * r for r in range(rows)], seed=seed, **shape)
        for buffer, new in zip(part.buffers(), case.buffers(), strict=True):
            buffer.copy_(new)
        BACKEND.plan(case.metadata, Step(part.cache, case.metadata, states=states, graph_key=rows))
        graph.replay()
        check_output(out, case)


def test_capture_without_a_plan_for_it() -> None:
    case = case_of([1, 1], [40, 50])
    step = Step(case.cache, case.metadata)
    step.states["flashinfer"] = BACKEND.make_state([case.site], case.cache, StepLimits(8, 64, 64))
    BACKEND.plan(case.metadata, step)
    with running(step), pytest.raises(RuntimeError, match="a CUDA graph is being captured, but none was planned for"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            BACKEND.op(*case.arguments(), **case.options)
