"""The scripts in benchmarks/ load: most of what they do needs a GPU, where a missing import would show late."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_script_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    assert callable(runpy.run_path(str(path), run_name="loaded").get("main")) or path.stem == "hopper"
