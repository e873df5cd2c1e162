"""``examples/backend``: installed as a distribution, it is found by its entry point and passes the conformance kit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import quire

EXAMPLE = Path(quire.__file__).parents[1] / "examples" / "backend"


@pytest.mark.parametrize("checks", ["batch", pytest.param("", marks=pytest.mark.slow, id="all")])
def test_installed_it_passes_the_kit(checks: str, tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLE, source)
    code = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = source.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "quire.attn_ops.conformance", "--backend", "sdpa_example", "--quick", "--only", checks],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr
    assert checks or "not declared: refused" in done.stdout
    files = [path for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml", ".md")]
    assert sum(len(path.read_text().splitlines()) for path in files) < 150
