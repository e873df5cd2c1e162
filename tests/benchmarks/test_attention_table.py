"""docs/attention.md is what the results say, and the script counts a cell where it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "attention_table.py"


def test_the_page_is_of_the_results(tmp_path: Path) -> None:
    page = tmp_path / "attention.md"
    names = (ROOT / "benchmarks" / "attention_files.txt").read_text().split()
    subprocess.run([sys.executable, SCRIPT, *(ROOT / "benchmarks" / "results" / name for name in names), "--docs", page],
                   check=True, timeout=60)
    assert page.read_text() == (ROOT / "docs" / "attention.md").read_text(), (
        "python benchmarks/attention_table.py $(sed 's|^|benchmarks/results/|' benchmarks/attention_files.txt) "
        "--docs docs/attention.md --plot docs/attention.png")


@pytest.mark.parametrize(("ours", "rival", "differs", "kv", "line"), [
    (100.0, 90.0, 0.0, "bfloat16", "decode 4 x 128, bfloat16, 8 x 8192 | 100.0 | 70 % | fast 90.0 | 1.11"),  # behind a rival
    (100.0, 96.0, 0.0, "bfloat16", ""),  # within 1.05
    (100.0, 90.0, 0.2, "bfloat16", ""),  # that rival computes something else
    (100.0, 90.0, 0.2, "int8", "decode 4 x 128, int8, 8 x 8192 | 100.0 | 70 % | fast 90.0 | 1.11"),  # it has no scale per token
    (150.0, 150.0, 0.0, "bfloat16", "decode 4 x 128, bfloat16, 8 x 8192 | 150.0 | 47 % | fast 150.0 | 1.00"),  # the floor
])
def test_what_counts_as_slow(ours: float, rival: float, differs: float, kv: str, line: str, tmp_path: Path) -> None:
    cell = dict(kind="decode", group=4, dim=128, kv=kv, batch=8, context=8192, window=None, bytes=268_000_000)
    rows = [{**cell, "system": "triton", "us": ours, "share": 70 / ours, "differs": 0.0},
            {**cell, "system": "fast", "us": rival, "share": 70 / rival, "differs": differs},
            {**cell, "system": "triton:block_n=64", "us": 1.0, "share": 70.0, "differs": 0.0}]  # no rival
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": rows}))
    shown = subprocess.check_output([sys.executable, SCRIPT, path], text=True, timeout=60)
    assert [row.strip("| ") for row in shown.splitlines() if row.startswith("| decode")] == [line] * bool(line)
