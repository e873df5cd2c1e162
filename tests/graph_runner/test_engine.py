"""The engine on a CPU: the tokens of transformers' own generate whatever the schedule; nothing lost or damaged."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
import transformers
from torch._dynamo.eval_frame import reset_code

import quire
from graph_runner.cuda_graph import CudaGraphRunner
from graph_runner.engine import Engine
from graph_runner.gc_freeze import ServingFreeze
from graph_runner.loading import TINY_MODEL
from graph_runner.sampling_params import SamplingParams
from tests.tiny import GREEDY, PROMPTS, assert_idle, hf_greedy, load_model, load_tokenizer, tokens, unchanged

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=11, max_tokens=20)


@pytest.fixture(scope="module")
def model():
    return load_model()


def build(config, kind=transformers.AutoModelForCausalLM):
    return kind.from_config(config).eval()


@pytest.fixture(scope="module")
def one_layer():
    """Quick to trace."""
    return build(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=1024))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [tokenizer(p)["input_ids"] for p in PROMPTS]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """transformers' greedy continuation of each prompt."""
    return [hf_greedy(model, p, GREEDY.max_tokens) for p in prompts]


@pytest.fixture(scope="module")
def shared_engine(model, tokenizer):
    with Engine(model, tokenizer, num_pages=120, max_num_seqs=8, max_model_len=300, async_stepping=False,
                cudagraph_capture_sizes=[1, 2, 4, 8]) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    """One engine for all tests that do not need their own; every test must leave it idle."""
    yield shared_engine
    assert_idle(shared_engine)


@pytest.fixture(scope="module")
def sampled(shared_engine, prompts):
    """What each prompt gives when it is sampled alone."""
    return [tokens(shared_engine.generate([p], SAMPLED))[0] for p in prompts]


# -- the same tokens, whatever the schedule


OPTIONS = {
    "defaults": {},
    "chunks_of_1_pages_of_4": dict(prefill_chunk_size=1, page_size=4, kv_layout="HND"),
    "chunks_of_3": dict(prefill_chunk_size=3, async_stepping=True),
    "chunks_of_16_no_graphs": dict(prefill_chunk_size=16, kv_layout="HND", cudagraph_capture_sizes=[]),
    "step_of_5_tokens": dict(max_num_batched_tokens=5),
    "page_of_1": dict(page_size=1, num_pages=500),
    "one_at_a_time": dict(max_num_seqs=1),
    "two_at_a_time": dict(max_num_seqs=2, async_stepping=True, max_num_batched_tokens=7),
    "page_larger_than_all": dict(page_size=128, num_pages=20, cudagraph_capture_sizes=[1, 4]),
    "mixed_graphs": dict(cudagraph_capture_sizes=[2], cudagraph_token_sizes=[8, 64], async_stepping=True),
    "fused": dict(fusions="all", async_stepping=True),
    "last_tokens_of_chunks": dict(fusions="projections,last_tokens", prefill_chunk_size=16, cudagraph_token_sizes=[8, 64]),
}
# The longest of the prompts needs 60 tokens in the end, all of them 240.
TINY_CACHES = {
    "pages_of_16": dict(page_size=16, num_pages=7),
    "pages_of_1": dict(page_size=1, num_pages=80, prefill_chunk_size=6),
    "async": dict(page_size=4, num_pages=18, async_stepping=True),
    "async_chunked": dict(page_size=2, num_pages=36, async_stepping=True, prefill_chunk_size=3,
                          max_num_batched_tokens=8),
    "async_one_page_a_token": dict(page_size=1, num_pages=70, async_stepping=True, max_num_seqs=3),
}


def check_schedule(model, tokenizer, prompts, expected, sampled, options) -> Engine:
    options = dict(num_pages=120, max_num_seqs=8, max_model_len=300, async_stepping=False) | options
    with Engine(model, tokenizer, **options) as engine:
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        assert_idle(engine)
        assert tokens(engine.generate(prompts[3], GREEDY)) == [expected[3]]
        outputs = engine.generate(prompts, SAMPLED)
        assert tokens(outputs) == sampled
        assert [o.text for o in outputs] == [tokenizer.decode(t, skip_special_tokens=True) for t in sampled]
        assert_idle(engine)
    return engine


@pytest.mark.parametrize("name", OPTIONS)
def test_same_tokens(name, model, tokenizer, prompts, expected, sampled) -> None:
    engine = check_schedule(model, tokenizer, prompts, expected, sampled, OPTIONS[name])
    assert engine.scheduler.num_preemptions == 0
    if name == "mixed_graphs":
        assert not any("prefill" in why for why in engine.runner.graphs.stats.fell_back)


