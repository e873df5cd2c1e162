"""transformers' continuous batching after ``quire.paged``: the same tokens and outputs, from the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

import quire
from quire.graph_runner.continuous import engine_options
from tests.tiny import assert_idle, hf_greedy, load_model

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
GREEDY = dict(max_new_tokens=9, eos_token_id=0, pad_token_id=0)


@pytest.fixture(scope="module")
def model():
    model = quire.paged(load_model(num_layers=1), num_pages=80, max_num_seqs=8, max_model_len=300, cudagraph_capture_sizes=[])
    yield model
    model.generate.close()


@pytest.fixture
def manager(model):
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY))
    manager.start()
    yield manager
    manager.stop()
    assert not manager.is_running()
    assert_idle(model.generate.engine)


def test_generate_batch(model, prompts) -> None:
    """What a library that calls transformers' own names gets."""
    def outputs(of) -> dict:
        config = ContinuousBatchingConfig(page_size=16, num_blocks=60, max_batch_tokens=64, return_logprobs=True)
        return of.generate_batch(prompts, generation_config=GenerationConfig(**GREEDY), continuous_batching_config=config)

    want, got = outputs(load_model(num_layers=1)), outputs(model)
    assert list(got) == list(want)
    for mine, theirs in zip(got.values(), want.values(), strict=True):
        assert isinstance(mine, GenerationOutput) and mine.status == RequestStatus.FINISHED and mine.error is None
        assert (mine.generated_tokens, mine.prompt_ids) == (theirs.generated_tokens, theirs.prompt_ids)
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    config = model.generate.engine.config
    assert (config.page_size, config.num_pages, config.max_num_batched_tokens) == (16, 61, 64)
    sampled = model.generate_batch(prompts[:2], generation_config=GenerationConfig(
        **GREEDY, do_sample=True, num_return_sequences=2), record_timestamps=True)
    assert list(sampled) == ["req_0__child#0", "req_0", "req_1__child#0", "req_1"]
    assert all(len(o.timestamps) == len(o.generated_tokens) for o in sampled.values())


def test_results_as_they_come(manager, prompts) -> None:
    streamed = manager.add_request(prompts[0], streaming=True, record_timestamps=True)
    found = list(manager.request_id_iter(streamed))  # what was given out does not grow
    assert [len(o.generated_tokens) for o in found] == [len(o.timestamps) for o in found] == list(range(1, 10))
    many = manager.add_requests(prompts[:3], max_new_tokens=2)
    assert {manager.get_result(timeout=20).request_id for _ in many} == set(many)
    named = manager.add_request(prompts[1], request_id="mine")
    with pytest.raises(ValueError, match="request_id 'mine' is in use"):
        manager.add_request(prompts[1], request_id=named)
    assert manager.get_result("mine", timeout=20).is_finished() and manager.get_result(timeout=0.01) is None


def test_a_handler_gets_each_result_in_its_event_loop(manager, prompts) -> None:
    async def main() -> list[int]:
        found: asyncio.Queue = asyncio.Queue()
        manager.register_result_handler("x", found.put_nowait)
        manager.add_request(prompts[1], request_id="x", streaming=True)
        lengths = []
        while True:
            output = await asyncio.wait_for(found.get(), 20)
            lengths.append(len(output.generated_tokens))
            if output.is_finished():
                return lengths

    assert asyncio.run(main()) == list(range(1, 10))


def test_pause_cancel_and_failures(manager, prompts) -> None:
    with manager.pause():
        waiting = manager.add_request(prompts[0])
        assert manager.get_result(timeout=0.1) is None
        with pytest.raises(RuntimeError, match="cannot stop the manager inside a pause"):
            manager.stop()
    assert manager.get_result(waiting, timeout=20).status == RequestStatus.FINISHED
    with manager.pause():  # so that it cannot end before it is cancelled
        cancelled = manager.add_request(prompts[0], max_new_tokens=200)
        manager.cancel_request(cancelled)
    output = manager.get_result(cancelled, timeout=20)
    assert (output.status, output.error) == (RequestStatus.FAILED, "the request was cancelled")
    manager.add_request([])
    output = manager.get_result(timeout=20)
    assert output.status == RequestStatus.FAILED and "the prompt is empty" in output.error


