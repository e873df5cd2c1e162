"""Plots of the decode rows: the time of a step, and throughput, against the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.graph_runner.bench.report import Row

# Distinguishable with the common kinds of colour blindness (Okabe and Ito), and by marker without colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "os^DvPX"


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write decode-step.{png,svg} and decode-throughput.{png,svg}; with several models one set for each.

    Raises:
        ModuleNotFoundError: matplotlib is missing; says how to install it.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--plots needs matplotlib: pip install 'quire[bench]' or matplotlib") from error
    matplotlib.use("Agg")
    measured = [r for r in rows if r["workload"] == "decode" and r["ms_per_step"] is not None]
    written: list[Path] = []
    if measured:
        folder.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(r["model"] for r in measured):
        mine = [r for r in measured if r["model"] == model]
        suffix = "" if len({r["model"] for r in measured}) == 1 else "-" + model.replace("/", "-")
        written += _plot(mine, folder / f"decode-step{suffix}", f"{model}: one decode step", "ms", "ms_per_step",
                         floor=True)
        written += _plot(mine, folder / f"decode-throughput{suffix}", f"{model}: decode throughput",
                         "tokens per second", "tokens_per_s", floor=False)
    return written


def _plot(rows: Sequence[Row], path: Path, title: str, unit: str, column: str, *, floor: bool) -> list[Path]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes: Any = figure.subplots()
    kinds = list(dict.fromkeys((r["system"], r["attention"]) for r in rows))
    for i, kind in enumerate(kinds):
        points = sorted((r["batch"], r[column]) for r in rows if (r["system"], r["attention"]) == kind)
        label = f"{kind[0]} ({kind[1]})" if kind[0] == "quire" and kind[1] else kind[0]
        style = {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)]}
        axes.plot(*zip(*points, strict=True), label=label, **style)
    floors = dict(sorted((r["batch"], r["floor_ms"]) for r in rows if r["floor_ms"] is not None))
    if floor and floors:
        axes.plot(list(floors), list(floors.values()), label="floor: bytes at copy bandwidth",
                  color="#888888", linestyle="--")
    batches = sorted({r["batch"] for r in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sequences in the batch")
    axes.set_ylabel(unit)
    contexts = sorted({r["context"] for r in rows})
    axes.set_title(f"{title}, context {', '.join(map(str, contexts))}", loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for target in written:
        figure.savefig(target, dpi=150)
    return written


__all__ = ["draw"]
