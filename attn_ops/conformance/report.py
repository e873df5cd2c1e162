"""Run the checks on a backend and report the results: as a table, and on disk as ``{"environment": ..., "runs": [...]}``."""

from __future__ import annotations

import datetime
import functools
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.attn_ops.backend import AttentionBackend, listed
from quire.attn_ops.conformance.batches import Failure, noting_errors
from quire.attn_ops.conformance.checks import DIMS, PAGE_SIZES, Kit, Skip
from quire.attn_ops.conformance.mla import MlaKit
from quire.attn_ops.registry import all_backends
from quire.attn_ops.tuning.store import device_name, installed_version

Check = tuple[str, Callable[[], "str | None"]]  # its name, and what makes it: see ``run_checks``
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Result:
    """One line of the report. ``status``: "ok", "FAIL" or "skip". ``error``: the largest difference from the expected numbers;
    ``of_bound``: in units of what is allowed; None where nothing was compared."""

    check: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    error: float | None = None
    of_bound: float | None = None


def first_dtype(backend: AttentionBackend) -> torch.dtype:
    return next((d for d in DTYPES if d in backend.capabilities.dtypes), torch.float32)


def check_backend(backend: AttentionBackend, device: torch.device | str = "cpu", dtype: torch.dtype | None = None,
                  only: str = "", kv_dtype: torch.dtype | None = None, quick: bool = False) -> list[Result]:
    """Check a backend (``quire.attn_ops.conformance``): one Result per check, in order.

    Args:
        backend: the record; it need not be registered.
        device, dtype: where and in what; dtype None: the first of float32, bfloat16, float16 that the backend declares.
        only: run the checks whose names contain this.  quick: leave out the large batches and most real shapes.
        kv_dtype: run all of them on a quantized cache of this dtype.
    """
    return run_checks(backend_checks(backend, torch.device(device), dtype, kv_dtype, quick), only)


def backend_checks(backend: AttentionBackend, device: torch.device, dtype: torch.dtype | None, kv_dtype: torch.dtype | None,
                   quick: bool) -> list[Check]:
    """(name, function) of each check that ``check_backend`` makes; one that fails, where none can be made."""
    caps = backend.capabilities
    dtype = dtype or first_dtype(backend)
    kit = Kit(backend, device, dtype, kv_dtype, quick)
    latent = kv_dtype is None or not caps.mla or kv_dtype in caps.latent_kv_dtypes
    mla = MlaKit(kit).checks() if latent else []
    if device.type not in caps.devices or backend.available(device):
        return [("usable here", functools.partial(_fail, backend.available(device) or f"runs on {listed(caps.devices)}"))]
    for reason, missing in ((f"dtype {dtype} is not declared", dtype not in caps.dtypes),
                            (f"KV cache dtype {kv_dtype} is not declared", kv_dtype not in (None, *caps.kv_dtypes)),
                            (f"no head dims among {DIMS} are declared", not kit.dims and backend.op is not None),
                            (f"no page size among {PAGE_SIZES} is declared", not kit.page_sizes),
                            ("no layout is declared", not kit.layouts)):
        if missing:
            return [("declarations", functools.partial(_fail, reason))]
    return [*(kit.checks() if backend.op is not None else []), *mla]


def _fail(reason: str) -> str | None:
    raise Failure(reason)


def run_checks(checks: Iterable[Check], only: str = "") -> list[Result]:
    """Run the checks whose names contain ``only``. A check returns a detail, or raises Failure or Skip."""
    results = []
    for name, check in checks:
        if only not in name:
            continue
        begin = time.perf_counter()
        with noting_errors() as worst:
            try:
                status, detail = "ok", check() or ""
            except Skip as why:
                status, detail = "skip", str(why)
            except Failure as what:
                status, detail = "FAIL", str(what)
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                status, detail = "FAIL", f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        results.append(Result(name, status, detail, time.perf_counter() - begin, worst.error, worst.of_bound))
    return results


def print_table(title: str, results: Sequence[Result], left: int = 0) -> None:
    """``left``: checks that were not made."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "result", "seconds", "worst error", "of bound", "detail", title=escape(title), title_justify="left")
    colors = {"ok": "green", "FAIL": "bold red", "skip": "yellow"}
    for r in results:
        errors = ["" if x is None else f"{x:.2g}" for x in (r.error, r.of_bound)]
        table.add_row(escape(r.check), f"[{colors[r.status]}]{r.status}[/]", f"{r.seconds:.1f}", *errors, escape(r.detail))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    failed, skipped = (sum(r.status == s for r in results) for s in ("FAIL", "skip"))
    print(f"{len(results) - failed - skipped} passed, {failed} failed, {skipped} skipped"
          + (f", {left} left" if left else ""))


def read_results(files: Sequence[str | Path], asked: dict[str, Any]) -> dict[str, Result]:
    """By check, without failures: the results of the run that is ``asked`` for, in files of this device and these versions."""
    device = asked["device"]
    here, found = environment([device]), dict[str, Result]()
    for file in files:
        record = json.loads(Path(file).read_text())
        env = record["environment"]
        if env["versions"] != here["versions"] or env["devices"].get(device) != here["devices"][device]:
            continue
        for run in record["runs"]:
            if all(run[key] == value for key, value in asked.items()):
                found |= {r["check"]: Result(**r) for r in run["results"] if r["status"] != "FAIL"}
    return found


def environment(devices: Sequence[str]) -> dict[str, Any]:
    """Date, devices, and versions of torch and of the packages that backends name."""
    packages = sorted({p for b in all_backends().values() for p in b.packages})
    versions = {"quire": installed_version("quire"), "torch": torch.__version__, **{p: installed_version(p) for p in packages}}
    return {"date": datetime.date.today().isoformat(), "python": platform.python_version(),
            "versions": {name: version for name, version in versions.items() if version is not None},
            "devices": {d: device_name(torch.device(d)) for d in devices}}


def write_record(path: str | Path, runs: Sequence[dict[str, Any]]) -> None:
    """Write runs and their environment to a JSON file."""
    record = {"environment": environment(sorted({run["device"] for run in runs})), "runs": list(runs)}
    whole, part = Path(path), Path(f"{path}.part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(whole)  # a reader never sees half a file
