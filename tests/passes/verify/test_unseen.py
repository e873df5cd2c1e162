"""Refusals of models without an attention that quire sees: who reads them must learn which line of the model to change."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions
from tests.passes.models import HIDDEN, Tiny, trace
from tests.passes.rewrite.test_raise_written import Written, hidden


class Whole(nn.Module):
    """A layer of torch's that attends inside, in bfloat16."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, x, position_ids, extra):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


def capped(q, k, v, see):
    return (torch.asinh(q @ k.mT) + hidden(see)).softmax(-1) @ v


def over_queries(q, k, v, see):
    return (q @ k.mT + hidden(see)).softmax(-2) @ v


def one_more(q, k, v, see):
    return F.softmax(F.pad(q @ k.mT + hidden(see), (1, 0)), -1)[..., 1:] @ v


def rounded(q, k, v, see):
    return (q @ k.mT + hidden(see)).softmax(-1, dtype=torch.bfloat16).float() @ v


def transposed(q, k, v, see):
    return (q @ k.mT + hidden(see)).softmax(-1).mT @ v


def read_twice(q, k, v, see):
    weights = (q @ k.mT + hidden(see)).softmax(-1)
    return weights @ v + weights.amax(-1, keepdim=True)


def linear(q, k, v, see):
    return (q @ k.mT) * see @ v


def key_heads(q, k, v, see):
    return (torch.einsum("bhid,bgjd->bhij", q, k) + hidden(see)).softmax(-1) @ v


def not_low(q, k, v, see):
    return (q @ k.mT).masked_fill(~see, -1e9).softmax(-1) @ v


def chosen(q, k, v, see):
    return torch.where(see, q @ k.mT, torch.tensor(-1e4)).softmax(-1) @ v


OUTWEIGHED = ", which a lower score would outweigh (-math.inf hides a key, and so does torch.finfo(torch.float32).min)"


@pytest.mark.parametrize("attend, step", [
    (not_low, f"masked_fill by -1e+09{OUTWEIGHED}"), (chosen, f"where by -10000{OUTWEIGHED}"),
    (capped, "asinh"), (over_queries, "softmax over dimension -2 (the keys are the last)"), (one_more, "pad"),
    (rounded, "softmax to torch.bfloat16"), (transposed, "mT"), (read_twice, "softmax, whose result is read 2 times"),
    (linear, "mul"), (key_heads, "einsum")])
def test_the_step_is_named(attend, step: str) -> None:
    line = attend.__code__.co_firstlineno + 1
    graph = trace(Tiny(Written(attend)).eval())
    with pytest.raises(UnsupportedAttention, match="no attention was found: the model multiplies all tokens with all, but not "
                       + re.escape(f"as softmax(q @ k.mT * scale + mask) @ v: quire does not follow the step {step} (layers.0; "
                                   f'File "test_unseen.py", line {line}: ')):
        _ = graph.sites


def test_a_change_in_place_beside_the_chain_is_named() -> None:
    """Nothing is wrong with the chain itself."""
    def attend(q, k, v, see):
        scores = q @ k.mT + hidden(see)
        v.mul_(2)
        return scores.softmax(-1) @ v

    graph = trace(Tiny(Written(attend)).eval())
    with pytest.raises(UnsupportedAttention, match="does not follow the step mul_, which changes a tensor in place"):
        _ = graph.sites


def test_layers_of_torch_are_named() -> None:
    graph = trace(Tiny(Whole(nn.MultiheadAttention(HIDDEN, 2, batch_first=True))).eval())
    with pytest.raises(UnsupportedAttention, match=r"found: nn.MultiheadAttention \(layers.0.inner; File .* no torch.autocast"):
        _ = graph.sites


def test_flex_attention_is_named() -> None:
    def attend(q, k, v, see):
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -math.inf))

    with pytest.raises(UnsupportedAttention, match=r"no attention was found: flex_attention \(layers.0; File .* Call F.sca"):
        _ = trace(Tiny(Written(attend)).eval()).sites


def test_a_scale_by_the_length_is_named_and_not_the_mask_behind_it() -> None:
    """The trace is then for one length, and what the mask counts looks like positions of the model's own."""
    def attend(q, k, v, see):
        n = q.shape[2]
        see = torch.arange(n)[:, None] >= torch.arange(n)
        return (q @ k.mT * math.log(n + 1)).masked_fill(~see, -math.inf).softmax(-1) @ v

    with pytest.raises(UnsupportedAttention, match="takes the length of the row as a plain number"):
        PagedModel(Tiny(Written(attend), Written(attend)).eval(), QuireOptions(compiler="eager"))


def test_a_mask_of_the_length_is_not_one_of_token_ids() -> None:
    def attend(q, k, v, see):
        at = torch.linspace(0, 1, q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=at[:, None] >= at)

    with pytest.raises(UnsupportedAttention, match="it uses linspace, which is not known to keep to positions"):
        _ = trace(Tiny(Written(attend)).eval()).sites
