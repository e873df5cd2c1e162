"""Attention of long prompts by the pages of the cache and by keys copied to contiguous memory, on a CUDA GPU.

    python benchmarks/extend.py --json extend.json --deadline 100
    python benchmarks/extend.py --json extend.json --flashinfer          # beside FlashInfer; it may compile for minutes
    python benchmarks/extend.py --json extend.json --tiles 64x64/4/3,128x128/8/3     # block_m x block_n / warps / stages

Each row has the TFLOP/s of triton's paged op by pages (``paged``) and by contiguous keys (``contiguous``, the copy included),
the time of the copy and of the kernel alone, and the estimates of ``extend_route.py``, all in microseconds. Only the two
products over visible keys count as operations. Results are written as they come, and no part begins after the deadline.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backends.triton import extend_route
from quire.attn_ops.backends.triton.plan import overridden
from quire.attn_ops.conformance.batches import planned, prepared
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches, kernel_module
from quire.attn_ops.registry import get_backend
from quire.graph_runner.bench.attention_op import OpBatch, Point, op_batch, work
from quire.graph_runner.bench.record import Record

#: name -> (sequences, scheduled tokens, tokens computed before)
SHAPES = {"8192 after 8192": (1, 8192, 8192), "1x16384": (1, 16384, 0), "8192 after 24576": (1, 8192, 24576),
          "64x1024": (64, 1024, 0), "1x2048": (1, 2048, 0), "512 after 16384": (1, 512, 16384), "4x4096": (4, 4096, 0)}
#: (query heads, KV heads, D): Llama-3.1-8B first
HEADS = [(32, 8, 128), (16, 8, 128), (32, 8, 64), (16, 8, 256), (8, 8, 128), (32, 4, 128), (32, 32, 64), (8, 1, 256)]
#: By head dim: block_m x block_n / warps / stages.
TILES = {128: "64x64/4/3,64x128/4/2,128x64/8/3,128x128/8/3,64x64/4/2,64x32/4/4,64x32/4/3,128x64/8/4,128x128/8/2",
         64: "64x64/4/3,64x128/4/3,128x64/8/3,128x128/8/3,64x64/4/4,64x128/4/2,128x64/4/3,128x128/4/3",
         256: "128x64/8/2,64x32/4/2,64x32/4/3,128x32/8/3,128x32/8/4,64x64/4/2,128x128/8/1"}
REPEATS, SLEEP = 5, 4_000_000  # cycles: 2 ms


def microseconds(call: Callable[[], Any]) -> float:
    """Device time of one call, the median; the host launches it while the GPU sleeps."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP)
        before.record()
        call()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3)
    return statistics.median(times)


