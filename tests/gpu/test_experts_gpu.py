"""Experts on a GPU: layers of large models in bf16, every path of the op, in CUDA graphs, and whole models captured."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from quire import Engine, SamplingParams
from quire.attn_ops.ops import experts
from quire.attn_ops.ops.routing import topk_rows, topk_rows_eager
from quire.graph_runner.step_buffers import BatchShape
from tests.gpu.helpers import captured
from tests.tiny import assert_idle, check_padded_bucket, tokens
from tests.zoo.configs import SERVED, build

#: name -> experts, experts of a token, N, K, transposed (and with bias)
LAYERS = {"qwen3-30b-a3b up": (128, 8, 1536, 2048, False), "qwen3-30b-a3b down": (128, 8, 2048, 768, False),
          "mixtral down": (8, 2, 4096, 14336, False), "gpt-oss-20b up": (32, 4, 5760, 2880, True),
          "gpt-oss-20b down": (32, 4, 2880, 2880, True), "deepseek-v2-lite down": (64, 6, 2048, 1408, False),
          "odd": (5, 3, 1000, 1100, False)}
#: Rounding the result is half a unit in the last place at most, and less on average than this; sums in fp32 add little to it.
#: In fp32 it is the sum itself, of K terms one after the other: about 6e-8 * sqrt(K).
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11, torch.float32: 5e-6}


@functools.lru_cache(maxsize=1)  # gigabytes
def weights(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    count, _, n, k, transposed = LAYERS[name]
    torch.manual_seed(0)
    weight = torch.randn(count, *((k, n) if transposed else (n, k)), dtype=dtype, device="cuda").mul_(k**-0.5)
    return weight, torch.randn(count, n, dtype=dtype, device="cuda") if transposed else None


def arguments(name: str, batch: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    count, each, _, k, transposed = LAYERS[name]
    weight, bias = weights(name, dtype)
    torch.manual_seed(batch)
    ids = torch.rand(batch, count, device="cuda").topk(each).indices
    return torch.randn(batch, k, dtype=dtype, device="cuda"), weight, bias, ids, transposed


def truth_of(args: Any) -> torch.Tensor:
    """The definition in a wider dtype, from the same inputs."""
    x, weight, bias, ids, transposed = args
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    added = None if bias is None else bias.to(wide)
    return experts.expert_linear_eager(x.to(wide), weight.to(wide), added, ids, transposed)


def check(out: torch.Tensor, truth: torch.Tensor) -> None:
    assert out.shape == truth.shape
    assert (out - truth).norm() <= ROUNDING[out.dtype] * truth.norm()


PATHS = ("pairs", "sorted")


@pytest.mark.parametrize("batch", [1, 3, 32, 128, 300])
@pytest.mark.parametrize("name, dtype", [
    *((name, torch.bfloat16) for name in LAYERS), *((name, dtype) for name in ("qwen3-30b-a3b down", "gpt-oss-20b down", "odd")
                                                    for dtype in (torch.float16, torch.float32))])
def test_layers_of_large_models(name: str, dtype: torch.dtype, batch: int) -> None:
    args = arguments(name, batch, dtype)
    truth = truth_of(args)
    check(experts.expert_linear(*args), truth)
    for path in PATHS:
        check(experts.expert_linear_cuda(*args, path=path), truth)


@pytest.mark.parametrize("batch", [1, 8, 33, 64, 200, 700, 3000])
@pytest.mark.parametrize("experts_, each, width, inner", [(128, 8, 2048, 768), (64, 6, 2048, 1408), (8, 2, 1024, 3584)])
def test_swiglu(experts_: int, each: int, width: int, inner: int, batch: int) -> None:
    """Every tile. Gate, up and their product are rounded on the way: up to three roundings more."""
    torch.manual_seed(batch)
    up = torch.randn(experts_, 2 * inner, width, dtype=torch.bfloat16, device="cuda").mul_(width**-0.5)
    down = torch.randn(experts_, width, inner, dtype=torch.bfloat16, device="cuda").mul_(inner**-0.5)
    ids = torch.rand(batch, experts_, device="cuda").topk(each).indices
    x = torch.randn(batch, width, dtype=torch.bfloat16, device="cuda")
    some = torch.arange(0, batch, max(1, batch // 200), device="cuda")
    truth = experts.expert_swiglu_eager(x[some].float(), up.float(), down.float(), ids[some], False).view(len(some), each, -1)
    out = experts.expert_swiglu(x, up, down, ids, False).view(batch, each, -1)[some]
    assert (out - truth).norm() <= 3 * ROUNDING[out.dtype] * truth.norm()


@pytest.mark.parametrize("batch", [1, 8, 33, 64, 200, 700, 3000])
@pytest.mark.parametrize("count, each, width, inner", [(32, 4, 2880, 2880), (5, 3, 1000, 600)])
def test_clamped_swiglu(count: int, each: int, width: int, inner: int, batch: int) -> None:
    """As ``test_swiglu``, with weights and biases as gpt-oss has them, and values beyond the limit."""
    torch.manual_seed(batch)
    up = torch.randn(count, width, 2 * inner, dtype=torch.bfloat16, device="cuda").mul_(width**-0.5)
    down = torch.randn(count, inner, width, dtype=torch.bfloat16, device="cuda").mul_(inner**-0.5)
    biases = [torch.randn(count, n, dtype=torch.bfloat16, device="cuda") for n in (2 * inner, width)]
    ids = torch.rand(batch, count, device="cuda").topk(each).indices
    x = torch.randn(batch, width, dtype=torch.bfloat16, device="cuda")
    some = torch.arange(0, batch, max(1, batch // 100), device="cuda")
    wide = [t.float() for t in (x[some], up, biases[0], down, biases[1])]
    truth = experts.expert_clamped_swiglu_eager(*wide, ids[some], True, 1.702, 2.0).view(len(some), each, -1)
    found = [experts.expert_clamped_swiglu(x, up, biases[0], down, biases[1], ids, True, 1.702, 2.0)]
    found += [experts.expert_clamped_swiglu_cuda(x, up, biases[0], down, biases[1], ids, True, 1.702, 2.0, path=path)
              for path in PATHS if batch <= 700]
    for out in found:
        assert (out.view(batch, each, -1)[some] - truth).norm() <= 3 * ROUNDING[out.dtype] * truth.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, columns, k", [(1, 128, 8), (32, 64, 6), (8192, 128, 8), (5, 8, 2), (100, 257, 16), (3, 512, 1)])
def test_topk_rows(rows: int, columns: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, columns, device="cuda").to(dtype)
    x[0, :3] = x[0, 5]
    for ours, defined in zip(topk_rows(x, k), topk_rows_eager(x, k), strict=True):
        assert torch.equal(ours, defined)


@pytest.mark.parametrize("path", PATHS)
def test_ids_out_of_range(path: str) -> None:
    """Rows of zeros, and nothing read where no weight is."""
    x, weight, bias, ids, transposed = arguments("gpt-oss-20b down", 9)
    ids[0, 1], ids[4], ids[8, 3] = 32, 1 << 40, -7
    out = experts.expert_linear_cuda(x, weight, bias, ids, transposed, path=path)
    zero = ((ids < 0) | (ids >= 32)).flatten()
    assert not out[zero].any() and out[~zero].any(-1).all() and out.isfinite().all()
    check(out, truth_of((x, weight, bias, ids, transposed)))


def test_a_row_does_not_depend_on_the_others() -> None:
    """In bf16 bit for bit, in batches of every size that one launch serves with tiles of 16 pairs. (One token alone has a
    kernel of its own, which sums in another order.)"""
    args = arguments("qwen3-30b-a3b up", 64)
    whole = experts.expert_linear(*args).view(64, 8, -1)
    for size in (2, 7, 17, 33):
        some = experts.expert_linear(args[0][:size], args[1], None, args[3][:size], False).view(size, 8, -1)
        assert torch.equal(some, whole[:size])


@pytest.mark.parametrize("path", PATHS)
def test_in_a_cuda_graph(path: str) -> None:
    """Captured with one set of ids and replayed with others, some of which leave most experts without rows."""
    x, weight, bias, ids, transposed = arguments("gpt-oss-20b down", 40)

    def run() -> torch.Tensor:
        return experts.expert_linear_cuda(x, weight, bias, ids, transposed, path=path)

    graph, out = captured(run)
    for change in (lambda: ids.fill_(3), lambda: ids.random_(32), lambda: ids.fill_(32), lambda: x.normal_()):
        change()
        graph.replay()
        assert torch.equal(out, run())
    ids.random_(32)
    graph.replay()
    check(out, truth_of((x, weight, bias, ids, transposed)))


@pytest.mark.parametrize("tokens", [1, 4])
def test_dependent_launch(tokens: int) -> None:
    """A chain of kernels that are set up before the one before them ends: the bits are those of a plain chain."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    x, up, _, ids, _ = arguments("qwen3-30b-a3b up", tokens)
    down = torch.randn(128, 2048, 768, dtype=torch.bfloat16, device="cuda") * 768**-0.5

    def chain(pdl: bool) -> torch.Tensor:
        y = x
        for _ in range(10):
            wide = experts.expert_linear_cuda(y, up, None, ids, False, pdl=pdl)
            both = experts.expert_linear_cuda(wide[:, :768], down, None, ids, False, pdl=pdl)
            y = both.view(tokens, 8, -1)[:, 0].contiguous()
        return y

    assert torch.equal(chain(True), chain(False))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_model_is_captured(name: str, dtype: torch.dtype) -> None:
    """transformers' own experts are, in fp16 and fp32, a loop on the host, which no CUDA graph can hold."""
    model = build(SERVED[name]).to("cuda", dtype)
    own = model.config._experts_implementation
    prompts = [[5, 6, 7, 8], [9, 10, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12]]
    with Engine(model, attention="triton", num_pages=100, max_num_seqs=8, max_model_len=48, cudagraph_capture_sizes=[1, 2, 8],
                cudagraph_token_sizes=[16, 64]) as engine:
        stats = engine.runner.graphs.stats
        assert stats.captured >= 5
        found = tokens(engine.generate(prompts, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)))
        assert all(len(t) == 20 and all(0 <= i < 64 for i in t) for t in found)
        assert stats.replayed >= 20 and not stats.fell_back.total()
        # Sums of up to 96 terms in another order, rounded to the dtype, in two layers.
        check_padded_bucket(engine, prompts, BatchShape(8, 8), {torch.float32: 1e-5}.get(dtype, 0.05))
        assert_idle(engine)
    assert model.config._experts_implementation == own
