"""Rules about the source tree: which package may import which, that every NOTE resolves, and the reading path."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("attn_ops", "passes", "graph_runner")

# Arrows: graph_runner -> passes -> attn_ops. For each package, the top-level modules that it must not import.
FORBIDDEN = {
    "attn_ops": {"passes", "graph_runner", "quire", "transformers"},
    "passes": {"graph_runner", "quire"},
}

# In this order; each file uses only words that the earlier ones define.
READING_PATH = (
    "README.md",
    "attn_ops/attention.py",
    "attn_ops/backends/torch_native.py",
    "passes/rewrite/lower.py",
    "graph_runner/cuda_graph.py",
    "graph_runner/engine.py",
)
MAX_LINES = 300  # each file of the reading path stays under this


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_modules(source: str) -> list[tuple[int, str]]:
    """(line, top-level module) of every absolute import, at any depth, and of every import by a literal name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                names = [node.args[0].value]
        found += [(node.lineno, name.partition(".")[0]) for name in names]
    return found


def test_imported_modules_sees_every_kind_of_import() -> None:
    source = """
import a.b, c as d
from e.f import g
from . import not_absolute
def lazy():
    from h import i
    importlib.import_module("j.k")
    __import__("l")
    import_module(variable)
"""
    assert [name for _, name in sorted(imported_modules(source))] == ["a", "c", "e", "h", "j", "l"]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package: str) -> None:
    files = python_files(package)
    assert files, f"{package}/ has no Python files"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files
        for line, module in imported_modules(path.read_text())
        if module in FORBIDDEN[package]
    ]
    assert not wrong, f"{package} must not import {sorted(FORBIDDEN[package])}:\n" + "\n".join(wrong)


def test_every_folder_of_a_package_has_an_init() -> None:
    """The wheel holds regular packages only: a folder without `__init__.py` would be left out of it."""
    folders = {path.parent for path in python_files(*PACKAGES) if "assets" not in path.parts}
    missing = sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists())
    assert not missing, f"no __init__.py in {missing}"


def test_test_folders_do_not_shadow_the_packages() -> None:
    """With `tests/attn_ops/__init__.py` but no `tests/__init__.py`, pytest would import those tests as `attn_ops`."""
    if not (ROOT / "tests" / "__init__.py").exists():
        shadowing = [package for package in PACKAGES if (ROOT / "tests" / package / "__init__.py").exists()]
        assert not shadowing, f"tests/__init__.py is missing beside {shadowing}"


def notes(source: str) -> tuple[list[str], list[str]]:
    """Names of the NOTEs that the source defines, and of those that it refers to.

    `NOTE [name]` at the start of a line of a comment or docstring defines; anywhere else, or after "see", it refers.
    A reference may be broken over two lines of a comment.
    """
    defined, referred = [], []
    for match in re.finditer(r"\bNOTE \[([^\]]+)\]", re.sub(r"\n[ \t]*#[ \t]*", "\n", "\n" + source)):
        before = re.sub(r"[\s#\"']+$", "", match.string[: match.start()])
        gap = match.string[len(before) : match.start()]
        name = " ".join(match[1].split())
        starts_line = "\n" in gap and not re.search(r"\bsee$", before, re.IGNORECASE)
        (defined if starts_line else referred).append(name)
    return defined, referred


def test_notes_tells_definitions_from_references() -> None:
    source = '''
# NOTE [Slot -1]: why
#   NOTE [Indented]
"""NOTE [First words of a docstring]"""
x = 1  # See NOTE [Slot -1]
# a comment of two lines, see
# NOTE [Indented].
# Another one. See NOTE [First words
# of a docstring].
raise ValueError("as NOTE [Missing] says")
'''
    assert notes(source) == (
        ["Slot -1", "Indented", "First words of a docstring"],
        ["Slot -1", "Indented", "First words of a docstring", "Missing"],
    )


def test_every_note_resolves() -> None:
    files = [path for path in python_files(*PACKAGES, "tests", "benchmarks", "examples") if path != Path(__file__)]
    found = {path: notes(path.read_text()) for path in [*files, ROOT / "quire/__init__.py"] if path.exists()}
    definitions = Counter(name for defined, _ in found.values() for name in defined)
    dangling = [
        f"{path.relative_to(ROOT)}: NOTE [{name}]"
        for path, (_, referred) in found.items()
        for name in referred
        if name not in definitions
    ]
    assert not dangling, "these refer to a NOTE that is defined nowhere:\n" + "\n".join(dangling)
    repeated = sorted(name for name, count in definitions.items() if count > 1)
    assert not repeated, f"NOTEs defined more than once (write `See NOTE [x]` to refer to one): {repeated}"


@pytest.mark.parametrize("name", READING_PATH)
def test_reading_path(name: str) -> None:
    path = ROOT / name
    assert path.exists(), f"{name} is on the reading path and does not exist"
    lines = len(path.read_text().splitlines())
    assert lines < MAX_LINES, f"{name} has {lines} lines; a file of the reading path has under {MAX_LINES}"
    readme = (ROOT / "README.md").read_text()
    # README.md is the start of the path, and lists the other five.
    link = re.compile(r"\]\((?:\./)?" + re.escape(name) + r"(?:#[^)]*)?\)")
    assert name == "README.md" or link.search(readme), f"README.md does not link to {name}"
