"""What users call on an engine: other forms of prompts and results, names, priorities, timeouts, a full queue, asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import quire
from quire.graph_runner import stats
from quire.graph_runner.engine import Engine
from quire.graph_runner.request import FinishReason
from tests.tiny import GREEDY, SAMPLED, assert_idle, hf_greedy, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
SHORT = replace(GREEDY, max_tokens=6, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(model, tokenizer) -> Any:
    with Engine(model, tokenizer, num_pages=120, max_num_seqs=2, max_model_len=300, max_waiting=6) as made:
        yield made


@pytest.fixture
def engine(shared) -> Iterator[Engine]:
    yield shared
    assert_idle(shared)


@pytest.fixture(scope="module")
def expected(model, prompts) -> list[list[int]]:
    return [hf_greedy(model, p, SHORT.max_tokens, eos_token_id=None) for p in prompts]


# -- prompts and results ---------------------------------------------------------------------------------------------------


def test_code_written_for_vllm(engine, prompts, expected, tokenizer) -> None:
    texts = [tokenizer.decode(p) for p in prompts[:2]]
    asked = [{"prompt_token_ids": prompts[0]}, {"prompt": texts[1]}, {"prompt": texts[0], "prompt_token_ids": prompts[0]}]
    results = engine.generate(asked, sampling_params=SHORT, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in results] == [expected[0], expected[1], expected[0]]
    first = results[1]
    assert first.outputs[0].text == first.text == tokenizer.decode(expected[1]) and first.prompt == texts[1]
    assert first.finished and first.outputs[0].finish_reason == "length" and first.outputs[0].cumulative_logprob is None
    assert engine.get_tokenizer() is engine.tokenizer
    with pytest.raises(TypeError, match="params and sampling_params are two names of one argument"):
        engine.generate(prompts[0], SHORT, sampling_params=SHORT)
    chat = [{"role": "user", "content": texts[0]}]
    template = "{{ messages[0]['content'] }}"
    assert engine.generate(prompts[0], SHORT, lora_request=None)[0].token_ids == expected[0]
    assert len(engine.chat(chat, SHORT, chat_template=template, lora_request=None)[0].token_ids) == 6
    with pytest.raises(TypeError, match="lora_request must be None, got 'poet'.*choose it by adapter=name in this call"):
        engine.generate(prompts[0], SHORT, lora_request="poet")
    with pytest.raises(TypeError, match="adapter=name"):
        engine.chat(chat, SHORT, chat_template=template, lora_request="poet")
    with pytest.raises(ValueError, match="a prompt given as a dict has the key prompt or prompt_token_ids, got prompt, multi_"):
        engine.generate({"prompt": "x", "multi_modal_data": {}}, SHORT)


def test_several_continuations_of_a_prompt(engine, prompts, expected) -> None:
    """One result per prompt, whatever n: code that pairs prompts with results would take others' texts."""
    asked = [prompts[0], [], prompts[1]]
    params = [replace(SAMPLED, n=3, max_tokens=9, logprobs=0, ignore_eos=True), replace(SAMPLED, n=2), SHORT]
    first, bad, last = engine.generate(asked, params)
    assert [(c.index, len(c.token_ids), c.finish_reason, c.finished()) for c in first.outputs] == [
        (i, 9, "length", True) for i in range(3)]
    assert all(c.cumulative_logprob == sum(next(iter(of.values())).logprob for of in c.logprobs or ()) for c in first.outputs)
    assert [c.text for c in first.outputs] == [engine.tokenizer.decode(c.token_ids) for c in first.outputs]
    assert len({tuple(c.token_ids) for c in first.outputs}) == 3 and first.token_ids == first.outputs[0].token_ids
    assert "the prompt is empty" in (bad.error or "") and last.outputs[0].index == 0 and last.token_ids == expected[1]
    assert [o.index for o in (first, bad, last)] == [0, 1, 2]
    events = {event.index: event.output for event in engine.stream(asked, params) if event.finished}
    assert [events[i].prompt_token_ids for i in sorted(events)] == [prompts[0]] * 3 + [[], prompts[1]]
    assert sorted(events) == [0, 1, 2, 3, 5], "those of a prompt are where its n is counted, also after one that is refused"


