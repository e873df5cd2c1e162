"""Mutation check of the proofs: break each rule, and name the test that goes red. ``make mutations`` writes ``mutations.md``.

Each mutant (``mutants*.py``) is applied to a temporary copy of the checkout, and only its own tests run there, in a process
that is forked after torch and transformers were imported. A mutant whose old text is no longer in its file exactly once is an
error, as is one without a red test, unless it says which other rule refuses the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.adversarial.mutants import Mutant
from tests.adversarial.mutants_of_models import MUTANTS

ROOT = Path(__file__).resolve().parent.parent.parent
REPORT = Path(__file__).with_suffix(".md")
PACKAGES = ("attn_ops", "passes", "graph_runner", "integrations")
LIMIT = 300  # seconds for the tests of one mutant
#: What a broken rule never raises: such a failure is one of the mutant itself.
_OWN_ERRORS = ("NameError", "ImportError", "UnboundLocalError")


class Seen(NamedTuple):
    """The first red test of a mutant and the last line of its error; both empty if all passed."""

    test: str
    error: str
    seconds: float


def text_of(mutant: Mutant, root: Path = ROOT) -> str:
    """The mutated file.

    Raises:
        ValueError: the old text is not there, or more than once.
    """
    text = (root / mutant.file).read_text()
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.file} has the text of the mutant {mutant.rule!r} {count} times: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def copy_checkout(to: Path) -> None:
    """The sources and tests, laid out so that ``quire`` is this copy whatever is installed."""
    skip = shutil.ignore_patterns(".venv", ".git", "build", "dist", "*.egg-info", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, to, ignore=skip, symlinks=True)
    for package in PACKAGES:
        (to / "quire" / package).symlink_to(to / package)


def red_test(mutant: Mutant, copy: Path) -> Seen:
    """Run the mutant's tests in ``copy``, with its file mutated meanwhile."""
    mutated, began = text_of(mutant), time.monotonic()
    (copy / mutant.file).write_text(mutated)
    read, write = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _child(mutant, copy, write)
        os.close(write)
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() - began > LIMIT:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return Seen(mutant.tests, f"no end after {LIMIT} seconds", time.monotonic() - began)
            time.sleep(0.05)
        with os.fdopen(read) as pipe:
            found = pipe.read()
        if not found:
            raise RuntimeError(f"the tests of the mutant {mutant.rule!r} died")
        return Seen(*json.loads(found), time.monotonic() - began)
    finally:
        shutil.copy2(ROOT / mutant.file, copy / mutant.file)


class _First:
    """A pytest plugin that reports the first failure, and ends the process."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            _report(self.pipe, "no test ran", str(report.longrepr).strip().splitlines()[-1])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E  ")]
            _report(self.pipe, report.nodeid, next(iter(lines), ""))


def _child(mutant: Mutant, copy: Path, pipe: int) -> None:
    """Run pytest; never returns."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.chdir(copy)
        sys.path[:] = [str(copy), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
        for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "quire")]:
            del sys.modules[name]
        sys.dont_write_bytecode = True  # of a mutated file, that is: the others' was copied
        import pytest

        import quire.passes

        assert Path(quire.passes.__path__[0]).resolve() == copy.resolve() / "passes"
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those of other packages take longer than the tests
        plugins = ("pytest_timeout", "quire.graph_runner.pytest_plugin")
        options = ["-q", "--assert=plain", "-p", "no:cacheprovider", *(f"-p{p}" for p in plugins)]
        status = pytest.main([*options, *mutant.arguments], plugins=[_First(pipe)])
        _report(pipe, "", "") if status == 0 else _report(pipe, "no test ran", str(status))
    finally:
        os._exit(1)


def _report(pipe: int, test: str, error: str) -> None:
    os.write(pipe, json.dumps((test, error)).encode())
    os._exit(0)


