"""Results: rows with the environment they were measured in, as JSON and as a table, and beside an earlier result.

A row has the columns of COLUMNS, None where the workload has none; ``error`` instead of numbers where it failed:
``variant`` (cold or warm start; decode or extend), ``quantization`` (of the weights), ``max_model_len`` (host workload),
``bytes_per_step`` (formula: ``graph_runner/bench/roofline.py``), ``tb_per_s`` (bytes over measured time), ``floor_ms`` (the
roofline: bytes over copy bandwidth), ``share_of_floor`` (roofline over measured time; 1 is perfect), ``phases_ms`` (parts of a
host step) and ``slowest_ms`` (the slowest of its steps).
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from quire.attn_ops.tuning.store import device_name, installed_version

Row = dict[str, Any]
#: The columns that say what was measured; rows that agree in them are compared.
KEY = ("workload", "variant", "system", "attention", "model", "dtype", "quantization", "kv_cache_dtype", "batch", "context",
       "max_model_len")
COLUMNS = (*KEY, "ms_per_step", "tokens_per_s", "seconds", "bytes_per_step", "tb_per_s", "floor_ms", "share_of_floor",
           "peak_memory_gib", "capture_s", "phases_ms", "slowest_ms", "engine_options", "command", "error")
PHASES = ("schedule", "fill", "upload", "launch", "collect")  # of a host step
LEFT = ("workload", "system", "attention", "cache", "row", "verdict")  # left-aligned columns
ROOT = Path(__file__).resolve().parents[2]


def failure(error: BaseException) -> Row:
    """The columns of a row that could not be measured."""
    return {"error": f"{type(error).__name__}: {error}"}


def complete(row: Row, bandwidth: float | None) -> Row:
    """``row`` with every column; derived ones are computed from bytes, time and the copy ``bandwidth`` in bytes/s."""
    row = {**dict.fromkeys(COLUMNS), **row}
    size, step = row["bytes_per_step"], row["ms_per_step"]
    if size and step:
        row["tb_per_s"] = size / step / 1e9
        if bandwidth:
            row["floor_ms"] = size / bandwidth * 1e3
    took = step or (row["seconds"] and row["seconds"] * 1e3)
    if row["floor_ms"] and took:
        row["share_of_floor"] = row["floor_ms"] / took
    return row


def _run(*command: str, cwd: Path | None = None) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=cwd)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def environment(device: torch.device) -> dict[str, Any]:
    """Where and with what the numbers were measured. The commit comes from QUIRE_COMMIT, else from git."""
    smi = _run("nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm,clocks.max.memory",
               "--format=csv,noheader", f"--id={torch.cuda.current_device()}") if device.type == "cuda" else None
    driver, power, *clocks = [f.strip() for f in smi.splitlines()[0].split(",")] if smi else [None] * 4
    given = os.environ.get("QUIRE_COMMIT")
    status = None if given else _run("git", "status", "--porcelain", cwd=ROOT)
    versions = {name: installed_version({"flashinfer": "flashinfer-python"}.get(name, name))
                for name in ("torch", "triton", "transformers", "flashinfer", "vllm", "torchao")}
    return {
        "device": device_name(device), "driver": driver, "power_limit": power, "max_clocks": clocks,
        "cuda": torch.version.cuda, "python": platform.python_version(), "versions": versions,
        "commit": given or _run("git", "rev-parse", "HEAD", cwd=ROOT), "dirty": bool(status) if status is not None else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host_cores": os.cpu_count(), "copy_tb_per_s": None,
    }


def write(path: Path, env: dict[str, Any], rows: Sequence[Row], **more: Any) -> None:
    """Write the whole result so far, atomically: an interrupted run leaves a readable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    head = json.dumps({"environment": env, **more}, indent=1, default=str).removesuffix("\n}")
    lines = ",\n".join(json.dumps(row, default=str) for row in rows)  # a line per row
    part.write_text(f'{head},\n "rows": [\n{lines}\n]}}\n')
    part.replace(path)


