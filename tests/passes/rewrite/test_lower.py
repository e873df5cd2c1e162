"""The lowering pass: the graph before and after, what its inputs are, and that Inductor does not copy the cache."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch._inductor.utils import run_and_get_code

from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.registry import all_backends
from quire.attn_ops.step import Step, running
from quire.passes.backend import QuireBackend
from quire.passes.capture.traced import TracedGraph
from quire.passes.fx import placeholders
from quire.passes.options import QuireOptions
from quire.passes.rewrite.lower import LoweringTarget
from quire.passes.verify.sites import site_nodes
from tests.passes.models import HIDDEN, Attention, Tiny, changes, inputs, listing, served, tiny, trace

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")
TOLERANCE = 1e-5  # float32, sums of up to 22 numbers of order 1; eps is 1.2e-7


class OneSite(nn.Module):
    """The smallest module with an attention site: q, k and v are slices of its input."""

    def forward(self, x):
        q, k, v = x.view(1, -1, 8, 4).transpose(1, 2).split([4, 2, 2], dim=1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3)
        return out.transpose(1, 2).flatten(2)


def graph_of_one_site() -> TracedGraph:
    backend, row = QuireBackend(QuireOptions(compiler="eager")), torch.randn(1, 9, 32)
    torch._dynamo.mark_dynamic(row, 1)
    torch.compile(OneSite(), backend=backend, fullgraph=True)(row)
    return backend.graphs[0]


def lowered(graph: TracedGraph, page_size: int = 16, layout: str = "NHD"):
    cache = PagedKVCache.for_sites(graph.sites, num_pages=3, page_size=page_size, device="cpu", layout=layout)
    meta = CommonAttentionMetadata.build([1], [1], [[1]], page_size=page_size)
    return graph.compiled(Step(cache, meta, attention="torch_native")).lowered


def test_graphs_for_one_target_have_the_same_symbols() -> None:
    """The graph for small batches and that for all others get the same caches and tables, and a new symbol takes milliseconds.
    For another target, with sizes of its own, there are others: its caches may have other sizes."""
    graph = trace(tiny())
    target = LoweringTarget(all_backends()["torch_native"], 16)
    one, small, other = (graph.lowered(to, "none", small=of)[0].example_inputs for to, of in (
        (target, False), (target, True), (replace(target, page_size=8), False)))
    assert all(a is b for a, b in zip(one, small, strict=True))
    symbols = [{str(n) for t in found for n in t.shape if isinstance(n, torch.SymInt)} for found in (one, other)]
    assert symbols[0] and symbols[1] and symbols[0].isdisjoint(symbols[1])


def test_before_and_after() -> None:
    graph = graph_of_one_site()
    traced, raised = listing(graph.gm.graph), listing(graph.raised.graph)
    assert_expected_inline(traced, """\
s0: size s0
l_x_: [1, s0, 32]
view = view(l_x_, 1, -1, 8, 4)
transpose = transpose(view, 1, 2)
split = split(transpose, [4, 2, 2], dim=1)
q = getitem(split, 0)
k = getitem(split, 1)
v = getitem(split, 2)
out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3)
transpose_1 = transpose(out, 1, 2)
flatten = flatten(transpose_1, 2)
return (flatten,)""")
    assert_expected_inline(changes(traced, raised), """\
-out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3)
-transpose_1 = transpose(out, 1, 2)
+attention_default = attention.default(q, k, v, None, layer=0, scale=0.3, window=None, softcap=None,
+    chunk=None, causal=True)
+transpose_1 = transpose(attention_default, 1, 2)""")
    assert_expected_inline(changes(raised, listing(lowered(graph).gm.graph)), """\
