"""Which kernels a layer launches, read off Inductor's code for an H200 without one (``benchmarks/launches.py``)."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from benchmarks.launches import launches, programs
from quire.graph_runner.bench.models import ModelSpec, skeleton
from quire.passes.fusions.registry import measured_fusions


@pytest.mark.slow
@pytest.mark.parametrize(("name", "experts"), [
    ("qwen3-30b-a3b", ["expert_swiglu"]), ("gpt-oss-20b", ["expert_linear", "pointwise", "expert_linear"])])
@pytest.mark.parametrize(("fusions", "router", "last"), [
    (measured_fusions(), "topk_rows", ["pointwise"]),
    ("all", "route_rows", ["reduction", "pointwise", "small_linear", "sample_tokens"])], ids=["default", "all"])
def test_a_layer_with_experts(name: str, experts: list[str], fusions: Any, router: str, last: list[str]) -> None:
    """From router to sum: the top-k, the experts' kernels, one weighted sum; nothing sorted, counted or gathered by PyTorch."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    found = []
    for own in (True, False):
        model = skeleton(ModelSpec(name, torch.bfloat16, torch.device("cpu"), 1)).to_empty(device="cpu").eval()
        made = programs(model, small=True, fusions=fusions, own_experts=own)
        found.append([call for program in made for call in launches(program)])
    theirs, ours = found
    assert theirs.count("_grouped_mm") == 2 and {"sort", "histc"} < set(theirs)
    assert not {"topk", "sort", "histc", "_grouped_mm"} & set(ours) and len(ours) < len(theirs)
    start = ours.index(router)
    assert ours[start + 1 :][: len(experts)] == experts
    assert ours[start + 1 + len(experts) :][: len(last)] == last, "the sum of eight experts is unrolled"
