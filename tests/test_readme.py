"""The Python of README.md runs as pasted, top to bottom in one namespace, and gives what transformers gives."""

from __future__ import annotations

import logging
import re
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from quire.graph_runner.cli import main
from tests.tiny import hf_greedy, load_model

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The namespace after all blocks."""
    found: dict[str, Any] = {"records": []}
    logger, handler = logging.getLogger("quire"), logging.Handler()
    handler.emit = found["records"].append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "quire:")  # a fallback to transformers' own generate
        for block in BLOCKS:
            exec(compile(block, "README.md", "exec"), found)
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return found


@pytest.mark.slow  # tests/graph_runner and tests/passes have each way of using a model
def test_results(names: dict[str, Any]) -> None:
    plain, tokenizer, ids = load_model(), names["tokenizer"], names["ids"]
    prompts = [tokenizer(p).input_ids for p in names["prompts"]]
    expected = [hf_greedy(plain, p, 32) for p in prompts]
    assert [o.token_ids for o in names["outs"]] == expected
    batch = tokenizer(names["prompts"], return_tensors="pt", padding=True)
    assert torch.equal(names["out"], plain.generate(**batch, max_new_tokens=32))
    with torch.no_grad():
        alone = plain(ids).logits
        following = plain(torch.cat([ids, alone[:, -1:].argmax(-1)], dim=1)).logits[:, -1:]
    for name, logits in (("first", alone), ("logits", torch.cat([following, alone[:, :3]], dim=1))):
        assert (names[name] - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert "forward" not in vars(names["model"]) and "generate" not in vars(names["model"])


def test_names_exist() -> None:
    used = set(re.findall(r"\bquire\.(\w+)[.(]", "\n".join(BLOCKS))) - {"graph_runner"}
    assert used <= set(quire.__all__) and len(used) >= 8
    for block in BLOCKS:
        compile(block, "README.md", "exec")


@pytest.mark.slow
def test_log(names: dict[str, Any]) -> None:
    assert 'logging.getLogger("quire").setLevel(logging.INFO)' in README
    assert any(record.name.startswith("quire.graph_runner.") for record in names["records"])


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for name in re.findall(r"`quire (\w+)`", README):
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0 and capsys.readouterr().out


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (line,) = re.findall(r"^pip install .*$", README, re.MULTILINE)
    for requirement in ("torch>=", "transformers>="):
        (declared,) = [d for d in project["dependencies"] if d.startswith(requirement)]
        assert f'"{declared}"' in line
        assert declared.replace(">=", " ") + " or newer" in README
    assert project["version"] == quire.__version__


def test_times_are_those_of_the_matrix() -> None:
    """The table of times is part of the one that ``matrix_report`` writes; a reader would not know which of two to believe."""
    matrix = (ROOT / "docs" / "performance.md").read_text()
    rows: dict[str, list[str]] = {}
    for line in re.findall(r"^\| ([\w.-]+ \|.*/.*) \|$", matrix, re.MULTILINE):
        name, *cells = (re.sub(r"\*| \([^)]*\)", "", cell).strip() for cell in line.split("|"))
        rows.setdefault(name, []).extend(cells[1:] if cells[0] == "1024" else cells if not cells[0].isdigit() else [])
    shown = [(name, line) for name, line in re.findall(r"^\| ([\w.-]+) \|(.* / .*)\|$", README, re.MULTILINE) if name in rows]
    assert len(shown) == 4
    for name, line in shown:
        cells = [cell.strip() for cell in line.split("|") if cell.strip()]
        decodes, others = rows[name][:4], [rows[name][4:][i] for i in (0, 1, 2, 4)] if len(rows[name]) > 4 else []
        assert cells == decodes + others
    counts = re.findall(r"vllm's time in (\d+ of \d+) cells, more than vllm's in (\d+)", matrix)
    assert re.findall(r"(\d+ of \d+) (?:decode and online cells|prompts)", README) == [of for of, _ in counts]
    slower = int(counts[0][1])
    assert (f"(more than 1 in {slower})" if slower else "(never more than 1)") in README
