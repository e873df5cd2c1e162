"""Requests that change their logits: each gets what a plain loop over the model's own forward gives, whatever runs with it."""

from __future__ import annotations

import functools
import math
import signal
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import transformers

from quire import Engine, SamplingParams
from quire.graph_runner import logits_editor
from quire.graph_runner.sampler import sample
from tests.sampling import random_logits, sampling_tensors
from tests.tiny import GREEDY, PROMPTS, assert_idle, hf_greedy, load_model, load_tokenizer, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
OPTIONS: dict[str, Any] = dict(num_pages=120, max_num_seqs=8, max_model_len=300)


@pytest.fixture(scope="module")
def engine(model, tokenizer) -> Any:
    with Engine(model, tokenizer, **OPTIONS, async_stepping=True) as made:
        yield made


def later(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A processor that depends on the length and on the last token."""
    logits = logits.clone()
    logits[len(output) % 7 :: 7] -= 6.0
    logits[output[-1:]] = -math.inf
    return logits


def with_prompt(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[prompt] += 2.0  # in place, which vLLM allows
    return logits


FEW = [*range(300, 306)]  # a continuation of these repeats itself
# The first option of each changes the continuation of the first prompt.
KINDS: dict[str, dict[str, Any]] = {
    "repetition": dict(repetition_penalty=1.7), "presence": dict(presence_penalty=2.0, allowed_token_ids=FEW),
    "frequency": dict(frequency_penalty=1.5, allowed_token_ids=FEW),
    "rewards": dict(repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=-0.25),
    "bias": dict(logit_bias={5: 3.5, 300: -2.0, 12: -50.0}), "allowed": dict(allowed_token_ids=range(100, 140)),
    "bad_words": dict(bad_words=["girl", " young lady", "Her best"]), "processor": dict(logits_processors=[later]),
    "with_prompt": dict(logits_processors=[with_prompt, later]),
    "all": dict(allowed_token_ids=[7, 20, *range(200, 900)], repetition_penalty=1.2, presence_penalty=0.3,
                frequency_penalty=0.2, logit_bias={7: 1.5, 20: -3.0}, logits_processors=[later], bad_words=["the"],
                min_tokens=20, stop_token_ids=[300]),
}


def edited(logits: torch.Tensor, prompt: list[int], output: list[int], p: SamplingParams, words: list[list[int]], eos: int
           ) -> torch.Tensor:
    """The logits (V,) of the next token, changed in vLLM's order by the formulas of its documentation, one token at a time."""
    x = logits.float().clone()
    if p.allowed_token_ids:
        allowed = set(p.allowed_token_ids)
        x[[token for token in range(len(x)) if token not in allowed]] = -math.inf
    for *before, last in words:
        if output[len(output) - len(before) :] == before:
            x[last] = -math.inf
    if len(output) < p.min_tokens:
        x[[eos, *p.stop_token_ids]] = -math.inf
    for token, number in (p.logit_bias or {}).items():
        x[token] += number
    for processor in p.logits_processors or ():
        x = processor(prompt, output, x) if processor is with_prompt else processor(output, x)
    counts = Counter(output)
    for token in {*prompt, *output}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token, count in counts.items():
        x[token] = x[token] - p.frequency_penalty * count - p.presence_penalty
    return x


def words_of(tokenizer: Any, params: SamplingParams) -> list[list[int]]:
    return [tokenizer(space + text.strip(), add_special_tokens=False)["input_ids"] for text in params.bad_words or ()
            for space in ("", " ")]


def oracle(model: Any, tokenizer: Any, prompt: list[int], params: SamplingParams, seed: int = 0) -> list[int]:
    output: list[int] = []
    words, eos = words_of(tokenizer, params), model.config.eos_token_id
    while len(output) < (params.max_tokens or 0):
        with torch.no_grad():
            x = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
        x = edited(x, list(prompt), list(output), params, words, eos)
        at = len(prompt) + len(output)
        output.append(int(sample(x[None], sampling_tensors([params], [seed], [at]))))
        if output[-1] in (eos, *params.stop_token_ids) and len(output) >= params.min_tokens:
            break
    return output


@functools.cache
def expected_of(kind: str, index: int) -> list[int]:
    """The oracle's continuation of a prompt, greedy for even indices."""
    model, tokenizer = of_the_oracle()
    return oracle(model, tokenizer, tokenizer(PROMPTS[index])["input_ids"], params_of(kind, index), 3)


@functools.cache
def of_the_oracle() -> tuple[Any, Any]:
    return load_model(num_layers=1), load_tokenizer()


def params_of(kind: str, index: int) -> SamplingParams:
    sampled = dict(temperature=0.7, seed=3, top_k=30) if index % 2 else dict(temperature=0.0)
    return SamplingParams(max_tokens=20, **{**sampled, **KINDS[kind]})


#: All run together in test_all_at_once; these alone, too, also in the quick tests.
QUICK = ("repetition", "all")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in KINDS])
def test_each_alone_and_among_others(kind, engine, model, prompts) -> None:
    """A user who sets it gets the documented distribution, and those beside him what they would get without him."""
    plain = tokens(engine.generate(prompts[:3], GREEDY))
    params = [params_of(kind, 0), GREEDY, params_of(kind, 1), GREEDY]
    got = tokens(engine.generate([prompts[0], prompts[1], prompts[1], prompts[2]], params))
    assert got == [expected_of(kind, 0), plain[1], expected_of(kind, 1), plain[2]]
    defaults = {option.name: option.default for option in fields(SamplingParams)}
    first = next(iter(KINDS[kind]))
    assert got[0] != tokens(engine.generate(prompts[0], replace(params[0], **{first: defaults[first]})))[0]
    assert_idle(engine)


