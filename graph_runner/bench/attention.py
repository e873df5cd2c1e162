"""``quire bench attention``: every usable backend's paged op, by head shape and batch, of MLA layers on the latent cache.
``attention="auto"`` uses its times.

A row has these columns beside those of ``graph_runner/bench/report.py``: ``kind`` ("decode" or "extend"), ``point`` (its name),
``needs`` (heads and features), ``page_size``, ``us`` and ``host_us`` of one call, ``how`` it was timed
(``graph_runner/bench/attention_op.py``) and ``tflop_per_s``. ``variant`` is kind and needs together.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import re
from collections import defaultdict
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite, Latent
from quire.attn_ops.backend import AttentionBackend, dtype_name
from quire.attn_ops.registry import all_backends, get_backend
from quire.attn_ops.selection import select_backend
from quire.attn_ops.tuning import attention as tuning
from quire.graph_runner.bench import attention_op
from quire.graph_runner.bench.models import ModelSpec, config_of, free_memory, layers_asked, skeleton
from quire.graph_runner.bench.report import Row, failure, rich_table
from quire.graph_runner.bench.session import Run
from quire.graph_runner.bench.workloads import Sizes
from quire.passes.capture.paged_model import find_sites

CONTEXTS = {"cuda": (1024, 8192), "cpu": (128, 1024)}
CPU_DIVISOR = 32  # of prefill lengths on a CPU
NOPE = DIM_V = 128  # numbers of a head without rotary embedding, and of its values: of an MLA layer given by --heads, as in
# every model of DeepSeek


def site_of(text: str, dtype: torch.dtype) -> AttentionSite:
    """"32/8x128": query heads, key heads, head dim. "128x512+64": an MLA layer of that many heads, of latent vectors and rotary
    keys of these sizes. Raises ValueError."""
    found = re.fullmatch(r"(\d+)/(\d+)x(\d+)", text.strip())
    heads, kv_heads, dim = map(int, found.groups()) if found else (0, 0, 0)
    if min(heads, kv_heads, dim) > 0 and heads % kv_heads == 0:
        return AttentionSite(0, heads, kv_heads, dim, dim, dtype, dim**-0.5)
    found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text.strip())
    heads, rank, rope = map(int, found.groups()) if found else (0, 0, 0)
    if min(heads, rank, rope) < 1:
        raise ValueError("--heads takes query heads/key heads x head dim such as 32/8x128, or for MLA heads x latent + rotary "
                         f"numbers such as 128x512+64, with commas between; got {text!r}")
    dim = NOPE + rope
    return AttentionSite(0, heads, heads, dim, DIM_V, dtype, dim**-0.5, latent=Latent(rank, rope))


class AttentionSession(Run):
    """One run of the workload attention."""

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        super().__init__(args, command)
        if args.page_size < 1 or args.scale < 1:
            raise ValueError("--page-size and --scale must be at least 1")
        self.contexts = tuple(args.context or CONTEXTS["cuda" if self.on_gpu else "cpu"])
        if args.heads:
            self.label = ",".join(args.heads)
            sites = [site_of(text, self.dtype) for text in args.heads]
        else:
            spec = ModelSpec(args.model or ("llama-8b" if self.on_gpu else "tiny"), self.dtype, self.device,
                             layers_asked(args.layers))
            self.label = spec.label
            model = skeleton(spec).eval()
            sites = find_sites(model)
            most = getattr(config_of(spec).get_text_config(decoder=True), "max_position_embeddings", None)
            self.contexts = tuple(dict.fromkeys(min(c, most or c) for c in self.contexts))
        #: one site of each kind, each alone in its cache
        self.sites = list({(tuning.ShapeClass.of(s, args.page_size), *tuning.variant_of(s)):
                           dataclasses.replace(s, layer=0, kv_source=None) for s in reversed(sites)}.values())[::-1]
        self.points = [attention_op.decode_point(b, c) for c in self.contexts for b in args.batch or Sizes.batches]
        self.points += attention_op.extend_points(args.scale * (1 if self.on_gpu else CPU_DIVISOR))
        self.points += attention_op.without_graphs(self.points) if self.on_gpu else []
        self.backends = self._backends(args.attention)
        #: microseconds of one call by point, for each site and backend
        self.us: dict[tuple[AttentionSite, str], dict[attention_op.Point, float]] = defaultdict(dict)
        self.measure_bandwidth()

    def _backends(self, names: list[str]) -> dict[str, AttentionBackend]:
        """The backends to measure, by name. "auto": all that it can choose on the device."""
        latent = any(site.latent is not None for site in self.sites)
        return {backend.name: backend for name in names
                for backend in (all_backends().values() if name == "auto" else [get_backend(name)])
                if name != "auto" or (self.device.type in (backend.priority or {}) and (latent or backend.op is not None)
                                      and backend.available(self.device) is None)}

    def run(self) -> None:
        """All of it; a failure becomes a row that says why."""
        for site in self.sites:
            self.say(f"{tuning.describe(site)}, page size {self.args.page_size}")
            serving: dict[str, AttentionBackend] = {}
            for name, backend in self.backends.items():
                try:
                    attention_op.require(backend, site, self.device, self.args.page_size, layout=self.args.layout)
                    serving[name] = backend
                except NotImplementedError as why:
                    self._keep(site, None, name, {"error": f"cannot serve it: {why}"})
            for point in self.points if serving else ():
                self._measure(site, point, serving)

    def _measure(self, site: AttentionSite, point: attention_op.Point, serving: dict[str, AttentionBackend]) -> None:
        size, operations = attention_op.work(site, point)
        for name, backend in serving.items():
            if not point.graph and backend.without_graph is None:
                continue  # as in a graph
            try:
                # A new batch per backend: a kernel that failed may have left anything in the caches.
                where: Any = {"page_size": self.args.page_size, "device": self.device, "layout": self.args.layout,
                              "max_len": max(max(self.contexts), *point.seq_lens)}
                timing = (attention_op.measure_latent(backend, site, point, **where) if site.latent is not None else
                          attention_op.measure(backend, attention_op.op_batch(site, point, **where), point.graph))
                row = {"us": timing.us, "host_us": timing.host_us, "how": timing.how, "ms_per_step": timing.us / 1e3,
                       "bytes_per_step": size, "tflop_per_s": operations / timing.us / 1e6}
            except Exception as error:
                row = failure(error)
            free_memory()
            self._keep(site, point, name, row)

    def _keep(self, site: AttentionSite, point: attention_op.Point | None, name: str, row: Row) -> None:
        needs = tuning.describe(site)
        kind = point.kind if point else "decode"
        self.complete_and_keep({
            "workload": "attention", "variant": f"{kind} {needs}", "system": "quire", "attention": name, "model": self.label,
            "dtype": dtype_name(site.dtype), "batch": len(point.seq_lens) if point else None,
            "context": max(point.seq_lens) if point else None, "kind": kind, "point": point.name if point else None,
            "needs": needs, "page_size": self.args.page_size, "us": None, **row})
        if point is not None and "us" in row:
            self.us[site, name][point] = row["us"]

    def finish(self) -> None:
        """Print the times as a table; with --save, keep them and print what attention="auto" makes of them."""
        for site in self.sites:
            cells = [{"batch x context": f"{p.kind} {p.name}",
                      **{name: f"{us:,.1f}" if (us := self.us[site, name].get(p)) else "" for name in self.backends}}
                     for p in self.points]
            title = f"\nmicroseconds per call: {tuning.describe(site)}, page size {self.args.page_size}"
            self.console.print(rich_table(title, cells))
        super().finish()
        if self.args.save:
            self._save()

    def _save(self) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found = []
        for (site, name), us in self.us.items():
            times = {f"{kind}_us": {p.name: us[p] for p in us if p.kind == kind} for kind in ("decode", "extend")}
            if times["decode_us"]:
                found.append(tuning.measurement(self.backends[name], site, device=self.device, page_size=self.args.page_size,
                                                layout=self.args.layout, date=now, **times))
        if not found:
            raise ValueError("nothing to save: no backend was measured at any decode point")
        self.say(f"saved in {tuning.save(found)}")
        for site in self.sites:
            chosen: Any = select_backend("auto", [site], device=self.device, page_size=self.args.page_size,
                                         layout=self.args.layout)
            self.say(f"attention=\"auto\" for {tuning.describe(site)}: {chosen}")
