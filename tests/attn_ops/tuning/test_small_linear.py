"""Launch parameters: measured once, kept, found again; the files, the rule, and when the definition wins."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import recording
from quire.attn_ops.ops.small_linear import memory_of, small_linear_cuda, small_linear_eager
from quire.attn_ops.tuning import launch_config
from quire.attn_ops.tuning import small_linear as tuning
from quire.attn_ops.tuning.launch_config import STORE, Config, config_for, key
from quire.attn_ops.tuning.small_linear import CANDIDATES, LinearShape, missing, tune
from tests.attn_ops.cases import shape_of_key

triton = pytest.importorskip("triton")
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
SHAPE = LinearShape(32, 64, True, False, False, torch.float16)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_COLD", 0)  # two weights do
    tuning.known.cache_clear()
    yield tmp_path
    tuning.known.cache_clear()


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition in the place of the kernel, for tests that do not look at what is launched: the interpreter is slow."""
    monkeypatch.setattr("quire.attn_ops.ops.small_linear.small_linear_cuda", lambda *args, config: small_linear_eager(*args))


class Timer:
    """Gives out times in order: of the definition, then of each candidate; runs what it is to time."""

    def __init__(self, *times: float) -> None:
        self.times, self.calls = list(times), 0

    def __call__(self, run, calls: int) -> float:
        run()
        self.calls += 1
        return self.times[(self.calls - 1) % len(self.times)]


def test_measured_once_and_kept(instant) -> None:
    timer = Timer(9.0, 5.0, 3.0, 4.0)  # the second candidate wins, for each of the three sizes
    assert [m for _, m in missing([SHAPE], CPU)] == [1, 8, 32]
    seen = []
    assert tune([SHAPE, SHAPE], CPU, timer=timer, progress=lambda items: iter(seen.append(len(items)) or items)) == 3
    assert timer.calls == 12 and seen == [3] and not missing([SHAPE], CPU)
    for tokens in (1, 2, 8, 16, 17, 32):
        assert config_for(tokens, 32, 64, False, CPU) == CANDIDATES[tokens == 1][1]
    assert tune([SHAPE], CPU, timer=timer) == 0 and timer.calls == 12
    tuning.known.cache_clear()  # as in another process
    assert config_for(1, 32, 64, False, CPU) == CANDIDATES[True][1] and not missing([SHAPE], CPU)


@pytest.mark.slow
@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
def test_codes_are_measured_apart(codes: torch.dtype) -> None:
    """For more tokens too: those run without what is folded in for few (passes/fusions/small_linear.py)."""
    shape = SHAPE._replace(n=64, residual=True, swiglu=True, norm=False, codes=codes)
    sizes = missing([shape], CPU)
    assert [m for _, m in sizes] == [1, 8, 32, 64, 128, 256]
    assert [(s.swiglu, s.residual) for s, _ in sizes] == [(True, True)] * 3 + [(False, False)] * 3
    timed = []

    def timer(run: Callable[[], Any], calls: int) -> float:
        timed.append(run())
        return 9.0 - len(timed) % 4

    assert tune([shape], CPU, timer=timer) == 6 and not missing([shape], CPU)
    assert len(timed) == sum(1 + len(tuning.candidates(m, s, CPU)) for s, m in sizes), "a candidate failed or erred"
    assert len(missing([shape._replace(codes=None, swiglu=False)], CPU)) == 3
    other = torch.int8 if codes != torch.int8 else torch.float8_e4m3fn
    assert len(missing([shape._replace(codes=other)], CPU)) == 6
    for tokens, swiglu in ((1, True), (32, True), (33, False), (200, False)):
        found = config_for(tokens, 64, 64, swiglu, CPU, codes)
        assert found in (None, *tuning.candidates(tokens, shape._replace(swiglu=swiglu), CPU))
        assert found == config_for(tokens, 64, 64, swiglu, CPU, codes)


