"""Small modules as they are written for models: functions (model, x (1, T, 16), positions (1, T)) -> (1, T, 16).

``MIXES`` must be refused, ``SERVED`` must be exact: see ``test_practice.py``. ``mixers.py`` has the plain operators.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.adversarial.harness import Model

Tensor = torch.Tensor
CALLS = {"number": 0}


def global_counter(m: Model, x: Tensor, p: Tensor) -> Tensor:
    CALLS["number"] += 1
    return x * CALLS["number"]


def in_a_closure() -> Any:
    number = 0

    def count(m: Model, x: Tensor, p: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return x * number

    return count


def written_by_data(m: Model, x: Tensor, p: Tensor) -> Tensor:
    m.w.data.mul_(1.01)
    return x @ m.w


def asserted(m: Model, x: Tensor, p: Tensor) -> Tensor:
    assert x.shape[1] <= 64, "too long"
    return x + m.table[p]


def added_by_method(m: Model, x: Tensor, p: Tensor) -> Tensor:
    y = x * 1
    y.__iadd__(x.mean(1, keepdim=True))
    return y


def added_to_a_list(m: Model, x: Tensor, p: Tensor) -> Tensor:
    y = x * 1
    torch._foreach_add_([y], [x.mean(1, keepdim=True).expand_as(x).contiguous()])
    return y


def sorted_and_copied_back(m: Model, x: Tensor, p: Tensor) -> Tensor:
    order = x[0, :, 0].argsort()
    y = (x[0][order] @ m.w).tanh()
    return torch.empty_like(y).index_copy_(0, order, y)[None]


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@torch.compiler.allow_in_graph
def counted_in_graph(x: Tensor) -> Tensor:
    CALLS["in graph"] = CALLS.get("in graph", 0) + 1
    return x * CALLS["in graph"]


@torch._dynamo.nonstrict_trace
def counted_when_traced(x: Tensor) -> Tensor:
    CALLS["traced"] = CALLS.get("traced", 0) + 1
    return x * CALLS["traced"]


def counted_in_numpy() -> Any:
    calls = np.zeros(1)

    def count(m: Model, x: Tensor, p: Tensor) -> Tensor:
        calls[0] += 1
        return x * float(calls[0])

    return count


def held_in_a_list() -> Any:
    """Under torch.compile in a step its sizes are symbols."""
    held = [torch.outer(torch.arange(64.0), torch.arange(16.0)).cos()]
    return lambda m, x, p: x + held[0][p]


# fmt: off
MIXES = {
    "counted by a function of the graph": lambda m, x, p: counted_in_graph(x),
    "counted by a function that is traced apart": lambda m, x, p: counted_when_traced(x),
    "counted in NumPy": counted_in_numpy(),
    "checkpoint that mixes": lambda m, x, p: checkpoint(lambda y: y - y.mean(1, keepdim=True), x, use_reentrant=False),
    "global counter": global_counter,
    "counter in a closure": in_a_closure(),
    "weight written through its data": written_by_data,
    "added by a method": added_by_method,
    "added to a list": added_to_a_list,
    "layer by the length": lambda m, x, p: x @ m.experts[x.shape[1] % 4],
    "branch on twice the length": lambda m, x, p: x * 2 if 2 * x.shape[1] + 1 == 15 else x,
    "number of elements": lambda m, x, p: x / x.numel() * 16,
    "stride": lambda m, x, p: x * (1 + x.stride(0) * 1e-3),
    "shape as a tensor": lambda m, x, p: x / torch.tensor(x.shape)[1],
    "response norm over T": lambda m, x, p: F.local_response_norm(x, 3),
    "mean of experts' tokens": lambda m, x, p: x + torch.zeros(4, 16).index_reduce(
        0, (e := (x[0] @ m.w[:, :4]).argmax(-1)), x[0], "mean", include_self=False)[e][None],
    "cross entropy": lambda m, x, p: x + F.cross_entropy(x.mT, p % 16),
    "pool over tokens": lambda m, x, p: F.avg_pool2d(x[None], (3, 1), 1, (1, 0))[0],
}
SERVED = {
    "vmap over heads": lambda m, x, p: torch.vmap(lambda h: h.softmax(-1), 2, 2)(x.unflatten(-1, (4, 4))).flatten(2),
    "vmap over tokens and their heads": lambda m, x, p: torch.vmap(torch.vmap(lambda h: h - h.mean()))(
        x[0].unflatten(-1, (4, 4)))[None].flatten(2),
    "checkpoint in a checkpoint": lambda m, x, p: checkpoint(
        lambda y: checkpoint(torch.tanh, y @ m.w, use_reentrant=False) + y, x, use_reentrant=False),
    "bilinear": lambda m, x, p: F.bilinear(x, x.tanh(), m.experts, m.bias[:4]).repeat(1, 1, 4),
    "length asserted": asserted,
    "table held in a list": held_in_a_list(),
    "sorted and copied back": sorted_and_copied_back,
    "autograd function": lambda m, x, p: Silu.apply(x),
    "vector quantized": lambda m, x, p: m.w[torch.cdist(x, m.w[None]).argmin(-1)] + x,
    "attention over heads": lambda m, x, p: F.scaled_dot_product_attention(*[x.unflatten(-1, (4, 4))] * 3).flatten(2),
    "causal over heads": lambda m, x, p: F.scaled_dot_product_attention(
        *[x.unflatten(-1, (4, 4))] * 3, is_causal=True).flatten(2),
    "attention to a memory": lambda m, x, p: F.scaled_dot_product_attention(
        x.view(1, -1, 4, 4).transpose(1, 2), *[m.experts[:, :, :4][None]] * 2).transpose(1, 2).flatten(2),
    "response norm over features": lambda m, x, p: F.local_response_norm(x.mT, 3).mT,
    "pool over features, 2-d": lambda m, x, p: F.max_pool2d(x[None], (1, 3), 1, (0, 1))[0],
    "diagonal of features": lambda m, x, p: (x.diag_embed() @ m.w).sum(-1),
    "padded features": lambda m, x, p: F.pad(x, (1, 1), mode="replicate")[..., 1:-1] * 2,
    "channel shuffle": lambda m, x, p: F.channel_shuffle(x.mT[..., None], 4)[..., 0].mT,
    "hash of positions": lambda m, x, p: x + m.table[(p * 31 + 7) % 64] + m.table[p ^ 5] + m.table[p >> 1],
    "functional call": lambda m, x, p: torch.func.functional_call(
        m.point, {"weight": m.point.weight * 2, "bias": m.point.bias}, (x.mT,)).mT,
}
# fmt: on
