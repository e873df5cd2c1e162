"""A router as one kernel: transformers' routers give the experts and weights that they gave; what must not match does not."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from expecttest import assert_expected_inline
from torch import Tensor, nn

from quire.attn_ops.ops.routing import route_rows
from quire.passes.fusions import router, routing
from quire.passes.fx import value
from tests.passes.models import after_one, listing

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_experts_per_tok": 2}
#: By module: the prefix of its classes, and sizes of the configuration.
ROUTERS = {
    "deepseek_v2": ("DeepseekV2", {"n_routed_experts": 8, "topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "deepseek_v2 groups": ("DeepseekV2", {"n_routed_experts": 8, "topk_method": "group_limited_greedy", "n_group": 4,
                                          "topk_group": 2}),
    "deepseek_v3": ("DeepseekV3", {"n_routed_experts": 8, "n_group": 2, "topk_group": 1}),
    "glm4_moe": ("Glm4Moe", {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "norm_topk_prob": True}),
    "qwen3_moe unnormalized": ("Qwen3Moe", {"num_experts": 8, "norm_topk_prob": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "gpt_oss": ("GptOss", {"num_local_experts": 8}),
}


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "DEVICES", ("cpu",))


def make(case: str, dtype: torch.dtype) -> nn.Module:
    prefix, sizes = ROUTERS[case]
    module = importlib.import_module(f"transformers.models.{case.split()[0]}.modeling_{case.split()[0]}")
    made = next(c for n, c in vars(module).items() if n.lower() == f"{prefix}TopkRouter".lower())(
        getattr(transformers, f"{prefix}Config")(**SIZES, **sizes)).to(dtype)
    for p in made.parameters():
        nn.init.normal_(p)
    if hasattr(made, "e_score_correction_bias"):
        made.e_score_correction_bias = torch.randn(8) / 10  # a model in half precision keeps it in float32
    return made


def fused(f: Callable[..., Any], *args: Tensor) -> Any:
    return after_one(router.fuse_router, f, *args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ROUTERS)
def test_transformers_routers(case: str, dtype: torch.dtype) -> None:
    """The same experts with nearly the same weights. Ties of bfloat16's logits go to the lower index, which transformers leaves
    open: here there are none among the chosen."""
    module, x = make(case, dtype), torch.randn(6, 16).to(dtype)
    count, gm, inputs = fused(module, x)
    assert count == 1 and sum(n.target == route_rows for n in gm.graph.nodes) == 1
    assert all(value(n) is not None for n in gm.graph.nodes if n.op == "call_function")
    assert not [n for n in gm.graph.nodes if n.op == "call_method" and n.target in ("topk", "scatter_", "gather", "softmax")]
    with torch.no_grad():
        logits, weights, ids = gm(*inputs)
        _, expected, theirs = module(x)
    order, their_order = ids.argsort(-1), theirs.argsort(-1)  # an unsorted top-k may have any order
    assert torch.equal(ids.gather(-1, order), theirs.gather(-1, their_order)) and weights.dtype == expected.dtype
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 0}  # a quotient of sums of a few terms, in another order
    torch.testing.assert_close(weights.gather(-1, order), expected.gather(-1, their_order), **tolerance)


def test_graph() -> None:
    def route(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = x.sigmoid()
        ids = (scores + bias).topk(2, dim=-1, sorted=False)[1]
        weights = scores.gather(1, ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-6), ids

    _, gm, _ = fused(route, torch.randn(3, 8), torch.randn(8))
    assert_expected_inline(listing(gm.graph), """\
l_x_: [3, 8]
l_bias_: [8]
route_rows_default = route_rows.default(l_x_, l_bias_, 2, True, True, 1e-06, 1, 1, 1)
getitem = getitem(route_rows_default, 0)
getitem_1 = getitem(route_rows_default, 1)
return (getitem, getitem_1)""")


def changed_scores(x: Tensor) -> Tensor:
    scores = x.softmax(-1)
    scores += 0.1
    return scores.topk(2)[0]


def changed_view(x: Tensor) -> Tensor:
    scores = x.softmax(-1)
    scores[:, 0].mul_(0.5)
    return scores.topk(2)[0]


def in_groups(best: Callable[[Tensor], Tensor], **options: Any) -> Callable[[Tensor], Tensor]:
    """Groups of two experts, by ``best`` of their scores (..., 4, 2)."""
    def route(x: Tensor) -> Tensor:
        scores = x.sigmoid()
        ranks = best(scores.view(-1, 4, 2))
        mask = torch.zeros_like(ranks)
        mask.scatter_(1, ranks.topk(2)[1], 1, **options)
        wide = mask.unsqueeze(-1).expand(-1, 4, 2).reshape(-1, 8)
        ids = scores.masked_fill(~wide.bool(), float("-inf")).topk(2)[1]
        return scores.gather(1, ids)
    return route


def best_of_two(scores: Tensor, **options: Any) -> Tensor:
    return scores.topk(2, dim=-1)[0].sum(dim=-1, **options)


def test_groups_are_routed() -> None:
    assert fused(in_groups(best_of_two), torch.randn(6, 8))[0] == 1


@pytest.mark.parametrize("f", [
    lambda x: x.softmax(0).topk(2)[0], lambda x: x.topk(2)[0], lambda x: x.softmax(-1).topk(2)[1], lambda x: (x + 1).topk(2),
    lambda x: (x.softmax(-1) * 2).topk(2)[0], lambda x: x.softmax(-1).topk(2, largest=False)[0], changed_scores, changed_view,
    in_groups(lambda scores: scores.mean(-1)), in_groups(best_of_two, reduce="multiply"),
    in_groups(functools.partial(best_of_two, dtype=torch.bfloat16)), lambda x: x.half().softmax(-1).topk(2)[0],
    lambda x: x.sigmoid().topk(2)[0],
    lambda x: x[None].softmax(-1).topk(2)[0], lambda x: (x.softmax(-1) + x[0]).topk(2)[0],
], ids=["other dim", "no scores", "no weights", "a sum", "scaled", "smallest", "changed in place", "a view changed",
        "other groups", "no groups after all", "ranks in half precision", "half",
        "weights of a sigmoid's top-k", "three dims", "softmax with a bias"])
def test_left_alone(f: Callable[[Tensor], Any]) -> None:
    count, gm, inputs = fused(f, x := torch.randn(6, 8))
    assert count == 0
    torch.testing.assert_close(gm(*inputs)[0], f(x)[0] if isinstance(f(x), tuple) else f(x))


def test_weights_that_are_read_before_the_division() -> None:
    """They are still the scores, and the division is no longer part of the kernel."""
    def route(x: Tensor) -> tuple[Tensor, ...]:
        weights, ids = x.softmax(-1).topk(2)
        return weights, weights / weights.sum(-1, keepdim=True), ids

    count, gm, inputs = fused(route, x := torch.randn(6, 8))
    assert count == 1
    for ours, theirs in zip(gm(*inputs), route(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert fused(lambda x: x.softmax(-1).topk(3)[0], torch.randn(6, 8))[0] == 0
