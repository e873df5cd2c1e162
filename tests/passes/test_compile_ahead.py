"""Kernels compiled ahead: those that are noted are those that steps launch, and their first launch finds them compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

pytest.importorskip("triton")

from attn_ops import small_linear_tuning as tuning
from attn_ops.backend import get_backend
from attn_ops.kv_cache import PagedKVCache
from attn_ops.launch import Launch, TensorArgument, implementations, launch, noting
from attn_ops.metadata import CommonAttentionMetadata
from attn_ops.small_linear_tuning import LinearShape
from attn_ops.step import Step
from passes.capture import PagedModel
from passes.compile_ahead import CompileAhead, StepShape, _Batch, as_inductor_will, launches_of
from passes.options import QuireOptions
from tests.tiny import load_model

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 8


def kernel(x, n, m, SIZE: tl.constexpr, scale=1.0):  # noqa: F821
    raise AssertionError("launched")


class Kernel:
    fn = staticmethod(kernel)
    launched: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.launched.append((grid, args, options))


def test_a_launch_is_noted_up_to_what_its_code_depends_on() -> None:
    def noted(*args: Any, **options: Any) -> Launch:
        with noting() as found:
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


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_is_noted_is_what_steps_launch(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the attention kernels, which run in the interpreter as they do on a GPU."""
    backend = get_backend("triton")
    why = backend.available(torch.device("cpu"))
    if why:
        pytest.skip(why)
    model = load_model()
    ahead = CompileAhead([], ("cuda", 90, 32), 1)
    noted: dict[StepShape, set[Launch]] = {}
    shapes = [StepShape(3, 3, WIDTH), StepShape(1, 1, WIDTH), StepShape(9, 3, WIDTH), StepShape(12, 1, WIDTH)]

    def start(nodes: Any, values: Any, roles: Any, fits: Any) -> None:
        for shape in shapes:
            for node in nodes:
                if node.target in backend.ops:
                    noted.setdefault(shape, set()).update(launches_of(node, values, roles, [shape]))

    monkeypatch.setattr(ahead, "start", start)
    # Its compiler is Inductor, which would need no kernel of the backend here: what is compiled does not matter.
    monkeypatch.setattr("passes.compilers.inductor", lambda gm, inputs: gm.forward)
    paged = PagedModel(model, QuireOptions(attention="triton", page_size=16, layout=layout), ahead=ahead)
    from attn_ops.backends.triton import decode, extend, write

    launched: set[Launch] = set()
    for module in (decode, extend, write):
        def record(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
            launched.add(Launch.of(kernel, args, options))
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


def test_an_op_that_fails_with_fakes_keeps_what_it_noted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
                                                         ) -> None:
    """In steps of one shape; those of others count, and so do other ops."""
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
    node = graph.call_function(op, (x,))
    with caplog.at_level("INFO"):
        for tokens, sizes in ((4, [7, 9]), (16, [7])):
            found = launches_of(node, {x: torch.empty(tokens)}, {}, [StepShape(tokens, 1, 1)])
            assert sorted(one.arguments[3] for one in found) == sizes
    assert caplog.text.count("are left to their first launch: RuntimeError: no such thing as a fake") == 1


SCRIPT = """
import json, os, random, sys
import torch
from attn_ops import compile_worker
from passes.compile_ahead import CompileAhead, StepShape
from tests.launches import _as_if_on_an_h200, compile_ahead
from tests.tiny import load_model

def kernels():
    return sorted(f for _, _, files in os.walk(os.environ["TRITON_CACHE_DIR"]) for f in files if f.endswith(".cubin"))

model = load_model(dtype=torch.bfloat16)
shapes = [StepShape(*s, 64) for s in ((1, 1), (64, 64), (70, 5))]
ahead = CompileAhead(shapes, ("cuda", 90, 32), 2)
compile_ahead(model, ahead)
batches = list(ahead._batches)
processes = [len(b.processes) for b in batches]
launches = [one for b in batches for one in b.launches]
ahead.wait()
first = kernels()
again = CompileAhead(shapes, ("cuda", 90, 32), 2)
compile_ahead(model, again)
more = len(again._batches)
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
    """For an H200, without one: in processes of their own, and then here; nothing is compiled twice."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["processes"]) == 2 and all(1 <= n <= 2 for n in found["processes"])
    assert {"decode_kernel", "extend_kernel", "rope_kv_write_kernel", "vector_kernel", "draw_kernel"} <= set(found["names"])
    assert len(found["first"]) >= len(found["names"]) and found["after"] == found["first"]
    assert found["more"] == 0, "compiled again though a note says that it was done"


def test_a_failure_is_left_to_the_launch(caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                         ) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ahead = CompileAhead([StepShape(1, 1, 1)], ("cuda", 90, 32), 1)
    bad = Launch("attn_ops._kernels.draw", "no_such_kernel", (), ())

    class Note:
        def put(self, *args: Any) -> None:
            raise AssertionError("noted as done")

    with caplog.at_level("INFO"):
        ahead._batches.append(ahead._run([bad], Note()))
        ahead.wait()
    assert "not all were compiled ahead" in caplog.text and "no_such_kernel" in caplog.text and not ahead._batches


def test_shapes_to_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every candidate's kernel is compiled while the layers are, unless the best is known, or nothing is to be measured."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    tuning._known.cache_clear()
    shape, cpu = LinearShape(48, 64, True, False, False, torch.float16), torch.device("cpu")
    started: list[list[Launch]] = []
    ahead = CompileAhead([], ("cuda", 90, 32), 1)
    monkeypatch.setattr(ahead, "_run", lambda found, note: started.append(found) or _Batch(found, [], [], note))
    monkeypatch.setenv("QUIRE_TUNE", "0")
    ahead.start_tuning({shape}, cpu)
    assert not started
    monkeypatch.setenv("QUIRE_TUNE", "1")
    ahead.start_tuning({shape}, cpu)
    names = [one.name for one in started[0]]
    assert names.count("vector_kernel") == len(tuning.CANDIDATES[True])
    assert names.count("tile_kernel") == 2 * len(tuning.CANDIDATES[False])  # for tiles of 16 and of 32 tokens
    ahead.wait()
    tuning.tune([shape], cpu, timer=lambda run, calls: 1.0)
    ahead.start_tuning({shape}, cpu)
    assert len(started) == 1
    tuning._known.cache_clear()


def test_only_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_COMPILE_WORKERS", "0")
    monkeypatch.setattr("passes.compile_ahead.as_inductor_will", lambda device: None)
    assert CompileAhead.for_device([], torch.device("cpu")) is None
    assert CompileAhead.for_device([], torch.device("cuda")) is None


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
