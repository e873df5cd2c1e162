"""Rules about the source tree: who imports whom, sizes, that every NOTE resolves, and the reading path."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("attn_ops", "passes", "graph_runner", "integrations")  # installed as quire.attn_ops, ...

# Arrows: integrations -> graph_runner -> passes -> attn_ops. For each package, what it must not import; "quire" is the front
# door.
FORBIDDEN = {
    "attn_ops": {"quire", "quire.passes", "quire.graph_runner", "quire.integrations", "transformers"},
    "passes": {"quire", "quire.graph_runner", "quire.integrations"}, "graph_runner": {"quire", "quire.integrations"},
    "integrations": {"quire"},
}

# In this order; each file uses only terms that the earlier ones define.
READING_PATH = (
    "README.md", "attn_ops/attention.py", "attn_ops/backends/torch_native.py", "passes/rewrite/lower.py",
    "graph_runner/cuda_graph.py", "graph_runner/engine.py",
)
MAX_READING_LINES = 300  # a file of the reading path has fewer
MAX_LINES = 450  # of any source file
MAX_KERNEL_PARAMETERS = 40


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


SOURCES = python_files("quire", *PACKAGES)


def module_name(path: Path) -> str:
    """attn_ops/step.py -> quire.attn_ops.step"""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join((["quire"] if parts[0] != "quire" else []) + [p for p in parts if p != "__init__"])


MODULES = {module_name(path): path for path in SOURCES}
parse = functools.cache(ast.parse)  # most tests read every file


def without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    """``ast.walk`` that leaves out the bodies of ``if TYPE_CHECKING:``."""
    yield node
    typing_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for child in node.orelse if typing_only else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        yield from without_type_checking(child)


def imports(source: str, modules: Iterable[str] = ()) -> dict[str, int]:
    """Every module imported at any depth, absolutely or by a literal name, with its line; ``from a import b`` imports a.b if
    that is one of ``modules``, else a. TYPE_CHECKING is left out."""
    modules, found = set(modules), {}
    for node in without_type_checking(parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else str(node.module) for name in inside]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                names = [node.args[0].value]
        for name in names:
            found.setdefault(name, getattr(node, "lineno", 0))
    return found


def test_imports_sees_every_kind() -> None:
    source = """
import a.b, c as d
from e.f import g
from e import f
if TYPE_CHECKING:
    import not_this
else:
    import m
def lazy():
    from h import i
    importlib.import_module("j.k")
    __import__("l")
    import_module(variable)
"""
    assert sorted(imports(source, {"e.f"})) == ["a.b", "c", "e.f", "h", "j.k", "l", "m"]
    with pytest.raises(AssertionError, match="absolute"):
        imports("from . import x")


def package_of(module: str) -> str:
    """quire.attn_ops.step -> quire.attn_ops; torch.nn -> torch; quire -> quire."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "quire" and len(parts) > 1 and parts[1] in PACKAGES else parts[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package: str) -> None:
    files = python_files(package)
    assert files, f"{package}/ has no Python files"
    wrong = [f"{path.relative_to(ROOT)}:{line} imports {module}" for path in files
             for module, line in imports(path.read_text(), MODULES).items() if package_of(module) in FORBIDDEN[package]]
    assert not wrong, f"{package} must not import {sorted(FORBIDDEN[package])}:\n" + "\n".join(wrong)


def test_no_import_circles_between_files() -> None:
    """Imports in functions count: they hide a circle, and do not undo it."""
    edges = {name: set(imports(path.read_text(), MODULES)) & set(MODULES) for name, path in MODULES.items()}
    assert sum(map(len, edges.values())) > len(edges)
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import circle: " + " <- ".join(error.args[1]))


def assignments_to_modules(source: str, modules: Iterable[str]) -> list[tuple[int, str, str]]:
    """(line, module, attribute) of each assignment to an attribute of an imported module, ``setattr`` and ``del`` included."""
    modules, tree, names, found = set(modules), parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        target = attribute = None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            target, attribute = ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr") and len(node.args) > 1:
            target, attribute = ast.unparse(node.args[0]), ast.unparse(node.args[1])
        if target is not None and names.get(target) in modules:
            found.append((node.lineno, names[target], str(attribute)))
    return found


def test_assignments_to_modules() -> None:
    source = """
import a.b
import a.c as c
from a import d, e
a.b.x = 1
c.y += 1
def f():
    setattr(d, "z", 2)
    del c.w
    c.v.u = 3
    e.x = 4
"""
    assert assignments_to_modules(source, {"a.b", "a.c", "a.d"}) == [
        (5, "a.b", "x"), (6, "a.c", "y"), (8, "a.d", "'z'"), (9, "a.c", "w")]


