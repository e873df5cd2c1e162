"""Attention that is written out as products and a softmax: what is served, with which numbers, and what is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quire.attn_ops.backend import UnsupportedAttention
from tests.passes.models import DIM, HIDDEN, Tiny, served, trace

# Both sides compute in float32, in sums of up to 22 numbers of order 1; eps is 1.2e-7. A wrong mask gives 1e-1.
TOLERANCE = 1e-5
HEADS = 4
Attend = Callable[..., torch.Tensor]


class Written(nn.Module):
    """A layer that calls ``attend(q, k, v, see)``: queries, keys and values (1, H, S, D), and what each token sees (S, S)."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.qkv, self.out = attend, nn.Linear(HIDDEN, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, HIDDEN)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        q, k, v = (t.view(1, -1, HEADS, DIM).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        see = position_ids[0, :, None] >= position_ids[0, None, :]
        return self.out(self.attend(q, k, v, see).transpose(1, 2).reshape(1, -1, HEADS * DIM))


def model(attend: Attend) -> Tiny:
    return Tiny(Written(attend), Written(attend)).eval()


def hidden(see: torch.Tensor) -> torch.Tensor:
    return torch.where(see, 0.0, torch.finfo(torch.float32).min)


def gpt_j(q, k, v, see):
    scores = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-1, -2)) / math.sqrt(DIM) + hidden(see)
    return torch.matmul(F.dropout(F.softmax(scores, dim=-1).to(v.dtype), 0.1, training=False), v)


def gpt_neo(q, k, v, see):
    """A local layer: not scaled, and two masks, of which one is stored."""
    local = torch.ones(64, 64, dtype=torch.bool).tril().triu(-4)[: q.shape[2], : q.shape[2]]
    scores = torch.where(local, q @ k.mT, torch.tensor(torch.finfo(q.dtype).min)) + hidden(see)
    return scores.softmax(-1) @ v


def code_gen(q, k, v, see):
    """Scaled after the mask."""
    return F.softmax((q @ k.transpose(2, 3) + hidden(see)) / 2, -1) @ v


def gpt_neox_japanese(q, k, v, see):
    """Of matrices without a batch, views between."""
    n = q.shape[2]
    scores = torch.baddbmm(torch.zeros(HEADS, n, n), q.view(HEADS, n, DIM), k.view(HEADS, n, DIM).transpose(1, 2), alpha=0.5)
    scores = scores.view(1, HEADS, n, n).masked_fill(~see, -math.inf)
    return torch.bmm(scores.softmax(dim=3).view(HEADS, n, n), v.reshape(HEADS, n, DIM)).view(1, HEADS, n, DIM)


def one_key_head(q, k, v, see):
    return torch.where(~see, -math.inf, 0.5 * (q @ k[:, :1].mT)).softmax(-1) @ v[:, :1]


def xglm(q, k, v, see):
    """What two masks hide together is brought back to the least number."""
    scores = torch.max(q @ k.mT * 0.5 + hidden(see), torch.tensor(torch.finfo(torch.float32).min))
    return torch.maximum(torch.full((), -math.inf), scores).softmax(-1) @ v


def capped(q, k, v, see):
    """As Gemma 2 does it."""
    return ((q @ k.mT * 0.5 / 5.0).tanh() * 5.0 + hidden(see)).softmax(-1) @ v


def capped_and_scaled(q, k, v, see):
    return ((torch.tanh(q @ k.mT / 5) * 2.5 + hidden(see)) * 2).softmax(-1) @ v


def repeated(q, k, v, see):
    """Two key heads, repeated for four."""
    k, v = (x[:, :2].repeat_interleave(2, dim=1) for x in (k, v))
    return (q @ k.transpose(-2, -1) * 0.5 + hidden(see)).softmax(-1) @ v


def in_groups(q, k, v, see, *, of_keys=2, of_values=2, masks=lambda see: see):
    """Queries (1, 2, 2, S, D); the heads of keys and values are along the first of these, or the second."""
    scores = q.unflatten(1, (2, 2)) @ k[:, :2].unsqueeze(of_keys).mT * 0.5
    weights = scores.masked_fill(~masks(see), -math.inf).softmax(-1)
    return (weights @ v[:, :2].unsqueeze(of_values)).flatten(1, 2)


def in_turns(q, k, v, see):
    return in_groups(q, k, v, see, of_keys=1, of_values=1)


def values_in_turns(q, k, v, see):
    return in_groups(q, k, v, see, of_values=1)


def in_groups_with_mask(q, k, v, see):
    """With a mask of five dimensions."""
    return in_groups(q, k, v, see, masks=lambda see: see[None, None, None])


