"""How far Triton's decode splits keys: from shapes, on an H200's multiprocessors, by the kernel's own arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")  # tests/conftest.py has set TRITON_INTERPRET by now, where there is no GPU

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(triton.language.sum, triton.runtime.JITFunction):
    pytest.skip("triton was imported before TRITON_INTERPRET=1 could be set: set it outside, or run this file alone",
                allow_module_level=True)
from quire.attn_ops.backends.triton import decode  # noqa: E402
from quire.attn_ops.backends.triton.decode_kernel import split_size  # noqa: E402
from quire.attn_ops.kernels import host  # noqa: E402

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.mark.parametrize("slots", [1, 3, 7])
@pytest.mark.parametrize("capacity", [1 << 10, 1 << 13, 1 << 17])
def test_how_far_keys_are_split(slots, capacity):
    """Few slots fill the GPU; and no more programs are launched than can have keys, for each takes its time to find out.

    8 sequences of 8192 keys took half as long again as their bytes need in 2048 programs, and 8 of 1024 a fifth longer where
    the block table had room for 8192."""
    sms = host.num_sms(torch.device(DEVICE))
    params = decode.config(128, 128, 2, 4, slots, torch.device(DEVICE))
    splits = decode.num_splits(slots, capacity, params)
    assert slots * splits > sms
    assert splits <= max(params.wave, -(-capacity // params.chunk_max))


@triton.jit
def split_sizes(out, keys, splits, chunk_min, chunk_max, one_wave, waves):
    triton.language.store(out, split_size(triton.language.load(keys), splits, chunk_min, chunk_max, one_wave, waves))


@pytest.mark.parametrize(("dim", "places"), [(64, 3 * 132), (256, 2 * 132), (256, 3 * 132)])
@pytest.mark.parametrize("slots", [6, 8, 18, 24, 32, 48, 64, 96, 120])
def test_long_contexts_take_whole_waves(slots, dim, places, monkeypatch):
    """512 programs on 396 places took a quarter longer than 384. Programs of heads of 256 have as many places as their
    registers allow: three per multiprocessor without rotary embeddings, two with them."""
    monkeypatch.setattr(host, "num_sms", lambda device: 132)
    params = decode.config(dim, dim, 2, 4, slots, torch.device(DEVICE))
    splits = decode.num_splits(slots, 1 << 17, params)
    assert splits % params.wave == 0
    for keys in (8192, 30000, 32768, 1 << 17):
        size, given = (torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in (0, keys))
        split_sizes[(1,)](size, given, splits, params.chunk_min, params.chunk_max, params.wave, params.waves)
        used = -(-keys // int(size))
        assert used <= splits and (int(size) <= params.chunk_max or used == params.max_splits)
        filled = slots * used / places
        full = -(-filled // 1)  # waves, the last one of which should not be much emptier than the others
        assert full == 1 or filled >= full * slots * params.wave / (132 * (3 if dim == 64 else 2)) - 0.01


def settings(row: dict) -> tuple[int, int]:
    """Keys per step of the loop and parts per sequence of a row of h200_decode_waves.json, which was measured before the rule:
    what a system does not name was as it was then."""
    slots = row["batch"] * 8
    before = 32 if row["dim"] == 256 else 128 if row["dim"] == 64 or slots < 528 else 64
    given = dict(item.split("=") for item in row["system"].partition(":")[2].split("+") if item)
    chunk = int(given.get("chunk", 2048))
    while row["batch"] * (-(-row["context"] // chunk) - 1) > min(128, 3 * row["batch"]):
        chunk *= 2
    return int(given.get("block_n", before)), -(-row["context"] // chunk)


def test_few_places_stay_empty(monkeypatch):
    """The steps and cuts that the rule takes, among those that were measured on an H200 for 17 to 192 sequences. 72 sequences
    of 1024 tokens of llama-8b's heads took 21 % longer than need be, and 32 of 4096 16 %."""
    monkeypatch.setattr(host, "num_sms", lambda device: 132)
    found: dict[tuple, dict[tuple[int, int], float]] = {}
    for row in json.loads((RESULTS / "h200_decode_waves.json").read_text())["rows"]:
        if row["dim"] == 64:  # another kernel since: below
            continue
        cell = tuple(row[name] for name in ("group", "dim", "context", "batch"))
        times = found.setdefault(cell, {})
        times[settings(row)] = min(row["us"], times.get(settings(row), row["us"]))
    longer = []
    for (group, dim, context, batch), times in found.items():
        params = decode.config(dim, dim, 2, group, 8 * batch, torch.device("cpu"))
        taken = times.get((params.block_n, -(-context // decode.cut(8 * batch, context, params))))
        if taken is not None:  # what was not measured: heads of 256 in steps of 64 keys for some batches
            longer.append(taken / min(times.values()))
    assert len(longer) > 0.8 * len(found)
    assert max(longer) < 1.15 and sum(longer) / len(longer) < 1.02


def test_few_places_stay_empty_of_heads_of_64(monkeypatch):
    """The rule's steps, which is what a row without parameters was measured with, among those of 64 and of 128 keys and other
    numbers of places, for 32 to 128 sequences."""
    monkeypatch.setattr(host, "num_sms", lambda device: 132)
    found: dict[tuple, dict[str, float]] = {}
    for row in json.loads((RESULTS / "h200_decode_unmasked.json").read_text())["rows"]:
        if row["dim"] == 64 and row["batch"] > 16:
            found.setdefault((row["group"], row["context"], row["batch"]), {})[row["system"]] = row["us"]
    longer = [times["triton"] / min(times.values()) for times in found.values()]
    assert len(found) == 10 and max(longer) < 1.08 and sum(longer) / len(longer) < 1.02
    for group, _, batch in found:
        assert decode.config(64, 64, 2, group, 8 * batch, torch.device("cpu")).block_n == 128
