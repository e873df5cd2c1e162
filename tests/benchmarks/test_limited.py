"""A benchmark that is cut off leaves what it has measured (``graph_runner/bench/limited.py``)."""

from __future__ import annotations

import argparse
import json
import os
import threading
from pathlib import Path

import pytest
import torch

from quire.graph_runner.bench.limited import LimitedRows, add_arguments


def test_rows_of_a_cut_off_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    file, ended = tmp_path / "rows.json", threading.Event()
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    results = LimitedRows(parser.parse_args(["--limit", "0.3", "--json", str(file)]), torch.device("cpu"))
    assert results.begin("first")
    results.add({"way": "first", "ms": 1.0})
    assert json.loads(file.read_text())["rows"] == [{"way": "first", "ms": 1.0}]  # before the script ends
    assert results.begin("second") and ended.wait(30) and codes == [124]
    assert not results.begin("third")
    rows = json.loads(file.read_text())["rows"]
    assert rows[1]["way"] == "second" and "cut off" in rows[1]["error"] and "left out" in rows[2]["error"]