def test_a_continuation_that_fails_is_seen_in_its_prompts_result(engine, prompts) -> None:
    calls = []

    def fails_for_one(ids: list[int], scores: torch.Tensor) -> torch.Tensor:
        calls.append(len(ids))
        if len(calls) == 2:
            raise ZeroDivisionError("one of two")
        return scores

    one, other = engine.generate([prompts[0], prompts[1]], [replace(SAMPLED, n=2, logits_processors=[fails_for_one]), SHORT])
    assert [c.error is None for c in one.outputs].count(True) == 1 and "one of two" in (one.error or "")
    assert other.error is None


def test_default_parameters_of_the_model(engine, monkeypatch, prompts) -> None:
    config = engine.model.generation_config
    monkeypatch.setattr(config, "temperature", 0.25)
    monkeypatch.setattr(config, "max_new_tokens", 7)
    params = engine.get_default_sampling_params()
    assert (params.temperature, params.max_tokens, params.top_p) == (0.25, 7, config.top_p or 1.0)
    monkeypatch.setattr(engine.model, "generation_config", transformers.GenerationConfig(max_new_tokens=3), raising=False)
    assert len(engine.generate(prompts[0], transformers.GenerationConfig(eos_token_id=-1))[0].token_ids) == 3
    with pytest.raises(ValueError, match=r"a request has no num_beams of a GenerationConfig"):
        engine.generate(prompts[0], transformers.GenerationConfig(num_beams=3))
    with pytest.raises(TypeError, match="params must be SamplingParams"):
        engine.generate(prompts[0], "greedy")