SCHEDULES: dict[str, dict[str, Any]] = {
    "preempted": dict(page_size=2, num_pages=36, async_stepping=True, prefill_chunk_size=3, max_model_len=70),
    "chunks": dict(max_num_batched_tokens=5, async_stepping=False), "lasting": dict(enable_prefix_caching=True, page_size=4),
}


@pytest.mark.parametrize("schedule", [pytest.param(s, marks=[pytest.mark.slow] * (s != "preempted")) for s in SCHEDULES])
def test_all_at_once(schedule, model, tokenizer, prompts) -> None:
    """Penalties count the prompt and the continuation as they are, however the request was scheduled, cut or restarted."""
    with Engine(model, tokenizer, **OPTIONS | SCHEDULES[schedule]) as engine:
        for _ in range(2):  # the second finds slots, pages and tables as the first left them
            got = tokens(engine.generate([prompts[i % 2] for i in range(len(KINDS))],
                                         [params_of(kind, i % 2) for i, kind in enumerate(KINDS)]))
            assert got == [expected_of(kind, i % 2) for i, kind in enumerate(KINDS)]
        if schedule == "preempted":
            assert engine.stats().preemptions > 0
        if schedule == "lasting":
            assert engine.stats().saved_tokens > 0


def test_n_sequences_count_for_themselves(engine, model, tokenizer, prompts) -> None:
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=15, frequency_penalty=1.5, repetition_penalty=1.3)
    got = tokens(engine.generate(prompts[0], params))
    assert len({tuple(each) for each in got}) == 3
    seeds = [(5 + k * 0x9E3779B9) % 2**63 for k in range(3)]
    assert got == [oracle(model, tokenizer, prompts[0], params, seed) for seed in seeds]


def test_after_a_step_that_failed(engine, model, prompts, monkeypatch) -> None:
    """Tokens that were counted for a step that is run again are not counted twice."""
    from quire.graph_runner import model_runner

    calls, plain = [], model_runner.step_logprobs

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise ZeroDivisionError
        return plain(*args, **kwargs)

    monkeypatch.setattr(model_runner, "step_logprobs", fails)
    ids = engine.add_request(prompts[0], replace(params_of("frequency", 0), logprobs=0))
    request = engine.requests[ids[0]]
    raised = 0
    while engine.has_unfinished:
        try:
            engine.step()
        except ZeroDivisionError:
            raised += 1
    assert raised == 1 and request.output.token_ids == expected_of("frequency", 0)


# -- transformers' own processors


