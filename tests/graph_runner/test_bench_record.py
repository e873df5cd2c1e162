"""What a developer's script keeps when a measurement fails, hangs or dies, or its time ends; and what a later call adds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.graph_runner.bench import record as module
from quire.graph_runner.bench.record import OutOfTime, Record
from quire.graph_runner.bench.row_processes import RowTask, measure_rows, or_failure


def made(path: Path, seconds: float | None) -> Record:
    """With so many seconds from now on."""
    return Record(path, torch.device("cpu"), None if seconds is None else module._age() + seconds, model="tiny")


def rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]


def test_a_measurement_that_takes_too_long_is_interrupted_and_the_rows_before_it_stay(tmp_path: Path) -> None:
    record = made(tmp_path / "rows.json", 1.5)

    def run() -> None:
        record.keep({"row": "first", "ms": 1.0})
        record.measure("inner", lambda: time.sleep(60))

    began = time.monotonic()
    assert record.measure("outer", run)
    assert time.monotonic() - began < 10
    assert not record.measure("later", lambda: record.keep({"row": "later"}))
    first, inner, later = rows(tmp_path / "rows.json")
    assert first == {"row": "first", "ms": 1.0}
    assert inner["row"] == "inner" and "deadline" in str(inner["error"]) and "<lambda>" in inner["in"][0]
    assert later["row"] == "later" and "left out" in str(later["error"])


def test_what_is_measured_does_not_take_the_interruption_for_an_error_of_its_own(tmp_path: Path) -> None:
    """As torch.compile would, whose error would then stand in the row."""
    record = made(tmp_path / "rows.json", 1.5)

    def run() -> None:
        try:
            time.sleep(60)
        except Exception as error:
            raise ValueError("the model cannot be compiled") from error

    assert not record.measure("slow", run)
    assert "deadline" in str(rows(tmp_path / "rows.json")[0]["error"])


def test_a_measurement_that_cannot_be_interrupted_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, ended, codes = made(tmp_path / "rows.json", 1.5), threading.Event(), list[int]()
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))

    def run() -> None:
        record.keep({"row": "first", "ms": 1.0})
        try:
            ended.wait(30)
        except OutOfTime:
            ended.wait(30)

    record.measure("stuck", run)
    assert codes == [124]
    first, stuck = rows(tmp_path / "rows.json")
    assert first["row"] == "first" and stuck["row"] == "stuck" and "cut off" in str(stuck["error"])


def test_a_failure_becomes_a_row_and_the_next_measurement_runs(tmp_path: Path) -> None:
    record = made(tmp_path / "rows.json", None)
    assert not record.measure("broken", lambda: {}["name"])
    assert record.measure("next", lambda: record.keep({"row": "next"}))
    assert [row["row"] for row in rows(tmp_path / "rows.json")] == ["broken", "next"]
    assert rows(tmp_path / "rows.json")[0]["error"] == "KeyError: 'name'"


def test_what_needs_more_time_than_is_left_is_not_begun(tmp_path: Path) -> None:
    record = made(tmp_path / "rows.json", 20)
    assert not record.measure("long", lambda: record.keep({"row": "long"}), needs=30)
    assert "left out: " in str(rows(tmp_path / "rows.json")[0]["error"])


# -- ways to run a model, each in a process of its own


SCRIPT = """
import os, subprocess, sys, time
from quire.graph_runner.bench import record
from quire.graph_runner.bench.workers import run_apart

def measure(way, results, args):
    if way == "good":
        results.keep({"way": way, "ms": 1.0})
    if way == "raises":
        raise RuntimeError("is not installed here")
    if way == "dies":
        os._exit(3)
    if way == "stuck":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        results.keep({"way": way, "ms": 2.0, "child": child.pid, "doing": "its second part"})
        time.sleep(100)

shares = {"stuck": 1.0, "dies": 1.0, "raises": 1.0, "good": 1.0}
run_apart(record.script(None), shares, measure, lambda rows: [row.update(rows=len(rows)) for row in rows])
"""


@pytest.mark.slow
def test_each_way_ends_alone_and_all_rows_are_in_one_file(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "rows.json"
    script.write_text(SCRIPT)
    began = time.monotonic()
    subprocess.run([sys.executable, script, "--json", out, "--deadline", "120"], check=True, timeout=180)
    assert time.monotonic() - began < 120
    stuck, dies, raises, good = rows(out)
    assert stuck["ms"] == 2.0 and "was stopped after" in stuck["error"] and "during its second part" in stuck["error"]
    state = Path(f"/proc/{stuck['child']}/stat")  # gone, or a zombie that nobody has waited for
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    assert dies["way"] == "dies" and "exit code 3" in dies["error"]
    assert raises["way"] == "raises" and raises["error"] == "RuntimeError: is not installed here"
    assert good["ms"] == 1.0 and good["rows"] == 4 and "error" not in good


# -- kernels, measured in processes of their own


@or_failure
def behave(how: str) -> dict[str, Any]:
    if how == "dies":
        os._exit(3)
    if how == "hangs":
        time.sleep(100)
    return {"us": float(how)}


def tasks(*names: str) -> list[RowTask]:
    return [RowTask({"system": name.partition("/")[0], "shape": i}, name.partition("/")[2], name.partition("/")[0])
            for i, name in enumerate(names)]


def record_of(path: Path, *resume: Path) -> Record:
    record = made(path, 100)
    record.go_on(resume, ("system", "shape"))
    return record


def test_only_rows_that_no_file_has_are_measured(tmp_path: Path) -> None:
    earlier, other = tmp_path / "earlier.json", tmp_path / "other.json"
    for path, shape in ((earlier, 0), (other, 1)):
        path.write_text(json.dumps({"rows": [{"system": "a", "shape": shape, "us": 9.0},
                                             {"system": "a", "shape": 5, "us": 1.0}]}))
    record = record_of(earlier, other)
    assert measure_rows(record, tasks("a/1", "a/2"), behave, limit=1)  # starts no process
    assert [(row["shape"], row["us"]) for row in record.rows] == [(0, 9.0), (5, 1.0), (1, 9.0)]
    record = Record(earlier, torch.device("cpu"))
    record.go_on([], ("system", "shape"), drop=lambda row: row["shape"] == 5)
    assert record.has({"system": "a", "shape": 0}) and not record.has({"system": "a", "shape": 5})


@pytest.mark.slow
def test_a_process_that_hangs_or_dies_costs_its_row(tmp_path: Path) -> None:
    record = record_of(tmp_path / "rows.json")
    asked = tasks("good/1", "bad/dies", "bad/nonsense", "stuck/hangs", "stuck/hangs", "stuck/1", "last/2")
    assert measure_rows(record, asked, behave, limit=2, process_per_group=True,
                        complete=lambda row: row | {"complete": True})
    found = rows(tmp_path / "rows.json")
    assert [row.get("us") for row in found] == [1.0, None, None, None, None, None, 2.0]
    assert all(row["complete"] for row in found)
    errors = [row.get("error", "") for row in found]
    assert "exit code 3" in errors[1] and errors[2].startswith("ValueError: could not convert")
    assert errors[3] == errors[4] == "took more than 2 s" and errors[5].startswith("left out: 2 rows before it")
    assert not measure_rows(Record(None, torch.device("cpu"), module._age() + 1), tasks("stuck/hangs"), behave, limit=60)
