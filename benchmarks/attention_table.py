r"""Results of attention_grid.py as a page: every cell's share of the floor, and its time over the best rival's.

    python benchmarks/attention_table.py grid.json other.json               # what is slow, on the terminal
    python benchmarks/attention_table.py $(sed 's|^|benchmarks/results/|' benchmarks/attention_files.txt) \
        --docs docs/attention.md --plot docs/attention.png

Of several rows of a cell and system the first counts, so newer files come first; only batches of the grid count. A rival whose
output is not quire's, in bfloat16, is not compared. The terminal gets a line for each cell that misses a goal, the worst first.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.graph_runner.bench.plots import new_figure
from quire.graph_runner.bench.report import Row, first_line, markdown_table

OURS = "triton"
COLUMNS = ("kind", "group", "dim", "kv", "batch", "context", "window", "before")  # attention_grid.Cell
BATCHES = (1, 8, 32, 64, 128, 256)  # of attention_grid.py, with those of its prefills
LEAST_BYTES, LEAST_SHARE, MOST_TIME = 64e6, 0.6, 1.05  # the goals: of the floor from so many bytes on, and of the best rival
PREFILLS = (OURS, "fi-fa3", "vllm-fa3")  # quire's two kernels for prompts, and vLLM's
SAME = 0.05  # difference of two outputs, relative to the output


@dataclass
class Entry:
    """A cell: its row of each system."""

    cell: dict[str, Any]
    systems: dict[str, Row] = field(default_factory=dict)

    @property
    def ours(self) -> Row:
        return self.systems.get(OURS, {})

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest rival and its microseconds. With codes, rivals have no scale per token: their outputs may differ."""
        found = {name: row["us"] for name, row in self.systems.items() if not name.startswith(OURS) and "us" in row
                 and ((row.get("differs") or 0.0) < SAME or self.cell["kv"] != "bfloat16")}
        name = min(found, key=found.__getitem__, default=None)
        return None if name is None else (name, found[name])

    @property
    def ratio(self) -> float | None:
        decode = self.cell["kind"] == "decode"
        return self.ours["us"] / self.best[1] if decode and "us" in self.ours and self.best else None

    @property
    def under_floor(self) -> bool:
        """Whether it is a decode of many bytes that misses its share of a copy's bandwidth."""
        return self.counts and self.ours["share"] < LEAST_SHARE

    @property
    def counts(self) -> bool:
        return self.cell["kind"] == "decode" and "us" in self.ours and self.ours["bytes"] >= LEAST_BYTES

    @property
    def behind(self) -> bool:
        return (self.ratio or 0.0) > MOST_TIME

    @property
    def name(self) -> str:
        c = self.cell
        return (f"{c['kind']} {c['group']} x {c['dim']}, {c['kv']}, {self.shape}"
                + (f" after {c['before']}" if c.get("before") else ""))

    @property
    def shape(self) -> str:
        c = self.cell
        return f"{c['batch']} x {c['context']}" + (f", {c['window']}" if c["window"] else "")

    @property
    def text(self) -> str:
        """"83 (0.92)": the share of the floor in percent, and quire's time over the best rival's. Of a prefill TFLOP/s of each
        of PREFILLS."""
        if self.cell["kind"] == "extend":
            rows = [self.systems.get(name, {}) for name in PREFILLS]
            return " / ".join(f"{row['tflop_per_s']:.0f}" if "us" in row else "–" for row in rows)
        if "us" not in self.ours:
            return "–" if self.ours else ""
        share = f"{100 * self.ours['share']:.0f}"
        share = f"**{share}**" if self.under_floor else share
        return share + ("" if self.ratio is None else f" (**{self.ratio:.2f}**)" if self.behind else f" ({self.ratio:.2f})")


def entries(paths: Iterable[Path]) -> list[Entry]:
    found: dict[tuple[Any, ...], Entry] = {}
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            if row["batch"] not in BATCHES:
                continue
            cell = {name: row.get(name) for name in COLUMNS}
            entry = found.setdefault(tuple(cell.values()), Entry(cell))
            entry.systems.setdefault(row["system"], row)
    return list(found.values())


def summary(found: Sequence[Entry]) -> list[str]:
    """How many cells reach the goals."""
    many = [e for e in found if e.counts]
    beside = [e for e in found if e.ratio is not None]
    lines = [f"- decodes of {LEAST_BYTES / 1e6:.0f} MB or more: at least {LEAST_SHARE:.0%} of the floor in "
             f"{sum(not e.under_floor for e in many)} of {len(many)} cells"]
    rivals = Counter(e.best[0] for e in beside if e.best)
    if beside:
        lines.append(f"- decodes: at most {MOST_TIME} of the best rival's time in {sum(not e.behind for e in beside)} of "
                     f"{len(beside)} cells, less than it in {sum((e.ratio or 0) < 1 for e in beside)}")
    if rivals:
        names = ", ".join(f"{name} in {count}" for name, count in rivals.most_common())
        lines.append(f"- the best rival is {names} cells")
    return lines


def _table(found: Sequence[Entry], order: Callable[[Entry], Any]) -> list[str]:
    """Rows: query heads per key head x head dim."""
    columns = list(dict.fromkeys(e.shape for e in sorted(found, key=order)))
    rows: dict[str, dict[str, str]] = {}
    for e in sorted(found, key=lambda e: (e.cell["dim"], e.cell["group"])):
        rows.setdefault(f"{e.cell['group']} x {e.cell['dim']}", {})[e.shape] = e.text
    return markdown_table(["heads x dim", *columns],
                          [[name, *(row.get(c, "") for c in columns)] for name, row in rows.items()])


