"""Requests that change their logits, and requests with adapters of their own, on a GPU: with graphs and asynchronous steps they
get what they get on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from quire import Engine, SamplingParams
from tests.tiny import GREEDY, assert_idle, hf_greedy, load_model, small_llama, tokens

SMALL: dict[str, Any] = dict(num_pages=200, max_num_seqs=8, max_model_len=200)
GRAPHS: dict[str, Any] = dict(cudagraph_capture_sizes=[1, 4, 8], cudagraph_token_sizes=[])


def later(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[len(output) % 7 :: 7] -= 6.0
    return logits


def test_edits_of_logits(prompts, tokenizer) -> None:
    edits = [dict(repetition_penalty=1.7), dict(frequency_penalty=1.5, allowed_token_ids=range(300, 306)),
             dict(logit_bias={5: 3.5, 12: -50.0}), dict(bad_words=["girl", " young lady"]), dict(logits_processors=[later]),
             dict(trace_decode_token_ids=[9, 9, 300, 12, 40], logprobs=1), {}]
    params = [SamplingParams(temperature=0, max_tokens=20, **options) for options in edits]
    model, found = load_model(num_layers=1), []
    for device in ("cpu", "cuda"):
        with Engine(copy.deepcopy(model).to(device), tokenizer, **SMALL, **GRAPHS) as engine:
            assert device == "cpu" or engine._depth == 1
            found.append(tokens(engine.generate([prompts[0]] * len(params), params)))
            found[-1] += tokens(engine.generate([prompts[0]] * 2, [GREEDY, params[0]]))
            assert_idle(engine)
    assert found[1] == found[0]


def test_adapters_of_each_request() -> None:
    peft = pytest.importorskip("peft")
    model = small_llama(std=0.3)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"), adapter_name="one")
    adapted.add_adapter("two", peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], use_rslora=True))
    torch.manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora" in key:
                p.normal_(0, 0.25)
    names, found = ["one", "two", "__base__", "two", "one"], []
    for device in ("cpu", "cuda"):
        model.to(device)
        with Engine(model, **SMALL, **GRAPHS) as engine:
            for _ in range(2):
                found.append(tokens(engine.generate([[5, 6, 7, 8]] * 5, GREEDY, adapter=names)))
            if device == "cuda":
                assert engine.runner.graphs.stats.replayed > 0
    assert found[0] == found[1] == found[2] == found[3] and len({tuple(each) for each in found[0][:3]}) == 3


def test_merged_adapters(caplog) -> None:
    """Graphs read the weights where they are: a merge in place needs no trace, one that moves them (``safe_merge``) has them
    captured again at the next step, while a request runs."""
    peft = pytest.importorskip("peft")

    def make() -> Any:
        model = peft.get_peft_model(small_llama(std=0.3), peft.LoraConfig(r=4, target_modules="all-linear"), adapter_name="one")
        torch.manual_seed(0)
        with torch.no_grad():
            for key, p in model.named_parameters():
                if "lora" in key:
                    p.normal_(0, 0.25)
        return model.eval()

    (prompt,) = prompts = [[5, 6, 7, 8]]
    want = hf_greedy(make().base_model.model, prompt, 20)
    model = make().cuda()
    with Engine(model.base_model.model, enable_lora=True, **SMALL, **GRAPHS) as engine:
        def check() -> None:
            assert [*tokens(engine.generate(prompts, GREEDY)), caplog.text.count("tracing it again")] == [want, traces]

        traces = 0
        check()
        for change in (model.merge_adapter, model.unmerge_adapter, model.merge_adapter):
            change()
            check()
        assert engine.runner.graphs.stats.replayed > 0
        with model.disable_adapter():  # takes it out
            assert tokens(engine.generate(prompts, GREEDY)) != [want]
        check()
        stream = engine.stream(prompt, GREEDY)
        got = next(stream).token_ids
        model.merge_adapter(safe_merge=True)
        filler = [torch.full((32, 32), 7.0, device="cuda") for _ in range(64)]  # in the memory that the weights have left
        got = got + [token for event in stream for token in event.token_ids]
        assert got == want and len(filler) == 64
        traces = 1
        check()
        assert_idle(engine)


def test_added_adapters(caplog) -> None:
    """An adapter that the model gets between requests, or while one runs, is read by the graphs that are there; so is an
    optimizer's step on it, and another one after it was deleted."""
    peft = pytest.importorskip("peft")

    def fill(model: Any, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for key, p in model.named_parameters():
                if f".{name}." in key:
                    p.copy_(torch.randn(p.shape) / 4)

    def add(model: Any, name: str, seed: int, **options: Any) -> None:
        model.add_adapter(name, peft.LoraConfig(lora_alpha=6, **options))
        fill(model, name, seed)

    def make() -> Any:
        model = peft.get_peft_model(small_llama(std=0.3), peft.LoraConfig(r=4, target_modules="all-linear"), adapter_name="one")
        fill(model, "one", 0)
        return model.eval()

    prompt, plain, model = [5, 6, 7, 8], make(), make().cuda()

    def want(name: str) -> list[int]:
        plain.set_adapter(name)
        return hf_greedy(plain.base_model.model, prompt, 20)

    with Engine(model.base_model.model, enable_lora=True, max_loras=3, cudagraph_debug=True, **SMALL, **GRAPHS) as engine:
        runner = engine.runner

        def check(*names: str) -> None:
            assert tokens(engine.generate([prompt] * len(names), GREEDY, adapter=list(names))) == list(map(want, names))

        check("one")
        stream = engine.stream(prompt, GREEDY, adapter="one")
        got = next(stream).token_ids
        for each in (plain, model):
            add(each, "two", 1, r=4, target_modules="all-linear")
        check("two", "one")  # beside the stream
        assert got + [token for event in stream for token in event.token_ids] == want("one")
        for each in (plain, model):
            fill(each, "two", 2)
            add(each, "three", 3, r=2, target_modules=["q_proj", "v_proj"], use_rslora=True)
        check("two", "three", "one", "two")
        for each in (plain, model):
            each.set_adapter("one")
            each.delete_adapter("two")
            add(each, "four", 4, r=2, target_modules=["o_proj", "down_proj"])
        check("four", "three", "one")
        assert engine.runner is runner and runner.graphs.stats.replayed > 0
        assert_idle(engine)
    assert "tracing it again" not in caplog.text