def _preload() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # as tests/conftest.py does
    import expecttest  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo.backends.registry
    import torch._inductor.compile_fx
    import torch.testing._internal.common_utils
    import transformers.integrations.moe
    import transformers.models.llama.modeling_llama  # noqa: F401
    import triton.runtime.interpreter  # noqa: F401

    torch.compile(lambda x: (x @ x.mT).softmax(-1).sort()[0], backend="eager", dynamic=True)(torch.ones(3, 4))  # imports much
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # the children's collections need not walk through all this


def problem(mutant: Mutant, seen: Seen) -> str | None:
    """Why this outcome is an error, or None."""
    if any(seen.error.startswith(name) for name in _OWN_ERRORS) or seen.test == "no test ran":
        return f"the mutant is broken: {seen.test}: {seen.error}"
    if not seen.test and not mutant.second_line:
        return "no test goes red"
    if seen.test and mutant.second_line:
        return f"it is said to be a second line, but {seen.test} goes red"
    return None


def table(outcomes: list[tuple[Mutant, Seen]]) -> str:
    """The report in Markdown."""
    import torch
    import transformers

    def what(error: str) -> str:
        return "still refused, but not for its reason" if "pattern did not match" in error else error

    def cell(text: str, most: int = 200) -> str:
        text = text if len(text) <= most else text[: most - 3] + "..."
        return text.replace("|", "\\|").replace("\n", " ")

    red = [(m, s) for m, s in outcomes if s.test]
    lines = [
        "# Mutation check of the proofs", "",
        "Written by `make mutations`. Each line is one rule, broken by the smallest edit that lets something through",
        "(`mutants*.py` have the edits), and the first test that fails then, with what that test saw.", "",
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}. "
        f"{len(outcomes)} mutants: {len(red)} with a red test, {len(outcomes) - len(red)} that another rule covers"
        + (f"; {len(MUTANTS) - len(outcomes)} more were not run." if len(outcomes) < len(MUTANTS) else "."), ""]
    for file in dict.fromkeys(m.file for m, _ in red):
        lines += [f"## {file}", "", "| broken rule | red test | what it saw |", "|---|---|---|"]
        lines += [f"| {cell(m.rule)} | `{cell(s.test)}` | {cell(what(s.error), 90)} |" for m, s in red if m.file == file]
        lines.append("")
    rest = [(m, s) for m, s in outcomes if not s.test]
    if rest:
        lines += ["## Second lines: nothing is served wrongly without these", "", "| file | rule | what refuses the same |",
                  "|---|---|---|", *(f"| {m.file} | {cell(m.rule)} | {cell(m.second_line or 'nothing was found')} |"
                                     for m, _ in rest), ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose file or rule has this; writes no report")
    parser.add_argument("--results", type=Path, help="JSON lines: what is known from a run before, and is not run again")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in m.file or options.only in m.rule]
    for mutant in MUTANTS:
        compile(text_of(mutant), mutant.file, "exec")
    known: dict[Mutant, Seen] = {}
    if options.results is not None and options.results.exists():
        for line in options.results.read_text().splitlines():
            mutant, seen = json.loads(line)
            known[Mutant(*mutant)] = Seen(*seen)
    _preload()
    outcomes, wrong = [], 0
    with tempfile.TemporaryDirectory(prefix="quire-mutations-") as folder:
        copy = Path(folder) / "checkout"
        copy_checkout(copy)
        for number, mutant in enumerate(chosen):
            if (seen := known.get(mutant)) is None:
                seen = red_test(mutant, copy)
                if options.results is not None and problem(mutant, seen) is None:
                    with options.results.open("a") as file:
                        print(json.dumps([mutant, seen]), file=file)
            outcomes.append((mutant, seen))
            why = problem(mutant, seen)
            wrong += why is not None
            print(f"{number:3} {'ERROR' if why else 'ok'} {mutant.file}: {mutant.rule} ({seen.seconds:.1f} s)\n"
                  f"      {why or seen.test or mutant.second_line}\n      {seen.error[:150]}", flush=True)
    if len(chosen) == len(MUTANTS):
        REPORT.write_text(table(outcomes))
    print(f"{len(outcomes)} mutants, {wrong} errors")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
