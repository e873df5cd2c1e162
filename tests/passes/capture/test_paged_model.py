"""``PagedModel``: one trace that serves every batch shape, several models side by side, and what is put back."""

from __future__ import annotations

import dataclasses
import functools
import gc
import types

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch._subclasses import FakeTensorMode

from quire import CommonAttentionMetadata, Step, UnsupportedAttention
from quire.attn_ops.kv_cache import PagedKVCache
from quire.passes.capture.paged_model import PagedModel, find_sites
from quire.passes.options import QuireOptions
from quire.passes.verify.sites import check_config, format_sites
from tests.adversarial import harness
from tests.passes.models import Attention, Tiny, tiny
from tests.zoo.configs import SERVED, Served, build
from tests.zoo.harness import TOLERANCE, error, reference, serve

pytestmark = pytest.mark.usefixtures("tokens_unchecked")

EAGER = QuireOptions(compiler="eager")


@pytest.mark.slow
def test_many_models_in_one_process() -> None:
    """Dynamo traces one code object at most eight times, and keeps its cache by code object."""
    first = PagedModel(build(SERVED["llama"]), EAGER)
    others = [PagedModel(build(SERVED["llama"], seed=seed), EAGER) for seed in range(1, 10)]
    for seed, model in [(0, first), (9, others[-1]), (4, others[3])]:
        batch = reference(build(SERVED["llama"], seed=seed, attention="eager"))
        assert error(serve(model, batch, page_size=4), batch) <= TOLERANCE


def test_numbers_that_differ_between_models_stay_numbers() -> None:
    """Dynamo makes a symbol of an attribute that it has seen with another value; scales and windows must be constants."""
    for head_dim, window in [(16, 8), (8, 4), (32, 6)]:
        options = {**SERVED["mistral"].options, "head_dim": head_dim, "sliding_window": window, "num_hidden_layers": 1}
        for site in find_sites(build(Served("MistralConfig", options))):
            assert (site.scale, site.window, site.head_dim) == (head_dim**-0.5, window, head_dim)
            assert isinstance(site.scale, float) and isinstance(site.window, int)


def test_no_cache_of_transformers_in_the_trace() -> None:
    """granitemoe's forward takes use_cache among its **kwargs, and its config says True."""
    model = PagedModel(build(SERVED["granitemoe"]), EAGER)
    joined = [n for n in model.graph.gm.graph.nodes if n.target is torch.cat and n.kwargs.get("dim") == -2]
    assert joined == []  # a cache appends keys along the tokens


def llama() -> nn.Module:
    """One layer of it."""
    return build(Served("LlamaConfig", {**SERVED["llama"].options, "num_hidden_layers": 1}))


class OwnModel(Tiny):
    """Not from transformers: no config, logits as a tensor, no logits_to_keep."""


def test_a_model_of_ones_own() -> None:
    model = OwnModel(Attention(4, 2, is_causal=True), Attention(4, 2, is_causal=True))
    model.train()
    paged = PagedModel(model, EAGER)  # traced in eval mode, or dropout would be in the graph
    assert model.training and model.layers[0].training
    assert [s.name for s in paged.sites] == ["layers.0", "layers.1"]
    paged.close()
    assert model.training and model.layers[0].training


def test_the_model_is_left_as_it_was_when_it_is_refused() -> None:
    model = OwnModel(Attention(4, 2, is_causal=True, dropout_p=0.1)).train()
    with pytest.raises(UnsupportedAttention, match="dropout"):
        PagedModel(model, EAGER)
    assert model.training
    # Dynamo wraps it in pages of text.
    model = llama()
    model.model.layers[0].self_attn.layer_idx = None
    with pytest.raises(UnsupportedAttention) as refused:
        PagedModel(model, EAGER)
    assert str(refused.value) == "LlamaAttention (layer None) has no integer layer_idx; quire cannot tell its KV cache."


def test_find_sites_leaves_the_model_alone() -> None:
    model = build(SERVED["gemma2"])
    before, config = dict(model.state_dict(keep_vars=True)), model.config.to_dict()
    sites = find_sites(model)
    assert format_sites(sites) == """\
layer  module                    route      needs                                     scale
0      model.layers.0.self_attn  interface  GQA 4:2x16, float32, window=8, softcap=5  0.0625
1      model.layers.1.self_attn  interface  GQA 4:2x16, float32, softcap=5            0.0625"""
    assert all(t is before[n] for n, t in model.state_dict(keep_vars=True).items())
    assert model.config.to_dict() == config


