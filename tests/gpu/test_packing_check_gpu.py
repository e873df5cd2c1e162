"""The trial before serving, on a GPU: it takes neither a second copy of the model nor much of an engine's start."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.attn_ops.registry import get_backend
from quire.graph_runner.packing_check import check_packing
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions


@pytest.mark.alone
def test_memory_and_time() -> None:
    """A decoder of a billion parameters in bfloat16. Its embedding is never copied to float32; its head, as large, is."""
    config = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                         num_key_value_heads=8, vocab_size=32000, tie_word_embeddings=False)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    paged = PagedModel(model, QuireOptions(compiler="eager"))

    def check() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        check_packing(paged, paged.sites, get_backend("torch_native"), page_size=16, kv_dtype=None, layout="NHD",
                      device=torch.device("cuda"), vocab_size=32000, max_model_len=256)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    check()  # loads kernels
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    took = check()
    most = torch.cuda.max_memory_allocated() - before
    assert most < 1.5 * 4 * 32000 * 2048, f"{most / 2**20:.0f} MiB for a model of {before / 2**20:.0f}"
    assert took < 1.0
    paged.close()
