"""``quire bench matrix`` on a GPU: processes of their own, and times that the hardware allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.graph_runner.cli import main

pytestmark = pytest.mark.alone  # measures


def test_a_small_model(tmp_path: Path) -> None:
    out = tmp_path / "matrix.json"
    cells = "decode/1x1024,decode/8x1024,decode/8x8192,decode/1x8192,prefill/1x16384,online"
    assert main(["bench", "matrix", "--models", "qwen3-0.6b", "--layers", "4", "--cells", cells, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    log = (tmp_path / "matrix.qwen3-0.6b-4l.quire.log").read_text()
    assert not [row["error"] for row in result["rows"] if row["error"]], log
    assert len(result["rows"]) == 7
    for row in result["rows"]:
        assert 0 < row["share_of_floor"] < 1.05, row
    (environment,) = result["environments"].values()
    assert environment["copy_tb_per_s"] > 0.1 and environment["matmul_tflop_per_s"] > 1
