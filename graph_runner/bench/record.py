"""The rows of a developer's script: its arguments, its rows, printed and written as they come, and a limit on its time."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from quire.graph_runner.bench.models import ModelSpec, build, layers_asked
from quire.graph_runner.bench.report import Row, environment, failure, this_command, write
from quire.graph_runner.bench.roofline import copy_bandwidth

PATIENCE = 10.0  # seconds from the deadline until a measurement that was not interrupted ends the process


class OutOfTime(Exception):
    """The script's time is over."""


class Record:
    """Measures in turn; a measurement that fails or runs out of time becomes a row with ``error``, and the earlier ones stay.

    Args:
        path: the JSON file; None: rows are printed only.
        deadline: seconds from the start of the process. A measurement that runs then is interrupted, or, where it does not
            return to Python for 10 more seconds, as a hanging step on the GPU, a row says so and the process ends with exit
            code 124. None: no limit.
        interrupts: False: nothing is interrupted at the deadline, only ``left`` counts down to it.
        facts: of the whole run, for the file.
    """

    def __init__(self, path: Path | None, device: torch.device, deadline: float | None = None, interrupts: bool = True,
                 **facts: Any) -> None:
        self.path, self.device, self.facts, self.rows, self.interrupts = path, device, facts, list[Row](), interrupts
        self.environment = environment(device, None)
        self._end = None if deadline is None else deadline - _age()
        self._began, self._armed = time.monotonic(), False

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return float("inf") if self._end is None else self._end - (time.monotonic() - self._began)

    def copy_bandwidth(self) -> float:
        """Bytes per second of a large copy on the device, measured now and kept with the environment."""
        bandwidth = copy_bandwidth(self.device)
        self.environment["copy_tb_per_s"] = bandwidth / 1e12
        return bandwidth

    def keep(self, row: Row) -> None:
        """Add a row, print it and write all."""
        self.rows.append(row)
        print(json.dumps(row, default=str), flush=True)
        self.write()

    def write(self) -> None:
        """Again, after a row was changed."""
        if self.path is not None:
            write(self.path, self.environment, self.rows, command=this_command(), **self.facts)

    def measure(self, name: str, run: Any, needs: float = 0.0, most: float = float("inf")) -> bool:
        """Call ``run``, which keeps its rows. Returns whether it ended well; if not, a row named ``name`` says why.

        Args:
            needs: seconds. It is not begun with less time left.
            most: seconds. It is interrupted after them, too.
        """
        began = time.monotonic()
        if self.left <= max(needs, 1.0):
            self.keep({"row": name, "error": f"left out: {max(self.left, 0):.0f} s are left of the time"})
            return False
        outermost = self.interrupts and self._end is not None and not self._armed  # measurements may be nested
        if outermost:
            previous, self._armed = signal.signal(signal.SIGALRM, self._interrupt), True
            last = threading.Timer(min(self.left, most) + PATIENCE, self._exit, [name])
            last.daemon = True
            last.start()
        try:
            if outermost:
                signal.setitimer(signal.ITIMER_REAL, min(self.left, most))
            run()
        except Exception as error:
            self.keep({"row": name, "after_s": time.monotonic() - began, **failure(error)})
            return False
        finally:
            if outermost:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, previous)
                last.cancel()
                self._armed = False
        return True

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        raise OutOfTime("the deadline has come")

    def _exit(self, name: str) -> None:
        self.keep({"row": name, "error": "cut off: its time is over, and the process did not return to Python"})
        os._exit(124)


def _age() -> float:
    """Seconds since the process started, imports included; 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--layers``, ``--json`` and ``--deadline``."""
    parser.add_argument("--layers", type=int, help="only the first N layers (default: $LAYERS, else all)")
    parser.add_argument("--json", type=Path, help="write the rows to this file, after each of them")
    parser.add_argument("--deadline", type=float, metavar="SECONDS",
                        help="from the start of the process; what has no time becomes a row with error (default: none)")


def script(doc: str | None, model: str = "tiny") -> argparse.ArgumentParser:
    """The parser of a script, with the arguments that all have: model, device, and those of ``add_arguments``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=model,
                        help=f"a shape of quire bench, or the path of a saved model (default: {model})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_arguments(parser)
    return parser


def started(args: argparse.Namespace, **facts: Any) -> Record:
    """The record of a script with the parsed arguments of ``script``, which are in its file too."""
    args.layers = layers_asked(args.layers)
    return Record(args.json, torch.device(args.device), args.deadline, arguments=vars(args), **facts)


def model_of(args: argparse.Namespace, positions: int = 0) -> Any:
    """The model that a script's arguments name: in bfloat16 on a GPU, float32 on a CPU."""
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return build(ModelSpec(args.model, dtype, device, args.layers), positions=positions)