@pytest.mark.parametrize("options", [
    dict(max_new_tokens=6), dict(max_length=20, do_sample=False), dict(max_new_tokens=6, repetition_penalty=1.4),
    dict(max_new_tokens=9, eos_token_id=[5, 9, 12, 40]), pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_a_generation_config_is_read_as_generate_reads_it(model, engine, prompts, options) -> None:
    config = transformers.GenerationConfig(**options)
    found = engine.generate(prompts[:3], config)
    for prompt, output in zip(prompts[:3], found, strict=True):
        ids = torch.tensor([prompt])
        own = type(model).generate(model, ids, generation_config=config)[0, len(prompt):].tolist()
        assert output.token_ids == own


def test_no_end_token_of_a_generation_config_means_none(model, engine, prompts, monkeypatch) -> None:
    """And not that of the tokenizer, or of the model's config."""
    first = type(model).generate(model, torch.tensor([prompts[0]]), max_new_tokens=1)[0, -1].item()
    monkeypatch.setattr(model.config, "eos_token_id", first)
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    config = transformers.GenerationConfig(max_new_tokens=6)
    for given in (config, transformers.GenerationConfig(max_new_tokens=6, min_length=1)):
        assert len(engine.generate(prompts[0], given)[0].token_ids) == 6
    with pytest.raises(ValueError, match="a request has no stop_strings that count before the minimum of tokens of a Gen"):
        engine.generate(prompts[0], transformers.GenerationConfig(max_new_tokens=6, min_new_tokens=3, stop_strings=["e"]))


@pytest.mark.parametrize(("bad", "error"), [
    ([5] * 20, "max_length=12 counts the prompt's tokens too, and the prompt has 20"),
    ([10**6], r"token ids \[1000000\] are outside the vocabulary")], ids=["too_long", "no_token"])
def test_a_prompt_that_a_generation_config_does_not_fit_fails_alone(engine, monkeypatch, bad, error) -> None:
    """Else one long prompt of a set ends the call, and the others have no results."""
    monkeypatch.setattr(engine.model, "generation_config", transformers.GenerationConfig(eos_token_id=-1), raising=False)
    config = transformers.GenerationConfig(max_length=12, num_return_sequences=2, do_sample=True)
    for prompts in ([bad, [5, 6]], [[5, 6], bad]):
        by_ids = {len(output.prompt_token_ids): output for output in engine.generate(prompts, config)}
        assert re.match(error, by_ids[len(bad)].error or "") and by_ids[len(bad)].finish_reason == "error"
        assert [len(c.token_ids) for c in by_ids[2].outputs] == [10, 10] and by_ids[2].error is None
        with pytest.raises(ValueError, match=error):
            engine.generate(prompts, config, raise_on_error=True)
    with pytest.raises(ValueError, match=error):
        engine.generate(bad, config)
    with pytest.raises(ValueError, match=error):
        engine.add_request(bad, config)
    # What no prompt can have is an error of the call.
    with pytest.raises(ValueError, match="a request has no num_beams"):
        engine.generate([bad, [5, 6]], transformers.GenerationConfig(max_length=12, num_beams=2))


def test_many_prompts_set_few_signal_handlers(engine, prompts, monkeypatch) -> None:
    """Each costs microseconds, and a rollout has hundreds of prompts."""
    calls, own = [], signal.signal
    monkeypatch.setattr(signal, "signal", lambda *args: calls.append(1) or own(*args))
    stream = engine.stream([prompts[0]] * 8, SHORT)
    next(stream)
    assert len(calls) < 16
    stream.close()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_with_its_mask(side, engine, prompts, expected, tokenizer) -> None:
    width = max(map(len, prompts[:3]))
    ids, mask = torch.zeros(3, width, dtype=torch.int64), torch.zeros(3, width, dtype=torch.int64)
    for i, p in enumerate(prompts[:3]):
        at = slice(width - len(p), width) if side == "left" else slice(0, len(p))
        ids[i, at], mask[i, at] = torch.tensor(p), 1
    assert tokens(engine.generate({"input_ids": ids, "attention_mask": mask}, SHORT)) == expected[:3]
    encoded = tokenizer([tokenizer.decode(p) for p in prompts[:3]], return_tensors="pt", padding=True)
    assert tokens(engine.generate(encoded, SHORT)) == expected[:3]
    mask[2, len(prompts[2]) // 2 if side == "right" else width - 2] = 0
    with pytest.raises(ValueError, match="the attention_mask of row 2 has zeros between ones"):
        engine.generate({"input_ids": ids, "attention_mask": mask}, SHORT)
    with pytest.raises(ValueError, match="input_ids and attention_mask have different shapes"):
        engine.generate({"input_ids": ids, "attention_mask": mask[:, 1:]}, SHORT)


def test_chats(engine, tokenizer, monkeypatch) -> None:
    chat = [{"role": "user", "content": "The owl"}, {"role": "assistant", "content": "is"}]
    with pytest.raises(ValueError, match="is a list of messages, and the engine has no tokenizer with a chat template"):
        engine.generate(chat, SHORT)
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.content }} {% endfor %}"
                        "{% if add_generation_prompt %}a{% endif %}", raising=False)
    found = engine.generate([chat, chat[:1]], SHORT)
    plain = engine.generate([tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("The owl is a", "The owl a")], SHORT)
    assert tokens(found) == tokens(plain)
    assert tokens(engine.generate(chat, SHORT)) == [found[0].token_ids]
    parts = [{"role": "user", "content": [{"type": "text", "text": "The"}, {"type": "text", "text": "owl"}]}]
    (one,) = engine.chat(parts, SHORT, add_generation_prompt=False, chat_template_kwargs={"unused": 1})
    assert one.prompt == "The\nowl " and one.prompt_token_ids == tokenizer(one.prompt, add_special_tokens=False)["input_ids"]
    (one,) = engine.chat(chat, SHORT, chat_template="{{ messages[1].content }}")
    assert one.prompt == "is"
    with pytest.raises(ValueError, match="parts of type image; quire serves text"):
        engine.chat([{"role": "user", "content": [{"type": "image"}]}], SHORT)
    with pytest.raises(TypeError, match="a chat is a list of messages"):
        engine.chat("The owl", SHORT)


def test_truncated_prompts_and_masks(engine, prompts, expected) -> None:
    long = [*range(3, 40), *prompts[0]]
    (out,) = engine.generate(long, replace(SHORT, truncate_prompt_tokens=len(prompts[0])))
    assert out.prompt_token_ids == prompts[0] and out.token_ids == expected[0]
    with pytest.raises(TypeError, match="a prompt is text or a list of token ids"):
        engine.generate([True, False], SHORT)


def test_progress_bar(engine, prompts, capfd) -> None:
    seen = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            seen.append((total, desc))

        def update(self, n: int) -> None:
            seen.append(n)

        def close(self) -> None:
            seen.append("closed")

    engine.generate(prompts[:3], SHORT, use_tqdm=Bar)
    assert seen == [(3, "Generating"), 1, 1, 1, "closed"]
    engine.generate(prompts[:3], SHORT)
    assert capfd.readouterr().err == "", "no bar in a log"
    engine.generate(prompts[:3], SHORT, use_tqdm=True)
    assert "Generating" in capfd.readouterr().err


