"""Kernels measured in processes of their own: what a script keeps when one hangs or dies, and what a later call adds."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.graph_runner.bench.record import Record, _age
from quire.graph_runner.bench.row_processes import RowTask, measure_rows, or_failure


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
    record = Record(path, torch.device("cpu"), _age() + 100)
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
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row.get("us") for row in rows] == [1.0, None, None, None, None, None, 2.0] and all(row["complete"] for row in rows)
    errors = [row.get("error", "") for row in rows]
    assert "exit code 3" in errors[1] and errors[2].startswith("ValueError: could not convert")
    assert errors[3] == errors[4] == "took more than 2 s" and errors[5].startswith("left out: 2 rows before it")
    assert not measure_rows(Record(None, torch.device("cpu"), _age() + 1), tasks("stuck/hangs"), behave, limit=60)
