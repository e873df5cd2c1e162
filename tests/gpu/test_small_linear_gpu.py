"""The linear layer for decode batches on a GPU: real sizes, bf16, every parameter set of the table, in a CUDA graph."""

from __future__ import annotations

import contextlib

import pytest
import torch

from quire.attn_ops.kv_quant import quantize
from quire.attn_ops.ops import small_linear as ops
from quire.attn_ops.ops.small_linear_wide import unpacked
from quire.attn_ops.tuning.launch_config import INT4, STORE, Config
from quire.attn_ops.tuning.small_linear import LinearShape, candidates, missing, tune
from tests.attn_ops.cases import shape_of_key
from tests.gpu.helpers import captured

OutOfResources = pytest.importorskip("triton.runtime.errors").OutOfResources


def arguments(tokens: int, n: int, k: int, swiglu: bool):
    torch.manual_seed(0)
    made = dict(dtype=torch.bfloat16, device="cuda")
    out = n // 2 if swiglu else n
    return (torch.randn(tokens, k, **made), torch.randn(n, k, **made) * k**-0.5, None, torch.rand(k, **made) + 0.5, 1e-5,
            torch.randn(tokens, out, **made), swiglu)


def quantized(tokens: int, n: int, k: int, swiglu: bool, codes: torch.dtype):
    """The same with codes and their scales, and with a norm, which the engine keeps outside."""
    x, weight, *rest = arguments(tokens, n, k, swiglu)
    found, scale = int4_of(weight) if codes == INT4 else quantize(weight, codes)
    return x, found, *rest, scale


def int4_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As torchao packs a weight: PyTorch's own op, groups of 128 columns."""
    n, k = weight.shape
    groups = weight.float().view(n, -1, 128)
    scale = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    zero = groups.amin(-1, keepdim=True) + 8 * scale
    codes = ((groups - zero) / scale + 8).round().clamp(0, 15).int().view(n, k)
    packed = torch.ops.aten._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8), 8)
    return packed, torch.stack([scale[..., 0].t(), zero[..., 0].t()], -1).to(torch.bfloat16).contiguous()


def wide(x):
    """In float64, unless it is codes, or scales of int4: those are rounded to bf16 with their codes."""
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() and x.element_size() > 1 and x.dim() != 3 else x


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    return ((out.double() - truth).norm() / truth.norm()).item()


KEYS = sorted({key for configs in (STORE.load(STORE.shipped) or {}).values() for key in configs})
LARGE = 65536  # rows of a weight whose copy in float64, and what it is made of, leave no room for tests beside it


@pytest.mark.parametrize("key", [pytest.param(key, marks=[pytest.mark.alone] * (shape_of_key(key)[1] > LARGE)) for key in KEYS])
def test_every_parameter_set(key) -> None:
    """No further from fp64 than twice the separate bf16 kernels are."""
    padded, n, k, swiglu, codes = shape_of_key(key)
    for tokens in {padded, max(1, padded - 3)}:
        args = arguments(tokens, n, k, swiglu) if codes is None else quantized(tokens, n, k, swiglu, codes)
        for given in (args, (*args[:3], None, *args[4:])) if codes is not None else (args,):  # the wide kernels have no norm
            truth = ops.small_linear_eager(*[wide(a) for a in given])
            assert error(ops.small_linear(*given), truth) <= 2 * error(ops.small_linear_eager(*given), truth)


@pytest.mark.parametrize("tokens", [1, 8, 29])
@pytest.mark.parametrize("n, k, swiglu", [(4608, 3584, False), (37888, 3584, True), (3584, 18944, False), (3072, 8192, False)])
def test_every_candidate(tokens, n, k, swiglu) -> None:
    """As above, of shapes whose tiles do not fill the GPU evenly: programs of fewer rows are tried there."""
    args = arguments(tokens, n, k, swiglu)
    truth = ops.small_linear_eager(*[wide(a) for a in args])
    bound = 2 * error(ops.small_linear_eager(*args), truth)
    tried = candidates(tokens, LinearShape(n, k, True, True, swiglu, torch.bfloat16), args[0].device)
    assert tokens == 1 or not swiglu or any(config.rows for config in tried)
    ran = 0
    for config in tried:
        with contextlib.suppress(OutOfResources):  # what measuring does with a tile that does not fit this GPU
            assert error(ops.small_linear_cuda(*args, config=config), truth) <= bound, config
            ran += 1
    assert ran >= 3


