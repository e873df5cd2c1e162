"""PEFT's LoRA of experts and routers on a GPU, by the kernels, in captured graphs: log probabilities are those of PEFT's own
forward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

import quire
from tests.integrations.test_expert_adapters import PROMPTS, adapted

PARAMS = quire.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
OPTIONS: dict[str, Any] = dict(num_pages=60, max_num_seqs=4, max_model_len=64, cudagraph_capture_sizes=[1, 2, 4],
                               cudagraph_token_sizes=[])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_each_request(kind: str, dtype: torch.dtype) -> None:
    """In float32 sums in another order make 1e-5 of a logit. In bfloat16, with adapters in float32, PEFT's default, errors are
    no larger than a few times those of PEFT's own forward, which rounds the weights with their adapters."""
    peft = adapted(kind, "two").cuda()
    for name, p in peft.named_parameters():
        if "lora_" not in name:
            p.data = p.data.to(dtype)
    adapters: list[str | None] = ["two", "__base__", None, "two"]
    with quire.Engine(peft.base_model.model, enable_lora=True, **OPTIONS) as engine:
        outs = engine.generate([*PROMPTS, PROMPTS[1]], PARAMS, adapter=adapters)
        assert engine.runner.graphs.stats.replayed > 0

    def logprobs() -> list[torch.Tensor]:
        found = []
        for out, name in zip(outs, adapters, strict=True):
            peft.set_adapter("two" if name == "two" else "one")
            prompt, ids = list(out.prompt_token_ids), list(out.token_ids)
            with torch.no_grad(), peft.disable_adapter() if name == "__base__" else contextlib.nullcontext():
                logits = peft(torch.tensor([[*prompt, *ids]], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
            found.append(logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids, device="cuda")].cpu())
        return found

    own = logprobs()
    peft.float()
    want = logprobs()
    most = 1e-4 if dtype == torch.float32 else 3 * max(float((one - other).abs().max()) for one, other in zip(own, want,
                                                                                                          strict=True))
    for out, expected in zip(outs, want, strict=True):
        got = torch.tensor([next(iter(of.values())).logprob for of in out.logprobs or ()])
        torch.testing.assert_close(got, expected, atol=most, rtol=0)