def test_as_transformers_does(engine, model, prompts) -> None:
    """The same processors give the same tokens as in ``generate``; so do the parameters that have the same meaning."""
    several = [transformers.NoRepeatNGramLogitsProcessor(2), transformers.SuppressTokensLogitsProcessor([20, 30, 358])]
    for processor in (transformers.LogitsProcessorList(several), transformers.RepetitionPenaltyLogitsProcessor(1.7),
                      transformers.MinLengthLogitsProcessor(len(prompts[0]) + 15, [12])):
        given = processor if isinstance(processor, list) else transformers.LogitsProcessorList([processor])
        want = hf_greedy(model, prompts[0], 20, logits_processor=given)
        assert tokens(engine.generate(prompts[0], replace(GREEDY, logits_processors=[processor])))[0] == want
        assert want != hf_greedy(model, prompts[0], 20)
    pairs = [(dict(repetition_penalty=1.7), dict(repetition_penalty=1.7)),
             (dict(allowed_token_ids=[*range(50, 90)]), dict(prefix_allowed_tokens_fn=lambda *_: [*range(50, 90)])),
             (dict(logit_bias={300: 4.0}), dict(sequence_bias={(300,): 4.0}))]
    for ours, theirs in pairs:
        assert tokens(engine.generate(prompts[0], replace(GREEDY, **ours)))[0] == hf_greedy(model, prompts[0], 20, **theirs)


@pytest.mark.parametrize("penalty", [1.05, 1.5, 0.7, 3.0])
def test_the_penalty_is_transformers_to_the_bit(penalty) -> None:
    """Where two tokens are equally likely after it, greedy requests take the one that ``generate`` takes."""
    for logits in (random_logits(3, 999), random_logits(3, 999, dtype=torch.bfloat16)):
        ids = torch.randint(0, 999, (2, 300))
        counts = torch.zeros(3, 999, dtype=torch.int32).scatter_(0, torch.tensor([[1], [2]]).expand(2, 300), 0)
        counts[1, ids[0]], counts[2, ids[1]] = logits_editor._IN_PROMPT, 3
        table = torch.tensor([[0, 0, 0, 0], *[[penalty, 1 / penalty, 0, 0]] * 2])
        got = logits_editor._penalized(logits, counts, table, torch.tensor([2, 0, 1]))
        want = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids.flip(0), logits[[0, 2]].float())
        assert torch.equal(got[[0, 2]], want) and torch.equal(got[1], logits[1].float())


def test_what_is_copied_to_the_device(engine, prompts, monkeypatch) -> None:
    """Nothing in a step of the same requests, and only their tokens when they come: not a row of the vocabulary for each."""
    draw, copy, copied = engine.runner.editor.draw, logits_editor.to_device, []
    monkeypatch.setattr(engine.runner.editor, "draw", lambda *given: (copied.append([]), draw(*given))[1])
    monkeypatch.setattr(logits_editor, "to_device", lambda x, device: (copied[-1].append(x.size), copy(x, device))[1])
    params = replace(GREEDY, repetition_penalty=1.1, ignore_eos=True, logit_bias={5: 1.0})
    expected = tokens(engine.generate(prompts[:1], params))[0]
    copied.clear()
    assert tokens(engine.generate([prompts[0]] * 3, params))[0] == expected
    assert len(copied) >= len(expected) and [step for step in copied if step][2:] == []
    assert max(size for step in copied for size in step) <= sum(map(len, [prompts[0]] * 3))


# -- traces


def test_a_trace_is_given_out_with_its_log_probabilities(engine, model, prompts) -> None:
    """A rollout's tokens, run again, give the log probabilities that the model has for them."""
    eos = model.config.eos_token_id
    trace = [9, 9, eos, 300, 12, 40, 41]
    params = SamplingParams(max_tokens=30, logprobs=1, trace_decode_token_ids=trace, frequency_penalty=1.0, seed=2)
    output, other = engine.generate(prompts[:2], [params, GREEDY])
    assert (output.token_ids, output.finish_reason) == (trace, "length")
    with torch.no_grad():
        want = model(torch.tensor([[*prompts[0], *trace]])).logits[0, len(prompts[0]) - 1 : -1].log_softmax(-1)
    for i, (token, entry) in enumerate(zip(trace, output.logprobs, strict=True)):
        assert entry[token].logprob == pytest.approx(want[i, token].item(), abs=5e-4)
    assert tokens([other])[0] == hf_greedy(model, prompts[1], 20)
    assert tokens(engine.generate(prompts[0], replace(params, max_tokens=3, logprobs=None)))[0] == trace[:3]
    # What they are a sample of: penalties count the tokens that were given out.
    processed = replace(params, logprobs_mode="processed_logprobs", temperature=0.5)
    (output,) = engine.generate(prompts[0], processed)
    for i, (token, entry) in enumerate(zip(trace, output.logprobs, strict=True)):
        with torch.no_grad():
            x = model(torch.tensor([[*prompts[0], *trace[:i]]])).logits[0, -1]
        x = edited(x, prompts[0], trace[:i], params, [], eos) / 0.5
        assert entry[token].logprob == pytest.approx(x.log_softmax(-1)[token].item(), abs=1e-3)


