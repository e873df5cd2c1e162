"""Which steps an engine captures: how far mixed steps go by default, that steps at the edges of buckets are exact, and steps of
prompts for which the backend has faster kernels than a graph holds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire import CudagraphSupport, Engine, SamplingParams
from quire.attn_ops import registry
from quire.graph_runner import capture_shapes as module
from quire.graph_runner.capture_shapes import REASON, WithoutGraph, capture_shapes, launch_bound_tokens, step_us
from quire.graph_runner.config import EngineConfig
from quire.graph_runner.forward_mode import ForwardMode
from tests.tiny import GREEDY, hf_greedy, load_model, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
CUDA = torch.device("cuda", 0)
NATIVE = registry.get_backend("torch_native")


def matrices(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, count: int = 16) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes] * count


def llama(hidden: int, heads: int, kv_heads: int, dim: int, mlp: int) -> list[torch.Tensor]:
    return matrices((heads * dim, hidden), (kv_heads * dim, hidden), (kv_heads * dim, hidden), (hidden, heads * dim),
                    (mlp, hidden), (mlp, hidden), (hidden, mlp), (hidden,))


@pytest.mark.parametrize(("parameters", "tokens"), [
    (llama(1024, 16, 8, 128, 3072), 8192),  # Qwen3-0.6B
    (llama(2048, 32, 8, 64, 8192), 2048),  # Llama-3.2-1B
    (llama(4096, 32, 8, 128, 14336), 1024),  # Llama-3.1-8B
    ([*llama(1024, 16, 8, 128, 3072), *matrices((50000, 1024), count=2)], 8192),  # embedding and head
    ([*llama(2048, 32, 4, 128, 768), *matrices((128, 1536, 2048), (128, 2048, 768))], 1024),  # experts
    (matrices((1024, 1024), dtype=torch.float32), 1024),  # products in float32 are slow on every GPU
    (matrices((1024,)), 1024),
])
def test_steps_are_captured_as_far_as_launching_them_takes_longer(parameters, tokens: int) -> None:
    assert launch_bound_tokens(parameters, vocab_size=50000) == tokens


def mixed(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), launch_bound: int = 8192,
          support: CudagraphSupport = CudagraphSupport.ALWAYS, **options) -> set[tuple[int, int]]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = capture_shapes(EngineConfig(**options), support, CUDA, launch_bound)
    return {(s.num_tokens, s.num_reqs) for s in found if s.num_tokens != s.num_reqs}


def test_small_models_have_graphs_for_whole_chunks_of_prompts(monkeypatch) -> None:
    assert {(8192, 256), (8192, 16), (7680, 16)} <= mixed(monkeypatch)
    assert max(mixed(monkeypatch, max_num_batched_tokens=5000))[0] == 5000
    assert max(mixed(monkeypatch, launch_bound=1024))[0] == 1024
    assert max(mixed(monkeypatch, capability=(8, 0)))[0] == 1024  # its rates are others
    assert mixed(monkeypatch, support=CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE) == set()


def test_the_option_bounds_every_list(monkeypatch) -> None:
    assert max(mixed(monkeypatch, max_cudagraph_capture_size=2048))[0] == 2048
    assert max(mixed(monkeypatch, max_cudagraph_capture_size=4096, launch_bound=1024))[0] == 4096
    assert max(mixed(monkeypatch, cudagraph_token_sizes="powers"))[0] == module.MIXED_TOKENS
    assert max(mixed(monkeypatch, cudagraph_token_sizes="powers", max_cudagraph_capture_size=4096))[0] == 4096
    assert mixed(monkeypatch, cudagraph_token_sizes=[20]) == {(20, 19)}
    decode = CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert max(capture_shapes(EngineConfig(max_cudagraph_capture_size=64), decode, CUDA, 1024)) == (64, 64)
    with pytest.raises(ValueError, match="cudagraph_token_sizes has 128, which is more than max_cudagraph_capture_size=64"):
        EngineConfig(cudagraph_token_sizes=[128], max_cudagraph_capture_size=64)


def test_steps_at_the_edges_of_buckets_are_exact() -> None:
    """One token fewer than a bucket, as many, and one more, alone and beside a decode, with wild values in the padding."""
    model = load_model(num_layers=1)
    greedy = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    lengths = [n + d for n in (24, 32) for d in (-1, 0, 1)]
    prompts = [[(7 * i + 3 * n) % 97 + 5 for i in range(n)] for n in lengths]
    results = []
    for options in (dict(cudagraph_token_sizes=[24, 32], cudagraph_debug=True), dict(cudagraph_capture_sizes=[])):
        with Engine(model, num_pages=80, page_size=4, max_num_seqs=3, max_model_len=64, max_num_batched_tokens=48, **options
                    ) as engine:
            results.append([tokens(engine.generate([prompt, [9, 9]][: 1 + pair], greedy))
                            for prompt in prompts for pair in (False, True)])
            used = {bucket: count for bucket, count in engine.runner.graphs.stats.replays.items() if bucket.num_tokens > 3}
            if "cudagraph_debug" in options:  # 23, 24, 25; 25, 26, 27 with [9, 9]; and so on: 33 and more have none
                assert used == {(24, 3): 2, (32, 3): 6} and engine.runner.graphs.stats.padding_tokens > 0
    assert results[0] == results[1]


# -- without a graph


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