+quire_slot_mapping: [s1]
+quire_block_table: [s2, s3]
+quire_query_start_loc: [s4]
+quire_seq_lens: [s5]
+quire_k_cache_0: [s6, 16, 2, 4]
+quire_v_cache_0: [s6, 16, 2, 4]
+torch_native_prepare_default = torch_native_prepare.default(quire_slot_mapping, quire_block_table,
+    quire_query_start_loc, quire_seq_lens, 16)
+getitem = getitem(torch_native_prepare_default, 0)
+getitem_1 = getitem(torch_native_prepare_default, 1)
+getitem_2 = getitem(torch_native_prepare_default, 2)
-attention_default = attention.default(q, k, v, None, layer=0, scale=0.3, window=None, softcap=None,
-    chunk=None, causal=True)
-transpose_1 = transpose(attention_default, 1, 2)
+transpose_2 = transpose(q, 1, 2)
+flatten_1 = flatten(transpose_2, 0, 1)
+transpose_3 = transpose(k, 1, 2)
+flatten_2 = flatten(transpose_3, 0, 1)
+transpose_4 = transpose(v, 1, 2)
+flatten_3 = flatten(transpose_4, 0, 1)
+torch_native_paged_attention_default = torch_native_paged_attention.default(flatten_1, flatten_2, flatten_3,
+    quire_k_cache_0, quire_v_cache_0, None, None, quire_slot_mapping, quire_block_table,
+    quire_query_start_loc, quire_seq_lens, None, [getitem, getitem_1, getitem_2], scale=0.3, window=None,
+    softcap=None, chunk=None)
+view_1 = view(torch_native_paged_attention_default, 1, -1, 4, 4)
+transpose_5 = transpose(view_1, 1, 2)
+transpose_1 = transpose(transpose_5, 1, 2)""")


@pytest.mark.parametrize("layout, stride", [("NHD", (128, 8, 4, 1)), ("HND", (128, 4, 64, 1))])
def test_sizes_of_the_inputs(layout, stride) -> None:
    """What a batch or a cache decides is dynamic, each by itself, the pages of each layer too, of which its K and V have as
    many; page size, heads and dims are not; strides follow."""
    examples = lowered(trace(tiny()), layout=layout).example_inputs
    slots, table, starts, lens, *caches = examples
    assert all(str(k.shape[0]) == str(v.shape[0]) for k, v in zip(caches[::2], caches[1::2], strict=True))
    symbols = [slots.shape[0], *table.shape, starts.shape[0], lens.shape[0], *(c.shape[0] for c in caches[::2])]
    assert all(isinstance(s, torch.SymInt) for s in symbols) and len({str(s) for s in symbols}) == len(symbols)
    for cache in caches:
        assert cache.shape[1:] == (16, 2, 4) and cache.stride() == stride and cache.dtype == torch.float32
    assert [t.dtype for t in examples[:4]] == [torch.int64, torch.int32, torch.int32, torch.int32]


def test_values_narrower_than_keys() -> None:
    class Narrow(Attention):
        def forward(self, x, position_ids, extra):
            q, k, v = x.view(*x.shape[:2], 1, HIDDEN)[..., :12], x[:, :, None, 2:14], x[:, :, None, :8]
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.nn.functional.pad(out[:, 0], (0, 8))

    model = Tiny(Narrow(1, 1)).eval()
    graph = trace(model)
    assert [(s.head_dim, s.head_dim_v) for s in graph.sites] == [(12, 8)]
    assert served(graph, model) <= TOLERANCE


def test_each_layer_has_its_own_shapes() -> None:
    model = Tiny(Attention(4, 2, is_causal=True), Attention(6, 3, is_causal=True), Attention(2, 1, is_causal=True)).eval()
    graph = trace(model)
    assert [c.shape[2] for c in lowered(graph).example_inputs[4::2]] == [2, 3, 1]
    assert served(graph, model) <= TOLERANCE


def test_one_graph_for_each_format_of_the_cache() -> None:
    """A step's cache decides page size and layout; each pair is lowered once and kept."""
    graph = trace(tiny())
    first = lowered(graph, page_size=4)
    assert lowered(graph, page_size=4) is first
    assert lowered(graph, page_size=8) is not first and lowered(graph, page_size=4, layout="HND") is not first
    assert len(site_nodes(graph.raised.graph)) == 2  # the raised graph stays, to be lowered again
    if all_backends()["triton"].available(torch.device("cpu")):
        pytest.skip("Triton's interpreter is off")
    model = tiny()
    graph = trace(model)
    for name in ("torch_native", "triton"):
        assert served(graph, model, attention=name) <= TOLERANCE
    assert {p.selection.backend.name for p in graph.compilations.values()} == {"torch_native", "triton"}


