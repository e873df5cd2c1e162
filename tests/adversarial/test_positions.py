"""Positions: no sequence's length reaches another, and no model numbers the tokens of a ragged row by itself."""

from __future__ import annotations

import contextlib
import functools
import warnings

import pytest
import torch
import transformers
from torch import nn

import quire
from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.backend import QuireBackend
from quire.passes.capture.paged_model import PagedModel, prove_uncompiled
from quire.passes.options import QuireOptions
from tests.tiny import small_llama
from tests.zoo.configs import REFUSED, SERVED, build
from tests.zoo.harness import TOLERANCE, error, reference, serve

SHORT = 40
PHI3 = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, pad_token_id=0,
            num_key_value_heads=2, original_max_position_embeddings=SHORT, max_position_embeddings=160, sliding_window=None,
            rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT,
                             "short_factor": [1.0] * 4, "long_factor": [4.0] * 4})
pytestmark = pytest.mark.skipif(tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 18),
                                reason="longrope decides on the host")


def phi3() -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.Phi3Config(**PHI3)).eval()


class Wrapped(nn.Module):
    """A transformers model in a module that has no config."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapped, lambda m: Wrapped(Wrapped(m))], ids=["plain", "wrapped", "twice"])
def test_every_config_in_the_module_tree_is_checked(wrap) -> None:
    with pytest.raises(UnsupportedAttention, match="rope_type 'dynamic'"):
        PagedModel(wrap(build(REFUSED["llama_dynamic_rope"])), QuireOptions(compiler="eager"))


def test_a_nested_config_is_checked() -> None:
    model = build(SERVED["llama"])
    model.config.decoder_config = build(REFUSED["llama_dynamic_rope"]).config
    with pytest.raises(UnsupportedAttention, match="rope_type 'dynamic'"):
        PagedModel(model, QuireOptions(compiler="eager"))


# Each sequence has the frequencies of its own length, at the limit, on both sides of it, and across it.


@functools.cache
def never_paged() -> nn.Module:
    return phi3()


def alone(ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return never_paged()(input_ids=ids[None], use_cache=False).logits[0]


def tokens(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(3, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]


def test_longrope_on_the_engine() -> None:
    """Short and long prompts beside each other, in chunks; two grow past the limit, and are computed again. Equal beginnings of
    sequences on different sides of it are not shared."""
    prompts = tokens(5, SHORT - 3, SHORT, SHORT + 1, 60)
    prompts += [prompts[-1][:SHORT], prompts[-1][: SHORT + 5]]
    params = quire.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
    with quire.Engine(phi3(), page_size=4, num_pages=120, max_num_seqs=4, prefill_chunk_size=7, max_model_len=80,
                      enable_prefix_caching=True) as engine:
        assert engine.scheduler.length_limits == (SHORT,)
        for _ in range(2):
            outs = engine.generate([p.tolist() for p in prompts], params)
            for prompt, out in zip(prompts, outs, strict=True):
                ids = prompt
                for token, logprobs in zip(out.token_ids, out.logprobs, strict=True):
                    want = alone(ids)[-1].log_softmax(-1)
                    assert want.argmax() == token and abs(want[token] - logprobs[token].logprob) < 1e-4
                    ids = torch.cat([ids, torch.tensor([token])])
        assert engine.scheduler.num_preemptions >= 4 and engine.scheduler.prefixes.stats.hits


def test_growing_past_the_limit_in_generate() -> None:
    """Phi-3's own generate computes the row again there, as the engine does. Llama's goes on with the old keys, so that such a
    call is transformers'."""
    ids = tokens(SHORT - 3)[0][None]
    llama = small_llama(0.3, rope_parameters=dict(PHI3["rope_parameters"], factor=4.0))
    for model, paged in ((phi3(), True), (llama, False)):
        options = dict(max_new_tokens=12, do_sample=False, eos_token_id=[], pad_token_id=0)
        want = [model.generate(x, **options) for x in (ids, ids[:, :3])]
        quire.paged(model, page_size=4, num_pages=60, max_num_seqs=2, max_model_len=80, compiler="eager")
        with contextlib.nullcontext() if paged else pytest.warns(UserWarning, match=f"a row may grow past {SHORT} tokens"):
            assert torch.equal(model.generate(ids, **options), want[0])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*not paged.*")
            assert torch.equal(model.generate(ids[:, :3], **options), want[1])
        model.generate.close()


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["compile", "decorator"])
def test_longrope_by_hand(wrap: str) -> None:
    model, plain = phi3(), phi3()
    if wrap == "compile":
        call = torch.compile(model, backend=QuireBackend(QuireOptions(compiler="eager")))
    else:
        call = functools.partial(quire.paged(type(model).forward, compiler="eager"), model)
    cache = quire.PagedKVCache.for_model(plain, num_pages=64, page_size=4)
    pages = [list(range(1, 20)), list(range(20, 40)), list(range(40, 60))]

    def check(rows: list[tuple[int, torch.Tensor, int]], **options: list[int]) -> None:
        """``rows``: (sequence, its tokens, how many of them are new)."""
        meta = quire.CommonAttentionMetadata.build([new for *_, new in rows], [len(ids) for _, ids, _ in rows],
                                                   [pages[i] for i, *_ in rows], page_size=4, **options)
        row = torch.cat([ids[len(ids) - new :] for _, ids, new in rows])
        with torch.no_grad(), quire.step(cache, meta):
            got = call(input_ids=row[None], position_ids=meta.positions[None], use_cache=False).logits[0]
        want = torch.cat([(alone(whole[i]) if options else alone(ids))[len(ids) - new : len(ids)] for i, ids, new in rows])
        assert (got - want).abs().max() <= TOLERANCE * want.abs().max()

    whole = tokens(6, 60, SHORT + 1)
    check([(0, whole[0][:5], 5), (1, whole[1][:59], 59), (2, whole[2][:-1], SHORT)])
    check([(0, whole[0], 1), (1, whole[1], 1)])
    with pytest.raises(UnsupportedAttention, match=f"sequence 0 has {SHORT + 1} tokens, and keys in the cache .* first token"):
        check([(2, whole[2], 1)])
    check([(2, whole[2], SHORT + 1)])
    with pytest.raises(UnsupportedAttention, match="sequence 0 has 10 tokens"):
        check([(1, whole[1][:10], 1)])
    check([(0, whole[0], 6), (1, whole[1][:20], 20)], total_lens=[6, 60])  # a prompt in chunks
    check([(1, whole[1], 40)], total_lens=[60])


