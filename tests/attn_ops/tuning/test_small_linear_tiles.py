"""The wide kernels' parameters by a model of their time: what it chooses runs, and a fit finds the constants again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import fit_small_linear as fit
from quire.attn_ops.ops.small_linear_wide import fits_wide
from quire.attn_ops.tuning import launch_config
from quire.attn_ops.tuning.launch_config import (
    INT4,
    Config,
    Tile,
    by_rule,
    choices,
    tiles,
    time_of,
    wide_configs,
    wide_memory,
)

CPU = torch.device("cpu")
TILES = (Tile(64, 128, 4, 4, 64, 2, 3.0, 3.9, 3, 2.5), Tile(128, 64, 8, 4, 128, 2, 4.5, 9.0, 1, 3.5),
         Tile(64, 128, 4, 4, 16, 1, 2.4, 3.12, 4, 2.5), Tile(64, 128, 4, 4, 32, 1, 3.0, 3.9, 4, 2.5))
SHAPES = ((6144, 4096), (4096, 14336), (1024, 2048))


def test_more_programs_and_columns_take_longer() -> None:
    tile = TILES[1]
    assert time_of(tile, 1, 128, 128, 4096) == pytest.approx(9.0 * 4.096 + 3.5)  # alone: its latency
    assert time_of(tile, 1, 128, 132 * 128, 4096) == time_of(tile, 1, 128, 128, 4096) < time_of(tile, 1, 128, 133 * 128, 4096)
    assert time_of(tile, 4, 128, 1024, 14336) < time_of(tile, 1, 128, 1024, 14336)  # eight programs leave a GPU idle
    assert time_of(tile, 4, 128, 128 * 132, 4096) > time_of(tile, 1, 128, 128 * 132, 4096)


def test_what_is_chosen_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tile has more tokens than needed or columns that do not divide K; none is for SwiGLU or few tokens of int8."""
    monkeypatch.setattr(launch_config, "tiles", lambda: {"int8": TILES, "int4": TILES})
    for (n, k), tokens in ((shape, m) for shape in SHAPES for m in (1, 17, 33, 64, 100, 256)):
        for codes in (torch.int8, INT4):
            found = wide_configs(tokens, n, k, False, codes, CPU)
            assert all(fits_wide(k, c) and c.block_m < 2 * max(16, tokens) and 1 <= c.splits <= k // 512 for c in found)
            assert not wide_configs(tokens, n, k, True, codes, CPU)
            assert not found if codes == torch.int8 and tokens < 17 else found[0] == by_rule(tokens, n, k, False, codes, CPU)
    assert not wide_configs(64, 64, 100, False, torch.int8, CPU) and not by_rule(64, 64, 100, False, torch.int8, CPU).block_m
    assert not by_rule(64, 4096, 4096, False, torch.int8).block_m


def test_no_more_shared_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with less of it than an H200, engines would fail at a shape that was not measured there."""
    monkeypatch.setattr(launch_config, "tiles", lambda: {"int8": TILES})
    whole = wide_configs(128, 6144, 4096, False, torch.int8, CPU)
    assert max(wide_memory(c, torch.int8) for c in whole) == 96 * 1024
    monkeypatch.setattr(launch_config.host, "shared_memory", lambda device: 100 * 1024)
    assert wide_configs(128, 6144, 4096, False, torch.int8, CPU) == [c for c in whole if wide_memory(c, torch.int8) < 84 * 1024]
    monkeypatch.setattr(launch_config.host, "shared_memory", lambda device: 48 * 1024)
    assert not by_rule(128, 6144, 4096, False, torch.int8, CPU).block_m


def test_a_fit_finds_the_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From times that the model gives, and the choices are then the best."""
    monkeypatch.setattr(fit, "RATES", [2.4, 3.0, 4.5])
    rows = [{"codes": "int8", "tokens": m, "n": n, "k": k, "us": us,
             "config": [*tile[:4], splits, tile.block_m, tile.turned]}
            for n, k in SHAPES for m in (16, 32, 64, 128) for us, tile, splits in choices(m, n, k, TILES) if splits != 3]
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps({"rows": rows}))
    for (_, parameters), times in fit.read([path]).items():
        error, tile = fit.fitted(parameters, times)
        assert error < 1e-6 and tile[:6] == parameters
    shapes = fit.measured("int8", fit.read([path]))
    assert fit.mean(fit.chosen(TILES, shapes), shapes) < 0.03
    assert fit.mean(TILES[1:2], shapes) > 0.5  # alone it is the wrong one for most, and serves few tokens not at all


@pytest.mark.parametrize("codes", sorted(tiles()))
def test_the_fitted_tiles(codes: str) -> None:
    """They serve every number of tokens, and fit into a multiprocessor's shared memory."""
    for tile in tiles()[codes]:
        config = Config(*tile[:4], 1, tile.block_m, tile.turned)
        assert wide_memory(config, getattr(torch, codes)) <= 227 * 1024
        assert codes != "int4" or tile.block_k == 128
    for tokens in (1, 16, 17, 32, 33, 64, 128, 256):
        assert codes != "int4" and tokens <= 16 or list(choices(tokens, 4096, 4096, tiles()[codes])), tokens
