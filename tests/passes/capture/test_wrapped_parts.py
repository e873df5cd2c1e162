"""Code around parts of a model that asks for the cache: an engine has none, so that tokens would silently be others."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaModel, apply_rotary_pos_emb

import quire
from quire.graph_runner.live_model import LiveModel
from quire.graph_runner.own_forward import reads_inputs
from tests.tiny import small_llama

OPTIONS: dict[str, Any] = dict(num_pages=40, max_num_seqs=4, max_model_len=60)
IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 9]])


class OfNewTokens(LlamaDecoderLayer):
    """Changes tokens after the prompt."""

    def forward(self, hidden_states: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length(1) >= IDS.shape[1]:
            hidden_states = hidden_states.flip(-1)
        return super().forward(hidden_states, past_key_values=past_key_values, **kwargs)


class WhileCaching(LlamaModel):
    def forward(self, input_ids: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
        out = LlamaModel.forward(self, input_ids=input_ids, use_cache=use_cache, **kwargs)
        if use_cache:
            out.last_hidden_state = out.last_hidden_state.flip(-1)
        return out


class PassingOn(LlamaDecoderLayer):
    def forward(self, hidden_states: Any, past_key_values: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
        return super().forward(2 * hidden_states, past_key_values=past_key_values, use_cache=use_cache, **kwargs)


class Anew(LlamaAttention):
    """As a model's own attention: it updates a cache where there is one."""

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, past_key_values: Any = None,
                **kwargs: Any) -> Any:
        q, k, v = (p(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (
            self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.flatten(2)), None


def _long(given: Any) -> bool:
    return given["past_key_values"].get_seq_length(1) >= IDS.shape[1]


def by_a_helper(module: Any, args: Any, kwargs: Any) -> Any:
    return ((args[0].flip(-1),) if _long(kwargs) else args), kwargs


class Steering:
    def __call__(self, module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        return out if kwargs.get("past_key_values") is None else out.flip(-1)


class ByAMethod:
    def __call__(self, module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        return self.applied(kwargs, out)

    def applied(self, kwargs: Any, out: Any) -> Any:
        return out if kwargs.get("past_key_values") is None else out.flip(-1)


HANDLERS = {"late": ByAMethod().applied}


def by_a_table(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
    return HANDLERS["late"](kwargs, out)


class Around(torch.nn.Module):
    """A wrapper, which calls what it wraps as a module."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        out, cache = self.layer(hidden_states, **kwargs), kwargs.get("past_key_values")
        late = cache is not None and cache.get_seq_length() > IDS.shape[1]
        return out.flip(-1) if late else out


class AnewOfNewTokens(LlamaDecoderLayer):
    """Calls no forward of transformers' layers."""

    def forward(self, hidden_states: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        out, _ = self.self_attn(self.input_layernorm(hidden_states), past_key_values=past_key_values, **kwargs)
        if past_key_values is not None:
            out = out * 1.5
        return hidden_states + out


class OfPositions(LlamaDecoderLayer):
    """By numbers that the cache gave."""

    def forward(self, hidden_states: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        before = past_key_values.get_seq_length() if past_key_values is not None else 0
        return super().forward(hidden_states * (1 + before), past_key_values=past_key_values, **kwargs)


def by_another_name(model: Any) -> None:
    layer = model.model.layers[1]
    own = layer.forward
    layer.forward = lambda hidden_states, **kwargs: own(hidden_states, **kwargs).roll(
        int(kwargs.get("past_key_values") is not None), -1)


class Prepares(LlamaForCausalLM):
    """By a method that is given all arguments."""

    def forward(self, **kwargs: Any) -> Any:
        return super().forward(**self.prepared(kwargs))

    def prepared(self, kwargs: Any) -> Any:
        late = kwargs.get("past_key_values") is not None and kwargs["past_key_values"].get_seq_length()
        return {**kwargs, "input_ids": kwargs["input_ids"] + 1} if late else kwargs


class Copied(LlamaModel):
    """As models in remote code: a cache is made, and positions follow from it where none are given."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None,
                use_cache: Any = None, cache_position: Any = None, **kwargs: Any) -> Any:
        use_cache = use_cache if use_cache is not None else self.config.use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        h = self.embed_tokens(input_ids)
        if cache_position is None:
            before = past_key_values.get_seq_length() if past_key_values is not None else 0
            cache_position = torch.arange(before, before + h.shape[1])
        if position_ids is None:
            position_ids = cache_position.unsqueeze(0)
        options = {"config": self.config, "inputs_embeds": h, "attention_mask": attention_mask,
                   "past_key_values": past_key_values, "position_ids": position_ids}
        mask, rope = create_causal_mask(**options), self.rotary_emb(h, position_ids=position_ids)
        for layer in self.layers[: self.config.num_hidden_layers]:
            h = layer(h, attention_mask=mask, position_embeddings=rope, position_ids=position_ids,
                      past_key_values=past_key_values, use_cache=use_cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(h), past_key_values=past_key_values if use_cache else None)


class WithALoss(LlamaForCausalLM):
    """As users write them: of the mask and all keyword arguments where there are labels."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, labels: Any = None,
                **kwargs: Any) -> Any:
        if position_ids is None and attention_mask is not None:
            position_ids = attention_mask.cumsum(-1) - 1
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        if not self.config.use_return_dict:  # warns once that it is deprecated
            return out.to_tuple()
        if labels is not None:
            given = {name: x for name, x in kwargs.items() if name != "past_key_values"}
            out.loss = self.loss_function(out.logits * attention_mask[..., None], labels, 64, **given)
        return out


class OfLabels(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)
        if labels is not None:
            out.logits = out.logits.roll(int(past_key_values is not None and past_key_values.get_seq_length() > 8), -1)
        return out


class GivesLabels(OfLabels):
    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, labels=input_ids, **kwargs)


def by_labels_of_a_hook(model: Any) -> None:
    model.__class__ = OfLabels
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, dict(kwargs, labels=0)), with_kwargs=True)


def scaled(module: Any, args: Any, kwargs: Any) -> Any:
    return (2 * args[0],), kwargs


class Merging(LlamaDecoderLayer):
    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states, **(kwargs | {"position_ids": kwargs.get("position_ids")}))


class MergingMore(LlamaDecoderLayer):
    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states * kwargs.get("use", 1), **(kwargs | {"use": int(
            kwargs.get("past_key_values") is not None)}))


def by_default(model: Any) -> None:
    for layer in model.model.layers:
        layer.forward = lambda *args, _own=layer.forward, **kwargs: 2 * _own(*args, **kwargs)


def of_the_cache(own: Any, *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs) * (1 if kwargs.get("past_key_values") is None else 2)


def by_default_to_a_reader(model: Any) -> None:
    for layer in model.model.layers:
        own = functools.partial(of_the_cache, layer.forward)
        layer.forward = lambda *args, _own=own, **kwargs: _own(*args, **kwargs)


def is_a(cls: type, where: str) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(where), "__class__", cls)


