"""The attention times that ship with quire are those of the results files."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from quire.attn_ops.tuning.attention import STORE, load

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
#: In the order of the command in attention_choices.py: later times replace earlier ones.
RESULTS = [BENCHMARKS / "results" / f"h200_{name}.json" for name in ("attention", "mla", "attention_windows")]


@pytest.fixture
def measurements() -> Any:
    return runpy.run_path(str(BENCHMARKS / "attention_choices.py"))["measurements"]


def test_what_ships_is_what_was_measured(measurements: Any) -> None:
    found = {one.identity: one for path in RESULTS for one in measurements(path)}
    assert len(found) == 10 and load(STORE.shipped) == tuple(found.values())


def test_the_grid_becomes_measurements(measurements: Any, tmp_path: Path) -> None:
    """Of quire's backends, plain decode and prefill only: windows and codes are other classes of shapes."""
    cell = {"kind": "decode", "group": 2, "dim": 64, "kv": "bfloat16", "batch": 8, "context": 1024, "window": None,
            "system": "triton", "us": 9.0}
    rows = [cell, {**cell, "batch": 1, "us": 5.0}, {**cell, "kind": "extend", "us": 70.0}, {**cell, "window": 512},
            {**cell, "kv": "int8"}, {**cell, "system": "vllm-fa3"}, {**cell, "system": "triton:warps=8"},
            {**cell, "dim": 96, "us": None, "error": "x"}]
    del rows[-1]["us"]
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"rows": rows, "conditions": {
        "device": "H", "versions": {"torch": "2.11.0+cu130", "triton": "3.6.0"}, "page_size": 16, "kv_heads": 8,
        "date": "2026-01-02T03:04:05"}}))
    (found,) = measurements(path)
    assert found.shape.group == 2 and found.torch == "2.11.0" and found.packages == {"triton": "3.6.0"}
    assert found.decode_us == {"8x1024": 9.0, "1x1024": 5.0} and found.extend_us == {"8x1024": 70.0}


def test_only_plain_attention(measurements: Any, tmp_path: Path) -> None:
    content = json.loads(RESULTS[0].read_text())
    content["rows"][0]["needs"] += ", window"
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not one plain site"):
        measurements(changed)
