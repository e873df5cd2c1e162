"""Masks that a model, its layers or hooks make or change, which quire's attention would not see: proven, or refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM, masking_utils
from transformers.models.llama import modeling_llama as llama

from quire import Engine, UnsupportedAttention
from tests.tiny import GREEDY, hf_greedy, small_llama, tokens

pytestmark = pytest.mark.usefixtures("traces_kept")

IDS = [3, 4, 5]
SHORT = replace(GREEDY, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(num_pages=40, max_num_seqs=4, cudagraph_capture_sizes=[])


@pytest.fixture
def model() -> Any:
    return small_llama(0.3)


def expected(model: Any) -> list[int]:
    return hf_greedy(model, IDS, 8, eos_token_id=None)


class Blocks(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        with_blocks = dict(and_mask_function=lambda b, h, q, k: k >= q - 500)
        llama.create_causal_mask(self.config, self.model.embed_tokens(input_ids), None, None, **with_blocks)
        return super().forward(input_ids=input_ids, **options)


def test_masks_that_would_be_lost(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any reach: a trial sequence is too short to show the second."""
    create = llama.create_causal_mask
    model.__class__ = Blocks
    with pytest.raises(UnsupportedAttention, match="Blocks.forward passes and_mask_function to transformers' mask functions"):
        Engine(model, **OPTIONS)
    model.__class__ = LlamaForCausalLM
    monkeypatch.setattr(llama, "create_causal_mask",
                        lambda *a, **o: create(*a, **o, and_mask_function=lambda b, h, q, k: k >= q - 500))
    with pytest.raises(UnsupportedAttention, match="create_causal_mask was replaced by .*<lambda>, which is not transformers'"):
        Engine(model, **OPTIONS)


