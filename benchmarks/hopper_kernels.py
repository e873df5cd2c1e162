"""The cases of ``python -m benchmarks.hopper``: each Triton kernel as launched for the shapes of large models."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.hopper import Compiled, compiling
from quire.attn_ops.backends import triton as backend
from quire.attn_ops.kernels import host
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.ops.experts import expert_linear_cuda
from quire.attn_ops.ops.rope import RopeForm, rope_kv_write_cuda
from quire.attn_ops.ops.sampling import sample_tokens_cuda
from quire.attn_ops.ops.small_linear import small_linear_cuda

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
    small_linear_cuda(x, torch.zeros(n, k, dtype=kind), None, None, 0.0, res, False, torch.zeros(n), pdl=pdl)


def sample(rows: int, vocabulary: int, dtype: torch.dtype, pdl: bool) -> None:
    zeros = torch.zeros(rows, dtype=torch.int64)
    sample_tokens_cuda(torch.empty(rows, vocabulary, dtype=dtype), zeros.float(), zeros, zeros, pdl=pdl)


def experts(tokens: int, count: int, each: int, n: int, k: int, transposed: bool, dtype: torch.dtype, pdl: bool) -> None:
    weight = torch.empty(count, *((k, n) if transposed else (n, k)), dtype=dtype)  # gigabytes, never touched
    ids = torch.zeros(tokens, each, dtype=torch.int64)
    bias = torch.zeros(count, n, dtype=dtype) if transposed else None
    path = "pairs" if tokens <= 128 else "sorted"
    expert_linear_cuda(torch.zeros(tokens, k, dtype=dtype), weight, bias, ids, transposed, path=path, pdl=pdl)


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
    for kind, (n, k), tokens in itertools.product((torch.int8, torch.float8_e4m3fn), (
            (6144, 4096), (28672, 4096), (1000, 1100)), (1, 8, 32, 64, 256)):
        yield f"quantized linear {n} x {k} {tokens} {kind}", lambda a=(tokens, n, k, kind, n == 6144, tokens == 1): (
            quantized_linear(*a))
    for (name, (count, each, layers, turned)), layer, tokens in itertools.product(
            EXPERTS.items(), (0, 1), (1, 32, 128, 400, 2048)):
        for dtype, pdl in itertools.product((torch.bfloat16, torch.float16, torch.float32), (False, True)):
            if dtype != torch.bfloat16 and (pdl or layer):
                continue
            yield f"experts {name} {'up' if layer == 0 else 'down'} {tokens} {dtype}{' pdl' if pdl else ''}", lambda a=(
                tokens, count, each, *layers[layer], turned, dtype, pdl): experts(*a)


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
            f"{kernel.shared / 1024:5.1f} KiB shared{spilled}{loop}")
