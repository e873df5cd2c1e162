"""Models whose config and methods do not say which of their tables token ids look up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import quire
from quire import UnsupportedAttention
from tests.adversarial.counting import BLOCK, GPT, numbers
from tests.adversarial.harness import VOCAB, WIDTH
from tests.adversarial.test_counting import engine

IDS = 20  # rows of the table that token ids look up


class Lecture(GPT):
    """In the style of a lecture: a vocabulary shorter than the block. ``look_up(model, ids)``: the embeddings of tokens."""

    def __init__(self, look_up: Callable[[Any, torch.Tensor], torch.Tensor], head: int = IDS) -> None:
        super().__init__()
        self.look_up = look_up
        self.wte, self.lm_head = nn.Embedding(IDS, WIDTH), nn.Linear(WIDTH, head)
        self.eval()

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.look_up(self, idx) + self.wpe(numbers(idx))
        for layer in self.h:
            x = x + layer(x)
        return self.lm_head(self.norm(x)), None


LOOK_UPS = {"a module": lambda m, ids: m.wte(ids), "by int32": lambda m, ids: m.wte(ids.view(-1).int())[None],
            "indexed": lambda m, ids: m.wte.weight[ids], "picked": lambda m, ids: m.wte.weight.index_select(0, ids[0])[None],
            "remainders": lambda m, ids: m.wte(ids % IDS)}


def check(model: nn.Module) -> None:
    """Ids of the table are served; those beyond it are refused before a step, which would fail for the other requests too."""
    params = quire.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    with engine(model) as served:
        served.add_request([1, 2], params)
        for token in (IDS, IDS + 1, VOCAB - 1, BLOCK - 1):
            with pytest.raises(ValueError, match=f"outside the vocabulary of {IDS} tokens"):
                served.add_request([token], params)
        events = []
        while served.has_unfinished:
            events += served.step()
        assert len(events[-1].output.token_ids) == 2
        served.generate([[0, IDS - 1]], params)


@pytest.mark.parametrize("look_up", LOOK_UPS.values(), ids=LOOK_UPS)
def test_ids_beyond_the_table_are_refused_one_by_one(look_up: Any) -> None:
    """The table of positions, which has more rows, is not taken for it."""
    check(Lecture(look_up))


@pytest.mark.parametrize("name", ["a module", "by int32", "indexed", "picked"])
def test_a_table_that_the_modules_do_not_show(name: str) -> None:
    """The head has outputs for more than there are tokens, as many as no table has: the trace shows it, and what to do."""
    model = Lecture(LOOK_UPS[name], head=40)
    with pytest.raises(UnsupportedAttention, match=f"taken for {BLOCK}.* looked up in {IDS} rows.*get_input_embeddings"):
        engine(model)


def test_no_table_is_seen() -> None:
    """Then there are as many tokens as the model gives logits of, and no more."""
    with pytest.raises(UnsupportedAttention, match=f"taken for {BLOCK}.* logits of 40 tokens.*get_input_embeddings"):
        engine(Lecture(LOOK_UPS["remainders"], head=40))


def test_a_model_says_which_table_it_is() -> None:
    model = Lecture(LOOK_UPS["a module"])
    model.odd_head = nn.Linear(WIDTH, BLOCK)  # taken for the head
    with pytest.raises(UnsupportedAttention, match="get_input_embeddings"):
        engine(model)
    model.get_input_embeddings = lambda: model.wte
    check(model)