# -- what cannot be served


def test_a_processor_that_raises_fails_its_own_request(engine, prompts) -> None:
    calls = []

    def fails(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append(list(output))
        if len(output) == 3:
            raise KeyError("mine")
        return logits

    plain = tokens(engine.generate(prompts[:2], GREEDY))
    params = [GREEDY, replace(GREEDY, logits_processors=[fails]), GREEDY]
    one, failed, two = engine.generate([prompts[0], prompts[0], prompts[1]], params)
    assert tokens([one, two]) == plain
    assert (failed.finish_reason, failed.token_ids) == ("error", plain[0][:3])
    assert failed.error == "one of its logits_processors failed: KeyError: 'mine'"
    assert calls == [plain[0][:i] for i in range(4)]  # once a token
    for bad, message in ((lambda ids, x: x[:5], "it returned (5,), not logits of shape (1848,)"),
                         (lambda ids, x: None, "it returned NoneType, not logits")):
        with pytest.raises(RuntimeError) as caught:
            engine.generate(prompts[0], replace(GREEDY, logits_processors=[bad]))
        assert message in str(caught.value)
    assert_idle(engine)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_processor_that_ends_its_caller_ends_no_other(kind, engine, prompts) -> None:
    """Whose call runs the step is chance: another one would end for no reason of its own."""
    plain = tokens(engine.generate(prompts[:1], GREEDY))

    def ends(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 3:
            raise kind("mine")
        return logits

    own = engine.stream(prompts[0], replace(GREEDY, logits_processors=[ends]))
    next(own)  # its request runs
    assert tokens(engine.generate(prompts[:1], GREEDY)) == plain
    with pytest.raises(kind, match="mine"):
        list(own)
    with pytest.raises(kind, match="mine"):  # also one of several, whose other failures are logged
        engine.generate(prompts[:2], [replace(GREEDY, logits_processors=[ends]), GREEDY])
    assert_idle(engine)


def test_ctrl_c_while_a_processor_runs(engine, prompts, interruptible) -> None:
    """It ends the call of the main thread, after the step, and no request is blamed."""
    seen = []

    def interrupted(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        seen.append(len(output))
        return logits

    with pytest.raises(KeyboardInterrupt) as caught:
        engine.generate(prompts[0], replace(GREEDY, logits_processors=[interrupted]))
    assert seen == [0] and "logits_processors" not in str(caught.value)
    assert_idle(engine)


def test_a_processor_that_runs_its_own_engine_is_refused(engine, prompts) -> None:
    """The step at work would go on with the inputs of the other one."""
    def asks(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        engine.generate(prompts[1], GREEDY)
        return logits

    failed, good = engine.generate(prompts[:2], [replace(GREEDY, logits_processors=[asks]), GREEDY])
    assert "a logits processor ran the engine in whose step it runs" in failed.error
    assert tokens([good]) == tokens(engine.generate(prompts[1], GREEDY))
    assert_idle(engine)


@pytest.mark.parametrize("options", [dict(allowed_token_ids=[9], stop_token_ids=[9]), dict(stop_token_ids=list(range(1848)))])
def test_nothing_left_to_sample(engine, prompts, options) -> None:
    with pytest.raises(RuntimeError, match="or its sampling parameters leave no token"):
        engine.generate(prompts[0], replace(GREEDY, **options, min_tokens=3))
    assert_idle(engine)


@pytest.mark.parametrize(("options", "error", "message"), [
    (dict(allowed_token_ids=[1848]), ValueError, r"allowed_token_ids \[1848\] have no logits; the model has 1848"),
    (dict(logit_bias={5000: 1}), ValueError, r"logit_bias \[5000\] have no logits"),
    (dict(trace_decode_token_ids=[1, 9999]), ValueError, r"trace_decode_token_ids \[9999\] have no logits"),
    (dict(logits_processors=[lambda logits: logits]), TypeError, "takes 1 arguments"),
])
def test_refused(options, error, message, engine, prompts) -> None:
    with pytest.raises(error, match=message):
        engine.add_request(prompts[0], SamplingParams(**options))
    assert_idle(engine)
