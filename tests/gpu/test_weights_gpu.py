"""On a GPU: weight updates keep captured graphs, pages behind a window are reused under them, late captures."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

import quire
from quire import Engine, SamplingParams
from tests.graph_runner.test_weights import free_port
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


def other_weights() -> dict[str, torch.Tensor]:
    """The same in every process."""
    generator = torch.Generator().manual_seed(7)
    return {name: p.cpu() * (1 + 0.5 * torch.randn(p.shape, generator=generator)) for name, p in
            load_model("cpu").named_parameters()}


def send(port: int, most: int | None) -> None:
    """A trainer on the second GPU; with ``most`` it dies after that many parameters, without a word."""
    group = quire.WeightsGroup("127.0.0.1", port, 0, 2, device="cuda:1", timeout=60)
    for name, value in list(other_weights().items())[:most]:
        group.send(value.to("cuda:1"), name)
    if most is not None:
        os._exit(1)
    group.close()


@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two ranks on one")
@pytest.mark.parametrize("most", [None, 3])
def test_weights_over_nccl(most) -> None:
    """A trainer that dies in the middle leaves the engine, its process and its graphs serving the old weights."""
    new, port, model = other_weights(), free_port(), load_model("cuda")
    with Engine(model, num_pages=64, max_num_seqs=4, max_model_len=128, cudagraph_capture_sizes=[1, 4]) as engine:
        said, captured = tokens(engine.generate(IDS, GREEDY)), engine.runner.graphs.stats.captured
        process = multiprocessing.get_context("spawn").Process(target=send, args=(port, most))
        process.start()
        engine.init_weights_update_group("127.0.0.1", port, rank=1, world_size=2, timeout=60 if most is None else 20)
        error = pytest.raises(quire.WeightUpdateError, match="receiving the parameter")
        with contextlib.nullcontext() if most is None else error:
            engine.update_weights_from_distributed(list(new), ["float32"] * len(new), [v.shape for v in new.values()])
        process.join(60)
        if most is None:
            engine.destroy_weights_update_group()
            assert all(torch.equal(engine.get_weights_by_name(name).cpu(), value) for name, value in new.items())
        got = tokens(engine.generate(IDS, GREEDY))
        assert (got == said) == (most is not None) and engine.runner.graphs.stats.captured == captured
    assert got == [hf_greedy(model, ids, 20) for ids in IDS]