def _identity(row: Row) -> dict[str, str]:
    """What the row measured, by column of the table."""
    kv_cache = row.get("kv_cache_dtype")
    cells = {"workload": " ".join(filter(None, (row["workload"], row.get("variant")))), "model": row["model"],
             "system": row["system"], "attention": row.get("attention"), "weights": row.get("quantization"),
             "cache": None if kv_cache in (None, row.get("dtype")) else f"{kv_cache} KV",
             **{name: row.get(name) for name in ("batch", "context", "max_model_len")}}
    return {name: "" if value is None else str(value) for name, value in cells.items()}


def _numbers(row: Row) -> dict[str, str]:
    """The measured numbers, by column of the table."""
    share, us = row["share_of_floor"], row.get("us")  # us: of one call of an attention op
    parts = {**(row["phases_ms"] or {}), **(row.get("parts_s") or {})}
    numbers = [("us", us, 1), ("ms/step", None if us else row["ms_per_step"], 3),
               *((name, parts.get(name), 3) for name in (*PHASES, *parts)),
               ("tokens/s", row["tokens_per_s"], 0), ("seconds", row["seconds"], 3), ("TB/s", row["tb_per_s"], 3),
               ("TFLOP/s", row.get("tflop_per_s"), 1), ("roofline ms", row["floor_ms"], 3),
               ("of roofline", share and f"{share:.0%}", 0), ("GiB", row["peak_memory_gib"], 1)]
    return {name: "" if value is None else value if isinstance(value, str) else f"{value:,.{digits}f}"
            for name, value, digits in numbers}


def describe(row: Row) -> str:
    """What the row measured, in one line."""
    return " ".join(f"{name} {cell}" if cell.isdigit() else cell for name, cell in _identity(row).items() if cell)


def first_line(text: str) -> str:
    """The first non-empty line, and the next one after a colon."""
    head, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return f"{head} {rest[0]}" if head.endswith(":") and rest else head


def result_line(row: Row) -> str:
    """The numbers of a row in one line, or why it was not measured."""
    if row["error"]:
        return f"not measured: {first_line(row['error'])}"
    return ", ".join(f"{name} {cell}" for name, cell in _numbers(row).items() if cell)


def rich_table(title: str, rows: Sequence[dict[str, str]]) -> Table:
    """A table with the keys of ``rows`` as columns, without those that are empty in every row."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE)
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]
    for name in names:
        made.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name != "row")
    for row in rows:
        made.add_row(*(row.get(name, "") for name in names))
    return made


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown, and an empty one."""
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(row)} |" for row in rows), ""]


def table(rows: Sequence[Row], title: str) -> Table:
    """The rows of a run, of one model, as a table."""
    failed = {"ms/step": "[yellow]not measured[/yellow]"}
    return rich_table(title, [{**_identity(row), **_numbers(row), "model": "", **(failed if row["error"] else {})}
                              for row in rows])


def time_of(row: Row) -> tuple[str, float] | None:
    """(unit, time) of a step, else of the whole run; None if the row was not measured."""
    for name, unit in (("ms_per_step", "ms"), ("seconds", "s")):
        if row.get(name) is not None:
            return unit, float(row[name])
    return None


def compare(before: dict[str, Any], environment: dict[str, Any], rows: Sequence[Row], tolerance: float,
            console: Any) -> int:
    """Print old, new and their ratio for each row in both. Returns 1 if a row got slower by more than ``tolerance``, or was
    measured before and failed now; else 0."""
    def key(row: Row) -> tuple[Any, ...]:
        # Results from before quantized caches do not name the cache's dtype, which was the model's.
        row = {**row, "kv_cache_dtype": row.get("kv_cache_dtype") or row.get("dtype")}
        return tuple(row.get(k) for k in KEY)

    old = {key(row): row for row in before.get("rows", [])}
    cells, slower = [], 0
    for row in rows:
        then, now = time_of(old.get(key(row), {})), time_of(row)
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