# -- requests --------------------------------------------------------------------------------------------------------------


def test_names(engine, prompts, expected) -> None:
    outputs = engine.generate(prompts[:2], SHORT, request_id=["a", "b"])
    assert [o.request_id for o in outputs] == ["a", "b"] and tokens(outputs) == expected[:2]
    numbers = engine.add_request(prompts[0], replace(SAMPLED, n=2, max_tokens=50), request_id="a")
    (other,) = engine.add_request(prompts[1], SHORT)
    with pytest.raises(ValueError, match="a request with request_id 'a' is unfinished; give another one, or abort that one"):
        engine.add_request(prompts[2], SHORT, request_id="a")
    engine.abort("unknown")
    engine.abort("a")
    assert list(engine.requests) == [other] and other not in numbers
    while engine.has_unfinished:
        engine.step()
    for event in engine.stream(prompts[0], replace(GREEDY, max_tokens=9, ignore_eos=True)):
        engine.abort(event.output.request_id)  # vLLM's way: the name of a request without one is its number
        event.output.prompt_token_ids += [1]  # the caller's own
    assert event.output.finish_reason == "abort" and len(event.output.token_ids) < 9
    (number,) = engine.add_request(prompts[0], SHORT, request_id="named")
    engine.abort(str(number))  # the name of no request
    assert number in engine.requests
    engine.abort("named")
    while engine.has_unfinished:
        engine.step()
    for bad, error in ((["a"], ValueError), (3, TypeError), ("a", ValueError)):
        with pytest.raises(error, match="request_id"):
            engine.generate(prompts[:2], SHORT, request_id=bad)
    outputs = engine.generate(prompts[:3], SHORT, request_id=["a", "a", "b"])
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]


def test_priorities(engine, prompts, expected) -> None:
    """With two slots the third and fourth wait; a lower number starts first, and equal ones in order."""
    started: list[int] = []
    priorities = [5, 5, 3, 1, 3, 1]
    outputs = {}
    for event in engine.stream([*prompts[:5], prompts[6]], SHORT, priority=priorities):
        if event.index not in started:
            started.append(event.index)
        outputs[event.index] = event.output.token_ids
    assert started == [3, 5, 2, 4, 0, 1]
    assert [outputs[i] for i in range(6)] == [*expected[:5], expected[6]]
    with pytest.raises(ValueError, match="6 prompts but 2 priorities; give one for all or one for each"):
        engine.generate(prompts[:6], SHORT, priority=[1, 2])
    with pytest.raises(TypeError, match="priority must be an integer, got 'high'"):
        engine.generate(prompts[0], SHORT, priority="high")


def test_the_lowest_priority_is_preempted(model, prompts) -> None:
    with Engine(model, num_pages=20, page_size=4, max_num_seqs=4, max_model_len=70) as engine:
        ids = [engine.add_request(prompts[1], replace(LONG, max_tokens=30), priority=p)[0] for p in (1, 9, 1)]
        requests = [engine.requests[i] for i in ids]
        while engine.has_unfinished:
            engine.step()
        assert [r.preemptions > 0 for r in requests] == [False, True, False]
        expected = hf_greedy(model, prompts[1], 30, eos_token_id=None)
        assert [r.output.token_ids for r in requests] == [expected] * 3


def test_timeouts(engine, prompts, expected, monkeypatch) -> None:
    """The late request fails with what it has, the others go on."""
    now = [0.0]
    monkeypatch.setattr("quire.graph_runner.admission.time.monotonic", lambda: now[0])
    events = engine.stream(prompts[:2], [LONG, SHORT], timeout=5, raise_on_error=False)
    ended = {}
    for event in events:
        now[0] += 0.1 if event.index in ended or len(ended) == 0 else 1.0
        if event.finished:
            ended[event.index] = event.output
    assert ended[1].token_ids == expected[1] and ended[1].error is None
    assert ended[0].finish_reason == FinishReason.ERROR and 0 < len(ended[0].token_ids) < 100
    assert ended[0].error == f"timed out after 5 seconds with {len(ended[0].token_ids)} new tokens"
    with pytest.raises(RuntimeError, match="request 0 failed: timed out after 0.25 seconds"):
        for _ in engine.stream(prompts[0], LONG, timeout=0.25):
            now[0] += 0.1
    for bad, error in ((0, ValueError), (-1.0, ValueError), ("1s", TypeError), (float("nan"), ValueError)):
        with pytest.raises(error, match="timeout must be"):
            engine.generate(prompts[0], SHORT, timeout=bad)


