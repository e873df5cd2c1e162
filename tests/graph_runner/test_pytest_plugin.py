"""The fixture ``quire_snapshot``, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from quire.graph_runner.bench.models import ModelSpec, skeleton
from quire.graph_runner.pytest_plugin import check_snapshot

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = any(e.value == "quire.graph_runner.pytest_plugin" for e in entry_points(group="pytest11"))

# In place of importing torch and tracing a model, which takes seconds.
NO_MODEL = '''
import pytest, sys, types

TABLE = """layer  module                    route      needs                scale
0      model.layers.0.self_attn  interface  GQA 4:2x64, float32  0.125"""

def fail(model, expected):
    assert "4:4x64" not in expected, "a diff"

sys.modules["quire.passes.explain"] = types.SimpleNamespace(attention_sites=lambda model: TABLE, assert_attention_sites=fail)

@pytest.fixture
def model():
    return None
'''

TESTS = '''
def test_right(quire_snapshot, model):
    quire_snapshot(model, """
        layer  module                    route      needs                scale
        0      model.layers.0.self_attn  interface  GQA 4:2x64, float32  0.125
    """)

def test_wrong(quire_snapshot, model):
    before = 1
    quire_snapshot(model, """
        layer  module                    route      needs                scale
        0      model.layers.0.self_attn  interface  GQA 4:4x64, float32  0.125
    """)
    assert before
'''


def run(folder: Path, *arguments: str, **environment: str) -> str:
    """Run pytest on the tests in ``folder``; its output."""
    plugin = [] if INSTALLED else ["-p", "quire.graph_runner.pytest_plugin"]
    env = {name: value for name, value in os.environ.items() if name not in ("EXPECTTEST_ACCEPT", "PYTEST_ADDOPTS")}
    env |= {"PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, *arguments, "."],
                          cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(NO_MODEL)
    (tmp_path / "test_model.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


@pytest.mark.usefixtures("traces_kept")
def test_check_with_a_model() -> None:
    """Right passes; wrong fails with a diff."""
    model = skeleton(ModelSpec("tiny", torch.float32, torch.device("cpu"), layers=1)).eval()
    expected = """
        layer  module                    route      needs                scale
        0      model.layers.0.self_attn  interface  GQA 4:2x64, float32  0.125
    """
    check_snapshot(model, expected, accept=False)
    check_snapshot(model, expected, accept=True)
    with pytest.raises(AssertionError) as failed:
        check_snapshot(model, expected.replace("4:2x64", "4:4x64"), accept=False)
    said = str(failed.value)
    assert "-0      model.layers.0.self_attn  interface  GQA 4:4x64, float32  0.125" in said
    assert "run pytest --quire-accept" in said


def test_without_accept_the_file_stays(folder: Path) -> None:
    said = run(folder)
    assert "1 failed, 1 passed" in said and "a diff" in said
    assert (folder / "test_model.py").read_text() == TESTS


@pytest.mark.slow
def test_without_expecttest_the_file_stays(folder: Path) -> None:
    (folder / "conftest.py").write_text(NO_MODEL + "\nsys.modules['expecttest'] = None\n")
    said = run(folder, "--quire-accept")
    assert "pip install expecttest" in said and "1 failed, 1 passed" in said
    assert (folder / "test_model.py").read_text() == TESTS


@pytest.mark.parametrize("how", ["option", pytest.param("environment", marks=pytest.mark.slow)])
def test_accept_rewrites_the_file(folder: Path, how: str) -> None:
    pytest.importorskip("expecttest")
    said = run(folder, "--quire-accept") if how == "option" else run(folder, EXPECTTEST_ACCEPT="1")
    assert "2 passed" in said, said
    source = (folder / "test_model.py").read_text()
    assert source.count("GQA 4:2x64") == 2 and "4:4x64" not in source
    assert source.startswith(TESTS[: TESTS.index("def test_wrong")])  # what was right is left as it was
    assert source.endswith("assert before\n")
    if how == "environment":  # a second time nothing changes
        assert "2 passed" in run(folder, "--quire-accept")
        assert (folder / "test_model.py").read_text() == source


def test_import_is_light() -> None:
    code = ("import sys, quire.graph_runner.pytest_plugin\n"
            "assert not {'torch', 'transformers', 'quire.passes'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
