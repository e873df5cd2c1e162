"""The linear layer for decode batches, against its definition in fp32; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import recording
from quire.attn_ops.kv_quant import quantize
from quire.attn_ops.ops import lora_linear
from quire.attn_ops.ops.small_linear import (
    MAX_TOKENS,
    MAX_TOKENS_QUANTIZED,
    QUANTIZED_WEIGHT_DTYPES,
    small_linear,
    small_linear_cuda,
    small_linear_eager,
)
from quire.attn_ops.tuning.launch_config import Config

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5


def case(tokens, n, k, *, norm=False, bias=False, residual=False, swiglu=False, dtype=torch.float16):
    torch.manual_seed(tokens + n + k)
    made = dict(dtype=dtype, device=DEVICE)
    rows = 2 * n if swiglu else n
    return (torch.randn(1, tokens, k, **made), torch.randn(rows, k, **made) * k**-0.5,
            torch.randn(rows, **made) if bias else None, torch.rand(k, **made) + 0.5 if norm else None, EPS,
            torch.randn(1, tokens, n, **made) if residual else None, swiglu)


def close(out, args) -> None:
    """Two fp16 roundings of results of order 1 (the norm's, the sum's) and their reach through SwiGLU: 4e-3 is 8 ulp."""
    wide = small_linear_eager(*[a.float() if isinstance(a, torch.Tensor) else a for a in args])
    assert out.shape == wide.shape and out.dtype == args[0].dtype
    torch.testing.assert_close(out.float(), wide, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("options", [
    {}, dict(norm=True), dict(bias=True), dict(residual=True), dict(swiglu=True),
    dict(norm=True, bias=True, residual=True, swiglu=True),
], ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("tokens, n, k", [(1, 64, 128), (1, 40, 200), (3, 64, 128), (16, 40, 200), (17, 64, 128)])
def test_kernel(tokens, n, k, options) -> None:
    args = case(tokens, n, k, **options)
    close(small_linear_cuda(*args), args)


@pytest.mark.parametrize("options", [{}, dict(norm=True, bias=True, residual=True)], ids=len)
@pytest.mark.parametrize("tokens, n, k", [(1, 40, 200), (3, 64, 128), (17, 40, 200)])
def test_gelu_in_the_place_of_silu(tokens, n, k, options) -> None:
    """Against F.gelu(approximate="tanh"), from far below zero, where it is 0, to far above, where it is the gate."""
    args = case(tokens, n, k, swiglu=True, **options)
    for scale in (1.0, 8.0):
        given = (args[0] * scale, *args[1:])
        gelu = (*given, None, (), True)
        out = small_linear_cuda(*gelu)
        wide = small_linear_eager(*[a.float() if isinstance(a, torch.Tensor) else a for a in gelu])
        torch.testing.assert_close(out.float(), wide, atol=4e-3 * scale**2, rtol=4e-3)
        assert (out - small_linear_cuda(*given)).abs().max() > 0.05, "SiLU is something else"
        x, weight, bias, norm, eps, residual, *_ = (a.float() if isinstance(a, torch.Tensor) else a for a in given)
        if norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm
        gate, up = torch.nn.functional.linear(x, weight, bias).chunk(2, -1)
        again = torch.nn.functional.gelu(gate, approximate="tanh") * up + (0.0 if residual is None else residual)
        torch.testing.assert_close(out.float(), again, atol=4e-3 * scale**2, rtol=4e-3)
    for kind in QUANTIZED_WEIGHT_DTYPES:
        codes = quantized(args, kind)
        close(small_linear_cuda(*codes, (), True), (args[0], codes[1].float() * codes[-1][:, None], *args[2:], None, (), True))


@pytest.mark.parametrize("run", [small_linear_eager, small_linear_cuda, small_linear])
def test_gelu_without_a_gate_is_refused(run) -> None:
    with pytest.raises(ValueError, match="goes with swiglu"):
        run(*case(3, 16, 32), gelu=True)


def quantized(args, kind):
    """The same with a weight of codes, as attn_ops/kv_quant.py rounds them, and their scales."""
    codes, scale = quantize(args[1], kind)
    return (args[0], codes, *args[2:], scale)


@pytest.mark.parametrize("kind", QUANTIZED_WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, dict(norm=True, bias=True, residual=True, swiglu=True)], ids=len)
@pytest.mark.parametrize("tokens, n, k", [
    (1, 64, 128), (1, 40, 200), (16, 40, 200), (40, 64, 128), (130, 72, 72), (257, 8, 16),
])
def test_quantized(tokens, n, k, options, kind) -> None:
    """The codes are exact in both: what differs is rounding, as without codes."""
    args = quantized(case(tokens, n, k, **options), kind)
    out = small_linear_cuda(*args)
    close(out, (args[0], args[1].float() * args[-1][:, None], *args[2:-1]))
    assert tokens <= MAX_TOKENS_QUANTIZED or torch.equal(out, small_linear_eager(*args))


@pytest.mark.parametrize("tokens, n, k", [(40, 64, 128), (130, 72, 200), (33, 8, 16)])
@pytest.mark.parametrize("splits", [2, 3])
def test_programs_share_the_columns(tokens, n, k, splits) -> None:
    """Also where a share is empty, and where columns or rows end within a tile."""
    args = quantized(case(tokens, n, k, bias=True, residual=True), torch.int8)
    out = small_linear_cuda(*args, config=Config(16, 32, 4, 2, splits))
    close(out, (args[0], args[1].float() * args[-1][:, None], *args[2:-1]))


@pytest.mark.parametrize("options", [{}, dict(norm=True, bias=True, residual=True, swiglu=True)], ids=len)
@pytest.mark.parametrize("tokens, n, k, rows", [(3, 64, 128, 12), (17, 40, 200, 16), (32, 100, 64, 28), (16, 64, 128, 20)])
@pytest.mark.parametrize("backwards", [False, True])
def test_programs_of_fewer_rows_than_their_tile(tokens, n, k, rows, options, backwards, monkeypatch) -> None:
    """Each row is computed, and none is written for its neighbour: the tiles overlap. A GPU's programs end in any order; the
    interpreter runs them one after the other, also the last one first."""
    if backwards:
        if DEVICE == "cuda":
            pytest.skip("the order is the GPU's")
        from triton.runtime.interpreter import interpreter_builder as builder

        forwards = builder.set_grid_idx
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: forwards(builder.grid_dim[0] - 1 - x, y, z))
    args = case(tokens, n, k, **options)
    close(small_linear_cuda(*args, config=Config(32, 64, 4, 2, rows=rows)), args)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 32])
def test_large_activations_in_float16(tokens, swiglu) -> None:
    """``x * norm`` is above float16's largest number before the norm's factor; the result is not, for any number of tokens."""
    args = case(tokens, 64, 64, norm=True, swiglu=swiglu)
    args[0][..., 0], args[3][0] = 20000, 7.8
    close(small_linear_cuda(*args), args)
    codes = quantized(args, torch.int8)
    for config in (None, Config(16, 64, 4, 3)):
        close(small_linear_cuda(*codes, config=config), (args[0], codes[1].float() * codes[-1][:, None], *args[2:]))


@pytest.mark.parametrize("kind", QUANTIZED_WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 40, MAX_TOKENS_QUANTIZED + 1])
def test_large_products_of_codes_in_float16(tokens, kind) -> None:
    """Their sums are above float16's largest number before the scale is applied; the results are not."""
    args = case(tokens, 16, 64)
    args[0][..., 0] = 600
    args[1][:, 0] = 0.5  # the largest of its row: code 127 or 448
    args = quantized(args, kind)
    close(small_linear_cuda(*args), (args[0], args[1].float() * args[-1][:, None], *args[2:-1]))


