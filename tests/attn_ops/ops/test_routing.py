"""The router's kernels against their definitions, choices exactly, and the definitions against torch.topk and by hand."""

from __future__ import annotations

import pytest
import torch

from quire.attn_ops.ops import routing

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")


def test_definition() -> None:
    x = torch.randn(7, 50)
    for ours, theirs in zip(routing.topk_rows_eager(x, 5), x.topk(5), strict=True):
        assert torch.equal(ours, theirs)
    assert routing.topk_rows_eager(torch.tensor([1.0, 3.0, 1.0, 3.0]), 3)[1].tolist() == [1, 3, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape, k", [((1, 128), 8), ((5, 3), 3), ((2, 3, 40), 6), ((4, 33), 1), ((3, 512), 16), ((2, 513), 4)])
def test_kernel(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(DEVICE, dtype)
    x[..., :2] = x[..., 2:3]  # equal numbers
    for ours, defined in zip(routing.topk_rows_cuda(x, k), routing.topk_rows_eager(x, k), strict=True):
        assert ours.dtype == defined.dtype and torch.equal(ours, defined)


def test_special_numbers() -> None:
    """Experts that a router masks with -inf come last; 0.0 and -0.0 and infinities keep their order."""
    x = torch.tensor([[-INF, 1.0, INF, -1.0], [-INF, -INF, -INF, 2.0], [-2.0, -1.0, -INF, -3.0]], device=DEVICE)
    values, indices = routing.topk_rows_cuda(x, 3)
    assert indices.tolist() == [[2, 1, 3], [3, 0, 1], [1, 0, 3]] and values[0].tolist() == [INF, 1.0, -1.0]
    assert routing.topk_rows_cuda(torch.tensor([[1.0, NAN, INF]], device=DEVICE), 2)[1].tolist() == [[1, 2]]
    zeros = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0]], device=DEVICE)  # equals
    assert all(map(torch.equal, routing.topk_rows_cuda(zeros, 3), routing.topk_rows_eager(zeros, 3)))
    assert routing.route_rows_cuda(zeros, None, 3, False, True, 0.0, 1, 1, 1)[1].tolist() == [[1, 2, 3]]


def test_views_and_no_rows() -> None:
    x = torch.randn(6, 20, device=DEVICE)
    for view in (x.t()[:, ::2], x[:, 3:9], x[::2]):
        assert all(map(torch.equal, routing.topk_rows_cuda(view, 2), routing.topk_rows_eager(view, 2)))
    assert [t.shape for t in routing.topk_rows_cuda(x[:0], 2)] == [(0, 2), (0, 2)]
    none = torch.zeros(0, 8, device=DEVICE)
    assert [t.shape for t in routing.route_rows_cuda(none, None, 2, False, True, 0.0, 1, 1, 1)] == [(0, 2), (0, 2)]
    long = torch.randn(2, 600, device=DEVICE)
    assert routing.route_rows_cuda(long, None, 2, False, True, 0.0, 1, 1, 1)[1].tolist() == long.topk(2)[1].tolist()


#: experts, k, sigmoid, normalize, groups, top_groups, group_best, bias: deepseek_v2-lite, deepseek_v2, qwen3_moe, deepseek_v3,
#: glm4_moe, gpt_oss, and sizes that are no powers of two.
ROUTERS = [(64, 6, False, False, 1, 1, 1, False), (160, 6, False, False, 8, 3, 1, False), (128, 8, False, True, 1, 1, 1, False),
           (256, 8, True, True, 8, 4, 2, True), (160, 8, True, True, 1, 1, 1, True), (32, 4, False, True, 1, 1, 1, False),
           (5, 1, True, False, 1, 1, 1, False), (12, 3, True, True, 3, 2, 2, True), (512, 16, False, True, 16, 1, 3, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("experts, k, sigmoid, normalize, groups, top, best, biased", ROUTERS)
def test_router(experts, k, sigmoid, normalize, groups, top, best, biased, dtype) -> None:
    """The same experts, ties included. Weights: an exponential within 2 units in the last place, a sum and a division each."""
    x = (2 * torch.randn(3, experts + 2, device=DEVICE)).to(dtype)[:, :experts]
    x[:, 1] = x[:, -1] = x[:, 0]
    bias = torch.randn(experts, device=DEVICE) / 8 if biased else None
    options = (bias, k, sigmoid, normalize, 1e-20, groups, top, best)
    weights, ids = routing.route_rows_cuda(x, *options)
    expected, theirs = routing.route_rows_eager(x, *options)
    assert torch.equal(ids, theirs) and weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected, rtol=16 * torch.finfo(torch.float32).eps, atol=0)


def test_the_routers_definition() -> None:
    """By hand, and with one group as without: groups by their best experts only, whichever is best outside of them."""
    x = torch.tensor([[5.0, -9.0, 4.0, 3.9, 0.0, 1.0]])
    weights, ids = routing.route_rows_eager(x, None, 2, False, True, 0.0, 3, 1, 2)
    assert ids.tolist() == [[2, 3]]  # 4 + 3.9, not 5 - 9
    torch.testing.assert_close(weights, torch.tensor([[4.0, 3.9]]).softmax(-1))
    assert routing.route_rows_eager(x, None, 2, False, True, 0.0, 3, 1, 1)[1].tolist() == [[0, 1]]
    weights, ids = routing.route_rows_eager(x, torch.tensor([-1.0, 0, 0, 0, 0.6, 0]), 2, True, False, 0.0, 1, 1, 1)
    assert ids.tolist() == [[4, 2]] and torch.equal(weights, x.sigmoid()[:, [4, 2]])


def test_router_of_special_numbers() -> None:
    """Ids are in range whatever the logits are, and experts of other groups are not chosen."""
    x = torch.tensor([[NAN, 1.0, 2.0, 3.0], [-INF, -INF, -INF, 0.5], [INF, 0.0, 1.0, -INF], [-INF] * 4], device=DEVICE)
    for sigmoid in (False, True):
        for groups in (1, 2):
            options = (None, 2, sigmoid, True, 0.0, groups, 1, 1)
            weights, ids = routing.route_rows_cuda(x, *options)
            expected, theirs = routing.route_rows_eager(x, *options)
            assert torch.equal(ids, theirs)
            torch.testing.assert_close(weights, expected, equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("change, message", [
    (dict(k=9), "k=9 of 1 of 1 groups of 8 experts"), (dict(groups=3), "groups of 8 experts"),
    (dict(k=5, groups=2), "k=5 of 1 of 2 groups"), (dict(bias=torch.zeros(8)), "a bias .8,. with sigmoid only"),
    (dict(bias=torch.zeros(7), sigmoid=True), "a bias .8,. with sigmoid only")])
def test_router_refuses(change, message) -> None:
    options = dict(bias=None, k=2, sigmoid=False, normalize=True, eps=0.0, groups=1, top_groups=1, group_best=1) | change
    for route in (routing.route_rows_eager, routing.route_rows_cuda):
        with pytest.raises(ValueError, match=message):
            route(torch.zeros(2, 8), *options.values())


def test_opcheck() -> None:
    torch.library.opcheck(routing.topk_rows, (torch.randn(3, 9), 2))
    torch.library.opcheck(routing.route_rows, (torch.randn(3, 8), torch.randn(8), 2, True, True, 1e-20, 2, 1, 2))
