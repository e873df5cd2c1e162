"""A script that measures several systems keeps what each has measured, whatever becomes of the others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
    stuck, dies, raises, good = json.loads(out.read_text())["rows"]
    assert stuck["ms"] == 2.0 and "was stopped after" in stuck["error"] and "during its second part" in stuck["error"]
    state = Path(f"/proc/{stuck['child']}/stat")  # gone, or a zombie that nobody has waited for
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    assert dies["way"] == "dies" and "exit code 3" in dies["error"]
    assert raises["way"] == "raises" and raises["error"] == "RuntimeError: is not installed here"
    assert good["ms"] == 1.0 and good["rows"] == 4 and "error" not in good