def on_the_instance(model: Any) -> None:
    layer = model.model.layers[1]
    own = layer.forward

    def forward(hidden_states: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        found = own.__self__.__class__.forward(layer, hidden_states, past_key_values=past_key_values, **kwargs)
        return found if past_key_values is None else found.flip(-1)

    layer.forward = forward


READERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a layer": (is_a(OfNewTokens, "model.layers.1"), "OfNewTokens.forward of model.layers.1 reads past_key_values"),
    "the inner model": (is_a(WhileCaching, "model"), "WhileCaching.forward of model reads use_cache"),
    "an instance": (on_the_instance, "of model.layers.1 reads past_key_values"),
    "a hook": (lambda m: m.model.layers[1].register_forward_pre_hook(by_a_helper, with_kwargs=True),
               "a hook of model.layers.1, by_a_helper, reads past_key_values"),
    "an object": (lambda m: m.model.layers[1].register_forward_hook(Steering(), with_kwargs=True),
                  "a hook of model.layers.1, Steering.__call__, reads past_key_values"),
    "an object's method": (lambda m: m.model.layers[1].register_forward_hook(ByAMethod(), with_kwargs=True),
                           "a hook of model.layers.1, ByAMethod.__call__, reads past_key_values"),
    "a table": (lambda m: m.model.layers[1].register_forward_hook(by_a_table, with_kwargs=True),
                "by_a_table, reads its keyword arguments in a way that cannot be followed"),
    "a wrapper": (lambda m: m.model.layers.__setitem__(1, Around(m.model.layers[1])),
                  "Around.forward of model.layers.1 reads past_key_values"),
    "an instance, by another name": (by_another_name, "<lambda> of model.layers.1 reads past_key_values"),
    "anew": (is_a(AnewOfNewTokens, "model.layers.1"), "AnewOfNewTokens.forward of model.layers.1 reads past_key_values"),
    "numbers": (is_a(OfPositions, "model.layers.1"), "OfPositions.forward of model.layers.1 reads past_key_values"),
    "a merged dict": (is_a(MergingMore, "model.layers.1"), "MergingMore.forward of model.layers.1 reads its keyword"),
    "a default": (by_default_to_a_reader, "<lambda> of model.layers.0 reads its keyword"),
    "labels of another class": (lambda m: setattr(m, "__class__", GivesLabels), "OfLabels.forward (of .* )?reads"),
    "labels of a hook": (by_labels_of_a_hook, "(OfLabels.forward|<lambda>,?) (of .* )?reads"),
    "the model's method": (lambda m: setattr(m, "__class__", Prepares),
                           r"Prepares.forward (of Prepares )?reads past_key_values"),
}


