"""The scripts in benchmarks/ load: most of what they do needs a GPU, where a missing import would show late."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_script_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    assert callable(runpy.run_path(str(path), run_name="loaded").get("main")) or path.stem == "hopper"


@pytest.mark.slow
def test_a_backend_that_cannot_run_is_a_row(tmp_path: Path) -> None:
    """The rows of the others are measured and kept (test_kit.py: one that hangs), and printed as a table."""
    path, script = tmp_path / "rows.json", BENCHMARKS / "backend_kernels.py"
    measured = ["sparse", "--device", "cpu", "--divide", "512", "--systems", "flashinfer,torch_native", "--json", path]
    subprocess.run([sys.executable, script, *measured], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=120)
    rows = json.loads(path.read_text())["rows"]
    assert [("us" in row, row.get("error")) for row in rows] == [(False, "NotImplementedError: runs on cuda, not cpu")] * 2 + [
        (True, None)] * 2
    shown = subprocess.check_output([sys.executable, script, "table", "--resume", path], text=True)
    assert "| decode 8x64 | NotImplementedError | " in shown


@pytest.mark.slow
def test_a_grid_goes_on(tmp_path: Path) -> None:
    """A second call measures what the first one's file lacks, here with two processes; without --resume it is refused."""
    out, script = tmp_path / "grid.json", BENCHMARKS / "attention_grid.py"
    call = [sys.executable, script, "--device", "cpu", "--systems", "torch_native", "--dims", "64", "--kv", "bfloat16",
            "--batches", "1", "--contexts", "32", "--windows", "", "--no-prefill", "--max-len", "64", "--out", out]
    subprocess.run([*call, "--groups", "1"], check=True, timeout=120)
    assert subprocess.run([*call, "--groups", "1"], capture_output=True).returncode == 2
    more = ["--groups", "1,2,4", "--gpus", "2", "--compilers", "2", "--resume"]
    done = subprocess.check_output([*call, *more], text=True, timeout=120)
    assert "2 of 3 rows to measure" in done
    content = json.loads(out.read_text())
    assert {row["group"] for row in content["rows"] if 0 < row["share"] < 1 and row["differs"] == 0} == {1, 2, 4}
    assert content["environment"]["kv_heads"] == 8


def test_a_session_runs_every_gpu_test_once(tmp_path: Path) -> None:
    """In pieces, of which a later call leaves out those that are done."""
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(f'#!/bin/sh\necho "$*" >> {log}\n')
    python.chmod(0o755)

    def session() -> str:
        env = {**os.environ, "PY": str(python), "OUT": str(tmp_path / "out")}
        return subprocess.run([BENCHMARKS / "gpu_session.sh"], env=env, capture_output=True, text=True, check=True).stdout

    assert session().endswith("left: nothing\n")
    calls = [line for line in log.read_text().splitlines() if "pip install" not in line]
    for path in (BENCHMARKS.parent / "tests" / "gpu").glob("test_*.py"):
        assert sum(f"tests/gpu/{path.name}" in call for call in calls) == 2, path  # many at a time, and alone
    for path in sorted({word for call in calls for word in call.split() if word.endswith(".py")}):
        assert (BENCHMARKS.parent / path).is_file(), path
    log.write_text("")
    assert session() == "==== left: nothing\n" and not log.read_text()


def test_the_whole_suite_on_several_gpus(tmp_path: Path) -> None:
    """Every file once beside others and once alone, but for the kit, which has GPUs of its own."""
    log = tmp_path / "log"
    (tmp_path / "bin").mkdir()
    for name, text in (("python", f'echo "$CUDA_VISIBLE_DEVICES: $*" >> {log}'), ("taskset", 'shift 2; exec "$@"')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PY": "python", "OUT": str(tmp_path / "out"),
           "CORES": "64"}
    for gpus, expected in (("2", ["0", "0", "1,0"]), ("3", ["0", "1", "2,1"]), ("4", ["0", "1,2", "3,2"])):
        log.unlink(missing_ok=True)
        subprocess.run([BENCHMARKS / "gpu_suite.sh"], env={**env, "GPUS": gpus}, check=True)
        calls = [line for line in log.read_text().splitlines() if "-m pytest" in line]
        assert sorted(call.partition(":")[0] for call in calls) == expected
    for path in (BENCHMARKS.parent / "tests" / "gpu").glob("test_*.py"):
        assert sum(f"tests/gpu/{path.name}" in call for call in calls) == 1 + (path.stem != "test_conformance_gpu"), path
    few = subprocess.run([BENCHMARKS / "gpu_suite.sh"], env={**env, "GPUS": "1"}, capture_output=True, text=True)
    assert few.returncode == 2 and "measure.sh tests" in few.stderr


def test_compiled_modules_of_flashinfer_make_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that FlashInfer finds as flashinfer-jit-cache; a call that was cut leaves no half module, and the next goes on."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    script, built = runpy.run_path(str(BENCHMARKS / "flashinfer_modules.py"), run_name="loaded"), []

    class Spec:
        def __init__(self, name: str, broken: bool = False) -> None:
            self.name, self.broken = name, broken

        def build(self, need_lock: bool) -> None:
            if self.broken:
                raise RuntimeError("no compiler")
            built.append(self.name)

        def get_library_path(self) -> Path:
            (file := tmp_path / f"{self.name}.so").write_text(self.name)
            return file

    def write(*specs: Spec) -> None:
        monkeypatch.setitem(script["write"].__globals__, "specs", lambda: specs)
        script["write"](tmp_path / "out", "1.2.3")

    with pytest.raises(RuntimeError):
        write(Spec("a"), Spec("b", broken=True))
    write(Spec("a"), Spec("b"))
    assert built == ["a", "b"]
    package = runpy.run_path(str(tmp_path / "out" / "flashinfer_jit_cache" / "__init__.py"))
    assert package["__version__"] == "1.2.3"
    for name in built:
        assert (Path(package["get_jit_cache_dir"]()) / name / f"{name}.so").read_text() == name
