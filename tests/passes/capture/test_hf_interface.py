"""The attention function that transformers calls: what reaches the semantic op, what is refused, what is put back."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
import transformers

from quire import AttentionCapabilities, CommonAttentionMetadata, UnsupportedAttention
from quire.attn_ops.attention import attention
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.registry import get_backend
from quire.attn_ops.step import Step, running
from quire.passes.capture import hf_interface
from quire.passes.capture.paged_model import find_sites
from tests.steps import serve
from tests.zoo.configs import SERVED, build

# Two float32 forwards in different orders of summation, relative to the largest logit: see tests/zoo/harness.py.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def inside():
    """As where ``interface_active`` is: the function is called by a model that quire has switched over."""
    token = hf_interface.ACTIVE.set(True)
    yield
    hf_interface.ACTIVE.reset(token)


def test_outside_quire_it_is_refused() -> None:
    """No mask is built for our name: a padded batch would come out wrong, silently, in another thread for example."""
    with pytest.raises(RuntimeError, match="outside quire: either another thread is making an engine"):
        contextvars.Context().run(hf_interface.attention_function, layer(), *qkv(), None)


def layer(**options) -> SimpleNamespace:
    return SimpleNamespace(**{"layer_idx": 2, "is_causal": True, **options})


def qkv():
    torch.manual_seed(0)
    return torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)


OPTIONS = dict(layer=2, scale=8**-0.5, window=None, softcap=None, chunk=None, causal=True)


@pytest.mark.parametrize("module, arguments, options", [
    (layer(), {}, {}),
    (layer(), dict(scaling=0.5), dict(scale=0.5)),
    (layer(), dict(sliding_window=3, softcap=2.0), dict(window=3, softcap=2.0)),
    (layer(is_causal=False), {}, dict(causal=False)),
    (layer(is_causal=False), dict(is_causal=True), {}),
    (layer(sliding_window=3), {}, {}),  # exaone4 has the attribute on its full layers, too: only the argument counts
    (layer(config=SimpleNamespace(layer_types=["full_attention"] * 2 + ["chunked_attention"], attention_chunk_size=4)),
     {}, dict(chunk=4)),
    (layer(config=SimpleNamespace(layer_types=["chunked_attention"] * 2 + ["full_attention"], attention_chunk_size=4)),
     {}, {}),
    (layer(config=SimpleNamespace()), dict(position_ids=torch.zeros(1), cache_position=3, use_cache=True,
                                           output_attentions=False, unheard_of=None, new_flag=False), {}),
])
def test_arguments(module, arguments, options) -> None:
    q, k, v = qkv()
    out, weights = hf_interface.attention_function(module, q, k, v, None, **arguments)
    assert weights is None and out.shape == (2, 5, 4, 6) and out.is_contiguous()
    assert torch.equal(out, attention(q, k, v, None, **{**OPTIONS, **options}).transpose(1, 2))


def test_sinks() -> None:
    q, k, v = qkv()
    sinks = torch.randn(4)
    out, _ = hf_interface.attention_function(layer(), q, k, v, None, s_aux=sinks)
    assert torch.equal(out, attention(q, k, v, sinks, **OPTIONS).transpose(1, 2))


@pytest.mark.parametrize("module, mask, arguments, message", [
    (layer(), torch.ones(1), {}, r"SimpleNamespace \(layer 2\) was given an attention_mask. .* pass no mask"),
    (layer(), None, dict(dropout=0.1), r"has attention dropout 0.1; call model.eval\(\) first"),
    (layer(), None, dict(position_bias=torch.zeros(1)),
     "passes 'position_bias' to its attention, which quire does not know"),
    (layer(), None, dict(indices=torch.zeros(1)), "passes 'indices'"),
    (layer(), None, dict(future_feature=7), "passes 'future_feature'"),
    (layer(layer_idx=None), None, {}, "has no integer layer_idx; quire cannot tell its KV cache"),
    (SimpleNamespace(), None, {}, "has no integer layer_idx"),
])
def test_refusals(module, mask, arguments, message) -> None:
    with pytest.raises(UnsupportedAttention, match=message):
        hf_interface.attention_function(module, *qkv(), mask, **arguments)


# Switching a model over, and back.


def model_of(name: str, **options) -> torch.nn.Module:
    return build(SERVED[name], **options)


def test_uses_interface() -> None:
    assert hf_interface.uses_interface(model_of("llama"))
    assert not hf_interface.uses_interface(model_of("falcon"))  # calls F.sdpa itself
    assert not hf_interface.uses_interface(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_old_implementation_comes_back(implementation) -> None:
    model = model_of("llama", attention=implementation)
    state, config = dict(model.state_dict(keep_vars=True)), model.config.to_dict()
    with hf_interface.interface_active(model):
        assert {c._attn_implementation for c in hf_interface.configs_of(model)} == {hf_interface.NAME}
    assert model.config._attn_implementation == implementation
    with pytest.raises(KeyError), hf_interface.interface_active(model):
        raise KeyError("stop")
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == config
    assert all(tensor is state[name] for name, tensor in model.state_dict(keep_vars=True).items())


def test_every_config_of_a_composite_model() -> None:
    """A vision-language model has one config for its text model and others; all are switched, all come back."""
    parts = torch.nn.Module()
    parts.text, parts.other = model_of("llama"), model_of("qwen2", attention="eager")
    with hf_interface.interface_active(parts):
        assert [c._attn_implementation for c in hf_interface.configs_of(parts)] == [hf_interface.NAME, hf_interface.NAME]
    assert [c._attn_implementation for c in hf_interface.configs_of(parts)] == ["sdpa", "eager"]


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama4"])
def test_without_a_step_the_model_is_what_it_was(name) -> None:
    """The semantic op's dense implementation, gradients included, in place of transformers' own."""
    ours, theirs = model_of(name), model_of(name, attention="eager")
    ids = torch.randint(3, 64, (2, 19), generator=torch.Generator().manual_seed(0))
    with hf_interface.interface_active(ours):
        out = ours(input_ids=ids, use_cache=False).logits
        out.square().mean().backward()
    expected = theirs(input_ids=ids, use_cache=False).logits
    expected.square().mean().backward()
    assert (out - expected).abs().max() <= TOLERANCE * expected.abs().max()
    for (parameter_name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            # Gradients pass through twice as many sums as the forward.
            assert (mine.grad - other.grad).abs().max() <= 4 * TOLERANCE * other.grad.abs().max() + 1e-9, parameter_name


def mine(*args, **kwargs):
    raise AssertionError("called")


@pytest.mark.parametrize("table", [transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS,
                                   transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS], ids=["attention", "mask"])
@pytest.mark.parametrize("name", ["mine", "sdpa", "a wrapper", "a wrapped one"])
def test_functions_of_the_users_are_refused(name, table, monkeypatch) -> None:
    """Under a name of their own, and in the place of transformers'."""
    model = model_of("llama")
    own = {"a wrapper": functools.wraps(table["sdpa"])(mine), "a wrapped one": torch.no_grad()(mine)}.get(name, mine)
    name = "mine" if name == "mine" else "sdpa"
    monkeypatch.setitem(table, name, own)
    model.config._attn_implementation_internal = name
    with pytest.raises(UnsupportedAttention, match=f"attention implementation '{name}' is registered by the user"):
        find_sites(model)
    assert model.config._attn_implementation == name


