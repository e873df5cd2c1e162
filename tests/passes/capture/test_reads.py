"""What the forward reads of tensors beside their values: an open engine that does not see it change gives the old numbers."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quire import Engine, SamplingParams
from tests.tiny import own_greedy

IDS, PARAMS = [1, 2, 3, 4], SamplingParams(max_tokens=8, temperature=0)
OPTIONS: dict[str, Any] = dict(num_pages=40, max_num_seqs=2, max_model_len=32, page_size=4, cudagraph_capture_sizes=[])


class Asks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if ctx.needs_input_grad[1] else 0.0)


def made_of(control: Any) -> Callable[[Any], Any]:
    return lambda self: control.gain


CONTROL, UNNAMED = types.SimpleNamespace(gain=0.0), dict[str, Any]()
exec("GAIN = 0.0\ndef gain(): return GAIN", UNNAMED)
unnamed_gain = UNNAMED["gain"]


class Reading(nn.Module):
    """Adds as much of ``weight`` as ``read`` says of it, to be asked in the forward."""

    patched, control, plain_property = made_of(CONTROL), types.SimpleNamespace(gain=0.0), property(lambda self: 0.0)

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.weight = nn.Embedding(30, 16), nn.Linear(16, 30), nn.Parameter(torch.randn(16))
        self.read, self.plain = read, torch.ones(2)
        self.register_buffer("kept", torch.ones(4, 4))
        self.several, self.none, self.named, self.later = [torch.ones(1)], list[Any](), {"a": torch.ones(1)}, dict[str, Any]()
        self.held = types.SimpleNamespace(rows=torch.ones(2, 16))
        self.settings, self.numbers, self.last = {"a": 1.0}, [0.0], collections.deque([torch.ones(1)])
        self.my_config, self.one = {"a": torch.ones(1)}, torch.ones(1)
        self.same = self.one
        self.own_config = types.SimpleNamespace(pad_token_id=0, _gain=0.0, steer=types.SimpleNamespace(gain=0.0))
        self.generation_config = types.SimpleNamespace(temperature=0.0)
        self.table, self.half, self.flag = {f"k{i}": 0.0 for i in range(2000)}, torch.relu, True
        self.other, self.beside = self.held, types.SimpleNamespace(weight=self.weight)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + position_ids[..., None] * 0.01 + self.read(self) * self.weight
        x = x.unflatten(-1, (2, 8)).transpose(1, 2)
        return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2))


def more(m: Reading) -> None:
    m.held.rows = torch.cat([m.held.rows, torch.ones(2, 16)])


READ: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "shape": (lambda m: m.plain.shape[0] - 2, lambda m: setattr(m, "plain", torch.ones(5))),
    "shape in place": (lambda m: m.plain.shape[0] - 2, lambda m: m.plain.resize_(5)),
    "dtype": (lambda m: 0.0 if m.plain.dtype == torch.float32 else 3.0, lambda m: setattr(m, "plain", m.plain.double())),
    "strides": (lambda m: 0.0 if m.plain.is_contiguous() else 3.0, lambda m: setattr(m, "plain", torch.ones(4)[::2])),
    "rows of an object's tensor": (lambda m: m.held.rows.sum(0)[0] - 2, more),
    "a list of tensors": (lambda m: sum(m.several) - 1, lambda m: m.several.append(torch.ones(1) * 3)),
    "an empty list": (lambda m: sum(m.none), lambda m: m.none.append(torch.ones(1) * 3)),
    "an empty dict": (lambda m: 3.0 if m.later else 0.0, lambda m: m.later.update(b=torch.ones(1))),
    "a dict of tensors": (lambda m: sum(m.named.values()) - 1, lambda m: m.named.update(b=torch.ones(1) * 3)),
    "a key of a dict of tensors": (lambda m: 3.0 if "b" in m.named else 0.0, lambda m: m.named.update(b=torch.ones(1))),
    "requires_grad": (lambda m: 0.0 if m.weight.requires_grad else 3.0, lambda m: m.weight.requires_grad_(False)),
    "requires_grad of a plain tensor": (lambda m: 3.0 if m.plain.requires_grad else 0.0, lambda m: m.plain.requires_grad_()),
    "requires_grad of what is no copy": (lambda m: 0.0 if m.weight.float().requires_grad else 3.0,
                                         lambda m: m.weight.requires_grad_(False)),
    "requires_grad of a result": (lambda m: 0.0 if doubled(m.weight).requires_grad else 3.0,
                                  lambda m: m.weight.requires_grad_(False)),
    "needs_input_grad": (lambda m: Asks.apply(torch.ones(1), m.weight), lambda m: m.weight.requires_grad_(False)),
    "an attribute of a parameter": (lambda m: 3.0 if hasattr(m.weight, "frozen") else 0.0,
                                    lambda m: setattr(m.weight, "frozen", True)),
    "an attribute of a tensor": (lambda m: getattr(m.plain, "gain", 0.0), lambda m: setattr(m.plain, "gain", 3.0)),
    "an attribute of a dict's tensor": (lambda m: getattr(m.named["a"], "gain", 0.0),
                                        lambda m: setattr(m.named["a"], "gain", 3.0)),
    "an attribute of an object": (lambda m: getattr(m.held, "gain", 0.0), lambda m: setattr(m.held, "gain", 3.0)),
    "a tensor that a module lacked": (lambda m: getattr(m, "steer", 0.0), lambda m: setattr(m, "steer", torch.ones(16) * 3)),
    "an object that a module lacked": (lambda m: 3.0 if hasattr(m, "extra") else 0.0,
                                       lambda m: setattr(m, "extra", types.SimpleNamespace())),
    "a tensor among plain values": (lambda m: m.settings.get("b", 0.0), lambda m: m.settings.update(b=torch.ones(1) * 3)),
    "a tensor in a list of plain values": (lambda m: sum(m.numbers), lambda m: m.numbers.append(torch.ones(1) * 3)),
    "a deque of tensors": (lambda m: sum(m.last) - 1, lambda m: m.last.append(torch.ones(1) * 3)),
    "tensors by the name of a config": (lambda m: sum(m.my_config.values()) - 1,
                                        lambda m: m.my_config.update(b=torch.ones(1) * 3)),
    "two names of one tensor": (lambda m: m.one - m.same, lambda m: setattr(m, "same", -m.one)),
    "what a method of the class closes over": (lambda m: m.patched(), lambda m: setattr(CONTROL, "gain", 3.0)),
    "an object of the class": (lambda m: m.control.gain, lambda m: setattr(Reading.control, "gain", 3.0)),
    "an object in the place of the class's": (lambda m: m.control.gain,
                                              lambda m: setattr(m, "control", types.SimpleNamespace(gain=-5.0))),
    "a property of the class": (lambda m: m.plain_property,
                                lambda m: setattr(Reading, "plain_property", property(lambda self: 3.0))),
    "an object in a config": (lambda m: m.own_config.steer.gain, lambda m: setattr(m.own_config.steer, "gain", 3.0)),
    "a private field of a config": (lambda m: m.own_config._gain, lambda m: setattr(m.own_config, "_gain", 3.0)),
    "a token id of a config": (lambda m: float(m.own_config.pad_token_id), lambda m: setattr(m.own_config, "pad_token_id", 3)),
    "a tensor that a config lacked": (lambda m: getattr(m.own_config, "vector", 0.0),
                                      lambda m: setattr(m.own_config, "vector", torch.ones(16) * 3)),
    "a generation config": (lambda m: m.generation_config.temperature,
                            lambda m: setattr(m.generation_config, "temperature", 3.0)),
    "a large dict": (lambda m: m.table["k5"], lambda m: m.table.update(k5=3.0)),
    "a function named as a method of modules": (lambda m: m.half(m.one) - 1, lambda m: setattr(m, "half", torch.neg)),
    "True and then 1": (lambda m: 0.0 if m.flag is True else 3.0, lambda m: setattr(m, "flag", 1)),
    "two names of one parameter": (lambda m: (m.weight - m.beside.weight).sum(),
                                   lambda m: setattr(m, "weight", nn.Parameter(m.weight.detach() + 1))),
    "two names of one object": (lambda m: m.held.rows.sum() - m.other.rows.sum(),
                                lambda m: setattr(m, "other", types.SimpleNamespace(rows=torch.ones(2, 16) * 2))),
    "a global of code that is in no module": (lambda m: unnamed_gain(), lambda m: UNNAMED.update(GAIN=3.0)),
    "is_leaf of a result": (lambda m: 0.0 if doubled(m.weight).is_leaf else 3.0, lambda m: m.weight.requires_grad_(False)),
}


def doubled(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x * 2


@pytest.mark.parametrize("case", READ)
def test_a_change_of_what_is_read_is_served(case: str) -> None:
    read, change = READ[case]
    model = Reading(read)
    with Engine(model, **OPTIONS) as engine:
        runner, before = engine.runner, engine.generate(IDS, PARAMS)[0].token_ids
        assert before == own_greedy(model, IDS, 8)
        assert engine.generate(IDS, PARAMS)[0].token_ids == before and engine.runner is runner  # nothing has changed
        change(model)
        assert engine.generate(IDS, PARAMS)[0].token_ids == own_greedy(model, IDS, 8) != before
        assert engine.runner is not runner


@pytest.mark.parametrize("read", [lambda m: 0.0, lambda m: 3.0 if m.kept.requires_grad else 0.0,
                                  lambda m: 3.0 if (m.weight * 2).requires_grad else 0.0], ids=["nothing", "another", "result"])
def test_gradients_that_nobody_reads_cost_no_trace(read: Callable[[Any], Any]) -> None:
    """Trainers freeze weights, and PEFT does at each switch of adapters: an engine that traced then would stall each time."""
    model = Reading(read)
    with Engine(model, **OPTIONS) as engine:
        runner, before = engine.runner, engine.generate(IDS, PARAMS)[0].token_ids
        for needed in (False, True):
            model.requires_grad_(needed)
            model.embed.weight.note, model.several = "a trainer's", [torch.zeros(2)]
            assert engine.generate(IDS, PARAMS)[0].token_ids == before == own_greedy(model, IDS, 8)
        assert engine.runner is runner
