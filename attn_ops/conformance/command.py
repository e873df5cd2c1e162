"""The command line of the kit."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from quire.attn_ops.backend import dtype_name, listed
from quire.attn_ops.conformance.lanes import work_off
from quire.attn_ops.conformance.ops import op_checks
from quire.attn_ops.conformance.report import (
    DTYPES,
    Result,
    backend_checks,
    first_dtype,
    print_table,
    read_results,
    run_checks,
    write_record,
)
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES
from quire.attn_ops.registry import all_backends, get_backend

#: Checks of many cases by the beginning of their names, which come last where time is limited: one case of each is among the
#: others.
LATE = ("shape ", "real shapes: ", "page size ", "head dims", "query heads", "windows at", "chunks at", "rotary",
        "MLA: page sizes", "MLA: query heads", "MLA: latent dims", "varlen medium")


@dataclass(frozen=True)
class Case:
    """Checks of one backend ("ops": of the ops without a KV cache), and one of them."""

    backend: str
    device: str
    dtype: torch.dtype | None
    kv_dtype: torch.dtype | None
    quick: bool
    check: str = ""

    @property
    def key(self) -> dict[str, Any]:
        """What tells its run from others, as JSON."""
        return {"backend": self.backend, "device": self.device, "dtype": self.dtype and dtype_name(self.dtype),
                "kv_dtype": self.kv_dtype and dtype_name(self.kv_dtype)}

    def checks(self) -> list[Any]:
        if self.backend == "ops":
            return op_checks(torch.device(self.device), self.dtype)
        return backend_checks(get_backend(self.backend), torch.device(self.device), self.dtype, self.kv_dtype, self.quick)


def run_case(case: Case) -> Result:
    (result,) = run_checks([each for each in case.checks() if each[0] == case.check])
    return result


@dataclass
class Run:
    """The checks of one backend to make, and results; ``reason``: why it is not checked."""

    case: Case
    names: list[str] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    reason: str | None = None

    @classmethod
    def of(cls, case: Case, only: str = "") -> Run:
        """The checks of a backend whose names contain ``only``."""
        return cls(case, [check for check, _ in case.checks() if only in check])

    @property
    def left(self) -> list[str]:
        return [name for name in self.names if name not in self.results]

    @property
    def done(self) -> list[Result]:
        return [self.results[name] for name in self.names if name in self.results]

    def record(self) -> dict[str, Any]:
        return {**self.case.key, "quick": self.case.quick, "reason": self.reason, "left": self.left,
                "results": [asdict(result) for result in self.done]}


def names_in(text: str) -> list[str]:
    """The names in a list with commas; one for each kind of layer (full=NAME,window=NAME) is one name."""
    names: list[str] = []
    for part in text.split(","):
        if "=" in part and names and "=" in names[-1]:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names


def runs_of(given: argparse.Namespace) -> list[Run]:
    """What the arguments ask for. Raises ValueError for an unknown name."""
    dtype, kv_dtype = (getattr(torch, name) if name else None for name in (given.dtype, given.kv_dtype))
    chosen, gpu, runs = names_in(given.backend), torch.cuda.is_available(), []
    every = "all" in chosen
    for name in [n for each in chosen for n in ([*all_backends(), "ops"] if each == "all" else [each])]:
        if name == "ops":
            case = Case(name, given.device or ("cuda" if gpu else "cpu"), dtype, None, given.quick)
        else:
            backend = get_backend(name)
            devices = backend.capabilities.devices
            device = given.device or ("cuda" if (every or "cuda" in devices) and gpu else "cpu")
            # Of all backends bfloat16 on a GPU, which has kernels of its own for it, else the first that is declared.
            halves = every and device != "cpu" and torch.bfloat16 in backend.capabilities.dtypes
            used = dtype or (torch.bfloat16 if halves else first_dtype(backend))
            case = Case(name, device, used, kv_dtype, given.quick)
            why = backend.available(torch.device(device)) if device in devices else f"runs on {listed(devices)}"
            if every and (why or used not in backend.capabilities.dtypes):
                why = why or f"has no {dtype_name(used)}"
                print(f"{name}: not checked: {why}")
                runs.append(Run(replace(case, dtype=None, kv_dtype=None), reason=why))
                continue
        runs.append(Run.of(case, given.only))
    return runs


def check_all(runs: Sequence[Run], *, jobs: int = 1, deadline: float | None = None, limit: float = 240.0,
              json: str | Path | None = None, resume: Sequence[str | Path] = ()) -> None:
    """Make the checks of ``runs`` and set their results. Prints a table of each run that is done, and failures as they come.
    Arguments: as of the command."""
    began = time.time()
    for run in runs:
        known = read_results([f for f in resume if Path(f).is_file()], run.case.key)
        run.results = {name: known[name] for name in run.names if name in known}
    owners = {replace(run.case, check=name): run for run in runs for name in run.left}
    tasks = list(owners)
    if deadline is not None:  # the first check of each backend, the second one, ...
        place = {case: run.names.index(case.check) for case, run in owners.items()}

        def order(case: Case) -> tuple[bool, bool, int]:
            late = case.check.startswith(LATE)
            # Backends made of others come after those, which have compiled most of their kernels by then.
            return late, late and (":" in case.backend or "=" in case.backend), place[case]

        tasks.sort(key=order)
    wrote = 0.0

    def write() -> None:
        if json:
            write_record(json, [run.record() for run in runs])

    def take(case: Case, result: Result) -> None:
        nonlocal wrote
        run = owners[case]
        run.results[case.check] = result
        if time.time() - wrote > 2:
            write()
            wrote = time.time()
        if not run.left:
            show(run)
        elif result.status == "FAIL":
            print(f"{case.backend}: {case.check}: FAIL: {result.detail}", flush=True)

    def show(run: Run) -> None:
        c = run.case
        kinds = "".join(f", {kind} {dtype_name(t)}" for kind, t in (("in", c.dtype), ("KV cache", c.kv_dtype)) if t)
        title = f"ops on {c.device}" if c.backend == "ops" else f"attention backend {c.backend} on {c.device}"
        print_table(title + kinds, run.done, len(run.left))

    work_off(tasks, run_case, take, lambda case, why: Result(case.check, "FAIL", why), jobs=jobs,
             until=None if deadline is None else began + deadline, each=limit,
             group=lambda case: case.backend,
             poisoned=lambda result: "CUDA error" in result.detail)
    write()
    for run in runs:
        if run.left:
            show(run)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0 if every check passed or was skipped, 3 if some are left, 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m quire.attn_ops.conformance", description="Check an attention backend.")
    add = parser.add_argument
    add("--backend", required=True, help="name that it is registered by, or names with commas between; all: those that are "
        "usable on the device; ops: the ops without a KV cache, and merge_state")
    add("--device", default=None, help="default: the first of cuda and cpu that it runs on here")
    add("--dtype", default=None, choices=[dtype_name(d) for d in DTYPES])
    add("--kv-dtype", default=None, choices=sorted(map(dtype_name, QUANTIZED_KV_DTYPES)),
        help="run all checks on a quantized KV cache (default: of --dtype)")
    add("--only", default="", help="run the checks whose names contain this")
    add("--quick", action="store_true", help="leave out the large batches and most real shapes")
    add("--json", metavar="FILE", help="write the results to FILE too, as they come; python -m quire.attn_ops.conformance.page "
        "makes a page of such files")
    add("--jobs", type=int, default=1, metavar="N", help="processes to check in (default: this one)")
    add("--deadline", type=float, metavar="SECONDS", help="start nothing after that, and end what --jobs started; what is left "
        "is in --json, and the exit code is 3. Each feature of each backend comes first, many cases of one last")
    add("--limit", type=float, default=240.0, metavar="SECONDS", help="a check of --jobs that takes longer fails (default: "
        "240; a package may compile its kernels in it)")
    add("--resume", nargs="*", default=[], metavar="FILE", help="take the results of these files that did not fail (those of "
        "the same device and versions), and make the checks that are left")
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        parser.error("--jobs is at least 1")
    try:
        runs = runs_of(given)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    check_all(runs, jobs=given.jobs, deadline=given.deadline, limit=given.limit, json=given.json, resume=given.resume)
    checked = [result for run in runs for result in run.results.values()]
    left = sum(len(run.left) for run in runs)
    if left:
        print(f"{left} checks are left; continue with --resume {given.json or 'FILE'}")
    return 1 if not checked or any(r.status == "FAIL" for r in checked) else 3 if left else 0
