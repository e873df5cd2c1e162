"""Beam search on the engine: what transformers gives, over pages that beams share.

A user loses the right sequences if beams are reordered or copied wrongly, memory if their pages are not shared, and the engine
if pages do not come back.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, Phi3Config, Phi3ForCausalLM, StoppingCriteriaList

import quire
from quire.graph_runner.lockstep import Rows
from tests.graph_runner.test_window_pages import assert_all_free, poison
from tests.tiny import assert_idle, small_llama
from tests.zoo.configs import SERVED, build

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
PAGE = 4
OPTIONS: dict[str, Any] = dict(page_size=PAGE, num_pages=121, max_num_seqs=12, max_model_len=200, cudagraph_capture_sizes=[])
SCORES = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)


def small() -> Any:
    return small_llama(0.3, eos_token_id=None, pad_token_id=0)


@pytest.fixture(scope="module")
def pair():
    """A model for transformers, and paged."""
    paged = quire.paged(small(), **{**OPTIONS, "cudagraph_capture_sizes": [12]}, cudagraph_debug=True)  # padding is poisoned
    yield small(), paged
    paged.generate.close()


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    """Three prompts of different lengths, padded on the left."""
    ids = torch.tensor([[0] * 11 + [7, 8, 9], list(range(9, 23)), [0] * 6 + [3, 1, 4, 1, 5, 9, 2, 6]])
    return dict(input_ids=ids, attention_mask=(ids > 0).long())


def same(pair: Any, batch: Any, **options: Any) -> Any:
    """Both give the same, the second paged; the result."""
    found = []
    for model in pair:
        torch.manual_seed(5)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*not paged.*")
            found.append(model.generate(**batch, **{"num_beams": 4, "max_new_tokens": 20, **SCORES, **copy.deepcopy(options)}))
    want, got = found
    assert type(got) is type(want) and got.past_key_values is None
    assert torch.equal(got.sequences, want.sequences) and torch.equal(got.beam_indices, want.beam_indices)
    torch.testing.assert_close(got.sequences_scores, want.sequences_scores, atol=1e-5, rtol=1e-4)
    for name in ("scores", "logits"):
        for a, b in zip(got[name], want[name], strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)
    assert_idle(pair[1].generate.engine)
    return got


def ends_in(*tokens: int) -> StoppingCriteriaList:
    return StoppingCriteriaList([lambda ids, scores, **kwargs: torch.isin(ids[:, -1], torch.tensor(tokens))])


@pytest.mark.parametrize("options", [
    dict(), dict(num_beams=2, num_return_sequences=2, length_penalty=2.0, eos_token_id=[12, 5, 41]),
    dict(early_stopping=True, num_return_sequences=4, eos_token_id=[12, 5]),
    dict(early_stopping="never", length_penalty=-1.0, eos_token_id=[12, 5]),
    dict(early_stopping="never", length_penalty=0.0, eos_token_id=5),
    dict(min_new_tokens=6, eos_token_id=[12, 5, 41], pad_token_id=9),
    dict(repetition_penalty=1.8, no_repeat_ngram_size=2, renormalize_logits=True),
    dict(logits_processor=LogitsProcessorList([lambda ids, scores: scores - 0.1 * (ids[:, -1:] % 7)])),
    dict(stopping_criteria=ends_in(12, 5)), dict(eos_token_id=None, use_cache=False),
    dict(do_sample=True, temperature=1.7, top_k=20, num_return_sequences=3), dict(bad_words_ids=[[12]], forced_eos_token_id=7),
], ids=lambda o: ",".join(o) or "plain")
def test_same_as_transformers(options, pair, batch) -> None:
    same(pair, batch, **options)
    assert pair[1].generate.engine.runner.graphs.stats.replayed > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "llama", "qwen3", "gpt2", "mistral", "deepseek_v3"])
def test_architectures(name) -> None:
    """Window layers with pages of their own, with no reordering of transformers' caches; freed pages hold NaN."""
    entry = SERVED[name]
    longer = {"n_positions": 256} if name == "gpt2" else {"max_position_embeddings": 256}
    model = build(dataclasses.replace(entry, options={**entry.options, **longer}))
    paged = quire.paged(copy.deepcopy(model), **OPTIONS, max_num_batched_tokens=16)
    if name == "gemma2":
        poison(paged.generate.engine)
    ids = torch.tensor([[3 + i % 60 for i in range(31)], [0] * 26 + [3, 1, 4, 1, 5]])
    for options in (dict(length_penalty=1.5), dict(num_beams=3, early_stopping=True, eos_token_id=list(range(30, 40)))):
        same((model, paged), dict(input_ids=ids, attention_mask=(ids > 0).long()), max_new_tokens=30, **options)
    if name == "gemma2":
        assert_all_free(paged.generate.engine)
    paged.generate.close()


