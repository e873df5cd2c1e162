"""Which of the tensors that a forward returns are the logits: the wrong one would be sampled from, without a word."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import nn

from quire import UnsupportedAttention
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions
from tests.passes.models import HIDDEN, VOCAB, Attention, Tiny
from tests.zoo.configs import SERVED, Served, build

pytestmark = pytest.mark.usefixtures("tokens_unchecked")

EAGER = QuireOptions(compiler="eager")
Out = collections.namedtuple("Out", "hidden logits")


class Opaque:
    """Dynamo makes it, quire does not look into it."""

    def __init__(self, held) -> None:
        self.held = held


@dataclasses.dataclass
class WithLogits:
    hidden: torch.Tensor
    logits: torch.Tensor


class Returns(Tiny):
    """``make(hidden (1, T, HIDDEN), logits (1, T, VOCAB))`` makes what is returned."""

    def __init__(self, make) -> None:
        super().__init__(Attention(4, 2, is_causal=True))
        self.make = make
        self.eval()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor):
        x = self.embed(input_ids) + self.place(position_ids)
        x = x + self.layers[0](x, position_ids, {})
        return self.make(x, self.head(x))


class Named(Returns):
    """Its embedding can be asked for, so that its vocabulary is known."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


@pytest.mark.parametrize("kind, make", [
    (Returns, lambda hidden, logits: (logits,)),
    (Returns, lambda hidden, logits: (logits, None, 1.5, "x")),
    (Returns, lambda hidden, logits: (logits, hidden.mean())),  # a loss
    (Named, lambda hidden, logits: (logits, hidden.mean(), logits.argmax(-1))),  # and ids
    (Named, lambda hidden, logits: (logits, [(hidden.unflatten(-1, (4, -1)), hidden.unflatten(-1, (4, -1)))])),  # a cache
    (Named, lambda hidden, logits: (logits,)),
    (Returns, lambda hidden, logits: Out(hidden, logits)),
    (Returns, lambda hidden, logits: WithLogits(hidden, logits)),
    (Named, lambda hidden, logits: (logits, hidden)),
    (Named, lambda hidden, logits: (logits, {"all": [hidden, hidden]}, Opaque(hidden))),
])
def test_the_logits_are_taken(kind, make) -> None:
    paged = PagedModel(kind(make), EAGER)
    assert paged.num_logits == VOCAB != HIDDEN


@pytest.mark.parametrize("kind, make, why", [
    (Returns, lambda hidden, logits: (hidden, logits), "knows no vocabulary of the model"),
    (Returns, lambda hidden, logits: (logits, hidden), "knows no vocabulary of the model"),
    (Returns, lambda hidden, logits: (hidden, [logits]), "knows no vocabulary of the model"),
    (Returns, lambda hidden, logits: (hidden, {"logits": logits}), "knows no vocabulary of the model"),
    (Returns, lambda hidden, logits: (hidden, logits[0]), "knows no vocabulary of the model"),
    (Returns, lambda hidden, logits: (hidden, logits[0, -1]), "knows no vocabulary of the model"),
    (Returns, lambda hidden, logits: (hidden, Out(None, logits)), "knows no vocabulary of the model"),
    (Returns, lambda hidden, logits: (hidden, Opaque(logits)), "knows no vocabulary of the model"),
    (Returns, lambda hidden, logits: (hidden, logits[:, :, None]), "knows no vocabulary of the model"),  # of several heads
    (Returns, lambda hidden, logits: (hidden, logits.mT), "knows no vocabulary of the model"),
    (Returns, lambda hidden, logits: (hidden, logits.argmax(-1)), "knows no vocabulary of the model"),
    (Named, lambda hidden, logits: (hidden,), "not the first member alone is as wide"),
    (Named, lambda hidden, logits: (hidden, None), "not the first member alone is as wide"),
    (Named, lambda hidden, logits: (hidden.mean(), logits), "not the first member alone is as wide"),
    (Named, lambda hidden, logits: (hidden, logits), "not the first member alone is as wide"),
    (Named, lambda hidden, logits: (hidden, Opaque(logits)), "not the first member alone is as wide"),
    (Named, lambda hidden, logits: (logits * 0, logits), "not the first member alone is as wide"),
    (Returns, lambda hidden, logits: (None, logits), "does not begin with the logits"),
    (Returns, lambda hidden, logits: ((hidden, logits), None), "does not begin with the logits"),
    (Returns, lambda hidden, logits: {"logits": logits}, "its result has no logits"),
    (Returns, lambda hidden, logits: (), "its result has no logits"),
])
def test_what_may_be_something_else_is_refused(kind, make, why) -> None:
    with pytest.raises(UnsupportedAttention, match=why):
        PagedModel(kind(make), EAGER)


class Around(nn.Module):
    """A module around a model of transformers that asks it for a tuple: the logits, and hidden states."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor):
        options = dict(use_cache=False, return_dict=False, output_hidden_states=True)
        return self.inner(input_ids, position_ids=position_ids, **options)


def test_tuples_of_transformers() -> None:
    model = build(Served("LlamaConfig", {**SERVED["llama"].options, "num_hidden_layers": 1, "vocab_size": 96}))
    assert PagedModel(Around(model), EAGER).num_logits == model.config.vocab_size != model.config.hidden_size
