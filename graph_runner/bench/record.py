"""A developer's script: its arguments, its rows, printed and written as they come, a limit on its time, and steps of an engine,
timed one by one."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from quire.graph_runner.bench.models import ModelSpec, build, layers_asked
from quire.graph_runner.bench.report import Row, environment, failure, write
from quire.graph_runner.bench.roofline import copy_bandwidth

PATIENCE = 10.0  # seconds from the deadline until a measurement that was not interrupted ends the process


class OutOfTime(BaseException):
    """The script's time is over. No Exception: what a measurement catches, and torch.compile reports in its own words, is not
    that."""


class Record:
    """Rows, printed and written as they come. Measures in turn; a measurement that fails or runs out of time becomes a row with
    ``error``, and the earlier ones stay. ``show`` makes the line that is printed for a row.

    Args:
        path: the JSON file; None: rows are printed only.
        deadline: seconds from the start of the process. A measurement that runs then is interrupted, or, where it does not
            return to Python for 10 more seconds, as a hanging step on the GPU, a row says so and the process ends with exit
            code 124. None: no limit.
        facts: of the whole run, for the file.
    """

    #: False: nothing is interrupted at the deadline, only ``left`` counts down to it
    interrupts = True
    #: least seconds from one writing of the file to the next: thousands of rows take longer to write than one to measure
    write_every = 0.0

    def __init__(self, path: Path | None, device: torch.device, deadline: float | None = None, **facts: Any) -> None:
        self.path, self.device, self.facts, self.rows = path, device, facts, list[Row]()
        self.show: Callable[[Row], str] = functools.partial(json.dumps, default=str)
        self._key, self._known = tuple[str, ...](), set[tuple[Any, ...]]()
        self._end = time.monotonic() + (float("inf") if deadline is None else deadline - _age())
        self._armed, self._written = False, float("-inf")

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        return environment(self.device)

    def copy_bandwidth(self) -> float:
        """Bytes per second of a large copy on the device, measured now and kept with the environment."""
        bandwidth = copy_bandwidth(self.device)
        self.environment["copy_tb_per_s"] = bandwidth / 1e12
        return bandwidth

    def say(self, text: str) -> None:
        print(text, flush=True)

    def keep(self, row: Row) -> None:
        """Add a row, print it and write all; with ``write_every`` not always."""
        self._add(row)
        self.say(self.show(row))
        if time.monotonic() - self._written >= self.write_every:
            self.write()

    def write(self) -> None:
        """Again, after a row was changed."""
        if self.path is not None:
            write(self.path, self.environment, self.rows, **self.facts)
        self._written = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._end - time.monotonic()

    def go_on(self, files: Sequence[Path], key: Sequence[str], drop: Callable[[Row], bool] = lambda row: False) -> None:
        """Take over the rows of the record's own file and of ``files``: the first of those that agree in the columns ``key``,
        unless ``drop`` says so."""
        self._key = tuple(key)
        for file in [file for file in (self.path, *files) if file is not None and file.is_file()]:
            for row in json.loads(file.read_text()).get("rows", []):
                if not self.has(row) and not drop(row):
                    self._add(row)

    def has(self, row: Row) -> bool:
        """Whether there is a row that agrees with this one in the columns of ``go_on``."""
        return tuple(row.get(name) for name in self._key) in self._known

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self._known.add(tuple(row.get(name) for name in self._key))

    @property
    def failed(self) -> bool:
        """Whether nothing was measured, or a row has an error."""
        return not self.rows or any("error" in row for row in self.rows)

    def measure(self, name: str, run: Any, needs: float = 0.0, most: float = float("inf")) -> bool:
        """Call ``run``, which keeps its rows. Returns whether it ended well; if not, a row named ``name`` says why. It is not
        begun with fewer than ``needs`` seconds left, and interrupted after ``most`` seconds, too."""
        began = time.monotonic()
        if self.left <= max(needs, 1.0):
            self.keep({"row": name, "error": f"left out: {max(self.left, 0):.0f} s are left of the time"})
            return False
        outermost = self.interrupts and self._end < float("inf") and not self._armed  # measurements may be nested
        if outermost:
            previous, self._armed = signal.signal(signal.SIGALRM, self._interrupt), True
            last = threading.Timer(min(self.left, most) + PATIENCE, self._exit, [name])
            last.daemon = True
            last.start()
        try:
            if outermost:
                signal.setitimer(signal.ITIMER_REAL, min(self.left, most))
            run()
        except (Exception, OutOfTime) as error:
            self.keep({"row": name, "after_s": time.monotonic() - began, **failure(error), **_interrupted_in(error)})
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


def _interrupted_in(error: BaseException) -> dict[str, Any]:
    """Where a measurement was when its time was over: the innermost calls, the last one first."""
    if not isinstance(error, OutOfTime):
        return {}
    frames = traceback.extract_tb(error.__traceback__)[:-1]  # without the handler
    return {"in": [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames[-8:])]}


def _age() -> float:
    """Seconds since the process started, imports included; 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def script(doc: str | None, model: str | None = "tiny", limited: bool = True, **options: Any) -> argparse.ArgumentParser:
    """The parser of a script: ``--device``, ``--json``, ``--deadline`` if ``limited``, ``--model`` with that default and
    ``--layers`` unless it is None, and ``options`` of its own: the default of each, or (default, help), by name. An option's
    type is that of the default; a list stands for a list of numbers with commas, False for a switch."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    if model is not None:
        add("--model", default=model, help=f"a shape of quire bench, or the path of a saved model (default: {model})")
        add("--layers", type=int, help="only the first N layers (default: $LAYERS, else all)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", type=Path, help="write the rows to this file, after each of them")
    if limited:
        add("--deadline", type=float, metavar="SECONDS",
            help="from the start of the process; what has no time becomes a row with error (default: none)")
    for name, given in options.items():
        default, text = given if isinstance(given, tuple) else (given, "")
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            add(flag, action="store_true", help=text)
            continue
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        add(flag, default=default, type=numbers if isinstance(default, list) else type(default),
            help=f"{text} (default: {shown})".strip())
    return parser


def numbers(text: str) -> list[int]:
    """"1,8,32" as a list; of "" an empty one."""
    return [int(item) for item in text.split(",") if item]


def started(args: argparse.Namespace) -> Record:
    """The record of a script with the parsed arguments of ``script``, which are in its file too."""
    if hasattr(args, "model"):
        args.layers = layers_asked(args.layers)
    return Record(args.json, torch.device(args.device), getattr(args, "deadline", None),
                  command=f"python {shlex.join(sys.argv)}", arguments=vars(args))


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    """bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if torch.device(args.device).type == "cuda" else torch.float32


