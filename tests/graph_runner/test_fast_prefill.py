"""Layers that share earlier layers' keys and values: cached once, and with kv_sharing_fast_prefill run on the last tokens only.

A user loses exactness if another token's row is taken, and the time of a prefill if all rows are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quire
from quire import CommonAttentionMetadata, Step, UnsupportedAttention, define_paged_op
from quire.attn_ops.backends import torch_native
from quire.attn_ops.kv_cache import PagedKVCache
from quire.passes.capture.paged_model import PagedModel, find_sites
from quire.passes.compile.regions import compile_by_regions
from quire.passes.options import QuireOptions
from tests.tiny import hf_greedy, own_greedy, small_llama, tokens
from tests.zoo.configs import SERVED, build

pytestmark = pytest.mark.usefixtures("traces_kept")

PROMPTS = [[3, 1, 4, 1, 5], [7 + i for i in range(23)], [9, 9, 2], [60 - i for i in range(31)]]
GREEDY = quire.SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SIZES: dict[str, Any] = dict(page_size=4, num_pages=81, max_num_seqs=4, max_model_len=60, max_num_batched_tokens=12)

seen: list[int] = []


def _noted(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    seen.append(q.shape[0])
    return torch_native.BACKEND.op(q, *args, **options)


NOTED = dataclasses.replace(torch_native.BACKEND, name="noted", op=define_paged_op("noted", _noted), priority=None)


@pytest.fixture(scope="module", autouse=True)
def noted() -> None:
    quire.register_backend(NOTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_exact(name) -> None:
    """Chunks of prompts beside decodes, in eager steps and in padded buckets whose padding is poisoned; prompt tokens that are
    scored go through all layers."""
    model = build(SERVED[name])
    want = [hf_greedy(model, p, 10, eos_token_id=None) for p in PROMPTS]
    scored = dataclasses.replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    with quire.Engine(model, **SIZES, kv_sharing_fast_prefill=True, cudagraph_debug=True, cudagraph_token_sizes=[8],
                      cudagraph_capture_sizes=[4]) as engine:
        assert tokens(engine.generate(PROMPTS, GREEDY)) == want
        assert engine.runner.graphs.stats.replayed > 0
        found = engine.generate(PROMPTS[1], scored)[0].prompt_logprobs
    with torch.no_grad():
        plain = model(input_ids=torch.tensor(PROMPTS[1:2]), use_cache=False).logits[0].log_softmax(-1)
    for i, token in enumerate(PROMPTS[1][1:], start=1):  # sums over 64 terms in float32, as in the zoo
        assert found[i][token].logprob == pytest.approx(plain[i - 1, token].item(), abs=1e-4)


class Shares(nn.Module):
    """Two layers with one set of keys and values. ``flaw``: what its forward does beside that."""

    def __init__(self, flaw: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flaw, self.embed, self.place, self.head = flaw, nn.Embedding(30, 16), nn.Embedding(64, 16), nn.Linear(16, 30)
        self.qs = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.kv, self.scale = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-1, (2, 8)).transpose(1, 2)

        x = self.embed(input_ids) + self.place(position_ids)
        k, v = heads(3 * self.kv(x)), heads(x + 0)
        first = x.cos()
        for i, q in enumerate(self.qs):
            if i and self.flaw == "keys changed":
                k.add_(1.0)
            if i and self.flaw == "a view of the keys changed":
                k[:, :1].add_(1.0)
            if i and self.flaw == "values changed":
                v.add_(1.0)
            if i and self.flaw == "other values":
                v = v * 2
            if i and self.flaw == "other keys":
                k = k * 2
            if i and self.flaw == "moved":  # to where they are, as transformers 5.17 does
                k, v = k.to(x.device), v.to(x.device)
            if i and self.flaw == "copied":
                k, v = k.to(x.device, copy=True), v.to(torch.float64).to(x.dtype)
            if i and self.flaw == "written":
                first.mul_(2.0)
            x = x + F.scaled_dot_product_attention(heads(3 * q(x)), k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + torch.tanh(self.scale(x)) * first
        return self.head(x)


SHORT = [[1, 2, 3], [4 + i for i in range(17)]]


def test_only_last_tokens_pass_the_sharing_layers() -> None:
    model = Shares().eval()
    with quire.Engine(model, **SIZES, attention="noted", kv_sharing_fast_prefill=True) as engine, torch.no_grad():
        sites = engine.runner.sites
        assert [s.kv_source for s in sites] == [None, 0] and "KV of layer 0" in sites[1].needs()
        cache = engine.runner.cache
        assert cache.k[1] is cache.k[0] and cache.num_bytes == 2 * cache.k[0].nbytes
        seen.clear()
        outs = tokens(engine.generate(SHORT, dataclasses.replace(GREEDY, max_tokens=4)))
        assert seen[:4] == [12, 2, 9, 2] and set(seen[4:]) <= {1, 2}  # the second step decodes one token too
        assert outs == [own_greedy(model, p, 4) for p in SHORT]


def test_fused_and_cut_into_pieces() -> None:
    """As the compiler gets it: with the fusions of a GPU, cut behind every attention op."""
    model, ids = Shares().eval(), torch.tensor([1, 2, 3, 4, 5, 6])
    paged = PagedModel(model, QuireOptions(compiler="eager", kv_sharing_fast_prefill=True))
    cache = PagedKVCache.for_sites(paged.sites, num_pages=3, page_size=4, device="cpu")
    meta = CommonAttentionMetadata.build([4, 2], [4, 2], [[1], [2]], page_size=4)
    last = dataclasses.replace(meta, logits_indices_padded=meta.logits_indices, num_logits_indices=2)
    compiled = paged.graph.compiled(Step(cache, last))
    lowered, fused = paged.graph.lowered(compiled.lowered.target, "all", last_rows=True)
    pieces: list[int] = []
    run = compile_by_regions(lowered, lambda gm, inputs: (pieces.append(0), gm.forward)[1], always=True)
    compiled.last = compiled.last._replace(call=run, fused=fused)
    with torch.no_grad():
        want = torch.stack([model(part[None], torch.arange(len(part))[None])[0, -1] for part in (ids[:4], ids[4:])])
    torch.testing.assert_close(paged(Step(cache, last), ids, meta.positions, last.logits_indices_padded), want)
    assert len(pieces) == 3
    paged.close()


@pytest.mark.parametrize("how, source", [("moved", 0), ("copied", None)])
def test_keys_moved_to_where_they_are_are_shared(how: str, source: int | None) -> None:
    assert [s.kv_source for s in find_sites(Shares(how).eval())] == [None, source]


@pytest.mark.parametrize("flaw", ["a view of the keys changed", "other values", *(
    pytest.param(flaw, marks=pytest.mark.slow) for flaw in ("keys changed", "values changed", "other keys"))])
def test_keys_changed_in_between_are_not_shared(flaw: str) -> None:
    """The second layer would attend to those of the first."""
    model = Shares(flaw).eval()
    assert [s.kv_source for s in find_sites(model)] == [None, None]
    with quire.Engine(model, **SIZES) as engine, torch.no_grad():
        assert tokens(engine.generate(SHORT, GREEDY)) == [own_greedy(model, p, 10) for p in SHORT]


class OneWindow(Shares):
    """The first of two layers with one set of keys and values has a window."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (self.kv(x), x))
        away = position_ids[0][:, None] - position_ids[0]
        for q, window in zip(self.qs, (4, 64), strict=True):
            mask = (away >= 0) & (away < window) if window == 4 else away >= 0
            y = F.scaled_dot_product_attention(q(x).unflatten(-1, (2, 8)).transpose(1, 2), k, v, attn_mask=mask)
            x = x + y.transpose(1, 2).flatten(2)
        return self.head(x)


