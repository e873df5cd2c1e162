"""Plots of decode rows: time per step and throughput over batch size. As a program, of results written earlier:

    python -m quire.graph_runner.bench.plots benchmarks/results/h200_rivals.json --out benchmarks/results/plots/rivals
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.graph_runner.bench.report import Row

# Okabe and Ito's colors, distinguishable with the common kinds of color blindness.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "os^DvPX"


def new_figure(width: float, height: float) -> Any:
    """A figure that needs no display. Raises ModuleNotFoundError without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'quire[bench]' or matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write decode-step.{png,svg} and decode-throughput.{png,svg}, one set per model; returns the files. Raises
    ModuleNotFoundError without matplotlib."""
    measured = [r for r in rows if r["workload"] == "decode" and r["ms_per_step"] is not None]
    models = list(dict.fromkeys(r["model"] for r in measured))
    written: list[Path] = []
    for model in models:
        mine = [r for r in measured if r["model"] == model]
        suffix = "" if len(models) == 1 else "-" + model.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        for kind, column, unit in (("step", "ms_per_step", "ms per step"), ("throughput", "tokens_per_s", "tokens per second")):
            figure = _figure(mine, f"{model}: decode {kind}", unit, column)
            for ending in ("png", "svg"):
                written.append(folder / f"decode-{kind}{suffix}.{ending}")
                figure.savefig(written[-1], dpi=150)
    return written


def _figure(rows: Sequence[Row], title: str, unit: str, column: str) -> Any:
    figure = new_figure(6.4, 4.6)
    axes: Any = figure.subplots()
    for i, (system, attention) in enumerate(dict.fromkeys((r["system"], r["attention"]) for r in rows)):
        points = sorted((r["batch"], r[column]) for r in rows if (r["system"], r["attention"]) == (system, attention))
        axes.plot(*zip(*points, strict=True), label=f"quire ({attention})" if system == "quire" and attention else system,
                  color=_COLORS[i % len(_COLORS)], marker=_MARKERS[i % len(_MARKERS)])
    roofline = dict(sorted((r["batch"], r["floor_ms"]) for r in rows if r["floor_ms"] is not None))
    if column == "ms_per_step" and roofline:
        axes.plot(list(roofline), list(roofline.values()), label="roofline: bytes at copy bandwidth", color="#888888",
                  linestyle="--")
    batches = sorted({r["batch"] for r in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.minorticks_off()
    axes.set(ylim=(0, None), xlabel="sequences in the batch", ylabel=unit)
    contexts = ", ".join(map(str, sorted({r["context"] for r in rows})))
    axes.set_title(f"{title}, context {contexts}", loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    for written in draw([row for path in args.results for row in json.loads(path.read_text())["rows"]], args.out):
        print(f"wrote {written}")
