"""The kernels for quantized weights and larger batches, against float32 sums written apart; in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from quire.attn_ops.ops.small_linear import small_linear_cuda, small_linear_eager
from quire.attn_ops.ops.small_linear_wide import launch_unpack, unpacked
from quire.attn_ops.tuning.launch_config import Config
from tests.attn_ops.int4 import packed, random_int4, weights

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def close(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """One rounding to float16 of the result, and float32 sums in another order: 2**-11 and a bit of the largest."""
    assert out.shape == wanted.shape and out.dtype == torch.float16
    assert (out.float() - wanted).abs().max() <= 1e-3 * wanted.abs().max()


def inputs(tokens: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, a bias and a residual."""
    torch.manual_seed(tokens + n + k)
    made = dict(dtype=torch.float16, device=DEVICE)
    return torch.randn(1, tokens, k, **made), torch.randn(n, **made), torch.randn(1, tokens, n, **made)


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("turned", [0, 1, 2])
@pytest.mark.parametrize("tokens, n, k, splits, block", [(33, 40, 192, 1, 64), (130, 24, 256, 2, 128), (5, 16, 320, 3, 64)])
def test_codes(tokens, n, k, splits, block, turned, codes) -> None:
    """In each order of columns; rows and tokens that end within a tile, and shares of unequal size."""
    x, bias, residual = inputs(tokens, n, k)
    weight = (torch.randn(n, k, device=DEVICE) * 40).clamp(-128, 127).to(codes)
    scale = torch.rand(n, device=DEVICE) * 0.01
    config = Config(16, block, 4, 2, splits, 32, turned)
    out = small_linear_cuda(x, weight, bias, None, 0.0, residual, False, scale, config=config)
    close(out, x.float() @ (weight.float() * scale[:, None]).t() + bias.float() + residual.float())


def test_columns_that_no_tile_divides_run_elsewhere() -> None:
    """The kernel has no masks for columns."""
    x, bias, residual = inputs(40, 16, 80)
    weight, scale = torch.randint(-128, 128, (16, 80), dtype=torch.int8, device=DEVICE), torch.rand(16, device=DEVICE) * 0.01
    out = small_linear_cuda(x, weight, bias, None, 0.0, residual, False, scale, config=Config(16, 64, 4, 2, 1, 32, 1))
    close(out, x.float() @ (weight.float() * scale[:, None]).t() + bias.float() + residual.float())


@pytest.mark.parametrize("tokens, n, k, group, splits", [(1, 16, 128, 128, 1), (40, 40, 512, 256, 3), (130, 24, 384, 128, 2)])
def test_int4(tokens, n, k, group, splits) -> None:
    x, bias, residual = inputs(tokens, n, k)
    codes, scales = random_int4(n, k, group)
    wanted = x.float() @ weights(codes, scales).half().float().t().to(DEVICE) + bias.float() + residual.float()
    given = packed(codes).to(DEVICE), bias, None, 0.0, residual, False, scales.to(DEVICE)
    close(small_linear_cuda(x, *given, config=Config(16, 128, 4, 2, splits, 32)), wanted)
    close(small_linear_eager(x, *given), wanted)


def test_int4_of_more_columns_than_x() -> None:
    """torchao pads columns to a multiple of 1024: the padding is not read."""
    x, _, _ = inputs(3, 16, 256)
    codes, scales = random_int4(16, 512, 128)
    scales[2:] = torch.nan
    wanted = x.float() @ weights(codes, scales)[:, :256].half().float().t().to(DEVICE)
    close(small_linear_cuda(x, packed(codes).to(DEVICE), None, None, 0.0, None, False, scales.to(DEVICE),
                            config=Config(16, 128, 4, 2, 1, 16)), wanted)
    close(small_linear_eager(x, packed(codes).to(DEVICE), None, None, 0.0, None, False, scales.to(DEVICE)), wanted)


def test_fused_int4_layers() -> None:
    """Rows end to end; the scales of each layer, which lie by group, one layer after the other."""
    each, widths = [random_int4(n, 256, 128) for n in (16, 8, 24)], (16, 8, 24)
    weight = torch.cat([packed(codes) for codes, _ in each]).to(DEVICE)
    scales = torch.cat([s.flatten(0, 1) for _, s in each]).to(DEVICE)
    whole = torch.cat([weights(*one) for one in each]).half().to(DEVICE)
    x, _, _ = inputs(5, 48, 256)
    out = small_linear_cuda(x, weight, None, None, 0.0, None, False, scales, widths, config=Config(16, 128, 4, 2, 2, 16))
    close(out, x.float() @ whole.float().t())
    assert torch.equal(launch_unpack(weight, scales, 256, torch.float16, widths), whole)
    assert torch.equal(unpacked(weight, scales, torch.float16, widths), whole)
    many, _, _ = inputs(300, 48, 256)  # unpacked, then cuBLAS
    close(small_linear_cuda(many, weight, None, None, 0.0, None, False, scales, widths), many.float() @ whole.float().t())


@pytest.mark.parametrize("place", [0, 1, 8, 127])
def test_every_int4_code_is_exact(place: int) -> None:
    """Each alone, with a scale of 1 and no zero: rows are -8 to 7."""
    codes = torch.zeros(16, 128, dtype=torch.int32) + 8
    codes[:, place] = torch.arange(16)
    scales = torch.tensor([1.0, 0.0]).to(torch.bfloat16).expand(1, 16, 2).contiguous()
    x = torch.zeros(2, 128, dtype=torch.float16, device=DEVICE)
    x[1, place] = 2
    out = small_linear_cuda(x, packed(codes).to(DEVICE), None, None, 0.0, None, False, scales.to(DEVICE),
                            config=Config(16, 128, 4, 2, 1, 16))
    assert torch.equal(out[1].cpu(), 2 * torch.arange(-8, 8, dtype=torch.float16)) and not out[0].any()