class NoTokens(nn.Module):
    def forward(self, targets=None):
        return targets


class NeedsMore(nn.Module):
    def forward(self, ids, mask):
        return ids


class Unnamed(Tiny):
    def forward(self, tokens, /):
        return super().forward(tokens, None)


class UnnamedIds(Tiny):
    def forward(self, input_ids=None, /, **options):
        return super().forward(input_ids, None)


class TwoLogits(Tiny):
    def forward(self, input_ids, position_ids):
        return (super().forward(input_ids, position_ids),)


class Breaks(Tiny):
    def forward(self, input_ids, position_ids):
        print("a graph break")
        torch._dynamo.graph_break()
        return super().forward(input_ids, position_ids)


class CausalIf(Tiny):
    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)[:, None]
        return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=x.shape[2] > 1)[:, 0])


@pytest.mark.parametrize("model, message", [
    (NoTokens(), "NoTokens.forward takes no input_ids; a ragged batch cannot be given to it"),
    (NeedsMore(), "NeedsMore.forward cannot do without ids and mask; quire gives a model token ids and positions"),
    (Unnamed(), "Unnamed.forward takes tokens by position only .* by name; leave out the /"),
    (UnnamedIds(), "UnnamedIds.forward takes input_ids by position only"),
    (Breaks(Attention(4, 2, is_causal=True)), "Breaks could not be traced into one graph"),
    (CausalIf(), r"CausalIf could not be traced .*condition on the length as is_causal .*is_causal=True.*test_paged_model.py"),
    (tiny(is_causal=True, dropout_p=0.5), "layers.0: dropout 0.5"), (Tiny(), "no attention was found"),
])
def test_refused(model, message) -> None:
    with pytest.raises(UnsupportedAttention, match=message):
        PagedModel(model, EAGER)


RECORDED: list[object] = []


def on_layer(hook):
    return lambda model, seen: model.layers[0].register_forward_hook(lambda module, args, out: hook(seen, out))


def on_rotary(hook):
    return lambda model, seen: model.model.rotary_emb.register_forward_hook(
        lambda module, args, out: hook(seen, module, out[0]))


def on_config(hook):
    return lambda model, seen: model.model.layers[0].register_forward_hook(lambda module, args, out: hook(model.config))


@pytest.mark.parametrize("record, what", [
    (on_layer(lambda seen, out: seen.append(out)), "what a hook of model.layers.0 holds[.] It runs"),
    (on_layer(lambda seen, out: RECORDED.append(out.shape)), "tests.passes.capture.test_paged_model.RECORDED[.] It runs"),
    (lambda model, seen: model.layers[0].register_forward_pre_hook(lambda module, args: setattr(module, "seen", args[0])),
     "model.layers.0[.] It runs"),
    # Where transformers changes things itself.
    pytest.param(on_rotary(lambda seen, module, out: seen.append(out)), "", marks=pytest.mark.slow),
    (on_rotary(lambda seen, module, out: setattr(module, "seen", out)), ""),
    pytest.param(on_config(lambda config: setattr(config, "seen", 1)), "", marks=pytest.mark.slow),
    (on_config(lambda config: config.rope_parameters.update(seen=1)), ""),
], ids=["closure", "global", "module", "rotary_closure", "rotary", "config", "rope_parameters"])
def test_hooks_that_record_are_refused(record, what) -> None:
    model, seen = tiny(is_causal=True) if what else llama(), []
    record(model, seen)
    with pytest.raises(UnsupportedAttention, match=f"changes what outlives the call: {what}"):
        PagedModel(model, EAGER)
    assert RECORDED == seen == []


@pytest.mark.parametrize(("before", "served"), [(torch.float32, True), (torch.bfloat16, False), (None, False)])
def test_an_assignment_of_what_is_there_changes_nothing(before, served) -> None:
    """As in each forward of bitsandbytes 0.49."""
    class State:
        pass

    model, state = tiny(is_causal=True), State()
    vars(state).update({} if before is None else {"dtype": before})
    model.layers[0].state = state
    model.layers[0].register_forward_pre_hook(lambda module, args: setattr(module.state, "dtype", args[0].dtype))
    if served:
        PagedModel(model, QuireOptions(compiler="eager")).close()
    else:
        with pytest.raises(UnsupportedAttention, match=r"changes what outlives the call: model.layers.0.state[.] It runs"):
            PagedModel(model, QuireOptions(compiler="eager"))


