"""Time the paged attention op alone, by backend and shape, on a CUDA GPU.

    python benchmarks/attention_kernels.py --backend triton,flashinfer --json results.json
    python benchmarks/attention_kernels.py --sweep --only decode --batch 1,32 --ctx 1024   # triton's parameters
    python benchmarks/attention_kernels.py --set block_n=128,stages=5 --only decode

Each number is the median over replays of a CUDA graph that holds 20 calls, divided by 20. The calls go through several
caches in turn, together at least 8 times the L2 cache, so that keys come from memory, as they do in a model. Host
work before a step (``plan``, ``prepare``) is not in it. ``host`` is the time of one eager call on the host. Decode is
measured against the bytes of keys, values, their scales, queries and outputs, and the bandwidth of a copy; prefill
against the operations of the two matrix products over visible keys only. """

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from attn_ops.backend import AttentionBackend, get_backend
from attn_ops.kv_cache import vector_bytes
from attn_ops.step import Step, StepLimits, running
from graph_runner.loading import kv_dtype
from tests.attn_ops.cases import Case, make_case

CALLS = 20
DECODE_BATCHES = (1, 8, 32, 128, 256)
DECODE_CONTEXTS = (1024, 2048, 8192)
#: name -> (query tokens, tokens after the step) of each sequence
PREFILLS = {
    "1x4096": ([4096], [4096]), "8x1024+4096": ([1024] * 8, [5120] * 8), "1x960": ([960], [960]),
    "1x64+8128": ([64], [8192]), "63x1,448": ([1] * 63 + [448], [2048] * 64),
}
#: Values tried, one parameter after another, each time keeping the best.
SWEEPS = {
    "decode": [("block_n", (32, 64, 128)), ("stages", (2, 3, 5, 7)), ("warps", (2, 4, 8)), ("dot", (True, False)),
               ("chunk_min", (64, 128, 256, 512, 1024, 2048)), ("max_splits", (16, 64)), ("atomic", (True, False)),
               ("stages", (2, 3, 5))],
    "prefill": [("block_m", (64, 128)), ("block_n", (32, 64, 128)), ("warps", (4, 8)), ("stages", (2, 3, 5)),
                ("chunk_min", (256, 512, 1024)), ("warps", (4, 8))],
}


def median_us(graph: torch.cuda.CUDAGraph, replays: int = 30) -> float:
    """Device time of one call in a graph of CALLS calls."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for _ in range(3):
        graph.replay()
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3 / CALLS


def copy_bandwidth() -> float:
    """Bytes/s of a device-to-device copy, reads and writes counted."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            target.copy_(source)
    return 2 * source.numel() / (median_us(graph, 5) * 1e-6)


