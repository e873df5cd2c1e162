"""Tokens drawn inside the model's graph: those of the sampler for the same seeds, and plain argmax for greedy rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import CommonAttentionMetadata, SamplingParams, Step
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.ops import sampling as draw
from quire.graph_runner.sampler import SamplingTensors, sample
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions
from tests.passes.models import tiny
from tests.sampling import sampling_tensors
from tests.zoo.configs import SERVED, build

pytestmark = pytest.mark.usefixtures("tokens_unchecked")

TEMPERATURES = (0.0, 0.7, 1.0, 0.0, 1.8, 1e-6)


def sampling(count: int, position: int, temperatures: Any = TEMPERATURES) -> SamplingTensors:
    params = [SamplingParams(temperature=temperatures[i % len(temperatures)]) for i in range(count)]
    return sampling_tensors(params, [2**62 + 7 * i for i in range(count)], [position + i for i in range(count)])


def three(tensors: SamplingTensors) -> tuple[torch.Tensor, ...]:
    return tensors.temperature, tensors.seed, tensors.position


def run(model: PagedModel, count: int, sampling: Any, position: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and tokens of ``count`` sequences of three tokens."""
    cache = PagedKVCache.for_sites(model.sites, num_pages=count + 1, page_size=8, device=torch.device("cpu"))
    meta = CommonAttentionMetadata.build([3] * count, [3] * count, [[r + 1] for r in range(count)], page_size=8)
    ids = torch.randint(0, 50, (3 * count,), generator=torch.Generator().manual_seed(position))
    return model.run(Step(cache, meta), ids, meta.positions, meta.logits_indices, sampling)


def check(model: PagedModel) -> None:
    drawn = 0
    for count in (1, 2, 6, 11):
        for position in range(4):
            tensors = sampling(count, position)
            logits, tokens = run(model, count, three(tensors), position)
            assert tokens.tolist() == sample(logits, tensors).tolist()
            greedy = tensors.temperature < 1e-5
            assert torch.equal(tokens[greedy], logits.argmax(-1)[greedy])
            drawn += int((tokens != logits.argmax(-1)).sum())
    assert drawn > 10  # not all of it was greedy


def ops(model: PagedModel) -> int:
    """How often the op stands in the model's graph."""
    return sum(node.target is torch.ops.quire.sample_tokens.default for node in model.graph.gm.graph.nodes)


@pytest.mark.parametrize("op", [False, True], ids=["", "op"])
def test_op_by_op(op: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plain functions as on a CPU, and with the op as on CUDA."""
    monkeypatch.setattr(draw, "uses_kernel", lambda logits: op)
    model = PagedModel(build(SERVED["llama"]), QuireOptions(compiler="eager"), draws=True)
    assert ops(model) == op
    check(model)


@pytest.mark.slow
@pytest.mark.parametrize("patched", [None, "on_gpu", "uses_kernel"], ids=["", "in_64_chunks", "op"])
def test_compiled_by_inductor(patched: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = pytest.importorskip("torch._inductor.cpp_builder")
    try:
        builder.get_cpp_compiler()
    except Exception:
        pytest.skip("no C++ compiler")
    if patched:
        monkeypatch.setattr(draw, patched, lambda tensor: True)
    model = PagedModel(build(SERVED["llama"]), QuireOptions(compiler="inductor"), draws=True)
    assert ops(model) == (patched == "uses_kernel")
    check(model)


def test_without_sampling_all_rows_are_greedy() -> None:
    draws = PagedModel(build(SERVED["llama"]), QuireOptions(compiler="eager"), draws=True)
    greedy = PagedModel(build(SERVED["llama"]), QuireOptions(compiler="eager"))
    (logits, tokens), (same, want) = run(draws, 5, None), run(greedy, 5, None)
    assert torch.equal(logits, same) and torch.equal(tokens, want)
    with pytest.raises(ValueError, match="draws=False: its graph takes greedy tokens only"):
        run(greedy, 5, three(sampling(5, 0)))


def test_a_row_of_nothing_is_an_error_on_both_ways() -> None:
    """No token can be drawn where all are excluded, whether the graph draws or takes the greedy token."""
    class Nothing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny()

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            logits = self.inner(input_ids, position_ids)
            return torch.where((input_ids == 3)[..., None], float("-inf"), logits)

    for draws in (False, True):
        torch._dynamo.reset()
        paged = PagedModel(Nothing(), QuireOptions(compiler="eager"), draws=draws)
        cache = PagedKVCache.for_sites(paged.sites, num_pages=3, page_size=4, device="cpu")
        meta = CommonAttentionMetadata.build([2], [2], [[1]], page_size=4)
        logits, tokens = paged.run(Step(cache, meta), torch.tensor([3, 4]), meta.positions, torch.arange(2))
        assert tokens.tolist() == [-1, int(logits[1].argmax())]
