"""Tensors that are written to after something was known of their values: it is known no longer, of no tensor of that memory. A
proof that goes on with what they held gives tokens the rows of others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.verify import tokens
from tests.adversarial import mixers
from tests.passes.verify.test_tokens import EXPERTS, WEIGHT, WIDTH, check, expert_ids, routed

Tensor = torch.Tensor


def sorted_into_a_new_one(x: Tensor, p: Tensor) -> Tensor:
    y = torch.zeros(x.shape[1], WIDTH)
    y[:] = x[0][routed(x)]
    return y


def sorted_under_a_view(x: Tensor, p: Tensor) -> Tensor:
    y = torch.zeros(x.shape[1], WIDTH)
    view = y.view(-1, WIDTH)
    y[:] = x[0][routed(x)]
    return view


def two_halves_into_a_new_one(x: Tensor, p: Tensor) -> Tensor:
    y = torch.empty(2 * x.shape[1], WIDTH)
    y[:] = torch.stack([x[0], 2 * x[0]]).flatten(0, 1)
    return y.view(-1, 2, WIDTH).sum(1)


def places_replaced(write: Callable[[Tensor, Tensor], object], by_view: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    def compute(x: Tensor, p: Tensor) -> Tensor:
        order = routed(x)
        back = order.argsort()
        view = back.view(-1)
        write(back, 0 * p[0])
        return x[0][order][view if by_view else back]
    return compute


def by_replaced_ids(x: Tensor, p: Tensor) -> Tensor:
    ids = expert_ids(x)
    counts = mixers.one_hot(ids).sum(0)
    ids[:, 0] = 0
    return mixers.by_expert(x[0], x[0] @ WEIGHT[:, :4], EXPERTS, ids=ids, counts=lambda *_: counts)


def counts_over_what_was_zero(x: Tensor, p: Tensor) -> Tensor:
    ids = expert_ids(x)
    zeros = torch.zeros(ids.shape[0], 4)
    zeros[:, 0] = 2.0
    counts = zeros.scatter(1, ids, 1).sum(0)
    return mixers.by_expert(x[0], x[0] @ WEIGHT[:, :4], EXPERTS, ids=ids, counts=lambda *_: counts)


def added_to_an_inverse(x: Tensor, p: Tensor) -> Tensor:
    order = routed(x)
    back = torch.full_like(order, -2).index_put_((order,), torch.arange(order.shape[0]), accumulate=True)
    return x[0][order][back]


def shifted_under_a_view(x: Tensor, p: Tensor) -> Tensor:
    """By what all tokens decide."""
    y = p * 1
    view = y.view(-1)
    view >>= p.amax() % 2
    return x + y[..., None]


def sorted_into_given_tensors(x: Tensor, p: Tensor) -> Tensor:
    values, order = x * 1, torch.zeros(x.shape, dtype=torch.int64)
    view = values.view(1, -1, WIDTH)
    torch.sort(x, dim=1, out=(values, order))
    return view


REFUSED = {
    "added to an inverse": (added_to_an_inverse, "with the places of the tokens"),
    "shifted under a view": (shifted_under_a_view, "is written into another tensor"),
    "sorted into given tensors": (sorted_into_given_tensors, "is written into another tensor"),
    "sorted into a new tensor": (sorted_into_a_new_one, "to the rows of others"),
    "sorted under a view": (sorted_under_a_view, "to the rows of others"),
    "two halves into a new tensor": (two_halves_into_a_new_one, "to the rows of others"),
    "places: a slice": (places_replaced(lambda back, by: back.__setitem__(slice(None), by)), "picked by numbers"),
    "places: a view of them": (places_replaced(lambda back, by: back.view(-1).copy_(by)), "picked by numbers"),
    "places: under a view": (places_replaced(lambda back, by: back.copy_(by), by_view=True), "picked by numbers"),
    "experts: ids": (by_replaced_ids, "not those routed to one"),
    "experts: zeros": (counts_over_what_was_zero, "it is taken over the tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    compute, why = REFUSED[name]
    with pytest.raises(UnsupportedAttention, match=why):
        check(compute)


def new_by_parts(x: Tensor, p: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[..., :3] = x[..., -3:]
    y[..., 3:] = x[..., :-3].tanh()
    return y


@pytest.mark.parametrize("name", ["shifted under a view", "sorted into given tensors"])
def test_writes_that_no_table_knows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof runs each operation, and so sees writes in spellings that other passes do not know."""
    monkeypatch.setattr(tokens, "written_by", lambda node: [])
    compute, why = REFUSED[name]
    with pytest.raises(UnsupportedAttention, match=why):
        check(compute)


def test_rows_of_their_own_are_served() -> None:
    check(new_by_parts)
    check(lambda x, p: torch.zeros_like(x[0][routed(x)]).copy_(x[0][order := routed(x)])[order.argsort()])
