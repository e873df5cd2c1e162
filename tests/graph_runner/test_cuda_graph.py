"""The graph runner on a CPU, where a captured bucket is a callable: bucket choice, fallback, padding, capture order."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from dataclasses import replace

import pytest
import torch

from quire.graph_runner import cuda_graph
from quire.graph_runner.cuda_graph import CudaGraphRunner
from quire.graph_runner.device_graph import CpuGraphs, GraphPool, Recorded, register_device_graphs
from quire.graph_runner.engine import Engine
from quire.graph_runner.forward_mode import CaptureHiddenMode
from quire.graph_runner.stats import GraphStats
from quire.graph_runner.step_buffers import BatchShape, EncoderShape
from quire.graph_runner.window_pages import MemoryPlan
from tests.tiny import GREEDY, check_padded_bucket, decode_batch, hf_greedy, load_model, run_batch, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
CPU = torch.device("cpu")


def shapes(*sizes: tuple[int, int] | int) -> list[BatchShape]:
    return [BatchShape(s, s) if isinstance(s, int) else BatchShape(*s) for s in sizes]


def runner(*sizes: tuple[int, int] | int, captured: bool = True, **options) -> CudaGraphRunner:
    def run(shape: BatchShape) -> torch.Tensor:
        return torch.full((shape.num_reqs,), shape.num_tokens)

    made = CudaGraphRunner(run, shapes(*sizes), CPU, **options)
    if captured:
        made.capture()
    return made


@pytest.fixture(scope="module")
def several() -> CudaGraphRunner:
    return runner(8, 1, (64, 12), 2, (16, 12), (16, 4), 8)


@pytest.mark.parametrize(("tokens", "rows", "decode", "bucket"), [
    (1, 1, True, (1, 1)), (2, 2, True, (2, 2)), (3, 3, True, (8, 8)), (8, 8, True, (8, 8)),
    (9, 9, True, (16, 12)),  # no decode bucket is large enough, a mixed one is
    (12, 12, True, (16, 12)), (13, 13, True, None),
    (3, 1, False, (16, 4)), (16, 4, False, (16, 4)), (16, 5, False, (16, 12)), (17, 5, False, (64, 12)),
    (2, 2, False, (16, 4)),  # two chunks of one token: not a decode batch
    (64, 12, False, (64, 12)), (65, 1, False, None), (20, 13, False, None),
])
def test_choice_of_bucket(tokens, rows, decode, bucket, several) -> None:
    before = several.stats.fell_back.total()
    found = several.can_run(BatchShape(tokens, rows), decode)
    assert found == (None if bucket is None else BatchShape(*bucket))
    assert several.stats.fell_back.total() - before == (bucket is None)


def test_capture_goes_from_large_to_small() -> None:
    staged, ran, seen = [], [], []

    def progress(buckets):
        seen.append(list(buckets))
        yield from buckets

    r = CudaGraphRunner(lambda s: ran.append(s), shapes(4, (32, 3), 1, (16, 12), 16), CPU, progress=progress,
                        before_capture=staged.append)
    r.capture()
    assert staged == seen[0] == r.buckets == shapes((32, 3), 16, (16, 12), 4, 1)
    assert ran == []  # on a CPU nothing runs before it is asked for
    assert r.stats.captured == 5 and r.stats.replayed == 0


def test_the_collector_rests_while_capturing() -> None:
    enabled = []
    r = runner(2, 1, captured=False, before_capture=lambda shape: enabled.append(gc.isenabled()))
    assert gc.isenabled()
    r.capture()
    assert enabled == [False, False] and gc.isenabled()
    def before(shape: BatchShape) -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        runner(1, before_capture=before)
    assert gc.isenabled()


def test_replay_until_cleared() -> None:
    r = runner(1, 4)
    for n, bucket in ((1, 1), (3, 4), (4, 4)):
        assert r.replay(r.can_run(BatchShape(n, n), True)).tolist() == [bucket] * bucket
    assert r.stats.replayed == 3 and r.stats.padding_tokens == 1
    assert r.stats.replays == {BatchShape(1, 1): 1, BatchShape(4, 4): 2}
    r = runner(1)
    r.clear()
    assert r.can_run(BatchShape(1, 1), True) is None
    with pytest.raises(RuntimeError, match=r"the step \(1, 1\) was not captured: capture it at the start, or make"):
        r.replay(BatchShape(1, 1))


def test_falling_back_is_counted_and_logged_once(caplog) -> None:
    r = runner(1, 4)
    with caplog.at_level(logging.DEBUG, "quire.graph_runner.cuda_graph"):
        for _ in range(3):
            assert r.can_run(BatchShape(5, 5), True) is None
            assert r.can_run(BatchShape(6, 6), True) is None
            assert r.can_run(BatchShape(30, 2), False) is None
            assert r.can_run(BatchShape(3, 3), True) == BatchShape(4, 4)
    rows = "more rows than the largest decode bucket (4)"
    prefill = "a prefill in the batch, and no mixed bucket captured"
    assert r.stats.fell_back == {rows: 6, prefill: 3}
    assert [(m.levelname, m.getMessage()) for m in caplog.records] == [
        ("WARNING", f"step of 5 tokens, 5 rows runs without a CUDA graph: {rows}"),
        ("DEBUG", f"step of 30 tokens, 2 rows runs without a CUDA graph: {prefill}"),  # usual, so not a warning
    ]


@pytest.mark.parametrize(("sizes", "captured", "decode", "why"), [
    ((4,), False, True, "nothing is captured"),
    (((16, 4),), True, True, "more rows than the largest decode bucket (0)"),
    (((16, 4),), True, False, "more tokens or rows than the largest mixed bucket (16, 4)"),
])
def test_reasons(sizes, captured, decode, why) -> None:
    r = runner(*sizes, captured=captured)
    assert r.can_run(BatchShape(20, 20), decode) is None
    assert dict(r.stats.fell_back) == {why: 1}


def test_stats_as_text() -> None:
    assert str(GraphStats()) == "0 graphs (0.0 s, 0 MiB), 0 replays, fell back: none"
    stats = GraphStats(3, 40, capture_seconds=1.26, capture_bytes=5 * 2**20)
    stats.fell_back["reason"] = 7
    assert str(stats) == "3 graphs (1.3 s, 5 MiB), 40 replays, fell back: 7 for reason"


# -- with a model


@pytest.fixture(scope="module")
def model():
    return load_model(num_layers=2)


@pytest.fixture(scope="module", params=["NHD", "HND"])
def engine(request, model):
    with Engine(model, num_pages=60, page_size=4, max_num_seqs=8, max_model_len=100, cudagraph_capture_sizes=[1, 8],
                cudagraph_token_sizes=[24], async_stepping=False, kv_layout=request.param) as made:
        yield made


def test_padded_bucket(engine, prompts) -> None:
    # Sums of 512 numbers in another order, in 4 layers: a few times 1e-7 of the largest.
    check_padded_bucket(engine, prompts[:3], BatchShape(8, 8), 1e-5)


def test_padded_mixed_bucket(engine, prompts) -> None:
    """A prefill beside decode rows, padded in tokens and rows."""
    decode_batch(engine, prompts[:2])
    engine.scheduler.running[0].num_computed -= 1  # take the step back: it was not launched
    engine.scheduler.running[1].num_computed -= 1
    for r in engine.scheduler.running:
        r.num_pending = 0
    engine.add_request(prompts[2], GREEDY)
    batch = engine.scheduler.schedule()
    assert [r.num_new for r in batch.rows] == [1, 1, len(prompts[2])] and not batch.is_decode
    bucket = engine.runner.graphs.can_run(BatchShape(batch.num_tokens, 3), False)
    assert bucket == BatchShape(24, 8)
    plain = run_batch(engine, batch, None)
    padded = run_batch(engine, batch, bucket)
    assert (padded - plain).abs().max() <= 1e-5 * plain.abs().max()
    for row in batch.rows:
        engine.abort(row.request.request_id)
    engine.step()


def test_small_batch_after_a_large_one(engine, model, prompts) -> None:
    """The bucket of 8 holds 7 rows, then 2: rows that ended leave nothing in the padding."""
    lengths = [GREEDY.max_tokens if i < 2 else 4 for i in range(7)]
    before = engine.runner.graphs.stats.replayed
    outputs = engine.generate(prompts, [replace(GREEDY, max_tokens=n, ignore_eos=True) for n in lengths])
    assert tokens(outputs) == [hf_greedy(model, p, n, eos_token_id=None) for p, n in zip(prompts, lengths, strict=True)]
    assert engine.runner.graphs.stats.replayed - before >= GREEDY.max_tokens - 1
    view = engine.runner.buffers.views(BatchShape(8, 8))
    assert view["seq_lens"].tolist()[2:] == [0] * 6 and (view["seq_lens"][:2] > 0).all()
    assert view["slot_mapping"].tolist()[2:] == [-1] * 6
    assert not engine.runner.buffers.table.rows[2:8].any()
    assert view["query_start_loc"].tolist() == [0, 1] + [2] * 7


# Options of the runner.


def test_hidden_states() -> None:
    """A graph that returns fewer than a batch wants must not run it; one that returns more may."""
    null, last, full = CaptureHiddenMode
    r = runner(4, hidden_mode=last)
    assert r.can_run(BatchShape(4, 4), True, null) == r.can_run(BatchShape(4, 4), True, last) == BatchShape(4, 4)
    assert r.can_run(BatchShape(4, 4), True, full) is None and r.reason == (
        "hidden states of FULL are wanted, graphs have LAST")


def test_steps_with_cross_attention_have_graphs_of_their_own() -> None:
    """A graph of a text batch leaves out the layers that read an encoder; one with them reads lengths that a text has not."""
    ran: list = []
    r = CudaGraphRunner(ran.append, [*shapes(4, 1), EncoderShape(4, 4), EncoderShape(32, 4)], CPU)
    r.capture()
    live = BatchShape(3, 3)
    assert r.stats.captured == 4 and r.can_run(live, True) == r.can_run(live, True, encoder_lens=[0, 0, 0]) == BatchShape(4, 4)
    crossing = r.can_run(live, True, encoder_lens=[7, 9, 1])
    assert crossing == EncoderShape(4, 4) != BatchShape(4, 4)
    assert r.can_run(BatchShape(20, 3), False, encoder_lens=[7, 9, 1]) == EncoderShape(32, 4)
    r.replay(crossing)
    r.replay(BatchShape(4, 4))
    assert ran == [EncoderShape(4, 4), BatchShape(4, 4)] and r.stats.replays[crossing] == 1
    assert r.can_run(live, True, encoder_lens=[7, 0, 1]) is None
    assert r.reason == "some rows have encoder tokens, and others none"
    assert r.can_run(BatchShape(20, 3), False) is None and "no mixed bucket" in r.reason
    assert runner(4).can_run(live, True, encoder_lens=[1, 1, 1]) is None


def test_inputs_that_moved() -> None:
    tensors = [torch.zeros(2), torch.zeros(3)]
    r = runner(4, inputs=lambda shape: tensors)
    r.replay(BatchShape(4, 4))
    tensors[1] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"inputs \[1\] of the graph of \(4, 4\) are not where they were"):
        r.replay(BatchShape(4, 4))


class RecordingGraphs(CpuGraphs):
    """A device without hardware: one output per graph, in the pool's one buffer, as on a GPU."""

    log: list = []
    fails: list = []
    left: list = []

    def new_pool(self):
        self.log.append("pool")
        return torch.zeros(64)

    def warm_up(self, run, times) -> None:
        self.log.append(("warm up", times))

    def record(self, run, pool) -> Recorded:
        value = run()
        output = pool[: value.shape[0]]
        self.log.append("record")
        if self.fails and (error := self.fails.pop(0)) is not None:
            raise error

        def replay():
            self.log.append("replay")
            return output.copy_(value)

        return Recorded(replay)

    def is_left(self, pool, recorded) -> bool:
        self.log.append(("left beside", len(recorded)))
        return bool(self.left.pop(0)) if self.left else False

    def free_bytes(self) -> int:
        return 1000 - 10 * len(self.log)

    def release(self) -> None:
        self.log.append("release")


