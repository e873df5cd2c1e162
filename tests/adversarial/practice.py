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


def toggled(m: Model, x: Tensor, p: Tensor) -> Tensor:
    m.even = not getattr(m, "even", False)
    return x * 2 if m.even else x


def written_by_data(m: Model, x: Tensor, p: Tensor) -> Tensor:
    m.w.data.mul_(1.01)
    return x @ m.w


def asserted(m: Model, x: Tensor, p: Tensor) -> Tensor:
    assert x.shape[1] <= 64, "too long"
    return x + m.table[p]


def moving_average(m: Model, x: Tensor, p: Tensor) -> Tensor:
    m.counter.mul_(0.9).add_(x.mean() * 0.1)
    return x - m.counter


def added_by_method(m: Model, x: Tensor, p: Tensor) -> Tensor:
    y = x * 1
    y.__iadd__(x.mean(1, keepdim=True))
    return y


def added_to_a_list(m: Model, x: Tensor, p: Tensor) -> Tensor:
    y = x * 1
    torch._foreach_add_([y], [x.mean(1, keepdim=True).expand_as(x).contiguous()])
    return y


def expert_choice(m: Model, x: Tensor, p: Tensor) -> Tensor:
    gates, tokens = (x @ m.w[:, :4]).softmax(-1).topk(2, dim=1)
    y = torch.zeros_like(x)
    for e in range(4):
        y = y.index_add(1, tokens[0, :, e], (x[0][tokens[0, :, e]] @ m.experts[e] * gates[0, :, e, None])[None])
    return x + y


def shift_written(m: Model, x: Tensor, p: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] += 0.5 * x[:, :-1]
    return y


def placed_by_position(m: Model, x: Tensor, p: Tensor) -> Tensor:
    """Alone, each row goes to its own place."""
    y = torch.zeros_like(x)
    y[0, p[0]] = x[0]
    return y


def before_by_position(m: Model, x: Tensor, p: Tensor) -> Tensor:
    kept = torch.zeros(64, 16)
    kept[p[0]] = x[0]
    return x + kept[(p - 1).clamp(min=0)]


def rotated_by_the_last(m: Model, x: Tensor, p: Tensor) -> Tensor:
    angles = p[..., None] * (100.0 + p[:, -1:, None].float()) ** (-torch.arange(8) / 8)
    return torch.cat([x[..., :8] * angles.cos(), x[..., 8:] * angles.sin()], -1)


def local_attention(m: Model, x: Tensor, p: Tensor) -> Tensor:
    y = F.pad(x, (0, 0, 0, -x.shape[1] % 4)).view(1, -1, 4, 16)
    return ((y @ y.mT).softmax(-1) @ y).flatten(1, 2)[:, : x.shape[1]]


def long_convolution(m: Model, x: Tensor, p: Tensor) -> Tensor:
    n = x.shape[1]
    kernel = torch.fft.rfft(0.9 ** torch.arange(n), 2 * n)[:, None]
    return torch.fft.irfft(torch.fft.rfft(x, 2 * n, dim=1) * kernel, 2 * n, dim=1)[:, :n] * 0.1


def dense_experts(m: Model, x: Tensor, p: Tensor) -> Tensor:
    chosen = (x @ m.w[:, :4]).argmax(-1)
    y = torch.zeros_like(x)
    for e in range(4):
        y += (x @ m.experts[e]) * (chosen == e).unsqueeze(-1)
    return y


def top_p(m: Model, x: Tensor, p: Tensor) -> Tensor:
    share, at = x.softmax(-1).sort(-1, descending=True)
    return x * torch.zeros_like(x).scatter(-1, at, (share.cumsum(-1) - share < 0.7).float())


def sparsemax(m: Model, x: Tensor, p: Tensor) -> Tensor:
    s, k = x.sort(-1, descending=True)[0], torch.arange(1, 17)
    support = (1 + k * s > s.cumsum(-1)).sum(-1, keepdim=True)
    return (x - (s.cumsum(-1).gather(-1, support - 1) - 1) / support).clamp(min=0)


def sorted_and_copied_back(m: Model, x: Tensor, p: Tensor) -> Tensor:
    order = x[0, :, 0].argsort()
    y = (x[0][order] @ m.w).tanh()
    return torch.empty_like(y).index_copy_(0, order, y)[None]


def rows_written(m: Model, x: Tensor, p: Tensor) -> Tensor:
    y = torch.empty(1, x.shape[1], 32)
    y[..., :16], y[..., 16:] = x, x.tanh()
    return y @ torch.cat([m.w, m.w])