LLAMA = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                 num_attention_heads=4, num_labels=3, pad_token_id=0)


@pytest.mark.parametrize("kind, message", [
    ("LlamaForTokenClassification", "has no language-model head: it gives 3 logits per token, and its vocabulary has 64"),
    ("LlamaForSequenceClassification", "no language-model head: its logits are not"),
    ("LlamaModel", "no language-model head: its result has no logits"),
])
def test_models_without_a_head(kind, message) -> None:
    with pytest.raises(UnsupportedAttention, match=message):
        PagedModel(getattr(transformers, kind)(LLAMA).eval(), EAGER)


def test_checkpoints_without_a_head(tmp_path) -> None:
    """transformers loads them, with a random head."""
    for kind, served in (("LlamaForTokenClassification", False), ("LlamaModel", False), ("LlamaForCausalLM", True)):
        getattr(transformers, kind)(LLAMA).save_pretrained(tmp_path / kind)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind).eval()
        if served:
            PagedModel(model, EAGER).close()
        else:
            with pytest.raises(UnsupportedAttention, match=f"is of {kind}, without the weights of a language-model head"):
                PagedModel(model, EAGER)


class IgnoresKeep(Tiny):
    def forward(self, input_ids, position_ids, logits_to_keep=0):
        return super().forward(input_ids, position_ids)


def test_logits_to_keep_that_is_ignored() -> None:
    model = IgnoresKeep(Attention(4, 2, is_causal=True)).eval()
    paged, ids = PagedModel(model, EAGER), torch.arange(6)
    cache = PagedKVCache.for_sites(paged.sites, num_pages=3, page_size=8, device="cpu")
    meta = CommonAttentionMetadata.build([6], [6], [[1]], page_size=8)
    got = paged(Step(cache, meta), ids, meta.positions, torch.tensor([5, 2]))
    with torch.no_grad():
        want = model(ids[None], ids[None])[0, [5, 2]]
    assert got.shape == want.shape and (got - want).abs().max() <= 1e-5


def test_hooks_that_change_outputs_are_not_refused() -> None:
    model, factors = tiny(is_causal=True), {"last": [2.0]}
    model.layers[0].register_forward_hook(lambda module, args, out: out * factors["last"][-1])
    assert len(PagedModel(model, EAGER).sites) == 2


def test_a_model_dropped_unclosed_has_weights_of_their_own() -> None:
    model = build(SERVED["llama"])

    def storages():
        return {p.untyped_storage().data_ptr() for p in model.parameters()}

    before, count = {n: p.clone() for n, p in model.named_parameters()}, len(storages())
    paged = PagedModel(model, QuireOptions(compiler="eager", fusions="all", page_size=4))
    assert len(storages()) < count
    with FakeTensorMode():  # as in another model's trace
        del paged
        gc.collect()
    assert len(storages()) == count
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_logits_may_come_in_a_tuple() -> None:
    model = TwoLogits(Attention(4, 2, is_causal=True)).eval()
    assert len(PagedModel(model, EAGER).sites) == 1


@pytest.mark.parametrize("name, changes, message", [
    ("llama", dict(is_encoder_decoder=True), "llama is an encoder-decoder model; quire serves decoder-only models"),
    ("llama", dict(layer_types=["conv", "full_attention"]), r"llama has layers of type \['conv'\]"),
    ("llama", dict(use_bidirectional_attention=True), "configured with use_bidirectional_attention=True"),
    ("llama", dict(layer_types=["indexed_attention", "conv"]), r"\['conv'\]: they keep state .*\['indexed_attention'\]: each "
     "token chooses by their content"),
    ("llama", dict(rope_parameters={"rope_type": "dynamic"}), "rope_type 'dynamic'"),
])
def test_configs_refused_before_tracing(name, changes, message) -> None:
    config = build(SERVED[name]).config
    check_config(config)
    for key, value in changes.items():
        object.__setattr__(config, key, value)
    with pytest.raises(UnsupportedAttention, match=message):
        check_config(config)


