"""Attention classes of the user's that choose their function by the implementation's name: what they compute is served, and
not what transformers' interface would make of it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import GenerationMixin, MistralConfig, MistralModel, MistralPreTrainedModel
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama as llama

from quire import CommonAttentionMetadata, Engine, UnsupportedAttention, step
from quire.attn_ops.kv_cache import PagedKVCache
from quire.passes.capture.paged_model import find_sites
from tests.tiny import GREEDY, small_llama

pytestmark = pytest.mark.usefixtures("tokens_unchecked")

WINDOW = 24  # beyond the trial's sequences, and beyond the row that stands for any length
IDS = [3 + i % 40 for i in range(40)]
SHORT = replace(GREEDY, max_tokens=6, ignore_eos=True)
# Sums of up to 40 numbers in float32, of order 1.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def own_traces() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def windowed(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """A window that no config mentions."""
    key, value = (llama.repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    i = torch.arange(scores.shape[-1])
    scores = scores.masked_fill((i[:, None] - i >= WINDOW) | (i[:, None] < i), -torch.inf)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class Own(llama.LlamaAttention):
    def choose(self):
        raise NotImplementedError

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (f(hidden_states).view(shape).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        attention_fn = self.choose()
        out, weights = attention_fn(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*shape[:2], -1).contiguous()), weights


class Unless(Own):
    """As transformers' models before ``get_interface``."""

    def choose(self):
        name = self.config._attn_implementation
        return windowed if name == "eager" else llama.ALL_ATTENTION_FUNCTIONS[name]


class Default(Own):
    def choose(self):
        return llama.ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, windowed)


class ByName(Own):
    def choose(self):
        return windowed if getattr(self.config, "_attn_implementation") == "sdpa" else llama.eager_attention_forward  # noqa: B009


def chosen(self):
    return llama.ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, windowed)


class ByHelper(Own):
    def choose(self):
        return chosen(self)


CHOOSERS = {"own": chosen}


class ByTable(Own):
    """Of functions that are not called by a name."""

    def choose(self):
        return CHOOSERS["own"](self)


class Layer(llama.LlamaDecoderLayer):
    """Computes something else by the name, with transformers' own attention."""

    def forward(self, hidden_states, *args, **kwargs):
        factor = 2.0 if self.self_attn.config._attn_implementation == "sdpa" else 1.0
        return super().forward(hidden_states * factor, *args, **kwargs)


def model_with(kind: type, implementation: str) -> Any:
    model = small_llama(0.3)
    model.set_attn_implementation(implementation)
    for layer in model.model.layers:
        (layer if issubclass(kind, llama.LlamaDecoderLayer) else layer.self_attn).__class__ = kind
    return model


KINDS = [(Unless, "eager"), (Default, "eager"), (ByName, "sdpa"), (ByHelper, "eager"), (ByTable, "eager"), (Layer, "sdpa")]


@pytest.mark.parametrize(("kind", "implementation"), KINDS)
def test_engine(kind: type, implementation: str) -> None:
    model = model_with(kind, implementation)
    expected = model.generate(torch.tensor([IDS]), max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=False)
    with Engine(model, num_pages=40, max_num_seqs=4, cudagraph_capture_sizes=[]) as engine:
        assert engine.generate(IDS, SHORT)[0].token_ids == expected[0, len(IDS) :].tolist()
    assert model.config._attn_implementation == implementation


def steps(model: Any, lengths: list[int]) -> torch.Tensor:
    """Logits of ``IDS`` in steps by hand of these lengths."""
    cache = PagedKVCache.for_sites(find_sites(small_llama(0.3)), num_pages=30, page_size=4, device="cpu")
    called, done, found = torch.compile(model, backend="quire", options={"compiler": "eager"}), 0, []
    for n in lengths:
        done += n
        meta = CommonAttentionMetadata.build([n], [done], [list(range(1, 12))], page_size=4)
        with torch.no_grad(), step(cache, meta):
            found.append(called(input_ids=torch.tensor([IDS[done - n : done]]), position_ids=meta.positions[None],
                                use_cache=False).logits[0])
    return torch.cat(found)


@pytest.mark.parametrize(("kind", "implementation"), KINDS)
def test_steps_by_hand(kind: type, implementation: str) -> None:
    model = model_with(kind, implementation)
    with torch.no_grad():
        want = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    assert (steps(model, [17, 1, 22]) - want).abs().max() <= TOLERANCE * want.abs().max()


def scaled_by_name(self, hidden_states, *args, **kwargs):
    factor = 2.0 if self.self_attn.config._attn_implementation == "sdpa" else 1.0
    return llama.LlamaDecoderLayer.forward(self, hidden_states * factor, *args, **kwargs)