@pytest.mark.parametrize("name, known", [
    ("flash_attention_2", True), ("paged|sdpa", True), ("kernels-community/flash-attn2", True), ("flex_attention", True),
    ("kernels-community/other", False), ("my-sdpa", False)])
def test_names_of_implementations(name, known) -> None:
    if known:
        hf_interface.check_implementation(name)
    else:
        with pytest.raises(UnsupportedAttention, match="is unknown, and quire's attention would replace it"):
            hf_interface.check_implementation(name)


# A paged step with no compiler.


@pytest.mark.parametrize("name", [
    "llama4", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "gpt_oss", "deepseek_v3"))])
def test_eager_paged_steps(name) -> None:
    model = model_of(name)
    ids = [torch.randint(3, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in (13, 21)]
    cache = PagedKVCache.for_model(model, num_pages=12, page_size=4)

    def call(tokens: torch.Tensor, meta: CommonAttentionMetadata) -> torch.Tensor:
        with running(Step(cache, meta)) as step:
            out = model(input_ids=tokens[None], position_ids=meta.positions[None], use_cache=False).logits[0]
        assert step.served == set(cache.layer_ids)
        return out

    with torch.no_grad():
        expected = [model_of(name, attention="eager")(input_ids=s[None], use_cache=False).logits[0] for s in ids]
        with hf_interface.interface_active(model):
            served = serve(call, ids, [(9, 1), (1, 13), (3, 7)], 4)
    for out, want in zip(served, expected, strict=True):
        assert (out - want).abs().max() <= TOLERANCE * want.abs().max()


def test_eager_paged_steps_refuse() -> None:
    """Without a graph there are keys and values only, which a cache of latent vectors cannot hold."""
    model = model_of("deepseek_v3")
    cache = PagedKVCache.for_model(model, num_pages=4, page_size=4, latent=True)
    meta = CommonAttentionMetadata.build([5], [5], [[1, 2]], page_size=4)
    with (hf_interface.interface_active(model), running(Step(cache, meta)), torch.no_grad(),
          pytest.raises(UnsupportedAttention, match="holds latent vectors .* torch.compile")):
        model(input_ids=torch.ones(1, 5, dtype=torch.long), position_ids=meta.positions[None], use_cache=False)
    # Layer 0 has a window, layer 1 has none: whichever comes, it is checked.
    plain = AttentionCapabilities(devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32}))
    weak = dataclasses.replace(get_backend("torch_native"), name="weak", capabilities=plain)
    model = model_of("gemma2")
    cache = PagedKVCache(num_layers=2, num_pages=4, page_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, device="cpu")
    meta = CommonAttentionMetadata.build([5], [5], [[1, 2]], page_size=4)
    with torch.no_grad(), hf_interface.interface_active(model), running(Step(cache, meta, attention=weak)):
        with pytest.raises(UnsupportedAttention, match="attention site 0 needs .*weak cannot: no window; no softcap"):
            model(input_ids=torch.ones(1, 5, dtype=torch.long), position_ids=meta.positions[None], use_cache=False)


def test_registering_twice_is_harmless() -> None:
    hf_interface.register()
    hf_interface.register()
    assert transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[hf_interface.NAME] is hf_interface.attention_function
