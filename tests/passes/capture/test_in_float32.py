"""A model of halves computes in float32, without a copy: so the trial before serving sees leaks below their rounding."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.library import custom_op

from quire.attn_ops.ops.sampling import sample_tokens_op
from quire.passes.capture import in_float32
from quire.passes.capture.in_float32 import HALVES, InFloat32, exact_products


class Mixed(nn.Module):
    """Casts, an autocast region, a table, views of weights, a convolution and arithmetic on weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.point = nn.Embedding(30, 64), nn.Linear(64, 128), nn.Conv1d(64, 64, 1)
        self.norm, self.w = nn.LayerNorm(64), nn.Parameter(torch.randn(64, 64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        wide = x.float()
        x = (wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(x.dtype)
        with torch.autocast("cpu", torch.bfloat16):
            x = x + self.first(x).chunk(2, -1)[0]
        x = self.norm(x.to(self.w.dtype)) + self.point(x.to(self.w.dtype).mT).mT
        return F.softmax(x @ (self.w[:, :32] * 2).T.contiguous().mT, dim=-1, dtype=torch.float32).to(self.w.dtype)


@pytest.mark.parametrize("half", HALVES)
def test_as_with_weights_in_float32(half: torch.dtype) -> None:
    model, ids = Mixed().to(half), torch.arange(7)[None]
    wide = Mixed()
    wide.load_state_dict(model.state_dict())
    with torch.no_grad():
        with InFloat32(half) as mode:
            got = model(ids)
        with InFloat32(half):  # of casts and autocast only
            want = wide(ids)
        in_halves = model(ids)
    assert got.dtype == torch.float32 and torch.equal(got, want) and not mode.kept
    assert (in_halves.float() - want).abs().max() > 1e-3 * want.abs().max()
    assert all(p.dtype == half for p in model.parameters())


def test_one_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The float32 copy of a weight is freed with its operation, so a large model needs the memory of one more weight."""
    copies: list[weakref.ref] = []
    widened = in_float32._widened

    def counting(x: object) -> object:
        out = widened(x)
        if out is not x and isinstance(out, torch.Tensor):
            assert not any(copy() is not None for copy in copies)
            copies.append(weakref.ref(out))
        return out

    monkeypatch.setattr(in_float32, "_widened", counting)
    layers = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(4))).bfloat16()
    with torch.no_grad(), InFloat32(torch.bfloat16):
        layers(torch.randn(3, 96))
    assert len(copies) == 4


@custom_op("quire_tests::halves_only", mutates_args=())
def halves_only(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.bfloat16 or w.dtype != torch.bfloat16:
        raise RuntimeError("only bfloat16")
    return x * w


@custom_op("quire_tests::never", mutates_args=())
def never(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("never at all")


def test_kernels_of_halves_only() -> None:
    x, w = torch.rand(3), torch.rand(3).bfloat16()
    with InFloat32(torch.bfloat16) as mode:
        got = halves_only(x, w)
        with pytest.raises(RuntimeError, match="never at all"):
            never(x)
    assert got.dtype == torch.float32 and torch.equal(got, (x.bfloat16() * w).float())
    assert mode.kept == {"quire_tests.halves_only.default"}


def test_state_is_written() -> None:
    buffer, x = torch.zeros(3).bfloat16(), torch.rand(3)
    with InFloat32(torch.bfloat16):
        buffer.copy_(x)
        buffer.add_(x)
    assert buffer.dtype == torch.bfloat16 and (buffer.float() - 2 * x).abs().max() < 2e-2


def test_order_of_summation() -> None:
    """Products in two sums differ by rounding of float32, and by no more."""
    torch.manual_seed(0)
    x, w, b = torch.randn(5, 300), torch.randn(7, 300).bfloat16(), torch.randn(7).bfloat16()
    for run in (lambda: F.linear(x, w, b), lambda: F.linear(x, w), lambda: torch.addmm(b, x, w.T, alpha=0.5, beta=3),
                lambda: torch.baddbmm(x[None, :, :7], x[None], w.T[None], alpha=2)):
        with InFloat32(torch.bfloat16):
            want = run()
        with InFloat32(torch.bfloat16, reordered=True):
            got = run()
        assert 0 < (got - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("whole", ["highest", "high"])
def test_settings_come_back(whole: str) -> None:
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = torch.get_float32_matmul_precision(), [p.fp32_precision for p in products]
    try:
        torch.set_float32_matmul_precision(whole)
        set_to = [p.fp32_precision for p in products]
        with exact_products():
            assert [p.fp32_precision for p in products] == ["ieee", "ieee"]
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == whole and [p.fp32_precision for p in products] == set_to
    finally:
        torch.set_float32_matmul_precision(before[0])
        for p, precision in zip(products, before[1], strict=True):
            p.fp32_precision = precision


def test_nothing_is_sampled() -> None:
    """A start would wait for a kernel that no step launches."""
    logits, row = torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    assert sample_tokens_op(logits, row.float(), row, row).item() == 1
    with InFloat32(torch.bfloat16):
        assert sample_tokens_op(logits, row.float(), row, row).item() == 0