@pytest.mark.parametrize("name", TINY_CACHES)
def test_same_tokens_when_preempted(name, model, tokenizer, prompts, expected, sampled) -> None:
    engine = check_schedule(model, tokenizer, prompts, expected, sampled, TINY_CACHES[name])
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.slow
def test_compiled_by_inductor(model, tokenizer, prompts, expected) -> None:
    inductor = pytest.importorskip("torch._inductor.cpp_builder")
    try:
        inductor.get_cpp_compiler()
    except Exception:
        pytest.skip("no C++ compiler")
    with unchanged(model), Engine(model, tokenizer, num_pages=40, max_num_seqs=8, compiler="inductor", fusions="all",
                                  cudagraph_capture_sizes=[4]) as engine:
        sampler = engine.runner.sampler
        engine.runner.sampler = None  # not needed where no row has a filter: the graph draws the tokens
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        drawn = [replace(GREEDY, temperature=0.8 * (i % 2), seed=i) for i in range(len(prompts))]
        found = tokens(engine.generate(prompts, drawn))
        assert found[::2] == expected[::2] and found[1] != expected[1]
        engine.runner.sampler = sampler
        # Beside a row with filters each keeps its own.
        assert tokens(engine.generate([prompts[0], *prompts], [SAMPLED, *drawn]))[1:] == found
    with Engine(model, tokenizer, num_pages=40, max_num_seqs=8) as engine:
        assert tokens(engine.generate(prompts, drawn)) == found  # op by op, by the sampler


def test_default_arguments_and_a_path(expected) -> None:
    with Engine(str(TINY_MODEL)) as engine:
        assert tokens(engine.generate(list(PROMPTS), GREEDY)) == expected
        assert engine.max_model_len == 1024
        assert engine.runner.backend.name == "torch_native"
        assert engine.runner.cache.num_bytes <= 256 * 2**20


# -- what a prompt may be, and what comes back


def test_outputs(engine, tokenizer, prompts, expected) -> None:
    by_text, by_ids = engine.generate(list(PROMPTS[:2]), GREEDY), engine.generate(prompts[:2], GREEDY)
    assert tokens(by_text) == tokens(by_ids) == expected[:2]
    assert [o.index for o in by_text] == [0, 1]
    assert [o.prompt for o in by_text] == list(PROMPTS[:2]) and [o.prompt for o in by_ids] == [None, None]
    assert [o.prompt_token_ids for o in by_text] == prompts[:2]
    assert [o.text for o in by_text] == [tokenizer.decode(t) for t in expected[:2]]
    assert {o.finish_reason for o in by_text} == {"length"} and {o.stop_reason for o in by_text} == {None}


@pytest.mark.parametrize("kind", ["str", "tuple", "array", "tensor", "arrays", "list of one"])
def test_one_prompt_in_many_forms(kind, engine, prompts, expected) -> None:
    prompt = {
        "str": PROMPTS[0], "tuple": tuple(prompts[0]), "array": np.array(prompts[0]),
        "tensor": torch.tensor(prompts[0]), "arrays": [np.array(prompts[0], np.int32)], "list of one": [PROMPTS[0]],
    }[kind]
    assert tokens(engine.generate(prompt, GREEDY)) == [expected[0]]


def test_no_prompts(engine) -> None:
    assert engine.generate([]) == []
    assert list(engine.stream([], [])) == []


def test_params_for_each_prompt(engine, prompts, expected, sampled) -> None:
    each = [replace(GREEDY, max_tokens=1), SAMPLED, GREEDY]
    one, two, three = tokens(engine.generate(prompts[:3], each))
    assert (one, two, three) == (expected[0][:1], sampled[1], expected[2])
    with pytest.raises(ValueError, match="2 prompts but 1 SamplingParams; give one for all or one for each"):
        engine.generate(prompts[:2], [GREEDY])
    assert len(engine.generate(prompts[0])[0].token_ids) == SamplingParams().max_tokens


def test_seeds(engine, prompts) -> None:
    params = [replace(SAMPLED, seed=s, ignore_eos=True) for s in (1, 2, 3, -5, 2**70)]
    several = tokens(engine.generate([prompts[0]] * 5, params))
    assert len(set(map(tuple, several))) == 5
    assert tokens(engine.generate([prompts[0]] * 5, params)) == several
    unseeded = replace(SAMPLED, seed=None, ignore_eos=True)
    assert len(set(map(tuple, tokens(engine.generate([prompts[0]] * 4, unseeded))))) == 4


def test_extreme_sampling_params(engine, prompts, expected) -> None:
    extremes = [dict(top_k=2**40), dict(temperature=1e-7), dict(temperature=1e30), dict(top_p=1e-9), dict(min_p=1.0)]
    outputs = tokens(engine.generate([prompts[0]] * 5, [replace(SAMPLED, **e) for e in extremes]))
    assert [outputs[i] for i in (1, 3, 4)] == [expected[0]] * 3  # only the likeliest token is left
    assert all(0 <= t < 1848 for row in outputs for t in row)


def test_engine_seed(one_layer) -> None:
    params, seen = SamplingParams(max_tokens=20, ignore_eos=True), []
    for seed in (5, 5, 6):
        with Engine(one_layer, num_pages=40, max_num_seqs=4, cudagraph_capture_sizes=[], seed=seed) as engine:
            seen.append(tokens(engine.generate([[3, 4], [5]], params)))
    assert seen[0] == seen[1] != seen[2]


def test_n(engine, prompts, sampled) -> None:
    outputs = engine.generate(prompts[:2], replace(SAMPLED, n=3))
    assert [o.index for o in outputs] == list(range(6))
    assert [o.prompt_token_ids for o in outputs] == [prompts[0]] * 3 + [prompts[1]] * 3
    assert [outputs[0].token_ids, outputs[3].token_ids] == sampled[:2]  # the first of n is the one there is with n = 1
    assert len({tuple(o.token_ids) for o in outputs}) == 6
    assert tokens(engine.generate(prompts[:2], replace(SAMPLED, n=3))) == tokens(outputs)