def per_token_weights(m: Model, x: Tensor, p: Tensor) -> Tensor:
    w = (x @ m.w).view(1, -1, 4, 4)
    return torch.einsum("btij,bthj->bthi", w, x.view(1, -1, 4, 4)).flatten(2)


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
    "toggled": toggled,
    "weight written through its data": written_by_data,
    "moving average": moving_average,
    "added by a method": added_by_method,
    "added to a list": added_to_a_list,
    "shift written": shift_written,
    "rolled where there is a token before": lambda m, x, p: x + x.roll(1, 1) * (p > 0)[..., None],
    "expert choice": expert_choice,
    "placed by position": placed_by_position,
    "before by position": before_by_position,
    "ordered by position": lambda m, x, p: x[:, p[0].argsort()],
    "pooled by segment": lambda m, x, p: x + torch.zeros(1, 16, 16).scatter_add(1, (p // 4)[..., None].expand_as(x), x).gather(
        1, (p // 4)[..., None].expand_as(x)),
    "NTK by the last": rotated_by_the_last,
    "branch on twice the length": lambda m, x, p: x * 2 if 2 * x.shape[1] + 1 == 15 else x,
    "branch on the length": lambda m, x, p: x * 2 if x.shape[1] > 6 else x,
    "layer by the length": lambda m, x, p: x @ m.experts[x.shape[1] % 4],
    "local attention": local_attention,
    "mean of blocks": lambda m, x, p: x - F.pad(x, (0, 0, 0, -x.shape[1] % 4)).view(1, -1, 4, 16).mean(2).repeat_interleave(
        4, 1)[:, : x.shape[1]],
    "long convolution": long_convolution,
    "documents": lambda m, x, p: x + m.table[(p == 0).cumsum(1)],
    "from the end": lambda m, x, p: x + (x.shape[1] - 1 - p)[..., None] * 0.01,
    "the last token": lambda m, x, p: torch.where((p == p.max())[..., None], x * 2, x),
    "number of elements": lambda m, x, p: x / x.numel() * 16,
    "stride": lambda m, x, p: x * (1 + x.stride(0) * 1e-3),
    "shape as a tensor": lambda m, x, p: x / torch.tensor(x.shape)[1],
    "rank among tokens": lambda m, x, p: x + x[0, :, 0].argsort().argsort()[None, :, None] * 0.01,
    "covariance": lambda m, x, p: x @ torch.cov(x[0].T) * 0.1,
    "orthogonal": lambda m, x, p: torch.linalg.qr(x[0])[0].sum(-1)[None, :, None] + x,
    "largest singular value": lambda m, x, p: x / torch.linalg.svdvals(x[0])[0],
    "response norm over T": lambda m, x, p: F.local_response_norm(x, 3),
    "mean of experts' tokens": lambda m, x, p: x + torch.zeros(4, 16).index_reduce(
        0, (e := (x[0] @ m.w[:, :4]).argmax(-1)), x[0], "mean", include_self=False)[e][None],
    "one-hot pooling": lambda m, x, p: x + ((o := F.one_hot((x[0] @ m.w[:, :4]).argmax(-1), 4).float()) @ (o.T @ x[0]))[None],
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
    "instance norm of each token": lambda m, x, p: F.instance_norm(x[0].view(-1, 4, 4)).view(x.shape),
    "table held in a list": held_in_a_list(),
    "length asserted": asserted,
    "dense experts": dense_experts,
    "top-p gate": top_p,
    "sparsemax": sparsemax,
    "sorted and copied back": sorted_and_copied_back,
    "rows written": rows_written,
    "weights of each token": per_token_weights,
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
    "radial basis": lambda m, x, p: x + (-(x[..., None] - torch.linspace(-2, 2, 8)).pow(2)).exp() @ m.bias[:8],
    "product keys": lambda m, x, p: x + ((s := (x @ m.table.T).topk(4, -1))[0].softmax(-1)[..., None] * m.table[s[1]]).sum(-2),
    "padded features": lambda m, x, p: F.pad(x, (1, 1), mode="replicate")[..., 1:-1] * 2,
    "quantized per token": lambda m, x, p: (x / (s := x.abs().amax(-1, keepdim=True) / 127)).round().to(torch.int8).float() * s,
    "channel shuffle": lambda m, x, p: F.channel_shuffle(x.mT[..., None], 4)[..., 0].mT,
    "heads chosen": lambda m, x, p: (x.view(1, -1, 4, 4) * torch.zeros(1, x.shape[1], 4).scatter(
        2, (x @ m.w[:, :4]).topk(2, -1)[1], 1.0)[..., None]).flatten(2),
    "xPos": lambda m, x, p: torch.cat([x[..., :8] * (s := ((torch.arange(8) + 1.0) / 9) ** ((p - 32) / 64.0)[..., None]),
                                       x[..., 8:] / s], -1),
    "hash of positions": lambda m, x, p: x + m.table[(p * 31 + 7) % 64] + m.table[p ^ 5] + m.table[p >> 1],
    "table made of constants": lambda m, x, p: x * torch.outer(torch.arange(64.0), m.bias).cos()[p],
    "weights with a norm": lambda m, x, p: F.linear(x, m.w / torch.linalg.matrix_norm(m.w, 2)),
    "functional call": lambda m, x, p: torch.func.functional_call(
        m.point, {"weight": m.point.weight * 2, "bias": m.point.bias}, (x.mT,)).mT,
}
# fmt: on