def test_uneven_tiles_are_tried_in_even_shares() -> None:
    """Qwen2-7B's gate and up are 296 tiles of 64 rows on 132 multiprocessors: with a third round for a quarter of them a step
    took a quarter longer than its bytes do. Shares take no more rounds than whole tiles."""
    def rounds(rows: int, n: int) -> int:
        return math.ceil(math.ceil(n / rows) / 132)

    h200 = torch.device("cuda")
    with mock.patch.multiple(host, num_sms=lambda device: 132, shared_memory=lambda device: 233472):
        for n, swiglu in ((18944, True), (3584, False), (4608, False), (14336, True), (4096, False), (1000, False)):
            for config in (tuning.EVENED, *tuning.SWIGLU, *CANDIDATES[False]):
                found = tuning.evenly(config, 32, n, swiglu, h200)
                at_once = max(1, min(233472 // memory_of(config, 32, swiglu), 8 // config.num_warps))
                if found is not None:
                    assert found.rows % 4 == 0 and found._replace(rows=0) == config
                    assert rounds(found.rows, n) <= at_once * -(-rounds(config.block_n, n) // at_once)
        found = tuning.evenly(Config(64, 256, 4, 3), 8, 18944, True, h200)
        assert found is not None and rounds(found.rows, 18944) == 3 and found.rows == 48
        assert tuning.evenly(Config(32, 256, 4, 5), 8, 4096, False, h200) is None, "128 tiles are even enough"
        shape = LinearShape(37888, 3584, True, False, True, torch.bfloat16)
        assert any(config.rows for config in tuning.candidates(8, shape, h200))
        assert {config.block_k for config in tuning.candidates(1, shape, h200)} >= {512, 1024}, "3584 is 7 times 512"


def test_few_rows_share_their_columns() -> None:
    """64 tiles leave half of 132 multiprocessors without work. SwiGLU, and a norm in the same launch, need whole sums in one
    program."""
    h200 = torch.device("cuda")
    with mock.patch.multiple(host, num_sms=lambda device: 132, shared_memory=lambda device: 233472):
        for n, k in ((2048, 8192), (1024, 2048), (512, 1024), (4096, 4096), (5120, 4096), (2560, 600)):
            plain = LinearShape(n, k, False, True, False, torch.bfloat16)
            found = [config for config in tuning.candidates(8, plain, h200) if config.splits > 1]
            assert bool(found) == (n <= 4096 and k >= 1024)
            assert all(n / config.block_n * config.splits <= 132 and k / config.splits >= 512 for config in found)
            whole = plain._replace(norm=True), plain._replace(swiglu=True)
            assert not any(c.splits > 1 and not c.norm_apart for each in whole for c in tuning.candidates(8, each, h200))
            assert not any(config.splits > 1 for config in tuning.candidates(1, plain, h200))


def test_a_norm_in_a_launch_of_its_own_where_that_is_faster(folder) -> None:
    """In one launch each program multiplies all tokens by the norm's weight, which of a small layer takes as long as its
    bytes."""
    shape = SHAPE._replace(dtype=torch.bfloat16)
    tried = tuning.candidates(8, shape, CPU)
    assert any(c.norm_apart for c in tried) and not any(c.norm_apart for c in tuning.candidates(1, shape, CPU))
    assert any(c.norm_apart for c in tuning.candidates(8, shape._replace(swiglu=True), CPU))
    for other in (shape._replace(norm=False), SHAPE):  # in float16 it is apart in any case
        assert not any(c.norm_apart for c in tuning.candidates(8, other, CPU))
    for chosen in tried:
        with mock.patch.object(tuning, "fastest", lambda *args, chosen=chosen: chosen):
            for file in folder.rglob("*.json"):
                file.unlink()
            tuning.known.cache_clear()
            assert tune([shape], CPU) == 3
        tuning.known.cache_clear()  # as in another process
        assert config_for(8, 32, 64, False, CPU) == chosen
        (entry,) = {len(e) for each in STORE.load(STORE.user_file).values() for e in each.values()}
        assert entry == (9 if chosen.norm_apart else 7), "older versions refuse longer entries"
        (call,) = tuning.arguments(shape, 8, CPU, 1)
        with recording() as launched:
            small_linear_cuda(*call)
        names = sorted(each.name for each in launched)
        assert names == ["norm_kernel"] * chosen.norm_apart + ["tile_kernel"]


def test_what_engines_try_is_near_the_best_of_a_sweep() -> None:
    """Each layer of eight models, 8 and 32 tokens: none runs more than 4 % longer than it could for want of a candidate."""
    sweep = json.loads((ROOT / "benchmarks/results/h200_small_linear_apart.json").read_text())
    times: dict[Any, dict[Config, float]] = {}
    for row in sweep["rows"]:
        if "us" in row and row["layer"] != "head":
            norm, swiglu = row["layer"] in ("qkv", "gate_up"), row["layer"] == "gate_up"
            shape = LinearShape(row["n"], row["k"], norm, not norm, swiglu, torch.bfloat16)
            times.setdefault((row["tokens"], shape), {})[Config(*row["config"])] = row["us"]
    assert len(times) == 2 * (8 * 4 - 1), "glm4-9b's o is llama-8b's"
    with mock.patch.multiple(host, num_sms=lambda device: 132, shared_memory=lambda device: 233472):
        for (tokens, shape), found in times.items():
            tried = [found[c] for c in tuning.candidates(tokens, shape, torch.device("cuda")) if c in found]
            assert min(tried) <= 1.04 * min(found.values()), (tokens, shape)


@pytest.mark.parametrize("saved, apart", [(0.9, False), (1.1, True)])
def test_a_second_launch_must_be_worth_it(instant, saved: float, apart: bool) -> None:
    """A layer gets no second launch for what may be chance."""
    shape = SHAPE._replace(dtype=torch.bfloat16)
    times = [9.0, *(5.0 - saved * config.norm_apart for config in tuning.candidates(8, shape, CPU))]
    chosen = tuning.fastest(shape, 8, CPU, Timer(*times))
    assert chosen is not None and bool(chosen.norm_apart) == apart


@pytest.mark.parametrize("codes", [None, torch.int8])
def test_what_was_measured_is_launched(codes: torch.dtype | None) -> None:
    shape = SHAPE._replace(norm=False, codes=codes)
    for tokens in (1, 8):
        (call,) = tuning.arguments(shape, tokens, CPU, 1)
        for config in tuning.candidates(tokens, shape, CPU):
            tuning.known.cache_clear()
            launch_config.known(CPU)[key(tokens, shape.n, shape.k, False, codes)] = list(config)
            with recording() as launched:
                small_linear_cuda(*call)
            with recording() as wanted:
                small_linear_cuda(*call, config=config)
            assert launched == wanted and len(launched) == 1


def test_what_is_compiled_ahead_is_what_measuring_launches() -> None:
    shapes = [SHAPE, SHAPE._replace(n=64, residual=True), SHAPE._replace(swiglu=True), SHAPE._replace(codes=torch.int8)]
    ahead = tuning.launches(shapes, CPU)
    with recording() as launched:  # results are not there, so nothing is timed: every candidate is called once
        tune(shapes, CPU, timer=Timer(1.0))
    assert ahead == launched and len(ahead) >= len(CANDIDATES[True]) + len(CANDIDATES[False])
    assert not tuning.launches(shapes, CPU), "all is measured now"


def test_nothing_to_measure_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.known.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    assert tune([], CPU) == 0


@pytest.mark.parametrize(("cold", "copies"), [(0, 2), (3 * 32 * 64 * 2, 4), (1e9, 6)])
def test_how_many_weights_are_gone_through(cold: float, copies: int, instant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough not to fit into the L2 cache, up to a limit: the weights of a small model are in it anyway."""
    monkeypatch.setattr(tuning, "_COLD", cold)
    monkeypatch.setattr(tuning, "MOST_COPIES", 6)
    calls = set()
    tuning.fastest(SHAPE, 1, CPU, lambda run, n: float(calls.add(n) or len(run())))
    assert calls == {copies}


def test_the_definition_wins(instant) -> None:
    """Where it was faster, the op runs it: bit for bit."""
    tune([SHAPE], CPU, timer=Timer(1.0, 5.0, 3.0, 4.0))
    assert config_for(8, 32, 64, False, CPU) is None
    args = (torch.randn(8, 64).half(), torch.randn(32, 64).half(), None, torch.rand(64).half(), 1e-5, None, False)
    assert torch.equal(small_linear_cuda(*args), small_linear_eager(*args))


def test_a_candidate_that_fails_or_errs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args, config):
        if config == CANDIDATES[False][0]:
            raise RuntimeError("too much shared memory")
        return small_linear_cuda(*args, config=config) * (2 if config == CANDIDATES[False][1] else 1)

    monkeypatch.setattr("quire.attn_ops.ops.small_linear.small_linear_cuda", broken)
    best = tuning.fastest(SHAPE, 8, CPU, Timer(9.0, 5.0))
    assert best == CANDIDATES[False][2]


def test_other_threads_go_on_while_shapes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that starts beside one that serves, or beside training, must not end their work: in CUDA's default mode it
    refuses memory to every thread while one records."""
    modes: list[str] = []
    cuda = SimpleNamespace(
        current_device=lambda: 0, synchronize=lambda: None, stream=contextlib.nullcontext,
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: None),
        Event=lambda enable_timing: SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 0.008),
        graph=lambda graph, stream, capture_error_mode="global": modes.append(capture_error_mode) or contextlib.nullcontext())
    monkeypatch.setattr(tuning, "side_stream", contextlib.nullcontext)
    monkeypatch.setattr(torch, "cuda", cuda)
    assert tuning.graph_time(lambda: None, 4) == 2.0 and modes == ["relaxed"]


def test_other_shapes_go_by_the_rule(instant) -> None:
    tune([SHAPE], CPU, timer=Timer(9.0, 5.0))
    for tokens, n, k, swiglu in ((1, 64, 64, False), (8, 32, 128, False), (8, 32, 64, True)):
        found = config_for(tokens, n, k, swiglu, CPU)
        assert found is not None and (tokens == 1 or found.block_n >= 16)


@pytest.mark.parametrize("text", [
    "{", '{"format": 9, "devices": {}}', '{"format": 1, "devices": {"x": {"1x2x3": [1, 2]}}}', "[]",
    '{"format": 1, "devices": {"x": {"16x2x3": [32, 64, 4, 2, 1, 0, 0, 32]}}}',  # rows that its programs would leave out
    '{"format": 1, "devices": {"x": {"16x2x3": [32, 64, 4, 2, 1, 0, 0, 30]}}}'])
def test_a_file_that_cannot_be_read(text, instant, caplog) -> None:
    """Ignored with a warning, and replaced by the next measurement."""
    STORE.user_file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert len(missing([SHAPE], CPU)) == 3
    assert "are ignored" in caplog.text
    tune([SHAPE], CPU, timer=Timer(9.0, 5.0))
    tuning.known.cache_clear()
    assert not missing([SHAPE], CPU)


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, folder, instant, caplog) -> None:
    """The process goes on with what it measured."""
    (folder / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(folder / "file"))
    assert tune([SHAPE], CPU, timer=Timer(9.0, 5.0)) == 3
    assert "could not be kept" in caplog.text
    assert config_for(1, 32, 64, False, CPU) == CANDIDATES[True][0]


def test_other_devices_and_versions_are_kept_apart(instant, monkeypatch: pytest.MonkeyPatch) -> None:
    tune([SHAPE], CPU, timer=Timer(9.0, 5.0))
    monkeypatch.setattr(launch_config, "device_key", lambda device: "another GPU, triton 9")
    tuning.known.cache_clear()
    assert len(missing([SHAPE], CPU)) == 3
    tune([SHAPE], CPU, timer=Timer(1.0, 5.0))
    assert len(json.loads(STORE.user_file.read_text())["devices"]) == 2


def test_the_table_that_ships() -> None:
    for device, configs in STORE.load(STORE.shipped).items():
        assert device.startswith("NVIDIA")
        for name, values in configs.items():
            tokens, *_ = shape = shape_of_key(name)
            assert key(*shape) == name
            config = Config(*values)
            assert all(v & (v - 1) == 0 for v in config[:3]) and (tokens == 1 or config.block_n >= 16)


@pytest.mark.parametrize("shape", [
    (1, 64, 128, False, None), (32, 8, 8, True, torch.int8), (128, 8, 8, False, torch.float8_e4m3fn)], ids=str)
def test_keys_say_what_they_are_of(shape) -> None:
    assert shape_of_key(key(*shape)) == shape
