"""Steps that ``torch.compile`` serves by another trace: of any length, and by transformers' attention interface."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import quire
from quire import AttentionSite, CommonAttentionMetadata, UnsupportedAttention, step
from quire.attn_ops.kv_cache import PagedKVCache
from quire.passes.capture.paged_model import find_sites
from tests.zoo.configs import SERVED, build
from tests.zoo.harness import TOLERANCE

pytestmark = pytest.mark.usefixtures("tokens_unchecked")


@pytest.fixture(autouse=True)
def own_traces() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def made(name: str) -> Any:
    """One layer of it."""
    options = {**SERVED[name].options, "num_hidden_layers": 1}
    return build(dataclasses.replace(SERVED[name], options={k: v for k, v in options.items() if k != "layer_types"}))


@functools.cache
def sites_of(name: str) -> list[AttentionSite]:
    return find_sites(made(name))


def run(model: Any, called: Any, lengths: list[int], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence in steps of these lengths, and its logits alone."""
    ids = torch.randint(3, 64, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    sites, done, found = sites_of(model.config.model_type.removesuffix("_text")), 0, []
    cache = PagedKVCache.for_sites(sites, num_pages=9, page_size=4, device="cpu")
    for n in lengths:
        done += n
        meta = CommonAttentionMetadata.build([n], [done], [[3, 1, 2, 5, 4, 6]], page_size=4)
        with torch.no_grad(), step(cache, meta):
            found.append(called(input_ids=ids[None, done - n : done], position_ids=meta.positions[None], use_cache=False,
                                **{name: make(n) for name, make in options.items()}).logits[0])
    with torch.no_grad():
        return torch.cat(found), model(input_ids=ids[None], use_cache=False).logits[0]


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="quire", options={"compiler": "eager"})


def test_eager_attention_is_served_by_the_interface() -> None:
    """Steps of one length, of another (traced for any by then), and of one token; outside steps the model is its own."""
    model = made("gemma2")
    assert model.config._attn_implementation == "eager"
    called = compiled(model)
    got, want = run(model, called, [4, 7, 5, 1])
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        ids = torch.arange(3, 12)[None]
        torch.testing.assert_close(called(input_ids=ids, use_cache=False).logits, model(input_ids=ids, use_cache=False).logits)


def test_a_packed_row_of_eager_attention() -> None:
    """The trace by the interface is compared with the model's own on one sequence, not on a row that packs several."""
    model = made("gemma2")
    called = compiled(model)
    ids = torch.randint(3, 64, (11,), generator=torch.Generator().manual_seed(1))
    cache = PagedKVCache.for_sites(sites_of("gemma2"), num_pages=9, page_size=4, device="cpu")
    for lengths in ([4, 7], [1, 1, 3], [1, 1]):
        meta = CommonAttentionMetadata.build(lengths, lengths, [[3, 1], [2, 5], [4, 0]][: len(lengths)], page_size=4)
        row = ids[: sum(lengths)]
        with torch.no_grad(), step(cache, meta):
            got = called(input_ids=row[None], position_ids=meta.positions[None], use_cache=False).logits[0]
        with torch.no_grad():
            want = torch.cat([model(input_ids=x[None], use_cache=False).logits[0] for x in row.split(lengths)])
        assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("lengths", [[5], [4, 7]])
def test_attention_weights_that_a_layer_uses_are_not_dropped(lengths: list[int]) -> None:
    """Eager attention returns them, quire's does not: what the layer then does is something else."""
    model = made("gemma2")
    attention = type(model.model.layers[0].self_attn)

    class Uses(attention):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, weights = super().forward(*args, **kwargs)
            if weights is not None:  # how sharp the attention is; of a first token nothing
                out = out + (weights * (1 - weights)).sum((1, 3))[..., None] * torch.arange(out.shape[-1])
            return out, weights

    model.model.layers[0].self_attn.__class__ = Uses
    with pytest.raises(UnsupportedAttention, match="other outputs than the model does. Does a layer use the attention weights"):
        run(model, compiled(model), lengths)


def test_a_mask_of_the_call_is_not_dropped() -> None:
    model = made("gemma2")

    def mask(n: int) -> torch.Tensor:
        return torch.tensor([[0] + [1] * (n - 1)])

    with pytest.raises(Exception, match="it does not read .*attention_mask.*; give no masks inside a step"):
        run(model, compiled(model), [4], attention_mask=mask)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_hook_that_runs_uncompiled_is_refused_at_the_first_step(name: str) -> None:
    model = made(name)
    model.register_forward_hook(lambda module, args, out: out)
    with pytest.raises(UnsupportedAttention, match="compiled in parts"):
        run(made(name), compiled(model), [4])


def test_kinds_of_tokens_are_refused_in_an_uncompiled_step() -> None:
    """Transformers makes masks of them, which the interface does not see."""
    model = made("gemma3")
    with pytest.raises(UnsupportedAttention, match="mm_token_type_ids in a paged step"):
        run(made("gemma3"), quire.paged(model), [4], mm_token_type_ids=lambda n: torch.zeros(1, n))
