"""Log probabilities and shared pages on a GPU: computed in CUDA graphs, and copied between steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire import Engine, SamplingParams
from quire.attn_ops.ops.logprobs import token_logprobs_cuda, token_logprobs_eager
from tests.gpu.helpers import captured
from tests.tiny import GREEDY, assert_idle, tokens

OPTIONS: dict[str, Any] = dict(num_pages=400, max_num_seqs=8, compiler="eager", cudagraph_capture_sizes=[1, 2, 8],
                               cudagraph_token_sizes=[16, 64])
TOLERANCE = 5e-4  # logits of up to 30 agree to 1e-5 of that


@pytest.mark.parametrize("pdl", [False, True])
def test_kernels_in_a_graph(pdl: bool) -> None:
    """A row that wants nothing at capture is computed when it does at a replay."""
    logits = torch.randn(1 if pdl else 5, 128256, device="cuda", dtype=torch.bfloat16) * 4
    rows = len(logits)
    tokens, temperature = torch.arange(rows, device="cuda") * 700, torch.zeros(rows, device="cuda")
    graph, out = captured(lambda: token_logprobs_cuda(logits, tokens, temperature, pdl=pdl))
    graph.replay()
    assert not out.packed.any()
    temperature.copy_(torch.tensor([0.7, 0.0, 1.0, 2.0, 1.0])[:rows])
    logits.mul_(0.5)
    graph.replay()
    expected = token_logprobs_eager(logits.cpu(), tokens.cpu(), temperature.cpu())
    assert out.ranks.tolist() == expected.ranks.tolist()
    for found, want in ((out.logprobs, expected.logprobs), (out.normalizers, expected.normalizers)):
        torch.testing.assert_close(found.cpu(), want, rtol=0, atol=1e-5)


def test_engine(model, prompts) -> None:
    params = [replace(GREEDY, logprobs=2, prompt_logprobs=1), SamplingParams(max_tokens=9, seed=1, logprobs=0),
              SamplingParams(temperature=0.7, top_k=5, max_tokens=9, seed=2, logprobs=7, logprobs_mode="processed_logprobs"),
              replace(GREEDY, logprob_token_ids=[5, 9]), GREEDY]
    with Engine(model, **OPTIONS) as engine:
        outputs = engine.generate(prompts[: len(params)], params)
        assert engine.runner.graphs.stats.replayed > 0
        for prompt, p, output in zip(prompts, params, outputs, strict=False):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *output.token_ids]], device="cuda")).logits[0].double().cpu()
            entries = [(i, e) for i, e in enumerate(output.prompt_logprobs or [], -1) if e is not None]
            for at, entry in entries:
                for token, found in entry.items():
                    assert found.logprob == pytest.approx(logits[at].log_softmax(-1)[token].item(), abs=TOLERANCE)
            for at, entry in enumerate(output.logprobs or [], len(prompt) - 1):
                x = logits[at]
                if p.logprobs_mode == "processed_logprobs":
                    x = torch.where(x < x.topk(5).values[-1], float("-inf"), x / 0.7)
                for token, found in entry.items():
                    assert found.logprob == pytest.approx(x.log_softmax(-1)[token].item(), abs=TOLERANCE)
        scores = engine.score([prompts[3]] * 4, [[5, 6], [7], [8, 9, 10], [5, 6]])
        assert scores[0].logprobs == pytest.approx(scores[3].logprobs, abs=TOLERANCE)
        assert_idle(engine)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8_e5m2"])
def test_shared_pages(kv_cache_dtype: str, model, prompts) -> None:
    long = [*prompts[3], *prompts[2]]
    groups = [long, long, [*long, 5], long[:17], long[:16], prompts[0], prompts[0], long]
    found = []
    for share in (False, None, True):
        with Engine(model, **OPTIONS, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=share) as engine:
            found += [tokens(engine.generate(groups, GREEDY)) for _ in range(2)]
            assert (engine.stats().saved_tokens > 100) == (share is not False)
    assert all(each == found[0] for each in found)