class Attribute(nn.Module):
    """A scale that the module holds as a number, and one as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.other = 0.125, nn.Buffer(torch.tensor(0.25))

    def forward(self, q, k, v, see):
        return (q @ k.mT * self.scale / self.other + hidden(see)).softmax(-1) @ v


KEY_HEADS = {one_key_head: 1, repeated: 2, in_groups: 2, in_groups_with_mask: 2}


@pytest.mark.parametrize("attend, scale, window", [
    (Attribute(), 1.0, None),
    (gpt_j, 0.5, None), (gpt_neo, 1.0, 5), (code_gen, 0.5, None), (gpt_neox_japanese, 0.5, None), (one_key_head, 0.5, None),
    (repeated, 0.5, None), (xglm, 0.5, None), (in_groups, 0.5, None), (in_turns, 0.5, None), (values_in_turns, 0.5, None),
    (in_groups_with_mask, 0.5, None)])
def test_served(attend: Attend, scale: float, window: int | None) -> None:
    served_model = model(attend)
    graph = trace(served_model)
    assert [(s.scale, s.window, s.causal) for s in graph.sites] == [(scale, window, True)] * 2
    assert {s.num_kv_heads for s in graph.sites} == {KEY_HEADS.get(attend, HEADS)}
    assert {getattr(n.target, "__name__", n.target) for n in graph.raised.graph.nodes}.isdisjoint({"softmax", "matmul", "bmm"})
    assert served(graph, served_model) <= TOLERANCE


# What is no attention of that kind.


def replaced_by_zero(q, k, v, see):
    """An added 0 leaves a score as it is, one in its place does not."""
    scores = (q @ k.mT).masked_fill(~see, -math.inf)
    return torch.where(see & ~see.tril(-3), scores, 0.0).masked_fill(~see, -math.inf).softmax(-1) @ v


def replaced_by_scores(q, k, v, see):
    other = (k @ q.mT).masked_fill(~see, -math.inf)
    return torch.where(see.tril(-1), q @ k.mT, other).softmax(-1) @ v


def not_low(q, k, v, see):
    return (q @ k.mT).masked_fill(~see, -1e4).softmax(-1) @ v


def bounded(q, k, v, see):
    return torch.max(q @ k.mT + hidden(see), torch.tensor(-1e4)).softmax(-1) @ v


def bounded_above(q, k, v, see):
    return torch.min(q @ k.mT + hidden(see), torch.tensor(torch.finfo(torch.float32).min)).softmax(-1) @ v


def capped_after_a_mask(q, k, v, see):
    return (torch.tanh(q @ k.mT + hidden(see)) * 20).softmax(-1) @ v


def capped_twice(q, k, v, see):
    return (torch.tanh(torch.tanh(q @ k.mT) * 2) * 3 + hidden(see)).softmax(-1) @ v


class LearnedCap(nn.Module):
    """No number that a backend could be given."""

    def __init__(self) -> None:
        super().__init__()
        self.cap = nn.Parameter(torch.tensor(3.0))

    def forward(self, q, k, v, see):
        return (torch.tanh(q @ k.mT) * self.cap + hidden(see)).softmax(-1) @ v


def a_bias(q, k, v, see):
    ahead = torch.arange(q.shape[2]) - torch.arange(q.shape[2])[:, None]
    return (q @ k.mT + ahead * 0.1 + hidden(see)).softmax(-1) @ v


def other_sink(q, k, v, see):
    scores = torch.cat([q @ k.mT + hidden(see), torch.ones(1, HEADS, q.shape[2], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


def over_queries(q, k, v, see):
    return (q @ k.mT + hidden(see)).softmax(-2) @ v


def weights_read_twice(q, k, v, see):
    weights = (q @ k.mT + hidden(see)).softmax(-1)
    return weights @ v + weights.amax(-1, keepdim=True)


def written_between(q, k, v, see):
    scores = q @ k.mT + hidden(see)
    v = v.clone()
    weights = scores.softmax(-1)
    v *= 2
    return weights @ v


def extreme(q, k, v, see):
    return ((q @ k.mT + hidden(see)) / 1e9).softmax(-1) @ v


def negative(q, k, v, see):
    return ((q @ k.mT + hidden(see)) * -1.0).softmax(-1) @ v


def low_in_half(q, k, v, see):
    """The least float16, which a scale of 1e-6 brings among the scores."""
    scores = (q.half() @ k.half().mT + torch.where(see, 0.0, -65504.0).half()) * 1e-6
    return (scores.softmax(-1) @ v.half()).float()


def low_in_half_alone(q, k, v, see):
    """Not low among scores in float32."""
    return (q @ k.mT + torch.where(see, 0.0, -65504.0).half()).softmax(-1) @ v


def more_value_heads(q, k, v, see):
    return (q[:, :1] @ k[:, :1].mT + hidden(see)).softmax(-1) @ v


def of_two_orders(q, k, v, see):
    """Scores of keys over queries."""
    return (k @ q.mT + hidden(see)).softmax(-2).mT.softmax(-1) @ v


def low_changed(q, k, v, see):
    low = torch.tensor(-math.inf)
    low.fill_(0.0)
    return torch.where(see, q @ k.mT, low).softmax(-1) @ v


def low_of_another_dtype(q, k, v, see):
    return torch.where(see, q @ k.mT, torch.tensor(-math.inf, dtype=torch.bool)).softmax(-1) @ v


def narrower_than_values(q, k, v, see):
    return (q.half() @ k.half().mT).float().masked_fill(~see, -math.inf).softmax(-1) @ v


def scaled_away(q, k, v, see):
    """Each number is ordinary, their product brings the least float32 among the scores."""
    scores = q @ k.mT + hidden(see)
    for _ in range(7):
        scores = scores * 1e-6
    return scores.softmax(-1) @ v


def scaled_away_and_back(q, k, v, see):
    scores = q @ k.mT * 1e6 + hidden(see)
    return (scores * 1e-6 * 1e-6).softmax(-1) @ v


def rounded_scores(q, k, v, see):
    return ((q @ k.mT).bfloat16().float() + hidden(see)).softmax(-1) @ v


def rounded_weights(q, k, v, see):
    return (q @ k.mT + hidden(see)).softmax(-1).bfloat16().float() @ v


def rounded_by_softmax(q, k, v, see):
    return F.softmax(q @ k.mT + hidden(see), -1, dtype=torch.float16).float() @ v


def rounded_to_eight_bits(q, k, v, see):
    return (q @ k.mT + hidden(see)).softmax(-1).to(torch.float8_e4m3fn).float() @ v


def rounded_to_integers(q, k, v, see):
    return (q @ k.mT + hidden(see)).softmax(-1).int().float() @ v


def bits_as_other_numbers(q, k, v, see):
    return (((q.half() @ k.half().mT).view(torch.bfloat16).float() + hidden(see)).softmax(-1).half() @ v.half()).float()


def shown_again(q, k, v, see):
    """A second mask raises some of what the first one hides."""
    again = torch.where(~see & (see.cumsum(-1) < 3), -torch.finfo(torch.float32).min, 0.0)
    return ((q @ k.mT).masked_fill(~see, torch.finfo(torch.float32).min) + again).softmax(-1) @ v


def all_shown_again(q, k, v, see):
    low = torch.finfo(torch.float32).min
    return (q @ k.mT + torch.where(see, 0.0, low) + torch.where(see, 0.0, -low)).softmax(-1) @ v


def masks_of_groups(q, k, v, see):
    return in_groups(q, k, v, see, masks=lambda see: torch.stack([see, see.triu(-2)])[:, None])


def active_dropout(q, k, v, see):
    return F.dropout((q @ k.mT + hidden(see)).softmax(-1), 0.1, training=True) @ v


@pytest.mark.parametrize("attend", [
    replaced_by_zero, replaced_by_scores, bounded, bounded_above, not_low, a_bias, other_sink, over_queries,
    capped_after_a_mask, capped_twice, LearnedCap(), weights_read_twice, extreme, negative, low_in_half, low_in_half_alone,
    more_value_heads, of_two_orders, low_changed, low_of_another_dtype, narrower_than_values, scaled_away,
    scaled_away_and_back, rounded_scores, rounded_weights, rounded_by_softmax, rounded_to_eight_bits, rounded_to_integers,
    bits_as_other_numbers, shown_again, all_shown_again, masks_of_groups, active_dropout])
def test_refused(attend: Attend) -> None:
    graph = trace(model(attend))  # the plain way works
    with pytest.raises(UnsupportedAttention):
        _ = graph.sites


def test_changes_in_place_between_are_refused() -> None:
    """The call would read q, k and v where their product was, or later."""
    graph = trace(model(written_between))
    with pytest.raises(UnsupportedAttention, match="no attention was found"):
        _ = graph.sites


@pytest.mark.parametrize("attend, scale, cap", [
    (capped, 0.5, 5.0), (capped_and_scaled, 1.0, 5.0),
    (lambda q, k, v, see: (torch.tanh(q @ k.mT) + hidden(see)).softmax(-1) @ v, 1.0, 1.0)])
def test_softcap(attend: Attend, scale: float, cap: float) -> None:
    served_model = model(attend)
    graph = trace(served_model)
    assert [(s.scale, s.softcap, s.causal) for s in graph.sites] == [(scale, cap, True)] * 2
    assert served(graph, served_model) <= TOLERANCE


def test_one_refusal_says_why_and_leaves_the_graph() -> None:
    graph = trace(Tiny(Written(gpt_j), Written(a_bias)).eval())
    before = str(graph.gm.graph)
    with pytest.raises(UnsupportedAttention, match=r"layers\.1.*its mask is not proven to be one of positions"):
        _ = graph.sites
    assert str(graph.gm.graph) == before
