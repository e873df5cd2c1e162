"""Kernels compiled ahead: the recorded launches are those of the steps, and the first launch finds its kernel compiled."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

pytest.importorskip("triton")

from quire import CommonAttentionMetadata, Step
from quire.attn_ops.kernels.launch import Launch, TensorArgument, implementations, launch, recording
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.registry import get_backend
from quire.attn_ops.tuning import small_linear as tuning
from quire.attn_ops.tuning.small_linear import LinearShape
from quire.passes.capture.paged_model import PagedModel
from quire.passes.compile.ahead import CompileAhead, StepShape, as_inductor_will, launches_of
from quire.passes.options import QuireOptions
from tests.tiny import load_model

pytestmark = pytest.mark.usefixtures("tokens_unchecked")
ROOT = Path(__file__).resolve().parents[3]
WIDTH, CPU = 8, torch.device("cpu")
TARGET = ("cuda", 90, 32)
SOME = {Launch("module", str(i), (), ()) for i in range(20)}


def kernel(x, n, m, SIZE: tl.constexpr, scale=1.0):  # noqa: F821
    raise AssertionError("launched")


class Kernel:
    fn = staticmethod(kernel)
    launched: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.launched.append((grid, args, options))


def test_a_launch_is_noted_up_to_what_its_code_depends_on() -> None:
    def noted(*args: Any, **options: Any) -> Launch:
        with recording() as found:
            launch(Kernel(), (3,), *args, **options)
        (one,) = found
        return one

    x = torch.zeros(64, dtype=torch.float16)
    one = noted(x, 32, 5, 7, 0.25, num_warps=4)
    assert one.name == "kernel" and one.arguments == (TensorArgument(torch.float16, True), 16, 17, 7, 0.5)
    assert one.options == (("num_warps", 4),)
    assert one == noted(x[8:], 48, 6, 7, 3.0, num_warps=4)
    others = [(x[1:], 32, 5, 7, 0.25), (x, 33, 5, 7, 0.25), (x, 32, 1, 7, 0.25), (x, 32, 5, 9, 0.25), (x, 2**35, 5, 7, 0.25),
              (x.float(), 32, 5, 7, 0.25), (None, 32, 5, 7, 0.25)]
    assert len({one, *(noted(*args, num_warps=4) for args in others), noted(x, 32, 5, 7, 0.25, num_warps=8)}) == 9
    assert not Kernel.launched
    launch(Kernel(), (3,), x, 1, 2, 3)
    assert Kernel.launched == [((3,), (x, 1, 2, 3), {})]


@pytest.mark.parametrize("layout", ["NHD", pytest.param("HND", marks=pytest.mark.slow)])
def test_what_is_noted_is_what_steps_launch(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the attention kernels, which run in the interpreter as they do on a GPU, and of what is prepared for them."""
    backend = get_backend("triton")
    why = backend.available(torch.device("cpu"))
    if why:
        pytest.skip(why)
    from quire.attn_ops.backends.triton import decode, extend, schedule
    from quire.attn_ops.kernels import kv_write

    monkeypatch.setattr(schedule, "config", lambda: schedule.ScheduleConfig(16))  # keys per part: contexts are short here
    model = load_model(num_layers=3)
    ahead = CompileAhead([], ("cuda", 90, 32), 1)
    noted: dict[StepShape, set[Launch]] = {}
    shapes = [StepShape(3, 3, WIDTH), StepShape(1, 1, WIDTH), StepShape(9, 3, WIDTH), StepShape(12, 1, WIDTH)]

    def start(nodes: Any, values: Any, roles: Any, fits: Any) -> None:
        for shape in shapes:
            for node in nodes:
                if node.target in (*backend.ops, backend.prepare):
                    noted.setdefault(shape, set()).update(launches_of(node, values, roles, [shape]))

    monkeypatch.setattr(ahead, "start", start)
    # Its compiler is Inductor, which would need no kernel of the backend here: what is compiled does not matter.
    monkeypatch.setattr("quire.passes.compile.inductor.inductor", lambda gm, inputs: gm.forward)
    paged = PagedModel(model, QuireOptions(attention="triton", page_size=16, layout=layout), ahead=ahead)
    launched: set[Launch] = set()
    for module in (decode, extend, kv_write, schedule):
        def record(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
            with recording() as found:
                launch(kernel, grid, *args, **options)
            launched.update(found)
            launch(kernel, grid, *args, **options)

        monkeypatch.setattr(module, "launch", record)
    cache = PagedKVCache.for_sites(paged.sites, num_pages=40, page_size=16, layout=layout, device="cpu")
    for shape, lengths in zip(shapes, ([1, 1, 1], [1], [1, 6, 2], [12]), strict=True):
        launched.clear()
        table = [[1 + i * WIDTH + j for j in range(WIDTH)] for i in range(shape.rows)]
        meta = CommonAttentionMetadata.build(lengths, [n + 30 for n in lengths], table, page_size=16)
        ids = torch.arange(shape.tokens)
        paged(Step(cache, meta, backend), ids, meta.positions, torch.arange(shape.rows))
        assert launched == noted[shape] and len(launched) >= 1
    paged.close()


def call_of(monkeypatch: pytest.MonkeyPatch) -> tuple[fx.Node, fx.Node]:
    """(input, call) of an op that launches two kernels, the second only for fakes of up to 8 tokens."""
    op = torch.ops.aten.relu.default

    def implementation(x: torch.Tensor) -> torch.Tensor:
        launch(Kernel(), (1,), x, len(x), 3, 7)
        if len(x) > 8:
            raise RuntimeError("no such thing as a fake")
        launch(Kernel(), (1,), x, len(x), 3, 9)
        return x

    monkeypatch.setitem(implementations, op, implementation)
    graph = fx.Graph()
    x = graph.placeholder("x")
    return x, graph.call_function(op, (x,))


def test_an_op_that_fails_with_fakes_keeps_its_first_launches(monkeypatch: pytest.MonkeyPatch,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    """In steps of one shape; those of others count, and so do other ops."""
    x, node = call_of(monkeypatch)
    with caplog.at_level("INFO"):
        for tokens, sizes in ((4, [7, 9]), (16, [7])):
            found = launches_of(node, {x: torch.empty(tokens)}, {}, [StepShape(tokens, 1, 1)])
            assert sorted(one.arguments[3] for one in found) == sizes
    assert caplog.text.count("are left to their first launch: RuntimeError: no such thing as a fake") == 1


SCRIPT = """
import json, os, pickle, random, subprocess, sys
import torch
from quire.attn_ops.kernels import compile_worker
from quire.passes.compile.ahead import CompileAhead, StepShape
from benchmarks.launches import _as_if_on_an_h200, compile_ahead
from quire.attn_ops.ops.logprobs import launches_beside_sampling
from tests.tiny import load_model

def kernels():
    return sorted(f for _, _, files in os.walk(os.environ["TRITON_CACHE_DIR"]) for f in files if f.endswith(".cubin"))

popen, work = subprocess.Popen, []
class Start(popen):  # a class: others derive from it; Triton starts its assembler too
    def __init__(self, command, *args, stdin=None, **options):
        if "quire.attn_ops.kernels.compile_worker" in command:
            work.append(pickle.load(stdin)[1])
            stdin.seek(0)
        super().__init__(command, *args, stdin=stdin, **options)
subprocess.Popen = Start

model = load_model(dtype=torch.bfloat16)
shapes = [StepShape(*s, 64) for s in ((1, 1), (64, 64), (70, 5))]
beside = {torch.ops.quire.sample_tokens.default: launches_beside_sampling}
ahead = CompileAhead(shapes, ("cuda", 90, 32), 2, beside=beside)
compile_ahead(model, ahead)
ahead.wait()
first, launches = kernels(), [one for each in work for one in each]
processes = len(work)
again = CompileAhead(shapes, ("cuda", 90, 32), 2, beside=beside)
compile_ahead(model, again)
more = len(work) - processes
again.close()
random.shuffle(launches)  # whatever is launched first
with _as_if_on_an_h200():
    for one in launches:
        compile_worker.compile_launch(one)
print(json.dumps({"processes": processes, "names": sorted({one.name for one in launches}), "first": first, "more": more,
                  "after": kernels()}))
"""


@pytest.mark.slow
def test_the_first_launch_finds_them(tmp_path: Path) -> None:
    """For an H200, without one: in other processes, and then here; nothing is compiled twice."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert 2 <= found["processes"] <= 4  # one or two for each of the two graphs
    assert {"decode_kernel", "extend_kernel", "rope_kv_write_kernel", "vector_kernel", "sample_kernel", "part_kernel"
            } <= set(found["names"])
    assert len(found["first"]) >= len(found["names"]) and found["after"] == found["first"]
    assert found["more"] == 0, "compiled again though a note says that it was done"


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that were started: stand-ins that know their work, and end with ``code`` when they are waited for."""
    started: list[Any] = []

    class Worker:
        code, returncode, killed = 0, None, False

        def __init__(self, command: Any, *, stdin: Any, **options: Any) -> None:
            if len(started) == Worker.most:
                raise BlockingIOError("Resource temporarily unavailable")
            self.target, self.launches = pickle.load(stdin)
            started.append(self)

        most = 99

        def wait(self, timeout: float | None = None) -> None:
            self.returncode = self.code

        def kill(self) -> None:
            self.killed = True

    monkeypatch.setattr("quire.passes.compile.ahead.subprocess.Popen", Worker)
    monkeypatch.setenv("QUIRE_TUNE", "1")
    return started


class Note:
    """Triton's cache, where a note says what was compiled."""

    def __init__(self, error: Exception | None = None) -> None:
        self.put_as: list[str] = []
        self.error = error

    def has_file(self, name: str) -> bool:
        return name in self.put_as

    def put(self, data: bytes, name: str) -> None:
        if self.error is not None:
            raise self.error
        self.put_as.append(name)


@pytest.mark.parametrize("code, error", [(0, None), (1, None), (0, PermissionError("a folder that is read only"))])
def test_what_was_compiled_is_noted(code: int, error: Exception | None, workers: list[Any], monkeypatch: pytest.MonkeyPatch
                                    ) -> None:
    """So that a later start need not begin; not if a process failed, and a note that cannot be written does no harm."""
    note = Note(error)
    monkeypatch.setattr("triton.runtime.cache.get_cache_manager", lambda key: note)
    x, node = call_of(monkeypatch)
    for started in (1, 1 if (code, error) == (0, None) else 2):
        ahead = CompileAhead([StepShape(4, 1, 1)], TARGET, 1)
        ahead.start([node], {x: torch.empty(4)}, {})
        assert len(workers) == started and len(workers[-1].launches) == 2 and workers[-1].target == TARGET
        workers[-1].code = code
        ahead.wait()
    assert note.put_as == (["done"] if (code, error) == (0, None) else [])


def test_a_later_start_finds_the_note_under_other_names_of_sizes(workers: list[Any], monkeypatch: pytest.MonkeyPatch,
                                                                 tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The names of symbols follow from what else was traced, and differ between a trace and one from the disk. What a launch
    follows from counts: which size of the step a symbol is. The log says what a note that is not there would be of."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x, node = call_of(monkeypatch)

    def processes(role: str = "tokens", offset: int = 0, gpu: str = "", before: int = 0) -> int:
        env, started = ShapeEnv(), len(workers)
        for i in range(before):
            env.create_symbol(7 + i, ConstantSource("n"), DimDynamic.DYNAMIC)
        rows = env.create_symbol(5, ConstantSource("n"), DimDynamic.DYNAMIC)
        size = env.create_symintnode(rows, hint=5)
        with FakeTensorMode(shape_env=env):
            fake = torch.empty(size + offset, 4)[offset:]
        ahead = CompileAhead([StepShape(4, 2, 1)], TARGET, 1, gpu=gpu)
        ahead.start([node], {x: fake}, {str(rows): role})
        ahead.wait()
        return len(workers) - started

    names = "_Properties(name='H', {}multi_processor_count={})"
    with caplog.at_level("INFO"):
        assert processes(gpu=names.format("uuid=1-2, ", 132)) == 1
    assert "no note" in caplog.text and "GPU" in caplog.text
    assert processes(gpu=names.format("uuid=3-4, ", 132), before=2) == 0
    assert processes(gpu=names.format("uuid=1-2, ", 114)) == 1
    assert processes(gpu=names.format("uuid=1-2, ", 132), role="rows") == 1
    assert processes(gpu=names.format("uuid=1-2, ", 132), offset=1) == 1


def test_a_failure_is_left_to_the_launch(caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                         ) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("QUIRE_TUNE", "1")
    bad = Launch("quire.attn_ops.kernels.sampling", "no_such_kernel", (), ())
    monkeypatch.setattr(tuning, "launches", lambda *args: {bad})
    ahead = CompileAhead([StepShape(1, 1, 1)], TARGET, 1)
    with caplog.at_level("INFO"):
        ahead.start_tuning(set(), CPU)
        ahead.wait()
    assert "not all were compiled ahead" in caplog.text and "no_such_kernel" in caplog.text


def test_shapes_to_measure(workers: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every candidate's kernel is compiled while the layers are, unless the best is known, or nothing is to be measured."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    tuning.known.cache_clear()
    shape = LinearShape(48, 64, True, False, False, torch.float16)
    ahead = CompileAhead([], TARGET, 1)
    monkeypatch.setenv("QUIRE_TUNE", "0")
    ahead.start_tuning({shape}, CPU)
    assert not workers
    monkeypatch.setenv("QUIRE_TUNE", "1")
    ahead.start_tuning({shape}, CPU)
    names = [one.name for worker in workers for one in worker.launches]
    assert names.count("vector_kernel") == len(tuning.candidates(1, shape, CPU))
    assert names.count("tile_kernel") == sum(len(tuning.candidates(m, shape, CPU)) for m in (8, 32))
    started = len(workers)
    tuning.tune([shape], CPU, timer=lambda run, calls: 1.0)
    ahead.start_tuning({shape}, CPU)
    assert len(workers) == started
    tuning.known.cache_clear()


def test_what_fails_here_does_not_fail_a_start(workers: list[Any], monkeypatch: pytest.MonkeyPatch,
                                               caplog: pytest.LogCaptureFixture) -> None:
    """Nor does it leave processes behind."""
    caplog.set_level("INFO")
    ahead = CompileAhead([StepShape(1, 1, 1)], TARGET, 4)
    monkeypatch.setattr(tuning, "launches", lambda *args: set(SOME))
    import quire.passes.compile.ahead as module

    monkeypatch.setattr(module.subprocess.Popen, "most", 2)
    ahead.start_tuning(set(), CPU)
    assert "Resource temporarily unavailable" in caplog.text
    assert len(workers) == 2 and all(process.killed for process in workers)
    monkeypatch.setattr(tuning, "launches", lambda *args: 1 // 0)
    ahead.start_tuning(set(), CPU)
    assert "ZeroDivisionError" in caplog.text
    ahead.wait()
    assert "compiled ahead by" not in caplog.text


def test_without_inductors_private_functions(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: Any) -> Any:
        raise PermissionError("a folder that is read only")

    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    del os.environ["TRITON_CACHE_DIR"]
    monkeypatch.setattr("torch._inductor.runtime.cache_dir_utils.triton_cache_dir", fail)
    as_inductor_will(torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime", None)  # as if a later torch had no such module
    as_inductor_will(torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", None)
    as_inductor_will(torch.device("cuda", 0))
    assert CompileAhead.for_device([], CPU) is None
    # Without a GPU, asking the driver fails: kernels are compiled at their launch, then.
    monkeypatch.setenv("QUIRE_COMPILE_WORKERS", "2")
    monkeypatch.setattr("torch.cuda.device", fail)
    assert CompileAhead.for_device([], torch.device("cuda", 0)) is None


def test_nothing_is_started_when_all_is_waited_for(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled later, for another cache or other parameters, is launched at once: nothing would end its processes."""
    monkeypatch.setattr(tuning, "launches", lambda *args: set(SOME))
    monkeypatch.setattr("triton.runtime.cache.get_cache_manager", lambda key: Note())
    x, node = call_of(monkeypatch)
    for end in (CompileAhead.wait, CompileAhead.close):
        ahead = CompileAhead([StepShape(1, 1, 1)], TARGET, 1)
        end(ahead)
        ahead.start([node], {x: torch.empty(4)}, {})
        ahead.start_tuning(set(), CPU)
    assert not workers


def test_no_process_outlives_its_owner() -> None:
    """Dropped, or still there when Python ends."""
    script = f"""
import subprocess, sys
import torch
import quire.passes.compile.ahead as module
popen, started = subprocess.Popen, []
def start(command, **options):
    started.append(popen([sys.executable, "-c", "import time; time.sleep(600)"], **options))
    print(started[-1].pid, flush=True)
    return started[-1]
subprocess.Popen = start
module.tuning.launches = lambda *args: {{module.Launch("m", "n", (), ())}}
def begin():
    ahead = module.CompileAhead([], {TARGET}, 1)
    ahead.start_tuning(set(), torch.device("cpu"))
    return ahead
begin()
assert started[0].wait(60) < 0
ahead = begin()
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False, timeout=120,
                          env={**os.environ, "QUIRE_TUNE": "1"})
    assert done.returncode == 3, done.stderr
    for pid in done.stdout.split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_kernels_keep_their_names_when_inductor_comes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor's own settings, made before the first kernel: what it sets later changes nothing."""
    from torch._inductor.runtime import cache_dir_utils, compile_tasks

    inductors = compile_tasks._set_triton_ptxas_path.__wrapped__
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", inductors)  # not just once a process
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    for name in ("TRITON_PTXAS_PATH", "TRITON_CACHE_DIR"):
        del os.environ[name]  # monkeypatch puts back what was there before
    as_inductor_will(torch.device("cuda", 1))
    kept = dict(os.environ)
    assert kept["TRITON_CACHE_DIR"] == os.path.join(cache_dir_utils.cache_dir(), "triton", "1")
    inductors()
    assert dict(os.environ) == kept
    monkeypatch.setenv("TRITON_PTXAS_PATH", "mine")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    as_inductor_will(torch.device("cuda", 0))
    assert (os.environ["TRITON_PTXAS_PATH"], os.environ["TRITON_CACHE_DIR"]) == ("mine", str(tmp_path))


def test_digests_do_not_hold_up_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Triton's and of PyTorch's files are begun in threads, and the start does not wait for them."""
    began, go = [threading.Event(), threading.Event()], threading.Event()
    for event, name in zip(began, ("runtime.triton_compat.triton_key", "codecache.torch_key"), strict=True):
        monkeypatch.setattr(f"torch._inductor.{name}", lambda event=event: event.set() or go.wait(60))
    as_inductor_will(torch.device("cuda", 0))
    assert all(event.wait(60) for event in began) and not go.is_set()
    go.set()
