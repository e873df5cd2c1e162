"""Compares the rows of a run with an earlier result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.graph_runner.bench.report import Row, describe, rich_table

#: Columns that identify a row in both results.
KEY = ("workload", "variant", "system", "attention", "model", "dtype", "quantization", "kv_cache_dtype", "batch", "context",
       "max_model_len")


def _key(row: Row) -> tuple[Any, ...]:
    """The values of KEY. Results from before quantized caches do not name the cache's dtype, which was the model's."""
    row = {**row, "kv_cache_dtype": row.get("kv_cache_dtype") or row.get("dtype")}
    return tuple(row.get(k) for k in KEY)


def time_of(row: Row) -> tuple[str, float] | None:
    """(unit, time) of a step, else of the whole run; None if the row was not measured."""
    for name, unit in (("ms_per_step", "ms"), ("seconds", "s")):
        if row.get(name) is not None:
            return unit, float(row[name])
    return None


def compare(before: dict[str, Any], environment: dict[str, Any], rows: Sequence[Row], tolerance: float,
            console: Any) -> int:
    """Print old, new and their ratio for each row in both.

    Returns:
        1 if a row got slower by more than ``tolerance``, or was measured before and failed now; else 0.
    """
    old = {_key(row): row for row in before.get("rows", [])}
    cells, slower = [], 0
    for row in rows:
        then, now = time_of(old.get(_key(row), {})), time_of(row)
        if then is None:
            continue
        ratio = now[1] / then[1] if now is not None else None
        bad = ratio is None or ratio > 1 + tolerance
        slower += bad
        cells.append({
            "row": describe(row), "old": f"{then[1]:.3f} {then[0]}",
            "new": "failed" if now is None else f"{now[1]:.3f} {now[0]}",
            "new / old": "" if ratio is None else f"{ratio:.3f}",
            "verdict": "[red]failed[/red]" if ratio is None else "[red]slower[/red]" if bad else
                       "[green]faster[/green]" if ratio < 1 - tolerance else "same"})
    earlier = before.get("environment", {})
    console.print(rich_table(f"against the result of {earlier.get('date', 'unknown date')}", cells))
    devices = [e.get("device") for e in (earlier, environment)]
    if devices[0] != devices[1]:
        console.print(f"the earlier result is from another device ({devices[0]}, this is {devices[1]}): the ratios mean little",
                      highlight=False, markup=False)
    if not cells:
        console.print("no row of this run is in the earlier result: nothing was compared", highlight=False)
    console.print(f"{len(cells)} rows compared, {slower} slower by more than {tolerance:.1%}", highlight=False)
    return int(slower > 0)


__all__ = ["KEY", "compare", "time_of"]