@pytest.mark.parametrize("which", READERS)
def test_readers_of_the_cache(which: str) -> None:
    """``generate`` falls back and says why; an engine, which has no other way, refuses."""
    model = small_llama(std=0.3, num_hidden_layers=2)
    READERS[which][0](model)
    expected = model.generate(IDS, max_new_tokens=6, do_sample=False)
    with pytest.raises(quire.UnsupportedAttention, match=READERS[which][1]):
        quire.Engine(model, **OPTIONS)
    quire.paged(model, **OPTIONS)
    with pytest.warns(UserWarning, match=READERS[which][1]):
        assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.parametrize("change", [
    is_a(PassingOn, "model.layers.1"), is_a(Anew, "model.layers.1.self_attn"),
    is_a(Copied, "model"), is_a(WithALoss, ""), is_a(Merging, "model.layers.1"), by_default,
    lambda m: m.model.layers[1].register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True),
    lambda m: m.model.layers[1].register_forward_pre_hook(scaled, with_kwargs=True)],
    ids=["passing on", "anew", "copied", "loss", "merging", "default", "lambda", "hook"])
@pytest.mark.filterwarnings("error:quire:UserWarning")
def test_others_are_served(change: Callable[[Any], Any]) -> None:
    model = small_llama(std=0.3, num_hidden_layers=2)
    change(model)
    expected = model.generate(IDS, max_new_tokens=6, do_sample=False)
    quire.paged(model, **OPTIONS)
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), expected)


class Recorder:
    """As tools that look into models leave them."""

    def __init__(self, on: bool = True) -> None:
        self.on, self.seen = on, list[Any]()

    def __call__(self, module: Any, args: Any, out: Any) -> None:
        if self.on:
            self.seen.append(out)


@pytest.mark.parametrize("first", [True, False])
def test_generate_with_a_hook_that_records(first: bool, monkeypatch: Any) -> None:
    """It falls back while the hook is there and records, with one trace, and has all that it recorded."""
    model = small_llama(std=0.3, num_hidden_layers=2)
    run = functools.partial(model.generate, IDS, max_new_tokens=6, do_sample=False, eos_token_id=None)
    expected = run()
    quire.paged(model, **OPTIONS)
    paged = functools.partial(model.generate, IDS, max_new_tokens=6, do_sample=False, eos_token_id=None)
    if not first:
        assert torch.equal(paged(), expected)
    traces = list[Any]()
    monkeypatch.setattr(LiveModel, "_trace", lambda self, own=LiveModel._trace: traces.append(0) or own(self))
    recorder = Recorder()
    hook = model.model.layers[0].register_forward_hook(recorder)
    with pytest.warns(UserWarning, match="has hooks, .* and with them .*changes what outlives the call: "):
        assert torch.equal(paged(), expected)
    assert len(recorder.seen) == 6
    assert torch.equal(paged(), expected)
    assert (len(recorder.seen), len(traces)) == (12, 1)
    recorder.on = False
    assert torch.equal(paged(), expected)
    hook.remove()
    assert torch.equal(paged(), expected)
    assert (len(recorder.seen), len(traces)) == (12, 3)


def test_what_hooks_are_not_to_blame_for_is_an_error() -> None:
    model = small_llama(std=0.3)
    model.config._attn_implementation_internal = "unheard of"
    quire.paged(model, **OPTIONS)
    with pytest.raises(quire.UnsupportedAttention, match="unheard of"):
        model.generate(IDS, max_new_tokens=6, do_sample=False)


def test_a_shard_of_a_parameter() -> None:
    """After FSDP2's fully_shard; the reason was an attribute of PyTorch's."""
    class DTensor(torch.nn.Parameter):
        pass

    model = small_llama(std=0.3)
    model.lm_head.weight = DTensor(model.lm_head.weight.data)
    with pytest.raises(quire.UnsupportedAttention, match="lm_head.weight is a DTensor, a shard of a parameter"):
        quire.Engine(model, **OPTIONS)


def test_generate_may_ask_at_each_call() -> None:
    model = small_llama(std=0.3, num_hidden_layers=32)
    assert reads_inputs(model, None) is None
    began = time.perf_counter()
    assert reads_inputs(model, None) is None
    assert time.perf_counter() - began < 0.1
