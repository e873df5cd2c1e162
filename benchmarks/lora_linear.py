"""What adapters cost a linear layer of a decode step: us of the layer alone, and with adapters.

    python benchmarks/lora_linear.py --tokens 1,8,32 --json lora_linear.json
    python benchmarks/lora_linear.py --tiles --tokens 64,128,1024 --models llama-8b,llama-1b --json lora_tiles.json

The layers are llama-8b's, with the norm, SwiGLU or residual that folds into them. ``one``: an adapter of every token. ``each``:
two adapters; every third token has the first, every third the second, and the others have none. Weights come from memory:
calls rotate over copies.

``--tiles``: layers without their norm, with other launch parameters: a row for each, the fastest first, with ``chosen`` for
those that ``lora_linear`` has by itself. There ``alone_us`` is cuBLAS and a kernel for SwiGLU for more than 32 tokens.
``--processes`` compile the kernels of the first model first; those of the others are the same.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
import zlib
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

import quire.attn_ops.ops.lora_linear as op
from quire.attn_ops.ops.lora_counters import lora_counters_eager
from quire.attn_ops.ops.lora_linear import large_tiles, lora_linear_cuda
from quire.attn_ops.ops.lora_rows import RowsTiles
from quire.attn_ops.ops.small_linear import MAX_TOKENS, MAX_TOKENS_PER_TILE, small_linear_cuda
from quire.attn_ops.step import running
from quire.attn_ops.tuning.launch_config import Config, by_rule, config_for
from quire.attn_ops.tuning.small_linear import LinearShape, tune
from quire.graph_runner.bench.attention_op import on_the_device
from quire.graph_runner.bench.models import ModelSpec, config_of
from quire.graph_runner.bench.record import numbers, script, started

#: Inputs, outputs of sibling layers, whether there is a norm, SwiGLU, a residual.
LAYERS = {"qkv": (4096, (4096, 1024, 1024), True, False, False), "o": (4096, (4096,), False, False, True),
          "gate_up": (4096, (14336, 14336), True, True, False), "down": (14336, (4096,), False, False, True)}
COPIES = 6  # of the weights: more bytes than the L2 cache has


class Layer:
    """A layer with ``adapters`` per sibling, of random numbers: its input, and copies of its and the adapters' weights."""

    def __init__(self, k: int, sizes: tuple[int, ...], norm: bool, swiglu: bool, residual: bool, tokens: int, own: torch.dtype,
                 rank: int, adapters: int, copies: int) -> None:
        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=dtype) * 0.02

        of = [i for i in range(len(sizes)) for _ in range(adapters)]
        self.weights = [normal(sum(sizes), k) for _ in range(copies)]
        self.a = [[normal(rank, k, dtype=own) for _ in of] for _ in range(copies)]
        self.b = [[normal(sizes[i], rank, dtype=own) for i in of] for _ in range(copies)]
        self.x, norm_weight = normal(1, tokens, k), normal(k) if norm else None
        self.around = (None, norm_weight, 1e-5, normal(1, tokens, sum(sizes)) if residual else None, swiglu)
        self.starts = [sum(sizes[:i]) for i in of]
        self.bits = [0 if adapters == 1 else 1 << (j % 2) for j in range(len(of))]
        self.counters = lora_counters_eager(self.x)
        self.step: Any = SimpleNamespace(adapters=(torch.arange(tokens, device="cuda") + 1) % 3)

    def alone(self, i: int) -> torch.Tensor:
        return small_linear_cuda(self.x, self.weights[i % len(self.weights)], *self.around)

    def adapted(self, i: int, tiles: RowsTiles | Config | None = None) -> torch.Tensor:
        each = i % len(self.weights)
        return lora_linear_cuda(self.x, self.weights[each], *self.around, self.a[each], self.b[each], self.starts,
                                [2.0] * len(self.bits), self.bits, self.counters, tiles=tiles)


def times(name: str, tokens: int, own: torch.dtype, rank: int, adapters: int) -> dict[str, Any]:
    """Microseconds of a layer alone and with ``adapters`` per sibling layer; ``tuned``: launch parameters of the former."""
    k, sizes, norm, swiglu, residual = LAYERS[name]
    layer = Layer(k, sizes, norm, swiglu, residual, tokens, own, rank, adapters, COPIES)
    device = layer.x.device
    tune([LinearShape(sum(sizes), k, norm, residual, each, torch.bfloat16) for each in {False, swiglu}], device)
    with running(layer.step):
        return {"tuned": config_for(tokens, sum(sizes), k, swiglu, device), "alone_us": on_the_device(layer.alone).us,
                "adapted_us": on_the_device(layer.adapted).us}


#: Of second and of first products, as of RowsTiles: the latter within the launch of the former, and in one of their own.
SECOND = [(32, 64, 4), (64, 64, 4), (32, 32, 4), (32, 128, 4), (32, 128, 8), (64, 128, 8)]
WITHIN = [(32, 8, 4), (32, 16, 4), (32, 4, 4), (16, 8, 4), (16, 16, 4)]
APART = [(64, 2, 3), (64, 8, 3), (128, 2, 3)]
WHOLE = [Config(*c) for c in itertools.chain(
    itertools.product([64], [128, 64], [4], [6, 4], [1, 2]), itertools.product([128], [64], [8], [4], [1, 2]))]


