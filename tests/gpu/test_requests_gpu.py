"""Requests that change their logits, and requests with adapters of their own, on a GPU: with graphs and asynchronous steps they
get what they get on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from quire import Engine, SamplingParams
from tests.tiny import GREEDY, assert_idle, load_model, small_llama, tokens

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
