"""Code of the user's that computes something else where there is a KV cache, in ways that are not read: seen by running it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import quire

SERVED: dict[str, Any] = dict(attention="torch_native", compiler="eager", num_pages=40, max_num_seqs=4, max_model_len=60)


def llama(kind: type[LlamaForCausalLM] = LlamaForCausalLM) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = kind(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                             intermediate_size=32)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


class Base:
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run(args, kwargs)


class Steer(Base):
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 8:
            return (args[0].flip(-1), *args[1:]), kwargs
        return None


def by_a_call_that_is_inherited() -> nn.Module:
    model = llama()
    model.model.layers[1].register_forward_pre_hook(Steer(), with_kwargs=True)
    return model


def by_position() -> nn.Module:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, cache, *rest = args
        return (hidden if cache is None or cache.get_seq_length() < 8 else hidden.flip(-1), cache, *rest)

    model.transformer.h[1].register_forward_pre_hook(hook)
    return model


class OfTheOutput(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * (2.0 if len(out) > 1 else 1.0)
        return out


def by_the_output() -> nn.Module:
    return llama(OfTheOutput)


def with_the_config_of_a_trainer() -> nn.Module:
    """``generate`` caches whatever the model's config says: it has a config of its own."""
    model = by_a_call_that_is_inherited()
    model.config.use_cache = False
    assert model.generation_config.use_cache
    return model


def by_an_argument_of_generate() -> nn.Module:
    model = llama()

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        if kwargs.get("return_dict"):
            out.logits = out.logits.flip(-1)
        return out

    model.register_forward_hook(hook, with_kwargs=True)
    return model


def by_the_rows_of_a_batch() -> nn.Module:
    """A packed batch is one row, so that nothing is its mean."""
    model = llama()
    model.model.layers[0].register_forward_hook(lambda module, args, out: out - 0.5 * out.mean(0, keepdim=True))
    return model


@pytest.mark.parametrize("make", [by_a_call_that_is_inherited, by_position, by_the_output, with_the_config_of_a_trainer,
                                  by_an_argument_of_generate, by_the_rows_of_a_batch])
def test_what_differs_with_a_cache_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(quire.UnsupportedAttention, match="something else where it has a KV cache"):
        quire.Engine(make(), **SERVED)


class Scaled(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 0.5
        return out


class WithoutCache(LlamaForCausalLM):
    """Computes all tokens it is given, and leaves a cache empty."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden))


@pytest.mark.parametrize("kind", [Scaled, WithoutCache])
def test_what_does_not_is_served(kind: type[LlamaForCausalLM]) -> None:
    model = llama(kind)
    row = [3, 4, 5, 6, 7, 8, 9]
    with quire.Engine(model, **SERVED) as engine:
        (found,) = engine.generate([row], quire.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    with torch.no_grad():
        for _ in range(8):
            row.append(int(model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
    assert [*found.token_ids] == row[7:]


@pytest.mark.parametrize("change", [
    lambda m: prune.l1_unstructured(m, "weight", amount=0.5), *(pytest.param(norm, marks=pytest.mark.slow) for norm in (
        torch.nn.utils.spectral_norm, torch.nn.utils.weight_norm)),
], ids=["pruned", "spectral", "weight"])
@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
def test_hooks_of_torch_that_set_weights(change: Callable[[nn.Module], Any], later: bool) -> None:
    """A loop that prunes goes on with transformers' own code, and is told so."""
    model, ids = llama(), torch.tensor([[3, 1, 4, 1, 5]])
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    if not later:
        change(model.model.layers[1].mlp.up_proj)
    paged = quire.paged(model, **SERVED)
    if later:
        paged.generate(ids, **options)
        change(model.model.layers[1].mlp.up_proj)
    with pytest.warns(UserWarning, match="not paged, because the model has hooks"):
        found = paged.generate(ids, **options)
    paged.generate.close()
    assert torch.equal(found, type(model).generate(model, ids, **options))


VECTORS = torch.stack([torch.linspace(-2, 2, 32), torch.linspace(3, -3, 32), torch.linspace(3, -3, 32).roll(9)])


def changed(out: torch.Tensor, rows: Any) -> torch.Tensor:
    out = out.clone()
    out[rows] += VECTORS[0]
    return out


def beside(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out + 0.3 * out[:1]


#: Hooks of a layer that treat rows of a batch differently.
BY_ROWS: dict[str, Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]] = {
    "the first": lambda module, args, out: changed(out, 0),
    "the first, in place": lambda module, args, out: in_place(out),
    "the last": lambda module, args, out: changed(out, -1),
    "all but the first": lambda module, args, out: changed(out, slice(1, None)),
    "a vector for each of two": lambda module, args, out: out + VECTORS[:2, None],
    "a vector for each of three": lambda module, args, out: out + VECTORS[:, None],
    "a table's rows": lambda module, args, out: out + VECTORS[torch.arange(out.shape[0])][:, None],
    "cut and joined": lambda module, args, out: torch.cat([out[:1] + VECTORS[0], out[1:]]),
    "the first's numbers for all": beside,
}


def in_place(out: torch.Tensor) -> torch.Tensor:
    out[0].add_(VECTORS[0])  # of a tuple, as layers once gave, it was the hidden states of all rows
    return out


@pytest.mark.parametrize("name", BY_ROWS)
@pytest.mark.parametrize("where", ["norm", *(pytest.param(part, marks=pytest.mark.slow) for part in ("layer", "mlp"))])
def test_what_treats_rows_differently_is_refused(name: str, where: str) -> None:
    """A packed batch is one row, the first and the last one, whose tokens would all be treated as that row's."""
    model = llama()
    part = {"norm": model.model.norm, "layer": model.model.layers[0], "mlp": model.model.layers[0].mlp}[where]
    part.register_forward_hook(BY_ROWS[name])
    with pytest.raises(quire.UnsupportedAttention, match="rows"):
        quire.Engine(model, **SERVED)


class FirstOfTheBatch(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = torch.cat([-out.logits[:1], out.logits[1:]])
        return out


class FirstWithoutCache(WithoutCache):
    """It takes no cache: several rows are run without one."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
        out = super().forward(input_ids, position_ids)
        out.logits = torch.cat([-out.logits[:1], out.logits[1:]])
        return out


@pytest.mark.parametrize("kind", [FirstOfTheBatch, FirstWithoutCache])
def test_a_forward_that_treats_rows_differently_is_refused(kind: type[LlamaForCausalLM]) -> None:
    with pytest.raises(quire.UnsupportedAttention, match="does something for some of them only"):
        quire.Engine(llama(kind), **SERVED)


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
def test_a_vector_for_each_row_of_a_batch(later: bool) -> None:
    """``generate`` goes on with transformers' own code, and says so; a vector for all rows is paged."""
    model, ids = llama(), torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    first = model.model.norm.register_forward_hook(lambda module, args, out: out + VECTORS[0])
    paged = quire.paged(model, **SERVED)
    want = type(model).generate(model, ids, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(paged.generate(ids, **options), want)
    if not later:
        paged.generate.close()
        first.remove()
        paged = quire.paged(model, **SERVED)
    else:
        first.remove()
    model.model.norm.register_forward_hook(BY_ROWS["a vector for each of two"])
    with pytest.warns(UserWarning, match="not paged"):
        found = paged.generate(ids, **options)
    paged.generate.close()
    assert torch.equal(found, type(model).generate(model, ids, **options))