# -- how requests end


def end_of(model, prompt) -> list[int]:
    """A greedy continuation up to and with the end token."""
    found = hf_greedy(model, prompt, 200)
    assert found[-1] == model.config.eos_token_id, "this prompt's continuation does not end; choose another"
    return found


def test_end_token(engine, model, tokenizer, prompts) -> None:
    found = end_of(model, prompts[0])
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=None))
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (found, "stop", None)
    assert output.text == tokenizer.decode(found[:-1])
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=None, skip_special_tokens=False))
    assert output.text == tokenizer.decode(found) and output.text.endswith("<|endoftext|>")
    longer = len(found) + 4
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=longer, ignore_eos=True))
    assert (output.finish_reason, len(output.token_ids)) == ("length", longer)
    assert output.token_ids[: len(found)] == found
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=longer, min_tokens=longer))
    assert (output.finish_reason, len(output.token_ids)) == ("length", longer)
    assert model.config.eos_token_id not in output.token_ids


def test_end_token_with_asynchronous_stepping(model, tokenizer, prompts) -> None:
    """The step launched too many is dropped, also while others run on."""
    found = end_of(model, prompts[0])
    with Engine(model, tokenizer, num_pages=60, max_num_seqs=4, async_stepping=True) as engine:
        outputs = engine.generate([prompts[0], prompts[1], prompts[0]], replace(GREEDY, max_tokens=len(found) + 30))
        assert [outputs[0].token_ids, outputs[2].token_ids] == [found, found]
        assert [outputs[0].finish_reason, outputs[2].finish_reason] == ["stop", "stop"]
        assert outputs[1].token_ids == hf_greedy(model, prompts[1], len(found) + 30)
        assert_idle(engine)


