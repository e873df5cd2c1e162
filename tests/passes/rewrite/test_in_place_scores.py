"""Attention whose scores are scaled and masked in place, as books and small models write it: served with the same numbers."""

from __future__ import annotations

import math

import pytest
import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.rewrite.in_place_scores import change_scores_out_of_place
from tests.passes.models import DIM, capture, served, trace
from tests.passes.rewrite.test_raise_written import HEADS, TOLERANCE, hidden, model


def filled(q, k, v, see):
    scores = q @ k.transpose(2, 3)
    scores.masked_fill_(~see, -torch.inf)
    return torch.softmax(scores / math.sqrt(DIM), dim=-1) @ v


def of_einsum(q, k, v, see):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
    scores /= 2
    scores += hidden(see)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def chained(q, k, v, see):
    return (q @ k.mT).mul_(0.5).add_(hidden(see)).softmax(-1) @ v


def picked(q, k, v, see):
    scores = q @ k.mT * 0.5
    scores[~see.expand(1, HEADS, -1, -1)] = -torch.inf
    return scores.softmax(-1) @ v


def one_head_each(q, k, v, see):
    heads = []
    for head in range(HEADS):
        scores = q[:, head] @ k[:, head].mT
        scores *= 0.5
        heads.append(scores.masked_fill_(~see, -math.inf).softmax(-1) @ v[:, head])
    return torch.stack(heads, 1)


def viewed_after(q, k, v, see):
    """A view of what is there after the last change."""
    scores = q[0] @ k[0].mT
    scores *= 0.5
    scores += hidden(see)
    return (scores.unsqueeze(0).softmax(-1) @ v).view(1, HEADS, -1, DIM)


@pytest.mark.parametrize("attend", [filled, of_einsum, chained, picked, one_head_each, viewed_after])
def test_served(attend) -> None:
    served_model = model(attend)
    graph = trace(served_model)
    assert {(s.scale, s.window, s.causal) for s in graph.sites} == {(0.5, None, True)}
    assert len(graph.sites) == 2 * (HEADS if attend is one_head_each else 1)
    assert served(graph, served_model) <= TOLERANCE


def test_weights_that_nobody_reads_are_no_reader() -> None:
    """A layer may average the weights of its heads for a caller that does not want them."""
    def averaged(q, k, v, see):
        weights = (q @ k.mT * 0.5 + hidden(see)).softmax(-1)
        weights.mean(1).detach()
        return weights @ v

    served_model = model(averaged)
    graph = trace(served_model)
    assert len(graph.sites) == 2 and served(graph, served_model) <= TOLERANCE


# What another name of the memory sees, or keeps.


def through_a_view(q, k, v, see):
    """The view sees a change that is made through another name."""
    scores = q @ k.mT
    view = scores.view(1, HEADS, *scores.shape[2:])
    scores += hidden(see)
    return view.softmax(-1) @ v


def through_a_part(q, k, v, see):
    scores = q @ k.mT + hidden(see)
    scores[:, 0] *= 2
    return scores.softmax(-1) @ v


def read_before(q, k, v, see):
    """What was read before the change is added after it."""
    scores = q @ k.mT + hidden(see)
    before = scores.softmax(-1)
    scores *= 2
    return before @ v + scores.softmax(-1) @ v * 0.0 + (before - scores.softmax(-1)) @ v


def into_what_is_added(q, k, v, see):
    """The mask, and not the scores, is changed in place."""
    mask = hidden(see) * 1.0
    scores = q @ k.mT + mask
    mask += 1
    return (scores + mask).softmax(-1) @ v


def between_two_names(q, k, v, see):
    scores = q @ k.mT
    scores += hidden(see)
    half = scores[:, :, :, :]
    scores *= 0.5
    return (half + scores).softmax(-1) @ v


def in_half(q, k, v, see):
    """In place the result keeps its dtype."""
    scores = (q.half() @ k.half().mT).float().half()
    scores += hidden(see)
    return (scores.softmax(-1) @ v.half()).float()


OTHERS = [through_a_view, through_a_part, read_before, into_what_is_added, between_two_names, in_half]


@pytest.mark.parametrize("attend", OTHERS)
def test_refused(attend) -> None:
    graph = trace(model(attend))
    with pytest.raises(UnsupportedAttention):
        _ = graph.sites


@pytest.mark.parametrize("attend, changes", [
    (filled, 1), (of_einsum, 2), (chained, 2), (picked, 1), (one_head_each, 2 * HEADS), (viewed_after, 2), (read_before, 1),
    (through_a_view, 0), (through_a_part, 0), (into_what_is_added, 1), (between_two_names, 0), (in_half, 0)])
def test_the_same_numbers_out_of_place(attend, changes: int) -> None:
    def of_one(x):
        place = torch.arange(x.shape[2])
        return attend(x, x.flip(-1), x * 2, place[:, None] >= place)

    torch._dynamo.reset()
    x = torch.randn(1, HEADS, 9, DIM)
    torch._dynamo.mark_dynamic(x, 2)
    expected = of_one(x)
    graph, inputs = capture(of_one, x)
    assert change_scores_out_of_place(graph.graph) == changes
    graph.graph.lint()
    graph.recompile()
    (out,) = graph(*[9 if isinstance(x, (int, torch.SymInt)) else x for x in inputs])
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
