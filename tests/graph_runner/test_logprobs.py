"""Log probabilities of an engine: those of the model's own forward of each sequence, whatever the schedule."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from quire import Engine, SamplingParams
from tests.tiny import GREEDY, assert_idle, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
# Logits agree to 1e-5 of the largest, which is about 30 here, and so do their normalizers.
TOLERANCE = 5e-4
OPTIONS: dict[str, Any] = dict(num_pages=120, max_num_seqs=8, max_model_len=300)


@pytest.fixture(scope="module")
def engine(model, tokenizer) -> Any:
    with Engine(model, tokenizer, **OPTIONS, async_stepping=True, cudagraph_token_sizes=[64]) as made:
        yield made


def logits_of(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def check(entries, logits: torch.Tensor, temperature: float = 1.0, keep: int | None = None) -> None:
    """Each entry (None is left out) against the logits (n, V) that predict its token."""
    for entry, x in zip(entries, logits, strict=True):
        if entry is None:
            continue
        bound = -math.inf if keep is None else x.topk(keep).values[-1]
        expected = torch.where(x < bound, -math.inf, x.double() / temperature).log_softmax(-1)
        for token, found in entry.items():
            assert found.logprob == pytest.approx(expected[token].item(), abs=TOLERANCE)
            # Ranks are of the engine's own logits: those nearer to it than the tolerance may lie on either side.
            assert abs(found.rank - 1 - int((x > x[token]).sum())) <= int(((x - x[token]).abs() < TOLERANCE).sum()) - 1


def test_of_sampled_tokens(engine, model, prompts, tokenizer) -> None:
    params = [
        replace(GREEDY, logprobs=3, logprob_token_ids=[5, 9]), GREEDY, SamplingParams(max_tokens=9, seed=1, logprobs=0),
        SamplingParams(temperature=0.7, top_k=5, max_tokens=9, seed=2, logprobs=7, logprobs_mode="processed_logprobs"),
        SamplingParams(temperature=0.7, top_k=5, max_tokens=9, seed=2, logprobs=2),
        SamplingParams(temperature=1.6, max_tokens=9, seed=3, logprobs=1, logprobs_mode="processed_logprobs"),
        replace(GREEDY, logprob_token_ids=[0], logprobs_mode="processed_logprobs"),
    ]
    outputs = engine.generate(prompts, params)
    plain = engine.generate(prompts, [replace(p, logprobs=None, logprob_token_ids=None) for p in params])
    assert tokens(outputs) == tokens(plain), "asking for log probabilities changes no token"
    assert all(o.logprobs is None and o.cumulative_logprob is None and o.prompt_logprobs is None for o in plain)
    for prompt, p, output in zip(prompts, params, outputs, strict=True):
        if not p.wants_logprobs:
            assert output.logprobs is None
            continue
        logits = logits_of(model, [*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        processed = p.logprobs_mode == "processed_logprobs"
        check(output.logprobs, logits, (p.temperature or 1.0) if processed else 1.0, p.top_k or None if processed else None)
        for token, entry in zip(output.token_ids, output.logprobs, strict=True):
            assert next(iter(entry)) == token  # the sampled one is first
            likeliest = sorted(e.rank for e in entry.values())[: p.logprobs or 0]
            assert likeliest == list(range(1, (p.logprobs or 0) + 1))
            assert set(p.logprob_token_ids) <= set(entry)
            assert all(e.decoded_token == tokenizer.decode([t]) for t, e in entry.items())
        total = sum(entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True))
        assert output.cumulative_logprob == pytest.approx(total)
    filtered = [e for entry in outputs[3].logprobs for e in entry.values()]
    assert any(e.logprob == -math.inf for e in filtered) and all(e.rank > 5 for e in filtered if e.logprob == -math.inf)
    assert_idle(engine)


def test_in_the_graph_of_the_step(engine, model, prompts, monkeypatch) -> None:
    """Tokens that the graph draws come with theirs: kernels launched after it would make the steps of a rollout longer."""
    def late(*args: Any) -> Any:
        raise AssertionError("computed after the graph")

    monkeypatch.setattr("quire.graph_runner.logprobs.token_logprobs", late)
    params = [replace(GREEDY, logprobs=0), GREEDY, replace(GREEDY, logprobs=2)]
    for prompt, p, output in zip(prompts[:3], params, engine.generate(prompts[:3], params), strict=True):
        assert (output.logprobs is not None) == p.wants_logprobs
        if output.logprobs is not None:
            check(output.logprobs, logits_of(model, [*prompt, *output.token_ids])[len(prompt) - 1 : -1])


def test_while_streaming_and_without_text(engine, prompts) -> None:
    for event in engine.stream(prompts[0], replace(GREEDY, logprobs=0, detokenize=False)):
        assert len(event.output.logprobs) == len(event.output.token_ids)
    assert event.output.logprobs[0][event.output.token_ids[0]].decoded_token is None


def test_before_min_tokens(engine, model, prompts) -> None:
    """Banned tokens are excluded from the processed distribution, and from no other."""
    best = tokens(engine.generate(prompts[0], replace(GREEDY, max_tokens=1)))[0][0]
    asked = replace(GREEDY, max_tokens=2, min_tokens=2, stop_token_ids=[best], logprobs=0, logprob_token_ids=[best])
    raw, processed = (engine.generate(prompts[0], replace(asked, logprobs_mode=mode))[0]
                      for mode in ("raw_logprobs", "processed_logprobs"))
    assert raw.token_ids == processed.token_ids and best not in raw.token_ids
    assert raw.logprobs[0][best].rank == 1 and processed.logprobs[0][best].logprob == -math.inf
    check(raw.logprobs, logits_of(model, [*prompts[0], *raw.token_ids])[len(prompts[0]) - 1 : -1])


SCHEDULES = {
    "whole": {}, "chunks_of_3": dict(prefill_chunk_size=3, async_stepping=True), "steps_of_5": dict(max_num_batched_tokens=5),
    "preempted": dict(page_size=2, num_pages=34, async_stepping=True, prefill_chunk_size=3), "fused": dict(fusions="all"),
    "no_prefixes": dict(enable_prefix_caching=False), "lasting": dict(enable_prefix_caching=True, page_size=4),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("whole", "preempted")))
                                  for n in SCHEDULES])
def test_of_the_prompt(name, model, prompts, monkeypatch) -> None:
    monkeypatch.setattr("quire.graph_runner.engine.SCORED_ROWS", 7)  # as of a prompt that is longer than the rows of a step
    with Engine(model, **OPTIONS | SCHEDULES[name]) as engine:
        outputs = engine.generate(prompts, [replace(GREEDY, prompt_logprobs=i % 3, logprobs=1) for i in range(len(prompts))])
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            assert output.error is None and len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
            assert [next(iter(e)) for e in output.prompt_logprobs[1:]] == prompt[1:]
            assert all(len(e) >= max(1, i % 3) for e in output.prompt_logprobs[1:])
            logits = logits_of(model, [*prompt, *output.token_ids])
            check(output.prompt_logprobs[1:], logits[: len(prompt) - 1])
            check(output.logprobs, logits[len(prompt) - 1 : -1])
        assert (engine.scheduler.num_preemptions > 0) == (name == "preempted")
        again = engine.generate(prompts, replace(GREEDY, prompt_logprobs=0))
        assert [len(o.prompt_logprobs) for o in again] == [len(p) for p in prompts]


def test_memory_does_not_grow_with_the_prompt(engine, prompts, monkeypatch) -> None:
    """However long the prompt, a step has logits for its rows and at most SCORED_ROWS more; a score for its continuation."""
    forward, seen = engine.runner.forward, []
    monkeypatch.setattr(engine.runner, "forward", lambda staged: seen.append(r := forward(staged)) or r)
    monkeypatch.setattr(engine.scheduler, "max_scored", 50)
    (output,) = engine.generate([3 + i % 90 for i in range(280)], replace(GREEDY, max_tokens=2, prompt_logprobs=1))
    assert len(output.prompt_logprobs) == 280 and max(len(r.logits) for r in seen) <= 50 + 8
    seen.clear()
    engine.score(prompts[3], [5, 6, 7])
    assert [len(r.logits) for r in seen] == [1 + 2]  # that of the last is its row's


def test_scores(engine, model, prompts, tokenizer) -> None:
    long = [*prompts[3], *prompts[2]]
    pairs = [(long, [5, 6, 7]), (long, prompts[0]), (prompts[0], [9]), (long, [5, 6])]
    before = engine.stats().saved_tokens
    scores = engine.score([p for p, _ in pairs], [c for _, c in pairs])
    assert engine.stats().saved_tokens - before >= 2 * (len(long) // 16) * 16, "an equal prompt is computed once"
    for (prompt, continuation), score in zip(pairs, scores, strict=True):
        logits = logits_of(model, [*prompt, *continuation])[len(prompt) - 1 : -1].double()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
        assert score.token_ids == continuation and score.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)
        assert score.total == pytest.approx(expected.sum().item(), abs=TOLERANCE * len(continuation))
        assert score.is_greedy == (logits.argmax(-1).tolist() == continuation)
    (best,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=3))
    assert engine.score(prompts[0], best.token_ids)[0].is_greedy
    text, more = "Once upon a time", ", there was"
    both = tokenizer(text + more)["input_ids"]
    assert engine.score(text, more)[0].token_ids == both[len(tokenizer(text)["input_ids"]) :]
    assert_idle(engine)


def test_scores_up_to_the_models_length(model) -> None:
    """Windows of a perplexity fill a model, and the last token of each is only asked for. With one token less the perplexity is
    another than that of other evaluations."""
    long = [3 + i * 7 % 90 for i in range(65)]
    with Engine(model, **{**OPTIONS, "max_model_len": 64}) as engine:
        for at in (1, 40, 64):
            (score,) = engine.score(long[:at], long[at:])
            logits = logits_of(model, long[:-1])[at - 1 :].double()
            expected = logits.log_softmax(-1).gather(1, torch.tensor(long[at:])[:, None])[:, 0]
            assert score.token_ids == long[at:] and score.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)
        with pytest.raises(ValueError, match="prompt and continuation have 66 tokens, and 65 can be scored: one more than max"):
            engine.score(long, [5])
        assert_idle(engine)


def test_scores_of_text(engine, tokenizer, monkeypatch) -> None:
    """All tokens that the prompt has not, also where they join what the prompt ends with; and no others where the tokenizer
    puts an end token behind every text."""
    pairs = (["The owl is", "The ow"], [" very wise", "l is"])
    found = engine.score(*pairs)
    assert [tokenizer.decode(score.token_ids) for score in found] == [" very wise", " owl is"]
    names, end = [("<|endoftext|>", 0), ("a", 5)], "<|endoftext|>"
    monkeypatch.setattr(tokenizer.backend_tokenizer, "post_processor", TemplateProcessing(f"$A {end}", special_tokens=names))
    again = engine.score(*pairs)
    assert [s.token_ids for s in again] == [s.token_ids for s in found]
    assert [s.total for s in again] == pytest.approx([s.total for s in found], abs=TOLERANCE)
    both = TemplateProcessing(f"a $A {end}", special_tokens=names)
    monkeypatch.setattr(tokenizer.backend_tokenizer, "post_processor", both)
    assert [tokenizer.decode(s.token_ids) for s in engine.score(["", "The"], [" owl", " owl"])] == [" owl", " owl"]


@pytest.mark.parametrize(("params", "message"), [
    (dict(logprobs=21), "logprobs asks for 21 tokens per position, and this engine gives at most 20. Ask for fewer, or make"),
    (dict(prompt_logprobs=-1), "prompt_logprobs asks for 1848 tokens per position, and this engine gives at most 20"),
    (dict(logprob_token_ids=list(range(21))), "logprob_token_ids asks for 21 tokens per position"),
    (dict(logprob_token_ids=[5000]), r"logprob_token_ids \[5000\] have no logits; the model has 1848"),
])
def test_above_the_bound(params, message, engine, prompts) -> None:
    """One clear message, and the other requests go on."""
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts[0], replace(GREEDY, **params))
    outputs = engine.generate(prompts[:3], [GREEDY, replace(GREEDY, **params), GREEDY])
    assert [o.finish_reason == "error" for o in outputs] == [False, True, False]
    assert_idle(engine)


def test_scores_of_what_cannot_be_scored(engine, prompts) -> None:
    for first, second, message in ((prompts[:2], [[5]], "2 prompts but 1 continuations"),
                                   (prompts[0], [], "the continuation is empty"),
                                   (prompts[0], "text", "a continuation is text only after a prompt that is text"),
                                   ("A", "", "adds no token to the prompt"), (prompts[0], [1848], "outside the vocabulary")):
        with pytest.raises((ValueError, TypeError), match=message):
            engine.score(first, second if second else [second])
    assert_idle(engine)


def test_whole_vocabulary(model, prompts) -> None:
    with Engine(model, **OPTIONS, max_logprobs=1848) as engine:
        (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=1, logprobs=-1))
        assert sum(math.exp(e.logprob) for e in output.logprobs[0].values()) == pytest.approx(1, abs=1e-5)
