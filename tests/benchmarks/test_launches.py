"""Which kernels a layer launches, read off Inductor's code for an H200 without one (``benchmarks/launches.py``)."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from benchmarks.launches import launches, programs
from quire.graph_runner.bench.models import ModelSpec, skeleton


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_a_layer_with_experts(name: str) -> None:
    """From router to sum, two products with the gate between them: nothing sorted, counted or gathered."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    found = []
    for own in (True, False):
        model = skeleton(ModelSpec(name, torch.bfloat16, torch.device("cpu"), 1)).to_empty(device="cpu").eval()
        found.append([call for program in programs(model, small=True, own_experts=own) for call in launches(program)])
    theirs, ours = found
    assert len(theirs) - len(ours) == 6, f"{theirs}\n{ours}"  # each a line of the program, and a sort is several kernels
    start = ours.index("topk")
    assert ours[start : start + 4] == ["topk", "expert_linear", "pointwise", "expert_linear"]
    assert ours.count("expert_linear") == theirs.count("_grouped_mm") == 2 and not {"sort", "histc"} & set(ours)