@pytest.mark.parametrize("name, changes, message", [
    ("llama", dict(num_hidden_layers=3), "llama has 3 layers but 2 attention sites were found"),
    pytest.param("llama", dict(attn_logit_softcapping=30.0), "configured with attn_logit_softcapping=30.0, but this version",
                 marks=pytest.mark.slow),
    ("llama", dict(sliding_window=8), "configured with sliding_window=8, but attends without it at layer 0"),
    ("llama", dict(sliding_window=8, use_sliding_window=False), "keeps the last 8 tokens of layer 0 .*, which attends to all"),
    ("gemma2", dict(layer_types=["sliding_attention"] * 2), r"layer 1 \(model.layers.1.self_attn\) is a sliding_attention"),
])
def test_what_was_found_must_agree_with_the_config(name, changes, message) -> None:
    model = build(SERVED[name])
    for key, value in changes.items():
        setattr(model.config, key, value)
    with pytest.raises(UnsupportedAttention, match=message):
        PagedModel(model, EAGER)


def test_a_model_without_some_of_its_layers_is_told_apart() -> None:
    """As pruned by hand: not in words of attention that quire does not see, for which nothing can be done."""
    model = build(SERVED["llama"])
    del model.model.layers[1:]
    with pytest.raises(UnsupportedAttention, match=r"Of model\.layers only 1 ran.*set model\.config\.num_hidden_layers = 1"):
        PagedModel(model, EAGER)
    model.config.num_hidden_layers = 1
    PagedModel(model, EAGER).close()


@dataclasses.dataclass
class _Config:
    """A config as small models have it. What it says is not in the words of transformers."""

    n_layer: int = 1
    num_hidden_layers: int = 7
    vocab_size: int = harness.VOCAB + 8
    layer_types: tuple[str, ...] = ("mixer",)
    sliding_window: int = 3


@pytest.mark.parametrize("config", [_Config(), {"n_layer": 1}, types.SimpleNamespace(layers=2)])
def test_a_config_of_the_users_own_is_not_read_as_one_of_transformers(config: object) -> None:
    """nanoGPT and its like keep their settings under that name."""
    def configured(kind: type[nn.Module]) -> nn.Module:
        model = kind()
        model.config = config  # type: ignore[assignment]
        return model

    assert harness.outcome(configured, "engine") == "exact"


def _of_four_layers(name: str, kept: list[int]) -> nn.Module:
    """The model with some of its layers, in this order, as by hand: the layers keep their numbers, and the config its types."""
    entry = SERVED[name]
    options = {**entry.options, "num_hidden_layers": 4}
    if "layer_types" in options:
        options["layer_types"] = ["sliding_attention", "full_attention"] * 2
    model = build(Served(entry.config, options))
    model.model.layers = nn.ModuleList([model.model.layers[i] for i in kept])
    model.config.num_hidden_layers = len(kept)
    return model


@pytest.mark.parametrize("name, kept", [
    ("gemma3", [1, 2, 3]), ("gemma3", [1, 0, 2, 3]), *(pytest.param(name, [1, 2, 3], marks=pytest.mark.slow) for name in (
        "llama4", "gpt_oss", "cohere2"))])
def test_layers_that_run_in_places_of_another_kind_are_refused(name: str, kept: list[int]) -> None:
    """transformers' mask is of the place, and the window that it hands to attention of the layer: it would attend otherwise
    than quire, to tokens further away than a short trial has."""
    with pytest.raises(UnsupportedAttention, match=r"layer [13] \(model\.layers\.[02]\.self_attn\) runs in the place of layer "
                       r"[02], for which .* make config\.layer_types, and layer_idx of each layer's attention, agree"):
        PagedModel(_of_four_layers(name, kept), EAGER)


@pytest.mark.parametrize("kept, renumbered", [([2, 3], False), ([1, 2], True)])
def test_layers_that_were_removed_with_their_types_are_served(kept: list[int], renumbered: bool) -> None:
    """Two kinds in turn: without the first two, each place is of the kind that it was."""
    model = _of_four_layers("gemma3", kept)
    if renumbered:
        model.config.layer_types = [model.config.layer_types[i] for i in kept]
        for place, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = place
    batch = reference(model)
    assert error(serve(PagedModel(model, EAGER), batch, page_size=4), batch) <= TOLERANCE


@pytest.mark.parametrize("attention", ["eager", pytest.param("sdpa", marks=pytest.mark.slow)])
def test_eager_attention_that_scales_its_scores_in_place(attention: str) -> None:
    model = build(SERVED["falcon"], attention=attention)
    batch = reference(model)
    assert error(serve(PagedModel(model, EAGER), batch, page_size=4), batch) <= TOLERANCE