def test_stop_tokens(engine, tokenizer, prompts, expected) -> None:
    token = expected[0][6]
    at = expected[0].index(token)
    params = replace(GREEDY, stop_token_ids=[token, 1])
    (output,) = engine.generate(prompts[0], params)
    assert output.token_ids == expected[0][: at + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", token)
    assert output.text == tokenizer.decode(expected[0][:at])
    # Before min_tokens it is not even chosen; from then on it ends the request.
    (output,) = engine.generate(prompts[0], replace(params, min_tokens=at + 3))
    assert output.token_ids[:at] == expected[0][:at] and token not in output.token_ids[: at + 2]


def test_max_tokens(engine, prompts, expected) -> None:
    (output,) = engine.generate(prompts[0], replace(GREEDY, max_tokens=1))
    assert (output.token_ids, output.finish_reason) == (expected[0][:1], "length")
    (output,) = engine.generate(prompts[1], replace(GREEDY, max_tokens=None, ignore_eos=True))
    assert len(prompts[1]) + len(output.token_ids) == engine.max_model_len == 300
    assert output.finish_reason == "length"


def stop_text(tokenizer, found: list[int]) -> tuple[str, str]:
    """A text and a string in it that begins and ends inside of tokens and spans several."""
    text = tokenizer.decode(found)
    third = len(tokenizer.decode(found[:3]))
    stop = text[third - 1 : third + 9]
    assert text.count(stop) == 1
    return text, stop


@pytest.mark.parametrize("include", [False, True])
def test_stop_string(include, engine, tokenizer, prompts, expected) -> None:
    text, stop = stop_text(tokenizer, expected[0])
    params = replace(GREEDY, stop=["nowhere", stop], include_stop_str_in_output=include)
    events = list(engine.stream(prompts[0], params))
    output = events[-1].output
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == text[: text.index(stop) + len(stop) * include]
    assert "".join(e.text for e in events) == output.text  # what was streamed is never taken back
    assert output.token_ids == expected[0][: len(output.token_ids)]
    assert stop in tokenizer.decode(output.token_ids) and stop not in tokenizer.decode(output.token_ids[:-1])


def test_stop_strings_that_do_not_end_it(engine, tokenizer, prompts, expected) -> None:
    text, stop = stop_text(tokenizer, expected[0])
    almost = stop[:-1] + "\x00"  # text that waits for it must still come out
    events = list(engine.stream(prompts[0], replace(GREEDY, stop=[almost, text[-3:] + "\x00"])))
    assert "".join(e.text for e in events) == events[-1].output.text == text
    assert events[-1].output.finish_reason == "length"
    early = replace(GREEDY, stop=stop, min_tokens=GREEDY.max_tokens)
    assert engine.generate(prompts[0], early)[0].text == text


def test_first_of_several_stop_strings(engine, tokenizer, prompts, expected) -> None:
    text = tokenizer.decode(expected[0])
    first, second = text[8:10], text[9:10]
    assert text.index(second) == 9 and text.index(first) == 8, "choose others"
    assert engine.generate(prompts[0], replace(GREEDY, stop=[second, first]))[0].text == text[:8]


def test_without_text(engine, prompts, expected) -> None:
    (output,) = engine.generate(prompts[0], replace(GREEDY, detokenize=False))
    assert (output.token_ids, output.text) == (expected[0], "")


# -- streaming


def test_stream(engine, prompts, expected) -> None:
    pieces: dict[int, list] = {}
    order = []
    for event in engine.stream(prompts, GREEDY):
        assert not (event.index in pieces and pieces[event.index][-1].finished)  # nothing comes after the end
        pieces.setdefault(event.index, []).append(event)
        order.append(event.index)
        assert event.output.token_ids == [t for e in pieces[event.index] for t in e.token_ids]
        assert event.output.text == "".join(e.text for e in pieces[event.index])
        assert event.finished == (event.output.finish_reason is not None)
    assert [pieces[i][-1].output.token_ids for i in range(len(prompts))] == expected
    assert order[: len(prompts)] == list(range(len(prompts)))  # the first token of each comes before the second of any


def test_interleaved_streams(engine, prompts, expected) -> None:
    """Each stream gets all of its events, whichever of them drives the engine."""
    streams = [engine.stream(p, GREEDY) for p in prompts[:3]]
    got: list[list[int]] = [[], [], []]
    left = {0, 1, 2}
    while left:
        for i in sorted(left):
            for event in islice(streams[i], i + 1):
                got[i] += event.token_ids
                if event.finished:
                    left.discard(i)
    assert got == expected[:3]
    assert [list(s) for s in streams] == [[], [], []]


def test_abandoned_stream(engine, prompts, expected) -> None:
    stream = engine.stream(prompts[:3], GREEDY)
    events = list(islice(stream, 5))
    assert engine.has_unfinished
    stream.close()
    assert_idle(engine)
    assert {e.output.finish_reason for e in events} == {"abort"}
    assert events[0].output.token_ids == expected[0][: len(events[0].output.token_ids)]
    never_started = engine.stream(prompts, GREEDY)
    del never_started
    assert tokens(engine.generate(prompts[1], GREEDY)) == [expected[1]]


@pytest.fixture
def collector():
    gc.unfreeze()
    gc.collect()
    yield
    gc.unfreeze()


def test_collector_is_frozen_while_serving_only(engine, prompts, expected, collector, monkeypatch) -> None:
    """Not after the end, nor after an error, nor once nobody reads a stream on."""
    turns = ServingFreeze.TURNS
    seen = [gc.get_freeze_count() for _ in engine.stream(prompts[3], replace(GREEDY, ignore_eos=True))]
    assert seen[turns] > 1000 > max(seen[: turns - 1]) and gc.get_freeze_count() < 1000

    launch, calls = engine.runner.launch, Counter()

    def fails(batch):
        calls["launch"] += 1
        if calls["launch"] == turns + 2:
            assert gc.get_freeze_count() > 1000
            raise RuntimeError("a kernel failed")
        return launch(batch)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a kernel failed"):
        patch.setattr(engine.runner, "launch", fails)
        engine.generate(prompts[:2], replace(GREEDY, ignore_eos=True))
    assert gc.get_freeze_count() < 1000

    stream = engine.stream(prompts[3], replace(GREEDY, max_tokens=100, ignore_eos=True))
    for _ in range(turns + 2):
        next(stream)
    assert gc.get_freeze_count() > 1000
    stream.close()
    assert gc.get_freeze_count() < 1000
    assert tokens(engine.generate(prompts[:2], GREEDY)) == expected[:2]


def test_abandoned_stream_that_only_the_collector_finds(engine, prompts, collector, monkeypatch) -> None:
    """It is frozen itself, in a cycle. Once the engine has not turned for a while, a collection frees it all the same."""
    class Prompts(list):
        pass

    asked = Prompts(prompts[:2])
    asked.stream = engine.stream(asked, replace(GREEDY, max_tokens=100, ignore_eos=True))
    for _ in range(3 * ServingFreeze.TURNS):
        next(asked.stream)
    del asked
    gc.collect()
    assert engine.has_unfinished and gc.get_freeze_count() > 1000
    monkeypatch.setattr(ServingFreeze, "STALE_SECONDS", -1.0)
    gc.collect()
    assert not engine._requests and gc.get_freeze_count() < 1000


class Picky:
    """A tokenizer that cannot decode some tokens."""

    def __init__(self, tokenizer, bad):
        self.tokenizer, self.bad = tokenizer, bad

    def decode(self, ids, **options):
        if self.bad & set(ids):
            raise OverflowError("no such piece")
        return self.tokenizer.decode(ids, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("depth", [False, True], ids=["sync", "async"])
def test_a_tokenizer_that_fails_ends_one_request_only(depth, model, tokenizer, prompts, expected) -> None:
    def lone(which: int) -> list[int]:
        """Places of tokens that nobody else has, and that are neither its first nor its last."""
        others = {t for i, found in enumerate(expected) if i != which for t in found} | {t for p in prompts for t in p}
        return [i for i, t in enumerate(expected[which][:-1]) if i and t not in others and t not in expected[which][:i]]

    which = next(i for i in range(len(prompts)) if lone(i))
    at = lone(which)[0]
    picky = Picky(tokenizer, {expected[which][at]})
    with Engine(model, picky, num_pages=120, max_num_seqs=8, async_stepping=depth) as engine:
        outputs = engine.generate(prompts, GREEDY)
        failed = outputs.pop(which)
        assert failed.finish_reason == "error" and failed.token_ids == expected[which][: at + 1]
        assert failed.error == "the tokenizer could not decode the tokens: OverflowError: no such piece"
        assert tokenizer.decode(expected[which][:at]).startswith(failed.text)
        assert tokens(outputs) == [e for i, e in enumerate(expected) if i != which]
        assert [o.text for o in outputs] == [tokenizer.decode(o.token_ids, skip_special_tokens=True) for o in outputs]
        assert_idle(engine)
        assert tokens(engine.generate(prompts, replace(GREEDY, detokenize=False))) == expected


def test_interrupted_while_results_are_taken_in(model, tokenizer, prompts, expected) -> None:
    """The other rows of the step are not lost: whoever goes on gets all their tokens."""
    calls = Counter()

    class Interrupted(Picky):
        def decode(self, ids, **options):
            calls["decode"] += 1
            if calls["decode"] == 9:
                raise KeyboardInterrupt
            return super().decode(ids, **options)

    with Engine(model, Interrupted(tokenizer, set()), num_pages=120, max_num_seqs=8, async_stepping=True) as engine:
        ids = [engine.add_request(p, GREEDY)[0] for p in prompts]
        outputs = {i: engine._requests[i].output for i in ids}
        with pytest.raises(KeyboardInterrupt):
            while engine.has_unfinished:
                engine.step()
        assert engine._arrived
        while engine.has_unfinished:
            engine.step()
        assert [outputs[i].token_ids for i in ids] == expected
        assert_idle(engine)


def test_abort_from_outside_ends_a_stream(engine, prompts, expected) -> None:
    stream = engine.stream(prompts[:2], GREEDY)
    first = next(stream)
    engine.abort(first.output.index + engine._next_id - 2)  # the ids of the two requests are the last two
    rest = list(stream)
    ends = {e.index: e.output.finish_reason for e in rest if e.finished}
    assert ends == {0: "abort", 1: "length"}


# -- continuous batching by hand


def run(engine: Engine) -> dict[int, list]:
    events: dict[int, list] = {}
    while engine.has_unfinished:
        for event in engine.step():
            events.setdefault(event.index, []).append(event)
    return events


def test_add_request_while_others_run(engine, prompts, expected) -> None:
    found: dict[int, list[int]] = {}
    ids: dict[int, int] = {}
    todo = list(range(len(prompts)))
    for turn in range(1000):
        if todo and turn % 3 == 0:
            (request,) = engine.add_request(prompts[todo[0]], GREEDY)
            ids[request] = todo.pop(0)
        for event in engine.step():
            found.setdefault(ids[event.index], []).extend(event.token_ids)
            assert event.output.index == event.index  # by hand, the request's id
        if not todo and not engine.has_unfinished:
            break
    assert found == dict(enumerate(expected))


def test_generate_leaves_other_requests_events_alone(engine, prompts, expected) -> None:
    (mine,) = engine.add_request(prompts[0], GREEDY)
    engine.step()
    assert tokens(engine.generate(prompts[1:3], GREEDY)) == expected[1:3]
    events = run(engine)
    assert set(events) == {mine}
    assert events[mine][-1].output.token_ids == expected[0]
    assert [t for e in events[mine] for t in e.token_ids] == expected[0][1:]  # the first came with the first step


def test_abort(engine, prompts, expected) -> None:
    keep, waiting, running = (engine.add_request(p, GREEDY)[0] for p in prompts[:3])
    engine.abort(waiting)
    engine.step()
    engine.step()
    engine.abort(running)
    engine.abort(running)
    engine.abort(12345678)
    events = run(engine)
    assert events[running][-1].finished and events[running][-1].output.finish_reason == "abort"
    assert events[running][-1].output.token_ids == expected[2][:2]
    assert events[keep][-1].output.token_ids == expected[0]
    engine.abort(keep)  # long done


# -- what cannot be served: said clearly, and nothing else is touched


@pytest.mark.parametrize(("prompt", "message"), [
    ([], "the prompt is empty; give at least one token"),
    ("", "the prompt is empty"),
    (list(range(3, 303)), "the prompt has 300 tokens, and with one more to generate a request may have 300 here"),
    ([3, 1848], r"token ids \[1848\] are outside the vocabulary of 1848 tokens"),
    ([-1, 5], r"token ids \[-1\] are outside the vocabulary"),
    ([1.5, 2], "a prompt is text or a list of token ids, got '\\[1.5, 2\\]'"),
    (None, "a prompt is text or a list of token ids, got 'None'"),
])
def test_bad_prompt(prompt, message, engine, prompts, expected) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        engine.add_request(prompt, GREEDY)
    good, bad, good_too = engine.generate([prompts[0], prompt, prompts[1]], GREEDY)
    assert tokens([good, good_too]) == expected[:2]
    assert (bad.index, bad.finish_reason, bad.token_ids) == (1, "error", [])
    with pytest.raises(ValueError, match=message):
        raise ValueError(bad.error)


def test_one_prompt_that_is_none(engine) -> None:
    assert "a prompt is text or a list of token ids, got '5'" in engine.generate(5)[0].error


def test_text_without_a_tokenizer(one_layer) -> None:
    with Engine(one_layer, num_pages=40, max_num_seqs=2, cudagraph_capture_sizes=[]) as engine:
        with pytest.raises(TypeError, match="the prompt is text, but the engine has no tokenizer; pass one, or give"):
            engine.add_request("hello", GREEDY)
        with pytest.raises(ValueError, match="stop strings need text, and the engine has no tokenizer"):
            engine.add_request([3, 4], replace(GREEDY, stop="x"))
        (output,) = engine.generate([3, 4], GREEDY)
        assert len(output.token_ids) > 0 and output.text == ""


def test_max_tokens_0() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize(("options", "message"), [
    (dict(page_size=0), "page_size must be at least 1, got 0"),
    (dict(max_num_seqs=0), "max_num_seqs must be at least 1, got 0"),
    (dict(max_num_batched_tokens=-1), "max_num_batched_tokens must be at least 1, got -1"),
    (dict(prefill_chunk_size=-1), "prefill_chunk_size must be at least 1, got -1"),
    (dict(gpu_memory_utilization=0), r"gpu_memory_utilization is a share of the memory, in \(0, 1\]; got 0"),
    (dict(max_model_len=1), "max_model_len must be at least 2"),
    (dict(max_model_len=5000), "max_model_len=5000, but the model has 1024 positions"),
    (dict(num_pages=1), "at least 2 pages"),
    (dict(kv_cache_dtype="float7"), "kv_cache_dtype 'float7' is neither 'auto' nor a torch dtype"),
    (dict(kv_cache_dtype="bfloat16"), r"KV cache dtype bfloat16 \(has the model's own dtype, float8_e4m3fn, "),
    (dict(kv_cache_dtype="int16"), r"KV cache dtype int16 \(has the model's own dtype, float8_e4m3fn, "),
    (dict(kv_layout="DNH"), "DNH"),
    (dict(attention="nope"), "unknown attention backend 'nope'; there are: auto, .*torch_native"),
    (dict(attention="flashinfer"),
     "(?s)attention='flashinfer' cannot serve this model on cpu.*Can serve it here: .*torch_native"),
    (dict(compiler="gcc"), "compiler must be one of inductor, inductor-whole, eager; got 'gcc'"),
    (dict(prefill_chunk_size=0), "prefill_chunk_size must be at least 1, got 0"),
    (dict(kv_cache_dtype=8), "kv_cache_dtype 8 is neither"),
    (dict(fusions=["all_of_it"]), r"unknown fusions \['all_of_it'\]; there are \['quantized'"),
    (dict(max_num_seqs=4, cudagraph_capture_sizes=[8]), "batch size 8 in the list to capture is larger than any batch"),
    (dict(max_num_batched_tokens=64, cudagraph_token_sizes=[65]), "token count 65 in the list to capture is larger"),
])
def test_bad_arguments(options, message, one_layer) -> None:
    with unchanged(one_layer), pytest.raises(ValueError, match=message):
        Engine(one_layer, **(dict(num_pages=8, max_num_seqs=2) | options))


def test_models_that_cannot_be_served() -> None:
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 intermediate_size=32)
    mamba2 = transformers.Mamba2Config(**sizes, num_heads=8, head_dim=8, state_size=8, n_groups=1)
    bamba = transformers.BambaConfig(**sizes, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8)
    t5 = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    gptj = transformers.GPTJConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=8)
    for config, message in ((mamba2, "keep state that is not keys and values"),
                            (bamba, "'linear_attention'.*keep state"),
                            (gptj, "0 attention sites were found")):
        model = build(config)
        with unchanged(model), pytest.raises(quire.UnsupportedAttention, match=message):
            Engine(model, num_pages=8)
    with pytest.raises(quire.UnsupportedAttention, match="t5 is an encoder-decoder model; quire serves decoder-only"):
        Engine(build(t5, transformers.AutoModelForSeq2SeqLM), num_pages=8)


