"""Launch parameters of ``small_linear``'s kernels: looked up in measurements (``small_linear.py``), else by a rule. The user's
file is keyed by device and Triton version, the shipped one by device."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire.attn_ops.attention import dtype_name
from quire.attn_ops.kernels import host
from quire.attn_ops.tuning.store import Store, device_name

#: Stands for packed int4 weights (``attn_ops/ops/small_linear_wide.py``) among the dtypes of codes.
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
SMS = 132  # of an H200
#: Microseconds of the kernel that adds up: per call, and per float of the parts (estimated, not measured).
ADD_UP, ADD_UP_EACH = 1.5, 2.7e-6
MOST_SPLITS, LEAST_COLUMNS = 12, 512


class Config(NamedTuple):
    """Launch parameters of one kernel.

    Args:
        block_n, block_k: weight rows and columns per tile (per warp, for codes and up to 32 tokens).
        splits: of several tokens, programs that share the columns of a tile, where a weight has few rows.
        block_m: tokens per tile of ``attn_ops/kernels/small_linear_wide.py``, and turned: its order of columns; 0: another
        kernel.
        rows: weight rows per program of several tokens, fewer than block_n and a multiple of 4; 0: block_n. See
        ``small_linear.evenly``.
        norm_apart: 1: of several tokens, the norm has a launch of its own; see ``small_linear.norms_apart``.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1
    block_m: int = 0
    turned: int = 0
    rows: int = 0
    norm_apart: int = 0


class Tile(NamedTuple):
    """A tile of the wide kernels (attn_ops/kernels/small_linear_wide.py), the first six as in Config, and the constants of a
    model of its time on an H200. A program takes ``max(latency, rate * programs on its multiprocessor)`` nanoseconds a column.
    Programs run in rounds of ``at_once`` per multiprocessor. To that come ``fixed`` microseconds per call, and where programs
    share the columns, those of the kernel that adds up. ``python -m benchmarks.fit_small_linear`` fits the numbers to a sweep,
    and says how well."""

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


@functools.cache
def tiles() -> dict[str, tuple[Tile, ...]]:
    """Of each kind of codes."""
    found = json.loads((Path(__file__).parent / "small_linear_tiles.json").read_text())
    return {codes: tuple(Tile(*tile) for tile in each) for codes, each in found.items()}


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


def padded(num_tokens: int) -> int:
    """Rows of the tile for ``num_tokens`` tokens; 1 for the kernel of one token."""
    return 1 if num_tokens == 1 else max(16, 1 << (num_tokens - 1).bit_length())


def key(num_tokens: int, n: int, k: int, swiglu: bool, codes: torch.dtype | None = None) -> str:
    """The name of a measurement, such as "16x28672x4096s int8"."""
    kind = "" if codes is None else f" {dtype_name(codes)}"
    return f"{padded(num_tokens)}x{n}x{k}{'s' if swiglu else ''}{kind}"


def config_for(num_tokens: int, n: int, k: int, swiglu: bool, device: torch.device,
               codes: torch.dtype | None = None) -> Config | None:
    """The measured parameters for a weight (n, k); None if the definition was faster; by the rule if nothing was measured."""
    found = known(device).get(key(num_tokens, n, k, swiglu, codes), ())
    if found is None:
        return None
    return Config(*found) if found else by_rule(num_tokens, n, k, swiglu, codes, device)


def measured(device: torch.device, codes: torch.dtype) -> bool:
    """Whether this kind of device comes with measurements for weights of these codes."""
    return any(key.endswith(f" {dtype_name(codes)}") for key in known(device))


def wide_configs(num_tokens: int, n: int, k: int, swiglu: bool, codes: torch.dtype, device: torch.device) -> list[Config]:
    """For the wide kernels, the fastest first by the model of their times, each tile with its best splits; none
    where they do not run, or for few tokens and one byte per code are slower, nor what the device has no shared memory for."""
    if swiglu or (codes != INT4 and num_tokens <= 16):
        return []
    found: dict[Tile, Config] = {}
    for _, tile, splits in sorted(choices(num_tokens, n, k, tiles().get(dtype_name(codes), ()))):
        found.setdefault(tile, Config(*tile[:4], splits, tile.block_m, tile.turned))
    room = host.shared_memory(device) - host.SPARE_MEMORY
    return [config for config in found.values() if wide_memory(config, codes) <= room]


def wide_memory(config: Config, codes: torch.dtype | None) -> int:
    """Bytes of shared memory of a wide kernel's program on Hopper. Others may need 27 KB more for int4, and less for bytes."""
    bytes_w = config.block_n * config.block_k // (2 if codes == INT4 else 1)
    return config.num_stages * (bytes_w + config.block_m * config.block_k * 2)


def by_rule(num_tokens: int, n: int, k: int, swiglu: bool, codes: torch.dtype | None = None,
            wide: torch.device | None = None) -> Config:
    """Parameters for what was not measured. ``wide``: those of the wide kernels too, for this device, unless it is a GPU of
    another architecture than the model of their times."""
    modelled = wide is not None and (wide.type != "cuda" or host.is_hopper(wide))
    if codes is not None and wide is not None and modelled and (found := wide_configs(num_tokens, n, k, swiglu, codes, wide)):
        return found[0]
    if codes is not None:
        if num_tokens > 32:
            return Config(64, 128, 4, 4, 2 if n < 16384 else 1)
        if num_tokens == 1 and n <= 8192:
            return Config(4, 1024 if k % 1024 == 0 else 512, 4, 2)
        return Config(16 if n < 65536 else 64, 64, 4, 3)
    if num_tokens == 1:
        return Config(1 if n <= 8192 and not swiglu else 2, 1024 if k % 1024 == 0 else 512, 4, 2)
    return Config(32 if n < 16384 else 64, 128, 4, 4)


def _read(devices: Any) -> dict[str, dict[str, list[int] | None]]:
    for configs in devices.values():
        for config in configs.values():
            if config is not None and (not 4 <= len(config) <= len(Config._fields) or not all(type(x) is int for x in config)
                                       or min(config[:5]) < 1 or min(config) < 0
                                       or (rows := Config(*config).rows) % 4 or rows >= config[0]):
                raise ValueError(f"{config} are not launch parameters")
    return devices


STORE = Store(Path(__file__).parent / "small_linear.json", "devices", _read, "delete the file to have them made anew")


@functools.cache
def known(device: torch.device) -> dict[str, Any]:
    """What both files have for this kind of device, by ``key``. Read once; ``cache_clear`` forgets it."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return {}
    user, shipped = (STORE.load(path) or {} for path in STORE.files)
    return {**shipped.get(device_name(device), {}), **user.get(device_key(device), {})}


def device_key(device: torch.device) -> str:
    import triton

    return f"{device_name(device)}, triton {triton.__version__}"


def short(config: Config) -> list[int]:
    """As older versions read it, which refuse longer entries, where the later fields are 0."""
    values = list(config)
    while not values[-1] and len(values) > Config._fields.index("rows"):
        values.pop()
    return values


def keep(device: torch.device, configs: dict[str, Config | None]) -> None:
    """Add measurements to the user's file. Raises OSError if it cannot be written; this process has them all the same."""
    devices = STORE.load(STORE.user_file) or {}
    name = device_key(device)
    entries = {key: None if config is None else short(config) for key, config in configs.items()}
    known(device).update(entries)
    STORE.save({**devices, name: {**devices.get(name, {}), **entries}})
