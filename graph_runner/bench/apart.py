"""Systems measured in turn by one script, each in a process of its own: its memory is free before the next one starts, and a
deadline that ends one, with the processes that it started, leaves the others as they are."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable

from quire.graph_runner.bench import workers
from quire.graph_runner.bench.record import Record, started
from quire.graph_runner.bench.report import Row


def run(parser: argparse.ArgumentParser, shares: dict[str, float],
        measure: Callable[[str, Record, argparse.Namespace], None], finish: Callable[[list[Row]], None] = lambda rows: None
        ) -> Record | None:
    """Measure each of ``--ways`` in a process of its own, and write all rows to one file, as each way writes its own.

    A way gets its share of the time that is left. At its end its processes are killed, and what it has written stays: a row
    without figures then has ``error``, which says what the way was doing (``doing`` of its row).

    Args:
        parser: of the script (``record.script``). It gets ``--ways``, and ``--apart``, with which the script starts itself for
            one of them.
        shares: of the time, for each way that the script knows.
        measure: ``(way, record, arguments)``, called in the way's own process. ``record.left`` is its time; nothing interrupts
            it.
        finish: completes the rows of all ways, in place, before they are written.

    Returns:
        The record of all ways; None in the process of one.
    """
    parser.add_argument("--ways", default=",".join(shares), help="any of: %(default)s (default: all)")
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    ways = args.ways.split(",")
    if unknown := sorted(set(ways) - shares.keys()):
        raise SystemExit(f"unknown ways {', '.join(unknown)}; there are: {', '.join(shares)}")
    record = started(args, interrupts=False)
    if args.apart:
        record.write = lambda: workers.emit({"rows": record.rows})  # type: ignore[method-assign]
        record.measure(ways[0], lambda: measure(ways[0], record, args))
        workers.emit({})
        return None
    # So that a way's process ends with this one.
    previous = signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        for i, way in enumerate(ways):
            _one(record, way, record.left * shares[way] / sum(shares[of] for of in ways[i:]), finish)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return record


def _one(record: Record, way: str, seconds: float, finish: Callable[[list[Row]], None]) -> None:
    before, began, rows, ended = list(record.rows), time.monotonic(), list[Row](), ""

    def merge() -> None:
        record.rows[:] = before + rows
        finish(record.rows)
        record.write()

    limit = [] if seconds == float("inf") else ["--deadline", f"{seconds:.1f}"]
    try:
        for found in workers.rows([*sys.argv, "--ways", way, "--apart", *limit], None, {}, shown=True,
                                  deadline=time.time() + seconds if limit else None):
            rows = found["rows"]
            merge()
        took = time.monotonic() - began
        ended = f"was stopped after {took:.0f} s" if took >= seconds else ""
    except workers.Ended as error:
        took, ended = time.monotonic() - began, f"ended with exit code {error.code}"
    last: Row = rows[-1] if rows else {"way": way}
    doing = last.pop("doing", None)
    if ended and "error" not in last:
        last["error" if doing or not rows else "ended"] = ended + (f", during {doing}" if doing else "")
        print(json.dumps(last, default=str), flush=True)
    rows = [{"way": way, **row, "process_s": took} for row in rows or [last]]
    merge()
