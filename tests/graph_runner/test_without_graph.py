"""Steps of prompts for which the backend has faster kernels than a graph holds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.attn_ops import registry
from quire.graph_runner.capture_shapes import REASON, WithoutGraph, step_us
from quire.graph_runner.engine import Engine
from quire.graph_runner.forward_mode import ForwardMode
from tests.tiny import GREEDY, hf_greedy, load_model, tokens

NATIVE = registry.get_backend("torch_native")


def rule(with_graph: float, without: float, launch: float) -> WithoutGraph:
    backend = replace(NATIVE, without_graph=lambda sites, device, state, new, lens: (with_graph, without))
    return WithoutGraph(backend, [], torch.device("cpu"), launch, token_us=1.0)


def batch(*rows: tuple[int, int]) -> SimpleNamespace:
    """Of (tokens, tokens computed before)."""
    ones = sum(new == 1 for new, _ in rows)
    return SimpleNamespace(rows=[SimpleNamespace(num_new=new, start=start) for new, start in rows],
                           num_tokens=sum(new for new, _ in rows), forward_mode=ForwardMode.of(ones, len(rows)))


@pytest.mark.parametrize(("with_graph", "without", "launch", "found"), [
    (1000.0, 800.0, 50.0, REASON),
    (1000.0, 800.0, 1900.0, REASON),  # the GPU takes 1000 for the matrix products of 1000 tokens
    (1000.0, 800.0, 2001.0, None),  # the host would be the slower one
    (1000.0, 990.0, 50.0, None),  # not worth it
])
def test_a_step_takes_the_longer_of_host_and_gpu(with_graph, without, launch, found) -> None:
    assert rule(with_graph, without, launch).reason(batch((990, 10), (10, 0)), {}) == found


def test_decodes_keep_their_graphs() -> None:
    assert rule(100.0, 1.0, 0.0).reason(batch((1, 10), (1, 20)), {}) is None
    measured = rule(100.0, 80.0, 1e9)
    measured.measure(lambda: None)
    assert measured.launch_us < 1e6
    quick = rule(100.0, 80.0, 0.5)
    quick.measure(lambda: sum(range(10**5)))
    assert quick.launch_us == 0.5


def test_times_of_a_model() -> None:
    """Of the matrices that every token meets: two operations for each element and token."""
    parameters = [torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")] * 3 + [
        torch.empty(999, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(4096, device="meta")]
    assert step_us(parameters, 999) == pytest.approx((3 * 195, 3 * 2 * 4096**2 / 600e6))


def test_an_engine_runs_such_steps_without_graphs(monkeypatch) -> None:
    """The tokens are the same, the reason is counted, and the backend is asked with the lengths of the batch."""
    asked: list[tuple[list[int], list[int]]] = []

    def times(sites, device, state, new: np.ndarray, lens: np.ndarray) -> tuple[float, float]:
        asked.append((new.tolist(), lens.tolist()))
        return 1e9, 5e8 if new.max() > 7 else 1e9

    monkeypatch.setattr(registry, "REGISTRY", registry.Registry([]))
    registry.register_backend(replace(NATIVE, name="asked", without_graph=times))
    model, prompts = load_model(num_layers=1), [list(range(20, 20 + n)) for n in (12, 4)]
    with Engine(model, num_pages=40, max_num_seqs=2, max_num_batched_tokens=8, cudagraph_capture_sizes=[1, 2],
                cudagraph_token_sizes=[8], attention="asked") as engine:
        assert tokens(engine.generate(prompts, GREEDY)) == [hf_greedy(model, p, GREEDY.max_tokens) for p in prompts]
        stats = engine.runner.graphs.stats
    assert stats.fell_back == {REASON: 1} and stats.replayed > 1
    assert asked == [([8], [8]), ([4, 4], [12, 4])]