def test_a_hard_stop_fails_what_is_left_and_nothing_is_queued_after_it(model, prompts, caplog) -> None:
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY))
    request = manager.add_request(prompts[0], max_new_tokens=250)
    manager.start()
    manager.stop(hard_stop=True)
    assert manager.get_result(request).error == "the manager was stopped"
    model.generate.engine.step()
    assert_idle(model.generate.engine)
    # A request that nothing runs would hold its place in the engine.
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY))
    manager.start()
    manager.stop()
    assert manager.add_requests(prompts[:2]) == [None, None] and "takes no requests until start()" in caplog.text
    assert_idle(model.generate.engine)
    manager.start()
    assert manager.get_result(manager.add_request(prompts[0]), timeout=20).error is None
    manager.stop()


def test_what_changes_while_a_request_waits_for_room(model, prompts) -> None:
    """It would be one that nobody runs, or a second one of its name."""
    config = ContinuousBatchingConfig(max_queue_size=1)
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY), config)
    engine, found = model.generate.engine, list[Any]()

    def add(name: str) -> None:
        try:
            found.append(manager.add_request(prompts[0], request_id=name))
        except ValueError as error:
            found.append(str(error))

    def while_full(names: list[str], then: Callable[[], None]) -> None:
        found.clear()
        manager.add_request(prompts[1], request_id="first")
        threads = [threading.Thread(target=add, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        time.sleep(0.3)  # until they wait; if one does not yet, nothing is tested and nothing fails
        then()
        for thread in threads:
            thread.join(30)

    def starts_and_stops() -> None:
        manager.start()
        manager.stop(hard_stop=True)

    while_full(["second"], starts_and_stops)
    assert found == [None] or manager.get_result("second", timeout=20).status is not None
    engine.step()
    assert_idle(engine)
    manager.start()
    manager.stop()
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY), config)
    while_full(["same", "same"], manager.start)
    assert sorted(found) == ["request_id 'same' is in use", "same"]
    assert manager.get_result("same", timeout=20).error is None and manager.get_result("first", timeout=20).error is None
    manager.stop()
    assert_idle(engine)


def test_samples(model, prompts) -> None:
    """torch.manual_seed decides, as a trainer's seed does; a seed of the config gives each request other tokens."""
    config, seeded = GenerationConfig(**GREEDY, do_sample=True, temperature=5.0), ContinuousBatchingConfig(seed=3)
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append([o.generated_tokens for o in model.generate_batch([prompts[0]] * 2, config).values()])
    assert found[0] == found[1] != found[2] and found[0][0] != found[0][1]
    manager = model.init_continuous_batching(config, seeded)
    manager.start()
    named = [manager.get_result(manager.add_request(prompts[0], request_id=name), timeout=20).generated_tokens for name in "ab"]
    manager.stop()
    assert named[0] != named[1]


def test_repetition_penalty(model, prompts) -> None:
    """TRL's trainers have it as an option of their own; transformers' continuous batching drops it."""
    config = GenerationConfig(**GREEDY, repetition_penalty=3.0)
    got = model.generate_batch(prompts[:2], config)
    for prompt, output in zip(prompts[:2], got.values(), strict=True):
        assert output.generated_tokens == hf_greedy(load_model(num_layers=1), prompt, 9, repetition_penalty=3.0, eos_token_id=0)
        assert output.generated_tokens != hf_greedy(load_model(num_layers=1), prompt, 9, eos_token_id=0)


def test_minimum_lengths(model, prompts) -> None:
    """As in ``generate``, where min_length counts the prompt; a text that has enough tokens would go on behind its end."""
    plain, prompt = load_model(num_layers=1), prompts[0]
    options = dict(max_new_tokens=9, pad_token_id=0, eos_token_id=hf_greedy(plain, prompt, 1)[0])
    lengths = []
    for length in (len(prompt) + 3, len(prompt) - 1, 100):
        config = GenerationConfig(**options, min_length=length)
        (got,) = model.generate_batch([prompt], config).values()
        assert got.generated_tokens == plain.generate(torch.tensor([prompt]), config)[0, len(prompt) :].tolist()
        lengths.append(len(got.generated_tokens))
    assert lengths[1] == 1 < lengths[0] <= lengths[2] == 9
    config = GenerationConfig(pad_token_id=0, eos_token_id=options["eos_token_id"], min_new_tokens=3)  # and no maximum
    (got,) = model.generate_batch([prompt], config).values()
    want = plain.generate(torch.tensor([prompt]), config, max_new_tokens=200)[0, len(prompt) :].tolist()
    assert got.generated_tokens == want and 3 <= len(want) < 200


