"""The cases of ``python -m benchmarks.hopper``: each Triton kernel as launched for the shapes of large models."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.hopper import Compiled, compiling
from quire.attn_ops.backends import triton as backend
from quire.attn_ops.backends.double_sparsity import LayerLabels, Options, decode_triton
from quire.attn_ops.backends.dual_chunk.vertical_slash import Lines, Listed, attend_triton, kernel_block
from quire.attn_ops.backends.flashinfer import pages
from quire.attn_ops.backends.triton.extend_route import Route
from quire.attn_ops.backends.triton.plan import Batch
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.ops.experts import expert_linear_cuda, expert_swiglu_cuda
from quire.attn_ops.ops.float_linear import float_linear_cuda
from quire.attn_ops.ops.logprobs import token_logprobs_cuda
from quire.attn_ops.ops.lora import lora_expand_cuda
from quire.attn_ops.ops.lora_rows import lora_group_cuda
from quire.attn_ops.ops.merge_state import merge_state_triton, merge_states_triton
from quire.attn_ops.ops.positions import compute_position_triton
from quire.attn_ops.ops.rope import RopeForm, rope_kv_write_cuda
from quire.attn_ops.ops.routing import route_rows_cuda, topk_rows_cuda
from quire.attn_ops.ops.sampling import sample_tokens_cuda
from quire.attn_ops.ops.small_linear import small_linear_cuda
from quire.attn_ops.ops.tree import tree_attention_state_triton
from quire.attn_ops.ops.varlen import varlen_attention_cuda
from quire.attn_ops.step import running
from quire.attn_ops.tuning.launch_config import INT4

SMS = 132
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


def attention(heads: int, kv_heads: int, dim: int, dim_v: int, site: dict[str, Any], *, query_lens: list[int],
              dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None, rope: bool = False,
              form: RopeForm | None = None) -> None:
    """Call the backend's op: its launches compile, nothing runs."""
    tokens, rows = sum(query_lens), len(query_lens)
    cache = PagedKVCache(num_layers=1, num_pages=2, page_size=16, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v,
                         dtype=kv_dtype or dtype, device="cpu")
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim_v]
    qkv = torch.zeros(tokens, sum(sizes), dtype=dtype).split(sizes, 1)
    q, k, v = (x.unflatten(1, (-1, d)) for x, d in zip(qkv, (dim, dim, dim_v), strict=True))
    ints = dict(dtype=torch.int32)
    tables = (torch.zeros(tokens, dtype=torch.int64), torch.zeros(rows, 512, **ints), torch.zeros(rows + 1, **ints),
              torch.zeros(rows, **ints))
    sinks = torch.zeros(heads, dtype=dtype) if site.get("sinks") else None
    options = dict(scale=0.1, window=site.get("window"), softcap=site.get("softcap"), chunk=site.get("chunk"))
    rest = (*cache.of_layer(0), *tables, sinks, [torch.zeros(16384, **ints)])
    if rope or form is not None:
        form = form or RopeForm()
        cos = torch.zeros(tokens, dim // 2 if form.half_tables else dim, dtype=dtype)
        norm = torch.zeros(dim, dtype=dtype) if form.norm_after or form.norm_offset is not None else None
        # rope_kv_write's CUDA implementation, not the one for CPU tensors.
        backend.rope_kv_write = rope_kv_write_cuda
        backend.rope_paged_attention(q, k, v, cos, cos, norm, norm, 0.0, *rest, **options, **form.options())
    else:
        backend.paged_attention(q, k, v, *rest, **options)


def linear(tokens: int, n: int, k: int, norm: bool, residual: bool, swiglu: bool, pdl: bool) -> None:
    made = dict(dtype=torch.bfloat16)
    weight_norm = torch.zeros(k, **made) if norm else None
    res = torch.zeros(1, tokens, n, **made) if residual else None
    x, weight = torch.zeros(1, tokens, k, **made), torch.zeros(n, k, **made)
    small_linear_cuda(x, weight, None, weight_norm, 1e-5, res, swiglu, pdl=pdl)


def quantized_linear(tokens: int, n: int, k: int, kind: torch.dtype, residual: bool, pdl: bool) -> None:
    x = torch.zeros(1, tokens, k, dtype=torch.bfloat16)
    res = torch.zeros(1, tokens, n, dtype=torch.bfloat16) if residual else None
    if kind == INT4:
        weight, scale = torch.zeros(n // 8, k // 128, 32, 4, **INTS), torch.zeros(k // 128, n, 2, dtype=torch.bfloat16)
    else:
        weight, scale = torch.zeros(n, k, dtype=kind), torch.zeros(n)
    small_linear_cuda(x, weight, None, None, 0.0, res, False, scale, pdl=pdl)


def sample(rows: int, vocabulary: int, dtype: torch.dtype, pdl: bool) -> None:
    zeros = torch.zeros(rows, dtype=torch.int64)
    sample_tokens_cuda(torch.empty(rows, vocabulary, dtype=dtype), zeros.float(), zeros, zeros, pdl=pdl)


def experts(tokens: int, count: int, each: int, n: int, k: int, transposed: bool, dtype: torch.dtype, pdl: bool) -> None:
    weight = torch.empty(count, *((k, n) if transposed else (n, k)), dtype=dtype)  # gigabytes, never touched
    ids = torch.zeros(tokens, each, dtype=torch.int64)
    bias = torch.zeros(count, n, dtype=dtype) if transposed else None
    path = "pairs" if tokens <= 128 else "sorted"
    expert_linear_cuda(torch.zeros(tokens, k, dtype=dtype), weight, bias, ids, transposed, path=path, pdl=pdl)


def swiglu_experts(tokens: int, count: int, each: int, n: int, k: int, dtype: torch.dtype, pdl: bool) -> None:
    up, down = torch.empty(count, n, k, dtype=dtype), torch.empty(count, k, n // 2, dtype=dtype)
    ids = torch.zeros(tokens, each, dtype=torch.int64)
    expert_swiglu_cuda(torch.zeros(tokens, k, dtype=dtype), up, down, ids, False, path="pairs" if tokens * each <= 128 else
                       "sorted", pdl=pdl)


def state(heads: int, kv_heads: int, dim: int, *, query_lens: list[int], causal: bool, kv_dtype: torch.dtype | None = None
          ) -> None:
    """Attention as a state: of cascades, trees and shared prefixes."""
    tokens, rows, made = sum(query_lens), len(query_lens), dict(dtype=torch.bfloat16)
    cache = PagedKVCache(num_layers=1, num_pages=2, page_size=16, num_kv_heads=kv_heads, head_dim=dim,
                         dtype=kv_dtype or torch.bfloat16, device="cpu")
    k = torch.zeros(tokens, kv_heads, dim, **made) if causal else None
    tables = (torch.zeros(tokens, dtype=torch.int64), torch.zeros(rows, 512, **INTS), torch.zeros(rows + 1, **INTS),
              torch.zeros(rows, **INTS))
    backend.attention_state(torch.zeros(tokens, heads, dim, **made), k, k, *cache.of_layer(0), *tables,
                            [torch.zeros(16384, **INTS)], scale=0.1, softcap=None, causal=causal)


def contiguous(heads: int, kv_heads: int, dim: int, dim_v: int, *, kv_dtype: torch.dtype | None = None, sinks: bool = False,
               softcap: float | None = None, causal_state: bool = False) -> None:
    """Long prompts: the copy of the pages, and attention to it."""
    tokens, made = 512, dict(dtype=torch.bfloat16)
    cache = PagedKVCache(num_layers=1, num_pages=2, page_size=16, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v,
                         dtype=kv_dtype or torch.bfloat16, device="cpu")
    q, out = torch.zeros(tokens, heads, dim, **made), torch.zeros(tokens, heads, dim_v, **made)
    starts, rows = torch.zeros(3, **INTS), torch.zeros(2, **INTS)
    batch = Batch(torch.zeros(tokens, dtype=torch.int64), torch.zeros(2, 512, **INTS), starts, rows)
    of_heads, lse = torch.zeros(heads, **made) if sinks else None, torch.zeros(tokens, heads) if causal_state else None
    host.kernel_module("backends.triton.extend_contiguous").extend_contiguous(
        q, Caches(*cache.of_layer(0)), batch, Route(starts, tokens, not causal_state), of_heads, out, 0.1, softcap, lse)


def merge(tokens: int, heads: int, dim: int, states: int, dtype: torch.dtype) -> None:
    out, lse = torch.zeros(tokens, states, heads, dim, dtype=dtype), torch.zeros(tokens, states, heads)
    merge_states_triton(out, lse)
    merge_state_triton(out[:, 0], lse[:, 0], out[:, 1], lse[:, 1])


def mla(heads: int, rank: int, rope: int, tokens: int, rows: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
        ) -> None:
    cache = torch.zeros(2, 16, 1, rank + rope, dtype=kv_dtype or dtype)
    scales = [] if kv_dtype is None else [torch.zeros(2, 1, 16).transpose(1, 2) for _ in range(2)]
    batch = Batch(torch.zeros(tokens, dtype=torch.int64), torch.zeros(rows, 512, **INTS), torch.zeros(rows + 1, **INTS),
                  torch.zeros(rows, **INTS))
    q, q_rope = torch.zeros(heads, tokens, rank, dtype=dtype).transpose(0, 1), torch.zeros(tokens, heads, rope, dtype=dtype)
    c = torch.zeros(tokens, rank + rope, dtype=dtype)
    host.kernel_module("backends.triton.mla").mla(q, q_rope, c[:, :rank], c[:, rank:], cache, batch, 0.1, *scales)


def varlen(tokens: int, heads: int, kv_heads: int, dim: int, dim_v: int, dtype: torch.dtype, **options: Any) -> None:
    q, k, v = (torch.zeros(tokens, h, d, dtype=dtype) for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, dim_v)))
    starts = torch.zeros(5, **INTS)
    varlen_attention_cuda(q, k, v, starts, starts, scale=0.1, **options)


def tree(heads: int, kv_heads: int, dim: int, width: int, dtype: torch.dtype) -> None:
    tokens = 4 * width
    q, k = torch.zeros(tokens, heads, dim, dtype=dtype), torch.zeros(tokens, kv_heads, dim, dtype=dtype)
    mask = torch.zeros(tokens, width, dtype=torch.bool)
    tree_attention_state_triton(q, k, k, torch.zeros(5, **INTS), mask, scale=0.1, softcap=None)


def lines(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Sparse prefill of dual_chunk."""
    q, k = torch.zeros(256, heads, dim, dtype=dtype), torch.zeros(512, kv_heads, dim, dtype=dtype)
    chosen = Lines(*(torch.zeros(heads, 512, dtype=torch.bool) for _ in range(2)))
    block = kernel_block(q, dim)
    attend_triton(q, k, k, 256, 0, chosen, scale=0.1, softcap=None, listed=Listed.of(chosen, block))


def sparse(heads: int, kv_heads: int, dim: int, rows: int, channels: int, dtype: torch.dtype) -> None:
    caches = [torch.zeros(2, 16, kv_heads, dim, dtype=dtype) for _ in range(2)]
    labels = LayerLabels(torch.zeros(2, 16, kv_heads, channels, dtype=dtype), torch.zeros(kv_heads, channels, **INTS), True)
    decode_triton(torch.zeros(rows, heads, dim, dtype=dtype), *caches, labels, torch.zeros(rows, 512, **INTS),
                  torch.zeros(rows, **INTS), Options(512, 1024, channels), 0.1, None)


def lora(tokens: int, sizes: tuple[int, ...], rank: int, residual: bool, dtype: torch.dtype) -> None:
    """Adapters of sibling layers, whose first products lie beside the layers' own."""
    n, width = sum(sizes), sum(sizes) + len(sizes) * rank
    product = torch.zeros(1, tokens, width, dtype=dtype)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    lora_expand_cuda(product, product, torch.zeros(n, rank, dtype=dtype), sizes, starts,
                     [n + i * rank for i in range(len(sizes))], [2.0] * len(sizes),
                     torch.zeros(1, tokens, n, dtype=dtype) if residual else None)


def lora_of_tokens(tokens: int, sizes: tuple[int, ...], rank: int, adapters: int, every: bool, own: torch.dtype) -> None:
    """Adapters of layers with one input: of every token, or of each token's own."""
    base, x = torch.zeros(1, tokens, sum(sizes), dtype=torch.bfloat16), torch.zeros(1, tokens, 4096, dtype=torch.bfloat16)
    layers = [i for i in range(len(sizes)) for _ in range(adapters)]
    step: Any = None if every else SimpleNamespace(adapters=torch.zeros(tokens, dtype=torch.int64))
    with running(step):
        lora_group_cuda(base.split(sizes, -1), x, [torch.zeros(rank, 4096, dtype=own) for _ in layers],
                        [torch.zeros(sizes[i], rank, dtype=own) for i in layers], layers, [2.0] * len(layers),
                        [0 if every else 1 << (i % adapters) for i in range(len(layers))])


def logprobs(rows: int, vocabulary: int, dtype: torch.dtype, filtered: bool, pdl: bool) -> None:
    heat = torch.zeros(rows)
    token_logprobs_cuda(torch.empty(rows, vocabulary, dtype=dtype), torch.zeros(rows, dtype=torch.int64), heat,
                        heat if filtered else None, pdl=pdl)


def small_kernels(rows: int) -> None:
    """Kernels around attention: positions, and the page tables of FlashInfer."""
    compute_position_triton(torch.zeros(rows, **INTS), torch.zeros(rows, **INTS), 100)
    table = torch.zeros(4, rows + 1, **INTS)
    pages.gather_pages[(rows, 2)](torch.zeros(rows, 512, **INTS), table, torch.zeros(9, **INTS), 512, rows + 1,
                                  BLOCK=pages.BLOCK)


def others() -> Iterator[tuple[str, Callable[[], None]]]:
    """The cases of kernels that a model of llama's kind does not run, or not in its attention."""
    half, full = torch.bfloat16, torch.float32
    for (model, heads, rope), (batch, tokens, rows), dtype in itertools.product(
            (("deepseek-v2-lite", 16, 64), ("deepseek-v3", 128, 64), ("minicpm3", 40, 32)),
            (("decode 1", 1, 1), ("decode 32", 32, 32), ("decode 256", 256, 256), ("extend", 512, 1), ("mixed", 511, 64)),
            (half, full)):
        if dtype == half or (model, batch) == ("deepseek-v2-lite", "extend"):
            rank = 256 if model == "minicpm3" else 512
            yield f"mla {model} {batch} {dtype}", lambda a=(heads, rank, rope, tokens, rows, dtype): mla(*a)
    for kv_dtype, heads, tokens, rows in ((torch.float8_e4m3fn, 16, 32, 32), (torch.float8_e4m3fn, 128, 256, 256),
                                          (torch.int8, 16, 512, 1)):
        yield (f"quantized mla H={heads} {tokens} of {rows} {kv_dtype}",
               lambda a=(heads, 512, 64, tokens, rows, half, kv_dtype): mla(*a))
    for name, sizes, options in (
            ("mla prefill", (16, 16, 192, 128), {}), ("mla prefill causal", (16, 16, 192, 128), dict(causal=True)),
            ("mla prefill minicpm3", (40, 40, 96, 64), dict(causal=True)), ("dual_chunk", (32, 8, 128, 128), dict(causal=True)),
            ("qwen2_vl", (16, 16, 80, 80), {}), ("siglip", (16, 16, 72, 72), {}), ("clip", (16, 16, 64, 64), {}),
            ("softcap window", (16, 8, 256, 256), dict(softcap=50.0, window=64, causal=True))):
        for dtype in (half, full):
            yield f"varlen {name} {dtype}", lambda a=sizes, d=dtype, o=options: varlen(1000, *a, d, **o)
    for causal, (batch, lens), kv in itertools.product((True, False), (
            ("decode 32", [1] * 32), ("shared prefix", [32]), ("mixed", [448, *[1] * 63])), ("bf16", "e4m3")):
        yield f"state {batch} causal={causal} {kv}", lambda n=lens, c=causal, t=KV[kv]: state(
            32, 8, 128, query_lens=n, causal=c, kv_dtype=t)
    for model, options in (("llama-8b", {}), ("llama-8b", dict(causal_state=True)), ("llama-8b", dict(kv_dtype=KV["e4m3"])),
                           ("gemma2-9b", dict(softcap=50.0)), ("gpt-oss-20b", dict(sinks=True)), ("deepseek-v2-lite", {})):
        name = f"contiguous {model} {' '.join(options)}".strip()
        yield name, lambda h=HEADS[model][:4], o=options: contiguous(*h, **o)
    for dim, dtype in itertools.product((80, 128, 256), (half, full)):
        yield f"merge states of {dim} {dtype}", lambda a=(32, 32, dim, 3, dtype): merge(*a)
    for (heads, kv_heads, dim), width, dtype in itertools.product(((32, 8, 128), (16, 8, 256)), (4, 64), (half, full)):
        yield f"tree {width} of {dim} {dtype}", lambda a=(heads, kv_heads, dim, width, dtype): tree(*a)
    for (heads, kv_heads, dim), channels, dtype in itertools.product(((32, 8, 128), (16, 8, 256)), (16,), (half, full)):
        yield f"sparse {channels} of {dim} {dtype}", lambda a=(heads, kv_heads, dim, 32, channels, dtype): sparse(*a)
    for (heads, kv_heads, dim), dtype in itertools.product(((28, 4, 128), (16, 8, 256)), (half, full)):
        yield f"lines of {dim} {dtype}", lambda a=(heads, kv_heads, dim, dtype): lines(*a)
    for (name, sizes, residual), (rank, tokens) in itertools.product(
            (("qkv", (4096, 1024, 1024), False), ("gate_up", (14336, 14336), False), ("down", (4096,), True)),
            ((4, 1), (16, 8), (64, 32), (128, 32))):
        yield f"lora {name} {rank} {tokens}", lambda a=(tokens, sizes, rank, residual, half): lora(*a)
    for (name, sizes), (rank, tokens), (adapters, every), own in itertools.product(
            (("qkv", (4096, 1024, 1024)), ("down", (4096,))), ((16, 1), (128, 32)), ((1, True), (2, False)), (half, full)):
        yield f"lora rows {name} {rank} {tokens} {adapters} {own}", lambda a=(tokens, sizes, rank, adapters, every, own): (
            lora_of_tokens(*a))
    for (rows, vocabulary, pdl), dtype, filtered in itertools.product(((1, 128256, True), (256, 50257, False)), (half, full),
                                                                       (False, True)):
        name = f"logprobs {rows} x {vocabulary} {dtype}{' filtered' if filtered else ''}{' pdl' if pdl else ''}"
        yield name, lambda a=(rows, vocabulary, dtype, filtered, pdl): logprobs(*a)
    for columns, k, rows in ((128, 8, 1), (128, 8, 400), (32, 4, 32), (256, 8, 32), (512, 16, 32)):
        for dtype in (half, full):
            yield f"topk {k} of {columns}, {rows} rows {dtype}", lambda n=(rows, columns), k=k, d=dtype: topk_rows_cuda(
                torch.zeros(n, dtype=d), k)
    for (experts, k), rows in itertools.product(((64, 2048), (256, 7168)), (1, 8, 32)):
        yield f"topk logits {experts} {k} {rows}", lambda n=experts, k=k, r=rows: float_linear_cuda(
            torch.zeros(r, k, dtype=half), torch.zeros(n, k, dtype=half))
    for name, experts, biased, dtype, *options in (
            ("deepseek-v2-lite", 64, False, full, 6, False, False, 0.0, 1, 1, 1),
            ("qwen3-30b-a3b", 128, False, half, 8, False, True, 0.0, 1, 1, 1),
            ("deepseek-v3", 256, True, full, 8, True, True, 1e-20, 8, 4, 2)):
        yield f"topk router {name}", lambda n=experts, b=biased, d=dtype, o=options: route_rows_cuda(
            torch.zeros(32, n, dtype=d), torch.zeros(n) if b else None, *o)
    for (name, (count, each, layers, turned)), tokens, pdl in itertools.product(EXPERTS.items(), (1, 32, 2048), (False, True)):
        if not turned and (tokens == 1 or not pdl):
            yield f"experts {name} swiglu {tokens}{' pdl' if pdl else ''}", lambda a=(
                tokens, count, each, *layers[0], torch.bfloat16, pdl): swiglu_experts(*a)
    yield "small kernels", lambda: small_kernels(7)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, function that launches) of each case."""
    batches = {"decode 1": [1], "decode 8": [1] * 8, "decode 32": [1] * 32, "decode 256": [1] * 256, "extend": [512],
               "mixed": [448, *[1] * 63]}
    for (model, heads), (batch, lens) in itertools.product(HEADS.items(), batches.items()):
        yield f"{model} {batch}", lambda h=heads, n=lens: attention(*h, query_lens=n)
    for (kv, kv_dtype), (batch, lens), rope in itertools.product(KV.items(), batches.items(), (False, True)):
        if kv_dtype is not None or rope:
            yield f"llama-8b {batch} {kv}{' rope' if rope else ''}", lambda n=lens, t=kv_dtype, r=rope: attention(
                *HEADS["llama-8b"], query_lens=n, kv_dtype=t, rope=r)
    for (model, form), (batch, lens) in itertools.product(FORMS.items(), batches.items()):
        yield f"{model} {batch} rope {' '.join(form.options())}", lambda m=model, n=lens, f=form: attention(
            *HEADS[m], query_lens=n, form=f)
    for dtype in (torch.float16, torch.float32):
        for batch in ("decode 1", "mixed"):
            yield f"llama-8b {batch} {dtype}", lambda n=batches[batch], t=dtype: attention(
                *HEADS["llama-8b"], query_lens=n, dtype=t)
    for dtype, (rows, vocabulary), pdl in itertools.product(
            (torch.bfloat16, torch.float16, torch.float32), ((1, 128256), (2048, 4096), (8, 50257)), (False, True)):
        name = f"sample {rows} x {vocabulary} {dtype}{' pdl' if pdl else ''}"
        yield name, lambda a=(rows, vocabulary, dtype, pdl): sample(*a)
    shapes = {"qkv": (6144, 4096, True, False, False), "o": (4096, 4096, False, True, False),
              "gate_up": (28672, 4096, True, False, True), "down": (4096, 14336, False, True, False),
              "odd": (1000, 1100, True, False, False)}
    for (name, shape), tokens, pdl in itertools.product(shapes.items(), (1, 8, 32), (False, True)):
        yield f"small_linear {name} {tokens}{' pdl' if pdl else ''}", lambda s=shape, t=tokens, p=pdl: linear(t, *s, p)
    for kind, (n, k), tokens in itertools.product((torch.int8, torch.float8_e4m3fn, INT4), (
            (6144, 4096), (28672, 4096), (1000, 1100)), (1, 8, 32, 64, 256)):
        k -= k % 128 if kind == INT4 else 0
        yield f"quantized linear {n} x {k} {tokens} {kind}", lambda a=(tokens, n, k, kind, n == 6144, tokens == 1): (
            quantized_linear(*a))
    for (name, (count, each, layers, turned)), layer, tokens in itertools.product(
            EXPERTS.items(), (0, 1), (1, 32, 128, 400, 2048)):
        for dtype, pdl in itertools.product((torch.bfloat16, torch.float16, torch.float32), (False, True)):
            if dtype != torch.bfloat16 and (pdl or layer) or pdl and tokens not in (1, 2048):
                continue
            yield f"experts {name} {'up' if layer == 0 else 'down'} {tokens} {dtype}{' pdl' if pdl else ''}", lambda a=(
                tokens, count, each, *layers[layer], turned, dtype, pdl): experts(*a)
    yield from others()


def as_an_h200() -> None:
    host.num_sms = lambda device: SMS  # type: ignore[assignment]


def main() -> None:
    """Compile all cases, or those whose name contains one of the arguments; print a line per kernel."""
    as_an_h200()
    failed, words = 0, [word for word in sys.argv[1:] if word != "--loops"]
    with compiling(loops="--loops" in sys.argv) as found:
        for name, launch in cases():
            if words and not any(word in name for word in words):
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
