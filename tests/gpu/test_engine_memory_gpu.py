"""An engine's GPU memory: the size of the cache, what ``close`` frees, running out of memory; and measuring at a start."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from quire.attn_ops.tuning import small_linear as tuning
from quire.graph_runner.engine import Engine
from tests.gpu.helpers import check_likely, need
from tests.tiny import GREEDY, assert_unchanged, snapshot, tokens, unchanged

pytestmark = pytest.mark.alone  # they look at the free memory, or take all of it
SMALL = dict(num_pages=400, max_num_seqs=8, cudagraph_capture_sizes=[1, 2, 8], cudagraph_token_sizes=[16, 64])


def used() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_cache_is_sized_by_free_memory(model, tokenizer, prompts, expected) -> None:
    half_a_gib = 2**29
    total = torch.cuda.get_device_properties(0).total_memory
    share = (used() + half_a_gib) / total
    options = dict(attention=need("triton"), max_num_seqs=256, max_num_batched_tokens=512,
                   cudagraph_capture_sizes=[1, 4], cudagraph_token_sizes=[], compiler="eager")
    with Engine(model, tokenizer, gpu_memory_utilization=share, **options) as engine:
        size = engine.runner.cache.num_bytes
        # Half a GiB, less what the largest step takes: 512 tokens, of 1848 logits for 256 rows, are a few MiB.
        assert 0.5 * half_a_gib < size <= half_a_gib
        assert engine.max_model_len == 1024
        stats = engine.stats()  # what graphs took was left for them, within what a graph of this size may vary
        assert stats.step_bytes > 0 and stats.graph_bytes <= stats.estimated_graph_bytes + 2**25
        assert tokens(engine.generate(prompts, GREEDY)) == expected
    # Never more than max_num_seqs requests of full length can use.
    with Engine(model, tokenizer, gpu_memory_utilization=0.9, **options | dict(max_num_seqs=4)) as engine:
        assert engine.runner.cache.num_pages == 4 * 1024 // 16 + 1
    message = "no GPU memory is left for the KV cache: .* GiB free of .*, the largest step needs"
    with unchanged(model), pytest.raises(RuntimeError, match=message):
        Engine(model, gpu_memory_utilization=1e-6, **options)


def test_close_frees_the_memory(model, tokenizer, prompts) -> None:
    options = {**SMALL, "compiler": "eager", "attention": need("triton"), "num_pages": 16384}  # of 64 KiB: a GiB

    def serve() -> int:
        with Engine(model, tokenizer, **options) as engine:
            engine.generate(prompts, GREEDY)
            assert engine.runner.cache.num_bytes >= 2**30
            return used()

    serve()  # kernels and workspaces that stay are loaded now
    before, allocated = used(), torch.cuda.memory_allocated()
    during = serve()
    assert during - before >= 2**30
    assert used() - before < 2**26 and torch.cuda.memory_allocated() - allocated < 2**22


def test_out_of_memory_while_sizing_leaves_the_model_alone(model) -> None:
    free, _ = torch.cuda.mem_get_info()
    pages = 2 * free // (16 * 2 * 128 * 4 * 4)
    before = snapshot(model)
    with pytest.raises(torch.OutOfMemoryError):
        Engine(model, attention=need("triton"), num_pages=int(pages), max_num_seqs=2, cudagraph_capture_sizes=[],
               compiler="eager")
    used()  # collects what the exception held
    assert_unchanged(model, before)
    assert torch.cuda.mem_get_info()[0] > free // 2


def test_measuring_matrix_shapes(half, tokenizer, prompts, monkeypatch, tmp_path) -> None:
    """As at the first start with a model: shapes are measured once, kept, and whatever won gives the right tokens."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("QUIRE_TUNE", "1")
    tuning.known.cache_clear()
    measured = []
    for _ in range(2):
        with Engine(half, tokenizer, attention=need("triton"), **SMALL) as engine:
            found = tokens(engine.generate(prompts, replace(GREEDY, ignore_eos=True)))
        measured.append((tmp_path / "small_linear.json").read_text())
        for prompt, out in zip(prompts, found, strict=True):
            check_likely(half, prompt, out)
    assert measured[0] == measured[1]
    tuning.known.cache_clear()
