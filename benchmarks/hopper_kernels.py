"""The cases of ``python -m benchmarks.hopper``: each Triton kernel as launched for the shapes of large models."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks import linear_chain
from benchmarks.hopper import Compiled, compiling
from quire.attn_ops.backends import triton as backend
from quire.attn_ops.backends.double_sparsity import LayerLabels, Options, decode_triton
from quire.attn_ops.backends.dual_chunk import decode_by_chunk
from quire.attn_ops.backends.dual_chunk.vertical_slash import Lines, Listed, attend_triton, kernel_block
from quire.attn_ops.backends.flashinfer import pages
from quire.attn_ops.backends.triton.extend_route import Route
from quire.attn_ops.backends.triton.plan import Batch
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.ops import lora_linear as lora_linear_module
from quire.attn_ops.ops.experts import expert_clamped_swiglu_cuda, expert_linear_cuda, expert_swiglu_cuda
from quire.attn_ops.ops.logprobs import token_logprobs_cuda
from quire.attn_ops.ops.lora_linear import lora_linear_cuda
from quire.attn_ops.ops.lora_rows import lora_group_cuda
from quire.attn_ops.ops.merge_state import merge_state_triton, merge_states_triton
from quire.attn_ops.ops.positions import compute_position_triton
from quire.attn_ops.ops.rope import RopeForm, rope_kv_write_cuda
from quire.attn_ops.ops.routing import route_rows_cuda, topk_rows_cuda
from quire.attn_ops.ops.sampling import sample_tokens_cuda
from quire.attn_ops.ops.small_linear import float_linear_cuda, memory_of, norm_apart, small_linear_cuda
from quire.attn_ops.ops.tree import tree_attention_state_triton
from quire.attn_ops.ops.varlen import varlen_attention_cuda
from quire.attn_ops.step import running
from quire.attn_ops.tuning import launch_config
from quire.attn_ops.tuning.launch_config import INT4, Config
from quire.attn_ops.tuning.small_linear import LinearShape, candidates

SMS, SHARED = 132, 227 * 1024  # of an H100: multiprocessors, and bytes of shared memory per program
#: name -> query heads, KV heads, D, Dv, and options of the site
HEADS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "llama-8b": (32, 8, 128, 128, {}), "qwen3-0.6b": (16, 8, 128, 128, {}), "gemma2-9b": (16, 8, 256, 256, dict(
        window=4096, softcap=50.0)), "gpt-oss-20b": (64, 8, 64, 64, dict(window=128, sinks=True)),
    "phi-2": (32, 32, 80, 80, {}), "deepseek-v2-lite": (16, 16, 192, 128, {}), "llama4": (40, 8, 128, 128, dict(chunk=8192)),
}
#: name -> experts, experts per token, (N, K) of its two layers, transposed (and with bias)
EXPERTS: dict[str, tuple[int, int, list[tuple[int, int]], bool]] = {
    "qwen3-30b-a3b": (128, 8, [(1536, 2048), (2048, 768)], False), "mixtral": (8, 2, [(28672, 4096), (4096, 14336)], False),
    "gpt-oss-20b": (32, 4, [(5760, 2880), (2880, 2880)], True),
    "deepseek-v2-lite": (64, 6, [(2816, 2048), (2048, 1408)], False),
}
#: model -> form of the rotation
FORMS = {"gpt-oss-20b": RopeForm(half_tables=True), "llama-8b": RopeForm(interleaved=True),
         "llama4": RopeForm(interleaved=True, half_tables=True, norm_after=True), "gemma2-9b": RopeForm(norm_offset=1.0)}
INTS: dict[str, Any] = dict(dtype=torch.int32)
KV = {"bf16": None, "int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
HALF, FULL = torch.bfloat16, torch.float32


def zeros(*size: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(*size, dtype=dtype)


def tables(tokens: int, rows: int) -> tuple[torch.Tensor, ...]:
    """Slots, block table, starts of the queries, and lengths."""
    return zeros(tokens, dtype=torch.int64), zeros(rows, 512, **INTS), zeros(rows + 1, **INTS), zeros(rows, **INTS)


def cache_of(kv_heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """A layer's cache of two pages."""
    return PagedKVCache(num_layers=1, num_pages=2, page_size=16, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v,
                        dtype=dtype, device="cpu").of_layer(0)