def test_tokens_outside_the_vocabulary(pair, batch) -> None:
    """An error, of a prompt; compiled, the lookup ends the process. A row that has ended may be padded with any: tokenizers are
    given a [PAD] that the model has no embedding for."""
    plain, model = pair
    for bad in (-100, plain.config.vocab_size):
        with pytest.raises(ValueError, match=rf"row 1: token ids \[{bad}\] are outside the vocabulary of"):
            model.generate(torch.tensor([[5, 6], [7, bad]]), encoder_repetition_penalty=0.5, max_new_tokens=3,
                           pad_token_id=bad - 1)
    (first, *_), _, _ = plain.generate(**batch, max_new_tokens=2, encoder_repetition_penalty=0.5)[:, -2:]
    options = dict(num_beams=1, encoder_repetition_penalty=0.5, eos_token_id=int(first), max_new_tokens=6)
    want = plain.generate(**batch, **options, pad_token_id=0)
    got = model.generate(**batch, **options, pad_token_id=plain.config.vocab_size)
    assert torch.equal(want[1:], got[1:]) and got[0, -5:].tolist() == [plain.config.vocab_size] * 5
    assert_idle(model.generate.engine)


def test_prompts_share_their_pages(pair) -> None:
    """Eight beams of a prompt of 25 pages, in 38 pages: without sharing they would need 232. It is computed once."""
    ids = torch.randint(3, 64, (1, 100))
    model = quire.paged(copy.deepcopy(pair[0]), **{**OPTIONS, "num_pages": 25 + 8 * 4 + 1})
    engine = model.generate.engine
    computed, launch = [], engine.runner.logits_of
    engine.runner.logits_of = lambda found: (computed.append(found.num_tokens), launch(found))[1]
    same((pair[0], model), dict(input_ids=ids), num_beams=8, max_new_tokens=16)
    assert computed == [100] + [8] * 15
    with pytest.warns(UserWarning, match=r"not paged, because its 8 sequences advance together and may fill 65 pages, and the "
                                         r"engine has 57 \(see num_pages"):
        model.generate(ids, num_beams=8, max_new_tokens=17)
    assert_idle(engine)
    model.generate.close()