def layers_of(model: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Inputs and the outputs of sibling layers."""
    config = config_of(ModelSpec(model, torch.bfloat16, torch.device("cuda")))
    heads, dim, hidden, wide = (config.num_attention_heads, config.head_dim, config.hidden_size, config.intermediate_size)
    own = config.num_key_value_heads * dim
    return {"qkv": (hidden, (heads * dim, own, own)), "o": (heads * dim, (hidden,)), "gate_up": (hidden, (wide, wide)),
            "down": (wide, (hidden,))}


class Parts(NamedTuple):
    """Of the first products of a layer of up to MAX_TOKENS tokens."""

    parts: int


def tile_times(model: str, name: str, tokens: int, own: torch.dtype, rank: int, adapters: int,
               share: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """A row for each choice of launch parameters that fits the GPU, the fastest first. ``share``: (which, of how many): compile
    these kernels instead."""
    k, sizes = layers_of(model)[name]
    copies = 1 if share else max(2, -(-600_000_000 // (2 * k * sum(sizes)))) if tokens <= 256 else 2
    swiglu, residual = name == "gate_up", len(sizes) == 1
    layer = Layer(k, sizes, False, swiglu, residual, tokens, own, rank, adapters, copies)
    n, alike, device = sizes[0] if swiglu else sum(sizes), tokens <= MAX_TOKENS, layer.x.device
    if alike:
        tune([LinearShape(sum(sizes), k, False, residual, swiglu, torch.bfloat16)], device)
        config = config_for(tokens, sum(sizes), k, swiglu, device) or by_rule(tokens, sum(sizes), k, swiglu)
        chosen: RowsTiles | Config | Parts = Parts(op._parts(layer.a[0], tokens, n, k, swiglu, False, config, device))
        tiles: list[RowsTiles | Config | Parts] = [Parts(count) for count in (1, 2, 4, 8)]
    else:
        chosen = large_tiles(tokens, k, n, swiglu, layer.a[0], layer.b[0], layer.starts)
        first = [(*each, True) for each in APART] if tokens > 512 else WITHIN
        pairs = [*((second, first[0]) for second in SECOND), *((SECOND[0], each) for each in first[1:])]
        tiles = [*(RowsTiles(*second, *each)._replace(reduce=reduce) for second, each in pairs for reduce in (False, True)),
                 *(WHOLE if tokens <= MAX_TOKENS_PER_TILE else [])]
    swiglu_of = torch.compile(lambda y: F.silu(y[:, : sizes[0]]) * y[:, sizes[0] :], dynamic=False)

    def alone(i: int) -> torch.Tensor:
        if alike:
            return layer.alone(i)
        y = F.linear(layer.x[0], layer.weights[i % copies])
        return swiglu_of(y) if swiglu else y

    def adapted(tiles: RowsTiles | Config | Parts, i: int) -> torch.Tensor:
        if i % 64 == 0:  # zeroed for some launches at once, as in a forward
            layer.counters = lora_counters_eager(layer.x)
        if not isinstance(tiles, Parts):
            return layer.adapted(i, tiles)
        with mock.patch.object(op, "_parts", lambda *args: tiles[0]):
            return layer.adapted(i)

    rows: list[dict[str, Any]] = []
    with running(layer.step):
        if share is not None:  # a kernel, whatever the tokens, is always the same process's
            which, of_all = share
            for each in tiles:
                if zlib.crc32(f"{name} {adapters} {own} {each}".encode()) % of_all == which:
                    with suppress(Exception):  # the run that measures reports it
                        adapted(each, 0)
            return rows
        alone_us = on_the_device(alone).us
        for each in dict.fromkeys([chosen, *tiles]):
            try:
                us = on_the_device(functools.partial(adapted, each)).us
            except OutOfResources:
                continue
            rows.append({"model": model, "layer": name, "tokens": tokens, "dtype": str(own), "adapters": adapters,
                         "alone_us": alone_us, "adapted_us": us, "launches": type(each).__name__, "tiles": list(each),
                         "chosen": each == chosen})
    return sorted(rows, key=lambda row: row["adapted_us"])


def compile_share(job: tuple[argparse.Namespace, int]) -> None:
    """A process's share of the kernels of ``--tiles``."""
    args, which = job
    for tokens, adapters, dtype, name in itertools.product(args.tokens, numbers(args.adapters), args.lora_dtype.split(","),
                                                           args.sites.split(",")):
        tile_times(args.models.split(",")[0], name, tokens, getattr(torch, dtype), args.rank, adapters, (which, args.processes))


def main() -> None:
    args = script(__doc__, None, tokens=[1, 8, 32], rank=16, lora_dtype=("float32,bfloat16", "of the adapters"),
                  tiles=(False, "other launch parameters"), models=("llama-8b", "with --tiles, of these"),
                  sites=(",".join(LAYERS), "with --tiles, these layers"),
                  adapters=("1", "with --tiles, of these: 1, for every token, or 2, as each"),
                  processes=max(1, min(14, (os.cpu_count() or 1) - 1))).parse_args()
    record = started(args)
    if args.tiles:
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            pool.map(compile_share, [(args, i) for i in range(args.processes)])
        for model, tokens, adapters, dtype, name in itertools.product(
                args.models.split(","), args.tokens, numbers(args.adapters), args.lora_dtype.split(","), args.sites.split(",")):
            for row in tile_times(model, name, tokens, getattr(torch, dtype), args.rank, adapters):
                record.keep(row)
        return
    for name, tokens, dtype, adapters in itertools.product(LAYERS, args.tokens, args.lora_dtype.split(","), (1, 2)):
        record.keep({"layer": name, "tokens": tokens, "dtype": dtype, "adapters": "one" if adapters == 1 else "each",
                     **times(name, tokens, getattr(torch, dtype), args.rank, adapters)})


if __name__ == "__main__":
    main()
