"""The token proof, operation by operation: what mixes tokens is refused for what it does, and its harmless twin is not.

``tests/adversarial`` runs whole models on all routes; here one operation is traced and proved, so that each rule has its case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.ops.lora_rows import lora_rows
from quire.attn_ops.step import Step, running
from quire.passes.fx import copy_graph, placeholders, value
from quire.passes.verify.tokens import check_tokens

Tensor = torch.Tensor
WIDTH = 8
WEIGHT, TABLE, KERNEL = torch.randn(WIDTH, WIDTH), torch.randn(64, WIDTH), torch.randn(WIDTH, WIDTH, 3)
POINTWISE = torch.randn(WIDTH, WIDTH, 1)


def check(compute: Callable[[Tensor, Tensor], Any]) -> None:
    """Prove a function of x (1, T, WIDTH) and positions (1, T)."""
    torch._dynamo.reset()
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append(copy_graph(gm))
        return gm.forward

    x, positions = torch.randn(1, 9, WIDTH), torch.arange(9)[None]
    for tensor in (x, positions):
        torch._dynamo.mark_dynamic(tensor, 1)
    with running(Step(None, None, adapters=torch.ones(9, dtype=torch.int64))):  # type: ignore[arg-type]  # lora_rows reads only this
        torch.compile(compute, backend=keep, fullgraph=True)(x, positions)
    ((gm),) = found
    row = next(value(n) for n in placeholders(gm.graph) if isinstance(value(n), Tensor) and value(n).dim() > 1
               and not isinstance(value(n).shape[1], int))
    check_tokens(gm.graph, row.shape[1])


def routed(x: Tensor) -> Tensor:
    """Row numbers sorted by an expert's id."""
    return (x[0] @ WEIGHT[:, :4]).argmax(-1).argsort()


def sorted_and_back(x: Tensor, p: Tensor) -> Tensor:
    order = routed(x)
    return x[0][order].tanh()[order.argsort()]


def stored_in_another_order(x: Tensor, p: Tensor) -> Tensor:
    y = x[0] * 1
    y.copy_(x[0][routed(x)])
    return y[None]


def stored_for_all(x: Tensor, p: Tensor) -> Tensor:
    y = torch.zeros(1, WIDTH)
    y[:, p[0] % WIDTH] = x[0, :, :1].T
    return x + y


def stored_per_row(x: Tensor, p: Tensor) -> Tensor:
    y = x * 1
    y.add_(x.tanh())
    y[..., 0] = p.float()
    return y


def adapted(x: Tensor) -> Tensor:
    return lora_rows(x @ WEIGHT, x, [WEIGHT[:2]], [WEIGHT[:, :2]], [0.5], [1])


REFUSED = {
    "adapters of rows in another order": (lambda x, p: adapted(x[0][routed(x)][None]), "an adapter's rows are not the tokens"),
    "adapters that follow from the tokens": (
        lambda x, p: lora_rows(x @ WEIGHT, x, [x[0]], [x[0].T], [0.5], [1]), "its rows are not tokens"),
    "reduction": (lambda x, p: x - x.mean(1, keepdim=True), "it is taken over the tokens"),
    "reduction of all": (lambda x, p: x / x.amax(), "it is taken over the tokens"),
    "reduction of positions": (lambda x, p: x * (p.max() + 1).log(), "it is taken over the tokens"),
    "softmax": (lambda x, p: x.softmax(1), "it goes along the tokens"),
    "product that sums over tokens": (lambda x, p: x @ (x.mT @ x), "it sums over the tokens"),
    "matrix product that sums over tokens": (lambda x, p: x[0] @ (x[0].T @ x[0]), "it sums over the tokens"),
    "product of tokens with tokens": (lambda x, p: (x @ x.mT).relu() @ x, "it multiplies each token with each other one"),
    "vector product over tokens": (lambda x, p: x + torch.mv(x[0].T, x[0, :, 0]), "it sums over the tokens"),
    "slice": (lambda x, p: x[:, 1:], "the row is cut: some tokens are taken for all"),
    "slice with a step": (lambda x, p: x + x[:, ::2].sum(), "the row is cut: some tokens are taken for all"),
    "one token": (lambda x, p: x + x[:, 0], "one token is taken for all"),
    "convolution": (lambda x, p: F.conv1d(x.mT, KERNEL, padding=1).mT, "it is a convolution over tokens"),
    "strided convolution": (lambda x, p: F.conv1d(x.mT, POINTWISE, stride=2).mean() + x, "it is a convolution over tokens"),
    "padded convolution": (lambda x, p: F.conv1d(x.mT, POINTWISE, padding=1).mT[:, 2:], "it is a convolution over tokens"),
    "batch norm in training": (lambda x, p: F.batch_norm(x[0], None, None, training=True), "it normalizes over the tokens"),
    "batch norm in training, tokens last": (lambda x, p: F.batch_norm(x.mT, None, None, training=True).mT,
                                            "it normalizes over the tokens"),
    "layer norm": (lambda x, p: F.layer_norm(x, x.shape[1:]), "it normalizes over the tokens"),
    "place: a table": (lambda x, p: x + TABLE[torch.arange(x.shape[1])], "looked up by the place of the token in the batch"),
    "place: arithmetic": (lambda x, p: x * torch.arange(x.shape[1])[:, None], "computes with the places of the tokens"),
    "place: returned": (lambda x, p: (x * 2, torch.arange(x.shape[1])), "numbered by their place in the batch"),
    "place: length": (lambda x, p: x / x.shape[1], "arithmetic with the length of the row"),
    "order: returned": (lambda x, p: x[0][routed(x)], "left in another order"),
    "stored in another order": (stored_in_another_order, "to the rows of others"),
    "stored in what all share": (stored_for_all, "tokens (are written into what all share|write to)|each token looks up"),
    "folded": (lambda x, p: x.reshape(1, WIDTH, -1).mT, "numbers of several tokens come into one row"),
    "joined": (lambda x, p: torch.cat([x, x], 1), "it joins rows of tokens"),
}
SERVED = {
    "adapters of each token": lambda x, p: adapted(x),
    "reduction": lambda x, p: x - x.mean(-1, keepdim=True),
    "product": lambda x, p: (x @ WEIGHT, x[0] @ WEIGHT, (WEIGHT @ x.mT).mT, torch.mv(x[0], WEIGHT[0])),
    "slice": lambda x, p: (x[..., 1:], x[:, : x.shape[1]], x[:, 0:]),
    "convolution": lambda x, p: F.conv1d(x.mT, POINTWISE).mT,
    "batch norm": lambda x, p: F.batch_norm(x[0], TABLE[0], TABLE[1].exp()),
    "place": lambda x, p: (x + TABLE[p], x * p[..., None], x[:, torch.arange(x.shape[1])]),
    "order": sorted_and_back,
    "stored": stored_per_row,
    "unused": lambda x, p: x if x.mean(1) is not None else p,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_for_what_it_does(name: str) -> None:
    compute, why = REFUSED[name]
    with pytest.raises(UnsupportedAttention, match=why):
        check(compute)


@pytest.mark.parametrize("name", SERVED)
def test_harmless(name: str) -> None:
    check(SERVED[name])
