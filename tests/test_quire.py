"""The front door: every public name, and each example of the README on the model that ships with quire."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quire
from tests.tiny import PROMPTS, hf_greedy, load_model, load_tokenizer, tokens

ROOT = Path(quire.__file__).parents[1]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture
def model():
    return load_model()


@pytest.fixture(scope="module")
def plain():
    return load_model()


@pytest.fixture(scope="module")
def prompts():
    return list(PROMPTS[:3])


# -- the names


def test_names() -> None:
    assert sorted(quire.__all__) == quire.__all__ == [
        "AttentionBackend", "AttentionCapabilities", "AttentionSite", "CommonAttentionMetadata", "Engine",
        "PagedKVCache", "RequestOutput", "SamplingParams", "StreamEvent", "UnsupportedAttention",
        "assert_attention_sites", "backends", "explain", "paged", "register_backend", "step",
    ]
    for name in quire.__all__:
        thing = getattr(quire, name)
        assert inspect.getdoc(thing), f"quire.{name} has no docstring"
    assert issubclass(quire.UnsupportedAttention, ValueError)


def test_version() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == quire.__version__


def test_it_only_re_exports() -> None:
    """Type checkers see the names that are imported at first use."""
    source = (ROOT / "quire/__init__.py").read_text()
    imported = {alias.asname for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)
                for alias in node.names if alias.asname}
    assert imported == set(quire.__all__) and len(source.splitlines()) < 70


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
    """In a process of its own: no transformers model, no CUDA, no warning."""
    code = ("import warnings; warnings.simplefilter('error', FutureWarning)\n"
            "import quire, torch\n"
            "assert not torch.cuda.is_initialized()\n"
            "assert quire.PagedKVCache.for_model and torch.ops.quire.attention\n")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def readme_code() -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))


def test_readme_code_is_python_and_uses_names_that_exist() -> None:
    code = readme_code()
    ast.parse(code)
    used = set(re.findall(r"\bquire\.(\w+)", code))
    assert used <= set(quire.__all__) and len(used) >= 8, used - set(quire.__all__)


# -- the examples


def test_a_one_line_on_a_model(model, plain, tokenizer, prompts) -> None:
    model = quire.paged(model)
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    got = model.generate(**batch, max_new_tokens=12)
    assert torch.equal(got, plain.generate(**batch, max_new_tokens=12))
    assert model.generate.engine.runner.graphs.stats.replayed > 0
    model.generate.close()


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


@pytest.fixture
def entry_point(monkeypatch):
    """What installing the distribution does (pyproject.toml, torch_dynamo_backends)."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    assert declared == {"quire": "quire.passes.backend:quire_backend"}
    if "quire" not in torch._dynamo.list_backends():
        registry = torch._dynamo.backends.registry
        entry = EntryPoint("quire", declared["quire"], "torch_dynamo_backends")
        monkeypatch.setitem(registry._BACKENDS, "quire", entry)
        yield
        registry._COMPILER_FNS.pop("quire", None)
    else:
        yield


def test_c_torch_compile(entry_point, model, plain) -> None:
    compiled = torch.compile(model, backend="quire", options={"attention": "torch_native", "compiler": "eager"})
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
        assert (compiled(ids, use_cache=False).logits - expected).abs().max() < 1e-4  # a plain model outside of a step
        cache = quire.PagedKVCache.for_model(model, num_pages=4, page_size=8)
        meta = quire.CommonAttentionMetadata.build([12], [12], [[3, 1]], page_size=8)
        with quire.step(cache, meta):
            got = compiled(input_ids=ids, position_ids=meta.positions[None], use_cache=False).logits
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_d_engine(model, plain, tokenizer, prompts) -> None:
    with quire.Engine(model, tokenizer, attention="auto", page_size=16, num_pages=None, max_num_seqs=256,
                      max_num_batched_tokens=8192, kv_cache_dtype="auto") as engine:
        outs = engine.generate(prompts, quire.SamplingParams(max_tokens=12, temperature=0))
        ids = [tokenizer(p)["input_ids"] for p in prompts]
        assert tokens(outs) == [hf_greedy(plain, i, 12) for i in ids]
        assert [o.prompt_token_ids for o in outs] == ids
        text = ["", "", ""]
        for event in engine.stream(prompts, quire.SamplingParams(max_tokens=12, temperature=0)):
            text[event.index] += event.text
        assert text == [o.text for o in outs]


def test_e_a_step_by_hand(model, plain) -> None:
    """Prefill of one sequence beside the next token of another, as the example has it."""
    model = quire.paged(model)
    new, old = torch.arange(10, 15), torch.arange(20, 38)
    cache = quire.PagedKVCache.for_model(model, num_pages=64, page_size=16)
    first = quire.CommonAttentionMetadata.build(query_lens=[17], seq_lens=[17], block_table=[[2, 3]], page_size=16)
    meta = quire.CommonAttentionMetadata.build(query_lens=[5, 1], seq_lens=[5, 18], block_table=[[1, 0], [2, 3]],
                                               page_size=16, device=model.device)
    ids = torch.cat([new, old[17:]])
    with torch.no_grad():
        with quire.step(cache, first):
            model(input_ids=old[None, :17], position_ids=first.positions[None], use_cache=False)
        with quire.step(cache, meta):
            logits = model(input_ids=ids[None], position_ids=meta.positions[None], use_cache=False).logits
        expected = torch.cat([plain(new[None]).logits[0], plain(old[None]).logits[0, -1:]])
    assert logits.shape == (1, 6, 1848)
    assert (logits[0] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_f_see_what_happened(model) -> None:
    table = str(quire.explain(model))
    assert len(re.findall(r"model\.layers\.\d\.self_attn +interface +GQA 4:2x64", table)) == 4
    quire.assert_attention_sites(model, """
        layer  module                    route      needs                scale
        0      model.layers.0.self_attn  interface  GQA 4:2x64, float32  0.125
        1      model.layers.1.self_attn  interface  GQA 4:2x64, float32  0.125
        2      model.layers.2.self_attn  interface  GQA 4:2x64, float32  0.125
        3      model.layers.3.self_attn  interface  GQA 4:2x64, float32  0.125
    """)
    with pytest.raises(AssertionError, match="the attention sites of LlamaForCausalLM changed"):
        quire.assert_attention_sites(model, "something else")
    assert "torch_native" in str(quire.backends()) and "features" in str(quire.backends())


def test_registering_a_backend() -> None:
    quire.backends()  # loads those that come with quire
    nothing = quire.AttentionCapabilities(frozenset(), frozenset())
    backend = quire.AttentionBackend("torch_native", nothing, lambda device: None, None)
    with pytest.raises(ValueError, match="an attention backend named 'torch_native' is registered already"):
        quire.register_backend(backend)