def test_eager_attention_written_by_hand_names_the_way_out() -> None:
    model = build(SERVED["falcon"], attention="eager")
    # In transformers 5.23 no such class is left whose steps quire does not follow: of this layer it sees no attention.
    model.transformer.h[1].self_attention.forward = lambda hidden_states, **options: (hidden_states, None)
    with pytest.raises(UnsupportedAttention, match=r"Under attn_implementation='eager' .*set_attn_implementation\('sdpa'\)"):
        PagedModel(model, EAGER)


class Wrapped(torch.nn.Module):
    def __init__(self, forward) -> None:
        super().__init__()
        self.inner, self.compute = llama(), forward

    def forward(self, input_ids, position_ids, pixel_values=None):
        return self.inner(input_ids, position_ids=position_ids * self.compute(input_ids, pixel_values), use_cache=False)


def needs_pixels(ids, pixels):
    if pixels is None:
        raise ValueError("You have to specify pixel_values")


def test_refusals_of_forwards_say_what_is_wrong() -> None:
    """Not in the words of the tracer: an image model without its image, a path that depends on the tokens."""
    class Needs(Wrapped):
        def forward(self, input_ids, pixel_values, position_ids=None):
            return super().forward(input_ids, position_ids, pixel_values)

    with pytest.raises(UnsupportedAttention, match="Needs.forward cannot do without pixel_values"):
        PagedModel(Needs(needs_pixels), EAGER)
    with pytest.raises(UnsupportedAttention, match="forward raises ValueError .* alone: You have to specify pixel_values"):
        PagedModel(Wrapped(needs_pixels), EAGER)
    with pytest.raises(UnsupportedAttention, match="reads values of tensors on the host, as a branch on data does"):
        PagedModel(Wrapped(lambda ids, pixels: 1 if ids.sum() > 3 else 2), EAGER)


class Scale:
    @functools.cached_property
    def factor(self) -> float:
        return 2.0


def test_a_property_that_is_computed_once_may_be_read_for_the_first_time() -> None:
    """Chameleon's table of image tokens."""
    class Scaled(Wrapped):
        def __init__(self) -> None:
            super().__init__(lambda ids, pixels: 1)
            self.scale = Scale()

        def forward(self, input_ids, position_ids):
            return super().forward(input_ids, position_ids).logits * self.scale.factor

    PagedModel(Scaled(), EAGER).close()


def test_a_path_for_long_rows_is_served_up_to_its_length() -> None:
    """A batch may have more tokens than that, as its sequences have not. A path for one length is refused in any case."""
    model = harness.Model(lambda m, x, p: x * 2 if x.shape[1] > 40 else x)
    with pytest.raises(UnsupportedAttention, match=r"path of its own.* for some numbers of tokens .*<= 40\).*max_model_len=40"):
        PagedModel(model, QuireOptions(compiler="eager", max_model_len=41))
    long = CommonAttentionMetadata.build([41], [41], [[1, 2, 3, 4, 5, 6]], page_size=8)
    any_length = PagedModel(model, EAGER)
    cache = PagedKVCache.for_sites(any_length.sites, num_pages=12, page_size=8, device="cpu")
    with pytest.raises(UnsupportedAttention, match="at most 40 tokens"):
        any_length(Step(cache, long), torch.randint(32, (41,)), long.positions, torch.arange(41))
    any_length.close()
    paged = PagedModel(model, QuireOptions(compiler="eager", max_model_len=40))
    ids = [torch.randint(32, (n,)) for n in (40, 33)]
    meta = CommonAttentionMetadata.build([40, 33], [40, 33], [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], page_size=8)
    cache = PagedKVCache.for_sites(paged.sites, num_pages=12, page_size=8, device="cpu")
    got = paged(Step(cache, meta), torch.cat(ids), meta.positions, torch.arange(73))
    with torch.no_grad():
        want = torch.cat([model(i[None], torch.arange(len(i))[None])[0] for i in ids])
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    with pytest.raises(UnsupportedAttention, match="path of its own"):
        PagedModel(harness.Model(lambda m, x, p: x * 2 if x.shape[1] == 37 else x), QuireOptions(
            compiler="eager", max_model_len=40))
