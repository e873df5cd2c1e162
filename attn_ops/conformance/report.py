"""Run the checks on a backend and report the results."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence

import torch

from quire.attn_ops.backend import AttentionBackend, dtype_name, listed
from quire.attn_ops.conformance.batches import Failure, noting_errors
from quire.attn_ops.conformance.checks import DIMS, PAGE_SIZES, Kit, Skip
from quire.attn_ops.conformance.mla import MlaKit
from quire.attn_ops.conformance.ops import op_checks
from quire.attn_ops.conformance.record import Result, run_record, write_record
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES
from quire.attn_ops.registry import all_backends, get_backend

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
    device = torch.device(device)
    caps = backend.capabilities
    dtype = dtype or first_dtype(backend)
    kit = Kit(backend, device, dtype, kv_dtype, quick)
    mla = [] if kv_dtype is not None else MlaKit(kit).checks()  # a latent cache is of the model's dtype
    if device.type not in caps.devices or backend.available(device):
        return [Result("usable here", "FAIL", backend.available(device) or f"runs on {listed(caps.devices)}")]
    for reason, missing in ((f"dtype {dtype} is not declared", dtype not in caps.dtypes),
                            (f"KV cache dtype {kv_dtype} is not declared", kv_dtype not in (None, *caps.kv_dtypes)),
                            (f"no head dims among {DIMS} are declared", not kit.dims and backend.op is not None),
                            (f"no page size among {PAGE_SIZES} is declared", not kit.page_sizes),
                            ("no layout is declared", not kit.layouts)):
        if missing:
            return [Result("declarations", "FAIL", reason)]
    return run_checks([*(kit.checks() if backend.op is not None else []), *mla], only)


def run_checks(checks: Iterable[tuple[str, Callable[[], str | None]]], only: str = "") -> list[Result]:
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


def print_table(title: str, results: Sequence[Result]) -> None:
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
    print(f"{len(results) - failed - skipped} passed, {failed} failed, {skipped} skipped")


def default_dtype(backend: AttentionBackend, device: str) -> torch.dtype | None:
    """What ``--backend all`` checks: bfloat16 on a GPU, which has kernels of its own for it, else the first declared."""
    return torch.bfloat16 if device != "cpu" and torch.bfloat16 in backend.capabilities.dtypes else None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0 if every check passed or was skipped."""
    parser = argparse.ArgumentParser(prog="python -m quire.attn_ops.conformance", description="Check an attention backend.")
    parser.add_argument("--backend", required=True, help="name that it is registered by, or names with commas between; all: "
                        "those that are usable on the device; ops: the ops without a KV cache, and merge_state")
    parser.add_argument("--device", default=None, help="default: the first of cuda and cpu that it runs on here")
    parser.add_argument("--dtype", default=None, choices=[dtype_name(d) for d in DTYPES])
    parser.add_argument("--kv-dtype", default=None, choices=sorted(map(dtype_name, QUANTIZED_KV_DTYPES)),
                        help="run all checks on a quantized KV cache (default: of --dtype)")
    parser.add_argument("--only", default="", help="run the checks whose names contain this")
    parser.add_argument("--quick", action="store_true", help="leave out the large batches")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE too; python -m "
                        "quire.attn_ops.conformance.page makes a page of such files")
    given = parser.parse_args(arguments)
    dtype, kv_dtype = (getattr(torch, name) if name else None for name in (given.dtype, given.kv_dtype))
    chosen, runs = given.backend.split(","), []
    every = chosen == ["all"]
    for name in [*all_backends(), "ops"] if every else chosen:
        if name == "ops":
            device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
            results = run_checks(op_checks(torch.device(device), dtype), given.only)
            used: torch.dtype | None = dtype
        else:
            try:
                backend = get_backend(name)
            except ValueError as error:
                print(error, file=sys.stderr)
                return 1
            devices = backend.capabilities.devices
            device = given.device or ("cuda" if (every or "cuda" in devices) and torch.cuda.is_available() else "cpu")
            used = dtype or (default_dtype(backend, device) if every else None) or first_dtype(backend)
            why = backend.available(torch.device(device)) if device in devices else f"runs on {listed(devices)}"
            if every and (why or used not in backend.capabilities.dtypes):
                why = why or f"has no {dtype_name(used)}"
                print(f"{name}: not checked: {why}")
                runs.append(run_record(name, device, None, None, [], why))
                continue
            results = check_backend(backend, device, used, given.only, kv_dtype=kv_dtype, quick=given.quick)
        runs.append(run_record(name, device, used, kv_dtype, results, quick=given.quick))
        print_table(f"attention backend {name} on {device}" if name != "ops" else f"ops on {device}", results)
    if given.json:
        write_record(given.json, runs)
    checked = [r for run in runs for r in run["results"]]
    return 1 if not checked or any(r["status"] == "FAIL" for r in checked) else 0


__all__ = ["Result", "check_backend", "main", "print_table", "run_checks"]
