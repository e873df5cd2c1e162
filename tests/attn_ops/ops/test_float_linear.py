"""Linear layers in float32 of half-precision numbers: the kernels against the definition."""

from __future__ import annotations

import pytest
import torch

from quire.attn_ops.ops.small_linear import float_linear, float_linear_cuda, float_linear_eager

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("tokens", [1, 2, 17, 32])
@pytest.mark.parametrize("experts, k", [(64, 512), (9, 300)])
def test_kernels(tokens: int, experts: int, k: int) -> None:
    """Sums of k exact products in another order: each addition rounds by at most 2**-24 of the largest partial sum."""
    x, weight = (torch.randn(n, k + 8, device=DEVICE).half()[:, :k] for n in (tokens, experts))
    ours, defined = float_linear_cuda(x, weight), float_linear_eager(x, weight)
    bound = k * 2.0**-24 * (x.float().abs() @ weight.float().abs().T)
    assert ours.dtype == torch.float32 and ((ours - defined).abs() <= bound).all()
    assert (ours - float_linear_eager(x, weight).half().float()).abs().max() > 1e-5, "rounded to half precision"


def test_other_sizes() -> None:
    weight = torch.randn(8, 32, device=DEVICE).half()
    for shape in ((40, 32), (0, 32), (2, 3, 32)):
        x = torch.randn(*shape, device=DEVICE).half()
        torch.testing.assert_close(float_linear_cuda(x, weight), float_linear_eager(x, weight))
    torch.library.opcheck(float_linear, (torch.randn(3, 16).half(), torch.randn(5, 16).half()))