@pytest.fixture
def device() -> torch.device:
    RecordingGraphs.log, RecordingGraphs.fails, RecordingGraphs.left = [], [], []
    register_device_graphs("meta", RecordingGraphs)
    return torch.device("meta")


def test_a_new_device_is_one_class(device) -> None:
    r = CudaGraphRunner(lambda s: torch.full((s.num_reqs,), float(s.num_tokens)), shapes(1, 4), device)
    r.capture()
    assert RecordingGraphs.log == ["release", ("warm up", 2), "pool", "record", ("warm up", 1), "record"]
    assert r.stats.capture_bytes == 50
    one = r.replay(BatchShape(1, 1))
    assert one.tolist() == [1] and r.replay(BatchShape(4, 4)).tolist() == [4] * 4
    assert one.tolist() == [4]  # an output lasts until the next replay


WHOLE = [("warm up", 1), "record"]
LOADED = RuntimeError("a kernel is loaded")


@pytest.mark.parametrize("fails, left, then", [
    ([], [False], [("left beside", 2)]), ([], [True], [("left beside", 2), "replay", "release", *WHOLE]),
    ([None, LOADED], [False], [("left beside", 1), *WHOLE]), ([None, LOADED], [True], None),
], ids=["short", "memory is kept", "the recording fails", "it fails and memory is kept"])
def test_a_step_runs_whole_where_a_short_run_is_not_enough(device, fails, left, then) -> None:
    """What a layer makes at its first use, inside a graph, is filled by that graph alone."""
    inside: list[bool] = []

    @contextlib.contextmanager
    def short():
        RecordingGraphs.log.append("short")
        inside.append(True)
        yield
        inside.pop()

    def run(shape):
        assert not inside  # nothing is recorded inside
        return torch.full((shape.num_reqs,), float(shape.num_tokens))

    r = CudaGraphRunner(run, shapes(1, 4), device, short_warm_up=short)
    RecordingGraphs.fails, RecordingGraphs.left = list(fails), list(left)
    if then is None:
        with pytest.raises(RuntimeError, match="a kernel is loaded"):
            r.capture()
        return
    r.capture()
    assert RecordingGraphs.log == ["release", ("warm up", 2), "pool", "record", "short", *WHOLE, *then]
    assert r.replay(BatchShape(1, 1)).tolist() == [1] and r.replay(BatchShape(4, 4)).tolist() == [4] * 4


