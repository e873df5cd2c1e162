"""Places follow their adapters at the next step, whatever has changed. One that does not gives requests the results of an
adapter that the model no longer has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

from peft import LoraConfig, get_peft_model

from quire.graph_runner.adapter_places import AdapterPlaces
from quire.passes.capture.lora import adapter_layers
from tests.tiny import small_llama
from tests.zoo.configs import SERVED, build

WIDE = LoraConfig(r=8, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
FEW = LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


class Placed:
    """A model with the adapters "one" and "two", of the same layers, and "few", and their places, one of which is free."""

    def __init__(self) -> None:
        self.peft: Any = get_peft_model(small_llama(), WIDE, adapter_name="one")
        self.peft.add_adapter("two", WIDE)
        self.peft.add_adapter("few", FEW)
        self.model = self.peft.base_model.model
        self.layers: list[Any] = list(adapter_layers(self.model).values())
        self.places = AdapterPlaces(self.model, 4, 8, None)

    def check(self) -> None:
        """Each place has A of its adapter, and B times the scaling; zeros beyond the rank, and where there is none."""
        have = [name for layer in self.layers for name in layer.lora_A]
        assert sorted(filter(None, self.places.names)) == sorted(set(have))
        for place, name in enumerate(self.places.names):
            for i, layer in enumerate(self.layers):
                a, b = self.places.lora.pair(i, place)
                want_a, want_b = torch.zeros_like(a), torch.zeros_like(b)
                if name in layer.lora_A:
                    want_a[: layer.r[name]] = layer.lora_A[name].weight.detach()
                    want_b[:, : layer.r[name]] = layer.lora_B[name].weight.detach() * layer.scaling[name]
                assert torch.equal(a, want_a) and torch.equal(b, want_b), (name, i)


def linear(like: Any) -> Any:
    return torch.nn.Linear(like.in_features, like.out_features, bias=False)


def rename(layer: Any, old: str, new: str) -> None:
    for part in (layer.lora_A, layer.lora_B, layer.scaling, layer.r):
        if old in part:
            part[new] = part.pop(old)


def other_dict(layer: Any) -> None:
    module = layer.lora_A["one"]
    module._parameters = {"weight": linear(module).weight, "bias": None}


def other_parts(layer: Any) -> None:
    layer.lora_A = torch.nn.ModuleDict({name: linear(module) for name, module in layer.lora_A.items()})


def exchange(layer: Any) -> None:
    """The weights of two adapters, whose modules change places too."""
    for part in (layer.lora_A, layer.lora_B):
        one, two = part["one"], part["two"]
        one.weight, two.weight = two.weight, one.weight
        modules = [(name, part.pop(name)) for name in ("few", "two", "one") if name in part]
        part.update(modules)


#: Of a layer: what the next step sees, and whether what was computed before is of another adapter.
CHANGES: dict[str, tuple[Callable[[Any], object], bool]] = {
    "renamed": (lambda layer: rename(layer, "one", "uno"), True),
    "another module": (lambda layer: layer.lora_B.update({"two": linear(layer.lora_B["two"])}), True),
    "another lora_A": (other_parts, True),
    "another parameter": (lambda layer: setattr(layer.lora_A["one"], "weight", linear(layer.lora_A["one"]).weight), True),
    "another dictionary of parameters": (other_dict, True),
    "two exchanged": (exchange, True),
    "another scaling": (lambda layer: layer.set_scale("one", 3), True),
    "in place": (lambda layer: layer.lora_B["two"].weight.detach().mul_(2), False),
    "other memory": (lambda layer: setattr(layer.lora_A["two"].weight, "data", linear(layer.lora_A["two"]).weight.data), False),
}


@pytest.mark.parametrize("which", CHANGES)
def test_changes_that_the_next_step_sees(which: str) -> None:
    it = Placed()
    it.check()
    change, stale = CHANGES[which]
    for layers in ([it.layers[-1]], it.layers):
        it.places.lora.pair(0, 0)[0][0] += 1  # stays while nothing has changed
        version, placed = it.places.version, it.places.placed
        assert it.places.change(False) is None and not it.places.take_stale()
        assert (it.places.version, it.places.placed) == (version, placed)
        it.places.lora.pair(0, 0)[0][0] -= 1
        for layer in layers:
            change(layer)
        assert it.places.change(False) is None and it.places.version > version
        it.check()
        assert it.places.take_stale() == stale and it.places.placed == placed + stale


def test_adapters_come_and_go() -> None:
    """An addition leaves what is computed; a free place has nothing of the adapter before it."""
    it = Placed()
    before = it.places.version
    it.peft.add_adapter("three", FEW)
    assert it.places.change(False) is None and it.places.version == before and not it.places.take_stale()
    it.check()
    place = it.places.names.index("two")
    it.peft.delete_adapter("two")
    assert it.places.change(False) is None and it.places.version > before and it.places.take_stale()
    it.check()
    it.peft.add_adapter("narrow", FEW)
    assert it.places.change(False) is None and it.places.names[place] == "narrow"
    it.check()


def test_adapters_of_experts_alone() -> None:
    """No layer has a place: they are built into the trace, and what is missing is not looked for."""
    def of_experts(name: str) -> LoraConfig:
        return LoraConfig(r=2, target_modules=[], target_parameters=[f"mlp.experts.{name}"])

    peft = get_peft_model(build(SERVED["mixtral"]), of_experts("gate_up_proj"), adapter_name="one")
    places = AdapterPlaces(peft.base_model.model, 4, None, None)
    assert places.built_in == ["one"] and places.names == [None] * 4 and places.num_bytes == 0
    assert places.change(False) is None and places.change(True) is None and not places.take_stale()
    peft.add_adapter("two", of_experts("gate_up_proj"))
    assert "'two' does not fit the places of max_loras=4: " in (places.change(False) or "")
    peft.delete_adapter("two")
    peft.delete_adapter("one")
    for everything in (False, True):
        assert places.change(everything) is None  # ModelGuard sees it: no part of what is built in is apart


def test_a_parameter_of_the_same_memory() -> None:
    """It has a counter of its own."""
    it = Placed()
    module = it.layers[0].lora_A["one"]
    module.weight = torch.nn.Parameter(module.weight.data)
    assert it.places.change(False) is None
    module.weight.detach().mul_(2)
    assert it.places.change(False) is None
    it.check()


class Equal(torch.nn.Linear):
    """It says that it equals any other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = torch.nn.Linear.__hash__


