r"""Sweep launch parameters of the kernels behind ``small_linear``, shape by shape, beside cuBLAS with bf16 weights.

    python benchmarks/small_linear.py --json out.json [--table attn_ops/tuning/small_linear.json]            # bf16 weights
    python benchmarks/small_linear.py --codes int8,float8_e4m3fn --tokens 1,8,32,64,128,256 --json out.json  # quantized ones
    python benchmarks/small_linear.py --merge sweep.json,... --table attn_ops/tuning/small_linear.json  # the best of sweeps
    python benchmarks/small_linear.py --merge sweep.json,... --keep --second-launch 1000  # one launch a layer, on this machine
    python benchmarks/small_linear.py --wide --models llama-8b,qwen3-8b --codes int8,float8_e4m3fn,int4 \
        --tokens 128,32,64,256,8,1 --json out.json [--keep]     # of attn_ops/kernels/small_linear_wide.py, for up to 256 tokens

Weights are cold: each shape rotates among copies that together are several times the L2 cache, and the calls are replayed from
one CUDA graph, so launches do not count. ``eager_us``: the op's definition; ``present_us``: what runs now; ``floor_us``: the
weight's bytes over the copy bandwidth. Candidates are compiled by several processes first (they share Triton's cache on disk).
Rows are written after each shape and number of tokens; at the deadline the sweep ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from quire.attn_ops.ops.small_linear import MAX_TOKENS, small_linear_cuda, small_linear_eager
from quire.attn_ops.ops.small_linear_wide import INT4_COLUMNS, unpacked
from quire.attn_ops.tuning.launch_config import INT4, STORE, Config, keep, key, short, wide_memory
from quire.attn_ops.tuning.small_linear import (
    SECOND_LAUNCH,
    LinearShape,
    arguments,
    copies_of,
    evenly,
    graph_time,
    launches_more,
)
from quire.attn_ops.tuning.store import device_name
from quire.graph_runner.bench.record import Record, script, started

#: model: {layer: (rows of the weight, K)}
MODELS = {
    "llama-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
                 "head": (128256, 4096)},
    "qwen3-8b": {"gate_up": (24576, 4096), "down": (4096, 12288), "head": (151936, 4096)},  # the others are Llama-8B's
    "llama2-7b": {"qkv": (12288, 4096), "gate_up": (22016, 4096), "down": (4096, 11008), "head": (32000, 4096)},
    "qwen2-7b": {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944),
                 "head": (152064, 3584)},
    "gemma2-9b": {"qkv": (8192, 3584), "o": (3584, 4096), "gate_up": (28672, 3584), "down": (3584, 14336),
                  "head": (256000, 3584)},
    "phi-3-mini": {"qkv": (9216, 3072), "o": (3072, 3072), "gate_up": (16384, 3072), "down": (3072, 8192),
                   "head": (32064, 3072)},
    "llama-1b": {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192),
                 "head": (128256, 2048)},
    "qwen3-0.6b": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    "glm4-9b": {"qkv": (4608, 4096), "o": (4096, 4096), "gate_up": (27392, 4096), "down": (4096, 13696),
                 "head": (151552, 4096)},
    "phi-4": {"qkv": (7680, 5120), "o": (5120, 5120), "gate_up": (35840, 5120), "down": (5120, 17920),
               "head": (100352, 5120)},
    "gemma3-4b": {"qkv": (4096, 2560), "o": (2560, 2048), "gate_up": (20480, 2560), "down": (2560, 10240),
                  "head": (262208, 2560)},
    "llama-3b": {"qkv": (5120, 3072), "o": (3072, 3072), "gate_up": (16384, 3072), "down": (3072, 8192),
                  "head": (128256, 3072)},
    "tiny": {"qkv": (512, 256), "gate_up": (1024, 256)},
}
#: layer: norm, residual, swiglu
FUSED = {"qkv": (True, False, False), "o": (False, True, False), "gate_up": (True, False, True), "down": (False, True, False),
         "head": (False, False, False)}
SMS = 132
SHARED = 227 * 1024  # bytes per multiprocessor
VECTOR = [Config(*c) for c in itertools.product((1, 2, 4), (512, 1024, 2048), (4, 8), (1, 3))]
TILE = [Config(*c) for c in itertools.product((16, 32, 64), (128, 256), (4,), (3, 4, 5))] + [
    Config(*c) for c in ((64, 64, 4, 6), (128, 64, 4, 5), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 3), (32, 512, 8, 3),
                         (16, 512, 4, 3), (64, 128, 8, 5))]
# For codes: one token without tensor cores; up to 32 tokens, a slice per warp; more tokens.
VECTOR_CODES = [Config(*c) for c in ((1, 2048, 4, 2), (2, 2048, 4, 2), (4, 1024, 4, 2), (4, 1024, 8, 2))]
SLICED = [Config(*c) for c in itertools.product((16, 32, 64), (64, 128), (4,), (3, 4))] + [
    Config(*c) for c in ((32, 128, 2, 4), (64, 128, 2, 4), (128, 64, 4, 3), (32, 64, 8, 3), (32, 64, 8, 4), (64, 32, 8, 4),
                         (64, 64, 8, 3), (32, 128, 8, 3))]
TILE_CODES = [Config(*c) for c in (
    (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3), (32, 128, 4, 4), (32, 128, 8, 4),
    (64, 64, 4, 4, 2), (64, 128, 4, 3, 2), (64, 128, 4, 4, 2), (128, 64, 8, 4, 2), (128, 128, 8, 3, 2), (64, 128, 4, 4, 3),
    (64, 128, 4, 4, 4), (128, 64, 8, 4, 4), (128, 128, 8, 3, 4), (64, 64, 4, 4, 4))]
#: Of the wide kernels: tokens per tile -> (rows, columns, warps, stages), for one byte per code.
WIDE = {
    16: [(64, 128, 4, 4), (128, 128, 8, 4), (64, 256, 4, 3)],
    32: [(64, 128, 4, 4), (128, 128, 8, 4), (128, 128, 4, 4), (64, 256, 4, 3)],
    64: [(64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 5), (128, 128, 8, 4), (128, 128, 4, 4)],
    128: [(64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 4), (256, 64, 8, 4),
          (256, 64, 16, 5)],
    256: [(64, 64, 4, 4), (128, 64, 8, 4)],
}
#: The same for int4: (rows, warps, stages); tiles have 128 columns.
WIDE_INT4 = {
    16: [(64, 4, 6), (128, 8, 4), (128, 4, 4)],
    32: [(64, 4, 4), (128, 8, 4), (128, 4, 4)],
    64: [(64, 4, 4), (128, 8, 4), (128, 4, 4), (256, 8, 4)],
    128: [(64, 4, 3), (128, 8, 4), (128, 4, 4), (256, 16, 4), (256, 8, 4)],
    256: [(64, 4, 3), (128, 8, 3)],
}


def wide_tiles(m: int, codes: torch.dtype | None) -> Iterator[Config]:
    """Parameters of the wide kernels for m tokens, not yet split."""
    whole = max(16, 1 << (m - 1).bit_length())
    for block_m in {min(whole, 256), min(whole, 128), 64 if whole == 128 else whole}:
        if codes == INT4:
            yield from (Config(n, INT4_COLUMNS, warps, stages, 1, block_m) for n, warps, stages in WIDE_INT4[block_m])
        else:  # gathering takes registers, an address per pair of columns and token: large tiles turn the columns first
            yield from (Config(*tile, 1, block_m, 1 if block_m <= 32 else 2) for tile in WIDE[block_m])


def splits(config: Config, m: int, n: int, k: int) -> Iterator[int]:
    """One, and what makes as many programs as run at once, one or two per multiprocessor."""
    programs = -(-n // config.block_n) * -(-m // (config.block_m or MAX_TOKENS))
    found = {1}
    for slots in (SMS, 2 * SMS, 3 * SMS):
        split = round(slots / programs) if programs < SMS else 1
        while split * programs > slots and split > 1:
            split -= 1
        if split > 1 and k // split >= 512:
            found.add(min(split, 12))
    yield from sorted(found)


def candidates(shape: LinearShape, m: int, wide: bool) -> list[Config]:
    if wide:
        return [c._replace(splits=s) for c in wide_tiles(m, shape.codes) for s in splits(c, m, shape.n, shape.k)]
    if shape.codes is None and m > 1:
        n, device = shape.n // 2 if shape.swiglu else shape.n, torch.device("cuda")
        found = [*TILE, *(even for c in TILE if (even := evenly(c, m, n, shape.swiglu, device)))]
        shared = [c._replace(splits=s) for c in TILE for s in splits(c, m, n, shape.k) if s > 1]
        if shape.norm:
            found += [c._replace(norm_apart=1) for c in (found if shape.swiglu else [*TILE, *shared])]
        elif not shape.swiglu:  # which needs whole sums in one program
            found += shared
        return found
    if shape.codes is None:
        return VECTOR
    return TILE_CODES if m > MAX_TOKENS else SLICED if m > 1 else VECTOR_CODES + SLICED


def shape_of(layer: str, size: tuple[int, int], m: int, codes: torch.dtype | None, wide: bool) -> LinearShape:
    """The layer in steps of m tokens; see ``passes/fusions/small_linear.py``."""
    norm, residual, swiglu = FUSED[layer] if not wide else (False, False, False)
    return LinearShape(*size, norm and codes is None, residual and m <= MAX_TOKENS, swiglu and m <= MAX_TOKENS, torch.bfloat16,
                       codes)


def kernels_of(work: list[tuple[LinearShape, int]], wide: bool) -> list[tuple[LinearShape, int, Config]]:
    """A small launch for each kernel to compile."""
    if not wide:  # the number of rows per program makes no other kernel
        return sorted({(shape._replace(n=256, k=4096 if shape.k % 4096 == 0 else shape.k), m, c._replace(rows=min(c.rows, 8)))
                       for shape, m in work for c in candidates(shape, m, False)}, key=str)
    small = {(shape._replace(n=256, k=4096), m) for shape, m in work}
    found = {(shape, 16, c._replace(splits=s)) for shape, m in small for c in wide_tiles(m, shape.codes)
             if wide_memory(c, shape.codes) <= SHARED for s in (1, 2)}
    found |= {(shape, 16, Config(64, 128, 4, 4, s, 16)) for shape, _ in small for s in range(3, 13)}  # sums of the parts
    return sorted(found, key=str)


def compile_share(job: tuple[int, int, list[tuple[LinearShape, int, Config]]]) -> None:
    """Launch one process's share once."""
    which, of, work = job
    for shape, m, config in work[which::of]:
        with contextlib.suppress(Exception):  # too much shared memory: the timing run reports it
            small_linear_cuda(*arguments(shape, m, torch.device("cuda"), 1)[0], config=config)


