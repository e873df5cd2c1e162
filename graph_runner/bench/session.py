"""One run of ``quire bench``: measures, and keeps every row as soon as it exists."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.progress import Progress

from quire.attn_ops.backend import dtype_name
from quire.graph_runner.bench.host import LENGTHS, cases, host
from quire.graph_runner.bench.models import Models, ModelSpec, config_of, free_memory, layers_asked
from quire.graph_runner.bench.record import Record
from quire.graph_runner.bench.report import Row, complete, describe, failure, result_line, table
from quire.graph_runner.bench.start import start
from quire.graph_runner.bench.systems import SYSTEMS, NotMeasured
from quire.graph_runner.bench.workloads import LONG, MARGIN, WORKLOADS, Sizes
from quire.graph_runner.config import kv_dtype

logger = logging.getLogger(__name__)
LOG_WIDTH = 160  # of tables where the output is not a terminal


class Run(Record):
    """What all workloads share: device, dtype and options of the engine, and the rows. Raises ValueError for arguments that
    make no sense; a subclass, too, raises it before anything is measured."""

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        self.args, self.command = args, command
        self.console = Console() if sys.stdout.isatty() else Console(width=LOG_WIDTH)
        super().__init__(args.out, torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu")))
        self.show = lambda row: f"{describe(row)}: {result_line(row)}"
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu and not torch.cuda.is_available():
            raise ValueError("--device cuda, but torch sees no GPU here")
        name = args.dtype or ("bfloat16" if self.on_gpu else "float32")
        dtype = kv_dtype(name)
        if dtype is None or not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(f"--dtype {name!r} is not a floating-point torch dtype such as bfloat16")
        self.dtype = dtype
        #: of ``quire.Engine``
        self.options: Row = dict(args.engine)
        if args.kv_cache_dtype != "auto":
            if "kv_cache_dtype" in self.options:
                raise ValueError("the dtype of the KV cache is given twice: by --kv-cache-dtype and by --engine")
            self.options["kv_cache_dtype"] = args.kv_cache_dtype

    def measure_bandwidth(self) -> None:
        """Sets ``bandwidth``; once the arguments are known to be valid."""
        self.bandwidth = self.copy_bandwidth()
        free_memory()
        self.say(f"{self.environment['device']}, copy {self.bandwidth / 1e12:.3f} TB/s, torch {torch.__version__}")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def complete_and_keep(self, row: Row) -> None:
        self.keep(complete({"command": self.command, **row}, self.bandwidth))

    def finish(self) -> None:
        """Write everything, and say where."""
        self.write()
        if self.path is not None:
            self.say(f"wrote {self.path}")


class Session(Run):
    """A run over workloads, systems and attention backends of whole engines."""

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        super().__init__(args, command)
        small = not self.on_gpu or args.workload == "host"
        self.models = Models(ModelSpec(args.model or ("tiny" if small else "llama-8b"), self.dtype, self.device,
                                       layers_asked(args.layers), args.quantize))
        self.kv_cache_dtype = kv_dtype(self.options.get("kv_cache_dtype", "auto")) or self.dtype
        config = config_of(self.models.spec).get_text_config(decoder=True)
        self.vocab_size = int(config.vocab_size)
        most = getattr(config, "max_position_embeddings", 2 * Sizes.context) + MARGIN - LONG - 1
        self.sizes = Sizes(tuple(args.batch or Sizes.batches), tuple(args.batch or Sizes.host_batches),
                           args.context[0] if args.context else min(Sizes.context, most), args.repeats, args.scale)
        self.systems = list(dict.fromkeys([*args.systems, *args.vs]))
        if unknown := [name for name in self.systems if name not in SYSTEMS]:
            raise ValueError(f"unknown systems {unknown}; there are: {', '.join(SYSTEMS)}")
        if min(args.repeats, args.scale) < 1:
            raise ValueError("--repeats and --scale must be at least 1")
        self.workloads = [*WORKLOADS, "start", "host"] if args.workload == "all" else [args.workload]
        if "decode" in self.workloads and self.sizes.context <= MARGIN:
            raise ValueError(f"--context must be more than {MARGIN}, got {self.sizes.context}")
        self.measure_bandwidth()

    def run(self) -> None:
        """All of it; a failure becomes a row that says why."""
        for workload in self.workloads:
            for system in self.systems:
                for attention in self.args.attention if system == "quire" else [""]:
                    self._measure(workload, system, attention)
                    free_memory()

    def _measure(self, workload: str, system: str, attention: str) -> None:
        ours, dtype = system == "quire", self.dtype
        common = {"workload": workload, "system": system, "attention": attention, "model": self.models.spec.label,
                  "dtype": dtype_name(dtype), "quantization": self.args.quantize,
                  "kv_cache_dtype": dtype_name(self.kv_cache_dtype if ours else dtype)}
        name = " ".join(filter(None, (workload, system, attention)))
        self.say(f"{name}: setting up")
        try:
            total, rows = self._rows(workload, system, attention, dict(self.options) if ours else {})
            # An estimate of the time left, on a terminal only. Drawn between rows: a thread that draws would take time from the
            # host's side of a step.
            with Progress(console=self.console, transient=True, auto_refresh=False,
                          disable=not self.console.is_terminal) as bar:
                for row in bar.track(rows, total, description=name):
                    self.complete_and_keep({**common, **row})
        except NotMeasured as error:
            self.complete_and_keep({**common, "error": str(error)})
        except Exception as error:
            logger.debug("%s", name, exc_info=True)
            self.complete_and_keep({**common, **failure(error)})

    def _rows(self, workload: str, system: str, attention: str, options: Row) -> tuple[int, Iterator[Row]]:
        """The number of rows, and the rows."""
        if workload == "start":
            self.models.drop()  # the new processes need the memory
            return 2, start(self.models.spec, system, attention, options)
        if workload == "host":
            if system != "quire":
                raise NotMeasured("only quire's own host part can be measured without the model")
            return len(LENGTHS) * len(cases(self.sizes)), host(self.models.spec, attention, options, self.sizes)
        job = WORKLOADS[workload]
        return job.rows(self.sizes), job.serve(self.models, system, attention, options, self.sizes, self.vocab_size)

    def finish(self) -> None:
        """Print all rows as a table."""
        if self.rows:
            self.console.print(table(self.rows, self.models.spec.label))
        super().finish()