@pytest.mark.parametrize("options", [dict(norm=True), dict(swiglu=True)], ids=str)
def test_whole_sums_are_not_shared(options) -> None:
    """A norm in the kernel needs all columns of a token, and SwiGLU both operands."""
    if "norm" in options and DEVICE == "cpu":
        pytest.skip("in float16 the norm runs apart, and the interpreter has no products of bfloat16")
    args = quantized(case(40, 64, 128, **options, dtype=torch.bfloat16 if "norm" in options else torch.float16), torch.int8)
    assert torch.equal(small_linear_cuda(*args, config=Config(16, 32, 4, 2, 2)),
                       small_linear_cuda(*args, config=Config(16, 32, 4, 2)))


SHARED = {"norm_kernel": (True, False), "tile_kernel": (True, True), "add_up_kernel": (True, True)}


@pytest.mark.parametrize("lora", [False, True], ids=["alone", "lora"])
@pytest.mark.parametrize("setting, given, config, expected", [
    (None, None, Config(64, 128, 4, 4, 4), SHARED),
    (None, None, Config(64, 128, 4, 4, norm_apart=1), {"norm_kernel": (True, False), "tile_kernel": (True, True)}),
    (None, None, Config(64, 128, 4, 4), {"tile_kernel": (False, False)}),
    (None, False, Config(64, 128, 4, 4, 4), dict.fromkeys(SHARED, (False, False))),
    (False, None, Config(64, 128, 4, 4, 4), dict.fromkeys(SHARED, (False, False))),
    (True, None, Config(64, 128, 4, 4, 4), dict.fromkeys(SHARED, (True, True))),
], ids=["shared", "apart", "one", "given", "off", "always"])
def test_the_second_of_two_launches_is_set_up_during_the_first(setting, given, config, expected, lora, monkeypatch) -> None:
    """Which kernels let the next one start early, and which start so: of several tokens the second of a layer's two alone,
    since waiting programs of a large kernel keep another's from running."""
    for name, found in (("_has_pdl", True), ("_pdl_setting", setting), ("num_sms", 132), ("shared_memory", 233472)):
        monkeypatch.setattr(host, name, lambda *args, found=found: found)
    monkeypatch.setattr(lora_linear, "config_for", lambda *args: config)
    with FakeTensorMode(), recording() as noted:
        def made(*size: int) -> torch.Tensor:
            return torch.empty(*size, dtype=torch.bfloat16, device="cuda")

        layer = made(1, 8, 2048), made(1024, 2048), None, made(2048), EPS, made(1, 8, 1024), False
        if lora:
            lora_linear.lora_linear_cuda(*layer, [made(16, 2048)], [made(1024, 16)], [0], [1.0], [0], pdl=given)
        else:
            small_linear_cuda(*layer, config=config, pdl=given)
    modes = {each.name: (dict(each.options)["PDL"], dict(each.options).get("launch_pdl", False)) for each in noted}
    assert modes == expected