def time_all(shape: LinearShape, m: int, wide: bool, device: torch.device, record: Record, bandwidth: float
             ) -> Iterator[dict[str, Any]]:
    """A row for each candidate; until the deadline."""
    calls = arguments(shape, m, device, copies_of(shape))
    x, weight, *_, scale = (*calls[0], None) if shape.codes is None else calls[0]

    def us(run: Any, of: list[tuple[Any, ...]] = calls, **options: Any) -> float:
        return round(graph_time(lambda: [run(*each, **options) for each in of], len(of)), 2)

    plain = weight if scale is None else unpacked(weight, scale, x.dtype) if shape.codes == INT4 else weight.to(x.dtype)
    given = calls[0] if shape.codes != INT4 else (x, plain, *calls[0][2:-1])
    reference = small_linear_eager(*(a.double() if isinstance(a, torch.Tensor) and a.dtype == x.dtype else a for a in given)
                                   ).double()
    dense = [(x, plain), *((x, torch.randn_like(plain)) for _ in range(copies_of(shape._replace(codes=None)) - 1))]
    base = {"codes": shape.codes and str(shape.codes).removeprefix("torch."), "tokens": m, "n": shape.n, "k": shape.k,
            "floor_us": round(weight.nbytes / bandwidth * 1e6, 2), "cublas_us": us(linear, dense)}
    del dense, plain, given
    if shape.codes != INT4:  # its definition is for many tokens
        base["eager_us"] = us(small_linear_eager)
    base["present_us"] = us(small_linear_cuda)
    for config in candidates(shape, m, wide):
        if record.left <= 0:
            return
        row: dict[str, Any] = {**base, "config": list(config)}
        try:
            error = ((small_linear_cuda(*calls[0], config=config).double() - reference).norm() / reference.norm()).item()
            row["error"] = float(f"{error:.3g}")
            if not error < (2.5e-3 if wide else 1e-2):  # rounding to bf16 makes 1.7e-3, with a norm before it more
                raise ArithmeticError("the result is wrong")
            row["us"] = us(small_linear_cuda, config=config)
        except Exception as failure:
            row["failed"] = str(failure)[:120]
        yield row


