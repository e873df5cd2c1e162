"""One run of the benchmark: over workloads, systems and attention backends, keeping each row as soon as it is there."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from quire.attn_ops.kv_quant import QUANTISED
from quire.graph_runner.bench.host import BATCHES, LENGTHS, host
from quire.graph_runner.bench.report import Row, complete, describe, environment, result_line, table, write
from quire.graph_runner.bench.roofline import copy_bandwidth
from quire.graph_runner.bench.shapes import ModelSpec, check_quantization, config_of, layers_asked
from quire.graph_runner.bench.start import start
from quire.graph_runner.bench.systems import NAMES, Models, NotMeasured, free_memory, open_system
from quire.graph_runner.bench.workloads import LONG, MARGIN, WORKLOADS, Prompts, Sizes, Workload
from quire.graph_runner.config import kv_dtype

logger = logging.getLogger(__name__)
CONTEXT = 1024  # of decode, unless --context says otherwise
LOG_WIDTH = 160  # of tables where the output is no terminal


class Session:
    """See the module's docstring. Raises ValueError at once for arguments that make no sense."""

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        self.args, self.command = args, command
        self.console = Console() if sys.stdout.isatty() else Console(width=LOG_WIDTH)
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda, but torch sees no GPU here")
        name = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        dtype = kv_dtype(name)
        if dtype is None or not dtype.is_floating_point or dtype in QUANTISED:
            raise ValueError(f"--dtype {name!r} is not a floating-point torch dtype such as bfloat16")
        small = device.type != "cuda" or args.workload == "host"
        spec = ModelSpec(args.model or ("tiny" if small else "llama-8b"), dtype, device, layers_asked(args.layers),
                         args.quantize)
        check_quantization(args.quantize)
        self.options: Row = dict(args.engine)
        if args.kv_cache_dtype != "auto":
            if "kv_cache_dtype" in self.options:
                raise ValueError("the dtype of the KV cache is given twice: by --kv-cache-dtype and by --engine")
            self.options["kv_cache_dtype"] = args.kv_cache_dtype
        self.kv_cache_dtype = kv_dtype(self.options.get("kv_cache_dtype", "auto")) or dtype
        config = config_of(spec).get_text_config(decoder=True)
        self.vocab_size = int(config.vocab_size)
        self.models = Models(spec)
        most = getattr(config, "max_position_embeddings", 2 * CONTEXT) + MARGIN - LONG - 1
        self.sizes = Sizes(tuple(args.batch or Sizes.batches), args.context[0] if args.context else min(CONTEXT, most),
                           args.repeats, args.scale)
        self.systems = list(dict.fromkeys([*args.systems, *args.vs]))
        unknown = [name for name in self.systems if name not in NAMES]
        if unknown:
            raise ValueError(f"unknown systems {unknown}; there are: {', '.join(NAMES)}")
        if min(args.repeats, args.scale) < 1:
            raise ValueError("--repeats and --scale must be at least 1")
        self.workloads = [*WORKLOADS, "start", "host"] if args.workload == "all" else [args.workload]
        if "decode" in self.workloads:
            WORKLOADS["decode"].limits(self.sizes)  # the context is long enough
        self.rows: list[Row] = []
        self.bandwidth = copy_bandwidth(device)
        free_memory()
        self.environment = environment(device, self.bandwidth)
        self.console.print(f"{self.environment['device']}, copy {self.bandwidth / 1e12:.3f} TB/s, "
                           f"torch {torch.__version__}", highlight=False)

    def measure(self) -> None:
        """All of it; what fails becomes a row that says why."""
        for workload in self.workloads:
            for system in self.systems:
                for attention in self.args.attention if system == "quire" else [""]:
                    dtype = self.models.spec.dtype
                    common = {"workload": workload, "system": system, "attention": attention,
                              "model": self.models.spec.label, "dtype": _name(dtype),
                              "quantization": self.args.quantize, "command": self.command,
                              "kv_cache_dtype": _name(self.kv_cache_dtype if system == "quire" else dtype)}
                    options = dict(self.options) if system == "quire" else {}
                    try:
                        if workload == "start":
                            self._start(system, attention, options, common)
                        elif workload == "host":
                            self._host(system, attention, options, common)
                        else:
                            self._measure(WORKLOADS[workload], system, attention, options, common)
                    except NotMeasured as error:
                        self._keep({**common, "error": str(error)})
                    except Exception as error:
                        logger.debug("%s, %s", workload, system, exc_info=True)
                        self._keep({**common, "error": f"{type(error).__name__}: {error}"})
                    free_memory()

    def _measure(self, workload: Workload, system: str, attention: str, options: Row, common: Row) -> None:
        prompts = Prompts(self.vocab_size)
        self.console.print(f"{common['workload']}: setting up {system} {attention}".rstrip(), highlight=False)
        with open_system(system, self.models, attention, workload.limits(self.sizes), options) as opened:
            common = {**common, "attention": opened.attention, "capture_s": opened.capture_s,
                      "engine_options": {k: _plain(v) for k, v in opened.options.items()}}
            with self._progress(common, workload.ticks(self.sizes)) as tick:
                for row in workload.run(opened, self.models, self.sizes, prompts, tick):
                    row["peak_memory_gib"] = opened.peak_memory_gib(self.models.spec.device)
                    self._keep({**common, **row})

    def _start(self, system: str, attention: str, options: Row, common: Row) -> None:
        self.models.drop()  # the new processes need the memory
        with self._progress(common, 2) as tick:
            for row in start(self.models.spec, system, attention, options, tick):
                self._keep({**common, "engine_options": {k: _plain(v) for k, v in options.items()}, **row})

    def _host(self, system: str, attention: str, options: Row, common: Row) -> None:
        if system != "quire":
            raise NotMeasured("only quire's own host part can be measured without the model")
        batches = tuple(self.args.batch or BATCHES)
        with self._progress(common, len(LENGTHS) * (len(batches) + 2) * self.sizes.repeats) as tick:
            for row in host(self.models.spec, attention, options, batches, self.sizes.repeats, tick):
                self._keep({**common, **row})

    @contextlib.contextmanager
    def _progress(self, common: Row, total: int) -> Iterator[Callable[[], None]]:
        """A progress bar with an estimate of the time left, drawn between measurements only: a thread that draws
        would take time from the host's side of a step. Nothing where the output is no terminal."""
        bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                       TextColumn("left"), TimeRemainingColumn(), console=self.console, transient=True,
                       auto_refresh=False, disable=not self.console.is_terminal)
        with bar:
            words = (common["workload"], common["system"], common["attention"])
            task = bar.add_task(" ".join(filter(None, words)), total=total)

            def tick() -> None:
                bar.advance(task)
                bar.refresh()

            yield tick

    def _keep(self, row: Row) -> None:
        row = complete(row, self.bandwidth)
        self.rows.append(row)
        if self.args.out is not None:
            write(self.args.out, self.environment, self.rows)
        self.console.print(f"{describe(row)}: {result_line(row)}", highlight=False, markup=False)

    def finish(self) -> None:
        """Print all rows as a table."""
        if self.rows:
            self.console.print(table(self.rows, self.models.spec.label))
        if self.args.out is not None:
            write(self.args.out, self.environment, self.rows)
            self.console.print(f"wrote {self.args.out}", highlight=False)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(value: Any) -> Any:
    """As JSON can hold it."""
    return value if isinstance(value, (bool, int, float, str, list)) or value is None else str(value)


__all__ = ["LOG_WIDTH", "Session"]