@pytest.mark.parametrize("codes", ops.QUANTIZED_WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 29, 64, 200])
def test_every_candidate_for_codes(tokens, codes) -> None:
    """As above; also of weights that no tile divides, with all that is folded in."""
    for n, k, swiglu in ((6144, 4096, False), (2048, 4096, True), (1000, 1104, True)):
        args = quantized(tokens, n, k, swiglu, codes)
        truth = ops.small_linear_eager(*[wide(a) for a in args])
        bound = 2 * error(ops.small_linear_eager(*args), truth)
        for config in candidates(tokens, LinearShape(n, k, False, False, swiglu, torch.bfloat16, codes), args[0].device):
            assert error(ops.small_linear_cuda(*args, config=config), truth) <= bound, config
        alone = (*args[:3], None, 0.0, args[5] if not swiglu else None, False, args[7])  # the wide kernels' part
        truth = ops.small_linear_eager(*[wide(a) for a in alone])
        bound = 2 * error(ops.small_linear_eager(*alone), truth)
        for config in candidates(tokens, LinearShape(n, k, False, False, False, torch.bfloat16, codes), args[0].device):
            assert error(ops.small_linear_cuda(*alone, config=config), truth) <= bound, config


@pytest.mark.parametrize("tokens", [1, 8, 29, 64, 200, 300])
def test_int4_is_pytorchs(tokens) -> None:
    """The layout is the one that PyTorch's op writes and its product reads, at every size; above 256 tokens unpacked."""
    for n, k in ((6144, 4096), (1000, 1152)):
        x, weight, _, _, _, residual, _, scales = quantized(tokens, n, k, False, INT4)
        truth = torch.ops.aten._weight_int4pack_mm(x, weight, 128, scales).double()
        rest = None, None, 0.0, None, False, scales
        assert error(unpacked(weight, scales, x.dtype).double() @ x.double().t(), truth.t()) < 5e-3
        shape = LinearShape(n, k, False, False, False, torch.bfloat16, INT4)
        for config in (None, *candidates(tokens, shape, x.device)) if tokens <= 256 else (None,):
            assert error(ops.small_linear_cuda(x, weight, *rest, config=config), truth) < 5e-3, config
        added = ops.small_linear_cuda(x, weight, None, None, 0.0, residual, False, scales)
        assert error(added, truth + residual.double()) < 5e-3


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_large_products_of_codes_in_float16(codes) -> None:
    """Also of more tokens than the kernels take: sums above float16's largest number, before the scale is applied."""
    x = torch.randn(300, 256, dtype=torch.float16, device="cuda")
    x[:, 0] = 600
    weight = torch.randn(64, 256, dtype=torch.float16, device="cuda") / 16
    weight[:, 0] = 0.5
    found, scale = quantize(weight, codes)
    for tokens in (1, 16, 200, 300):
        args = x[:tokens], found, None, None, 0.0, None, False, scale
        truth = x[:tokens].double() @ (found.double() * scale.double()[:, None]).t()
        assert error(ops.small_linear_cuda(*args), truth) < 1e-3


@pytest.mark.parametrize("tokens", [1, 2, ops.MAX_TOKENS])
def test_in_a_cuda_graph(tokens) -> None:
    args = arguments(tokens, 4096, 4096, False)
    graph, out = captured(lambda: ops.small_linear(*args))
    args[0].normal_()
    graph.replay()
    assert torch.equal(out, ops.small_linear(*args))


@pytest.mark.alone  # times kernels
def test_tuning(monkeypatch, tmp_path) -> None:
    """A shape that was not measured before is measured and kept, and its parameters give the right result."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    device, shape = torch.device("cuda", 0), LinearShape(1536, 2304, True, True, False, torch.bfloat16)
    assert len(missing([shape], device)) == 3 and tune([shape], device) == 3 and not missing([shape], device)
    for tokens in (1, 8, 32):
        args = arguments(tokens, 1536, 2304, False)
        truth = ops.small_linear_eager(*[a.double() if isinstance(a, torch.Tensor) else a for a in args])
        assert error(ops.small_linear(*args), truth) <= 2 * error(ops.small_linear_eager(*args), truth)


@pytest.mark.parametrize("pdl, configs", [(True, (None, None)), (None, (None, None)), (None, (
    Config(64, 128, 4, 5, norm_apart=1), Config(64, 128, 4, 5, 4)))], ids=["every", "default", "pairs"])
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_dependent_launch(tokens, pdl, configs) -> None:
    """A chain of kernels that are set up before the one before them ends, all or the second of two: the bits are those of a
    plain chain, each time."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    first, second = arguments(tokens, 4096, 1024, False), arguments(tokens, 1024, 4096, False)
    x = first[0].clone()

    def chain(pdl: bool | None) -> torch.Tensor:
        y = x
        for _ in range(20):
            for args, config in zip((first, second), configs, strict=True):
                config = None if tokens == 1 else config
                y = ops.small_linear_cuda(y, args[1], None, args[3], 1e-5, None, False, pdl=pdl, config=config)
        return y

    expected = chain(False).clone()
    graph, out = captured(lambda: chain(pdl))
    for scale in (1, 2, 1):
        x.copy_(first[0] * scale)
        graph.replay()
        assert torch.equal(out, chain(False)) and (scale != 1 or torch.equal(out, expected))