def tables(found: Sequence[Entry]) -> list[str]:
    lines: list[str] = []
    for kv in dict.fromkeys(e.cell["kv"] for e in found):
        of_kv = [e for e in found if e.cell["kv"] == kv]
        for windowed in (False, True):
            some = [e for e in of_kv if e.cell["kind"] == "decode" and bool(e.cell["window"]) is windowed]
            if some:
                lines += [f"### Decode, {kv}" + ", windows" * windowed, "", *_table(
                    some, lambda e: (e.cell["window"] or 0, e.cell["context"], e.cell["batch"]))]
        some = [e for e in of_kv if e.cell["kind"] == "extend"]
        if some:
            lines += [f"### Prefill, {kv}: TFLOP/s of {' / '.join(PREFILLS)}", "", *_table(
                some, lambda e: (e.cell["context"], e.cell["batch"]))]
    return lines


def missed(found: Sequence[Entry]) -> list[str]:
    """A line for each cell that misses a goal, the worst first."""
    slow = [e for e in found if e.under_floor or e.behind]
    slow.sort(key=lambda e: -max(e.ratio or 0.0, LEAST_SHARE / e.ours["share"] if e.under_floor else 0.0))
    return markdown_table(["", "us", "of the floor", "best rival, us", "ratio"], [
        [e.name, f"{e.ours['us']:.1f}", f"{100 * e.ours['share']:.0f} %",
         f"{e.best[0]} {e.best[1]:.1f}" if e.best else "", f"{e.ratio:.2f}" if e.ratio else ""] for e in slow])


def not_measured(found: Sequence[Entry]) -> list[str]:
    """Why quire or a rival has no time, with the number of cells."""
    reasons: Counter[tuple[str, str]] = Counter()
    for e in found:
        for system, row in e.systems.items():
            if "us" not in row:
                reasons[system, first_line(row["error"])[:160]] += 1
    return [f"- {system}, {count} cells: {why}" for (system, why), count in sorted(reasons.items())]


def source(path: Path) -> str:
    """A file, with where and with what it was measured."""
    environment = json.loads(path.read_text())["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items()
                         if version and name in ("torch", "triton", "flashinfer", "flashinfer-python", "vllm"))
    return (f"- `{path.name}`: {environment['device']}, {versions}, quire {str(environment.get('commit'))[:9]}, "
            f"{environment['copy_tb_per_s']:.2f} TB/s of a copy")


def page(found: Sequence[Entry], paths: Sequence[Path]) -> str:
    lines = [
        "# Attention, shape by shape", "",
        "Written by `python benchmarks/attention_table.py`; of several times of a cell and system that of the first file "
        "counts. [The results' page](../benchmarks/results/README.md) says how each file was measured.", "",
        *map(source, paths), "",
        "One layer of the Triton backend, 8 key heads, pages of 16 tokens in random order, keys from memory and not from the "
        "L2 cache, in a CUDA graph, writing the step's keys included. *Heads* are query heads per key head. A decode's entry "
        "is the share of its floor in percent, its bytes at the bandwidth of a copy, and in brackets its time over the best "
        "rival's on the same tensors, where one was measured. Bold: below 60 % from 64 MB of keys and values on, or above 1.05 "
        "times the best rival. Columns: sequences x tokens of each, and the window. `auto` gives long prompts to FlashInfer's "
        "fa3 where it has a kernel for the head dim, and often by contiguous keys, which are faster than by pages as here "
        "([Long prompts](performance.md#long-prompts)).", "",
        *summary(found), "", "![Share of the floor, by shape](attention.png)", "", *tables(found)]
    if reasons := not_measured(found):
        lines += ["## Not measured", "", *reasons, ""]
    return "\n".join(lines)


def heat_map(found: Sequence[Entry], path: Path) -> None:
    """The shares of the floor of all decodes as a PNG, a panel per cache format."""
    decodes = [e for e in found if e.cell["kind"] == "decode" and "us" in e.ours]
    formats = list(dict.fromkeys(e.cell["kv"] for e in decodes))

    def column(e: Entry) -> tuple[Any, ...]:
        return e.cell["window"] or 0, e.cell["context"], e.cell["batch"]

    rows = sorted({(e.cell["dim"], e.cell["group"]) for e in decodes})
    each = {kv: sorted({column(e) for e in decodes if e.cell["kv"] == kv}) for kv in formats}
    widths = [len(columns) for columns in each.values()]
    figure = new_figure(3 + 0.19 * sum(widths), 1.6 + 0.17 * len(rows))
    panels: Any = figure.subplots(1, len(formats), squeeze=False, sharey=True, width_ratios=widths)[0]
    for axes, (kv, columns) in zip(panels, each.items(), strict=True):
        shares = [[float("nan")] * len(columns) for _ in rows]
        for e in decodes:
            if e.cell["kv"] == kv:
                shares[rows.index((e.cell["dim"], e.cell["group"]))][columns.index(column(e))] = e.ours["share"]
        image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        names = [f"{b} x {c}" + (f", {w}" if w else "") for w, c, b in columns]
        axes.set_xticks(range(len(columns)), names, rotation=90, fontsize=6)
        axes.set_yticks(range(len(rows)), [f"{g} x {d}" for d, g in rows], fontsize=6)
        axes.set_title(kv, fontsize=9)
    panels[0].set_ylabel("query heads per key head x head dim", fontsize=8)
    figure.colorbar(image, ax=list(panels), shrink=0.8, label="share of the floor")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--docs", type=Path, metavar="FILE.md", help="write the page there; default: print what is slow")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the shares there")
    args = parser.parse_args()
    found = entries(args.results)
    if args.docs:
        args.docs.write_text(page(found, args.results))
    else:
        print("\n".join([*summary(found), "", *missed(found)]))
    if args.plot:
        heat_map(found, args.plot)


if __name__ == "__main__":
    main()