def test_statistics_count_these_calls(pair, batch) -> None:
    """Who watches a training run would take rollouts with a penalty for none at all."""
    engine, seen = pair[1].generate.engine, []
    before = engine.stats()

    def watches(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(engine.stats().running)
        return scores

    pair[1].generate(**batch, max_new_tokens=5, eos_token_id=None, logits_processor=[watches])
    after = engine.stats()
    assert seen == [3] * 5 and after.running == 0
    assert after.generated_tokens - before.generated_tokens == 15 and after.finished - before.finished == 3
    assert after.prompt_tokens - before.prompt_tokens == int(batch["attention_mask"].sum())
    assert after.busy_seconds > before.busy_seconds


def test_beams_beside_other_requests(pair, batch) -> None:
    """A stream goes on while beams run; after an error in a processor too, which is the caller's, of beams or not."""
    model, params = pair[1], quire.SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine, width = model.generate.engine, batch["input_ids"].shape[1]
    prompts = [list(range(5, 60)), list(range(2, 64))]
    want = [out.token_ids for out in engine.generate(prompts, params)]
    beams = pair[0].generate(**batch, num_beams=3, max_new_tokens=12)

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == width + 5:
            raise KeyError("mine")
        return scores

    got: list[list[int]] = [[], []]
    for turn, event in enumerate(engine.stream(prompts, params)):
        got[event.index] += event.token_ids
        if turn == 3:
            assert torch.equal(model.generate(**batch, num_beams=3, max_new_tokens=12), beams)
        if turn == 9:
            for num_beams in (3, 1):
                with pytest.raises(KeyError, match="mine"):
                    model.generate(**batch, num_beams=num_beams, max_new_tokens=12, logits_processor=[fails])
    assert got == want
    assert_idle(engine)


def test_beams_do_not_wait_for_ever(pair) -> None:
    """Requests that keep coming begin after the beams."""
    engine, params = pair[1].generate.engine, quire.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    waited: list[int] = []

    def comes(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if not waited or len(waited) < 200:  # each that runs asks for another one
            waited.append(engine.stats().running)
            engine.add_request([5, 6, 7], dataclasses.replace(params, logits_processors=[comes]))
        return logits

    for _ in range(engine.config.max_num_seqs):
        engine.add_request([5, 6, 7], dataclasses.replace(params, logits_processors=[comes]))
    engine.step()
    pair[1].generate(torch.tensor([[3, 4]]), num_beams=4, max_new_tokens=3)
    assert len(waited) < 200 and engine.scheduler.waiting
    while engine.has_unfinished:
        waited.append(0)
        engine.step()
    assert_idle(engine)


@pytest.mark.slow
def test_a_model_that_changes_meanwhile(pair) -> None:
    """The engine traces it again, and all keys are computed again, in as many pages: beginnings are shared then too."""
    ids = torch.randint(3, 64, (1, 50))
    model = quire.paged(copy.deepcopy(pair[0]), **{**OPTIONS, "num_pages": 12 + 4 * 6 + 1})
    runners = []

    def change(found: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if found.shape[1] == 60:
            runners.append(model.generate.engine.runner)
            model.model.layers[0].mlp = copy.deepcopy(model.model.layers[0].mlp)
        return scores

    got = model.generate(ids, num_beams=4, max_new_tokens=20, logits_processor=[change])
    assert torch.equal(got, pair[0].generate(ids, num_beams=4, max_new_tokens=20))
    assert len(runners) == 1 and model.generate.engine.runner is not runners[0]
    assert_idle(model.generate.engine)
    model.generate.close()


class Wrapped(torch.nn.Module):
    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x)


@pytest.mark.slow
@pytest.mark.parametrize("beams", [True, False], ids=["beams", "every logits"])
def test_a_layer_wrapped_meanwhile(beams) -> None:
    """As PEFT's add_adapter does. The weights that the trace reads are elsewhere then, and a step may fail before the change
    is met: so the engine looks for one, as it does for other requests."""
    ids = torch.randint(3, 64, (1, 40))
    deep = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=8, num_attention_heads=4,
                                        num_key_value_heads=2, intermediate_size=48, eos_token_id=None, pad_token_id=0)).eval()
    model = quire.paged(copy.deepcopy(deep), **OPTIONS)
    engine, turns = model.generate.engine, []

    def wrap(*_: Any) -> None:
        turns.append(1)
        if len(turns) == 3:
            attention = model.model.layers[6].self_attn
            attention.k_proj = Wrapped(attention.k_proj)

    if beams:
        got = model.generate(ids, num_beams=4, max_new_tokens=12, logits_processor=[lambda ids, scores: (wrap(), scores)[1]])
        assert torch.equal(got, deep.generate(ids, num_beams=4, max_new_tokens=12))
    else:
        want, found = deep(ids).logits[0], torch.zeros(ids.shape[1], 64)

        def take(row: int, start: int, logits: torch.Tensor) -> None:
            wrap()
            found[start : start + len(logits)] = logits

        with torch.no_grad(), Rows(engine, [tuple(ids[0].tolist())], 0) as rows:
            rows.every_logits(take, 8)
        torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
    assert len(turns) > 3
    assert_idle(engine)
    model.generate.close()