def test_codes_are_multiplied_not_numbers_near_them() -> None:
    """All codes of int8, each alone: the products are exact."""
    codes = torch.arange(-128, 128, dtype=torch.int8, device=DEVICE).view(256, 1).expand(256, 16).contiguous()
    scale = torch.full((256,), 0.5, device=DEVICE)
    for tokens in (1, 3):
        x = torch.zeros(tokens, 16, dtype=torch.float16, device=DEVICE)
        x[:, 5] = 2
        out = small_linear_cuda(x, codes, None, None, 0.0, None, False, scale)
        assert torch.equal(out, codes[:, 0].half().expand(tokens, 256))


@pytest.mark.parametrize("config", [Config(1, 64, 4, 1), Config(4, 256, 4, 2), Config(16, 64, 4, 2), Config(64, 128, 4, 3)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_any_tile(tokens, config) -> None:
    if tokens > 1 and config.block_n < 16:
        pytest.skip("the matrix unit's smallest tile is 16 rows")
    args = case(tokens, 40, 96, norm=True, residual=True)
    close(small_linear_cuda(*args, config=config), args)


@pytest.mark.parametrize("tokens, dtype, residual", [
    (MAX_TOKENS + 1, torch.float16, torch.float16), (2, torch.float32, torch.float32), (0, torch.float16, torch.float16),
    (3, torch.float16, torch.float32)], ids=str)
def test_outside_its_range_it_is_the_definition(tokens, dtype, residual) -> None:
    args = list(case(tokens, 8, 16, norm=True, residual=True, dtype=dtype))
    args[5] = args[5].to(residual)
    out = small_linear_cuda(*args)
    assert torch.equal(out, small_linear_eager(*args)) and out.dtype == residual


def test_a_weight_that_is_a_view_of_a_larger_one() -> None:
    args = list(case(2, 32, 64))
    args[1] = torch.cat([args[1], args[1]])[16:48]
    close(small_linear_cuda(*args), args)


def apart(t):
    """The same numbers, not side by side."""
    return t if t is None or not isinstance(t, torch.Tensor) else torch.stack([t, t + 1], -1)[..., 0]


@pytest.mark.parametrize("tokens, codes", [(1, False), (1, True), (5, False), (5, True), (40, True)])
def test_numbers_that_do_not_lie_side_by_side(tokens, codes) -> None:
    args = case(tokens, 40, 64, norm=True, bias=True, residual=True)
    args = quantized(args, torch.int8) if codes else args
    out = small_linear_cuda(*[t if i == 1 else apart(t) for i, t in enumerate(args)])
    assert torch.equal(out, small_linear_cuda(*args))
    out = small_linear_cuda(args[0].transpose(1, 2).contiguous().transpose(1, 2), *args[1:])
    assert torch.equal(out, small_linear_cuda(*args))


@pytest.mark.parametrize("shape", [(1,), ()])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_bias_that_is_broadcast(tokens, shape) -> None:
    args = list(case(tokens, 40, 64, bias=True))
    args[2] = torch.randn(shape).to(args[0])
    torch.testing.assert_close(small_linear_cuda(*args), F.linear(args[0], args[1]) + args[2], rtol=1e-2, atol=1e-2)


def test_leading_dimensions_are_kept() -> None:
    x, *rest = case(6, 32, 64)
    out = small_linear_cuda(x.view(2, 3, 64), *rest)
    assert out.shape == (2, 3, 32)
    assert torch.equal(out.view(1, 6, 32), small_linear_cuda(x, *rest))


def test_opcheck() -> None:
    torch.library.opcheck(small_linear, case(3, 16, 32, norm=True, bias=True, residual=True, swiglu=True))
    torch.library.opcheck(small_linear, case(3, 16, 32))
    torch.library.opcheck(small_linear, case(3, 16, 32, swiglu=True), {"gelu": True})
    torch.library.opcheck(small_linear, quantized(case(3, 16, 32), torch.int8))
