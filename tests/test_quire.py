"""The front door: every public name."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quire
from tests.tiny import PROMPTS, load_model, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture
def model():
    return load_model()


@pytest.fixture(scope="module")
def plain():
    return load_model()


# -- the names


def test_names() -> None:
    assert sorted(quire.__all__) == quire.__all__ == [
        "AttentionBackend", "AttentionCapabilities", "AttentionSite", "CommonAttentionMetadata", "CudagraphSupport", "Engine",
        "PagedKVCache", "RequestOutput", "SamplingParams", "Step", "StepLimits", "StreamEvent", "UnsupportedAttention",
        "assert_attention_sites", "backends", "check_backend", "cross_attention", "current_step", "define_paged_op",
        "encoder_attention", "explain",
        "merge_state", "merge_states", "paged", "register_backend", "step", "varlen_attention",
    ]
    for name in quire.__all__:
        thing = getattr(quire, name)
        assert inspect.getdoc(thing), f"quire.{name} has no docstring"
    assert issubclass(quire.UnsupportedAttention, ValueError)


def test_names_are_lazy_and_typed() -> None:
    """The imports that type checkers read are those that ``__getattr__`` makes; a bad name lists the good ones."""
    tree = ast.parse(Path(quire.__file__).read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = {alias.asname: str(node.module) for node in typed.body if isinstance(node, ast.ImportFrom)
               for alias in node.names}
    assert sorted(imports) == sorted(quire.__all__) and set(quire.__all__) <= set(dir(quire))
    for name, module in imports.items():
        assert getattr(quire, name) is getattr(import_module(module), name)
    with pytest.raises(AttributeError, match="module 'quire' has no attribute 'Motor'; it has AttentionBackend, .*, Engine"):
        quire.Motor  # noqa: B018


def test_signatures() -> None:
    """Arguments that the examples name, and the defaults that they state."""
    engine = inspect.signature(quire.Engine).parameters
    stated = dict(attention="auto", page_size=16, num_pages=None, max_num_seqs=256, max_num_batched_tokens=8192,
                  kv_cache_dtype="auto")
    assert {name: engine[name].default for name in stated} == stated
    assert list(inspect.signature(quire.CommonAttentionMetadata.build).parameters)[:3] == [
        "query_lens", "seq_lens", "block_table"]
    assert set(inspect.signature(quire.PagedKVCache).parameters) >= {
        "num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim", "dtype", "device"}
    assert {f.name for f in dataclasses.fields(quire.RequestOutput)} >= {
        "index", "prompt", "prompt_token_ids", "token_ids", "text", "finish_reason", "error"}
    assert {f.name for f in dataclasses.fields(quire.StreamEvent)} >= {
        "index", "token_ids", "text", "finished", "output"}


def test_importing_is_enough_and_loads_no_gpu() -> None:
    """In a process of its own: no transformers before an engine is asked for, no CUDA, no warning."""
    code = ("import sys, warnings; warnings.simplefilter('error', FutureWarning)\n"
            "import quire, torch\n"
            "assert quire.PagedKVCache and quire.backends() and 'transformers' not in sys.modules\n"
            "assert not torch.cuda.is_initialized()\n"
            "assert quire.PagedKVCache.for_model and torch.ops.quire.attention\n")
    subprocess.run([sys.executable, "-c", code], check=True)


# -- doors beyond README's examples, which tests/test_readme.py runs


def test_a_with_options(model, plain, tokenizer) -> None:
    model = quire.paged(model, attention="torch_native", page_size=4, num_pages=64)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    assert torch.equal(model.generate(ids, max_new_tokens=6), plain.generate(ids, max_new_tokens=6))
    assert model.generate.engine.runner.cache.page_size == 4
    model.generate.close()


def test_b_decorator() -> None:
    class MyLM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place, self.head = nn.Embedding(30, 16), nn.Embedding(30, 16), nn.Linear(16, 30)

        @quire.paged(attention="torch_native")
        def forward(self, input_ids, position_ids, **kw):
            x = (self.embed(input_ids) + self.place(position_ids)).unflatten(-1, (2, 8)).transpose(1, 2)
            return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = MyLM().eval()
    cache = quire.PagedKVCache(num_layers=1, num_pages=4, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32,
                               device="cpu")
    meta = quire.CommonAttentionMetadata.build([5, 2], [5, 2], [[1, 2], [3]], page_size=4)
    a, b = torch.arange(5), torch.arange(7, 9)
    with torch.no_grad():
        expected = torch.cat([model(t[None], torch.arange(len(t))[None])[0] for t in (a, b)])
        with quire.step(cache, meta):
            got = model(torch.cat([a, b])[None], meta.positions[None])[0]
    assert (got - expected).abs().max() < 1e-5
    with quire.Engine(model, num_pages=8, page_size=4, max_num_seqs=2, max_model_len=16) as engine:
        assert len(engine.generate([[1, 2, 3]], quire.SamplingParams(max_tokens=3))[0].token_ids) == 3


def test_registering_a_backend() -> None:
    quire.backends()  # loads those that come with quire
    nothing = quire.AttentionCapabilities(frozenset(), frozenset())
    backend = quire.AttentionBackend("torch_native", nothing, lambda device: None, None)
    with pytest.raises(ValueError, match="an attention backend named 'torch_native' is registered already"):
        quire.register_backend(backend)
