"""On a GPU: chunked attention by backends that have none, in CUDA graphs and without a wait. Else a llama4 served by one of
them replays the chunks, or the pages, of another step."""

from __future__ import annotations

import pytest
import torch
import transformers

import quire
from quire.attn_ops.registry import get_backend
from tests.attn_ops.cases import ChunkKit, run_check
from tests.gpu.helpers import check_draft_graph, check_likely, need

CUDA = torch.device("cuda", 0)
NAMES = ["local:flashinfer", "local:triton", "local:flash_attention", "local:trtllm_mha", "local:cudnn", "local:flex_attention",
         "local:hybrid:flashinfer+triton", "local:two_batch:triton"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", [
    "decode batch", "mixed batch", "feature chunk", "features together", "chunks at page boundaries", "padding",
    "stale metadata in padding", "buffers used again", "decode steps made ahead", "no synchronization",
    "CUDA graph of a decode batch"])
def test_every_batch_has_chunks(name: str, check: str) -> None:
    """The kit's own batches have chunks in few of these checks."""
    run_check(ChunkKit(get_backend(need(name)), CUDA, torch.bfloat16), check)


@pytest.mark.parametrize("name", ["local:flashinfer", "local:triton"])
def test_several_decode_steps_in_one_graph(name: str) -> None:
    """Each step has the buffers of its own plan: chunks begin at the first, at a later and at no step."""
    check_draft_graph(ChunkKit(get_backend(need(name)), CUDA, torch.bfloat16), [19, 5, 36], [390, 74])


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["local:flashinfer", {"full": "flashinfer", "chunk": "local:flashinfer"}, "local:triton"],
                         ids=str)
def test_engine(attention: str | dict[str, str]) -> None:
    """Three of four layers have chunks: decodes in graphs across the borders of chunks, prompts and mixed steps outside."""
    need(attention if isinstance(attention, str) else attention["chunk"])
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        intermediate_size=256, intermediate_size_mlp=256, num_local_experts=2, attention_chunk_size=32,
        max_position_embeddings=512, initializer_range=0.05)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to("cuda", torch.bfloat16)
    prompts = [[3 + (7 * i * n) % 500 for i in range(n)] for n in (5, 70, 31, 129)]
    with quire.Engine(model, attention=attention, page_size=16, num_pages=64, max_num_seqs=8, max_model_len=256) as engine:
        found = engine.generate(prompts, quire.SamplingParams(temperature=0, max_tokens=40))
        assert engine.runner.graphs.buckets
    for prompt, one in zip(prompts, found, strict=True):
        check_likely(model, prompt, one.token_ids)
