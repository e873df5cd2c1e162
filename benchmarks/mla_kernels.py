"""Time the MLA op on the latent cache alone, by backend and shape, on a CUDA GPU.

    python benchmarks/mla_kernels.py --backend triton,flashinfer_mla --json results.json
    python benchmarks/mla_kernels.py --heads 16 --batch 1,32 --set block_n=64,stages=2     # triton's MlaConfig

The op includes both products with kv_b. ``floor`` is the bytes of a decode (latent vectors, kv_b, queries and outputs) at the
bandwidth of a copy on the same GPU, as a share of the time; for prefill the operations of attention with keys and values of all
heads are given per second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite, Latent
from quire.attn_ops.backends.triton import plan
from quire.attn_ops.conformance.batches import planned, prepared, scattered
from quire.attn_ops.kernels.host import kernel_module
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.registry import get_backend
from quire.graph_runner.bench.attention_op import COPIES, on_the_device
from quire.graph_runner.bench.roofline import copy_bandwidth

NOPE, DIM_V, LATENT = 128, 128, Latent(512, 64)
PREFILLS = {"1x4096": ([4096], [4096]), "8x1024": ([1024] * 8, [1024] * 8), "1x2048 after 30k": ([2048], [32768])}


def measure(name: str, heads: int, query_lens: list[int], seq_lens: list[int], page_size: int, bandwidth: float
            ) -> dict[str, Any]:
    """Microseconds of one call, caches in turn so that none stays in L2; decodes in a CUDA graph."""
    backend, device, dtype = get_backend(name), torch.device("cuda"), torch.bfloat16
    dim = NOPE + LATENT.rope
    site = AttentionSite(layer=0, num_heads=heads, num_kv_heads=heads, head_dim=dim, head_dim_v=DIM_V, dtype=dtype,
                         scale=dim**-0.5, latent=LATENT)
    _, meta, pages = scattered(query_lens, seq_lens, page_size=page_size, device=device)
    cache = PagedKVCache.for_sites([site], num_pages=pages, page_size=page_size, device=device)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    caches = [cache.k[0], *(torch.randn_like(cache.k[0]) for _ in range(max(1, min(COPIES, 4 * l2 // cache.num_bytes))))]
    tokens = sum(query_lens)
    q, new, kv_b = (torch.randn(*shape, dtype=dtype, device=device) for shape in (
        (tokens, heads, dim), (tokens, sum(LATENT)), (heads * (NOPE + DIM_V), LATENT.rank)))
    kv_b *= LATENT.rank**-0.5
    tables = (meta.slot_mapping, meta.block_table_tensor, meta.query_start_loc, meta.seq_lens)
    decode = meta.max_query_len == 1
    batch: Any = SimpleNamespace(cache=cache, metadata=meta, site=site, tables=tables)
    with planned(backend, batch, graph_key="bench" if decode else None, capturing=decode):
        given = prepared(backend, batch)

        def call(i: int) -> None:
            backend.mla_op(q, *new.split(LATENT, dim=1), kv_b, caches[i % len(caches)], *tables, given, scale=site.scale)

        us = on_the_device(call, captured=decode).us
    size = 2 * (sum(seq_lens) * sum(LATENT) + kv_b.numel() + tokens * heads * (dim + DIM_V))
    pairs = sum(n * (2 * total - n + 1) // 2 for n, total in zip(query_lens, seq_lens, strict=True))
    return dict(backend=name, heads=heads, us=us, floor=size / bandwidth * 1e6 / us,
                tflop_per_s=2 * pairs * heads * (dim + DIM_V) / us / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--heads", default="16,128")
    parser.add_argument("--batch", default="1,8,32,128")
    parser.add_argument("--ctx", default="1024,8192")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--set", default="", help="fields of triton's MlaConfig, as block_n=64,stages=2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    params = {name: int(number) for name, number in (each.split("=") for each in args.set.split(",") if each)}
    tuned = plan.overridden(kernel_module("backends.triton.mla").MlaConfig, **params) if params else contextlib.nullcontext()
    bandwidth, rows = copy_bandwidth(torch.device("cuda")), []
    batches, contexts = (list(map(int, given.split(","))) for given in (args.batch, args.ctx))
    points = {f"decode {b}x{n}": ([1] * b, [n] * b) for n in contexts for b in batches}
    with tuned, torch.no_grad():
        for heads in map(int, args.heads.split(",")):
            for shape, (query_lens, seq_lens) in (points | PREFILLS).items():
                for name in args.backend.split(","):
                    row = dict(shape=shape, **measure(name, heads, query_lens, seq_lens, args.page_size, bandwidth))
                    rows.append(row)
                    print(f"{shape:18} H={heads:<4} {name:15} {row['us']:9.1f} us  floor {row['floor']:5.0%}  "
                          f"{row['tflop_per_s']:6.1f} TFLOP/s", flush=True)
    if args.json:
        found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