def attention(heads: int, kv_heads: int, dim: int, dim_v: int, site: dict[str, Any], *, query_lens: list[int],
              dtype: torch.dtype = HALF, kv_dtype: torch.dtype | None = None, rope: bool = False, form: RopeForm | None = None
              ) -> None:
    """Call the backend's op: its launches compile, nothing runs."""
    tokens = sum(query_lens)
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim_v]
    qkv = zeros(tokens, sum(sizes), dtype=dtype).split(sizes, 1)
    q, k, v = (x.unflatten(1, (-1, d)) for x, d in zip(qkv, (dim, dim, dim_v), strict=True))
    sinks = zeros(heads, dtype=dtype) if site.get("sinks") else None
    options = dict(scale=0.1, window=site.get("window"), softcap=site.get("softcap"), chunk=site.get("chunk"))
    rest = (*cache_of(kv_heads, dim, dim_v, kv_dtype or dtype), *tables(tokens, len(query_lens)), sinks, [])
    if rope or form is not None:
        form = form or RopeForm()
        cos = zeros(tokens, dim // 2 if form.half_tables else dim, dtype=dtype)
        norm = zeros(dim, dtype=dtype) if form.norm_after or form.norm_offset is not None else None
        # rope_kv_write's CUDA implementation, not the one for CPU tensors.
        backend.rope_kv_write = rope_kv_write_cuda
        backend.rope_paged_attention(q, k, v, cos, cos, norm, norm, 0.0, *rest, **options, **form.options())
    else:
        backend.paged_attention(q, k, v, *rest, **options)


def linear(tokens: int, n: int, k: int, norm: bool, residual: bool, swiglu: bool, pdl: bool, config: Config | None = None,
           gelu: bool = False) -> None:
    small_linear_cuda(zeros(1, tokens, k), zeros(n, k), None, zeros(k) if norm else None, 1e-5,
                      zeros(1, tokens, n) if residual else None, swiglu, gelu=gelu, config=config, pdl=pdl)


def quantized_linear(tokens: int, n: int, k: int, kind: torch.dtype, residual: bool, pdl: bool) -> None:
    if kind == INT4:
        weight, scale = zeros(n // 8, k // 128, 32, 4, **INTS), zeros(k // 128, n, 2)
    else:
        weight, scale = zeros(n, k, dtype=kind), torch.zeros(n)
    small_linear_cuda(zeros(1, tokens, k), weight, None, None, 0.0, zeros(1, tokens, n) if residual else None, False, scale,
                      pdl=pdl)


def sample(rows: int, vocabulary: int, dtype: torch.dtype, pdl: bool) -> None:
    ids = zeros(rows, dtype=torch.int64)
    sample_tokens_cuda(torch.empty(rows, vocabulary, dtype=dtype), ids.float(), ids, ids, pdl=pdl)


def experts(tokens: int, count: int, each: int, n: int, k: int, transposed: bool, dtype: torch.dtype, pdl: bool) -> None:
    weight = torch.empty(count, *((k, n) if transposed else (n, k)), dtype=dtype)  # gigabytes, never touched
    bias = zeros(count, n, dtype=dtype) if transposed else None
    expert_linear_cuda(zeros(tokens, k, dtype=dtype), weight, bias, zeros(tokens, each, dtype=torch.int64), transposed,
                       path=None if tokens == 1 else "pairs" if tokens <= 128 else "sorted", pdl=pdl)


def gated_experts(tokens: int, count: int, each: int, n: int, k: int, clamped: bool, pdl: bool, lora: Sequence[Any] = ()
                  ) -> None:
    sizes = ((k, n), (n // 2, k)) if clamped else ((n, k), (k, n // 2))
    up, down = (torch.empty(count, *size, dtype=HALF) for size in sizes)
    x, ids = zeros(tokens, k), zeros(tokens, each, dtype=torch.int64)
    path = None if tokens == 1 else "pairs" if tokens * each <= 128 else "sorted"
    if clamped:
        expert_clamped_swiglu_cuda(x, up, zeros(count, n), down, zeros(count, k), ids, True, 1.702, 7.0, *lora, path=path,
                                   pdl=pdl)
    else:
        expert_swiglu_cuda(x, up, down, ids, False, *lora, path=path, pdl=pdl)


def adapted_experts(tokens: int, count: int, each: int, n: int, k: int, clamped: bool, rank: int, own: torch.dtype, every: bool
                    ) -> None:
    """With two adapters of both products, of every token or of each token's own."""
    sizes = ((n, k), (n, k), (k, n // 2), (k, n // 2))
    a, b = ([torch.empty(*shape, dtype=own) for shape in shapes] for shapes in (
        [(count * rank, k) for _, k in sizes], [(n, rank * count) for n, _ in sizes]))
    lora = (a, b, [2.0] * 4, [0] * 4 if every else [1, 2, 1, 2], 2)
    step: Any = SimpleNamespace(adapters=zeros(tokens, dtype=torch.int64))
    with running(step):
        gated_experts(tokens, count, each, n, k, clamped, False, lora)


def state(heads: int, kv_heads: int, dim: int, *, query_lens: list[int], causal: bool, kv_dtype: torch.dtype | None = None
          ) -> None:
    """Attention as a state: of cascades, trees and shared prefixes."""
    tokens = sum(query_lens)
    k = zeros(tokens, kv_heads, dim) if causal else None
    backend.attention_state(zeros(tokens, heads, dim), k, k, *cache_of(kv_heads, dim, dim, kv_dtype or HALF),
                            *tables(tokens, len(query_lens)), [], scale=0.1, softcap=None, causal=causal)


def contiguous(heads: int, kv_heads: int, dim: int, dim_v: int, *, kv_dtype: torch.dtype | None = None, sinks: bool = False,
               softcap: float | None = None, causal_state: bool = False) -> None:
    """Long prompts: the copy of the pages, and attention to it."""
    tokens, batch = 512, Batch(*tables(512, 2))
    of_heads, lse = zeros(heads) if sinks else None, torch.zeros(tokens, heads) if causal_state else None
    host.kernel_module("backends.triton.extend_contiguous").extend_contiguous(
        zeros(tokens, heads, dim), Caches(*cache_of(kv_heads, dim, dim_v, kv_dtype or HALF)), batch,
        Route(zeros(3, **INTS), tokens, not causal_state), of_heads, zeros(tokens, heads, dim_v), 0.1, softcap, lse)


def expanded(heads: int, nope: int, rope: int, dim_v: int, *, causal: bool) -> None:
    """Long prompts of MLA."""
    tokens, starts = 512, zeros(3, **INTS)
    host.kernel_module("backends.triton.extend_contiguous").attend_to_expanded(
        zeros(tokens, heads, nope + rope), zeros(tokens, heads * (nope + dim_v)), zeros(tokens, rope), starts, starts,
        scale=0.1, causal=causal)


def merge(tokens: int, heads: int, dim: int, states: int, dtype: torch.dtype) -> None:
    out, lse = zeros(tokens, states, heads, dim, dtype=dtype), torch.zeros(tokens, states, heads)
    merge_states_triton(out, lse)
    merge_state_triton(out[:, 0], lse[:, 0], out[:, 1], lse[:, 1])


def mla(heads: int, rank: int, rope: int, tokens: int, rows: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
        ) -> None:
    scales = [] if kv_dtype is None else [torch.zeros(2, 1, 16).transpose(1, 2) for _ in range(2)]
    q, c = zeros(heads, tokens, rank, dtype=dtype).transpose(0, 1), zeros(tokens, rank + rope, dtype=dtype)
    host.kernel_module("backends.triton.mla").mla(
        q, zeros(tokens, heads, rope, dtype=dtype), c[:, :rank], c[:, rank:],
        zeros(2, 16, 1, rank + rope, dtype=kv_dtype or dtype), Batch(*tables(tokens, rows)), [], 0.1, *scales)


def varlen(tokens: int, heads: int, kv_heads: int, dim: int, dim_v: int, dtype: torch.dtype, **options: Any) -> None:
    q, k, v = (zeros(tokens, h, d, dtype=dtype) for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, dim_v)))
    starts = zeros(5, **INTS)
    varlen_attention_cuda(q, k, v, starts, starts, scale=0.1, **options)


def tree(heads: int, kv_heads: int, dim: int, width: int, dtype: torch.dtype) -> None:
    tokens = 4 * width
    k = zeros(tokens, kv_heads, dim, dtype=dtype)
    tree_attention_state_triton(zeros(tokens, heads, dim, dtype=dtype), k, k, zeros(5, **INTS),
                                zeros(tokens, width, dtype=torch.bool), scale=0.1, softcap=None)


def lines(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Sparse prefill of dual_chunk."""
    q, k = zeros(256, heads, dim, dtype=dtype), zeros(512, kv_heads, dim, dtype=dtype)
    chosen = Lines(*(zeros(heads, 512, dtype=torch.bool) for _ in range(2)))
    attend_triton(q, k, k, 256, 0, chosen, scale=0.1, softcap=None, listed=Listed.of(chosen, kernel_block(q, dim)))


def sparse(heads: int, kv_heads: int, dim: int, rows: int, channels: int, dtype: torch.dtype) -> None:
    caches = [zeros(2, 16, kv_heads, dim, dtype=dtype) for _ in range(2)]
    labels = LayerLabels(zeros(2, 16, kv_heads, channels, dtype=dtype), zeros(kv_heads, channels, **INTS), True)
    decode_triton(zeros(rows, heads, dim, dtype=dtype), *caches, labels, zeros(rows, 512, **INTS), zeros(rows, **INTS),
                  Options(512, 1024, channels), 0.1, None)


def far_decode(heads: int, kv_heads: int, dim: int, rows: int, dtype: torch.dtype, form: RopeForm) -> None:
    """Decoding of dual_chunk, beyond a chunk."""
    caches = [zeros(2, 16, kv_heads, dim, dtype=dtype) for _ in range(2)]
    _, table, starts, lens = tables(rows, rows)
    q, cos = zeros(rows, heads, dim, dtype=dtype), zeros(4, dim // 2 if form.half_tables else dim, dtype=dtype)
    norm = zeros(dim, dtype=dtype) if form.norm_after or form.norm_offset is not None else None
    decode_by_chunk(q, q, host.Rope.of(cos, cos, norm, None, 0.0), form, *caches, table, starts, lens, 32768, 8192, 7168, 0.1,
                      None)


def lora_of_tokens(tokens: int, sizes: tuple[int, ...], rank: int, adapters: int, every: bool, own: torch.dtype) -> None:
    """Adapters of layers with one input: of every token, or of each token's own."""
    layers = [i for i in range(len(sizes)) for _ in range(adapters)]
    step: Any = None if every else SimpleNamespace(adapters=zeros(tokens, dtype=torch.int64))
    with running(step):
        lora_group_cuda(zeros(1, tokens, sum(sizes)).split(sizes, -1), zeros(1, tokens, 4096),
                        [zeros(rank, 4096, dtype=own) for _ in layers], [zeros(sizes[i], rank, dtype=own) for i in layers],
                        layers, [2.0] * len(layers), [0 if every else 1 << (i % adapters) for i in range(len(layers))])


def measured_on_an_h200(tokens: int, n: int, k: int, swiglu: bool, device: torch.device) -> Config | None:
    shipped = launch_config.STORE.load(launch_config.STORE.shipped) or {}
    found = shipped["NVIDIA H200"].get(launch_config.key(tokens, n, k, swiglu))
    return Config(*found) if found else None


def lora_layer(tokens: int, sizes: tuple[int, ...], swiglu: bool, rank: int, own: torch.dtype, every: bool) -> None:
    """A layer with two adapters of each part, of every token or of each token's own, with its norm or residual. Launched with
    what was measured on an H200: larger tiles than by rule."""
    of, n = [i for i in range(len(sizes)) for _ in range(2)], sum(sizes)
    norm, residual = (zeros(4096), None) if len(sizes) > 1 else (None, zeros(1, tokens, n))
    step: Any = SimpleNamespace(adapters=zeros(tokens, dtype=torch.int64))
    with running(step), mock.patch.object(lora_linear_module, "config_for", measured_on_an_h200):
        lora_linear_cuda(zeros(1, tokens, 4096), zeros(n, 4096), None, norm, 1e-5, residual, swiglu,
                         [zeros(rank, 4096, dtype=own) for _ in of], [zeros(sizes[i], rank, dtype=own) for i in of],
                         [sum(sizes[:i]) for i in of], [2.0] * len(of), [0 if every else 1 << (j % 2) for j in range(len(of))])


def chain(model: str, tile: int, num_warps: int) -> None:
    c = linear_chain.Chain.random(model, HALF, torch.device("cpu"))
    linear_chain.by_chain(zeros(1, c.o.shape[1]), zeros(1, c.o.shape[0]), c, zeros(3, dtype=torch.int64), SMS, tile, num_warps,
                          pdl=True)


def logprobs(rows: int, vocabulary: int, dtype: torch.dtype, filtered: bool, pdl: bool) -> None:
    heat = torch.zeros(rows)
    token_logprobs_cuda(torch.empty(rows, vocabulary, dtype=dtype), zeros(rows, dtype=torch.int64), heat,
                        heat if filtered else None, pdl=pdl)


def small_kernels(rows: int) -> None:
    """Kernels around attention and linear layers: positions, the page tables of FlashInfer, a norm in float16."""
    norm_apart(zeros(rows, 4096, dtype=torch.float16), zeros(4096, dtype=torch.float16), 1e-5, rows == 1)
    compute_position_triton(zeros(rows, **INTS), zeros(rows, **INTS), 100)
    pages.gather_pages[(rows, 2)](zeros(rows, 512, **INTS), zeros(4, rows + 1, **INTS), zeros(9, **INTS), 512, rows + 1,
                                  BLOCK=pages.BLOCK)


def others() -> Iterator[tuple[str, Callable[[], None]]]:
    """The cases of kernels that a model of llama's kind does not run, or not in its attention."""
    for (model, heads, rope), (batch, tokens, rows), dtype in product(
            (("deepseek-v2-lite", 16, 64), ("deepseek-v3", 128, 64), ("minicpm3", 40, 32)),
            (("decode 1", 1, 1), ("decode 32", 32, 32), ("decode 256", 256, 256), ("extend", 512, 1), ("mixed", 511, 64)),
            (HALF, FULL)):
        if dtype == HALF or (model, batch) == ("deepseek-v2-lite", "extend"):
            rank = 256 if model == "minicpm3" else 512
            yield f"mla {model} {batch} {dtype}", partial(mla, heads, rank, rope, tokens, rows, dtype)
    for kv_dtype, heads, tokens, rows in ((torch.float8_e4m3fn, 16, 32, 32), (torch.float8_e4m3fn, 128, 256, 256),
                                          (torch.float8_e4m3fn, 16, 256, 256), (torch.int8, 16, 512, 1)):
        yield f"quantized mla H={heads} {tokens} of {rows} {kv_dtype}", partial(
            mla, heads, 512, 64, tokens, rows, HALF, kv_dtype)
    for model, sizes in (("deepseek-v2-lite", (16, 128, 64, 128)), ("deepseek-v3", (128, 128, 64, 128)),
                         ("minicpm3", (40, 64, 32, 64))):
        for causal in (True, False):
            yield f"expanded {model} causal={causal}", partial(expanded, *sizes, causal=causal)
    for name, sizes, options in (
            ("mla prefill", (16, 16, 192, 128), {}), ("mla prefill causal", (16, 16, 192, 128), dict(causal=True)),
            ("mla prefill minicpm3", (40, 40, 96, 64), dict(causal=True)), ("dual_chunk", (32, 8, 128, 128), dict(causal=True)),
            ("qwen2_vl", (16, 16, 80, 80), {}), ("siglip", (16, 16, 72, 72), {}), ("clip", (16, 16, 64, 64), {}),
            ("softcap window", (16, 8, 256, 256), dict(softcap=50.0, window=64, causal=True))):
        for dtype in (HALF, FULL):
            yield f"varlen {name} {dtype}", partial(varlen, 1000, *sizes, dtype, **options)
    for causal, (batch, lens), kv in product((True, False), (
            ("decode 32", [1] * 32), ("shared prefix", [32]), ("mixed", [448, *[1] * 63])), ("bf16", "e4m3")):
        yield f"state {batch} causal={causal} {kv}", partial(state, 32, 8, 128, query_lens=lens, causal=causal, kv_dtype=KV[kv])
    for model, options in (("llama-8b", {}), ("llama-8b", dict(causal_state=True)), ("llama-8b", dict(kv_dtype=KV["e4m3"])),
                           ("gemma2-9b", dict(softcap=50.0)), ("gpt-oss-20b", dict(sinks=True)), ("deepseek-v2-lite", {})):
        yield f"contiguous {model} {' '.join(options)}".strip(), partial(contiguous, *HEADS[model][:4], **options)
    for dim, dtype in product((80, 128, 256), (HALF, FULL)):
        for tokens in (32, 1024):
            yield f"merge states of {tokens} x {dim} {dtype}", partial(merge, tokens, 32, dim, 3, dtype)
    for shape, width, dtype in product(((32, 8, 128), (16, 8, 256)), (4, 64), (HALF, FULL)):
        yield f"tree {width} of {shape[2]} {dtype}", partial(tree, *shape, width, dtype)
    for shape, rows, channels, dtype in product(((32, 8, 128), (16, 8, 256)), (1, 32), (16, None), (HALF, FULL)):
        count = channels or shape[2]
        yield f"sparse {count} of {shape[2]} {rows} {dtype}", partial(sparse, *shape, rows, count, dtype)
    for shape, rows, dtype in product(((32, 8, 128), (28, 4, 128), (16, 8, 256)), (1, 8), (HALF, FULL)):
        yield f"far decode {rows} of {shape[0]}x{shape[2]} {dtype}", partial(far_decode, *shape, rows, dtype, RopeForm())
    for model, form in FORMS.items():
        yield f"far decode as {model}", partial(far_decode, 32, 8, 128, 8, HALF, form)
    for shape, dtype in product(((28, 4, 128), (16, 8, 256)), (HALF, FULL)):
        yield f"lines of {shape[2]} {dtype}", partial(lines, *shape, dtype)
    for (name, sizes), (rank, tokens), (adapters, every), own in product(
            (("qkv", (4096, 1024, 1024)), ("down", (4096,))), ((16, 1), (128, 32)), ((1, True), (2, False)), (HALF, FULL)):
        yield f"lora rows {name} {rank} {tokens} {adapters} {own}", partial(
            lora_of_tokens, tokens, sizes, rank, adapters, every, own)
    for (name, sizes, swiglu), (rank, tokens), own in product(
            (("qkv", (4096, 1024, 1024), False), ("gate_up", (14336, 14336), True), ("o", (4096,), False)),
            ((16, 1), (16, 16), (16, 32), (128, 32), (16, 128)), (HALF, FULL)):
        yield f"lora linear {name} {rank} {tokens} {own}", partial(lora_layer, tokens, sizes, swiglu, rank, own, rank > 16)
    for (rows, vocabulary, pdl), dtype, filtered in product(((1, 128256, True), (256, 50257, False)), (HALF, FULL),
                                                             (False, True)):
        yield f"logprobs {rows} x {vocabulary} {dtype}{' filtered' * filtered}{' pdl' * pdl}", partial(
            logprobs, rows, vocabulary, dtype, filtered, pdl)
    for (columns, k, rows), dtype in product(((128, 8, 1), (128, 8, 400), (32, 4, 32), (256, 8, 32), (512, 16, 32)),
                                             (HALF, FULL)):
        yield f"topk {k} of {columns}, {rows} rows {dtype}", partial(topk_rows_cuda, zeros(rows, columns, dtype=dtype), k)
    for (experts, k), rows in product(((64, 2048), (256, 7168)), (1, 8, 32)):
        yield f"topk logits {experts} {k} {rows}", partial(
            float_linear_cuda, zeros(rows, k, dtype=HALF), zeros(experts, k, dtype=HALF))
    for name, experts, biased, dtype, *options in (
            ("deepseek-v2-lite", 64, False, FULL, 6, False, False, 0.0, 1, 1, 1),
            ("qwen3-30b-a3b", 128, False, HALF, 8, False, True, 0.0, 1, 1, 1),
            ("deepseek-v3", 256, True, FULL, 8, True, True, 1e-20, 8, 4, 2)):
        yield f"topk router {name}", partial(
            route_rows_cuda, zeros(32, experts, dtype=dtype), zeros(experts, dtype=FULL) if biased else None, *options)
    for (name, (count, each, layers, turned)), tokens, pdl in product(EXPERTS.items(), (1, 32, 2048), (False, True)):
        if tokens == 1 or not pdl:
            yield f"experts {name} {'clamped ' * turned}swiglu {tokens}{' pdl' * pdl}", partial(
                gated_experts, tokens, count, each, *layers[0], turned, pdl)
    for (name, (count, each, layers, turned)), tokens, (rank, own, every) in product(
            EXPERTS.items(), (1, 32, 2048), ((16, FULL, True), (16, HALF, False), (64, FULL, False))):
        if name != "deepseek-v2-lite" and (tokens == 32 or rank == 16):
            yield f"experts {name} lora {tokens} {rank} {own}{' every' * every}", partial(
                adapted_experts, tokens, count, each, *layers[0], turned, rank, own, every)
    for model, tile, num_warps in (("llama-1b", 32768, 16), ("qwen3-0.6b", 8192, 8), ("qwen2-7b", 8192, 16)):
        yield f"chain {model} {tile} {num_warps}", partial(chain, model, tile, num_warps)
    yield "small kernels", partial(small_kernels, 7)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, function that launches) of each case."""
    batches = {"decode 1": [1], "decode 8": [1] * 8, "decode 32": [1] * 32, "decode 256": [1] * 256, "extend": [512],
               "mixed": [448, *[1] * 63]}
    for (model, heads), (batch, lens) in product(HEADS.items(), batches.items()):
        yield f"{model} {batch}", partial(attention, *heads, query_lens=lens)
    llama = HEADS["llama-8b"]
    for (kv, kv_dtype), (batch, lens), rope in product(KV.items(), batches.items(), (False, True)):
        if kv_dtype is not None or rope:
            yield f"llama-8b {batch} {kv}{' rope' if rope else ''}", partial(
                attention, *llama, query_lens=lens, kv_dtype=kv_dtype, rope=rope)
    for kv, batch in product(("int8", "e4m3"), ("decode 1", "decode 8", "decode 256")):  # values by words of two codes
        yield f"llama-1b {batch} {kv}", partial(attention, 32, 8, 64, 64, {}, query_lens=batches[batch], kv_dtype=KV[kv])
    for (model, form), (batch, lens) in product(FORMS.items(), batches.items()):
        yield f"{model} {batch} rope {' '.join(form.options())}", partial(attention, *HEADS[model], query_lens=lens, form=form)
    for dtype, batch in product((torch.float16, FULL), ("decode 1", "mixed")):
        yield f"llama-8b {batch} {dtype}", partial(attention, *llama, query_lens=batches[batch], dtype=dtype)
    for dtype, (rows, vocabulary), pdl in product((HALF, torch.float16, FULL), ((1, 128256), (2048, 4096), (8, 50257)),
                                                  (False, True)):
        yield f"sample {rows} x {vocabulary} {dtype}{' pdl' * pdl}", partial(sample, rows, vocabulary, dtype, pdl)
    shapes = {"qkv": (6144, 4096, True, False, False), "o": (4096, 4096, False, True, False),
              "gate_up": (28672, 4096, True, False, True), "down": (4096, 14336, False, True, False),
              "odd": (1000, 1100, True, False, False)}
    for (name, layer), tokens, pdl in product(shapes.items(), (1, 8, 32), (False, True)):
        yield f"small_linear {name} {tokens}{' pdl' * pdl}", partial(linear, tokens, *layer, pdl)
    for tokens in (1, 8, 32):  # of gemma2-9b
        yield f"small_linear gelu {tokens}", partial(linear, tokens, 28672, 3584, False, False, True, tokens == 1, gelu=True)
    for (n, k, *rest), tokens in product(((4608, 3584, True, False, False), (37888, 3584, True, False, True),
                                          (3584, 18944, False, True, False)), (1, 8, 32)):  # of qwen2-7b
        shape = LinearShape(n, k, *rest, HALF)
        for config in candidates(tokens, shape, torch.device("cpu")):
            if memory_of(config, tokens, shape.swiglu) <= SHARED:  # measuring leaves the others out
                yield f"candidate linear {n} x {k} {tokens} {config[:4]} {config.rows}", partial(
                    linear, tokens, n, k, *rest, True, config)
    for kind, (n, k), tokens in product((torch.int8, torch.float8_e4m3fn, INT4), ((6144, 4096), (28672, 4096), (1000, 1100)),
                                        (1, 8, 32, 64, 256)):
        k -= k % 128 if kind == INT4 else 0
        yield f"quantized linear {n} x {k} {tokens} {kind}", partial(
            quantized_linear, tokens, n, k, kind, n == 6144, tokens == 1)
    for (name, (count, each, layers, turned)), which, tokens in product(EXPERTS.items(), (0, 1), (1, 32, 128, 400, 2048)):
        for dtype, pdl in product((HALF, torch.float16, FULL), (False, True)):
            if dtype != HALF and (pdl or which) or pdl and tokens not in (1, 2048):
                continue
            yield f"experts {name} {'down' if which else 'up'} {tokens} {dtype}{' pdl' * pdl}", partial(
                experts, tokens, count, each, *layers[which], turned, dtype, pdl)
    yield from others()


def main() -> None:
    """Compile all cases, or those whose name contains one of the arguments; print a line per kernel."""
    host.num_sms = lambda device: SMS  # type: ignore[assignment]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hopper")
    parser.add_argument("names", nargs="*", help="parts of names of cases (default: all cases)")
    parser.add_argument("--loops", action="store_true", help="count the instructions of the longest loop")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth case, from the Ith on")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    failed = 0
    with compiling(loops=args.loops) as found:
        for name, launch in itertools.islice(cases(), part - 1, None, parts):
            if args.names and not any(word in name for word in args.names):
                continue
            before = len(found)
            try:
                launch()
            except Exception as error:
                failed += 1
                print(f"FAILED {name}: {type(error).__name__}: {str(error).strip().splitlines()[-1]}", flush=True)
            for kernel in dict.fromkeys(found[before:]):
                print(describe(name, kernel), flush=True)
    print(f"{len(found)} kernels compiled, {failed} cases failed, {sum(k.spilled > 0 for k in found)} spilled")
    raise SystemExit(failed > 0)


def describe(name: str, kernel: Compiled) -> str:
    spilled = f", SPILLED {kernel.spilled} bytes ({kernel.reloads:.1%} of the loop)" if kernel.spilled else ""
    loop = f", {kernel.loop} instructions per iteration" if kernel.loop else ""
    return (f"{name:34s} {kernel.name:20s} {kernel.registers:3d} registers, {kernel.warps} warps, "
            f"{kernel.shared / 1024:5.1f} KiB shared{spilled}{loop}{', RACES' if kernel.races else ''}")
