"""Launch parameters of the wide kernels (attn_ops/kernels/small_linear_wide.py) by a model of their time, for an H200.

A program of a tile takes ``max(latency, rate * programs on its multiprocessor)`` nanoseconds per column. Programs run in rounds
of ``at_once`` per multiprocessor. To that come ``fixed`` microseconds per call, and where programs share the columns, those of
the kernel that adds up. ``python -m benchmarks.fit_small_linear`` fits the numbers to a sweep, and says how well.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SMS = 132
#: Microseconds of the kernel that adds up: per call, and per float of the parts (estimated, not measured).
ADD_UP, ADD_UP_EACH = 1.5, 2.7e-6
MOST_SPLITS, LEAST_COLUMNS = 12, 512


class Tile(NamedTuple):
    """A tile and its constants. block_n, block_k: rows and columns of the weight. block_m: tokens. The rest: see above."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    block_m: int
    turned: int
    rate: float
    latency: float
    at_once: int
    fixed: float


def time_of(tile: Tile, splits: int, m: int, n: int, k: int) -> float:
    """Microseconds for m tokens and a weight (n, k), by the model."""
    programs = -(-n // tile.block_n) * -(-m // tile.block_m) * splits
    columns = -(-(k // tile.block_k) // splits) * tile.block_k
    rounds, rest = divmod(programs, SMS * tile.at_once)
    each = rounds * max(tile.latency, tile.rate * tile.at_once)
    if rest:
        each += max(tile.latency, tile.rate * math.ceil(rest / SMS))
    adding = ADD_UP + splits * m * n * ADD_UP_EACH if splits > 1 else 0.0
    return each * columns * 1e-3 + tile.fixed + adding


def choices(m: int, n: int, k: int, tiles: Sequence[Tile]) -> Iterator[tuple[float, Tile, int]]:
    """(microseconds, tile, splits) of all that can run: no tile has twice the tokens, and below 64 tokens none has fewer."""
    most = max(16, 1 << (m - 1).bit_length())
    for tile in tiles:
        if tile.block_m <= most and k % tile.block_k == 0 and (tile.block_m >= 64 or tile.block_m == most):
            for splits in range(1, max(1, min(MOST_SPLITS, k // LEAST_COLUMNS)) + 1):
                yield time_of(tile, splits, m, n, k), tile, splits


@functools.cache
def tiles() -> dict[str, tuple[Tile, ...]]:
    """Of each kind of codes."""
    found = json.loads((Path(__file__).parent / "small_linear_tiles.json").read_text())
    return {codes: tuple(Tile(*tile) for tile in each) for codes, each in found.items()}