def test_no_package_assigns_into_another() -> None:
    """An upward import in disguise."""
    wrong = [f"{path.relative_to(ROOT)}:{line} assigns {module}.{attribute}" for name, path in MODULES.items()
             for line, module, attribute in assignments_to_modules(path.read_text(), MODULES)
             if package_of(module) != package_of(name)]
    assert not wrong, "\n".join(wrong)


def test_pyproject_lists_every_package() -> None:
    """A folder of modules that is not listed, or has no __init__.py, would be missing in the wheel."""
    listed, folders = PROJECT["tool"]["setuptools"]["packages"], PROJECT["tool"]["setuptools"]["package-dir"]
    on_disk = {path.parent for path in SOURCES}
    missing = sorted(str(folder.relative_to(ROOT)) for folder in on_disk if not (folder / "__init__.py").exists())
    assert not missing, f"no __init__.py in {missing}"
    assert sorted(listed) == sorted(module_name(folder / "__init__.py") for folder in on_disk)
    assert folders == {module_name(ROOT / folder / "__init__.py"): folder for folder in ("quire", *PACKAGES)}


def names_backend(source: str, name: str) -> list[int]:
    """Lines that import the backend, hold its name as a string, or mention it in text as a backend."""
    if name not in source:
        return []
    found = [line for module, line in imports(source).items() if module.startswith(f"quire.attn_ops.backends.{name}")]
    found += [node.lineno for node in ast.walk(parse(source)) if isinstance(node, ast.Constant) and node.value == name]
    quoted = re.compile(rf"backends[/.]{name}\b|attention=.?[\"']{name}\b|``{name}``|['\"]{name}['\"].{{0,30}}backend|"
                        rf"\bthe {name} backend|\b{name}_(rope_)?paged_attention")
    return sorted({*found, *(i for i, line in enumerate(source.splitlines(), 1) if quoted.search(line))})


def test_names_backend() -> None:
    source = """
import kernels_of_mine
from quire.attn_ops.backends.mine import BACKEND
find_spec("mine")
raise ValueError("use attention='mine'")
# see attn_ops/backends/mine.py
# mine is mine
"""
    assert names_backend(source, "mine") == [3, 4, 5, 6]


def backend_names() -> list[str]:
    return list(PROJECT["project"]["entry-points"]["quire.backends"])


@pytest.mark.parametrize("name", backend_names())
def test_no_backend_is_named_outside_its_own_file(name: str) -> None:
    own = ROOT / "attn_ops" / "backends" / name
    assert own.is_dir() or own.with_suffix(".py").exists()
    # The language of the kernels is no backend, nor is a package that several backends call.
    library = {"find_spec(\"triton\")", "import triton", "missing(\"flashinfer\"", "no_compiler(\"flashinfer\""}
    wrong = []
    for path in python_files("attn_ops"):
        if path == own.with_suffix(".py") or own in path.parents:
            continue
        source = path.read_text()
        lines = source.splitlines()
        wrong += [f"{path.relative_to(ROOT)}:{line}: {lines[line - 1].strip()}" for line in names_backend(source, name)
                  if not any(use in lines[line - 1] for use in library) and "packages=" not in lines[line - 1]]
    assert not wrong, "\n".join(wrong)


def kernels(source: str) -> dict[str, int]:
    """The number of parameters of each ``@triton.jit`` function, by name."""
    found = {}
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef) and any(re.match(r"(triton\.)?jit\b", ast.unparse(d))
                                                     for d in node.decorator_list):
            found[node.name] = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
    return found


def test_kernels_have_few_parameters() -> None:
    found = {f"{path.relative_to(ROOT)}: {name}": count for path in SOURCES
             for name, count in kernels(path.read_text()).items()}
    assert len(found) > 10
    large = {name: count for name, count in found.items() if count > MAX_KERNEL_PARAMETERS}
    assert not large, f"more than {MAX_KERNEL_PARAMETERS} parameters; group them in named tuples: {large}"


def test_files_are_short() -> None:
    long = {str(path.relative_to(ROOT)): lines for path in SOURCES
            if (lines := len(path.read_text().splitlines())) > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines: {long}"


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
    files = [path for path in python_files("quire", *PACKAGES, "tests", "benchmarks", "examples") if path != Path(__file__)]
    found = {path: notes(path.read_text()) for path in files}
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
    assert lines < MAX_READING_LINES, f"{name} has {lines} lines; a file of the reading path has under {MAX_READING_LINES}"
    readme = (ROOT / "README.md").read_text()
    # README.md is the start of the path, and lists the other five.
    link = re.compile(r"\]\((?:\./)?" + re.escape(name) + r"(?:#[^)]*)?\)")
    assert name == "README.md" or link.search(readme), f"README.md does not link to {name}"