def test_of_a_kind_one_step_runs_before_it_is_recorded(device) -> None:
    """The others run the same code; what they make all the same is seen, and the step runs."""
    r = CudaGraphRunner(lambda s: torch.full((s.num_reqs,), float(s.num_tokens)), shapes(1, 2, 3, 8), device,
                        short_warm_up=contextlib.nullcontext, kind=lambda shape: shape.num_tokens > 4)
    RecordingGraphs.left = [False, False, True]
    r.capture()
    assert RecordingGraphs.log == [
        "release", ("warm up", 2), "pool", "record", ("warm up", 1), "record", ("left beside", 2), "record", ("left beside", 3),
        "record", ("left beside", 4), "replay", "release", *WHOLE]
    assert [r.replay(BatchShape(n, n)).tolist() for n in (1, 2, 3)] == [[1], [2] * 2, [3] * 3]


@pytest.mark.parametrize("ends_badly", [False, True])
def test_a_step_that_fails_holds_no_memory(device, monkeypatch, ends_badly) -> None:
    """What it had when it failed is not what it keeps: a start would end with an error for no reason. ``ends_badly``: ending
    the recording raises another error, as CUDA does."""
    held: list[weakref.ref] = []
    record = RecordingGraphs.record

    def recorded(self, run, pool):
        try:
            return record(self, run, pool)
        except RuntimeError:
            if ends_badly:
                raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904 - its context
            raise

    monkeypatch.setattr(RecordingGraphs, "record", recorded)

    def run(shape):
        x = torch.full((shape.num_reqs,), float(shape.num_tokens))
        if shape.num_reqs == 1 and not held:
            held.append(weakref.ref(x))
            raise LOADED
        return x

    monkeypatch.setattr(RecordingGraphs, "is_left", lambda *args: bool(held) and held[0]() is not None)
    r = CudaGraphRunner(run, shapes(1, 4), device, short_warm_up=contextlib.nullcontext)
    r.capture()
    assert r.replay(BatchShape(1, 1)).tolist() == [1]