def test_a_forward_put_on_one_layer() -> None:
    model = model_with(llama.LlamaDecoderLayer, "sdpa")
    layer = model.model.layers[-1]
    layer.forward = types.MethodType(scaled_by_name, layer)
    expected = model.generate(torch.tensor([IDS]), max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=False)
    with Engine(model, num_pages=40, max_num_seqs=4, cudagraph_capture_sizes=[]) as engine:
        assert engine.generate(IDS, SHORT)[0].token_ids == expected[0, len(IDS) :].tolist()


class AroundForCausalLM(MistralPreTrainedModel, GenerationMixin):
    """A forward of the user's around transformers' layers, which ask for a window; ``masks``: it makes the mask of that."""

    def __init__(self, config, masks: bool) -> None:
        super().__init__(config)
        self.model, self.masks = MistralModel(config), masks
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, position_ids=None, attention_mask=None, past_key_values=None, use_cache=None, **kwargs):
        x = self.model.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None]
        mask = None
        if self.masks:
            mask = create_sliding_window_causal_mask(config=self.config, inputs_embeds=x, attention_mask=attention_mask,
                                                     past_key_values=past_key_values, position_ids=position_ids)
        rotary = self.model.rotary_emb(x, position_ids)
        for layer in self.model.layers:
            x = layer(x, attention_mask=mask, position_ids=position_ids, position_embeddings=rotary)
        return CausalLMOutputWithPast(logits=self.lm_head(self.model.norm(x)))


def around(masks: bool) -> AroundForCausalLM:
    torch.manual_seed(0)
    sizes = small_llama(0.3).config.to_dict()  # so that its cache fits
    given = {name: sizes[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                            "num_attention_heads", "num_key_value_heads")}
    config = MistralConfig(**given, sliding_window=WINDOW, initializer_range=0.3)
    return AroundForCausalLM(config, masks).eval()


def test_a_window_without_its_mask() -> None:
    """The mask decides, and not what a layer asks attention for: without one such a model sees everything."""
    model, ids = around(masks=True), torch.tensor([IDS])
    want = model(ids).logits[0]
    with Engine(model, num_pages=40, max_num_seqs=4, cudagraph_capture_sizes=[]) as engine:
        assert engine.runner.sites[0].window == WINDOW
        assert engine.generate(IDS, replace(SHORT, max_tokens=1))[0].token_ids == [int(want[-1].argmax())]
    assert (steps(model, [17, 1, 22]) - want).abs().max() <= TOLERANCE * want.abs().max()
    seeing_all = around(masks=False)
    other = seeing_all(ids).logits[0]
    assert (other - want).abs().max() > 0.1 * want.abs().max()
    with pytest.raises(UnsupportedAttention, match=rf"(?s)attends without it.*window of {WINDOW}, but the forward around"):
        Engine(seeing_all, num_pages=40)
    assert (steps(seeing_all, [17, 1, 22]) - other).abs().max() <= TOLERANCE * other.abs().max()  # no cache of generate's


@pytest.mark.parametrize("types, message", [
    (["chunked_attention"], "layer 0 .* is a chunked_attention layer, but attends without chunks"),
    (None, f"the cache that generate.. makes for llama keeps the last {WINDOW} tokens of layer 0 .*, which attends to all"),
])
def test_chunks_of_a_class_without_them(types, message) -> None:
    """The cache of ``generate`` goes by the config alone, and drops what the forward would see."""
    model = small_llama(0.3)
    model.config.attention_chunk_size, model.config.layer_types = WINDOW, types
    with pytest.raises(UnsupportedAttention, match=message):
        Engine(model, num_pages=40)


def biased(module, query, key, value, attention_mask, scaling, **kwargs):
    """Cannot be paged: far keys count less."""
    key, value = (llama.repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    i = torch.arange(key.shape[2])
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling + torch.where(i[:, None] - i < WINDOW, 0.0, -1.0)
    weights = (scores.masked_fill(i[:, None] < i, -torch.inf)).softmax(-1)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class Biased(Own):
    def choose(self):
        name = self.config._attn_implementation
        return biased if name == "eager" else llama.ALL_ATTENTION_FUNCTIONS[name]


class BiasedByTable(Own):
    """By a function that no method calls by its name."""

    def choose(self):
        return CHOOSERS["biased"](self)


def choose_biased(self):
    name = self.config._attn_implementation
    return biased if name == "eager" else llama.ALL_ATTENTION_FUNCTIONS[name]


CHOOSERS["biased"] = choose_biased


@pytest.mark.parametrize(("kind", "by_hand"), [(Biased, "Biased.choose"), (BiasedByTable, "forward")])
def test_what_cannot_be_paged_is_refused(kind: type, by_hand: str) -> None:
    """By an engine and by hand, where it would be seen from position 24 on only."""
    model = model_with(kind, "eager")
    with pytest.raises(UnsupportedAttention, match="(?s)its mask is not proven.*, which is not transformers'"):
        Engine(model, num_pages=40)
    with pytest.raises(UnsupportedAttention, match=f"{by_hand}, which is not transformers' code, chooses the attention"):
        steps(model, [17, 1, 22])
