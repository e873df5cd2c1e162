"""``quire bench attention``: every usable backend's paged op, by head shape and batch; what ``attention="auto"`` goes by.

A row has, beside the columns of ``graph_runner/bench/report.py``: ``kind`` ("decode" or "extend"), ``point`` (its name),
``needs`` (heads and features), ``page_size``, ``us`` and ``host_us`` of one call, ``how`` it was timed
(``graph_runner/bench/attention_op.py``) and ``tflop_per_s``. ``variant`` is kind and needs together.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from typing import Any

import torch
from rich.console import Console

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.registry import all_backends, get_backend
from quire.attn_ops.selection import select_backend
from quire.attn_ops.tuning import attention as choices
from quire.graph_runner.bench.attention_op import Point, decode_point, extend_points, measure, op_batch, work
from quire.graph_runner.bench.report import Row, complete, describe, environment, first_line, write
from quire.graph_runner.bench.roofline import copy_bandwidth
from quire.graph_runner.bench.shapes import ModelSpec, config_of, layers_asked
from quire.graph_runner.bench.systems import free_memory
from quire.graph_runner.bench.workloads import Sizes
from quire.graph_runner.config import kv_dtype

CONTEXTS = {"cuda": (1024, 8192), "cpu": (128, 1024)}
CPU_DIVISOR = 32  # of the lengths of prefills, on a CPU
LOG_WIDTH = 160


def heads_of(text: str) -> tuple[int, int, int]:
    """"32/8x128" as (32, 8, 128): query heads, key heads, head dim."""
    found = re.fullmatch(r"(\d+)/(\d+)x(\d+)", text.strip())
    numbers = tuple(map(int, found.groups())) if found else (0, 0, 0)
    if min(numbers) < 1 or numbers[0] % numbers[1]:
        raise ValueError(f"--heads takes query heads/key heads x head dim such as 32/8x128, with commas between; got {text!r}")
    return numbers  # type: ignore[return-value]


def sites_of(spec: ModelSpec) -> list[AttentionSite]:
    """The attention sites of a model, traced without weights."""
    import transformers

    from quire.passes.capture.paged_model import find_sites

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(spec), dtype=spec.dtype)
    return find_sites(model.eval())


class AttentionSession:
    """One run: measure, then ``finish``. Raises ValueError at once for arguments that make no sense."""

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        self.args, self.command = args, command
        self.console = Console() if sys.stdout.isatty() else Console(width=LOG_WIDTH)
        self.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        gpu = self.device.type == "cuda"
        if gpu and not torch.cuda.is_available():
            raise ValueError("--device cuda, but torch sees no GPU here")
        if args.page_size < 1 or args.scale < 1:
            raise ValueError("--page-size and --scale must be at least 1")
        name = args.dtype or ("bfloat16" if gpu else "float32")
        dtype = kv_dtype(name)
        if dtype is None or not dtype.is_floating_point:
            raise ValueError(f"--dtype {name!r} is not a floating-point torch dtype such as bfloat16")
        self.contexts = tuple(args.context or CONTEXTS["cuda" if gpu else "cpu"])
        if args.heads:
            self.label = ",".join(args.heads)
            sites = [AttentionSite(0, h, hkv, d, d, dtype, d**-0.5) for h, hkv, d in map(heads_of, args.heads)]
        else:
            spec = ModelSpec(args.model or ("llama-8b" if gpu else "tiny"), dtype, self.device, layers_asked(args.layers))
            self.label = spec.label
            sites = sites_of(spec)
            most = getattr(config_of(spec).get_text_config(decoder=True), "max_position_embeddings", None)
            self.contexts = tuple(dict.fromkeys(min(c, most or c) for c in self.contexts))
        #: one site of each kind
        self.sites = list({(choices.ShapeClass.of(s, args.page_size), s.num_kv_heads, s.window, s.chunk): s
                           for s in reversed(sites)}.values())[::-1]
        self.points = [decode_point(b, c) for c in self.contexts for b in args.batch or Sizes.batches]
        self.points += extend_points(args.scale * (1 if gpu else CPU_DIVISOR))
        self.backends = self._backends(args.attention)
        self.rows: list[Row] = []
        self.bandwidth = copy_bandwidth(self.device)
        free_memory()
        self.environment = environment(self.device, self.bandwidth)

    def _backends(self, names: list[str]) -> dict[str, AttentionBackend | str]:
        """Those to measure by name, or why one cannot be; for "auto" all that attention="auto" can choose on the device."""
        found: dict[str, AttentionBackend | str] = {}
        for name in names:
            for backend in all_backends().values() if name == "auto" else [get_backend(name)]:
                why = None if self.device.type in backend.capabilities.devices else "not for this device"
                why = why or backend.available(self.device)
                if name != "auto" or (why is None and self.device.type in (backend.priority or {})):
                    found[backend.name] = why or backend
        return found

    def measure(self) -> None:
        """All of it; what fails becomes a row that says why."""
        for site in self.sites:
            self.console.print(f"{choices.describe(site)}, page size {self.args.page_size}", highlight=False)
            serving: dict[str, AttentionBackend] = {}
            for name, backend in self.backends.items():
                why = backend if isinstance(backend, str) else "; ".join(backend.capabilities.reasons_against(
                    site, device=self.device, page_size=self.args.page_size, layout=self.args.layout))
                if why:
                    self._keep(site, None, name, {"error": f"cannot serve it: {why}"})
                elif isinstance(backend, AttentionBackend):
                    serving[name] = backend
            for point in self.points if serving else ():
                self._measure(site, point, serving)

    def _measure(self, site: AttentionSite, point: Point, serving: dict[str, AttentionBackend]) -> None:
        size, operations = work(site, point)
        for name, backend in serving.items():
            try:
                # Made anew for each: a kernel that failed may have left anything in the caches.
                batch = op_batch(site, point, page_size=self.args.page_size, device=self.device, layout=self.args.layout,
                                 max_len=max(max(self.contexts), *point.seq_lens))
                timing = measure(backend, batch)
                row = {"us": timing.us, "host_us": timing.host_us, "how": timing.how, "ms_per_step": timing.us / 1e3,
                       "bytes_per_step": size, "tflop_per_s": operations / timing.us / 1e6}
                del batch
            except Exception as error:
                row = {"error": f"{type(error).__name__}: {error}"}
            if self.device.type == "cuda":
                free_memory()
            self._keep(site, point, name, row)

    def _keep(self, site: AttentionSite, point: Point | None, name: str, row: Row) -> None:
        needs = choices.describe(site)
        kind = point.kind if point else "decode"
        row = complete({
            "workload": "attention", "variant": f"{kind} {needs}", "system": "quire", "attention": name, "model": self.label,
            "dtype": str(site.dtype).removeprefix("torch."), "batch": len(point.seq_lens) if point else None,
            "context": max(point.seq_lens) if point else None, "kind": kind, "point": point.name if point else None,
            "needs": needs, "page_size": self.args.page_size, "us": None, "command": self.command, "site": site, **row,
        }, self.bandwidth)
        self.rows.append(row)
        self._write()
        said = f"not measured: {first_line(row['error'])}" if row["error"] else (
            f"{row['us']:.1f} us, {row['tb_per_s']:.3f} TB/s, {row['tflop_per_s']:.1f} TFLOP/s, by {row['how']}")
        what = f"{kind} {point.name}" if point else describe(row)
        self.console.print(f"  {what} {name}: {said}", highlight=False, markup=False)

    def _write(self) -> None:
        if self.args.out is not None:
            write(self.args.out, self.environment, [{k: v for k, v in row.items() if k != "site"} for row in self.rows])

    def finish(self) -> None:
        """Print the times as a table; with --save, keep them and say what attention="auto" makes of them."""
        from rich import box
        from rich.table import Table

        names = [n for n in self.backends if any(r["attention"] == n and r["us"] for r in self.rows)]
        for site in self.sites:
            self.console.print(f"\nmicroseconds a call: {choices.describe(site)}, page size {self.args.page_size}",
                               highlight=False, style="bold")
            made = Table(box=box.SIMPLE)
            made.add_column("batch x context")
            for name in names:
                made.add_column(name, justify="right")
            for point in self.points:
                us = {r["attention"]: r["us"] for r in self.rows if r["site"] is site and r["point"] == point.name}
                if us:
                    made.add_row(f"{point.kind} {point.name}", *(f"{us[n]:,.1f}" if us.get(n) else "-" for n in names))
            self.console.print(made)
        self._write()
        if self.args.out is not None:
            self.console.print(f"wrote {self.args.out}", highlight=False)
        if self.args.save:
            self._save()

    def _save(self) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found = []
        for site in self.sites:
            for name, backend in self.backends.items():
                times: dict[str, dict[str, float]] = {"decode": {}, "extend": {}}
                for row in self.rows:
                    if row["site"] is site and row["attention"] == name and row["us"]:
                        times[row["kind"]][row["point"]] = row["us"]
                if times["decode"] and isinstance(backend, AttentionBackend):
                    found.append(choices.measurement(
                        backend, site, device=self.device, page_size=self.args.page_size, layout=self.args.layout,
                        decode_us=times["decode"], extend_us=times["extend"], date=now))
        if not found:
            raise ValueError("nothing to save: no backend was measured at any decode point")
        self.console.print(f"saved in {choices.save(found)}", highlight=False)
        for site in self.sites:
            chosen: Any = select_backend("auto", [site], device=self.device, page_size=self.args.page_size,
                                         layout=self.args.layout)
            self.console.print(f"attention=\"auto\" for {choices.describe(site)}: {chosen}", highlight=False, markup=False)


__all__ = ["AttentionSession", "heads_of", "sites_of"]
