"""Attention whose products are torch.einsum, as much research code writes it: served with its own numbers, or refused."""

from __future__ import annotations

import pytest
import torch

from quire.attn_ops.backend import UnsupportedAttention
from tests.passes.models import served, trace
from tests.passes.rewrite.test_raise_written import TOLERANCE, hidden, model


def einsums(scores: str, values: str, *, tokens_first: bool = False, keys_first: bool = False, listed: bool = False):
    """An ``attend`` for ``Written``."""

    def multiply(equation, x, y):
        return torch.einsum(equation, [x, y]) if listed else torch.einsum(equation, x, y)

    def attend(q, k, v, see):
        if tokens_first:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found = multiply(scores, *((k, q) if keys_first else (q, k)))
        out = multiply(values, (found * 0.5 + hidden(see)).softmax(-1), v)
        return out.transpose(1, 2) if tokens_first else out

    return attend


def grouped(scores: str, values: str, *, tokens_first: bool = False, keys_first: bool = False):
    """An ``attend`` of queries (1, 2, 2, S, D), or (1, S, 2, 2, D), to two key heads."""

    def attend(q, k, v, see):
        q, k, v = q.unflatten(1, (2, 2)), k[:, :2], v[:, :2]
        if tokens_first:
            q, k, v = q.movedim(3, 1), k.transpose(1, 2), v.transpose(1, 2)
        found = torch.einsum(scores, *((k, q) if keys_first else (q, k)))
        out = torch.einsum(values, (found * 0.5 + hidden(see)).softmax(-1), v)
        return (out.movedim(1, 3) if tokens_first else out).flatten(1, 2)

    return attend


@pytest.mark.parametrize("attend", [
    grouped("bkgtd,bksd->bkgts", "bkgts,bksd->bkgtd"),
    grouped("btkgd,bskd->bkgts", "bkgts,bskd->btkgd", tokens_first=True),
    grouped("bksd,bkgtd->bkgts", "bkgts,bksd->bkgtd", keys_first=True),
    einsums("...qd,...kd->...qk", "... q k, ... k d -> ... q d"),
    einsums("b...qd,b...kd->b...qk", "b...qk,b...kd->b...qd"),
    einsums("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd"),
    einsums("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", tokens_first=True),
    einsums("b h i d, b h j d -> b h i j", "b h i j, b h j d -> b h i d", listed=True),
    einsums("bhjd,bhid->bhij", "bhij,bhjd->bhid", keys_first=True),
    lambda q, k, v, see: (torch.einsum("bhid,bhdj->bhij", q, k.mT) * 0.5 + hidden(see)).softmax(-1) @ v,
])
def test_served(attend) -> None:
    served_model = model(attend)
    graph = trace(served_model)
    assert [(s.scale, s.causal) for s in graph.sites] == [(0.5, True)] * 2
    left = {getattr(n.target, "__name__", n.target) for n in graph.raised.graph.nodes}
    assert left.isdisjoint({"einsum", "matmul", "softmax"})
    assert served(graph, served_model) <= TOLERANCE


def over_queries(q, k, v, see):
    """Each value is weighted by the column of its query."""
    weights = (torch.einsum("bhid,bhjd->bhij", q, k) + hidden(see)).softmax(-1)
    return torch.einsum("bhij,bhid->bhjd", weights, v)


def sum_of_key_heads(q, k, v, see):
    return (torch.einsum("bhid,bgjd->bhij", q, k) + hidden(see)).softmax(-1) @ v


def sum_expanded(q, k, v, see):
    """The keys have one number, which meets each of the query's."""
    return (torch.einsum("bhid,bhjd->bhij", q, k[..., :1]) + hidden(see)).softmax(-1) @ v


def sum_of_a_group(q, k, v, see):
    scores = torch.einsum("bkgtd,bksd->bkts", q.unflatten(1, (2, 2)), k[:, :2])
    return ((scores + hidden(see)).softmax(-1) @ v[:, :2]).repeat(1, 2, 1, 1)


def keys_in_groups(q, k, v, see):
    """Each query head has the keys of two."""
    scores = torch.einsum("bktd,bkgsd->bkgts", q[:, :2], k.unflatten(1, (2, 2)))
    return torch.einsum("bkgts,bkgsd->bkgtd", (scores + hidden(see)).softmax(-1), v.unflatten(1, (2, 2))).flatten(1, 2)


def diagonal(q, k, v, see):
    return (torch.einsum("bhid,bhjd->bhij", q, k) + hidden(see)).softmax(-1) @ torch.einsum("bhii,bhid->bhid", q @ k.mT, v)


def head_left_out(q, k, v, see):
    weights = (torch.einsum("bhid,bhjd->bhij", q, k) + hidden(see)).softmax(-1)
    return torch.einsum("bhij,bhjd->bid", weights, v)[:, None].expand_as(q)


def bfloat16(q, k, v, see):
    """As autocast does: the products have another dtype than what they multiply."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = (torch.einsum("bhid,bhjd->bhij", q, k) + hidden(see)).softmax(-1)
    return weights.float() @ v


def of_each_head(q, k, v, see):
    def head(q, k, v):
        return torch.einsum("bij,bjd->bid", (torch.einsum("bid,bjd->bij", q, k) + hidden(see)).softmax(-1), v)

    return torch.vmap(head, in_dims=1, out_dims=1)(q, k, v)


@pytest.mark.parametrize("attend", [
    over_queries, sum_of_key_heads, sum_expanded, diagonal, head_left_out, bfloat16, of_each_head,
    sum_of_a_group, keys_in_groups])
def test_refused(attend) -> None:
    graph = trace(model(attend))  # the plain way works
    with pytest.raises(UnsupportedAttention):
        _ = graph.sites
