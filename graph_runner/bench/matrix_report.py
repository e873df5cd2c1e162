"""Results of ``quire bench matrix``: merged, as tables, and as a heat map. As a program:

    python -m quire.graph_runner.bench.matrix_report *.json --out all.json --docs docs/performance.md --plot docs/matrix.png

Of several rows of one cell the newest counts. A ratio is quire's time over the rival's: below 1 quire is faster. A step that is
faster than its bytes allow did other work, and gives no ratio.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.graph_runner.bench.plots import new_figure
from quire.graph_runner.bench.report import Row, first_line, markdown_table, rich_table, time_of, write

AIMS = {"decode and online": 0.95, "prefill": 1.0}  # of the rival's time, at most
MOST = 1.05  # of the roofline: above, the model's bytes were not read
BEGIN, END = "<!-- matrix: written by matrix_report.py -->", "<!-- end of matrix -->"


def cell_name(row: Row) -> str:
    return row["workload"] if row.get("context") is None else f"{row['workload']}/{row['batch']}x{row['context']}"


class Pair(NamedTuple):
    """A cell of a model: quire's row and the rival's; empty where there is none."""

    model: str
    cell: str
    variant: str
    quire: Row
    rival: Row

    @property
    def less_work(self) -> bool:
        """Whether the rival's step is too fast to have read what the model's step reads: with dummy weights tokens may share
        their experts."""
        return (self.rival.get("share_of_floor") or 0) > MOST

    @property
    def ratio(self) -> float | None:
        ours, theirs = time_of(self.quire), time_of(self.rival)
        return ours[1] / theirs[1] if ours and theirs and not self.less_work else None

    @property
    def share(self) -> float | None:
        """Share of the roofline that quire reaches."""
        return self.quire.get("share_of_floor")

    @property
    def why(self) -> str:
        """Why quire has no time; "" if it has one, or was not asked."""
        return first_line(self.quire.get("error") or "")


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """One result of several: environments by run, and the newest row of each cell, model, system and dtype. A run whose rows
    were all replaced leaves no environment."""
    found: dict[tuple[Any, ...], Row] = {}
    replaced: set[Any] = set()
    environments: dict[str, Any] = {}
    for path in paths:
        content = json.loads(path.read_text())
        alone = content["environment"]
        environments |= content.get("environments") or {alone["date"]: alone}
        for row in content["rows"]:
            row = {"run": alone.get("date"), **row}
            key = tuple(row.get(k) for k in ("model", "workload", "batch", "context", "variant", "system", "dtype",
                                             "kv_cache_dtype"))
            older, newer = sorted([found.get(key, row), row], key=lambda each: each["run"])
            replaced.add(older["run"])
            found[key] = newer
    replaced -= {row["run"] for row in found.values()}
    kept = {run: environment for run, environment in environments.items() if run not in replaced}
    return {"environments": kept, "rows": list(found.values())}


def pairs(rows: Sequence[Row], rival: str = "vllm") -> list[Pair]:
    """The cells of the rows in their order. A row that failed as a whole has no variant: it stands for each."""
    by_system: dict[str, dict[tuple[str, str, str], Row]] = {"quire": {}, rival: {}}
    for row in rows:
        if row["system"] in by_system:
            whole = row["workload"] == "online" and not row.get("variant")
            for variant in ("first token", "between tokens") if whole else (row.get("variant") or "",):
                by_system[row["system"]][row["model"], cell_name(row), variant] = row
    keys = dict.fromkeys(key for found in by_system.values() for key in found)
    return [Pair(*key, by_system["quire"].get(key, {}), by_system[rival].get(key, {})) for key in keys]


def _time(row: Row) -> str:
    if (found := time_of(row)) is None:
        return ""
    milliseconds = found[1] * (1e3 if found[0] == "s" else 1)
    return f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def summary(rows: Sequence[Row]) -> Any:
    """A table with a line per cell: quire beside vLLM."""
    return rich_table("matrix, ms", [{
        "row": pair.model, "workload": f"{pair.cell} {pair.variant}".strip(), "quire": _time(pair.quire),
        "vllm": _time(pair.rival), "ratio": "" if pair.ratio is None else f"{pair.ratio:.2f}",
        "of roofline": "" if not pair.share else f"{pair.share:.0%}", "not measured": pair.why}
        for pair in pairs(rows)])


def _cell(pair: Pair | None) -> str:
    """"4.13 / 4.95 (81 %)": quire, the rival, and the share of the roofline; bold where quire is slower."""
    if pair is None or not _time(pair.quire):
        return f" / {_time(pair.rival)}" if pair and _time(pair.rival) else ""
    ours, theirs = _time(pair.quire), _time(pair.rival) + "†" * pair.less_work
    ours = f"**{ours}**" if (pair.ratio or 0) > 1 else ours
    return ours + (f" / {theirs}" if theirs else "") + (f" ({pair.share:.0%})".replace("%", " %") if pair.share else "")


def _batch_context(cell: str) -> tuple[int, ...]:
    """(8, 1024) of "decode/8x1024"."""
    return tuple(int(n) for n in cell.partition("/")[2].split("x"))


def _columns(found: Sequence[Pair]) -> list[tuple[str, str]]:
    """Cells other than decode, in the order of the matrix."""
    order = {"prefill": 0, "mixed256": 1, "online": 2}
    kinds = dict.fromkeys((p.cell, p.variant) for p in found if not p.cell.startswith("decode"))
    return sorted(kinds, key=lambda kind: order.get(kind[0].partition("/")[0], 9))


def markdown(result: dict[str, Any], rival: str = "vllm") -> str:
    """Tables for the documentation."""
    found = pairs(result["rows"], rival)
    by_key = {(p.model, p.cell, p.variant): p for p in found}
    models = list(dict.fromkeys(p.model for p in found))
    shapes = {_batch_context(p.cell) for p in found if p.cell.startswith("decode/")}
    batches, contexts = (sorted({shape[i] for shape in shapes}) for i in (0, 1))
    environments = result["environments"].values()
    devices = {f"{e['device']}" for e in environments}
    versions = {f"{name} {e['versions'][name]}" for e in environments
                for name in ("torch", "triton", "transformers", "vllm") if e["versions"].get(name)}
    where = "; ".join(", ".join(sorted(each)) for each in (devices, versions))
    commits = ", ".join(sorted({str(e.get("commit"))[:9] for e in environments}))
    beside = any(row.get("system") == rival for row in result["rows"])
    text = [f"{where}; quire {commits}. Each entry: quire {f'/ {rival} ' if beside else ''}in ms, and the "
            f"share of the roofline that quire reaches{'; bold where quire is slower' if beside else ''}.", ""]
    if reached := list(filter(None, (_reached(kind, found, rival) for kind in AIMS))):
        text += [*reached, ""]
    if missed := _missed(found):
        text += [f"Cells above these aims: quire's time as a part of {rival}'s, and the share of the roofline that both reach, "
                 "and that the aim would be. An aim near or above 100 % is beyond what the GPU can do:", "",
                 *markdown_table(["", f"of {rival}'s time", "quire", rival, "aim"], missed)]
    if shapes:
        steps = [[model, str(context), *(_cell(by_key.get((model, f"decode/{b}x{context}", ""))) for b in batches)]
                 for model in models for context in contexts]
        text += markdown_table(["decode, ms per step", "context", *(f"B={b}" for b in batches)],
                               [row for row in steps if any(row[2:])])
    if columns := _columns(found):
        heads = [f"{cell}{', ' + variant + ' (median)' if variant else ''}" for cell, variant in columns]
        rows = [[model, *(_cell(by_key.get((model, *c))) for c in columns)] for model in models]
        text += markdown_table(["ms", *heads], [row for row in rows if any(row[1:])])
    if any(pair.less_work for pair in found):
        text += [f"† Not the same work: a step of {rival} that is faster than the bandwidth allows for the experts that tokens "
                 "choose evenly. With its dummy weights, tokens of a batch share experts.", ""]
    reasons: dict[tuple[str, str], list[str]] = {}
    for pair in found:
        if pair.why:
            reasons.setdefault((pair.model, pair.why.removeprefix("NotMeasured: ")), []).append(pair.cell)
    if reasons:
        text += ["Not measured:", "", *(f"- {model}, {', '.join(dict.fromkeys(names))}: {why}"
                                        for (model, why), names in reasons.items()), ""]
    return "\n".join(text)


def _reached(kind: str, found: Sequence[Pair], rival: str) -> str:
    """In how many cells of a kind quire takes at most its aim's share of the rival's time; "" if none has both times."""
    ratios = [p.ratio for p in found if p.cell.partition("/")[0] in kind.split() and p.ratio is not None]
    if not ratios:
        return ""
    met, slower = sum(r <= AIMS[kind] for r in ratios), sum(r > 1 for r in ratios)
    return (f"- {kind}: at most {AIMS[kind]:.2f} of {rival}'s time in {met} of {len(ratios)} cells, more than {rival}'s in "
            f"{slower}")


def _missed(found: Sequence[Pair]) -> list[list[str]]:
    """A line for each cell with more than its aim, of what both reach of the roofline."""
    lines = []
    for kind, aim in AIMS.items():
        for pair in found:
            if pair.cell.partition("/")[0] in kind.split() and (ratio := pair.ratio or 0.0) > aim:
                share = pair.share or 0.0
                shares = share, share * ratio, share * ratio / aim
                lines.append([f"{pair.model}, {pair.cell} {pair.variant}".strip(), f"{ratio:.3f}",
                              *(f"{each:.0%}".replace("%", " %") if share else "" for each in shares)])
    return lines


def splice(path: Path, text: str) -> None:
    """Replace what is between BEGIN and END in a file. Raises ValueError if it lacks them."""
    content = path.read_text()
    head, begin, rest = content.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN!r} and {END!r}")
    path.write_text(f"{head}{BEGIN}\n\n{text.strip()}\n\n{END}{tail}")


def heat_map(result: dict[str, Any], path: Path, rival: str = "vllm") -> None:
    """Write the ratios and the shares of the roofline as a PNG: blue where quire is faster. Raises ModuleNotFoundError without
    matplotlib."""
    found = pairs(result["rows"], rival)
    models = list(dict.fromkeys(p.model for p in found))
    decode = sorted({(p.cell, p.variant) for p in found if p.cell.startswith("decode/")},
                    key=lambda kind: _batch_context(kind[0])[::-1])
    columns = [*decode, *_columns(found)]
    figure = new_figure(1.6 + 0.62 * len(columns), 1.8 + 0.42 * len(models))
    from matplotlib.colors import LogNorm

    axes: Any = figure.subplots()
    by_key = {(p.model, p.cell, p.variant): p for p in found}
    ratios = [[(p.ratio if (p := by_key.get((model, *column))) and p.ratio else float("nan")) for column in columns]
              for model in models]
    image = axes.imshow(ratios, cmap="RdBu_r", norm=LogNorm(0.5, 2.0), aspect="auto")
    for y, model in enumerate(models):
        for x, column in enumerate(columns):
            pair = by_key.get((model, *column), Pair(model, *column, {}, {}))
            words = [f"{pair.ratio:.2f}"] if pair.ratio else []
            words += [f"{pair.share:.0%}"] if pair.share else []
            dark = pair.ratio is not None and not 0.62 < pair.ratio < 1.6
            axes.text(x, y, "\n".join(words) or "–" * bool(pair.why), ha="center", va="center", fontsize=6.5,
                      color="white" if dark else "black")
    labels = [f"{cell} {variant}".replace("/", " ").strip() for cell, variant in columns]
    axes.set_xticks(range(len(columns)), labels, rotation=60, ha="right", fontsize=7)
    axes.set_yticks(range(len(models)), models, fontsize=8)
    axes.set_title(f"time of quire over {rival} (below 1: quire is faster); share of the roofline", loc="left", fontsize=9)
    figure.colorbar(image, ax=axes, ticks=[0.5, 0.7, 1, 1.4, 2], format="%.1f", shrink=0.8).ax.minorticks_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the merged result there")
    parser.add_argument("--docs", type=Path, metavar="FILE.md", help="replace the tables in this file; default: print them")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the heat map there")
    parser.add_argument("--vs", default="vllm", metavar="SYSTEM", help="the rival (default: vllm)")
    args = parser.parse_args()
    result = merged(args.results)
    if args.out:
        newest = result["environments"][max(result["environments"])]
        write(args.out, newest, result["rows"], environments=result["environments"])
    text = markdown(result, args.vs)
    if args.docs:
        splice(args.docs, text)
    else:
        print(text)
    if args.plot:
        heat_map(result, args.plot, args.vs)

if __name__ == "__main__":
    main()
