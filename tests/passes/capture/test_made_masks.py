"""Masks that a user's own forward or hook makes, or changes, around transformers' models and layers: transformers builds none
for quire's attention, so a served model would see what the mask hides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama import modeling_llama as llama

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions

LOW = torch.finfo(torch.float32).min


class Padded(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        if attention_mask is None:
            attention_mask = (input_ids != 3).long()
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


class Decoder(llama.LlamaModel):
    """Written anew, as models in remote code are; ``mask_of`` makes the mask of all layers."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                use_cache=None, **kwargs):
        h = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(h.shape[1])[None]
        mask, rope = self.mask_of(h, attention_mask, position_ids), self.rotary_emb(h, position_ids=position_ids)
        for layer in self.layers:
            h = layer(h, attention_mask=mask, position_embeddings=rope, position_ids=position_ids, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(h))


class Mapped(Decoder):
    """As transformers' decoders with two kinds of layers."""

    def mask_of(self, h, attention_mask, p):
        if not isinstance(masks := attention_mask, dict):
            options = {"config": self.config, "inputs_embeds": h, "attention_mask": attention_mask, "past_key_values": None,
                       "position_ids": p}
            masks = {"full_attention": llama.create_causal_mask(**options)}
        return masks["full_attention"]


class Edited(Decoder):
    def mask_of(self, h, attention_mask, p):
        mask = llama.create_causal_mask(self.config, h, attention_mask, None)
        if mask is not None:
            mask = mask.masked_fill((p >= 16)[:, None, :, None] & (p == 3)[:, None, None, :], LOW)
        return mask


class ByAttribute(Decoder):
    options: Any = {}

    def mask_of(self, h, attention_mask, p):
        return llama.create_causal_mask(self.config, h, attention_mask, None, **self.options)


create = llama.create_causal_mask


class ByAnotherName(Decoder):
    def mask_of(self, h, attention_mask, p):
        return create(self.config, h, attention_mask, None, p, None, lambda b, i, q, k: q - k < 500)


class Layer(llama.LlamaDecoderLayer):
    """A method that is given the mask under another name."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return super().forward(hidden_states, attention_mask=self.without_first(attention_mask), **kwargs)

    def without_first(self, mask):
        return None if mask is None else mask.roll(1)


class HandsOn(llama.LlamaDecoderLayer):
    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return self.twice(hidden_states, attention_mask, **kwargs)

    def twice(self, hidden_states, attention_mask, **kwargs):
        return super().forward(hidden_states * 2, attention_mask=attention_mask, **kwargs)


def ones(module, args, kwargs):
    return args, {**kwargs, "attention_mask": torch.ones_like(kwargs["input_ids"])}


def hook(module, args, kwargs):
    return args, {**kwargs, "attention_mask": (kwargs["input_ids"] != 3).long()}


class KnocksOut:
    """A hook object that changes the mask in a method."""

    def __call__(self, module, args, kwargs):
        return args, self.without_first(kwargs)

    def without_first(self, kwargs):
        mask = kwargs.get("attention_mask")
        return kwargs if mask is None else {**kwargs, "attention_mask": mask.roll(1)}


class Prepares(LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids=input_ids, **self.prepared(input_ids, kwargs))

    def prepared(self, ids, kwargs):
        return {**kwargs, "attention_mask": (ids != 3).long()}


def made(of_model: Any = LlamaForCausalLM, of_decoder: Any = llama.LlamaModel, of_layer: Any = None) -> LlamaForCausalLM:
    config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=64)
    model = of_model(config).eval()
    model.model.__class__ = of_decoder
    if of_layer is not None:
        model.model.layers[1].__class__ = of_layer
    return model


def hooked(where: str = "model", hook: Any = hook) -> LlamaForCausalLM:
    model = made()
    model.get_submodule(where).register_forward_pre_hook(hook, with_kwargs=True)
    return model


@pytest.mark.parametrize(("make", "what"), [
    (lambda: made(Padded), "Padded.forward makes an attention_mask of its own"), (hooked, "hook makes an attention_mask"),
    (lambda: made(of_decoder=Edited), "Decoder.forward makes an attention_mask"),
    (lambda: made(of_decoder=ByAttribute), "ByAttribute.mask_of passes arguments of unknown names"),
    (lambda: made(of_decoder=ByAnotherName), "ByAnotherName.mask_of passes or_mask_function|passes and_mask_function"),
    (lambda: made(of_layer=Layer), "Layer.forward reads or changes the attention_mask"),
    (lambda: hooked("model.layers.1.self_attn", KnocksOut()), "KnocksOut.without_first reads or changes the attention_mask"),
    (lambda: hooked("model", ones), "^ones makes an attention_mask"),
    (lambda: made(Prepares), "Prepares.prepared makes an attention_mask of its own")],
    ids=["model", "hook", "decoder", "options", "another name", "layer", "hook's method", "hook of a part", "model's method"])
def test_refused(make: Any, what: str) -> None:
    with pytest.raises(UnsupportedAttention, match=what):
        PagedModel(make(), QuireOptions(compiler="eager"))


@pytest.mark.parametrize("make", [lambda: made(of_decoder=Mapped), lambda: made(of_layer=HandsOn)], ids=["mapping", "method"])
def test_handed_on(make: Any) -> None:
    model = PagedModel(make(), QuireOptions(compiler="eager"))
    assert len(model.sites) == 2
    model.close()