def test_runners_that_share_a_pool(device) -> None:
    """A target and its draft: one pool, and outputs that outlive the other's replay."""
    pool = GraphPool()
    target, draft = (CudaGraphRunner(lambda s, k=k: torch.full((4,), k), shapes(4), device, pool=pool, keep_outputs=True)
                     for k in (1.0, 2.0))
    target.capture()
    draft.capture()
    assert RecordingGraphs.log.count("pool") == 1
    first = target.replay(BatchShape(4, 4))
    assert draft.replay(BatchShape(4, 4)).tolist() == [2] * 4 and first.tolist() == [1] * 4
    target.clear()
    target.capture()
    assert RecordingGraphs.log.count("pool") == 1


@pytest.mark.parametrize("options", [dict(cudagraph_lazy=True), dict(cudagraph_debug=True)])
def test_engine_options(options, monkeypatch) -> None:
    """Tokens stay the same with captures before each step, and with wild values in all padding."""
    monkeypatch.setattr(cuda_graph, "LATE_SHARE", 1.0)
    model = load_model(num_layers=1)
    prompts = [[5, 17, 40], [9, 9, 31, 7], [3]]
    with Engine(model, num_pages=40, max_num_seqs=4, max_model_len=64, cudagraph_capture_sizes="powers",
                cudagraph_token_sizes=[16], **options) as engine:
        assert [tuple(b) for b in engine.runner.graphs.buckets] == [(16, 4), (4, 4), (2, 2), (1, 1)]
        assert engine.runner.graphs.stats.captured == (1 if "cudagraph_lazy" in options else 4)
        assert tokens(engine.generate(prompts, GREEDY)) == [hf_greedy(model, p, 20) for p in prompts]
        stats = engine.runner.graphs.stats
        assert stats.padding_tokens > 0 and stats.replays[BatchShape(4, 4)] > 0
        assert stats.captured == 4  # those that no batch needed between steps