def test_a_quantized_cache_has_its_scales_as_inputs() -> None:
    """After the K and V of their layer, with as many pages; the op gets them where other caches have None."""
    graph = trace(tiny())
    cache = PagedKVCache.for_sites(graph.sites, num_pages=3, page_size=4, device="cpu", dtype=torch.int8)
    meta = CommonAttentionMetadata.build([1], [1], [[1]], page_size=4)
    result = graph.compiled(Step(cache, meta, attention="torch_native")).lowered
    names = [n.name for n in placeholders(result.gm.graph)][-8:]
    assert names == [f"quire_{name}_{layer}" for layer in (0, 1) for name in ("k_cache", "v_cache", "k_scale", "v_scale")]
    values = result.inputs.of(Step(cache, meta))
    assert len(values) == len(result.example_inputs)
    for got, example in zip(values, result.example_inputs, strict=True):
        assert got.dtype == example.dtype and got.dim() == example.dim() and got.stride()[1:] == example.stride()[1:]
    assert all(got is want for got, want in zip(values[-4:], cache.of_layer(1), strict=True))
    sizes = [example.shape[0] for example in result.example_inputs[4:]]
    assert all(isinstance(s, torch.SymInt) for s in sizes)
    assert [len({str(s) for s in of}) for of in (sizes[:4], sizes[4:], sizes)] == [1, 1, 2]
    ops = [n for n in result.gm.graph.nodes if n.target == all_backends()["torch_native"].op]
    assert [str(a) for a in ops[1].args[3:7]] == names[4:]


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="Inductor needs a compiler")
@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_inductor_does_not_copy_the_cache(kv_dtype) -> None:
    """Compiled: the generated code allocates nothing of the size of the cache or its scales."""
    model = tiny()
    graph = trace(model, compiler="inductor")
    compiled = torch.compile(model, backend=graph.owner, dynamic=True, fullgraph=True)
    cache = PagedKVCache.for_sites(graph.sites, num_pages=70, page_size=4, device="cpu", dtype=kv_dtype)
    sequence = inputs(9)[0]
    meta = CommonAttentionMetadata.build([9], [9], [[3, 1, 7]], page_size=4)
    with running(Step(cache, meta)), torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        out, code = run_and_get_code(compiled, sequence[None], meta.positions[None])
    assert "quire.torch_native_paged_attention" in "".join(code)
    allocated = re.findall(r"empty_strided\w*\(\(([^)]*)\)", "".join(code))
    assert allocated and not [shape for shape in allocated if re.search(r"4, 2(, 4)?,?$", shape.strip())], allocated
    expected = model if kv_dtype is None else op_by_op(model, kv_dtype)
    assert (out - expected(sequence[None], torch.arange(9)[None])).abs().max() <= TOLERANCE
    # The caller's own tensors were written: 9 slots of pages 3, 1 and 7, and no other.
    for tensor in [t for t in [*cache.k, *cache.v, *cache.k_scale, *cache.v_scale] if t is not None]:
        written = tensor.float().flatten(2).abs().sum(-1) > 0
        assert written.nonzero().tolist() == [[1, 0], [1, 1], [1, 2], [1, 3], [3, 0], [3, 1], [3, 2], [3, 3], [7, 0]]
    # And the same code serves a decode of another shape, with a larger cache.
    larger = PagedKVCache.for_sites(graph.sites, num_pages=99, page_size=4, device="cpu", dtype=kv_dtype)
    for layer in larger.layer_ids:
        for mine, theirs in zip(larger.of_layer(layer), cache.of_layer(layer), strict=True):
            if mine is not None:
                mine[:70] = theirs
    longer = torch.cat([sequence, sequence[:2]])
    meta = CommonAttentionMetadata.build([2, 0], [11, 0], [[3, 1, 7], [0]], page_size=4)
    with running(Step(larger, meta)), torch.no_grad():
        out = compiled(longer[None, 9:], meta.positions[None])
    assert (out - expected(longer[None], torch.arange(11)[None])[:, 9:]).abs().max() <= TOLERANCE


def op_by_op(model, kv_dtype):
    """The same model in one step on a quantized cache of its own, run without a compiler."""
    def call(ids, positions):
        graph = trace(model)
        cache = PagedKVCache.for_sites(graph.sites, num_pages=5, page_size=4, device="cpu", dtype=kv_dtype)
        meta = CommonAttentionMetadata.build([ids.shape[1]], [ids.shape[1]], [[1, 2, 3]], page_size=4)
        compiled = torch.compile(model, backend=graph.owner, dynamic=True, fullgraph=True)
        with running(Step(cache, meta)), torch.no_grad():
            return compiled(ids, positions)

    return call
