"""Time the small-batch linear kernel against cuBLAS, shape by shape, and write the best parameters.

    python benchmarks/small_linear.py --json out.json [--table attn_ops/tuning/small_linear.json] [--shapes llama-8b]
    python benchmarks/small_linear.py --codes int8,float8_e4m3fn --tokens 1,8,32,64,128,256 --json out.json    # codes

Weights are cold: each shape rotates among copies that together are several times the L2 cache, and the calls are replayed from
one CUDA graph, so launches do not count. The floor is the weight's bytes over the copy bandwidth measured in this run.
Candidates are compiled by several processes first (they share Triton's cache on disk), then timed one by one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch

from quire.attn_ops.ops.small_linear import MAX_TOKENS, small_linear_cuda, small_linear_eager
from quire.attn_ops.tuning.launch_config import STORE, Config, key
from quire.attn_ops.tuning.small_linear import LinearShape, arguments, copies_of, graph_time
from quire.graph_runner.bench.report import environment
from quire.graph_runner.bench.roofline import copy_bandwidth

# name: (rows of the weight, K, norm, residual, swiglu)
SHAPES = {
    "llama-8b": {"qkv": (6144, 4096, True, False, False), "o": (4096, 4096, False, True, False),
                 "gate_up": (28672, 4096, True, False, True), "down": (4096, 14336, False, True, False),
                 "head": (128256, 4096, False, False, False)},
    "tiny": {"qkv": (512, 256, True, False, False), "gate_up": (1024, 256, True, False, True)},
}
VECTOR = [Config(*c) for c in itertools.product((1, 2, 4), (512, 1024, 2048), (4, 8), (1, 3))]
TILE = [Config(*c) for c in itertools.product((16, 32, 64), (128, 256), (4,), (3, 4, 5))] + [
    Config(64, 64, 4, 6), Config(128, 64, 4, 5), Config(128, 128, 8, 3), Config(32, 512, 8, 3), Config(16, 512, 4, 3)]
# For codes: one token without tensor cores; up to 32 tokens, a slice per warp; more tokens.
VECTOR_CODES = [Config(*c) for c in ((1, 2048, 4, 2), (2, 2048, 4, 2), (4, 1024, 4, 2), (4, 1024, 8, 2))]
SLICED = [Config(*c) for c in itertools.product((16, 32, 64), (64, 128), (4,), (3, 4))] + [
    Config(*c) for c in ((32, 128, 2, 4), (64, 128, 2, 4), (128, 64, 4, 3), (32, 64, 8, 3), (32, 64, 8, 4), (64, 32, 8, 4),
                         (64, 64, 8, 3), (32, 128, 8, 3))]
TILE_CODES = [Config(*c) for c in (
    (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3), (32, 128, 4, 4), (32, 128, 8, 4),
    (64, 64, 4, 4, 2), (64, 128, 4, 3, 2), (64, 128, 4, 4, 2), (128, 64, 8, 4, 2), (128, 128, 8, 3, 2), (64, 128, 4, 4, 3),
    (64, 128, 4, 4, 4), (128, 64, 8, 4, 4), (128, 128, 8, 3, 4), (64, 64, 4, 4, 4))]


def candidates(m: int, codes: torch.dtype | None) -> list[Config]:
    if codes is None:
        return VECTOR if m == 1 else TILE
    return TILE_CODES if m > MAX_TOKENS else SLICED if m > 1 else VECTOR_CODES + SLICED


def shape_of(shape: tuple[int, int, bool, bool, bool], m: int, codes: torch.dtype | None) -> LinearShape:
    """The layer in steps of m tokens; see ``passes/fusions/small_linear.py``."""
    n, k, norm, residual, swiglu = shape
    return LinearShape(n, k, norm and codes is None, residual and m <= MAX_TOKENS, swiglu and m <= MAX_TOKENS, torch.bfloat16,
                       codes)


def compile_share(job: tuple[int, int, list[tuple[int, LinearShape]]]) -> None:
    """Compile one process's share: launch each candidate once."""
    which, of, work = job
    alike = sorted({(m, s._replace(n=256, k=4096)) for m, s in work}, key=str)
    for m, shape, config in [(*each, c) for each in alike for c in candidates(each[0], each[1].codes)][which::of]:
        try:
            small_linear_cuda(*arguments(shape, m, torch.device("cuda"), 1)[0], config=config)
        except Exception:  # too much shared memory: the timing run reports it
            continue


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--tokens", default="1,8,32")
    parser.add_argument("--codes", default="", help="dtypes of quantized weights instead of bf16: int8,float8_e4m3fn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="merge the best parameters into this file")
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1))
    args = parser.parse_args()
    sizes = [int(m) for m in args.tokens.split(",")]
    kinds = [getattr(torch, name) for name in args.codes.split(",")] if args.codes else [None]
    shapes = SHAPES[args.shapes].items()
    work = [(name, m, shape_of(shape, m, codes)) for codes in kinds for name, shape in shapes for m in sizes]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_share, [(i, args.processes, [each[1:] for each in work]) for i in range(args.processes)])
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    rows: list[dict[str, Any]] = []
    table: dict[str, list[int]] = {}
    print(f"{'shape':>10} {'codes':>14} {'M':>3} {'floor us':>9} {'cuBLAS':>8} {'eager':>8} {'best':>8}  config")
    for name, m, shape in work:
        n, k, codes = shape.n, shape.k, shape.codes
        copies = copies_of(shape)
        calls = arguments(shape, m, device, copies)
        label = str(codes).removeprefix("torch.") if codes is not None else None
        floor = n * k * calls[0][1].element_size() / bandwidth * 1e6
        plain = [(a[0], a[1] if codes is None else a[1].to(a[0].dtype)) for a in calls]  # cuBLAS has no product with codes
        cublas = graph_time(lambda c=plain: [torch.nn.functional.linear(*a) for a in c], copies)
        del plain
        eager = graph_time(lambda c=calls: [small_linear_eager(*a) for a in c], copies)
        reference = small_linear_eager(*[
            a.double() if isinstance(a, torch.Tensor) and a.element_size() > 1 else a for a in calls[0]])
        best: tuple[float, Config | None] = (float("inf"), None)
        for config in candidates(m, codes):
            try:
                error = ((small_linear_cuda(*calls[0], config=config).double() - reference).norm() / reference.norm()).item()
                if not error < 1e-2:
                    raise ArithmeticError(f"error {error}")
                us = graph_time(lambda c=calls, p=config: [small_linear_cuda(*a, config=p) for a in c], copies)
            except Exception as failure:
                rows.append({"shape": name, "codes": label, "tokens": m, "config": list(config), "failed": str(failure)[:120]})
                continue
            rows.append({"shape": name, "codes": label, "tokens": m, "n": n, "k": k, "config": list(config),
                         "error": float(f"{error:.3g}"), **{name: round(t, 2) for name, t in (
                             ("us", us), ("floor_us", floor), ("cublas_us", cublas), ("eager_us", eager))}})
            best = min(best, (us, config), key=lambda b: b[0])
        if best[1] is not None:
            table[key(m, n, k, shape.swiglu, codes)] = list(best[1])
        print(f"{name:>10} {label or '':>14} {m:>3} {floor:9.2f} {cublas:8.2f} {eager:8.2f} {best[0]:8.2f}  "
              f"{tuple(best[1] or ())}", flush=True)
        del calls
    conditions = {**environment(device, bandwidth), "command": " ".join(sys.argv)}
    if args.json:
        lines = ",\n".join(json.dumps(row) for row in rows)
        args.json.write_text(f'{{"environment": {json.dumps(conditions)},\n"rows": [\n{lines}\n]}}\n')
    if args.table:
        devices = dict(STORE.load(args.table) or {})
        devices[conditions["device"]] = dict(sorted((devices.get(conditions["device"], {}) | table).items()))
        STORE.save(devices, args.table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
