"""Run the checks on a backend and report the results."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.attn_ops.backend import AttentionBackend, dtype_name, listed
from quire.attn_ops.conformance.batches import Failure
from quire.attn_ops.conformance.checks import DIMS, PAGE_SIZES, Kit, Skip
from quire.attn_ops.conformance.mla import MlaKit
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES
from quire.attn_ops.registry import get_backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Result:
    """One line of the report. ``status``: "ok", "FAIL" or "skip"."""

    check: str
    status: str
    detail: str = ""
    seconds: float = 0.0


def check_backend(backend: AttentionBackend, device: torch.device | str = "cpu", dtype: torch.dtype | None = None,
                  only: str = "", kv_dtype: torch.dtype | None = None) -> list[Result]:
    """Check a backend (``quire.attn_ops.conformance``).

    Args:
        backend: the record; it need not be registered.
        device, dtype: where and in what; dtype None: the first of float32, bfloat16, float16 that the backend declares.
        only: run the checks whose names contain this.
        kv_dtype: run all of them on a quantized cache of this dtype.

    Returns:
        One Result per check, in order.
    """
    device = torch.device(device)
    caps = backend.capabilities
    dtype = dtype or next((d for d in DTYPES if d in caps.dtypes), torch.float32)
    kit = Kit(backend, device, dtype, kv_dtype)
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
    results = []
    for name, check in [*(kit.checks() if backend.op is not None else []), *mla]:
        if only not in name:
            continue
        begin = time.perf_counter()
        try:
            status, detail = "ok", check() or ""
        except Skip as why:
            status, detail = "skip", str(why)
        except Failure as what:
            status, detail = "FAIL", str(what)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            status, detail = "FAIL", f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        results.append(Result(name, status, detail, time.perf_counter() - begin))
    return results


def print_table(title: str, results: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "result", "seconds", "detail", title=escape(title), title_justify="left")
    colors = {"ok": "green", "FAIL": "bold red", "skip": "yellow"}
    for r in results:
        table.add_row(escape(r.check), f"[{colors[r.status]}]{r.status}[/]", f"{r.seconds:.1f}", escape(r.detail))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0 if every check passed or was skipped."""
    parser = argparse.ArgumentParser(prog="python -m quire.attn_ops.conformance", description="Check an attention backend.")
    parser.add_argument("--backend", required=True, help="name that it is registered by")
    parser.add_argument("--device", default=None, help="default: the first of cuda and cpu that it runs on here")
    parser.add_argument("--dtype", default=None, choices=[dtype_name(d) for d in DTYPES])
    parser.add_argument("--kv-dtype", default=None, choices=sorted(map(dtype_name, QUANTIZED_KV_DTYPES)),
                        help="run all checks on a quantized KV cache (default: of --dtype)")
    parser.add_argument("--only", default="", help="run the checks whose names contain this")
    given = parser.parse_args(arguments)
    try:
        backend = get_backend(given.backend)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    device = given.device or ("cuda" if "cuda" in backend.capabilities.devices and torch.cuda.is_available() else "cpu")
    dtype, kv_dtype = (getattr(torch, name) if name else None for name in (given.dtype, given.kv_dtype))
    results = check_backend(backend, device, dtype, given.only, kv_dtype=kv_dtype)
    failed, skipped = (sum(r.status == s for r in results) for s in ("FAIL", "skip"))
    print_table(f"attention backend {backend.name} on {device}", results)
    print(f"{len(results) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not results else 0


__all__ = ["Result", "check_backend", "main", "print_table"]