def spec_of(args: argparse.Namespace, dtype: torch.dtype | None = None) -> ModelSpec:
    """The model that a script's arguments name; ``dtype``: that of ``dtype_of`` by default."""
    return ModelSpec(args.model, dtype or dtype_of(args), torch.device(args.device), args.layers)


def model_of(args: argparse.Namespace, positions: int = 0, dtype: torch.dtype | None = None) -> Any:
    """The same, built with at least ``positions`` positions."""
    return build(spec_of(args, dtype), positions=positions)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], Any]) -> float:
    """The time of a call, until the GPU has done its work."""
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def milliseconds(run: Callable[[], Any], count: int) -> list[float]:
    """The time of each of ``count`` calls."""
    return [seconds(run) * 1e3 for _ in range(count)]


def until_decoding(engine: Any) -> None:
    """Step until all prompts are computed."""
    while engine.scheduler.waiting or any(r.num_uncomputed != 1 for r in engine.scheduler.running):
        engine.step()


def end(engine: Any, requests: Iterable[int]) -> None:
    """Abort the requests, and step until nothing is left."""
    for request in requests:
        engine.abort(request)
    while engine.has_unfinished:
        engine.step()


def random_tokens(vocab_size: int) -> Callable[[int], list[int]]:
    """Draws prompts of given lengths, the same ones in each run."""
    generator = torch.Generator().manual_seed(0)
    return lambda length: torch.randint(vocab_size, (length,), generator=generator).tolist()


def processor_ms(run: Callable[[], Any], count: int = 200) -> list[float]:
    """The thread's own processor time of each of ``count`` calls, after a few: other work on the machine counts only by what it
    drops from caches."""
    times = []
    for _ in range(count + 20):
        began = time.thread_time()
        run()
        times.append((time.thread_time() - began) * 1e3)
    return times[20:]
