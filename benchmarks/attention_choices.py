"""Write attn_ops/tuning/attention.json, the times that ship with quire, from results of ``quire bench attention``, of
``benchmarks/attention_grid.py`` (its rows of quire's backends, without windows and quantized caches) and of ``python
benchmarks/backend_kernels.py mla``.

    cd benchmarks && python attention_choices.py results/h200_{attention,mla,attention_windows}.json

The content of the given files replaces the old content; times of a later file replace those of an earlier one for the same
backend and shape. Of plain causal attention and MLA; of other layers from what ``quire bench attention --save`` kept, since a
result does not say how long a window is.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from quire.attn_ops.registry import all_backends, get_backend
from quire.attn_ops.tuning.attention import LATENT, STORE, Measurement, ShapeClass, load, save

#: Names of packages in an environment's versions, where they differ.
CALLED = {"flashinfer-python": "flashinfer"}


def measurements(path: Path) -> list[Measurement]:
    """One per backend in a results file. Raises ValueError for sites that need more than plain attention."""
    content = json.loads(path.read_text())
    if "format" in content:  # what --save kept
        return list(load(path))
    environment, rows = content.get("conditions") or content["environment"], content["rows"]  # older files of the grid
    if "kv_heads" in environment:
        return grid(environment, rows)
    if all(row.get("piece") == "mla" for row in rows):
        return latent(environment, rows)
    found = []
    for backend in dict.fromkeys(row["attention"] for row in rows):
        mine = [row for row in rows if row["attention"] == backend and row["error"] is None]
        needs = {row["needs"] for row in mine}
        site = re.fullmatch(r"(\d+)/(\d+) x (\d+) (\w+)", needs.pop())
        if site is None or needs:
            raise ValueError(f"{path}: not one plain site")
        heads, kv_heads, dim = map(int, site.groups()[:3])
        shape = ShapeClass(site[4], site[4], dim, dim, heads // kv_heads, mine[0]["page_size"], "NHD", ())
        times = {kind: {row["point"]: row["us"] for row in mine if row["kind"] == kind} for kind in ("decode", "extend")}
        found.append(made(environment, backend, shape, kv_heads, times))
    return found


def made(environment: dict[str, Any], backend: str, shape: ShapeClass, kv_heads: int, times: dict[str, dict[str, float]]
         ) -> Measurement:
    """``times``: microseconds by point, of "decode" and "extend"."""
    versions = {package: version and version.partition("+")[0] for package, version in environment["versions"].items()}
    packages = {package: versions[CALLED.get(package, package)] for package in get_backend(backend).packages}
    return Measurement(environment["device"], versions["torch"], backend, packages, shape, kv_heads, None, None,
                       times["decode"], times["extend"], environment["date"][:10])


def latent(environment: dict[str, Any], rows: list[dict[str, Any]]) -> list[Measurement]:
    """One per backend and number of heads, of DeepSeek's sizes in bf16: the decodes. No rule reads times of MLA's prefills, nor
    times of a package whose version is not known."""
    times: dict[tuple[str, int], dict[str, float]] = {}
    known = {name for name in {row["system"] for row in rows}
             if all(CALLED.get(p, p) in environment["versions"] for p in get_backend(name).packages)}
    for row in rows:
        shape = re.fullmatch(r"decode (\d+x\d+) H=(\d+)", row["shape"])
        if shape is not None and "us" in row and row["system"] in known:
            times.setdefault((row["system"], int(shape[2])), {})[shape[1]] = row["us"]
    return [made(environment, name, ShapeClass("bfloat16", "bfloat16", 512 + 64, 512, heads, environment["page_size"], "NHD",
                                               (LATENT,)), 1, {"decode": us, "extend": {}})
            for (name, heads), us in times.items()]


def grid(environment: dict[str, Any], rows: list[dict[str, Any]]) -> list[Measurement]:
    """One per backend, group and head dim that was measured at any decode point."""
    times: dict[tuple[str, int, int], dict[str, dict[str, float]]] = {}
    for row in rows:
        if "us" in row and row["system"] in all_backends() and row["kv"] == "bfloat16" and row["window"] is None:
            kinds = times.setdefault((row["system"], row["group"], row["dim"]), {"decode": {}, "extend": {}})
            kinds[row["kind"]][f"{row['batch']}x{row['context']}"] = row["us"]
    return [made(environment, name, ShapeClass("bfloat16", "bfloat16", dim, dim, group, environment["page_size"], "NHD", ()),
                 environment["kv_heads"], kinds)
            for (name, group, dim), kinds in times.items() if kinds["decode"]]


def main() -> None:
    found = [one for name in sys.argv[1:] for one in measurements(Path(name))]
    if not found:
        raise SystemExit(__doc__)
    STORE.shipped.unlink(missing_ok=True)
    save(found, STORE.shipped)


if __name__ == "__main__":
    main()
