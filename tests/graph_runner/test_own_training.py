"""Code of the user's that asks for training mode where reading does not find it: seen by running the model in both modes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

import quire
from quire.graph_runner.own_cache import has_users_code, may_be_users
from quire.graph_runner.own_training import differs_in_training
from tests.tiny import small_llama

IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 9]])
OPTIONS: dict[str, Any] = dict(num_pages=40, max_num_seqs=4, max_model_len=60)
MODE = {"of": lambda module: module.training}
OWN = torch.Generator()
NUMBERS = np.random


class Beside(LlamaMLP):
    """A rate of 0, and one in the code."""

    dropout = 0.0

    def forward(self, x: Any) -> Any:
        return super().forward(F.dropout(F.dropout(x, self.dropout, self.training), 0.01, self.training))


class Scales(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * (1.01 if MODE["of"](self) else 1.0)


class Skips(LlamaMLP):
    """One call in a million is another one."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * (0.0 if MODE["of"](self) and random.random() < 1e-6 else 1.0)


class SkipsByNumPy(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * (0.0 if MODE["of"](self) and NUMBERS.rand() < 1e-6 else 1.0)


class OfItsOwnGenerator(LlamaMLP):
    def forward(self, x: Any) -> Any:
        some = torch.rand((), generator=OWN) if MODE["of"](self) else 1.0
        return super().forward(x) * (some > 1e-6)


class Averages(LlamaMLP):
    """As a batch norm, whose averages another forward reads."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(config.hidden_size))

    def forward(self, x: Any) -> Any:
        if MODE["of"](self):
            self.mean.lerp_(x.mean((0, 1)), 0.1)
        return super().forward(x)


class Normed(Averages):
    def forward(self, x: Any) -> Any:
        y = F.batch_norm(x.flatten(0, -2), self.mean, torch.ones_like(self.mean), None, None, MODE["of"](self))
        return super(Averages, self).forward(y.view_as(x))


class Counts(LlamaMLP):
    calls = 0

    def forward(self, x: Any) -> Any:
        if MODE["of"](self):
            self.calls += 1
        return super().forward(x) * (1.0 if self.calls < 1000 else 0.0)


def is_a(cls: type[LlamaMLP]) -> Callable[[Any], Any]:
    def change(model: Any) -> None:
        mlp = cls(model.config)
        mlp.load_state_dict(model.model.layers[0].mlp.state_dict(), strict=False)
        model.model.layers[0].mlp = mlp

    return change


def by_an_activation(model: Any) -> None:
    del model.model.layers[0].mlp.act_fn
    model.model.layers[0].mlp.act_fn = lambda x: F.silu(x) * (3 if model.training else 1)


def turned(q: Any, k: Any, *tables: Any) -> Any:
    q, k = apply_rotary_pos_emb(q, k, *tables)
    return (q * 2 if MODEL[0].training else q), k


MODEL: list[Any] = []


def by_a_patch(model: Any) -> None:
    MODEL[:] = [model]
    modeling_llama.apply_rotary_pos_emb = turned


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    OWN.manual_seed(0)
    yield
    modeling_llama.apply_rotary_pos_emb = apply_rotary_pos_emb


DIFFER: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a rate beside a rate of 0": (is_a(Beside), "draws random numbers"),
    "another result": (is_a(Scales), "has other logits then"),
    "rarely, by random": (is_a(Skips), "draws random numbers"),
    "rarely, by NumPy": (is_a(SkipsByNumPy), "draws random numbers"),
    "rarely, by a generator": (is_a(OfItsOwnGenerator), "draws random numbers"),
    "a buffer": (is_a(Averages), "writes to a tensor of the model"),
    "a batch norm": (is_a(Normed), "writes to a tensor of the model"),
    "a counter": (is_a(Counts), "sets attributes of a Counts"),
    "an activation": (by_an_activation, "<lambda> asks whether it is in training mode"),
    "a patch of transformers": (by_a_patch, "turned asks whether it is in training mode"),
}


def state(model: Any) -> dict[str, Any]:
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), OWN.get_state()  # type: ignore
    return {"modes": [m.training for m in model.modules()], "attributes": [m for m in map(vars, model.modules())],
            "values": {k: v.clone() for k, v in model.state_dict().items()}, "generators": [str(list(g)) for g in generators],
            "counters": [getattr(m, "calls", 0) for m in model.modules()]}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a is b if isinstance(a, nn.Module) else a == b if not isinstance(a, list) else len(a) == len(b) and all(
        map(equal, a, b))


@pytest.mark.parametrize("which", DIFFER)
def test_what_differs_in_training_mode(which: str) -> None:
    """Served as in evaluation mode, a trainer's rollouts would be another policy's. The trial leaves nothing behind."""
    change, message = DIFFER[which]
    model = small_llama(std=0.3)
    change(model)
    before = state(model.train())
    read = {"apply_rotary_pos_emb": turned} if change is by_a_patch else {}
    found = differs_in_training(model, IDS, read)
    assert message in (found or "")
    assert equal(state(model), before)
    assert differs_in_training(model.eval(), IDS, read) is None


class Doubles(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(F.dropout(x, self.config.attention_dropout, self.training))


@pytest.mark.parametrize(("change", "served"), [(is_a(Doubles), True), (is_a(Scales), False), (by_a_patch, False)],
                         ids=["the same", "another result", "a patch of transformers"])
def test_generate_in_training_mode(change: Callable[[Any], Any], served: bool, recwarn: Any) -> None:
    model = small_llama(std=0.3)
    change(model)
    torch.manual_seed(3)
    expected = model.train().generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None)
    after = torch.get_rng_state()
    quire.paged(model, **OPTIONS)
    torch.manual_seed(3)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None), expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert served == (not any("the model is in training mode" in str(w.message) for w in recwarn))


def test_a_hook_on_all_modules() -> None:
    model = small_llama(std=0.3).train()
    handle = register_module_forward_hook(lambda module, args, out: None)
    try:
        assert differs_in_training(model, IDS, {}) is None
        handle.remove()
        handle = register_module_forward_hook(
            lambda module, args, out: out * 2 if isinstance(module, LlamaMLP) and MODE["of"](module) else None)
        assert differs_in_training(model, IDS, {}) is not None
    finally:
        handle.remove()


def test_models_without_code_of_the_users_pay_nothing() -> None:
    peft = pytest.importorskip("peft")
    model = small_llama(num_hidden_layers=2)
    peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    assert not has_users_code(model, may_be_users)
    model.model.layers[0].register_forward_hook(lambda module, args, out: out)
    assert has_users_code(model, may_be_users)