@pytest.mark.parametrize("depth", [False, True], ids=["sync", "async"])
def test_nan_fails_one_request_only(depth, model, prompts) -> None:
    """Also not those that later get the pages in which the NaNs are."""
    poisoned = copy.deepcopy(model)
    poisoned.lm_head.weight = torch.nn.Parameter(poisoned.lm_head.weight.detach().clone())  # untied from the embedding
    bad, bad_prompt = 1700, [1700] * 40
    with torch.no_grad():
        poisoned.model.embed_tokens.weight[bad] = float("nan")
    good = prompts[:3]
    expected = [hf_greedy(model, p, 12) for p in good]
    params = replace(GREEDY, max_tokens=12)
    with Engine(poisoned, num_pages=7, page_size=16, max_num_seqs=4, async_stepping=depth) as engine:
        for batch in ([good[0], [5, bad, 7], *good[1:]], [bad_prompt, *good], [bad_prompt, *good]):
            outputs = engine.generate(batch, params)
            failed = outputs.pop(next(i for i, p in enumerate(batch) if bad in p))
            assert tokens(outputs) == expected
            assert (failed.finish_reason, failed.token_ids) == ("error", [])
            assert f"the logits for token {len(failed.prompt_token_ids)} contain NaN" in failed.error
            assert tokens(engine.generate(good, params)) == expected
            assert_idle(engine)


