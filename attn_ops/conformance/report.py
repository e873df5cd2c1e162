"""Run the checks on a backend and report the results."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence

import torch

from quire.attn_ops.backend import AttentionBackend, listed
from quire.attn_ops.conformance.batches import Failure, noting_errors
from quire.attn_ops.conformance.checks import DIMS, PAGE_SIZES, Kit, Skip
from quire.attn_ops.conformance.mla import MlaKit
from quire.attn_ops.conformance.record import Result

Check = tuple[str, Callable[[], "str | None"]]  # its name, and what makes it: see ``run_checks``
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def first_dtype(backend: AttentionBackend) -> torch.dtype:
    return next((d for d in DTYPES if d in backend.capabilities.dtypes), torch.float32)


def check_backend(backend: AttentionBackend, device: torch.device | str = "cpu", dtype: torch.dtype | None = None,
                  only: str = "", kv_dtype: torch.dtype | None = None, quick: bool = False) -> list[Result]:
    """Check a backend (``quire.attn_ops.conformance``).

    Args:
        backend: the record; it need not be registered.
        device, dtype: where and in what; dtype None: the first of float32, bfloat16, float16 that the backend declares.
        only: run the checks whose names contain this.
        kv_dtype: run all of them on a quantized cache of this dtype.
        quick: leave out the large batches.

    Returns:
        One Result per check, in order.
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
        return [("usable here", _fails(backend.available(device) or f"runs on {listed(caps.devices)}"))]
    for reason, missing in ((f"dtype {dtype} is not declared", dtype not in caps.dtypes),
                            (f"KV cache dtype {kv_dtype} is not declared", kv_dtype not in (None, *caps.kv_dtypes)),
                            (f"no head dims among {DIMS} are declared", not kit.dims and backend.op is not None),
                            (f"no page size among {PAGE_SIZES} is declared", not kit.page_sizes),
                            ("no layout is declared", not kit.layouts)):
        if missing:
            return [("declarations", _fails(reason))]
    return [*(kit.checks() if backend.op is not None else []), *mla]


def _fails(reason: str) -> Callable[[], str | None]:
    def check() -> str | None:
        raise Failure(reason)

    return check


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
