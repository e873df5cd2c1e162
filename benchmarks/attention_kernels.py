"""Time the paged attention op alone, by backend and shape, on a CUDA GPU, and search the triton backend's parameters.

    python benchmarks/attention_kernels.py --backend triton,flashinfer --json results.json
    python benchmarks/attention_kernels.py --sweep --only decode --batch 1,32 --ctx 1024   # triton's parameters
    python benchmarks/attention_kernels.py --heads 32/32x128,16/8x64 --sweep --params dot --only decode   # over a grid
    python benchmarks/attention_kernels.py --set block_n=128,stages=5 --only decode

To compare backends use ``quire bench attention``, which times in the same way (``graph_runner/bench/attention_op.py``).
``host`` is the time of one eager call on the host. Decode is measured against the bytes of keys, values, their scales, queries
and outputs, and the bandwidth of a copy on the same GPU; prefill against the operations of the two matrix products over visible
keys only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.registry import get_backend
from quire.graph_runner.bench.attention import heads_of
from quire.graph_runner.bench.attention_op import decode_point, extend_points, measure, op_batch, work
from quire.graph_runner.bench.roofline import copy_bandwidth
from quire.graph_runner.config import kv_dtype

DECODE_BATCHES = (1, 8, 32, 128, 256)
DECODE_CONTEXTS = (1024, 2048, 8192)
PREFILLS = {point.name: point for point in extend_points()}
#: Values to try, one parameter after another, keeping the best each time.
SWEEPS = {
    "decode": [("block_n", (32, 64, 128)), ("stages", (2, 3, 5, 7)), ("warps", (2, 4, 8)), ("dot", (True, False)),
               ("chunk_min", (64, 128, 256, 512, 1024, 2048)), ("max_splits", (16, 64)),
               ("stages", (2, 3, 5)), ("warps", (2, 4, 8)), ("block_n", (32, 64, 128))],
    "prefill": [("block_m", (64, 128)), ("block_n", (32, 64, 128)), ("warps", (4, 8)), ("stages", (2, 3, 5)),
                ("chunk_min", (256, 512, 1024)), ("warps", (4, 8))],
}


def overridden(kind: str, params: dict[str, Any]) -> contextlib.AbstractContextManager:
    if not params:
        return contextlib.nullcontext()
    from quire.attn_ops.backends.triton import decode, extend, plan

    return plan.overridden(decode.DecodeConfig if kind == "decode" else extend.ExtendConfig, **params)


def report(kind: str, name: str, backend: str, params: dict, size: int, flops: int, us: float, host: float,
           bandwidth: float) -> dict:
    row = dict(kind=kind, shape=name, backend=backend, params=params, us=us, host_us=host,
               gb_per_s=size / us / 1e3, copy_share=size / us * 1e6 / bandwidth, tflop_per_s=flops / us / 1e6)
    words = " ".join(f"{n}={v}" for n, v in params.items())
    print(f"{kind:8s}{name:24s}{backend:12s}{us:9.2f} us {row['gb_per_s']:7.0f} GB/s {row['copy_share']:6.1%} of copy "
          f"{row['tflop_per_s']:7.1f} TFLOP/s   host {host:5.1f} us   {words}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton", help="comma-separated names")
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--batch", help=f"decode batch sizes (default {DECODE_BATCHES})")
    parser.add_argument("--ctx", help=f"decode contexts (default {DECODE_CONTEXTS})")
    parser.add_argument("--prefill", help=f"prefill shapes, separated by blanks (default {' '.join(PREFILLS)})")
    parser.add_argument("--set", default="", help="parameters of the triton backend: name=value,...")
    parser.add_argument("--sweep", action="store_true", help="search the triton backend's parameters for each shape")
    parser.add_argument("--params", default="", help="search only these parameters: comma-separated names")
    parser.add_argument("--heads", default="32/8x128", help="query heads/key heads x head dim, comma-separated")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--layout", default="NHD", choices=("NHD", "HND"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="auto", help="of the cache: auto (--dtype), int8, fp8, fp8_e5m2")
    parser.add_argument("--window", type=int)
    parser.add_argument("--max-len", type=int, default=8192, help="tokens that the block table has room for")
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()
    fixed = {n: json.loads(v.lower()) for n, v in (item.split("=") for item in args.set.split(",") if item)}

    import triton

    bandwidth = copy_bandwidth(torch.device("cuda"))
    dtype = getattr(torch, args.dtype)
    sites = {text: AttentionSite(0, h, hkv, d, d, dtype, d**-0.5, window=args.window)
             for text in args.heads.split(",") for h, hkv, d in [heads_of(text)]}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    conditions = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__,
                      commit=commit, copy_gb_per_s=bandwidth / 1e9, command=" ".join(sys.argv))
    print(json.dumps(conditions), flush=True)
    points = []
    if args.only != "prefill":
        numbers = [[int(n) for n in text.split(",")] if text else default for text, default in
                   ((args.batch, DECODE_BATCHES), (args.ctx, DECODE_CONTEXTS))]
        points += [decode_point(b, c) for c in numbers[1] for b in numbers[0]]
    if args.only != "decode":
        points += [PREFILLS[name] for name in (args.prefill or " ".join(PREFILLS)).split()]
    rows = []
    for (heads, site), point in itertools.product(sites.items(), points):
        kind, name = "decode" if point.kind == "decode" else "prefill", f"{heads} {point.name}"
        batch = op_batch(site, point, page_size=args.page, device=torch.device("cuda"), layout=args.layout,
                         max_len=args.max_len, kv_dtype=kv_dtype(args.kv_dtype))
        size, flops = work(site, point, kv_dtype(args.kv_dtype))

        def timed(backend: str, params: dict, kind=kind, name=name, batch=batch, size=size, flops=flops):
            try:
                with overridden(kind, params if backend == "triton" else {}):
                    timing = measure(get_backend(backend), batch)
            except Exception as error:  # e.g. too much shared memory: record it and go on
                print(f"{kind:8s}{name:24s}{backend:12s}failed with {params}: {type(error).__name__}: {error}"[:300])
                rows.append(dict(kind=kind, shape=name, backend=backend, params=params, error=str(error)))
                return float("inf")
            rows.append(report(kind, name, backend, params, size, flops, timing.us, timing.host_us, bandwidth))
            return timing.us

        for backend in args.backend.split(","):
            best, params = timed(backend, fixed), dict(fixed)
            if args.sweep and backend == "triton":
                known: dict[Any, float] = {}
                for param, values in SWEEPS[kind]:
                    if args.params and param not in args.params.split(","):
                        continue
                    times = {}
                    for v in values:
                        tried = params | {param: v}
                        key = tuple(sorted(tried.items()))
                        times[v] = known[key] = known[key] if key in known else timed(backend, tried)
                    winner = min(times, key=times.__getitem__)
                    if times[winner] < 0.99 * best:
                        best, params = times[winner], params | {param: winner}
                print(f"best: {kind} {name}: {best:.2f} us with {params}", flush=True)
        del batch
        torch.cuda.empty_cache()
        if args.json:  # after every point: a run may be cut off
            Path(args.json).write_text(json.dumps(dict(conditions=conditions, rows=rows), indent=1))


if __name__ == "__main__":
    main()