def test_out_of_memory_while_capturing(one_layer, monkeypatch) -> None:
    capture_one = CudaGraphRunner._capture_one

    def fails(self, bucket):
        if bucket.num_reqs < 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")
        capture_one(self, bucket)

    monkeypatch.setattr(CudaGraphRunner, "_capture_one", fails)
    options = dict(num_pages=40, max_num_seqs=8, cudagraph_capture_sizes=[4, 8])
    message = "out of GPU memory while capturing the CUDA graph of 4 rows. Give the KV cache less"
    with unchanged(one_layer), pytest.raises(RuntimeError, match=message) as caught:
        Engine(one_layer, fusions="all", **options)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert gc.isenabled() and gc.get_freeze_count() < 1000, "the collector rests no longer"
    monkeypatch.undo()
    with Engine(one_layer, **options) as engine:
        assert tokens(engine.generate([3, 4, 5], GREEDY)) == [hf_greedy(one_layer, [3, 4, 5], GREEDY.max_tokens)]


def test_out_of_memory_in_a_step(engine, prompts, expected, monkeypatch) -> None:
    launch, calls = engine.runner.launch, Counter()

    def fails(batch):
        calls["launch"] += 1
        if calls["launch"] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(batch)

    monkeypatch.setattr(engine.runner, "launch", fails)
    outputs = engine.generate(prompts[:2], GREEDY)
    assert [o.finish_reason for o in outputs] == ["error", "error"]
    assert [o.token_ids for o in outputs] == [e[:2] for e in expected[:2]]
    assert all("out of GPU memory in a step of 2 tokens: CUDA out of memory. Lower max_num_batched_tokens" in o.error
               for o in outputs)
    assert_idle(engine)
    assert tokens(engine.generate(prompts[:2], GREEDY)) == expected[:2]


