"""The attention times that ship with quire are those of the results files."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from quire.attn_ops.tuning.attention import STORE, load

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*_attention.json"))


@pytest.fixture
def measurements() -> Any:
    return runpy.run_path(str(BENCHMARKS / "attention_choices.py"))["measurements"]


def test_what_ships_is_what_was_measured(measurements: Any) -> None:
    found = [one for path in RESULTS for one in measurements(path)]
    assert len(found) >= 2 and load(STORE.shipped) == tuple(found)


def test_only_plain_attention(measurements: Any, tmp_path: Path) -> None:
    content = json.loads(RESULTS[0].read_text())
    content["rows"][0]["needs"] += ", window"
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not one plain site"):
        measurements(changed)
