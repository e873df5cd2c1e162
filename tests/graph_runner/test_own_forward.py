"""Models that compute otherwise in training mode: served as in evaluation mode, a rollout would be another policy's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP

from quire.graph_runner.own_forward import training_difference
from tests.tiny import small_llama


class Literal(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return super().forward(F.dropout(x, 0.5, self.training))


class OfAnotherName(LlamaMLP):
    p = 0.5

    def forward(self, x: Any) -> Any:
        return super().forward(F.dropout(x, self.p, self.training))


class Noisy(LlamaMLP):
    def forward(self, x: Any) -> Any:
        noise = torch.randn_like(x) if self.training else 0
        return super().forward(x + noise)


class Rated(LlamaMLP):
    dropout = 0.0

    def forward(self, x: Any) -> Any:
        return super().forward(F.dropout(x, self.dropout, self.training))


class OfTheClass(Rated):
    dropout = 0.5


class ByAProperty(Rated):
    @property
    def dropout(self) -> float:  # type: ignore[override]
        return 0.5


class Asked(LlamaMLP):
    @property
    def scale(self) -> int:
        return 3 if self.training else 1

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.scale


def tripled(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(self: Any, x: Any) -> Any:
        return forward(self, x) * (3 if self.training else 1)

    return run


class Wrapped(LlamaMLP):
    @tripled
    def forward(self, x: Any) -> Any:
        return super().forward(x)


class OfALoss(LlamaForCausalLM):
    """As Liger's."""

    def forward(self, input_ids: Any = None, labels: Any = None, skip_logits: Any = None, **kwargs: Any) -> Any:
        shift_labels = kwargs.pop("shift_labels", None)
        if skip_logits is None:
            skip_logits = self.training and (labels is not None or shift_labels is not None)
        return super().forward(input_ids=input_ids + bool(skip_logits), **kwargs)


class OfNoLoss(OfALoss):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if self.training and labels is None:
            input_ids = input_ids + 1
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def is_a(cls: type) -> Callable[[Any], Any]:
    return lambda model: setattr(mlp(model), "__class__", cls)


def mlp(model: Any) -> Any:
    return model.model.layers[0].mlp


def hooked(model: Any) -> None:
    mlp(model).register_forward_hook(lambda module, args, out: out * 3 if module.training else out)


def on_the_instance(model: Any) -> None:
    own = mlp(model).forward
    mlp(model).forward = lambda x: own(x) * (3 if model.training else 1)


def with_noise_at_the_embedding(model: Any) -> None:
    """As the Trainer's ``neftune_noise_alpha``."""
    model.get_input_embeddings().neftune_noise_alpha = 5.0


def spectral(model: Any) -> None:
    nn.utils.parametrizations.spectral_norm(mlp(model).down_proj)


def adapted(cls: str, **options: float) -> Callable[[Any], Any]:
    return lambda model: peft.get_peft_model(model, getattr(peft, cls)(target_modules=["q_proj"], r=4, **options))


DIFFER: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a rate in the code": (is_a(Literal), "Literal.forward asks"),
    "a rate of another name": (is_a(OfAnotherName), "OfAnotherName.forward asks"),
    "a variable": (is_a(Noisy), "Noisy.forward asks"),
    "a rate of the class": (is_a(OfTheClass), "Rated.forward asks"),
    "a rate by a property": (is_a(ByAProperty), "Rated.forward asks"),
    "a property": (is_a(Asked), "Asked.scale asks"),
    "a wrapper": (is_a(Wrapped), "Wrapped.forward asks"),
    "where there are no labels": (lambda model: setattr(model, "__class__", OfNoLoss), "OfNoLoss.forward asks"),
    "a hook": (hooked, "<lambda> asks"),
    "an instance": (on_the_instance, "<lambda> asks"),
    "NEFTune": (with_noise_at_the_embedding, "model.embed_tokens.neftune_noise_alpha is 5.0"),
    "spectral norm": (spectral, "_SpectralNorm.forward asks"),
    "LoHa's rank_dropout": (adapted("LoHaConfig", rank_dropout=0.5), "q_proj.rank_dropout is 0.5"),
    "LoKr's module_dropout": (adapted("LoKrConfig", module_dropout=0.7), "q_proj.module_dropout is 0.7"),
}


@pytest.mark.parametrize("which", DIFFER)
def test_training_mode_that_changes_something(which: str) -> None:
    model = small_llama(std=0.3, num_hidden_layers=1)
    change, message = DIFFER[which]
    change(model)
    assert message in (training_difference(model.train()) or "")
    assert training_difference(model.eval()) is None


@pytest.mark.parametrize("change", [lambda m: setattr(m, "__class__", OfALoss), is_a(Rated), adapted("LoHaConfig"),
                                    adapted("LoraConfig")], ids=["labels", "zero", "LoHa", "LoRA"])
def test_training_mode_that_changes_nothing(change: Callable[[Any], Any]) -> None:
    model = small_llama(std=0.3, num_hidden_layers=1)
    change(model)
    assert training_difference(model.train()) is None