class MeasuredGraphs(RecordingGraphs):
    """Of each pool the first graph takes 100 bytes, the second 20, and each further one 7. What steps before it left is there
    until ``release``, which recording does too."""

    left, pools = 0, list[weakref.ref]()

    def new_pool(self):
        pool = super().new_pool()
        self.pools.append(weakref.ref(pool))
        return pool

    def record(self, run, pool) -> Recorded:
        self.release()
        pool += 1
        return super().record(run, pool)

    def free_bytes(self) -> int:
        graphs = [int(pool()[0]) for pool in self.pools if pool() is not None]
        return 1000 - self.left - sum(93 + 7 * n + 13 * (n > 1) for n in graphs if n)

    def release(self) -> None:
        MeasuredGraphs.left = 0


def test_memory_of_all_graphs_is_estimated_from_a_few() -> None:
    """Before the KV cache takes all that is left: what the capture then takes is what was said, and nothing stays behind."""
    register_device_graphs("meta", MeasuredGraphs)
    MeasuredGraphs.left, MeasuredGraphs.pools = 50, []
    r = CudaGraphRunner(lambda s: torch.zeros(s.num_reqs), shapes(1, 2, 4, 8, 16), torch.device("meta"))
    assert r.estimate() == r.stats.estimated_bytes == 141 and MeasuredGraphs(torch.device("meta")).free_bytes() == 1000
    with pytest.raises(RuntimeError, match="was not captured"):
        r.replay(BatchShape(16, 16))
    MeasuredGraphs.left = 50
    r.capture()
    assert (r.stats.captured, r.stats.capture_bytes, r.stats.estimated_bytes) == (5, 141, 141)
    assert CudaGraphRunner(lambda s: None, shapes(), torch.device("meta")).estimate() == 0


def test_the_cache_gets_what_graphs_leave() -> None:
    plan = MemoryPlan(total=100 * 2**30, free=80 * 2**30, utilization=0.9, step=5 * 2**30, graphs=3 * 2**30)
    assert plan.cache == pytest.approx(62 * 2**30)
    assert "CUDA graphs about 3.0 GiB, and 10.0 GiB stay unused" in str(plan)
