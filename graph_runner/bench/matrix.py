"""``quire bench matrix``: decode, prefill, mixed and online cells of many models, beside a rival; resumable row by row.

Each (model, system) is measured by a process of its own with one engine (``graph_runner/bench/matrix_cells.py``), one per GPU
at a time with that GPU's share of the cores, quire before its rivals. The result is written after every row: ``rows``, each
with the ``run`` that measured it, and ``environments`` by run. ``graph_runner/bench/matrix_report.py`` merges results and
makes tables and the heat map.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import importlib.util
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from quire.attn_ops.backend import dtype_name
from quire.graph_runner.bench import workers
from quire.graph_runner.bench.matrix_cells import Cell, Job, Worker, cells
from quire.graph_runner.bench.matrix_report import cell_name, merged, summary
from quire.graph_runner.bench.models import layers_asked
from quire.graph_runner.bench.report import Row, complete
from quire.graph_runner.bench.session import Run
from quire.graph_runner.bench.shapes import MATRIX, NAMES
from quire.graph_runner.bench.systems import SYSTEMS, SteppedSystem

#: Seconds from the start of a process to the first measured cell, at least; a process is not started with less time left.
STARTS = {"quire": 35.0, "vllm": 80.0}
#: vLLM in one process on a machine without a network. What the environment has set already stays.
VLLM_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_PLUGINS": "",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


class Matrix(Run):
    """One run of the matrix."""

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        began = time.time()
        super().__init__(args, command)
        self.gpus = args.gpus or 1
        if min(self.gpus, args.scale) < 1 or (args.deadline is not None and args.deadline <= 0):
            raise ValueError("--gpus, --scale and --deadline must be positive")
        if len(args.attention) > 1:
            raise ValueError(f"the matrix takes one --attention, got {','.join(args.attention)}")
        self.models = args.models or ([*MATRIX] if self.on_gpu else ["tiny"])
        if unknown := [name for name in self.models if name not in NAMES]:
            raise ValueError(f"unknown models {unknown}; there are: {', '.join(NAMES)}")
        self.systems = list(dict.fromkeys(["quire", *args.vs]))
        stepped = [name for name, system in SYSTEMS.items() if issubclass(system, SteppedSystem)]
        if not set(self.systems) <= set(stepped):
            raise ValueError(f"--vs {','.join(args.vs)}: the matrix runs systems step by step, which only {', '.join(stepped)} "
                             "allow")
        patterns = args.cells or ["*"]
        self.cells = [c for c in cells(args.scale) if any(fnmatch.fnmatch(c.name, p) for p in patterns)]
        if not self.cells:
            raise ValueError(f"--cells {','.join(patterns)} names no cell; there are: "
                             f"{', '.join(c.name for c in cells(args.scale))}")
        if any(name.startswith("vllm") for name in self.systems) and self.on_gpu:
            if args.vllm_path is not None and not (args.vllm_path / "vllm").is_dir():
                raise ValueError(f"--vllm-path {args.vllm_path}: no vllm package in that folder")
            if args.vllm_path is None and importlib.util.find_spec("vllm") is None:
                raise ValueError("--vs vllm, but vllm is not installed; give the folder that it is in as --vllm-path")
        self.layers = layers_asked(args.layers)
        self.deadline = None if args.deadline is None else began + args.deadline
        self.run_id = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        earlier = [args.out] if args.out is not None and args.out.is_file() else []
        if earlier and args.resume is None:
            raise ValueError(f"{args.out} exists: continue it with --resume, or give another --out")
        own = merged(earlier)
        self.rows, self.facts["environments"] = own["rows"], own["environments"]
        if own["environments"]:
            self.environment = next(iter(own["environments"].values()))
        self.known = [*self.rows, *merged(args.resume or [])["rows"]]
        if args.retry:
            self.rows, self.known = ([row for row in rows if not row["error"]] for rows in (self.rows, self.known))
        then = merged([args.against])["rows"] if args.against is not None else []  # the same load as then
        self.rates = {row["model"]: row["rate"] for row in [*self.known, *then] if row.get("rate")}
        self._lock = threading.Lock()

    # -- which cells are left ---------------------------------------------------------------------------------------

    def _label(self, model: str) -> str:
        return model if self.layers is None else f"{model}/{self.layers}l"

    def _left(self, model: str, system: str) -> list[Cell]:
        done = {cell_name(row) for row in self.known if (row["model"], row["system"]) == (self._label(model), system)}
        return [cell for cell in self.cells if cell.name not in done]

    # -- measuring --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All that is left and fits into the time."""
        if not self.on_gpu:
            for model, system in [(m, s) for m in self.models for s in self.systems if self._left(m, s)]:
                for row in Worker(self._job(model, system)).run():
                    self.take(row)
            return
        models = iter(self.models)  # all lanes take from it

        def lane(gpu: int) -> None:
            for model in models:
                for system in self.systems:  # the rivals follow at once: on the same GPU, with the same load
                    self._work(model, system, gpu)

        with ThreadPoolExecutor(self.gpus) as pool:
            list(pool.map(lane, range(self.gpus)))

    def _job(self, model: str, system: str) -> Job:
        ours = system == "quire"
        # Two seconds to write the last row and to end.
        return Job(model, dtype_name(self.dtype), str(self.device), system,
                   [cell.name for cell in self._left(model, system)], self.layers, self.args.attention[0] if ours else "",
                   self.options if ours else {}, self.args.scale, self.rates.get(self._label(model)),
                   None if self.deadline is None else self.deadline - 2)

    def _work(self, model: str, system: str, gpu: int) -> None:
        """Processes until every cell of the model has a row or the time is up: one that dies loses one cell."""
        out = self.args.out or Path("matrix.json")
        log = out.with_name(f"{out.stem}.{self._label(model).replace('/', '-')}.{system}.log")
        while (left := self._left(model, system)) and (
                self.deadline is None or time.time() + STARTS.get(system, 60.0) < self.deadline):
            try:
                for row in workers.rows(["-m", "quire.graph_runner.bench.matrix_cells"], asdict(self._job(model, system)),
                                        self._environment(system, gpu), deadline=self.deadline, log=log,
                                        cores=workers.cores_of(gpu, self.gpus)):
                    self.take(row)
                return
            except workers.Ended as error:
                if len(self._left(model, system)) == len(left):
                    self.take(complete({
                        "system": system, "model": self._label(model), "dtype": dtype_name(self.dtype),
                        **left[0]._asdict(), "error": str(error)}, None))

    def _environment(self, system: str, gpu: int) -> dict[str, str]:
        made = workers.of_gpu(gpu)
        if system.startswith("vllm"):
            made |= {name: value for name, value in VLLM_ENV.items() if name not in os.environ}
            if self.args.vllm_path is not None:
                made["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(self.args.vllm_path))))
        return made

    def take(self, row: Row) -> None:
        """Keep a row of a worker, or the environment that it reports."""
        with self._lock:
            if "environment" in row:
                self.environment = self.facts["environments"].setdefault(self.run_id, row["environment"])
                return
            row = {**row, "run": self.run_id, "command": self.command}
            self.known.append(row)
            if row.get("rate"):
                self.rates.setdefault(row["model"], row["rate"])
            self.keep(row)

    def finish(self) -> None:
        """Print the ratios, and what is left."""
        self.console.print(summary(self.rows))
        left = [f"{m} {s}: {len(n)}" for m in self.models for s in self.systems if (n := self._left(m, s))]
        if left:
            self.say(f"cells left (run again with --resume): {', '.join(left)}")
            if self.deadline is not None:
                self.say(f"--deadline {self.args.deadline:g} is up, or too near to start an engine for them "
                         f"({', '.join(f'{s} {STARTS.get(s, 60.0):g} s' for s in self.systems)} at least)")
        super().finish()
