"""The regression guard: this run's rows beside an earlier result's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.graph_runner.bench.report import Row, describe

#: What identifies a row in two results.
KEY = ("workload", "variant", "system", "attention", "model", "dtype", "quantization", "kv_cache_dtype", "batch", "context",
       "max_model_len")


def _key(row: Row) -> tuple[Any, ...]:
    """The values of KEY. Results from before there were quantised caches do not name the cache's dtype: the model's."""
    row = {**row, "kv_cache_dtype": row.get("kv_cache_dtype") or row.get("dtype")}
    return tuple(row.get(k) for k in KEY)


def measure_of(row: Row) -> tuple[str, float] | None:
    """The time of a row that is compared, and its unit: a step's, else the whole run's; None if it was not measured."""
    for name, unit in (("ms_per_step", "ms"), ("seconds", "s")):
        if row.get(name) is not None:
            return unit, float(row[name])
    return None


def compare(before: dict[str, Any], environment: dict[str, Any], rows: Sequence[Row], tolerance: float,
            console: Any) -> int:
    """Print old, new and their ratio for each row that both have.

    Returns:
        1 if a row got slower by more than ``tolerance``, or was measured before and failed now; else 0.
    """
    from rich import box
    from rich.table import Table

    old = {_key(row): row for row in before.get("rows", [])}
    made = Table(title=f"against the result of {before.get('environment', {}).get('date', 'unknown date')}",
                 title_justify="left", title_style="bold", box=box.SIMPLE)
    made.add_column("row")
    for name in ("old", "new", "new / old"):
        made.add_column(name, justify="right")
    made.add_column("")
    slower = compared = 0
    for row in rows:
        earlier = old.get(_key(row))
        then = measure_of(earlier) if earlier is not None else None
        now = measure_of(row)
        if then is None:
            continue
        compared += 1
        if now is None:
            slower += 1
            made.add_row(describe(row), f"{then[1]:.3f} {then[0]}", "failed", "", "[red]failed[/red]")
            continue
        ratio = now[1] / then[1]
        bad = ratio > 1 + tolerance
        slower += bad
        verdict = "[red]slower[/red]" if bad else "[green]faster[/green]" if ratio < 1 - tolerance else "same"
        made.add_row(describe(row), f"{then[1]:.3f} {then[0]}", f"{now[1]:.3f} {now[0]}", f"{ratio:.3f}", verdict)
    console.print(made)
    then_device, device = before.get("environment", {}).get("device"), environment.get("device")
    if then_device != device:
        console.print(f"the earlier result is from another device ({then_device}, this is {device}): the ratios mean "
                      "little", highlight=False, markup=False)
    if not compared:
        console.print("no row of this run is in the earlier result: nothing was compared", highlight=False)
    console.print(f"{compared} rows compared, {slower} slower by more than {tolerance:.1%}", highlight=False)
    return int(slower > 0)


__all__ = ["KEY", "compare", "measure_of"]
