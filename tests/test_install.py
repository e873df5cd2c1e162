"""The wheel and the editable install, in a fresh environment beside a user's own packages of the same names as our folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("quire", "attn_ops", "passes", "graph_runner", "integrations", "pyproject.toml", "README.md", "LICENSE")
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "-q")

#: torch.compile finds the backend by its entry point.
BARE_COMPILE = """
import torch, passes, attn_ops, graph_runner
assert {passes.mine, attn_ops.mine, graph_runner.mine} == {True}
class LM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(30, 16), torch.nn.Linear(16, 30)
    def forward(self, input_ids, position_ids=None):
        x = self.embed(input_ids).unflatten(-1, (2, 8)).transpose(1, 2)
        return self.head(torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2))
model = LM().eval()
ids = torch.arange(12)[None]
compiled = torch.compile(model, backend="quire", options={"compiler": "eager"})
with torch.no_grad():
    assert torch.allclose(compiled(ids), model(ids), atol=1e-5)
"""
DOORS = """
import logging, sys, torch, passes, attn_ops, graph_runner
import quire
from transformers import AutoModelForCausalLM
from quire.graph_runner.loading import TINY_MODEL
assert {passes.mine, attn_ops.mine, graph_runner.mine} == {True}
assert quire.__file__.startswith(sys.argv[1]), quire.__file__
ids = torch.arange(3, 15)[None]
model = AutoModelForCausalLM.from_pretrained(TINY_MODEL).eval()
expected = model.generate(ids, max_new_tokens=4, do_sample=False)

paged = quire.paged(model)
assert torch.equal(paged.generate(ids, max_new_tokens=4, do_sample=False), expected)
paged.generate.close()
with quire.Engine(model, num_pages=64) as engine:
    (output,) = engine.generate([ids[0].tolist()], quire.SamplingParams(max_tokens=4, temperature=0))
    assert output.token_ids == expected[0, 12:].tolist()

cache = quire.PagedKVCache.for_model(model, num_pages=4, page_size=8)
meta = quire.CommonAttentionMetadata.build([12], [12], [[3, 1]], page_size=8)
compiled = torch.compile(model, backend="quire", options={"compiler": "eager"})
with torch.no_grad(), quire.step(cache, meta):
    logits = compiled(input_ids=ids, position_ids=meta.positions[None], use_cache=False).logits
assert logits[0, -1].argmax() == expected[0, 12]

class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    @quire.paged(attention="torch_native")
    def forward(self, input_ids, position_ids):
        return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
cache = quire.PagedKVCache.for_model(model, num_pages=4, page_size=8)
with torch.no_grad(), quire.step(cache, meta):
    assert torch.allclose(Mine()(ids, meta.positions[None]), logits, atol=1e-4)

assert quire.explain(model).supported
try:
    quire.assert_attention_sites(model, "other")
except AssertionError as error:
    assert "model.layers.3.self_attn" in str(error)
else:
    raise SystemExit("assert_attention_sites accepted another table")
assert "torch_native" in str(quire.backends())
names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] in ("passes", "attn_ops", "graph_runner")]
assert not names and "quire.graph_runner.model_runner" in logging.root.manager.loggerDict, names
"""
TYPED = """
import torch
import quire
with quire.Engine(torch.nn.Module(), page_size=16) as engine:
    outs = engine.generate(["a"], quire.SamplingParams(max_tokens=3))
reveal_type(quire.Engine)
reveal_type(outs[0].token_ids)
reveal_type(outs[0].text)
reveal_type(quire.PagedKVCache.for_model)
reveal_type(quire.step)
reveal_type(quire.explain(torch.nn.Module()).supported)
quire.SamplingParams(max_token=3)
"""


def run(python: Path | str, *arguments: str, cwd: Path = ROOT) -> str:
    """stdout and stderr of a Python process; fails with them if it does."""
    # Not PYTHONPATH, and not this process's settings for tests.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON_INTERPRET", "VIRTUAL_ENV"))}
    done = subprocess.run([str(python), *arguments], capture_output=True, text=True, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that the working tree gets no build folder."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", str(sources), "-w", str(folder))
    (found,) = folder.glob("quire-*.whl")
    return found


def environment(folder: Path, wheel: Path) -> Path:
    """The Python of a new environment with ``wheel``, which also sees the packages that this environment sees."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    where = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, *PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    # Only the folder, not its .pth files: one of them may be that of an editable quire.
    (where / "others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project: packages with the names of our folders."""
    for name in ("passes", "attn_ops", "graph_runner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
    (tmp_path / "bare.py").write_text(BARE_COMPILE)
    (tmp_path / "doors.py").write_text(DOORS)
    (tmp_path / "typed.py").write_text(TYPED)
    return tmp_path


def test_wheel_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tree = {f"quire/{path.relative_to(ROOT)}" for name in ("attn_ops", "passes", "graph_runner", "integrations")
            for path in (ROOT / name).rglob("*")
            if path.is_file() and (path.suffix in (".py", ".json") or "assets" in path.parts)
            and "__pycache__" not in path.parts}
    assert tree | {"quire/__init__.py", "quire/py.typed"} == {n for n in names if ".dist-info/" not in n}
    assert {"quire/attn_ops/tuning/attention.json", "quire/graph_runner/assets/tiny-llama/model.safetensors"} <= tree


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("venv") / "venv", wheel)


@pytest.mark.slow
@pytest.mark.alone  # its engines size their caches by the GPU's free memory
def test_doors_of_the_wheel_beside_a_users_packages(python: Path, project: Path) -> None:
    run(python, "doors.py", str(python.parents[1]), cwd=project)
    run(python, "bare.py", cwd=project)
    assert "The owl is a bird" in run(python.parent / "quire", "generate", "--max-tokens", "4", "The owl is", cwd=project)
    shutil.rmtree(project / "passes")
    (project / "passes.py").write_text("mine = True\n")
    run(python, "bare.py", cwd=project)


@pytest.mark.slow
def test_mypy_sees_the_types_of_the_wheel(python: Path, project: Path) -> None:
    pytest.importorskip("mypy")
    # Other packages' sources take minutes to read, and what is asked here are quire's types.
    (project / "mypy.ini").write_text("[mypy-torch.*,transformers.*,numpy.*,triton.*,rich.*]\nfollow_imports = skip\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--python-executable", str(python), "--ignore-missing-imports",
                           "--cache-dir", str(project / "cache"), "typed.py"], capture_output=True, text=True, cwd=project)
    said = done.stdout + done.stderr
    for line, shown in ((6, "-> quire.graph_runner.engine.Engine"), (7, "list[int]"), (8, "str"),
                        (9, "-> quire.attn_ops.kv_cache.PagedKVCache"), (10, "[quire.attn_ops.step.Step"), (11, "bool")):
        (revealed,) = [s for s in said.splitlines() if s.startswith(f"typed.py:{line}: note: Revealed type")]
        assert shown in revealed, revealed
    assert 'typed.py:12: error: Unexpected keyword argument "max_token"' in said, said


@pytest.mark.slow
@pytest.mark.alone
def test_editable_install(sources: Path, project: Path, tmp_path: Path) -> None:
    # What `pip install --no-build-isolation -e .` calls, in this environment, which has setuptools.
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=sources)
    (wheel,) = tmp_path.glob("quire-*.whl")
    python = environment(tmp_path / "venv", wheel)
    run(python, "doors.py", str(sources), cwd=project)