def test_layers_with_and_without_a_window_do_not_share() -> None:
    """The pages of the first are freed behind its window, and the second still reads them."""
    sites = find_sites(OneWindow().eval())
    assert [(s.window, s.kv_source) for s in sites] == [(4, None), (None, None)]


@pytest.mark.parametrize("model, options, message", [
    (small_llama, {}, "the last layer has its own"),
    (lambda: Shares("written").eval(), {}, "changes a tensor in place that others see"),
    (lambda: Shares().eval(), {"attention": "two_batch:torch_native"}, "plans or reads a step as a whole.*torch_native"),
])
def test_refused(model, options, message) -> None:
    with pytest.raises(UnsupportedAttention, match=message):
        quire.Engine(model(), **SIZES, **options, kv_sharing_fast_prefill=True)


def test_not_for_steps_by_hand() -> None:
    compiled = torch.compile(Shares().eval(), backend="quire", options={"kv_sharing_fast_prefill": True})
    with pytest.raises(Exception, match="kv_sharing_fast_prefill is an option of quire.Engine"):
        compiled(torch.tensor([[1, 2, 3]]), torch.arange(3)[None])


@pytest.mark.slow
def test_caches_that_share_and_that_do_not() -> None:
    """A cache made by hand may keep the keys of both layers; one that shares other layers than the model is refused."""
    model = Shares().eval()
    paged = PagedModel(model, QuireOptions(compiler="eager", kv_sharing_fast_prefill=True))
    ids, meta = torch.tensor([1, 2, 3, 4]), CommonAttentionMetadata.build([4], [4], [[1]], page_size=4)
    with torch.no_grad():
        want = model(ids[None], meta.positions[None])[0]
    own = [dataclasses.replace(s, kv_source=None) for s in paged.sites]
    for sites in (paged.sites, own):
        cache = PagedKVCache.for_sites(sites, num_pages=2, page_size=4, device="cpu")
        if sites is paged.sites:
            torch.testing.assert_close(paged(Step(cache, meta), ids, meta.positions, torch.arange(4)), want)
            last = dataclasses.replace(meta, logits_indices_padded=meta.logits_indices, num_logits_indices=1)
            got = paged(Step(cache, last), ids, meta.positions, last.logits_indices_padded)
            torch.testing.assert_close(got, want[-1:])
            with pytest.raises(ValueError, match="give the model that tensor"):
                paged(Step(cache, last), ids, meta.positions, torch.arange(4))
    paged.close()
    plain = PagedModel(model, QuireOptions(compiler="eager"))
    torch.testing.assert_close(plain(Step(cache, meta), ids, meta.positions, torch.arange(4)), want)
    plain.close()
    paged = PagedModel(Shares("keys changed").eval(), QuireOptions(compiler="eager"))
    shared = PagedKVCache.for_sites([own[0], dataclasses.replace(own[1], kv_source=0)], num_pages=2, page_size=4, device="cpu")
    with pytest.raises(ValueError, match="has the keys and values of layer 0"):
        paged(Step(shared, meta), ids, meta.positions, torch.arange(4))
    paged.close()


def test_cache_of_shared_layers() -> None:
    """Pages are copied once, also in a chain, and a source must be an earlier layer of the same sizes."""
    make: dict[str, Any] = dict(num_layers=2, num_pages=4, page_size=1, num_kv_heads=1, dtype=torch.float32, device="cpu")
    cache = PagedKVCache(**make, head_dim=1, kv_sources={1: 0})
    cache.k[0][:, 0, 0, 0] = torch.arange(4)
    cache.copy_pages(torch.tensor([1, 2]), torch.tensor([2, 3]))
    assert cache.k[1].flatten().tolist() == [0, 1, 1, 2] and cache.of_layer(1)[0] is cache.k[0]
    for sources, dims in (({0: 1}, 1), ({1: 0}, [1, 2]), ({1: 5}, 1)):
        with pytest.raises(ValueError, match="cannot have the keys and values of layer"):
            PagedKVCache(**make, head_dim=dims, kv_sources=sources)
