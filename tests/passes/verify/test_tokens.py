"""The token proof, operation by operation: what mixes tokens is refused for what it does, and its harmless twin is not.

``tests/adversarial`` runs whole models on all routes; here one operation is traced and proved, so that each rule has its case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quire.attn_ops.attention import attention
from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.ops.experts import expert_linear
from quire.attn_ops.ops.lora_rows import lora_rows
from quire.attn_ops.ops.sampling import sample_tokens
from quire.attn_ops.step import Step, running
from quire.passes.fx import placeholders, value
from quire.passes.verify.tokens import check_tokens
from tests.adversarial import mixers
from tests.adversarial.mixers import inverse_of, one_hot
from tests.passes.models import capture

Tensor = torch.Tensor
WIDTH = 8
WEIGHT, TABLE, KERNEL = torch.randn(WIDTH, WIDTH), torch.randn(64, WIDTH), torch.randn(WIDTH, WIDTH, 3)
POINTWISE, EXPERTS, COUNTER = torch.randn(WIDTH, WIDTH, 1), torch.randn(4, WIDTH, WIDTH), torch.zeros(WIDTH)
CODES, SCALE = torch.zeros(WIDTH * WIDTH // 2, 1, dtype=torch.uint8), torch.ones(1)


def needs(name: str) -> None:
    if name.startswith("4 bits"):
        pytest.importorskip("bitsandbytes", reason="pip install 'quire[integrations]'")


def check(compute: Callable[..., Any], *more: Tensor, one_row: bool = True) -> None:
    """Prove a function of x (1, T, WIDTH), positions (1, T), and ``more``, of a length (K,) of its own. ``one_row``: the trace
    knows that x and positions are equally long."""
    torch._dynamo.reset()
    x, positions = torch.randn(1, 9, WIDTH), torch.arange(9)[None]
    for tensor, dim in ((x, 1), (positions, 1), *((m, 0) for m in more)):
        torch._dynamo.mark_dynamic(tensor, dim)

    def of_one_row(x: Tensor, positions: Tensor, *more: Tensor) -> Any:
        torch._check(x.shape[1] == positions.shape[1])
        return compute(x, positions, *more)

    with running(Step(None, None, adapters=torch.ones(9, dtype=torch.int64))):  # type: ignore[arg-type]
        gm, _ = capture(of_one_row if one_row else compute, x, positions, *more)
    row = next(value(n) for n in placeholders(gm.graph) if isinstance(value(n), Tensor) and value(n).dim() > 1
               and not isinstance(value(n).shape[1], int))
    check_tokens(gm.graph, row.shape[1])


def in_4_bits(x: Tensor, scale: Tensor = SCALE, bias: Tensor | None = None) -> Tensor:
    return torch.ops.bitsandbytes.gemm_4bit(x, CODES, [WIDTH, WIDTH], scale, 64, "nf4", bias)


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


def adapted_experts(rows: Tensor, ids: Tensor, a: Tensor | None = None, bits: int = 1) -> Tensor:
    """Rank 1, of four experts."""
    a = EXPERTS[0][:4] if a is None else a
    return expert_linear(rows, EXPERTS, None, ids, False, [a], [EXPERTS[1][:, :4]], [0.5], [bits])


def expert_ids(x: Tensor, k: int = 2) -> Tensor:
    return (x[0] @ WEIGHT[:, :4]).topk(k)[1]


def in_a_loop(x: Tensor, ids: Tensor | None = None, counts: Any = None, sizes: Any = None, product: Any = None,
              join: Any = torch.cat, back: bool = False) -> Tensor:
    """Experts one after the other: ``counts(ids)``, ``sizes(counts)``, ``product(rows, expert)``, ``join(results)`` in another
    way. ``back``: added up for each token."""
    ids = expert_ids(x) if ids is None else ids
    order = ids.reshape(-1).sort()[1]
    each = (one_hot if counts is None else counts)(ids).long().sum(0).tolist()
    parts = x[0][order // 2].split(each if sizes is None else sizes(each), dim=0)
    y = join([(F.linear if product is None else product)(part, weight) for part, weight in zip(parts, EXPERTS, strict=True)])
    return torch.zeros_like(x[0]).index_add(0, order // 2, y) if back else y


def by_expert(x: Tensor, ids: Tensor | None = None, counts: Any = None, **more: Any) -> Tensor:
    return mixers.by_expert(x[0], x[0] @ WEIGHT[:, :4], EXPERTS, ids=ids, counts=counts, **more)


def sorted_twice(x: Tensor, p: Tensor) -> Tensor:
    values = (x[0] @ WEIGHT[:, :4]).argmax(-1).sort()[0]
    again, order = values.sort()
    return x[0] + again[order.argsort()][:, None]


def columns_sorted_apart(x: Tensor, p: Tensor) -> Tensor:
    values, order = x[0].sort(0)
    return values[order[:, 0].argsort()]


def pairs_of_sorted_rows(x: Tensor, p: Tensor) -> Tensor:
    order = expert_ids(x).reshape(-1).argsort()
    pairs = x[0][order // 2].view(-1, 2, WIDTH).sum(1)
    return pairs[inverse_of(order).view(-1, 2)].sum(1)


def a_view_of_an_inverse(x: Tensor, p: Tensor) -> Tensor:
    order = routed(x)
    inverse = torch.empty_like(order)
    view = inverse[:]
    inverse[order] = torch.arange(order.shape[0])
    return x[0] + view[:, None]


def mean_written(x: Tensor, p: Tensor) -> Tensor:
    y = x * 1
    y[..., 0] = x.mean()
    return y


def columns_written(x: Tensor, p: Tensor) -> Tensor:
    y = x[0] * 1
    y[:, p[0] % WIDTH] = 1.0
    return y


def rows_written_by_position(x: Tensor, p: Tensor) -> Tensor:
    y = x[0] * 1
    y[p[0]] = x[0].tanh()
    return y


def counted_calls(x: Tensor, p: Tensor) -> Tensor:
    COUNTER.add_(1)
    return x + COUNTER


def read_before_it_is_set(x: Tensor, p: Tensor) -> Tensor:
    y = x + COUNTER
    COUNTER.copy_(WEIGHT[0])
    return y


def attended(x: Tensor, keys: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
    q, k = (t.view(1, -1, 2, 4).transpose(1, 2) for t in (x, x if keys is None else keys))
    return attention(q, k, k, sinks, layer=0, scale=0.5, window=None, softcap=None, chunk=None, causal=True)


torch.library.define("quire_tests::pointwise", "(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
torch.library.impl("quire_tests::pointwise", "CompositeExplicitAutograd", lambda x: x - x.mean(1, keepdim=True))


def written_in_vmap(x: Tensor, p: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    torch.vmap(lambda a, b: b.add_(a.mean()), 2, 2)(x, y)
    return y


def shared_memory(x: Tensor, p: Tensor) -> Tensor:
    """Rows begin 1 apart and are WIDTH long."""
    y = x.new_empty_strided((1, x.shape[1], WIDTH), (0, 1, 1))
    y.copy_(x)
    return y


REFUSED = {
    "adapters of rows in another order": (lambda x, p: adapted(x[0][routed(x)][None]), "an adapter's rows are not the tokens"),
    "adapters that follow from the tokens": (
        lambda x, p: lora_rows(x @ WEIGHT, x, [x[0]], [x[0].T], [0.5], [1]), "its rows are not tokens"),
    "adapters of sorted rows": (lambda x, p: adapted(x[0][routed(x)][None])[0][routed(x).argsort()], "an adapter's rows"),
    "a loop over an expert's tokens": (
        lambda x, p: x.index_add(1, (found := torch.where(x[0, :, 0] > 0)[0]), 2 * x[:, found]),
        "depends on the tokens.*grouped experts"),
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
    # What only one rule keeps out: without it, each of these would be served.
    "added in another order": (lambda x, p: x[0] + x[0][routed(x)], "in different dimensions, or in another order"),
    "compared with all": (lambda x, p: x + torch.isin(p, p * 2)[..., None], "among those of all tokens"),
    "values of all taken for different ones": (
        lambda x, p: x + torch.isin(p % 8, torch.arange(40, 140), assume_unique=True)[..., None], "for different ones"),
    "memory read in another order": (
        lambda x, p: torch.ops.aten._reshape_alias(x.contiguous(), [1, x.shape[1], WIDTH], [WIDTH, 0, 1]), "in another order"),
    "boundaries of tokens": (lambda x, p: torch.bucketize(x, x[0, :, 0]).float(), "boundaries differ from token to token"),
    "half of the places": (lambda x, p: x[:, torch.arange(x.shape[1]) // 2], "with the places of the tokens"),
    "places in a byte": (lambda x, p: x[:, torch.add(torch.arange(x.shape[1]), 0, out=torch.empty(
        x.shape[1], dtype=torch.int8)).long()], "with the places of the tokens"),
    "places as truths": (lambda x, p: x[:, torch.arange(x.shape[1]).bool().long()], "with the places of the tokens"),
    "sorted twice": (sorted_twice, "it sorts tokens twice"),
    "sorted twice, downwards": (lambda x, p: x[0][order := routed(x)].tanh()[order.argsort(descending=True)], "tokens twice"),
    "columns sorted apart": (columns_sorted_apart, "it sorts tokens"),
    "triangle": (lambda x, p: x.tril(), "it zeroes by the place of the token"),
    "product with rows in another order": (
        lambda x, p: torch.bmm(x[0][:, None], x[0][routed(x)][:, :, None])[:, 0], "each token with each other one"),
    "group norm": (lambda x, p: F.group_norm(x.mT, 4).mT, "it normalizes over the tokens"),
    "normalized": (lambda x, p: F.normalize(x, dim=1), "it is taken over the tokens"),
    "pool": (lambda x, p: F.avg_pool1d(x.mT, 3, 1, 1).mT, "it pools or pads over the tokens"),
    "places of the largest": (lambda x, p: x + F.max_pool2d(x[:, None], (1, 2), return_indices=True)[1].sum((1, 3))[..., None],
                              "indices of pooling count the tokens"),
    "filled with the length": (lambda x, p: x + torch.full((WIDTH,), x.shape[1]), "filled with the length of the row"),
    "length as a tensor": (lambda x, p: x * torch.tensor(x.shape[1]).log(), "length of the row"),
    "length looked up": (lambda x, p: x + torch.searchsorted(TABLE[0].sort()[0], x.shape[1]), "length of the row"),
    "numbers from the length on": (lambda x, p: x + torch.arange(x.shape[1], x.shape[1] + WIDTH), "length of the row"),
    "backwards": (lambda x, p: x[:, torch.arange(x.shape[1] - 1, -1, -1)], "it numbers the tokens of the batch"),
    "place: inverse": (lambda x, p: x[0] + routed(x).argsort()[:, None], "with the places of the tokens"),
    "place: after equal arithmetic": (lambda x, p: x + (p[0] * 2)[:, None] + (torch.arange(x.shape[1]) * 2)[:, None],
                                      "with the places of the tokens"),
    "shift by padding": (lambda x, p: F.pad(x, (0, 0, 1, -1)), "it shifts the tokens"),
    "noise": (lambda x, p: x + torch.rand(WIDTH), "it draws random numbers"),
    "an operation without a rule": (lambda x, p: x + torch.linalg.svdvals(x[0]), "quire has no rule for"),
    "an operation named as a harmless one": (lambda x, p: mixers.named_clone(x), "no rule for quire_tests"),
    "an operation that calls itself elementwise": (lambda x, p: torch.ops.quire_tests.pointwise(x), "no rule for quire_tests"),
    "an operation that writes": (lambda x, p: mixers.written_by_an_op(None, x, p), "what quire_tests.write_mean.default"),
    "vmap over features": (lambda x, p: torch.vmap(lambda c: c - c.mean(), 1, 1)(x[0]), "it is taken over the tokens"),
    "vmap in vmap over features": (lambda x, p: torch.vmap(torch.vmap(lambda c: c.cumsum(-1), 1, 1), 1, 1)(
        x[0].unflatten(-1, (2, 4))), "it goes along the tokens"),
    "vmap that draws": (lambda x, p: torch.vmap(lambda t: t + torch.rand(WIDTH), randomness="same")(x[0]), "random numbers"),
    "vmap that writes": (written_in_vmap, "writes into a tensor from outside"),
    "a derivative": (lambda x, p: torch.func.grad(lambda y: (y.cumsum(1) ** 2).sum())(x), "does not look into torch.func"),
    "an operator of higher order": (lambda x, p: torch.cond(p.sum() > 5, lambda y: y * 2, lambda y: y - y.mean(1, True), (x,)),
                                    "it is taken over the tokens"),
    "rows that share memory": (shared_memory, "tokens share memory in it"),
    "instance norm with weights": (
        lambda x, p: F.batch_norm(x, None, None, x[0, :, 0], training=True), "it normalizes over the tokens"),
    "written mean": (mean_written, "is written into another tensor"),
    "written columns": (columns_written, "to the rows of others"),
    "written by position": (rows_written_by_position, "to the rows of others"),
    "a view of what is numbered": (a_view_of_an_inverse, "of which others are views"),
    "a buffer that counts": (counted_calls, "it changes a buffer or parameter"),
    "a buffer that is read before it is set": (read_before_it_is_set, "it changes a buffer or parameter"),
    "attended in another order": (lambda x, p: attended(x, x[0][routed(x)]), "keys or values are not one row per token"),
    "sinks of tokens": (lambda x, p: attended(x, sinks=x.mean((0, 1))[:2]), "the result is attended to"),
    "sorted rows by number": (lambda x, p: x[0][routed(x)][torch.arange(x.shape[1])], "rows are picked by numbers"),
    "pairs by numbers of tokens": (
        lambda x, p: x[:, :, None].expand(-1, -1, 2, -1).flatten(1, 2)[:, torch.arange(x.shape[1])], "are picked by numbers"),
    "put back without being sorted": (lambda x, p: x[0][routed(x).argsort()], "rows are picked by numbers"),
    "by position": (lambda x, p: x[0][p[0]], "rows are picked by numbers"),
    "features by the place": (lambda x, p: x[0][torch.arange(x.shape[1]), torch.arange(x.shape[1])], "picked by numbers"),
    "looked up in tokens": (lambda x, p: F.embedding(p, x[0]), "its table is made of tokens"),
    "gathered over tokens": (lambda x, p: x.gather(1, (p // 2)[..., None].expand_as(x)), "rows are picked by numbers"),
    "scattered into what all share": (lambda x, p: x + torch.zeros(WIDTH).scatter_add(0, p[0] % 8, x[0, :, 0]), "all share"),
    "scattered to other rows": (lambda x, p: torch.zeros_like(x).scatter_add(1, (p // 2)[..., None].expand_as(x), x),
                                "to the rows of others"),
    "added to what all share": (lambda x, p: x + torch.zeros(4, WIDTH).index_add(0, p[0] % 4, x[0])[0], "what all share"),
    "added by position": (lambda x, p: torch.zeros_like(x[0]).index_add(0, p[0], x[0]), "to the rows of others"),
    "columns filled by position": (lambda x, p: x[0].index_fill(1, p[0] % WIDTH, 0.5), "to the rows of others"),
    "distances of columns": (lambda x, p: x + torch.cdist(x.mT, x.mT).sum((1, 2)), "it sums over the tokens"),
    "on a diagonal": (lambda x, p: x + torch.diag_embed(x.mT).sum(-1).mT, "it puts the tokens on a diagonal"),
    "attends over its features": (lambda x, p: F.scaled_dot_product_attention(x.mT, x.mT, x.mT).mT, "it attends over tokens"),
    "a causal memory": (lambda x, p: F.scaled_dot_product_attention(x, TABLE[None], TABLE[None], is_causal=True),
                        "it attends over tokens"),
    "a memory with dropout": (lambda x, p: F.scaled_dot_product_attention(x, TABLE[None], TABLE[None], dropout_p=0.5),
                              "it drops scores at random"),
    "histogram": (lambda x, p: x + torch.histc(x, 4, -2, 2)[0], "it counts the tokens"),
    "sorted rows joined in pairs": (pairs_of_sorted_rows, "sorted by expert are put into another shape"),
    # Experts by groups of rows.
    "counts": (lambda x, p: x * torch.histc(expert_ids(x, 1).reshape(-1).sort()[0].float(), 4, 0, 3)[0],
               "tokens routed to one expert"),
    "counts returned": (lambda x, p: torch.histc(expert_ids(x, 1).reshape(-1).sort()[0].float(), 4, 0, 3), "counts the tokens"),
    "experts: counts of other bins": (
        lambda x, p: by_expert(x, counts=lambda found, ids: torch.histc(found.float(), 4, 0, 4)), "it counts the tokens"),
    "experts: counts not summed": (lambda x, p: by_expert(x, offsets=lambda counts: counts.int()), "not those routed to one"),
    "experts: counts in int8": (lambda x, p: by_expert(x, offsets=lambda c: c.cumsum(0, dtype=torch.int8).int()), "number"),
    "experts: counts of others": (
        lambda x, p: by_expert(x, counts=lambda *_: torch.histc(expert_ids(x, 1).reshape(-1).sort()[0].float(), 4, 0, 3)),
        "not those routed to one"),
    "experts: counts of shuffled columns": (lambda x, p: by_expert(x, counts=lambda found, ids: one_hot(ids).view(
        -1, 2, 2).transpose(1, 2).reshape(-1, 4).sum(0)), "it is taken over the tokens"),
    "experts: counts over ones": (lambda x, p: by_expert(x, counts=lambda found, ids: one_hot(ids, 1.0).sum(0)),
                                  "it is taken over the tokens"),
    "experts: sums of ids": (lambda x, p: by_expert(x, expert_ids(x, 4), lambda found, ids: ids.sum(0)), "over the tokens"),
    "experts: counts of some ids": (lambda x, p: by_expert(x, counts=lambda found, ids: one_hot(ids[:, :1]).sum(0)),
                                    "not those routed to one"),
    "experts: counts as truths": (lambda x, p: by_expert(x, counts=lambda found, ids: one_hot(ids).sum(0).bool().int()),
                                  "it counts the tokens in torch.bool"),
    "experts: sorted downwards": (lambda x, p: by_expert(x, descending=True), "it counts the tokens"),
    "experts: ids may be negative": (lambda x, p: by_expert(x, ids=(x[0] @ WEIGHT[:, :2]).long()), "it counts the tokens"),
    "experts: ids may repeat": (lambda x, p: by_expert(x, ids=(x[0] @ WEIGHT[:, :4]).cummax(-1)[1], counts=lambda found, ids: (
        one_hot(ids).sum(0))), "not those routed to one"),
    "experts: rows not sorted": (
        lambda x, p: by_expert(x, rows=lambda rows, order: rows[:, None].expand(-1, 2, -1).flatten(0, 1)),
        "it multiplies groups of tokens"),
    "loop: sizes in another order": (lambda x, p: in_a_loop(x, sizes=lambda each: each[::-1], back=True),
                                     "it splits the tokens"),
    "loop: counts of others": (lambda x, p: in_a_loop(x, counts=lambda ids: one_hot(expert_ids(x + 1)), back=True),
                               "it splits the tokens"),
    "loop: joined in another order": (lambda x, p: in_a_loop(x, join=lambda y: torch.cat(y[::-1]), back=True),
                                      "it joins rows of tokens"),
    "loop: one expert left out": (lambda x, p: in_a_loop(x, join=lambda y: torch.cat(y[:-1])), "it joins rows of tokens"),
    "loop: joined with more": (lambda x, p: in_a_loop(x, join=lambda y: torch.cat([*y, TABLE])), "it joins rows of tokens"),
    "loop: joined with others": (
        lambda x, p: in_a_loop(x, join=lambda y: torch.cat([*y[:2], *in_a_loop(x, expert_ids(x + 1), join=list)[2:]]),
                               back=True),
        "it joins rows of tokens"),
    "loop: multiplied by all tokens": (lambda x, p: in_a_loop(x, product=lambda rows, w: rows @ x[0].T),
                                        "with the tokens routed to one expert"),
    "loop: left in the order of the experts": (lambda x, p: in_a_loop(x), "in another order"),
    "experts: ids of other rows": (lambda x, p: expert_linear(
        x[0][routed(x)], EXPERTS, None, expert_ids(x), False), "its rows are not those of the expert ids"),
    "experts: adapters of rows in another order": (
        lambda x, p: adapted_experts(x[0][routed(x)], expert_ids(x)[routed(x)]), "rows of experts' adapters are not the"),
    "experts: adapters that follow from the tokens": (
        lambda x, p: adapted_experts(x[0], expert_ids(x), x[0]), "its rows are not tokens"),
    "4 bits: scales of tokens": (lambda x, p: in_4_bits(x, x[0, :, 0]), "gemm_4bit.*its weights are made of tokens"),
    "4 bits: scales for dequantization": (lambda x, p: x * torch.ops.bitsandbytes.dequantize_4bit(
        CODES, x[0, :, 0], 64, "nf4", [WIDTH, WIDTH], x.dtype)[0], "no rule for bitsandbytes.dequantize_4bit"),
    "4 bits: sum over tokens": (lambda x, p: torch.ops.bitsandbytes.gemv_4bit(
        x.mT, CODES, [WIDTH, WIDTH], SCALE, torch.ones(16), 64), "gemv_4bit.*it sums over the tokens"),
}
#: Of numbers of rows that the caller asks for, (K,).
REFUSED_PICKS = {
    "place: rows asked for": (lambda x, p, k: x[0][k] * k[:, None], "with the places of the tokens"),
    "asked for among sorted rows": (lambda x, p, k: x[0][routed(x)][k], "rows are picked by numbers"),
    "written to the rows asked for": (lambda x, p, k: (x[0] * 1).index_put((k,), x[0][k] * 2), "to the rows of others"),
    "tokens drawn by the numbers of others": (lambda x, p, k: sample_tokens(x[0][k], x[0][k][:, 0], k, k), "with the places"),
}
SERVED = {
    "adapters of each token": lambda x, p: adapted(x),
    "experts with adapters of each token": lambda x, p: adapted_experts(x[0], expert_ids(x)).view(1, -1, 2, WIDTH).sum(2),
    "experts with an adapter of all": lambda x, p: adapted_experts(x[0], expert_ids(x), bits=0).view(1, -1, 2, WIDTH).sum(2),
    "reduction": lambda x, p: x - x.mean(-1, keepdim=True),
    "product": lambda x, p: (x @ WEIGHT, x[0] @ WEIGHT, (WEIGHT @ x.mT).mT, torch.mv(x[0], WEIGHT[0])),
    "slice": lambda x, p: (x[..., 1:], x[:, : x.shape[1]], x[:, 0:]), "convolution": lambda x, p: F.conv1d(x.mT, POINTWISE).mT,
    "batch norm": lambda x, p: F.batch_norm(x[0], TABLE[0], TABLE[1].exp()),
    "place": lambda x, p: (x + TABLE[p], x * p[..., None], x[:, torch.arange(x.shape[1])]),
    "vmap": lambda x, p: (torch.vmap(lambda t, i: t - t.mean() + TABLE[i])(x[0], p[0]), torch.vmap(lambda w: x @ w)(EXPERTS)),
    "bilinear": lambda x, p: F.bilinear(x, x[..., :3].tanh(), KERNEL),
    "instance norm": lambda x, p: F.instance_norm(x[0].view(-1, 2, 4)).view(x.shape),
    "pool": lambda x, p: (F.max_pool1d(x, 2), F.max_pool2d(x[:, None], (1, 2)), F.max_pool1d(x, 2, return_indices=True)[1]),
    "its own memory": lambda x, p: x.new_empty_strided((1, x.shape[1], WIDTH), (0, WIDTH, 1)).copy_(x),
    "order": sorted_and_back, "stored": stored_per_row, "unused": lambda x, p: x if x.mean(1) is not None else p,
    "experts": lambda x, p: by_expert(x),
    "experts by counted ids": lambda x, p: by_expert(x, counts=lambda found, ids: one_hot(ids).sum(0)),
    "experts in a loop": lambda x, p: in_a_loop(x, back=True), "attended": lambda x, p: attended(x),
    "4 bits": lambda x, p: (in_4_bits(x), in_4_bits(x[0], bias=TABLE[0]), F.linear(x, torch.ops.bitsandbytes.dequantize_4bit(
        CODES, SCALE, 64, "nf4", [WIDTH, WIDTH], x.dtype)), torch.ops.bitsandbytes.gemv_4bit(
            x, CODES, [WIDTH, WIDTH], SCALE, torch.ones(16), 64)),
    "a memory": lambda x, p: F.scaled_dot_product_attention(x, TABLE[None], TABLE[None]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_for_what_it_does(name: str) -> None:
    needs(name)
    compute, why = REFUSED[name]
    with pytest.raises(UnsupportedAttention, match=why):
        check(compute)


@pytest.mark.parametrize("name", REFUSED_PICKS)
def test_rows_asked_for(name: str) -> None:
    compute, why = REFUSED_PICKS[name]
    with pytest.raises(UnsupportedAttention, match=why):
        check(compute, torch.tensor([3, 1, 5]))


def test_positions_of_a_length_of_their_own() -> None:
    """In a model without a table of positions, nothing says that the positions are as many as the tokens."""
    with pytest.raises(UnsupportedAttention, match="not known to be that of the row of tokens"):
        check(lambda x, p: x * (p.max() + 1), one_row=False)


def test_rows_asked_for_are_those() -> None:
    check(lambda x, p, k: x[0][k], torch.tensor([3, 1, 5]))


@pytest.mark.parametrize("name", SERVED)
def test_harmless(name: str) -> None:
    needs(name)
    check(SERVED[name])