def build(args: argparse.Namespace, query_lens: list[int], seq_lens: list[int]) -> tuple[Case, list[tuple]]:
    """A case and caches to go through in turn."""
    case = make_case(
        query_lens, seq_lens, num_heads=args.heads, num_kv_heads=args.kv_heads, head_dim=args.dim, page_size=args.page,
        layout=args.layout, dtype=getattr(torch, args.dtype), device="cuda", window=args.window, poison=0.0,
        expect=False, kv_dtype=kv_dtype(args.kv_dtype), table_width=-(-max(max(seq_lens), args.max_len) // args.page))
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    count = max(2, min(CALLS, -(-8 * l2 // case.cache.num_bytes)))
    caches = [case.cache.of_layer(0)]
    caches += [tuple(None if t is None else t.clone() for t in caches[0]) for _ in range(count - 1)]
    return case, caches


def measure(backend: AttentionBackend, case: Case, caches: list[tuple]) -> tuple[float, float]:
    """(device us, host us) of one call."""
    m = case.metadata
    step = Step(case.cache, m, attention=backend)
    if backend.make_state is not None:
        limits = StepLimits(m.seq_lens.shape[0], m.num_tokens, m.block_table_tensor.shape[1])
        step.states[backend.name] = backend.make_state([case.site], case.cache, limits)
    with running(step):
        if backend.plan is not None:
            backend.plan(m, step)
        prepared: Any = ()
        if backend.prepare is not None:
            prepared = backend.prepare(m.slot_mapping, m.block_table_tensor, m.query_start_loc, m.seq_lens, m.page_size)
        arguments = case.arguments(prepared)

        def call(i: int) -> None:
            backend.op(*arguments[:3], *caches[i % len(caches)], *arguments[7:], **case.options)

        call(0)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(CALLS):
            call(i)
        host = (time.perf_counter() - begin) * 1e6 / CALLS
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(CALLS):
                call(i)
        return median_us(graph), host


def work(args: argparse.Namespace, query_lens: list[int], seq_lens: list[int]) -> tuple[int, int]:
    """(bytes, floating-point operations) that the call cannot do without."""
    keys = pairs = 0
    for query, seq in zip(query_lens, seq_lens, strict=True):
        visible = [min(p + 1, args.window or p + 1) for p in range(seq - query, seq)]
        pairs += sum(visible)
        keys += min(seq, (args.window or seq) + query - 1)
    dtype = getattr(torch, args.dtype)
    size = keys * args.kv_heads * vector_bytes(args.dim, args.dim, kv_dtype(args.kv_dtype) or dtype)
    size += 2 * sum(query_lens) * args.heads * args.dim * dtype.itemsize
    return size, 4 * pairs * args.heads * args.dim


def overridden(kind: str, params: dict[str, Any]) -> contextlib.AbstractContextManager:
    if not params:
        return contextlib.nullcontext()
    from attn_ops.backends.triton import decode, extend

    return (decode if kind == "decode" else extend).overridden(**params)


def report(kind: str, name: str, backend: str, params: dict, size: int, flops: int, us: float, host: float,
           bandwidth: float) -> dict:
    row = dict(kind=kind, shape=name, backend=backend, params=params, us=us, host_us=host,
               gb_per_s=size / us / 1e3, copy_share=size / us * 1e6 / bandwidth, tflop_per_s=flops / us / 1e6)
    words = " ".join(f"{n}={v}" for n, v in params.items())
    print(f"{kind:8s}{name:16s}{backend:12s}{us:9.2f} us {row['gb_per_s']:7.0f} GB/s {row['copy_share']:6.1%} of copy "
          f"{row['tflop_per_s']:7.1f} TFLOP/s   host {host:5.1f} us   {words}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton", help="names, with commas between")
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--batch", help=f"decode batch sizes (default {DECODE_BATCHES})")
    parser.add_argument("--ctx", help=f"decode contexts (default {DECODE_CONTEXTS})")
    parser.add_argument("--prefill", help=f"prefill shapes, with blanks between (default {' '.join(PREFILLS)})")
    parser.add_argument("--set", default="", help="parameters of the triton backend: name=value,...")
    parser.add_argument("--sweep", action="store_true", help="search the triton backend's parameters for each shape")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--layout", default="NHD", choices=("NHD", "HND"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="auto", help="of the cache: auto (--dtype), int8, fp8, fp8_e5m2")
    parser.add_argument("--window", type=int)
    parser.add_argument("--max-len", type=int, default=8192, help="tokens that the block table has room for")
    parser.add_argument("--json", help="write the results there")
    args = parser.parse_args()
    fixed = {n: json.loads(v.lower()) for n, v in (item.split("=") for item in args.set.split(",") if item)}

    import triton

    bandwidth = copy_bandwidth()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    conditions = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__,
                      commit=commit, copy_gb_per_s=bandwidth / 1e9, command=" ".join(sys.argv), calls=CALLS)
    print(json.dumps(conditions), flush=True)
    shapes: list[tuple[str, str, list[int], list[int]]] = []
    if args.only != "prefill":
        numbers = [[int(n) for n in text.split(",")] if text else default for text, default in
                   ((args.batch, DECODE_BATCHES), (args.ctx, DECODE_CONTEXTS))]
        shapes += [("decode", f"B={b} ctx={c}", [1] * b, [c] * b) for c in numbers[1] for b in numbers[0]]
    if args.only != "decode":
        shapes += [("prefill", name, *PREFILLS[name]) for name in (args.prefill or " ".join(PREFILLS)).split()]
    rows = []
    for kind, name, query_lens, seq_lens in shapes:
        case, caches = build(args, query_lens, seq_lens)
        size, flops = work(args, query_lens, seq_lens)

        def timed(backend: str, params: dict, kind=kind, name=name, case=case, caches=caches, size=size, flops=flops):
            try:
                with overridden(kind, params if backend == "triton" else {}):
                    us, host = measure(get_backend(backend), case, caches)
            except Exception as error:  # a variant that needs too much shared memory, say: on record, and go on
                print(f"{kind:8s}{name:16s}{backend:12s}failed with {params}: {type(error).__name__}: {error}"[:300])
                rows.append(dict(kind=kind, shape=name, backend=backend, params=params, error=str(error)))
                return float("inf")
            rows.append(report(kind, name, backend, params, size, flops, us, host, bandwidth))
            return us

        for backend in args.backend.split(","):
            best, params = timed(backend, fixed), dict(fixed)
            if args.sweep and backend == "triton":
                for param, values in SWEEPS[kind]:
                    times = {v: timed(backend, params | {param: v}) for v in values}
                    winner = min(times, key=times.__getitem__)
                    if times[winner] < 0.99 * best:
                        best, params = times[winner], params | {param: winner}
                print(f"best: {kind} {name}: {best:.2f} us with {params}", flush=True)
        del case, caches
        torch.cuda.empty_cache()
    if args.json:
        Path(args.json).write_text(json.dumps(dict(conditions=conditions, rows=rows), indent=1))


if __name__ == "__main__":
    main()
