"""Time the experts' kernels of an MoE layer over batches and tiles, on a CUDA GPU.

    python benchmarks/experts.py --json results/h200_experts.json              # the op as it chooses, beside its floor
    python benchmarks/experts.py --tiles --experts 128/8x768x2048 --tokens 64  # and every tile, product by product
    python benchmarks/experts.py --tiles --tokens 1 --transposed               # the same of weights (E, K, N)
    python benchmarks/experts.py --lora 16 --tokens 1,8,32,128                 # and with LoRA's adapters of that rank

``floor``: the bytes of the weights in use at the bandwidth of a copy, or the operations at the rate of a dense product of
8192 x 8192 x 8192, whichever is longer. Ids are random, and all experts equally likely; each call has others, else few weights
would stay in the GPU's cache. ``--lora``: with an adapter of every token (``one``), and of two adapters and none by turns
(``each``), in two dtypes, by each ``path``, ``chosen`` by the op or not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from quire.attn_ops.ops.expert_lora import ExpertLora
from quire.attn_ops.ops.experts import MAX_EXPANDED, SWIGLU, Gate, Tile, _Pairs, expert_swiglu, expert_swiglu_cuda
from quire.attn_ops.step import running
from quire.graph_runner.bench.attention_op import on_the_device
from quire.graph_runner.bench.record import script, started
from quire.graph_runner.bench.roofline import matmul_rate

#: experts/experts per token x inner x hidden: Qwen3-30B-A3B, DeepSeek-V2-Lite, Mixtral, and GPT-OSS-20B's sizes without biases.
SHAPES = "128/8x768x2048,64/6x1408x2048,8/2x14336x4096,32/4x2880x2880"
TOKENS = [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192, 16384]
#: Tiles to try for each path, of a product that is not gated.
TILES = {
    "one": [Tile(1, n, k, 4, 1) for n in (1, 2, 4, 8) for k in (256, 512, 1024) if 1024 <= n * k <= 4096],
    "pairs": [Tile(m, *t) for m in (16, 32) for t in ((64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3))],
    "sorted": [Tile(*t) for t in (
        (16, 64, 128, 4, 3), (16, 128, 64, 4, 4), (16, 128, 128, 8, 3), (32, 128, 64, 4, 4), (32, 128, 64, 8, 4),
        (64, 128, 64, 4, 3), (64, 256, 64, 8, 4), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4))],
}
#: The same of one token and weights (E, K, N).
TRANSPOSED = [Tile(1, n, k, warps, 1) for n in (16, 32, 64) for k in (64, 128, 256, 512) for warps in (4, 8)
              if 512 <= n * k // warps <= 2048]
SETS = 16  # of ids


def adapters_of(up: torch.Tensor, down: torch.Tensor, count: int, rank: int, own: torch.dtype, tokens: int) -> tuple[Any, Any]:
    """``count`` adapters of both products, and a step: one of every token, or each of several of its own tokens."""
    a, b = [], []
    for weight in (up, down):
        experts, n, k = weight.shape
        for _ in range(count):
            a.append(torch.randn(experts * rank, k, device=up.device, dtype=own) * k**-0.5)
            b.append(torch.randn(n, rank * experts, device=up.device, dtype=own) * 0.01)
    bits = [0, 0] if count == 1 else [1 << i for i in range(count)] * 2
    rows = torch.tensor([1, 2, 0], device=up.device).repeat(tokens)[:tokens].contiguous()
    return (a, b, [1.0] * len(a), bits), SimpleNamespace(adapters=rows)


def main() -> None:
    args = script(__doc__, None, limited=False, tokens=TOKENS, tiles=(False, "time each tile of each product too"),
                  transposed=(False, "weights are (E, K, N)"), lora=(0, "also with adapters of this rank"),
                  experts=(SHAPES, "experts/experts per token x inner x hidden, comma-separated")).parse_args()
    if args.lora and args.transposed:
        raise SystemExit("--lora has weights (E, N, K)")
    record, dtype = started(args), torch.bfloat16
    device = record.device
    bandwidth, rate = record.copy_bandwidth(), matmul_rate(device, dtype)
    record.facts["dense_tflop_per_s"] = rate / 1e12

    def note(call: Callable[[int], Any], floor: float, **what: Any) -> None:
        us = on_the_device(lambda number: call(number % SETS)).us
        record.keep({**what, "us": us, "floor_us": floor, "share": floor / us})

    for text in args.experts.split(","):
        count, each, inner, hidden = map(int, re.split("[/x]", text))
        up = torch.randn(count, 2 * inner, hidden, device=device, dtype=dtype) * hidden**-0.5
        down = torch.randn(count, hidden, inner, device=device, dtype=dtype) * inner**-0.5
        if args.transposed:
            up, down = up.mT.contiguous(), down.mT.contiguous()
        for tokens in args.tokens:
            x = torch.randn(tokens, hidden, device=device, dtype=dtype)
            chosen = [torch.rand(tokens, count, device=device).topk(each).indices for _ in range(SETS)]
            pairs, used = tokens * each, sum(len(ids.unique()) for ids in chosen) / SETS

            one = inner * hidden * max(2 * used / bandwidth, 2 * pairs / rate) * 1e6  # the floor of one product
            shape = dict(experts=text, tokens=tokens, transposed=args.transposed)
            note(lambda i: expert_swiglu(x, up, down, chosen[i], args.transposed), 3 * one, **shape)  # noqa: B023
            for adapters, own in itertools.product((1, 2), (torch.float32, dtype) if args.lora else ()):
                lora, step = adapters_of(up, down, adapters, args.lora, own, tokens)
                way = "one" if adapters == 1 else "each"
                for path in ("pairs", "sorted") if pairs <= 512 else ("sorted",):
                    with running(step):
                        note(lambda i: expert_swiglu_cuda(x, up, down, chosen[i], False, *lora, adapters,  # noqa: B023
                                                          path=path),  # noqa: B023
                             3 * one, **shape, way=way, dtype=str(own), path=path,
                             chosen=path == ("pairs" if pairs <= MAX_EXPANDED else "sorted"))
            if not args.tiles:
                continue
            act = torch.randn(pairs, inner, device=device, dtype=dtype)
            for path, gated in itertools.product(TILES, (True, False)):
                if pairs > 4096 if path == "pairs" else (tokens == 1) != (path == "one"):
                    continue
                for tile in TRANSPOSED if path == "one" and args.transposed else TILES[path]:
                    if gated and path == "sorted":
                        tile = Tile(tile.block_m, tile.block_n // 2, tile.block_k, tile.num_warps, tile.num_stages)
                    data = (x, up, None, ExpertLora(), SWIGLU) if gated else (act, down, None, ExpertLora(), None)
                    if args.transposed:  # as gpt-oss has them
                        gate = Gate("neighbours", 1.702, 7.0) if gated else None
                        data = (data[0], data[1].mT, None, ExpertLora(), gate)
                    made = [_Pairs.of(ids, count, dtype, path, tile, None) for ids in chosen]
                    note(lambda i: made[i].multiply(*data), one * (2 if gated else 1), **shape, path=path,  # noqa: B023
                         gated=gated, tile=str(tile))


if __name__ == "__main__":
    main()