@pytest.mark.parametrize("depth", [False, True], ids=["sync", "async"])
def test_an_interrupted_step_is_taken_back(depth, model, prompts, expected, sampled, monkeypatch) -> None:
    """Whatever comes out of a step (Ctrl-C, an error of a kernel), the requests go on as if it had not been tried."""
    with Engine(model, num_pages=14, page_size=8, max_num_seqs=8, async_stepping=depth) as engine:
        launch, calls = engine.runner.launch, Counter()

        def interrupted(batch):
            calls["launch"] += 1
            if calls["launch"] % 3 == 0:
                raise KeyboardInterrupt
            return launch(batch)

        monkeypatch.setattr(engine.runner, "launch", interrupted)
        for params, want in ((GREEDY, expected), (SAMPLED, sampled)):
            ids = [engine.add_request(p, params)[0] for p in prompts]
            found: dict[int, list[int]] = {i: [] for i in ids}
            while engine.has_unfinished:
                try:
                    for event in engine.step():
                        found[event.index] += event.token_ids
                except KeyboardInterrupt:
                    pass
            assert list(found.values()) == want
            assert_idle(engine)
        stream = engine.stream(prompts[:2], GREEDY)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        assert_idle(engine)


def test_a_changed_model_is_noticed(one_layer) -> None:
    """What the trace has built in would be ignored without a word."""
    ours = copy.deepcopy(one_layer)
    attention = ours.model.layers[0].self_attn
    with Engine(ours, num_pages=40, max_num_seqs=2, cudagraph_capture_sizes=[]) as engine:
        want = tokens(engine.generate([3, 4], GREEDY))
        hook = attention.register_forward_hook(lambda module, args, out: None)
        message = "changed after the engine traced it .model.layers.0.self_attn: its forward hooks changed"
        with pytest.raises(RuntimeError, match=message):
            engine.generate([3, 4], GREEDY)
        hook.remove()
        assert tokens(engine.generate([3, 4], GREEDY)) == want
        attention.scaling *= 2
        engine.add_request([3, 4], GREEDY)
        for _ in range(3):  # no token comes out
            with pytest.raises(RuntimeError, match="self_attn: its settings changed"):
                engine.step()
        attention.scaling /= 2
        events = [e for _ in range(50) if engine.has_unfinished for e in engine.step()]
        assert [t for e in events for t in e.token_ids] == want[0]
        ours.model.layers[0].mlp = copy.deepcopy(ours.model.layers[0].mlp)
        with pytest.raises(RuntimeError, match="mlp.*: the module itself changed"):
            engine.generate([3, 4], GREEDY)
        assert_idle(engine)


def test_dynamo_reset(one_layer) -> None:
    """A trace that is gone is not replaced by a different one."""
    with unchanged(one_layer), Engine(one_layer, num_pages=40, max_num_seqs=2, cudagraph_capture_sizes=[]) as engine:
        compiled = engine.runner.paged._compiled
        reset_code(compiled._torchdynamo_orig_callable.__code__)  # torch._dynamo.reset() does so to every function
        with pytest.raises(RuntimeError, match="the trace of this model is gone .*: close the engine and make a new"):
            engine.generate([3, 4], GREEDY)
        assert_idle(engine)


# -- the end of an engine, and the model afterwards


