"""Rows of a script that must end in time: each is printed and written as soon as it exists."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path

import torch

from quire.graph_runner.bench.report import Row, environment, failure, write


class LimitedRows:
    """The rows of one script, in ``args.json`` from the first one on.

    Args:
        args: of the script, with ``json`` (a path or None) and ``limit`` (seconds from now): then the process ends with exit
            code 124, and what was not measured is in the file as cut off.
        device: for the environment in the file.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.rows, self.current = args, [], "the start"
        self._began, self._lock = time.monotonic(), threading.Lock()
        self._environment = environment(device, None)
        self._timer: threading.Timer | None = None
        if args.limit != float("inf"):
            self._timer = threading.Timer(args.limit, self._end)
            self._timer.daemon = True
            self._timer.start()

    rows: list[Row]

    @property
    def left(self) -> float:
        """Seconds."""
        return self.args.limit - (time.monotonic() - self._began)

    def begin(self, what: str) -> bool:
        """Whether ``what`` can begin; a row says so where less than a twentieth of the time is left."""
        self.current = what
        if self.left < self.args.limit / 20:
            self.add({"way": what, "error": f"left out: {max(self.left, 0):.0f} s of {self.args.limit:.0f} s were left"})
            return False
        return True

    def add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
        print(json.dumps(row, default=str), flush=True)
        self.write()

    def failed(self, what: str, error: Exception) -> None:
        self.add({"way": what, **failure(error)})

    def write(self) -> None:
        """Again, after a row was changed."""
        with self._lock:
            if self.args.json is not None:
                write(self.args.json, self._environment, self.rows, arguments=vars(self.args))

    def finish(self) -> None:
        """Nothing ends the process any more."""
        if self._timer is not None:
            self._timer.cancel()
        self.write()

    def _end(self) -> None:
        self.add({"way": self.current, "error": f"cut off after {self.args.limit:.0f} s"})
        os._exit(124)  # a step on the GPU or a compilation may hang


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--layers``, ``--limit`` and ``--json``."""
    parser.add_argument("--layers", type=int, help="keep the first layers of a shape only; or the environment variable LAYERS")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS",
                        help="end with exit code 124 then; the file has what was measured (default: none)")
    parser.add_argument("--json", type=Path, help="a file for the results, written after each of them")


__all__ = ["LimitedRows", "add_arguments"]
