"""The table of small modules: functions (model, x (1, T, 16), positions (1, T)) -> (1, T, 16), see ``test_mixers.py``.

``MIXES`` must be refused, ``SERVED`` must be exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers the grouped product)

from tests.adversarial.harness import Model

Tensor = torch.Tensor


class Doubled(torch.autograd.Function):
    """Mixes where no graph shows it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x + x.mean(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@torch.library.custom_op("quire_tests::clone", mutates_args=())
def named_clone(x: Tensor) -> Tensor:
    """An operation of somebody else's that has the name of a harmless one."""
    return x - x.mean(1, keepdim=True)


@named_clone.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("quire_tests::write_mean", mutates_args={"out"})
def write_mean(x: Tensor, out: Tensor) -> None:
    out.copy_(x.mean(1, keepdim=True).expand_as(x))


def written_by_an_op(m: Model, x: Tensor, p: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    write_mean(x, y)
    return x + y


def kept_between_calls(m: Model, x: Tensor, p: Tensor) -> Tensor:
    before = getattr(m, "before", None)
    m.before = x
    return x if before is None else x + before.mean()


def counts_calls(m: Model, x: Tensor, p: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return x * m.calls


@torch._dynamo.disable
def hidden(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def add_in_place(m: Model, x: Tensor, p: Tensor) -> Tensor:
    y = x * 1
    y[..., :4] += x[..., 4:8]
    y.mul_(2).clamp_(-3, 3)
    return y


def view_written(m: Model, x: Tensor, p: Tensor) -> Tensor:
    y = x * 1
    y.transpose(1, 2)[:, 3] = x[..., 5]
    y.view(-1, 16)[:, 2] = 1.0
    return y


def rectified_in_place(m: Model, x: Tensor, p: Tensor) -> Tensor:
    """The results of these operations are not used, but what they write is."""
    y = x * 1
    half = y[..., :8]
    F.relu(half, inplace=True)
    half.mul_(2)
    F.leaky_relu(y[..., 8:], 0.1, True)
    return y


def first_written(m: Model, x: Tensor, p: Tensor) -> Tensor:
    y = x * 1
    y[:, 0] = 0.0
    return y


def branch(m: Model, x: Tensor, p: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def item(m: Model, x: Tensor, p: Tensor) -> Tensor:
    return x * x.abs().max().item()


def stored(m: Model, x: Tensor, p: Tensor) -> Tensor:
    m.table[0] = x[0].sum(0)
    return x + m.table[0]


def router(m: Model, x: Tensor, p: Tensor) -> Tensor:
    weights, ids = (x @ m.w[:, :4]).softmax(-1).topk(2, dim=-1)
    y = torch.einsum("btd,edf->btef", x, m.experts)
    return (y.gather(2, ids[..., None].expand(-1, -1, -1, 16)) * weights[..., None]).sum(2)


def scattered_router(m: Model, x: Tensor, p: Tensor) -> Tensor:
    values, ids = (x @ m.w[:, :4]).topk(2, dim=-1)
    gates = torch.zeros(1, x.shape[1], 4).scatter(2, ids, values.softmax(-1))
    return torch.einsum("bte,btd,edf->btf", gates, x, m.experts)


def expert_per_token(m: Model, x: Tensor, p: Tensor) -> Tensor:
    ids = (x[0] @ m.w[:, :4]).argmax(-1)
    return torch.bmm(x[0][:, None], m.experts[ids])[:, 0][None]


def sorted_by_expert(m: Model, x: Tensor, p: Tensor) -> Tensor:
    """Rows sorted by expert and put back."""
    ids = (x[0] @ m.w[:, :4]).topk(1)[1].reshape(-1)
    order = ids.argsort()
    y = torch.tanh(x[0][order])
    return y[order.argsort()][None]


def inverse_of(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return inverse


def by_expert(x: Tensor, scores: Tensor, experts: Tensor, *, ids: Tensor | None = None, counts: Any = None, offsets: Any = None,
              rows: Any = None, descending: bool = False, weights: Tensor | None = None) -> Tensor:
    """Experts (4, W, W) of rows x (T, W) as in transformers: rows sorted by expert, one product per group, put back; of the two
    best scores (T, 4), or of ``ids``. ``counts(sorted ids, ids)``, ``offsets(counts)``, ``rows(x, order)`` in another way."""
    ids = scores.topk(2)[1] if ids is None else ids
    k = ids.shape[1]
    found, order = ids.reshape(-1).sort(descending=descending)
    each = torch.histc(found.float(), bins=4, min=0, max=3) if counts is None else counts(found, ids)
    ends = each.cumsum(0, dtype=torch.int32) if offsets is None else offsets(each)
    y = torch.ops.transformers.grouped_mm_fallback(x[order // k] if rows is None else rows(x, order), experts, ends)
    y = y if weights is None else y * weights.reshape(-1)[order][:, None]
    return y[inverse_of(order)].view(-1, k, x.shape[1]).sum(1)


def grouped(m: Model, x: Tensor, p: Tensor, counts: Any = None) -> Tensor:
    scores = (x[0] @ m.w[:, :4]).softmax(-1)
    weights, ids = scores.topk(2)
    return by_expert(x[0], scores, m.experts, ids=ids, weights=weights, counts=counts)[None]


def one_hot(ids: Tensor, filled: float = 0.0) -> Tensor:
    return torch.full((ids.shape[0], 4), filled).scatter(1, ids, 1)


def linear_attention(m: Model, x: Tensor, p: Tensor) -> Tensor:
    return x @ (x.transpose(1, 2) @ x)


def by_hand(m: Model, x: Tensor, p: Tensor) -> Tensor:
    scores = (x @ x.transpose(1, 2)).tril()
    return scores.softmax(-1) @ x


def recurrence(m: Model, x: Tensor, p: Tensor) -> Tensor:
    state, out = torch.zeros(1, 16), []
    for t in x.unbind(1):
        state = 0.5 * state + t
        out.append(state)
    return torch.stack(out, 1)


# fmt: off
#: Functions of x that mix along one dimension: of tokens they are refused, of features served.
ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "mean": lambda x, d: x - x.mean(d, keepdim=True), "softmax": lambda x, d: x * x.softmax(d),
    "cumsum": lambda x, d: x + 0.1 * x.cumsum(d), "std": lambda x, d: x / (1 + x.std(d, keepdim=True)),
    "amax": lambda x, d: x - x.amax(d, keepdim=True), "roll": lambda x, d: x + x.roll(2, d), "flip": lambda x, d: x + x.flip(d),
    "sort": lambda x, d: x + x.sort(d)[0], "argsort": lambda x, d: x + x.argsort(d) * 0.1,
    "normalize": lambda x, d: F.normalize(x, dim=d) * 2, "logsumexp": lambda x, d: x - x.logsumexp(d, keepdim=True),
    "topk": lambda x, d: x + x.topk(2, d)[0].sum(d, keepdim=True), "median": lambda x, d: x + x.median(d, keepdim=True)[0],
    "any": lambda x, d: x * (1.0 + (x > 1).any(d, keepdim=True)), "select": lambda x, d: x + x.select(d, 1).unsqueeze(d),
    "narrow": lambda x, d: x + x.narrow(d, 0, 1), "index_select": lambda x, d: x + x.index_select(d, torch.tensor([1])),
    "argmax": lambda x, d: x + x.argmax(d, keepdim=True) * 0.1, "fft": lambda x, d: x + torch.fft.fft(x, dim=d).real * 0.1,
    "sum": lambda x, d: x * x.abs().sum(d, keepdim=True).rsqrt(),
    "quantile": lambda x, d: x - x.quantile(0.3, dim=d, keepdim=True),
    "diff": lambda x, d: x + F.pad(x.diff(dim=d), (0, 0, 1, 0) if d == 1 else (1, 0)),
    "cummax": lambda x, d: x + x.cummax(d)[0] * 0.5,
    "unfold": lambda x, d: x + x.movedim(d, 0).unfold(0, 2, 1).sum((0, -1)).unsqueeze(d) * 0.1,
    "logcumsumexp": lambda x, d: x + x.logcumsumexp(d) * 0.1, "cumprod": lambda x, d: x * x.sigmoid().cumprod(d),
    "kthvalue": lambda x, d: x - x.kthvalue(1, d, keepdim=True)[0],
    "vector_norm": lambda x, d: x / (1 + torch.linalg.vector_norm(x, 2, d, keepdim=True)),
    "log_softmax": lambda x, d: x + x.log_softmax(d) * 0.1, "prod": lambda x, d: x + x.tanh().prod(d, keepdim=True),
    "aminmax": lambda x, d: x - x.aminmax(dim=d, keepdim=True)[0],
    "count_nonzero": lambda x, d: x * (1 + torch.count_nonzero(x > 0, dim=d).unsqueeze(d) * 0.1),
    "gather": lambda x, d: x + x.gather(d, x.argsort(d)),
    "scatter": lambda x, d: x + torch.zeros_like(x).scatter(d, x.topk(1, d)[1], 1.0),
    "swapaxes": lambda x, d: x + x.swapaxes(d, -1).cumsum(-1).swapaxes(d, -1) * 0.1,
    "trapezoid": lambda x, d: x - torch.trapezoid(x, dim=d).unsqueeze(d) * 0.1,
    "cat": lambda x, d: x + torch.cat([x.narrow(d, 0, 1), x.narrow(d, 0, 1)], d).mean(d, keepdim=True),
}


def along(function: Callable[[Tensor, int], Tensor], dim: int) -> Callable[[Model, Tensor, Tensor], Tensor]:
    return lambda m, x, p: function(x, dim)


MIXES = {
    **{f"{name} over T": along(function, 1) for name, function in ALONG.items()},
    # Named in the report that started these tests.
    "linear attention": linear_attention,
    "attention by hand": by_hand,
    "einsum over T": lambda m, x, p: torch.einsum("btd,bse->bde", x, x).sum() + x,
    "bmm over T": lambda m, x, p: x + torch.bmm(x.mT, x).sum(1, keepdim=True),
    "baddbmm": lambda m, x, p: x + torch.baddbmm(m.w[None], x.mT, x).mean(1, keepdim=True),
    "group norm": lambda m, x, p: m.group(x.mT).mT,
    "instance norm": lambda m, x, p: F.instance_norm(x.mT).mT,
    "average pool": lambda m, x, p: F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "max pool": lambda m, x, p: F.max_pool1d(x.mT, 3, 1, 1).mT,
    "first row": lambda m, x, p: x + x[..., 0, :][:, None],
    "integer sum": lambda m, x, p: x * p.sum(),
    "integer argsort": lambda m, x, p: x + p.argsort(1)[..., None],
    "integer amin": lambda m, x, p: x + p.amin(1)[..., None, None],
    "integer max along": lambda m, x, p: x + p.max(dim=-1).values[:, None, None] * 0.01,
    "integer argmax": lambda m, x, p: x + p.argmax(-1)[:, None, None] * 0.01,
    "longest position": lambda m, x, p: x / (p.max() + 1),
    "bincount": lambda m, x, p: x + torch.bincount((x[0, :, 0] > 0).long(), minlength=2).float()[0],
    # Others of the same kinds.
    "cumsum of ones": lambda m, x, p: x + m.table[torch.ones_like(p).cumsum(1)],
    "roll all": lambda m, x, p: x + x.roll(16),
    "flip of all": lambda m, x, p: x + torch.flip(x, (0, 1, 2)),
    "token shift": lambda m, x, p: torch.cat([x[..., :8], F.pad(x, (0, 0, 1, -1))[..., 8:]], -1),
    "depthwise conv": lambda m, x, p: F.conv1d(F.pad(x.mT, (2, 0)), m.w[:, None, :3], groups=16).mT,
    "fft of both": lambda m, x, p: torch.fft.fft2(x).real,
    "cdist": lambda m, x, p: x + torch.cdist(x, x).mean(-1, keepdim=True),
    "kron": lambda m, x, p: x + torch.kron(x[0, :, 0], x[0, :, 1]).mean(),
    "outer over tokens": lambda m, x, p: x + torch.outer(x[0, :, 0], x[0, :, 1]).mean(),
    "unique": lambda m, x, p: x + torch.unique(p).numel(),
    "nonzero": lambda m, x, p: x + (x > 0).nonzero().shape[0],
    "mode": lambda m, x, p: x - (x > 0).float().mode(1, keepdim=True)[0],
    "dropout": lambda m, x, p: F.dropout(x, 0.5, True),
    "masked_select": lambda m, x, p: x + x.masked_select(x > 0).mean(),
    "boolean index": lambda m, x, p: x + x[x > 0].mean(),
    "masked_scatter": lambda m, x, p: x.masked_scatter(x > 0, x.flip(-1)),
    "rare gate": lambda m, x, p: torch.where(x.amax() > 1e9, -x, x),
    "rare any": lambda m, x, p: x + (p == 63).any(),
    "flattened to the end": lambda m, x, p: x + x.flatten(0, 2).softmax(0).view_as(x),
    "repeated row": lambda m, x, p: x.repeat(1, 2, 1)[:, 1::2],
    "interleaved row": lambda m, x, p: x.repeat_interleave(2, 1)[:, : x.shape[1]],
    "row numbers in a byte": lambda m, x, p: x + x[:, torch.arange(x.shape[1]).to(torch.int8).long()],
    "cut table from row 1": lambda m, x, p: x + m.table[1 : x.shape[1] + 1],
    "positions from the first": lambda m, x, p: x + m.table[p - p[:, :1]],
    "linspace": lambda m, x, p: x + torch.linspace(0, 1, x.shape[1])[None, :, None],
    "embedding by row number from the end": lambda m, x, p: x + F.embedding(torch.arange(x.shape[1]).flip(0), m.table),
    "product with (T, T)": lambda m, x, p: torch.ones(x.shape[1], x.shape[1]).tril() @ x,
    "identity (T, T)": lambda m, x, p: torch.eye(x.shape[1]).roll(1, 0) @ x,
    "decay by distance": lambda m, x, p: (0.5 ** (p[0][:, None] - p[0]).abs()).tril() @ x,
    "outer of positions": lambda m, x, p: x + (p[0][:, None] > p[0]).sum(-1)[None, :, None],
    "as_strided": lambda m, x, p: x + x.as_strided(x.shape, (0, 16, 1), 0).roll(1, -2),
    "overlapping as_strided": lambda m, x, p: x + x.contiguous().as_strided(x.shape, (0, 0, 1)),
    "dtype view": lambda m, x, p: x + x.mT.contiguous().view(torch.int8)[..., : x.shape[1]].mT.float() * 1e-3,
    "complex view over T": lambda m, x, p: x + torch.view_as_complex(torch.stack([x, x.flip(1)], -1)).imag,
    "bucket of the length": lambda m, x, p: x + torch.bucketize(x.shape[1], torch.tensor([3, 6, 9, 12])),
    "is the length in": lambda m, x, p: x + torch.isin(torch.arange(16), x.shape[1]).float(),
    "histogram up to the length": lambda m, x, p: x + torch.histc(m.w, 16, 0, x.shape[1]),
    "logarithm of the length": lambda m, x, p: x * math.log(x.shape[1] + 1),
    "sum over ones": lambda m, x, p: x / torch.ones_like(x).sum(1, keepdim=True),
    "data-dependent branch": branch,
    "item": item,
    "an op that is named clone": lambda m, x, p: named_clone(x),
    "an op that writes": written_by_an_op,
    "kept between calls": kept_between_calls,
    "autograd function": lambda m, x, p: Doubled.apply(x),
    "hidden from the tracer": lambda m, x, p: hidden(x),
    "recurrence": recurrence,
    "written first row": first_written,
    "written to a buffer": stored,
    "experts by other counts": lambda m, x, p: grouped(m, x, p, lambda found, ids: torch.histc(
        (found + 1).clamp(max=3).float(), bins=4, min=0, max=3)),
    "take": lambda m, x, p: x + x.take(p)[..., None],
    "norm of all": lambda m, x, p: x / x.norm(),
    "renorm": lambda m, x, p: x.mT.renorm(2, 1, 1.0).mT,
    "cosine similarity": lambda m, x, p: x + F.cosine_similarity(x[:, :1], x, dim=1)[:, None],
    "bilinear of tokens": lambda m, x, p: x + torch.einsum("bsd,de,bte->bst", x, m.w, x).mean(-1, keepdim=True),
    "addmm over T": lambda m, x, p: x + torch.addmm(m.w, x[0].T, x[0])[0],
    "upsampled": lambda m, x, p: x + F.interpolate(F.avg_pool1d(x.mT, 2, 1), size=x.shape[1]).mT,
    "pixel shuffle": lambda m, x, p: x + F.pixel_shuffle(x.mT.reshape(1, 16, -1, 1), 2).mean(),
    "searchsorted among tokens": lambda m, x, p: x + torch.searchsorted(x[0, :, 0].sort()[0], x[0].T[1].clone())[:, None],
    "padding by reflection": lambda m, x, p: x + F.pad(x.mT, (1, 1), mode="reflect").mT[:, 2:],
    "counts calls": counts_calls,
}

SERVED = {
    **{f"{name} over features": along(function, -1) for name, function in ALONG.items()},
    "nothing": lambda m, x, p: x,
    "softmax over heads": lambda m, x, p: x.unflatten(-1, (4, 4)).softmax(2).flatten(2),
    "layer norm": lambda m, x, p: F.layer_norm(x, (16,), m.scale, m.bias),
    "rms norm": lambda m, x, p: F.rms_norm(x, (16,), m.scale),
    "rms norm by hand": lambda m, x, p: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.scale,
    "norm per head": lambda m, x, p: F.layer_norm(x.view(*x.shape[:2], 4, 4), (4,)).flatten(2),
    "group norm per token": lambda m, x, p: m.group(x[0])[None],
    "batch norm in evaluation": lambda m, x, p: m.batch(x.mT).mT,
    "sort over features, transposed": lambda m, x, p: x.mT.sort(dim=1)[0].mT,
    "einsum without T": lambda m, x, p: torch.einsum("btd,de->bte", x, m.w),
    "einsum per head": lambda m, x, p: torch.einsum("bthd,hde->bthe", x.unflatten(-1, (4, 4)), m.experts[:, :4, :4]).flatten(2),
    "outer products per token": lambda m, x, p: torch.einsum("btd,bte->btde", x, x).mean(-1),
    "matmul per token": lambda m, x, p: (x.unflatten(-1, (4, 4)) @ x.unflatten(-1, (4, 4)).mT).flatten(2) * 0.1,
    "router": router,
    "experts by group": grouped,
    "experts by counted ids": lambda m, x, p: grouped(m, x, p, lambda found, ids: one_hot(ids).sum(0)),
    "scattered router": scattered_router,
    "expert per token": expert_per_token,
    "sorted by expert and back": sorted_by_expert,
    "pointwise conv": lambda m, x, p: m.point(x.mT).mT,
    "pool over features": lambda m, x, p: x + F.avg_pool1d(x[0][:, None], 3, 1, 1)[:, 0][None],
    "shift over features": lambda m, x, p: F.pad(x, (1, -1)),
    "glu": lambda m, x, p: torch.cat([F.glu(x), F.glu(x)], -1),
    "table by position": lambda m, x, p: x + m.table[p] + F.embedding(p, m.table),
    "rotation": lambda m, x, p: torch.cat([-x[..., 8:], x[..., :8]], -1) * (p[..., None] * 0.3).sin() + x,
    "rotation by outer product": lambda m, x, p: x * torch.outer(p[0].float(), m.bias).cos()[None],
    "rotation by bmm": lambda m, x, p: x * (m.bias[None, :, None] @ p[:, None].float()).mT.cos(),
    "complex rotation": lambda m, x, p: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (8, 2))) * torch.polar(
        torch.ones(8), torch.outer(p[0].float(), m.bias[:8]))).flatten(2),
    "larger of two positions": lambda m, x, p: x * (1 + torch.maximum(p, p // 2)[..., None] * 0.01),
    "maximum not used": lambda m, x, p: x if p.max() + 1 is None else x,
    "sum not used": lambda m, x, p: x if (torch.arange(x.shape[1]).cumsum(0) + p).float().mean() is not None else -x,
    "where": lambda m, x, p: torch.where(x > 0, x, 0.1 * x),
    "masked_fill": lambda m, x, p: x.masked_fill(x > 1, 1.0).masked_fill((p == 2)[..., None], 0.5),
    "clamp": lambda m, x, p: x.clamp(-1, 1).clip(min=-0.5),
    "maximum": lambda m, x, p: torch.maximum(x, x.mean(-1, keepdim=True)),
    "argmax per token": lambda m, x, p: x + m.table[x.argmax(-1)],
    "one hot": lambda m, x, p: x + F.one_hot(x.argmax(-1), 16),
    "bucketize": lambda m, x, p: x + torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    "flattened": lambda m, x, p: (x.flatten(0, 1) @ m.w).unflatten(0, (1, -1)),
    "heads and back": lambda m, x, p: x.view(1, -1, 4, 4).transpose(1, 2).reshape(4, -1, 4).softmax(0).view(
        1, 4, -1, 4).transpose(1, 2).flatten(2),
    "tokens last": lambda m, x, p: (m.w @ x[0].T).T[None],
    "tokens and heads in one": lambda m, x, p: (x.view(-1, 4) @ m.w[:4, :4]).view(x.shape),
    "repeated heads": lambda m, x, p: x.view(1, -1, 4, 4)[:, :, :2].repeat_interleave(2, dim=2).flatten(2),
    "expanded and folded": lambda m, x, p: x[:, :, None].expand(-1, -1, 3, -1).flatten(1, 2).tanh().view(1, -1, 3, 16).mean(2),
    "stack": lambda m, x, p: torch.stack([x, x * 2, x @ m.w], 0).mean(0),
    "concatenated features": lambda m, x, p: torch.cat([x, x * 2], -1) @ torch.cat([m.w, m.w]),
    "split": lambda m, x, p: sum(x.split(4, -1)).repeat(1, 1, 4),
    "unbind": lambda m, x, p: torch.stack(x.unflatten(-1, (2, 8)).unbind(2), -1).flatten(2),
    "tensordot of features": lambda m, x, p: torch.tensordot(x, m.w, dims=1),
    "kron of weights": lambda m, x, p: x @ torch.kron(m.w[:4, :4], m.w[4:8, 4:8]),
    "zeros of the row": lambda m, x, p: x + torch.zeros(1, x.shape[1], 16) + x.new_ones(x.shape[1], 1),
    "expanded weight": lambda m, x, p: x + m.bias.expand(1, x.shape[1], 16),
    "weight of all": lambda m, x, p: x * m.w.mean() / m.w.norm() + m.w.amax(0).cumsum(0),
    "written features": add_in_place,
    "written views": view_written,
    "rectified in place": rectified_in_place,
    "dropout in evaluation": lambda m, x, p: F.dropout(x, 0.5, m.training),
    "cast": lambda m, x, p: x.double().sigmoid().to(x.dtype) + x.type_as(x),
    "size arithmetic": lambda m, x, p: x.reshape(x.shape[0] * x.shape[1], x.shape[-1]).view(x.shape) / math.sqrt(x.shape[-1]),
    "no_grad": lambda m, x, p: torch.no_grad()(lambda: x * 2)(),
    "diagonal per token": lambda m, x, p: x + x.unflatten(-1, (4, 4)).diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True),
    "triangle per token": lambda m, x, p: x.unflatten(-1, (4, 4)).tril().flatten(2),
    "cut table": lambda m, x, p: x + m.table[: x.shape[1]],
    "embedding by row number": lambda m, x, p: x + F.embedding(torch.arange(x.shape[1]), m.table),
}
# fmt: on
