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
from quire.attn_ops.kernels import host  # noqa: E402

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


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


@pytest.mark.parametrize("kilobytes", [99, 163, 227])
def test_launches_fit_into_shared_memory(kilobytes, monkeypatch):
    """Of consumers' GPUs, A100 and H200: a launch with more in flight than a program may have fails."""
    monkeypatch.setattr(host, "num_sms", lambda device: 100)
    monkeypatch.setattr(host, "shared_memory", lambda device: kilobytes << 10)
    for dim in (64, 128, 256):
        for heads in (1, 8, 16):
            for slots in (1, 8, 16, 64, 128, 512, 4096):
                for padded in (False, True):
                    params = decode.config(dim, dim, 2, heads, slots, torch.device("cpu"), padded=padded)
                    assert decode.shared_bytes(params.block_n, params.stages, dim) <= kilobytes << 10, (params, dim)
