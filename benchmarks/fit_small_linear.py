"""Fit the constants of attn_ops/tuning/small_linear_tiles.json to sweeps of ``benchmarks/small_linear.py --wide``.

    python -m benchmarks.fit_small_linear sweep.json [...]          # print how much slower than the best the choices are
    python -m benchmarks.fit_small_linear sweep.json --save         # and write the constants, and the best of each shape into
                                                                    # attn_ops/tuning/small_linear.json

Constants of a tile are those with the smallest mean error of the logarithm of its times, found by trying a grid. Of the tiles
those are kept that make the choices fastest, added one by one as long as one makes them faster by 0.2 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quire.attn_ops.tuning.launch_config import STORE, Tile, choices, key, time_of

RATES = [0.3 * 1.08**i for i in range(52)]  # nanoseconds per column
#: Measurements: (m, n, k, splits, microseconds).
Times = list[tuple[int, int, int, int, float]]
Shapes = dict[tuple[int, int, int], dict[tuple[int, ...], float]]


def read(paths: list[Path]) -> dict[tuple[str, tuple[int, ...]], Times]:
    """(codes, parameters of the tile) -> its measurements."""
    found: dict[tuple[str, tuple[int, ...]], Times] = defaultdict(list)
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            if "us" in row:
                block_n, block_k, warps, stages, splits, block_m, turned = row["config"][:7]
                found[row["codes"], (block_n, block_k, warps, stages, block_m, turned)].append(
                    (row["tokens"], row["n"], row["k"], splits, row["us"]))
    return found


def fitted(parameters: tuple[int, ...], times: Times) -> tuple[float, Tile]:
    """(mean error, tile)."""
    grid = itertools.product((1, 2, 3, 4), (2.5, 3.5, 4.5, 5.5), RATES, (1, 1.3, 1.6, 2, 2.5, 3, 4))
    tiles = (Tile(*parameters, round(rate, 3), round(rate * ratio, 3), at_once, fixed)  # type: ignore[call-arg,arg-type]
             for at_once, fixed, rate, ratio in grid if ratio <= at_once + 1)
    return min(((sum(abs(math.log(time_of(tile, s, m, n, k) / us)) for m, n, k, s, us in times) / len(times), tile)
                for tile in tiles), key=lambda each: each[0])


def measured(codes: str, found: dict[tuple[str, tuple[int, ...]], Times]) -> Shapes:
    """Shape -> (parameters of the tile, splits) -> microseconds."""
    shapes: Shapes = defaultdict(dict)
    for (kind, parameters), times in found.items():
        for m, n, k, splits, us in times if kind == codes else ():
            shapes[m, n, k][*parameters, splits] = us
    return shapes


def regrets(tiles: Sequence[Tile], shapes: Shapes) -> list[tuple[float, Any]]:
    """For each shape how much longer the choice takes than the best; of splits that were not measured, the nearest. A shape
    that no tile serves counts as one that takes twice as long."""
    out = []
    for shape, times in shapes.items():
        best = min(times, key=times.__getitem__)
        _, tile, splits = min(choices(*shape, tiles), default=(0.0, None, 1))
        same = [each for each in times if tile is not None and each[:-1] == tile[:6]]
        us = times[min(same, key=lambda each: abs(each[-1] - splits))] if same else 2 * times[best]
        out.append((us / times[best] - 1, (*shape, tile, splits, us, best, times[best])))
    return sorted(out, key=lambda each: each[0])


def mean(tiles: Sequence[Tile], shapes: Shapes) -> float:
    return sum(regret for regret, _ in regrets(tiles, shapes)) / len(shapes)


def chosen(tiles: Sequence[Tile], shapes: Shapes) -> list[Tile]:
    """The tiles that make the choices fastest."""
    kept: list[Tile] = []
    before = math.inf
    while left := [tile for tile in tiles if tile not in kept]:
        now, tile = min((mean([*kept, tile], shapes), tile) for tile in left)
        if now > before - 0.002:
            break
        before = now
        kept.append(tile)
    return sorted(kept, key=lambda tile: tile[4::-1])


def table(paths: list[Path]) -> dict[str, dict[str, list[int]]]:
    """Device -> name of the shape -> what was fastest, where that was faster than what runs without the wide kernels. int4 has
    every shape: without it there is only unpacking."""
    out: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for path in paths:
        sweep, best = json.loads(path.read_text()), {}
        for row in sweep["rows"]:
            name = key(row["tokens"], row["n"], row["k"], False, getattr(torch, row["codes"]))
            least = math.inf if row["codes"] == "int4" else row.get("present_us", math.inf) if row["tokens"] > 16 else 0.0
            if row.get("us", math.inf) < min(least, best.get(name, (math.inf,))[0]):
                best[name] = row["us"], row["config"]
        out[sweep["environment"]["device"]].update({name: config for name, (_, config) in best.items()})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    found, tiles = read(args.sweeps), defaultdict(list)
    for (codes, parameters), times in sorted(found.items()):
        error, tile = fitted(parameters, times)
        print(f"{codes:>13} {parameters}: {len(times)} times, off by {error:.1%}: {tile[6:]}", flush=True)
        tiles[codes].append(tile)
    for codes, all_of_them in tiles.items():
        shapes = measured(codes, found)
        tiles[codes] = chosen(all_of_them, shapes)
        worse = regrets(tiles[codes], shapes)
        print(f"{codes}: {len(tiles[codes])} tiles; {mean(tiles[codes], shapes):.1%} slower than the best, {len(worse)} shapes")
        for regret, what in worse[-6:]:
            print(f"  {regret:6.1%} {what}")
    if args.save:
        lines = ",\n".join(f' "{codes}": [\n' + ",\n".join(f"  {json.dumps(tile)}" for tile in each) + "]"
                           for codes, each in tiles.items())
        STORE.shipped.with_name("small_linear_tiles.json").write_text(f"{{\n{lines}\n}}\n")
        devices = dict(STORE.load(STORE.shipped) or {})
        for device, found_there in table(args.sweeps).items():
            devices[device] = dict(sorted((devices.get(device, {}) | found_there).items()))
        STORE.save(devices, STORE.shipped)


if __name__ == "__main__":
    main()
