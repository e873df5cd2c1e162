"""A trace from the disk on a GPU: compiled, fused and captured as one that Dynamo just made."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from quire.graph_runner.engine import Engine
from tests.tiny import GREEDY, load_model, tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_tokens_from_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, prompts,
                                     dtype: torch.dtype) -> None:
    """As by default: on a GPU traces are kept unless QUIRE_TRACE_CACHE is 0."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("QUIRE_TRACE_CACHE")
    caplog.set_level(logging.INFO, "quire.passes.capture")  # why a trace is not kept, or not taken
    found, traces = [], []
    for _ in range(2):
        before = counters["stats"]["unique_graphs"]
        with Engine(load_model("cuda", dtype), num_pages=400, max_num_seqs=8, cudagraph_capture_sizes=[1, 2, 8],
                    cudagraph_token_sizes=[16, 64]) as engine:
            traces.append(counters["stats"]["unique_graphs"] - before)
            found.append(tokens(engine.generate(prompts, GREEDY)))
            assert engine.runner.graphs.stats.replayed
    states = [pickle.loads(file.read_bytes()).environment.split(", ") for file in tmp_path.rglob("traces/*.pickle")]
    states = [[part for part in state if any(part not in other for other in states)] for state in states]
    assert traces == [1, 0], f"{traces} traces; files that differ in {states}; log:\n{caplog.text}"
    assert found[0] == found[1]