@pytest.mark.slow
def test_longrope_uncompiled_is_refused() -> None:
    model = quire.paged(phi3())
    cache = quire.PagedKVCache.for_model(phi3(), num_pages=9, page_size=4)
    meta = quire.CommonAttentionMetadata.build([5], [5], [[1, 2]], page_size=4)
    with pytest.raises(UnsupportedAttention, match="longrope.*quire.Engine"), quire.step(cache, meta):
        model(input_ids=torch.arange(5)[None], position_ids=meta.positions[None], use_cache=False)


@pytest.mark.parametrize("lengths", [[5], [5, 3]])
def test_total_lens_are_checked(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="total_lens"):
        quire.CommonAttentionMetadata.build([2, 4], [2, 4], [[1], [2]], page_size=4, total_lens=lengths)


def test_longrope_below_its_short_length_has_no_choice() -> None:
    """An engine for short sequences pays nothing."""
    model = phi3()
    batch = reference(model)
    paged = PagedModel(model, QuireOptions(compiler="eager", max_model_len=SHORT))
    try:
        assert not paged.graph.length_limits
        assert error(serve(paged, batch, page_size=4, attention="torch_native"), batch) <= TOLERANCE
    finally:
        paged.close()


@pytest.mark.parametrize("name, why", [("llama4_temperature", "numbers the tokens of the row itself"),
                                       pytest.param("roberta", "table with an entry for padding", marks=pytest.mark.slow)])
def test_uncompiled_steps_of_models_with_own_positions_are_refused(name: str, why: str) -> None:
    model = quire.paged(build(SERVED.get(name) or REFUSED[name]))
    cache = quire.PagedKVCache(num_layers=model.config.num_hidden_layers, num_pages=9, page_size=4,
                               num_kv_heads=getattr(model.config, "num_key_value_heads", 4), head_dim=16, dtype=torch.float32,
                               device="cpu")
    meta = quire.CommonAttentionMetadata.build(query_lens=[5, 3], seq_lens=[5, 3], block_table=[[1, 2], [3, 0]], page_size=4)
    with pytest.raises(UnsupportedAttention, match=why), quire.step(cache, meta):
        model(input_ids=torch.arange(8)[None], position_ids=meta.positions[None], use_cache=False)


def test_models_without_own_positions_may_run_uncompiled() -> None:
    assert prove_uncompiled(build(SERVED["llama"])).names