@pytest.mark.parametrize(("generation", "config", "message"), [
    (dict(no_repeat_ngram_size=2), {}, "quire does not have no_repeat_ngram_size in continuous batching; model.generate does"),
    (dict(stop_strings=["a"]), {}, "quire does not have stop_strings in continuous batching"),
    ({}, dict(scheduler_type="prefill_first"), "quire has no scheduler_type='prefill_first'; leave them at their defaults"),
    ({}, dict(cpu_offload_space=1.0, safety_margin=0.2), "quire has no safety_margin=0.2, cpu_offload_space=1.0"),
    ({}, dict(page_size=0), "page_size must be at least 1"),
    ({}, dict(num_blocks=0), r"makes \{'num_pages': 1\} of the engine's options: num_pages must be at least 2"),
])
def test_what_quire_does_not_have_is_named(generation, config, message, model, prompts) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate_batch(prompts[:1], GenerationConfig(**GREEDY, **generation), ContinuousBatchingConfig(**config))


def test_a_config_is_of_its_call(model, prompts) -> None:
    """A pool of four pages that one call asked for must not refuse the prompts of the next."""
    few = model.generate_batch(prompts[:1], GenerationConfig(**GREEDY), ContinuousBatchingConfig(num_blocks=4))
    assert len(few["req_0"].generated_tokens) == 9 and model.generate.engine.config.num_pages == 5
    assert model.generate_batch([[5] * 100], GenerationConfig(**GREEDY))["req_0"].error is None
    assert model.generate.engine.config.num_pages == 80


def test_text_is_not_taken_for_tokens(manager, caplog) -> None:
    with pytest.raises(TypeError, match="take token ids, got the text 'Once'; tokenize it"):
        manager.add_request("Once")


def test_what_has_no_effect_is_logged(model, caplog) -> None:
    """Accepted in silence, a limit of pages per request would be taken for one."""
    assert engine_options(ContinuousBatchingConfig(max_blocks_per_request=3)) == {}
    assert "max_blocks_per_request=3 has no effect" in caplog.text
    model.init_continuous_batching(GenerationConfig(max_length=10))
    assert "max_length=10 has no effect in continuous batching, as in transformers; set max_new_tokens" in caplog.text
    with caplog.at_level("INFO", "quire"):  # no warning: transformers' own generate_batch gives hints in each call
        config = ContinuousBatchingConfig(max_memory_percent=0.5)
        model.init_continuous_batching(GenerationConfig(**GREEDY), config, {"rows": 3})
    assert "max_memory_percent=0.5 has no effect in quire, where num_pages is set" in caplog.text
    assert "workload_hints has no effect" in caplog.text
    caplog.clear()
    assert engine_options(ContinuousBatchingConfig(page_size=8)) == {"page_size": 8} and not caplog.text


def test_every_field_is_an_option_or_is_named(caplog) -> None:
    """When this fails, transformers has a new field: one that is accepted and ignored."""
    by_the_manager = {"return_logprobs", "seed", "max_queue_size", "per_request_processors"}
    for name in {field.name for field in dataclasses.fields(ContinuousBatchingConfig)} - by_the_manager:
        config, value = ContinuousBatchingConfig(), False if name == "use_cuda_graph" else 3
        setattr(config, name, value)
        caplog.clear()
        try:
            honoured = bool(engine_options(config))
        except ValueError as error:
            honoured = f"{name}={value}" in str(error)
        assert honoured or f"{name}={value} has no effect" in caplog.text, name
    assert engine_options(ContinuousBatchingConfig(block_size=8)) == {"page_size": 8}  # its name in transformers 5.17


def test_parameters_of_a_request(model, prompts) -> None:
    config = GenerationConfig(**GREEDY, do_sample=True)
    manager = model.init_continuous_batching(config, ContinuousBatchingConfig(per_request_processors=True))
    manager.add_request(prompts[0], top_k=1)
    with pytest.raises(ValueError, match="quire does not have typical_p for a request; it has temperature, top_k, top_p"):
        manager.add_request(prompts[0], typical_p=0.5)
    manager.start()
    got = manager.get_result(timeout=20)
    manager.stop()
    greedy = model.generate_batch(prompts[:1], GenerationConfig(**GREEDY))
    assert got.generated_tokens == greedy["req_0"].generated_tokens
    with pytest.raises(ValueError, match="top_k for a request needs per_request_processors=True"):
        model.init_continuous_batching(config).add_request(prompts[0], top_k=1)
