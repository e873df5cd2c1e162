"""A model on a GPU that is not the current one: an engine and a step by hand run there, and wait for what runs there."""

from __future__ import annotations

import pytest
import torch

import quire
from quire import CommonAttentionMetadata, Engine
from tests.gpu.helpers import need
from tests.tiny import GREEDY, hf_greedy, load_model, tokens

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
SMALL = dict(num_pages=100, max_num_seqs=4, max_model_len=200, cudagraph_capture_sizes=[1, 4], cudagraph_token_sizes=[16])


@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
def test_engine(attention, prompts) -> None:
    dtype = torch.float32 if attention == "triton" else torch.bfloat16
    found = []
    for device in ("cuda:0", "cuda:1"):
        with Engine(load_model(device, dtype), attention=need(attention), **SMALL) as engine:
            assert torch.cuda.current_device() == 0
            for params in (GREEDY, quire.SamplingParams(temperature=0.8, top_k=20, seed=1, max_tokens=20, logprobs=2)):
                found.append(tokens(engine.generate(prompts[:4], params)))
            assert engine.runner.graphs.stats.replayed
    assert found[:2] == found[2:]
    if dtype == torch.float32:
        assert found[0] == [hf_greedy(load_model("cuda:1"), p, GREEDY.max_tokens) for p in prompts[:4]]


def test_step_by_hand(prompts) -> None:
    model = load_model("cuda:1")
    ids = torch.tensor(prompts[0], device="cuda:1")
    with torch.no_grad():
        want = model(ids[None], use_cache=False).logits[0]
        paged = torch.compile(model, backend="quire", options={"compiler": "eager"})
        cache = quire.PagedKVCache.for_model(model, num_pages=8, page_size=16)
        meta = CommonAttentionMetadata.build([len(ids)], [len(ids)], [[1, 2, 3]], page_size=16, device="cuda:1")
        with quire.step(cache, meta, attention=need("triton")):
            got = paged(input_ids=ids[None], position_ids=meta.positions[None], use_cache=False).logits[0]
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()
