"""What adapters cost a linear layer of a decode step: us of the layer alone, and with adapters.

    python benchmarks/lora_linear.py --tokens 1,8,32 --json lora_linear.json

The layers are llama-8b's, with the norm, SwiGLU or residual that folds into them. ``one``: an adapter of every token. ``each``:
two adapters; every third token has the first, every third the second, and the others have none. Weights come from memory: calls
rotate over copies.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from quire.attn_ops.ops.lora_counters import lora_counters_eager
from quire.attn_ops.ops.lora_linear import lora_linear_cuda
from quire.attn_ops.ops.small_linear import small_linear_cuda
from quire.attn_ops.step import running
from quire.attn_ops.tuning.launch_config import config_for
from quire.attn_ops.tuning.small_linear import LinearShape, tune
from quire.graph_runner.bench.attention_op import on_the_device
from quire.graph_runner.bench.record import script, started

#: Inputs, outputs of sibling layers, whether there is a norm, SwiGLU, a residual.
LAYERS = {"qkv": (4096, (4096, 1024, 1024), True, False, False), "o": (4096, (4096,), False, False, True),
          "gate_up": (4096, (14336, 14336), True, True, False), "down": (14336, (4096,), False, False, True)}
COPIES = 6  # of the weights: more bytes than the L2 cache has


def times(name: str, tokens: int, own: torch.dtype, rank: int, adapters: int) -> dict[str, Any]:
    """Microseconds of a layer alone and with ``adapters`` per sibling layer; ``tuned``: launch parameters of the former."""
    k, sizes, norm, swiglu, residual = LAYERS[name]
    of = [i for i in range(len(sizes)) for _ in range(adapters)]
    starts, scaling = [sum(sizes[:i]) for i in of], [2.0] * len(of)
    bits = [0 if adapters == 1 else 1 << (j % 2) for j in range(len(of))]

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype) * 0.02

    weights = [normal(sum(sizes), k) for _ in range(COPIES)]
    a = [[normal(rank, k, dtype=own) for _ in of] for _ in range(COPIES)]
    b = [[normal(sizes[i], rank, dtype=own) for i in of] for _ in range(COPIES)]
    x, norm_weight = normal(1, tokens, k), normal(k) if norm else None
    around = (None, norm_weight, 1e-5, normal(1, tokens, sum(sizes)) if residual else None, swiglu)
    tune([LinearShape(sum(sizes), k, norm, residual, each, torch.bfloat16) for each in {False, swiglu}], x.device)
    step: Any = SimpleNamespace(adapters=(torch.arange(tokens, device="cuda") + 1) % 3)
    counters = lora_counters_eager(x)

    with running(step):
        return {"tuned": config_for(tokens, sum(sizes), k, swiglu, x.device),
                "alone_us": on_the_device(lambda i: small_linear_cuda(x, weights[i % COPIES], *around)).us,
                "adapted_us": on_the_device(lambda i: lora_linear_cuda(
                    x, weights[i % COPIES], *around, a[i % COPIES], b[i % COPIES], starts, scaling, bits, counters)).us}


def main() -> None:
    args = script(__doc__, None, tokens=[1, 8, 32], rank=16, lora_dtype=("float32,bfloat16", "of the adapters")).parse_args()
    record = started(args)
    for name, tokens, dtype, adapters in itertools.product(LAYERS, args.tokens, args.lora_dtype.split(","), (1, 2)):
        record.keep({"layer": name, "tokens": tokens, "dtype": dtype, "adapters": "one" if adapters == 1 else "each",
                     **times(name, tokens, getattr(torch, dtype), args.rank, adapters)})


if __name__ == "__main__":
    main()
