"""The router's top-k: the kernel against the definition, exactly, and the definition against torch.topk."""

from __future__ import annotations

import pytest
import torch

from quire.attn_ops.ops.routing import topk_rows, topk_rows_cuda, topk_rows_eager

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")


def test_definition() -> None:
    x = torch.randn(7, 50)
    for ours, theirs in zip(topk_rows_eager(x, 5), x.topk(5), strict=True):
        assert torch.equal(ours, theirs)
    assert topk_rows_eager(torch.tensor([1.0, 3.0, 1.0, 3.0]), 3)[1].tolist() == [1, 3, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape, k", [((1, 128), 8), ((5, 3), 3), ((2, 3, 40), 6), ((4, 33), 1), ((3, 512), 16), ((2, 513), 4)])
def test_kernel(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(DEVICE, dtype)
    x[..., :2] = x[..., 2:3]  # equal numbers
    for ours, defined in zip(topk_rows_cuda(x, k), topk_rows_eager(x, k), strict=True):
        assert ours.dtype == defined.dtype and torch.equal(ours, defined)


def test_special_numbers() -> None:
    """Experts that a router masks with -inf come last; 0.0 and -0.0 and infinities keep their order."""
    x = torch.tensor([[-INF, 1.0, INF, -1.0], [-INF, -INF, -INF, 2.0], [-2.0, -1.0, -INF, -3.0]], device=DEVICE)
    values, indices = topk_rows_cuda(x, 3)
    assert indices.tolist() == [[2, 1, 3], [3, 0, 1], [1, 0, 3]] and values[0].tolist() == [INF, 1.0, -1.0]
    assert topk_rows_cuda(torch.tensor([[1.0, NAN, INF]], device=DEVICE), 2)[1].tolist() == [[1, 2]]


def test_views_and_no_rows() -> None:
    x = torch.randn(6, 20, device=DEVICE)
    for view in (x.t()[:, ::2], x[:, 3:9], x[::2]):
        assert all(map(torch.equal, topk_rows_cuda(view, 2), topk_rows_eager(view, 2)))
    assert [t.shape for t in topk_rows_cuda(x[:0], 2)] == [(0, 2), (0, 2)]


def test_opcheck() -> None:
    torch.library.opcheck(topk_rows, (torch.randn(3, 9), 2))
