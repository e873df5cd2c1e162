"""Which adapters a request has, and keeps when they are merged, switched or deleted: else it ends with tokens of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

from peft import LoraConfig, get_peft_model

from quire.graph_runner.adapters import BASE, TokenAdapters, after_change, choose
from quire.graph_runner.request import Request, RequestOutput
from quire.graph_runner.sampling_params import SamplingParams
from tests.tiny import small_llama

LORA = LoraConfig(r=2, target_modules=["q_proj"])


class Adapted:
    """A model that was traced with the adapters of each token, "one", which is active, and "two", and a request of each kind:
    without ``adapter=``, and with."""

    def __init__(self) -> None:
        self.peft: Any = get_peft_model(small_llama(), LORA, adapter_name="one")
        self.peft.add_adapter("two", LORA)
        self.model = self.peft.base_model.model
        self.traced = TokenAdapters(self.model, ["one", "two"])
        self.requests = {name: self.request(name) for name in (None, "one", "two", BASE)}

    def request(self, adapter: str | None) -> Request:
        """It has drawn a token."""
        ids = [5, 6]
        made = Request(0, ids, SamplingParams(), RequestOutput(0, None, list(ids)), seed=0, stop_token_ids=frozenset(),
                       max_total_tokens=9, token_ids=[*ids, 7])
        assert choose([made], adapter, self.model, self.traced) is None
        return made

    def ended(self) -> dict[str | None, str]:
        """Requests that cannot go on now, and why."""
        self.traced.follow()
        found = dict((id(request), why) for request, why in after_change(
            self.requests.values(), self.model, self.traced, ("one",)))
        return {name: found[id(request)] for name, request in self.requests.items() if id(request) in found}

    def bits(self) -> list[int]:
        return [self.traced._bits(request.adapters) for request in self.requests.values()]


def test_pages_of_other_adapters_are_not_read() -> None:
    """Keys in the prefix cache belong to tokens and adapters; a request with the active one may read what one that chose it has
    computed."""
    it = Adapted()
    none, one, two, base = (request.root for request in it.requests.values())
    assert none == one and len({one, two, base}) == 3
    it.peft.set_adapter("two")
    assert it.request(None).root == two and it.request("one").root == one
    for name in ("one\0two", "one', 'two"):  # names that PEFT takes
        it.peft.add_adapter(name, LORA)
    it.traced = TokenAdapters(it.model, ["one", "two", "one\0two", "one', 'two"])
    it.peft.base_model.set_adapter(["one", "two"])
    assert len({it.request(name).root for name in (None, "one\0two", "one', 'two")}) == 3


def test_merged_adapters_are_not_applied_again() -> None:
    """A request goes on with just what is merged; one that chose, or has another, ends by name."""
    it = Adapted()
    assert it.bits() == [1, 1, 2, 0] and it.traced.active(2, torch.device("cpu")).tolist() == [1, 1]
    it.peft.merge_adapter()
    ended = it.ended()
    assert set(ended) == {"one", "two", BASE}
    assert ended["two"] == ("it has the adapter two, and the model has merged one into its weights; unmerge_adapter takes it "
                            "out")
    assert it.bits() == [0] * 4 and it.traced.active(2, torch.device("cpu")).tolist() == [0, 0]
    with pytest.raises(ValueError, match="adapter='__base__' asks for a choice, and the model has merged 'one'"):
        it.request(BASE)
    it.peft.unmerge_adapter()
    it.peft.merge_adapter(["two"])
    assert set(it.ended()) == {None, "one", "two", BASE}
    it.peft.unmerge_adapter()
    assert it.ended() == {} and it.bits() == [1, 1, 2, 0]


def test_a_request_keeps_what_it_came_with() -> None:
    it = Adapted()
    it.peft.set_adapter("two")
    assert it.ended() == {} and it.bits() == [1, 1, 2, 0]
    it.traced = TokenAdapters(it.model, ["two"])
    assert it.ended() == {None: "its adapter one was deleted", "one": "its adapter one was deleted"}