def test_close(model, prompts, expected) -> None:
    engine = Engine(model, num_pages=40, max_num_seqs=2, cudagraph_capture_sizes=[])
    stream = engine.stream(prompts[:3], GREEDY)
    outputs = [next(stream).output for _ in range(3)]
    engine.close()
    engine.close()
    assert sorted(e.index for e in stream if e.finished) == [0, 1, 2]  # and does not wait for ever
    assert {o.finish_reason for o in outputs} == {"abort"}
    assert outputs[0].token_ids == expected[0][: len(outputs[0].token_ids)]
    for use in (lambda: engine.generate(prompts[0]), lambda: engine.add_request(prompts[0]),
                lambda: next(engine.stream("a"))):
        with pytest.raises(RuntimeError, match="the engine is closed; make a new one"):
            use()
    assert engine.step() == []


@pytest.mark.parametrize(("fusions", "training"), [("none", False), ("all", True)], ids=["plain", "fused_train"])
def test_the_model_afterwards(fusions, training, model, prompts, expected) -> None:
    ours = copy.deepcopy(model)
    if training:
        ours.train()
        ours.model.layers[1].eval()
        ours.model.layers[2].mlp.requires_grad_(False)
    pointers = {n: p.data_ptr() for n, p in ours.named_parameters()}
    with unchanged(ours):
        with Engine(ours, num_pages=40, max_num_seqs=8, fusions=fusions) as engine:
            assert tokens(engine.generate(prompts, GREEDY)) == expected
    if fusions == "none":
        assert pointers == {n: p.data_ptr() for n, p in ours.named_parameters()}
    # It still trains.
    ours.train()
    ids = torch.tensor([prompts[3]])
    ours(input_ids=ids, labels=ids).loss.backward()
    assert ours.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_two_engines_on_one_model(model, prompts, expected) -> None:
    options = dict(num_pages=40, max_num_seqs=8, cudagraph_capture_sizes=[])
    with unchanged(model), Engine(model, **options) as first, Engine(model, **options, page_size=4) as second:
        for engine in (first, second, first):
            assert tokens(engine.generate(prompts[:2], GREEDY)) == expected[:2]


@pytest.mark.parametrize("fusions", ["none", "all"])
def test_weight_updates_reach_the_engine(fusions, model, prompts, expected) -> None:
    ours, donor = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for name, p in donor.named_parameters():
            if "q_proj" in name or "gate_proj" in name:
                p.mul_(0.5)
    changed = [hf_greedy(donor, p, GREEDY.max_tokens) for p in prompts]
    assert changed != expected
    with Engine(ours, num_pages=40, max_num_seqs=8, fusions=fusions) as engine:
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        ours.load_state_dict(donor.state_dict())
        assert tokens(engine.generate(prompts, GREEDY)) == changed
        ours.load_state_dict(model.state_dict())
        assert tokens(engine.generate(prompts, GREEDY)) == expected
        # Not in place: new tensors under the same parameters.
        for p, new in zip(ours.parameters(), donor.parameters(), strict=True):
            p.data = new.detach().clone()
        assert tokens(engine.generate(prompts, GREEDY)) == changed
    assert hf_greedy(ours, prompts[0], GREEDY.max_tokens) == changed[0]


def test_inference_mode(model, prompts, expected) -> None:
    """Made, used and closed inside torch.inference_mode, and used outside of it: the model can be trained as before."""
    ours = copy.deepcopy(model)
    with torch.inference_mode():
        engine = Engine(ours, num_pages=40, max_num_seqs=8, fusions="all")
        assert [o.token_ids for o in engine.generate(prompts[:2], GREEDY)] == expected[:2]
    assert [o.token_ids for o in engine.generate(prompts[:2], GREEDY)] == expected[:2]
    with torch.inference_mode():
        engine.close()
    assert not any(p.is_inference() for p in ours.parameters())
    ours(torch.tensor([[1, 2, 3]])).logits.sum().backward()


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_autocast(model, prompts, compiler) -> None:
    """Made and used under autocast, an engine computes in the model's dtypes all the same: it serves others too, and later."""
    logits = []
    with torch.autocast("cpu", torch.bfloat16), Engine(model, num_pages=40, max_num_seqs=8, compiler=compiler) as engine:
        forward = engine.runner._forward
        engine.runner._forward = lambda *args: logits.append(forward(*args)) or logits[-1]
        engine.generate([prompts[0]], GREEDY)
        assert torch.is_autocast_enabled("cpu")
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([prompts[0]])).logits[0, -1]
    assert (logits[0][0][0] - wanted).abs().max() <= 1e-5 * wanted.abs().max()  # bfloat16's eps is 8e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_default_dtype(model, prompts, expected, dtype, kv_cache_dtype) -> None:
    """That of new tensors, which scripts set to have their models made in it."""
    params = [GREEDY, SamplingParams(temperature=1e-6, top_k=5, min_p=0.1, max_tokens=GREEDY.max_tokens)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with Engine(model, num_pages=40, max_num_seqs=8, kv_cache_dtype=kv_cache_dtype) as engine:
            assert tokens(engine.generate(prompts[:2], params)) == expected[:2]
    finally:
        torch.set_default_dtype(before)
