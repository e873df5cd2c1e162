"""Sweep launch parameters of the kernels for quantized weights and up to 256 tokens (attn_ops/kernels/small_linear_wide.py).

    python benchmarks/small_linear_wide.py --json out.json [--deadline 150] [--models llama-8b,qwen3-8b]
        [--codes int8,float8_e4m3fn,int4] [--tokens 128,32,64,256,8,1] [--keep]

Beside each: cuBLAS with bf16 weights, and what runs without these kernels (``small_linear``; for int4 PyTorch's
``_weight_int4pack_mm``). Weights are cold and calls come from one CUDA graph, as in benchmarks/small_linear.py. Rows are
written after each shape and number of tokens; at the deadline (seconds since the start) the sweep ends.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from quire.attn_ops.ops.small_linear import small_linear_cuda
from quire.attn_ops.ops.small_linear_wide import INT4_COLUMNS, launch_unpack, launch_wide, turn_columns, unpacked
from quire.attn_ops.tuning.launch_config import Config, keep, key
from quire.attn_ops.tuning.small_linear import MOST_COPIES, graph_time
from quire.graph_runner.bench.record import Record

#: model: {layer: (N, K)}
MODELS = {
    "llama-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
                 "head": (128256, 4096)},
    "qwen3-8b": {"gate_up": (24576, 4096), "down": (4096, 12288), "head": (151936, 4096)},  # the others are Llama-8B's
    "llama2-7b": {"qkv": (12288, 4096), "gate_up": (22016, 4096), "down": (4096, 11008), "head": (32000, 4096)},
    "qwen3-0.6b": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
}
SMS, GROUP = 132, 128
SHARED = 227 * 1024  # bytes per multiprocessor
#: Tokens per tile -> (rows, columns, warps, stages), for one byte per code; and their orders of columns (``Config.turned``).
TILES = {
    16: [(64, 128, 4, 4), (128, 128, 8, 4), (64, 256, 4, 3)],
    32: [(64, 128, 4, 4), (128, 128, 8, 4), (128, 128, 4, 4), (64, 256, 4, 3)],
    64: [(64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 5), (128, 128, 8, 4), (128, 128, 4, 4)],
    128: [(64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 4), (256, 64, 8, 4),
          (256, 64, 16, 5)],
    256: [(64, 64, 4, 4), (128, 64, 8, 4)],
}
#: The same for int4: (rows, warps, stages); tiles have 128 columns.
TILES_INT4 = {
    16: [(64, 4, 6), (128, 8, 4), (128, 4, 4)],
    32: [(64, 4, 4), (128, 8, 4), (128, 4, 4)],
    64: [(64, 4, 4), (128, 8, 4), (128, 4, 4), (256, 8, 4)],
    128: [(64, 4, 3), (128, 8, 4), (128, 4, 4), (256, 16, 4), (256, 8, 4)],
    256: [(64, 4, 3), (128, 8, 3)],
}


def orders(block_m: int) -> int:
    """Gathering takes registers: an address per pair of columns and token."""
    return 1 if block_m <= 32 else 2


def tiles(m: int, kind: str) -> Iterator[Config]:
    """Parameters for m tokens, not yet split."""
    whole = max(16, 1 << (m - 1).bit_length())
    for block_m in {min(whole, 256), min(whole, 128), 64 if whole == 128 else whole}:
        if kind == "int4":
            yield from (Config(n, INT4_COLUMNS, warps, stages, 1, block_m) for n, warps, stages in TILES_INT4[block_m])
        else:
            yield from (Config(*tile, 1, block_m, orders(block_m)) for tile in TILES[block_m])


def splits(config: Config, m: int, n: int, k: int) -> Iterator[int]:
    """One, and what makes as many programs as run at once, one or two per multiprocessor."""
    programs = -(-n // config.block_n) * -(-m // config.block_m)
    found = {1}
    for slots in (SMS, 2 * SMS, 3 * SMS):
        split = round(slots / programs) if programs < SMS else 1
        while split * programs > slots and split > 1:
            split -= 1
        if split > 1 and k // split >= 512:
            found.add(min(split, 12))
    yield from sorted(found)


def weights(kind: str, n: int, k: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A random weight: codes and scales."""
    if kind == "int4":
        packed = torch.randint(-2**31, 2**31 - 1, (n // 8, k // INT4_COLUMNS, 32, 4), dtype=torch.int32, device=device)
        scale, zero = torch.rand(k // GROUP, n, device=device) * 0.01, torch.randn(k // GROUP, n, device=device) * 0.02
        return packed, torch.stack([scale, zero], -1).to(torch.bfloat16)
    codes = (torch.randn(n, k, dtype=torch.bfloat16, device=device) * 32).clamp(-127, 127).to(getattr(torch, kind))
    return codes, torch.rand(n, device=device) * 1e-3


def compile_share(job: tuple[int, int, list[tuple[str, Config]]]) -> None:
    """Launch one process's share once, on a small weight."""
    which, of, work = job
    for kind, config in work[which::of]:
        x = torch.zeros(16, 4096, dtype=torch.bfloat16, device="cuda")
        weight, scale = weights(kind, 256, 4096, "cuda")
        try:
            launch_wide(x, weight, scale, None, None, config, False)
        except Exception:  # too much shared memory: the timing run reports it
            continue


def present(kind: str) -> Callable[..., torch.Tensor]:
    """What runs without these kernels."""
    if kind == "int4":
        return lambda x, weight, scale: torch.ops.aten._weight_int4pack_mm(x, weight, GROUP, scale)
    return lambda x, weight, scale: small_linear_cuda(x, weight, None, None, 0.0, None, False, scale)


def time_all(kind: str, m: int, n: int, k: int, device: Any, over: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    size = n * k // 2 if kind == "int4" else n * k
    copies = max(2, min(MOST_COPIES, int(240e6 / size) + 1))
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
    held = [weights(kind, n, k, device) for _ in range(copies)]
    plain = unpacked(*held[0], torch.bfloat16) if kind == "int4" else held[0][0].to(torch.bfloat16)
    reference = x.float() @ plain.float().t()
    if kind != "int4":
        reference *= held[0][1]
    norm = reference.norm()
    dense = [plain] + [torch.randn_like(plain) for _ in range(max(2, min(MOST_COPIES, int(240e6 / (2 * n * k)) + 1)) - 1)]
    base: dict[str, Any] = {"codes": kind, "tokens": m, "n": n, "k": k, "cublas_us": round(graph_time(
        lambda c=dense: [torch.nn.functional.linear(x, w) for w in c], len(dense)), 2)}
    del dense, plain
    if kind == "int8":  # part of the times of Config.turned = 2
        base["turn_us"] = round(graph_time(lambda: [turn_columns(x, False) for _ in range(64)], 64), 2)
    if kind == "int4":
        base["unpack_us"] = round(graph_time(lambda: [launch_unpack(*w, k, x.dtype) for w in held], copies), 2)
        base["unpack_error"] = (launch_unpack(*held[0], k, x.dtype) - unpacked(*held[0], x.dtype)).abs().max().item()
    run = present(kind)
    try:
        base["present_us"] = round(graph_time(lambda: [run(x, *w) for w in held], copies), 2)
        base["present_error"] = float(f"{((run(x, *held[0]).float() - reference).norm() / norm).item():.3g}")
    except Exception as failure:
        base["present_failed"] = str(failure)[:120]
    yield base
    for config, split in ((c, s) for c in tiles(m, kind) for s in splits(c, m, n, k)):
        if over():
            return
        config = config._replace(splits=split)
        row: dict[str, Any] = {**base, "config": list(config)}
        try:
            error = ((launch_wide(x, *held[0], None, None, config, False).float() - reference).norm() / norm).item()
            row["error"] = float(f"{error:.3g}")
            if not error < 2.5e-3:  # rounding to bf16 makes 1.7e-3
                raise ArithmeticError("the result is wrong")
            row["us"] = round(graph_time(
                lambda c=config: [launch_wide(x, *w, None, None, c, False) for w in held], copies), 2)
        except Exception as failure:
            row["failed"] = str(failure)[:120]
        yield row


def fits(config: Config, kind: str) -> bool:
    """Whether its stages fit in shared memory."""
    bytes_w = config.block_n * config.block_k // (2 if kind == "int4" else 1)
    return config.num_stages * (bytes_w + config.block_m * config.block_k * 2) <= SHARED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="128,32,64,256,8,1")
    parser.add_argument("--codes", default="int8,float8_e4m3fn,int4")
    parser.add_argument("--deadline", type=float, default=None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", action="store_true", help="let engines on this machine use what was fastest")
    parser.add_argument("--processes", type=int, default=max(1, min(14, (os.cpu_count() or 1) - 1)))
    args = parser.parse_args()
    kinds, sizes = args.codes.split(","), [int(m) for m in args.tokens.split(",")]
    wanted = {(kind, c._replace(splits=s)): None for kind, m in itertools.product(kinds, sizes)
              for c in tiles(m, kind) if fits(c, kind) for s in (1, 2)}
    wanted.update({(kind, Config(64, 128, 4, 4, s, 16)): None for kind in kinds for s in range(3, 13)})  # sums of the parts
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_share, [(i, args.processes, list(wanted)) for i in range(args.processes)])
    device = torch.device("cuda")
    record = Record(args.json, device, args.deadline, interrupts=False)
    print(f"{len(wanted)} kernels compiled, {record.left:.0f} s left", flush=True)

    def over() -> bool:
        return record.left <= 0

    done: set[Any] = set()
    for model, m, kind in itertools.product(args.models.split(","), sizes, kinds):
        for layer, (n, k) in MODELS[model].items():
            if over() or (kind, m, n, k) in done or (kind != "int4" and m < 8):
                continue
            done.add((kind, m, n, k))
            found = [{"layer": layer, "model": model, **r} for r in time_all(kind, m, n, k, device, over)]
            record.rows += found
            record.write()
            best = min((r for r in found if "us" in r), key=lambda r: r["us"], default={})
            if best and args.keep and (kind == "int4" or best["us"] < found[0].get("present_us", math.inf)):
                keep(device, {key(m, n, k, False, getattr(torch, kind)): Config(*best["config"])})
            print(f"{record.left:4.0f} s left {model:>10} {layer:>8} {kind:>13} M={m:<4} cuBLAS "
                  f"{found[0]['cublas_us']:8.2f} present {found[0].get('present_us', 0):8.2f} best {best.get('us', 0):8.2f} "
                  f"{best.get('config')}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
