"""What adapters cost a linear layer of a decode step: us of the layer alone, of its adapters' first products, and of both.

    python benchmarks/lora_linear.py --tokens 1,8,32 --json lora_linear.json

The layers are llama-8b's, with the norm, SwiGLU or residual that folds into them. Each sibling layer has two adapters;
every third token has the first, every third the second, and the others have none. Weights come
from memory: calls rotate over copies.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from quire.attn_ops.ops.lora_linear import lora_linear_cuda
from quire.attn_ops.ops.lora_rows import shrink
from quire.attn_ops.ops.small_linear import small_linear_cuda
from quire.attn_ops.step import running
from quire.graph_runner.bench.attention_op import on_the_device
from quire.graph_runner.bench.record import script, started

#: Inputs, outputs of sibling layers, whether there is a norm, SwiGLU, a residual.
LAYERS = {"qkv": (4096, (4096, 1024, 1024), True, False, False), "o": (4096, (4096,), False, False, True),
          "gate_up": (4096, (14336, 14336), True, True, False), "down": (14336, (4096,), False, False, True)}
COPIES = 6  # of the weights: more bytes than the L2 cache has


def main() -> None:
    args = script(__doc__, None, tokens=[1, 8, 32], rank=16,
                  lora_dtype=("float32,bfloat16", "of the adapters")).parse_args()
    record, device = started(args), torch.device("cuda")

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype) * 0.02

    for name, (k, sizes, norm, swiglu, residual) in LAYERS.items():
        weights = [normal(sum(sizes), k) for _ in range(COPIES)]
        of = [i for i in range(len(sizes)) for _ in range(2)]
        starts, bits = [sum(sizes[:i]) for i in of], [1 << (j % 2) for j in range(len(of))]
        for tokens in args.tokens:
            x, rows = normal(1, tokens, k), (torch.arange(tokens, device=device) + 1) % 3
            around: tuple[Any, ...] = (None, normal(k) if norm else None, 1e-5,
                                       normal(1, tokens, sum(sizes)) if residual else None, swiglu)
            for own in (getattr(torch, name) for name in args.lora_dtype.split(",")):
                a = [[normal(args.rank, k, dtype=own) for _ in of] for _ in range(COPIES)]
                b = [[normal(sizes[i], args.rank, dtype=own) for i in of] for _ in range(COPIES)]
                scaling = [2.0] * len(of)
                with running(SimpleNamespace(adapters=rows)):  # type: ignore[arg-type]
                    alone = on_the_device(lambda i: small_linear_cuda(x, weights[i % COPIES], *around)).us  # noqa: B023
                    first = on_the_device(lambda i: shrink(x, around[1], a[i % COPIES], bits)).us  # noqa: B023
                    both = on_the_device(lambda i: lora_linear_cuda(x, weights[i % COPIES], *around, a[i % COPIES],  # noqa: B023
                                                                    b[i % COPIES], starts, scaling, bits)).us  # noqa: B023
                record.keep({"layer": name, "tokens": tokens, "dtype": f"{own}", "alone_us": alone, "first_us": first,
                             "both_us": both})


if __name__ == "__main__":
    main()