def test_a_full_queue(engine, prompts, expected, caplog) -> None:
    """Two run and six wait; the ninth is refused, the others are served."""
    outputs = engine.generate([prompts[i % 3] for i in range(9)], SHORT)
    assert [o.finish_reason for o in outputs] == ["length"] * 8 + ["error"]
    assert outputs[8].error.startswith("the queue is full: 6 requests wait for a slot, and max_waiting=6. Try again when some")
    assert tokens(outputs[:8]) == [expected[i % 3] for i in range(8)]
    for _ in range(8):
        engine.add_request(prompts[0], SHORT)
    with pytest.raises(quire.QueueFull, match="the queue is full"):
        engine.generate(prompts[0], SHORT)
    while engine.has_unfinished:
        engine.step()
    with pytest.raises(quire.QueueFull, match="n=9 has never room in the queue: max_num_seqs=2 may run, and max_waiting=6"):
        engine.add_request(prompts[0], replace(SAMPLED, n=9))
    assert tokens(engine.generate(prompts[0], SHORT)) == [expected[0]]


def test_an_idle_engine_is_not_busy(model, prompts, monkeypatch) -> None:
    """After a request that ended, was aborted, or whose stream was dropped."""
    now = [100.0]
    monkeypatch.setattr(stats, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Engine(model, num_pages=40, max_num_seqs=2, max_model_len=100) as engine:
        for end in (lambda: engine.generate(prompts[0], SHORT), lambda: next(engine.stream(prompts[0], SHORT)),
                    lambda: (engine.add_request(prompts[0], SHORT), engine.step(), engine.abort("0"), engine.abort(2))):
            end()
            assert not engine.has_unfinished or engine.step()
            now[0] += 1000
        engine.generate(prompts[0], SHORT)
        assert engine.stats().busy_seconds == 0


def test_stats(model, prompts) -> None:
    with Engine(model, num_pages=40, max_num_seqs=2, max_model_len=100) as engine:
        before = engine.stats()
        assert (before.running, before.waiting, before.generated_tokens, before.pages_used) == (0, 0, 0, 0)
        for p in prompts[:3]:
            engine.add_request(p, SHORT)
        engine.step()
        middle = engine.stats()
        assert (middle.running, middle.waiting, middle.finished) == (2, 1, 0) and middle.pages_used > 0
        while engine.has_unfinished:
            engine.step()
        after = engine.stats()
        assert (after.running, after.waiting, after.finished, after.pages_used) == (0, 0, 3, 0)
        assert after.generated_tokens == 18 and after.prompt_tokens == sum(map(len, prompts[:3]))
        assert after.tokens_per_second == pytest.approx(18 / after.busy_seconds)
        assert after.weight_bytes == sum(p.numel() * 4 for p in model.parameters()) + sum(
            b.numel() * b.element_size() for b in model.buffers())
        assert after.kv_cache_bytes == engine.runner.cache.num_bytes and after.free_bytes is None
        assert "0 running, 0 waiting, 3 finished; 18 new tokens" in str(after)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.stats()


# -- asyncio ---------------------------------------------------------------------------------------------------------------


def test_astream(engine, prompts, expected) -> None:
    async def collect(i: int) -> list[int]:
        found: list[int] = []
        async for event in engine.astream(prompts[i], SHORT):
            found += event.token_ids
        return found

    async def run() -> list[list[int]]:
        return await asyncio.gather(*(collect(i) for i in range(3)))

    assert asyncio.run(run()) == expected[:3]


def test_astream_that_nobody_reads_on(engine, prompts, expected) -> None:
    """Left early or cancelled, its requests are aborted; another goes on."""
    async def leave() -> None:
        stream = engine.astream(prompts[0], LONG)
        async for _ in stream:
            break
        await stream.aclose()

    async def hang() -> None:
        async for _ in engine.astream(prompts[1], LONG):
            pass

    async def run() -> list[int]:
        await leave()
        task = asyncio.create_task(hang())
        await asyncio.sleep(0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return [t async for event in engine.astream(prompts[2], SHORT) for t in event.token_ids]

    assert asyncio.run(run()) == expected[2]
    with pytest.raises(ValueError, match="the prompt is empty"):
        asyncio.run(anext(engine.astream([[]], SHORT)))
