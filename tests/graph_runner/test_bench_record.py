"""What a developer's script keeps when a measurement fails or its time ends."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from quire.graph_runner.bench import record as module
from quire.graph_runner.bench.record import OutOfTime, Record


def made(path: Path, seconds: float | None) -> Record:
    """With so many seconds from now on."""
    return Record(path, torch.device("cpu"), None if seconds is None else module._age() + seconds, model="tiny")


def rows(path: Path) -> list[dict[str, object]]:
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
    assert inner["row"] == "inner" and "deadline" in str(inner["error"])
    assert later["row"] == "later" and "left out" in str(later["error"])


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