class Positional(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        x = self.model.embed_tokens(input_ids)
        llama.create_causal_mask(self.config, x, None, None, None, lambda b, h, q, k: k >= q - 500)
        return super().forward(input_ids=input_ids, **options)


class Starred(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        given = (self.config, self.model.embed_tokens(input_ids), None, None)
        llama.create_causal_mask(*given)
        return super().forward(input_ids=input_ids, **options)


class Harmless(LlamaForCausalLM):
    """As models in remote code do it."""

    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        given = {"config": self.config, "inputs_embeds": self.model.embed_tokens(input_ids), "attention_mask": None,
                 "past_key_values": None, "position_ids": options.get("position_ids")}
        llama.create_causal_mask(**given)
        llama.create_causal_mask(self.config, given["inputs_embeds"], None, None)
        return super().forward(input_ids=input_ids, **options)


@pytest.mark.parametrize("kind, what", [(Positional, "or_mask_function"), (Starred, "arguments of unknown number")])
def test_masks_by_position_would_be_lost(kind: Any, what: str, model: Any) -> None:
    model.__class__ = kind
    with pytest.raises(UnsupportedAttention, match=f"{kind.__name__}.forward passes {what} to transformers' mask functions"):
        Engine(model, **OPTIONS)


class Older(llama.LlamaDecoderLayer):
    """As Gemma 2's layer was: a window of its own in the mask that transformers made."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        if attention_mask is not None:
            attention_mask = attention_mask.masked_fill(torch.ones_like(attention_mask, dtype=torch.bool).tril(-4), -torch.inf)
        return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)


class HandsOn(llama.LlamaDecoderLayer):
    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return super().forward(hidden_states * 2, attention_mask=attention_mask, **kwargs)


def change_mask(module, args, kwargs):
    return args, {**kwargs, "attention_mask": None}


class ChangesMask:
    def __call__(self, module, args, kwargs):
        return change_mask(module, args, dict(kwargs, attention_mask=kwargs.get("attention_mask")))


@pytest.mark.parametrize("hook, name", [
    (change_mask, "change_mask"), (functools.partial(change_mask), "change_mask"), (ChangesMask(), "ChangesMask.__call__")])
def test_hooks_masks_that_would_be_lost(hook: Any, name: str, model: Any) -> None:
    model.model.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(UnsupportedAttention, match=f"{name} reads or changes the attention_mask"):
        Engine(model, **OPTIONS)


def test_layers_masks_that_would_be_lost(model: Any) -> None:
    """transformers hands each layer the mask that it made; under quire's attention it makes none."""
    layer = model.model.layers[0]
    layer.__class__ = HandsOn
    with Engine(model, **OPTIONS) as engine:
        assert engine.generate([IDS], SHORT)[0].token_ids == expected(model)
    layer.__class__ = Older
    with pytest.raises(UnsupportedAttention, match="Older.forward reads or changes the attention_mask"):
        Engine(model, **OPTIONS)


def test_a_window_that_the_mask_has_not(model: Any) -> None:
    """transformers masks by the config; its flash attention would take the module's."""
    config = Gemma3TextConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                              num_key_value_heads=2, head_dim=16, layer_types=["full_attention", "full_attention"])
    other = Gemma3ForCausalLM(config).eval()
    other.model.layers[1].self_attn.sliding_window = 4
    with pytest.raises(UnsupportedAttention, match="attends with window 4, and transformers makes its mask by the config's"):
        Engine(other, **OPTIONS)


def test_arguments_of_masks_that_a_later_transformers_adds(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown here, so it may change who sees whom."""

    def create_tree_mask(config: Any, inputs_embeds: Any, segment_tree: Any = None) -> None: ...

    create_tree_mask.__module__ = masking_utils.__name__

    class Trees(Harmless):
        def forward(self, *args: Any, **options: Any) -> Any:
            create_tree_mask(self.config, None, **{"segment_tree": None})
            return super().forward(*args, **options)

    model.__class__ = Harmless
    with Engine(model, **OPTIONS) as engine:
        assert tokens(engine.generate(IDS, SHORT)) == [expected(model)]
    monkeypatch.setattr(masking_utils, "create_tree_mask", create_tree_mask, raising=False)
    model.__class__ = Trees
    with pytest.raises(UnsupportedAttention, match="Trees.forward passes segment_tree"):
        Engine(model, **OPTIONS)


class Whole(LlamaForCausalLM):
    """Makes a mask where it gets none; ``mask`` says which, by the ids."""

    mask: Any = staticmethod(torch.ones_like)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **options: Any) -> Any:
        if attention_mask is None:
            attention_mask = self.mask(input_ids)
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **options)


def square(ids: Any) -> torch.Tensor:
    n = ids.shape[1]
    return torch.full((1, 1, n, n), torch.finfo(torch.float32).min).triu(1)


def masked(mask: Any) -> Any:
    return type("Masked", (Whole,), {"mask": staticmethod(mask)})


@pytest.mark.parametrize("kind", [Whole, masked(square), masked(lambda ids: torch.ones(ids.shape, dtype=torch.bool))])
def test_masks_that_hide_nothing_more_are_proven(kind: Any, model: Any) -> None:
    want = expected(model)
    model.__class__ = kind
    with Engine(model, **OPTIONS) as engine:
        assert tokens(engine.generate(IDS, SHORT)) == [want]
        (scored,) = engine.generate([[7, *range(20)]], replace(SHORT, prompt_logprobs=0))
    with torch.no_grad():
        alone = model(torch.tensor([[7, *range(20)]])).logits[0].log_softmax(-1)
    got = [at[token].logprob for token, at in zip(range(20), scored.prompt_logprobs[1:], strict=True)]
    # Both in float32, in other orders of sums of up to 96 numbers of order 1; a hidden token changes them by 1e-2 and more.
    assert got == pytest.approx([alone[i, i].item() for i in range(20)], abs=1e-4)


@pytest.mark.parametrize("mask, why", [
    (lambda ids: (torch.arange(ids.shape[1]) != 1).long()[None], "none of causal"),
    (lambda ids: (torch.arange(ids.shape[1]) != 900).long()[None], "none of causal"),
    (lambda ids: (ids != 3).long(), "token ids"), (torch.zeros_like, "none of causal"),
    (lambda ids: square(ids) * 0, "non-causal")])
def test_masks_that_hide_more_or_less_are_refused(mask: Any, why: str, model: Any) -> None:
    """Of any reach."""
    model.__class__ = masked(mask)
    with pytest.raises(UnsupportedAttention, match=f"(?s){why}.*traced with the attention that it has: Whole.forward makes an"):
        Engine(model, **OPTIONS)


class ChangesIfThere(LlamaForCausalLM):
    """transformers makes no mask where all is seen, but does in a trace."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **options: Any) -> Any:
        made = llama.create_causal_mask(self.config, self.model.embed_tokens(input_ids), attention_mask, None)
        attention_mask = made if made is None else made & torch.ones_like(made).triu(-500)
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **options)


def test_changed_masks_are_not_taken_from_the_trace(model: Any) -> None:
    model.__class__ = ChangesIfThere
    with pytest.raises(UnsupportedAttention, match="ChangesIfThere.forward makes an attention_mask of its own, or changes"):
        Engine(model, **OPTIONS)
    model.__class__, model.model.layers[0].__class__ = Whole, Older
    with pytest.raises(UnsupportedAttention, match="Older.forward reads or changes the attention_mask"):
        Engine(model, **OPTIONS)