class Attention:
    """One layer and batch, and the ways to attend."""

    def __init__(self, heads: int, kv_heads: int, dim: int, shape: str, page_size: int, kv_dtype: torch.dtype | None = None
                 ) -> None:
        count, new, before = SHAPES[shape]
        self.device, self.backend = torch.device("cuda"), get_backend("triton")
        self.site = AttentionSite(layer=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim,
                                  dtype=torch.bfloat16, scale=dim**-0.5)
        self.point = Point("extend", shape, [new] * count, [new + before] * count)
        self.batch: OpBatch = op_batch(self.site, self.point, page_size=page_size, device=self.device, kv_dtype=kv_dtype)
        self.flops = work(self.site, self.point, kv_dtype)[1]
        self.caches, self.kv_dtype = Caches(*self.batch.cache.of_layer(0)), kv_dtype

    def op(self, mode: str) -> tuple[float, torch.Tensor]:
        """Microseconds of the paged op, and its result. The rope's kernel writes the cache in a model: none is written here."""
        batch = self.batch
        with overridden(extend_route.RouteConfig, mode=mode), planned(self.backend, batch):
            given = prepared(self.backend, batch)

            def call() -> torch.Tensor:
                return self.backend.op(batch.q, None, None, *self.caches, *batch.tables, batch.sinks, given, **batch.options)

            return microseconds(call), call()

    def copied(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Contiguous keys and values, and where those of each sequence begin."""
        gather, meta = kernel_module("kernels.gather_kv"), self.batch.metadata
        starts = gather.kv_starts(meta.query_start_loc, meta.seq_lens)
        total = sum(self.point.seq_lens)
        return *gather.gather_kv(self.caches, meta.block_table_tensor, starts, total, self.site.dtype), starts

    def kernel(self, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor) -> float:
        """Microseconds of attention to the copied keys."""
        q, meta, module = self.batch.q, self.batch.metadata, kernel_module("backends.triton.extend_contiguous")
        out = torch.empty_like(q)
        return microseconds(lambda: module.attend_to_contiguous(
            q, keys, values, meta.query_start_loc, starts, None, out, self.site.scale, None, False))

    def estimates(self) -> tuple[float, float]:
        meta, site = self.batch.metadata, self.site
        return extend_route.seconds(
            meta.query_lens_cpu.numpy(), meta.seq_lens_cpu.numpy(), site.num_heads, site.num_kv_heads,
            (site.head_dim, site.head_dim_v), self.caches.k.dtype.itemsize, host.num_sms(self.device))

    def flashinfer(self) -> dict[str, float]:
        """TFLOP/s of FlashInfer's fa3 by pages and on contiguous keys."""
        import flashinfer

        site, meta = self.site, self.batch.metadata
        q, caches, made = self.batch.q, self.caches, dict(dtype=torch.int32, device=self.device)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        starts = torch.tensor([0, *itertools.accumulate(self.point.seq_lens)], **made)
        page = caches.k.shape[1]
        counts = [-(-n // page) for n in self.point.seq_lens]
        indices = torch.cat([row[:n] for row, n in zip(meta.block_table_tensor, counts, strict=True)])
        options = dict(causal=True, q_data_type=q.dtype, kv_data_type=q.dtype)
        sizes = (site.num_heads, site.num_kv_heads, site.head_dim)
        paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        paged.plan(meta.query_start_loc, torch.tensor([0, *itertools.accumulate(counts)], **made), indices,
                   torch.tensor([(n - 1) % page + 1 for n in self.point.seq_lens], **made), *sizes, page, **options)
        us = microseconds(lambda: paged.run(q, (caches.k, caches.v)))
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        ragged.plan(meta.query_start_loc, starts, *sizes, **options)
        keys, values, _ = self.copied()
        return {"flashinfer_paged": self.flops / us / 1e6,
                "flashinfer_ragged": self.flops / microseconds(lambda: ragged.run(q, keys, values)) / 1e6}


def compared(one: Attention) -> dict[str, Any]:
    paged, expected = one.op("never")
    contiguous, found = one.op("always")
    copy, kernel = microseconds(one.copied), one.kernel(*one.copied())
    return dict(paged=one.flops / paged / 1e6, contiguous=one.flops / contiguous / 1e6, kernel=one.flops / kernel / 1e6,
                paged_us=paged, contiguous_us=contiguous, copy_us=copy, kernel_us=kernel,
                estimates_us=[round(s * 1e6) for s in one.estimates()],
                error=float((expected.float() - found.float()).abs().max()))


def swept(one: Attention, tiles: str) -> Iterator[dict[str, Any]]:
    module, copied = kernel_module("backends.triton.extend_contiguous"), one.copied()
    for tile in tiles.split(","):
        sizes, warps, stages = tile.split("/")
        block_m, block_n = map(int, sizes.split("x"))
        with overridden(module.ContiguousConfig, block_m=block_m, block_n=block_n, warps=int(warps), stages=int(stages)):
            try:
                yield dict(tile=tile, kernel=one.flops / one.kernel(*copied) / 1e6)
            except Exception as error:  # a tile that the GPU has no room for
                yield dict(tile=tile, error=f"{type(error).__name__}: {error}"[:120])


def parts(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows, the most wanted first."""
    first = "8192 after 8192"
    grid = [(heads, shape) for heads in HEADS[:4] for shape in (SHAPES if heads == HEADS[0] else [first, "64x1024", "1x2048"])]
    for heads, shape in grid:
        yield dict(heads=heads, shape=shape, **compared(Attention(*heads, shape, args.page_size)))
    for heads in (HEADS[0], *HEADS[2:4]):
        one = Attention(*heads, first, args.page_size)
        yield from (dict(heads=heads, shape=first, **row) for row in swept(one, args.tiles or TILES[heads[2]]))
    for dtype in (torch.float8_e4m3fn, torch.int8):
        one = Attention(*HEADS[0], first, args.page_size, dtype)
        yield dict(heads=HEADS[0], shape=first, kv_dtype=str(dtype), **compared(one))
    for heads, shape in itertools.product(HEADS[4:], (first, "64x1024")):
        yield dict(heads=heads, shape=shape, **compared(Attention(*heads, shape, args.page_size)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--tiles")
    parser.add_argument("--flashinfer", action="store_true")
    parser.add_argument("--deadline", type=float, default=100.0, help="seconds from the start of the process")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    record = Record(args.json, torch.device("cuda"), args.deadline)

    def flashinfer() -> Iterator[dict[str, Any]]:
        for heads, shape in itertools.product((HEADS[0], HEADS[2], HEADS[3]), ("8192 after 8192", "1x16384", "64x1024")):
            yield dict(heads=heads, shape=shape, **Attention(*heads, shape, args.page_size).flashinfer())

    def measure(rows: Iterator[dict[str, Any]]) -> None:
        for row in rows:
            record.keep(row)

    record.measure("paged and contiguous", lambda: measure(parts(args)))
    if args.flashinfer:
        record.measure("flashinfer", lambda: measure(flashinfer()))


if __name__ == "__main__":
    main()