def best_of(rows: list[dict[str, Any]], second_launch: float = SECOND_LAUNCH) -> dict[str, Config | None]:
    """The fastest parameters of each shape of bf16 weights, by ``key``. A second launch must save ``second_launch``
    microseconds."""
    best: dict[str, tuple[float, Config]] = {}
    for row in rows:
        if "us" in row and row["codes"] is None:
            name = key(row["tokens"], row["n"], row["k"], FUSED[row["layer"]][2])
            config = Config(*row["config"])
            us = row["us"] + second_launch * launches_more(config)
            best[name] = min(best.get(name, (math.inf, config)), (us, config))
    return {name: config for name, (_, config) in best.items()}


def merge_sweeps(table: Path | None, sweeps: list[Path], models: list[str] | None, second_launch: float) -> None:
    """The best of several sweeps; of other models than these, for what the table has already. Without a table: what engines on
    this machine use, instead of what the shipped one has."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for path in sweeps:
        sweep = json.loads(path.read_text())
        rows.setdefault(sweep["environment"]["device"], []).extend(sweep["rows"])
    for device, each in rows.items():
        wanted = best_of([row for row in each if models is None or row["model"] in models], second_launch)
        if table is None:
            here = torch.device("cuda")
            if device == device_name(here):
                keep(here, wanted)
            continue
        known = (STORE.load(table) or {}).get(device, {})
        best = best_of(each, second_launch)
        merge(table, device, {name: config for name, config in best.items() if name in wanted or name in known})


def merge(table: Path, device: str, found: dict[str, Config | None]) -> None:
    devices = dict(STORE.load(table) or {})
    entries = {name: None if config is None else short(config) for name, config in found.items()}
    STORE.save({**devices, device: dict(sorted((devices.get(device, {}) | entries).items()))}, table)


def main() -> None:
    parser = script(__doc__, None, wide=(False, "the kernels for up to 256 tokens"), tokens=[1, 8, 32],
                    models=("llama-8b", ", ".join(MODELS)),
                    codes=("", "dtypes of quantized weights instead of bf16: int8,float8_e4m3fn, with --wide int4"),
                    keep=(False, "let engines on this machine use what was fastest"),
                    processes=max(1, min(14, (os.cpu_count() or 1) - 1)))
    parser.add_argument("--table", type=Path, help="merge the best parameters into this file")
    parser.add_argument("--merge", help="files of earlier sweeps with bf16 weights: measure nothing, merge theirs")
    parser.add_argument("--only", help="with --merge: of these models; of others what the table has already")
    parser.add_argument("--second-launch", type=float, default=SECOND_LAUNCH, 
                        help="with --merge: microseconds that it must save")
    args = parser.parse_args()
    if args.merge:
        if bool(args.table) == args.keep:
            parser.error("--merge needs either --table, the file to merge into, or --keep, for engines on this machine")
        merge_sweeps(args.table, [Path(path) for path in args.merge.split(",")], args.only and args.only.split(","),
                     args.second_launch)
        return
    if (args.wide and not args.codes) or ("int4" in args.codes and not args.wide):
        parser.error("--wide needs --codes, and int4 needs --wide")
    kinds = [getattr(torch, name) for name in args.codes.split(",")] if args.codes else [None]
    work: dict[tuple[LinearShape, int], tuple[str, str]] = {}  # equal layers once
    for model, m, codes in itertools.product(args.models.split(","), args.tokens, kinds):
        for layer, size in MODELS[model].items():
            if not args.wide or codes == INT4 or m >= 8:
                work.setdefault((shape_of(layer, size, m, codes, args.wide), m), (model, layer))
    kernels = kernels_of([*work], args.wide)
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_share, [(i, args.processes, kernels) for i in range(args.processes)])
    record = started(args)
    bandwidth, device = record.copy_bandwidth(), record.device
    print(f"{len(kernels)} kernels compiled, {record.left:.0f} s left", flush=True)
    table: dict[str, Config | None] = {}
    for (shape, m), (model, layer) in work.items():
        if record.left <= 0:
            break
        found = [{"layer": layer, "model": model, **row} for row in time_all(shape, m, args.wide, device, record, bandwidth)]
        record.rows += found
        record.write()
        best = min((row for row in found if "us" in row), key=lambda row: row["us"], default=None)
        if best is None:
            continue
        chosen = {key(m, shape.n, shape.k, shape.swiglu, shape.codes): Config(*best["config"])}
        table |= chosen
        if args.keep and (shape.codes == INT4 or best["us"] < best.get("present_us", math.inf)):
            keep(device, chosen)
        print(f"{record.left:4.0f} s left {model:>10} {layer:>8} {best['codes'] or '':>13} M={m:<4}" + "".join(
            f" {name} {best[f'{name}_us']:8.2f}" for name in ("floor", "cublas", "eager", "present") if f"{name}_us" in best)
            + f" best {best['us']:8.2f} {tuple(best['config'])}", flush=True)
    if args.table:
        merge(args.table, record.environment["device"], table)


if __name__ == "__main__":
    main()