def test_an_engine_closed_meanwhile() -> None:
    model = quire.paged(small(), **OPTIONS)

    def close(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        model.generate.engine.close()
        return scores

    with pytest.raises(RuntimeError, match="the engine was closed while generate"):
        model.generate(torch.tensor([[5, 6, 7]]), num_beams=2, max_new_tokens=5, logits_processor=[close])
    model.generate.close()


# -- rows: forks and copies


@pytest.fixture(scope="module", params=["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "longrope"))])
def served(request):
    """A model and an engine for it."""
    model: Any
    if request.param == "longrope":  # all keys are others beyond 20 tokens
        model = Phi3ForCausalLM(Phi3Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, pad_token_id=0,
            num_key_value_heads=2, original_max_position_embeddings=20, max_position_embeddings=80, sliding_window=None,
            rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 20,
                             "short_factor": [1.0] * 4, "long_factor": [4.0] * 4})).eval()
    else:
        model = small() if request.param == "llama" else build(SERVED["gemma2"])
    with quire.Engine(model, page_size=PAGE, num_pages=60, max_num_seqs=8, max_model_len=60, max_num_batched_tokens=11,
                      cudagraph_capture_sizes=[]) as engine:
        if request.param == "gemma2":
            poison(engine)
        yield copy.deepcopy(model), engine


def check(rows: Rows, engine: quire.Engine) -> None:
    """Each page has one reference per row that holds it, and no other; a partial page has one."""
    scheduler = engine.scheduler
    owners = Counter(page for r in rows.requests for page in r.pages)
    assert {page: scheduler.allocator.ref_count(page) for page in owners} == owners
    assert scheduler.allocator.num_total - scheduler.allocator.num_free == len(owners)
    for r in rows.requests:
        assert len(r.pages) == -(-r.num_computed // PAGE)
        assert r.num_computed % PAGE == 0 or owners[r.pages[-1]] == 1
    if scheduler.windows is not None:
        held = Counter(page for r in rows.requests for page in r.window_pages[r.window_behind :])
        assert {page: scheduler.windows.allocator.ref_count(page) for page in held} == held
        assert scheduler.windows.num_used == len(held)


@settings(max_examples=12)
@given(st.data())
def test_forks(served, data) -> None:
    """Whatever rows go on from whichever, each has the logits of its own tokens, and only partial pages are copied."""
    model, engine = served
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2), label="rows of each prompt")
    prompts = [list(range(3 + i, 3 + i + data.draw(st.integers(1, 22), label="length"))) for i in range(len(counts))]
    steps = data.draw(st.integers(1, 7), label="steps")
    rows = Rows(engine, [p for p, n in zip(prompts, counts, strict=True) for _ in range(n)], steps)
    texts = [list(p) for p, n in zip(prompts, counts, strict=True) for _ in range(n)]
    copied: list[tuple[int, int]] = []
    runner, own = engine.runner, engine.runner.copy_pages
    runner.copy_pages = lambda pages, windows: (copied.extend(pages), own(pages, windows))[1]  # type: ignore[method-assign]
    try:
        with rows:
            for step in range(steps + 1):
                logits = rows.logits()
                check(rows, engine)
                with torch.no_grad():
                    want = torch.stack([model(torch.tensor([text]), use_cache=False).logits[0, -1] for text in texts])
                torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
                if not step:  # the rows of a prompt were one
                    assert len(copied) == sum((n - 1) * (len(p) % PAGE > 0) for p, n in zip(prompts, counts, strict=True))
                if step == steps:
                    break
                chosen, first = [], 0
                for n in counts:
                    chosen += data.draw(st.lists(st.integers(first, first + n - 1), min_size=n, max_size=n), label="sources")
                    first += n
                copied.clear()
                rows.reorder(chosen)
                check(rows, engine)
                again = [i for k, i in enumerate(chosen) if i in chosen[:k]]
                assert len(copied) == sum(len(texts[i]) % PAGE > 0 for i in again)
                new = [3 + (7 * step + 5 * k) % 60 for k in range(len(texts))]
                texts = [[*texts[i], token] for i, token in zip(chosen, new, strict=True)]
                rows.append(new)
    finally:
        runner.copy_pages = own  # type: ignore[method-assign]
    assert_idle(engine)
    if engine.scheduler.windows is not None:
        assert_all_free(engine)
