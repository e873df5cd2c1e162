"""On a GPU: weight updates keep captured graphs, pages behind a window are reused under them, late captures."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from quire.graph_runner.engine import Engine
from quire.graph_runner.sampling_params import SamplingParams
from tests.graph_runner.test_window_pages import poison
from tests.tiny import GREEDY, hf_greedy, load_model, tokens

IDS = [[5, 17, 40, 3, 29], [9, 9, 31], [7]]


def test_an_update_keeps_the_graphs() -> None:
    """Tokens of the new model from graphs of the old one; fused parameters are views of one tensor here."""
    model = load_model("cuda")
    with Engine(model, num_pages=64, max_num_seqs=4, max_model_len=128, cudagraph_capture_sizes=[1, 4]) as engine:
        said, captured = tokens(engine.generate(IDS, GREEDY)), engine.runner.graphs.stats.captured
        new = {name: p * (1 + 0.5 * torch.randn_like(p)) for name, p in model.named_parameters()}
        began = time.perf_counter()
        engine.update_weights_from_tensors(new)
        torch.cuda.synchronize()
        print(f"updated {sum(p.nbytes for p in new.values()) / 2**20:.0f} MiB in {time.perf_counter() - began:.3f} s")
        replayed, got = engine.runner.graphs.stats.replayed, tokens(engine.generate(IDS, GREEDY))
        assert engine.runner.graphs.stats.captured == captured and engine.runner.graphs.stats.replayed > replayed
    assert got == [hf_greedy(model, ids, 20) for ids in IDS] != said


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("options", [{}, {"cudagraph_lazy": True}, {"cudagraph_debug": True}])
def test_pages_behind_the_window(asynchronous, options) -> None:
    """A cache of a fifth of the contexts, NaN in every page that was given back, replayed graphs: the tokens of generate."""
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=2, head_dim=16, sliding_window=40, max_position_embeddings=1024,
                           bos_token_id=None, eos_token_id=None, initializer_range=0.3)
    model = MistralForCausalLM(config).eval().cuda()
    prompts = [list(range(1, 60)), [3, 1, 4, 1, 5], list(range(60, 0, -1)) * 4]
    with Engine(model, attention="triton", page_size=16, num_pages=22, max_num_seqs=3, max_model_len=600,
                max_num_batched_tokens=64, cudagraph_capture_sizes=[3], async_stepping=asynchronous, **options) as engine:
        assert engine.max_model_len == 600
        poison(engine)
        outs = tokens(engine.generate(prompts, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)))
        assert engine.runner.graphs.stats.replayed > 100
    assert outs == [hf_greedy(model, p, 200) for p in prompts]
