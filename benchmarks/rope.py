"""Launch parameters of ``rope_kv_write``: heads per program and warps, over models' heads and numbers of tokens.

    python benchmarks/rope.py --json rope.json --tokens 8192,2048,512,256,64

Microseconds of a call in a CUDA graph. ``rule``: what the op takes. q, k and v are parts of one matrix, as after a fused
projection. ``floor_us``: the bytes read and written at copy bandwidth.
"""

from __future__ import annotations

import itertools
from unittest import mock

import torch

from quire.attn_ops.ops import rope
from quire.graph_runner.bench.attention_op import timed
from quire.graph_runner.bench.record import script, started

#: model: query heads, key heads, head dim, whether q and k are normalized
HEADS = {"llama-8b": (32, 8, 128, False), "phi-3-mini": (32, 32, 96, False), "gemma2-9b": (16, 8, 256, False),
         "qwen3-8b": (32, 8, 128, True), "qwen3-0.6b": (16, 8, 128, True), "qwen2-7b": (28, 4, 128, False),
         "llama-1b": (32, 8, 64, False), "llama2-7b": (32, 32, 128, False)}
TILES = [*itertools.product((2, 4, 8, 16, 32), (1, 2, 4))]


def measured(name: str, tokens: int, device: torch.device) -> tuple[int, dict[str, float]]:
    """Bytes read and written, and microseconds by tile."""
    heads, kv_heads, dim, normed = HEADS[name]
    dtype, sizes = torch.bfloat16, [heads * dim, kv_heads * dim, kv_heads * dim]
    qkv = torch.randn(tokens, sum(sizes), device=device, dtype=dtype)
    q, k, v = (x.unflatten(1, (-1, dim)) for x in qkv.split(sizes, 1))
    caches = [torch.zeros(tokens // 16 + 1, 16, kv_heads, dim, device=device, dtype=dtype) for _ in range(2)]
    cos, sin = torch.randn(2, tokens, dim, device=device, dtype=dtype)
    norm = torch.ones(dim, device=device, dtype=dtype) if normed else None
    slots = torch.arange(tokens, device=device)

    def call(_: int) -> torch.Tensor:
        return rope.rope_kv_write_cuda(q, k, v, cos, sin, norm, norm, 1e-6, *caches, None, None, slots)

    us = {"rule": timed(call, device, captured=True).us}
    for tile in TILES:
        with mock.patch.object(rope, "tile", lambda *_, tile=tile: tile):
            us["{} heads, {} warps".format(*tile)] = timed(call, device, captured=True).us
    return 2 * (2 * qkv.numel() + cos.numel() + sin.numel()), us


def main() -> None:
    args = script(__doc__, None, tokens=[8192, 2048, 512, 256, 64], models=",".join(HEADS)).parse_args()
    record = started(args)
    bandwidth = record.copy_bandwidth()
    for name, tokens in itertools.product(args.models.split(","), args.tokens):
        size, us = measured(name, tokens, torch.device(args.device))
        record.keep({"model": name, "tokens": tokens, "floor_us": size / bandwidth * 1e6, "us": us,
                     "best": min(us, key=us.__getitem__)})


if __name__ == "__main__":
    main()
