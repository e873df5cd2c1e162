"""PEFT's adapters on a model whose engine is open: each change is seen, and the tokens are those of the plain model."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

from peft import IA3Config, LoraConfig, get_peft_model

import quire
from tests.tiny import load_model

IDS = torch.tensor([[5, 6, 7, 8]])
ADAPTERS = {
    "lora": LoraConfig(r=4, target_modules="all-linear"),
    "rslora": LoraConfig(r=4, target_modules="all-linear", use_rslora=True),
    "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def generated(model: Any, **options: Any) -> list[int]:
    return model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8, do_sample=False,
                          **options)[0, 4:].tolist()


def fill(model: Any, name: str, seed: int) -> None:
    """An adapter that does something: PEFT's begin as the identity."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if f".{name}" in key and ("lora_A" in key or "lora_B" in key or "ia3" in key):
                p.normal_(0, 0.2 if "lora" in key else 2.0)


@contextlib.contextmanager
def paged_only() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not paged.*")
        yield


def test_dora_is_refused_until_it_is_merged() -> None:
    """torch.compile cannot trace PEFT's DoRA layers; the error says so, and the engine goes on when they are gone."""
    model = quire.paged(load_model(num_layers=1), num_pages=40, max_num_seqs=2, max_model_len=128, cudagraph_capture_sizes=[])
    base = generated(model)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", use_dora=True))
    with pytest.raises(RuntimeError, match="q_proj was replaced.*, and cannot be served as it is now.*could not be traced.*"
                                           "merge the adapter with merge_adapter"):
        generated(peft)
    assert generated(peft.merge_and_unload()) == base
    model.generate.close()


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k != "lora")) for k in ADAPTERS])
def test_a_life_with_adapters(kind) -> None:
    """A trainer's model and its reference policy are one model: an engine that missed a switch would sample the wrong one."""
    plain = load_model(num_layers=1)
    model = quire.paged(load_model(num_layers=1), num_pages=40, max_num_seqs=2, max_model_len=128, cudagraph_capture_sizes=[])
    base = generated(plain)
    assert generated(model) == base
    engine = model.generate.engine
    pair = [get_peft_model(m, copy.deepcopy(ADAPTERS[kind])) for m in (plain, model)]
    seen = []

    def check(step: str) -> None:
        before = engine.stats().generated_tokens
        with paged_only():
            want, got = generated(pair[0]), generated(pair[1])
        assert got == want, step
        assert engine.stats().generated_tokens > before
        seen.append(want)

    for peft in pair:
        fill(peft, "default", 3)
    check("added")
    with pair[0].disable_adapter(), pair[1].disable_adapter():
        check("disabled")
    assert seen[1] == base != seen[0]
    check("enabled again")
    for peft in pair:
        peft.add_adapter("two", copy.deepcopy(ADAPTERS[kind]))
        fill(peft, "two", 9)
        peft.set_adapter("two")
    check("switched")
    for peft in pair:
        peft.set_adapter("default")
        fill(peft, "default", 5)
    check("updated in place")
    for peft in pair:
        peft.merge_adapter()
    check("merged")
    for peft in pair:
        peft.unmerge_adapter()
    check("unmerged")
    if kind == "lora":
        with pytest.warns(UserWarning, match="because each row has an adapter of its own .PEFT's adapter_names"):
            assert generated(pair[1].eval(), adapter_names=["two"]) == generated(pair[0].eval(), adapter_names=["two"])
    pair = [peft.merge_and_unload() for peft in pair]
    check("merged for good")
    pair[1].generate.close()
