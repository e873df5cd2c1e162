"""Which kernels a layer launches, read off Inductor's code for an H200 without one (``benchmarks/launches.py``)."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from benchmarks.launches import launches, programs
from quire.graph_runner.bench.models import ModelSpec, skeleton


@pytest.mark.slow
@pytest.mark.parametrize(("name", "experts"), [
    ("qwen3-30b-a3b", ["expert_swiglu"]), ("gpt-oss-20b", ["expert_clamped_swiglu"])])
def test_a_layer_with_experts(name: str, experts: list[str]) -> None:
    """The router, the experts' kernels, one weighted sum; nothing sorted, counted or gathered by PyTorch."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    found = []
    for own in (True, False):
        model = skeleton(ModelSpec(name, torch.bfloat16, torch.device("cpu"), 1)).to_empty(device="cpu").eval()
        found.append([call for program in programs(model, small=True, own_experts=own) for call in launches(program)])
    theirs, ours = found
    assert theirs.count("_grouped_mm") == 2 and {"sort", "histc"} < set(theirs)
    assert not {"topk", "sort", "histc", "_grouped_mm"} & set(ours) and len(ours) < len(theirs)
    start = ours.index("route_rows")
    assert ours[start + 1 :][: len(experts)] == experts
    rest = ours[start + 1 + len(experts) :]
    assert rest == ["reduction", "pointwise", "small_linear", "sample_tokens"], "the sum of experts is unrolled into the norm"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi-3-mini", "qwen3-8b"])
def test_a_dense_layer(name: str) -> None:
    """Attention, and four products with all that is around them, however the model spells it."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    model = skeleton(ModelSpec(name, torch.bfloat16, torch.device("cpu"), 3)).to_empty(device="cpu").eval()
    layer = launches(programs(model, small=True, own_experts=False)[1])
    assert layer == [*["small_linear"] * 4, "triton_rope_paged_attention"]


@pytest.mark.slow
def test_a_layer_with_norms_behind_its_products() -> None:
    """Gemma's: each such norm, the sum and the norm before the next product are one launch, and the gate none."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    model = skeleton(ModelSpec("gemma3-4b", torch.bfloat16, torch.device("cpu"), 3)).to_empty(device="cpu").eval()
    layer = launches(programs(model, small=True, own_experts=False)[1])
    assert layer == [*["small_linear", "reduction", "small_linear"] * 2, "triton_rope_paged_attention"]


@pytest.mark.slow
def test_a_layer_with_adapters() -> None:
    """PEFT's LoRA, in float32 or the model's dtype, takes no launch of its own beside one per forward that zeroes counters."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    peft = pytest.importorskip("peft", reason="pip install 'quire[integrations]'")
    found = {}
    for dtype in (None, "float32", "the model's"):
        model = skeleton(ModelSpec("llama-1b", torch.bfloat16, torch.device("cpu"), 2)).to_empty(device="cpu").eval()
        if dtype is not None:
            peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.05),
                                autocast_adapter_dtype=dtype == "float32")
        calls = [call for program in programs(model, small=True, own_experts=False) for call in launches(program)]
        found[dtype] = sorted({"lora_linear": "small_linear"}.get(call, call) for call in calls)
        assert calls.count("lora_linear") == (0 if dtype is None else 2 * 4)
    assert found["float32"] == found["the model's"] == sorted([*found[None], "lora_counters"])