def own_forward(layer: Any) -> None:
    layer.lora_A["one"].forward = lambda x: x


#: What a place cannot hold, of a layer; "at once" is seen by the next step, the rest within some.
MISFITS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a module that equals, at once": (lambda layer: layer.lora_A.update({"one": Equal(32, 8, bias=False)}), "two matrices"),
    "no B, at once": (lambda layer: layer.lora_B.pop("one"), "more than LoRA of a linear layer"),
    "a scaling in a tensor, at once": (lambda layer: layer.scaling.update(one=torch.tensor(2.0)), "scaling is not a number"),
    "another dtype, at once": (lambda layer: layer.lora_A["one"].double(), "torch.float64"),
    "a greater rank, at once": (lambda layer: layer.lora_A.update({"one": torch.nn.Linear(32, 9, bias=False)}), "rank is 9"),
    "a forward of its own": (own_forward, "a forward of its own"),
    "a hook": (lambda layer: layer.lora_B["one"].register_forward_hook(lambda *args: None), "with hooks"),
}


@pytest.mark.parametrize("which", MISFITS)
def test_what_no_place_can_hold(which: str) -> None:
    it = Placed()
    change, why = MISFITS[which]
    change(it.layers[0])
    steps = 1 if "at once" in which else len(it.layers)
    found = [it.places.change(False) for _ in range(steps)]
    assert any(why in text for text in found if text is not None)
    everything = it.places.change(True)
    assert everything is not None and why in everything
