"""Bases of bitsandbytes in 4 bits on a GPU, bare and with PEFT's LoRA, with CUDA graphs and compiled: the tokens are
transformers' own. On a GPU bitsandbytes has a kernel of its own for one token, and packs no weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("bitsandbytes", reason="pip install 'quire[integrations]'")
pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

from peft import prepare_model_for_kbit_training

import quire
from tests.integrations.test_qlora import IDS, KINDS, NF4, generated, load, paged_only, with_adapter
from tests.tiny import GREEDY, hf_greedy, tokens

OPTIONS: dict[str, Any] = dict(num_pages=200, max_num_seqs=8, max_model_len=256, cudagraph_capture_sizes=[1, 2, 4, 8],
                               cudagraph_token_sizes=[])


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_gives_the_tokens_of_the_quantized_model(kind: str, prompts: list[list[int]]) -> None:
    model = load(num_layers=4, device="cuda", **KINDS[kind])
    in_half = KINDS[kind].get("bnb_4bit_compute_dtype") == torch.bfloat16
    want = [hf_greedy(model, p, GREEDY.max_tokens) for p in prompts[:4]]
    with quire.Engine(model, **OPTIONS) as engine:
        together, alone = engine.generate(prompts[:4], GREEDY), engine.generate(prompts[:1], GREEDY)
        assert engine.runner.graphs.stats.replayed > 0
    if in_half:  # rows of one token and of several are summed in another order there, in steps of 2**-8
        for prompt, out in zip([*prompts[:4], prompts[0]], [*together, *alone], strict=True):
            check_likely_of(model, prompt, out.token_ids)
    else:
        assert tokens(together) == want and tokens(alone) == want[:1]


def check_likely_of(model: Any, prompt: list[int], found: list[int]) -> None:
    """Each token's logit is the largest of the model's own forward, up to the rounding of its products."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + found], device="cuda"), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    behind = logits.amax(-1) - logits[torch.arange(len(found)), found]
    assert (behind <= 2**-5 * logits.abs().amax()).all()


def test_adapters_and_training_mode() -> None:
    """As prepare_model_for_kbit_training and TRL leave a model; gradients flow after rollouts."""
    plain, model = (with_adapter(prepare_model_for_kbit_training(load(device="cuda"))) for _ in range(2))
    plain.gradient_checkpointing_disable()  # with it, transformers' generate has no cache
    quire.paged(model, **OPTIONS)
    for mode in (True, False):
        model.train(mode), plain.train(mode)
        with paged_only():
            assert generated(model) == generated(plain)
        if mode:
            model(input_ids=torch.tensor([IDS], device="cuda"), labels=torch.tensor([IDS], device="cuda")).loss.backward()
            assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    with paged_only(), model.disable_adapter(), plain.disable_adapter():
        base = generated(model)
        assert base == generated(plain)
    engine = model.generate.engine
    both = engine.generate([IDS] * 2, quire.SamplingParams(temperature=0, max_tokens=8), adapter=["default", "__base__"])
    assert tokens(both) == [generated(plain), base] and tokens(both)[0] != base
    assert engine.runner.graphs.stats.replayed > 0
    model.generate.close()


def test_half_precision(prompts: list[list[int]]) -> None:
    """A model in bfloat16 whose products are too, as QLoRA is used."""
    model = load(num_layers=4, dtype=torch.bfloat16, device="cuda",
                 **NF4 | dict(bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16))
    with quire.Engine(model, **OPTIONS) as engine:
        for prompt, out in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            check_likely_of(model, prompt, out.token_ids)
