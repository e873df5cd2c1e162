"""Sampling tensors from SamplingParams, for tests of the sampler; the engine makes them from its step buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.attn_ops.ops.sampling import is_greedy
from quire.graph_runner.sampler import SamplingTensors
from quire.graph_runner.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)
MIXED = [
    GREEDY, SamplingParams(), SamplingParams(temperature=0.3), SamplingParams(top_k=4), SamplingParams(top_p=0.6),
    SamplingParams(min_p=0.2), SamplingParams(temperature=1.7, top_k=20, top_p=0.9, min_p=0.05),
]


def random_logits(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def sampling_tensors(params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int],
                     device: torch.device | str = "cpu", *, banned: Sequence[Sequence[int]] = ()) -> SamplingTensors:
    """The tensors of a batch, one row per params; ``banned``: the tokens that each row must not get."""
    draws = [not is_greedy(p.temperature) for p in params]  # a greedy row takes no filters

    def column(dtype: torch.dtype, values: Sequence[float], greedy: float) -> torch.Tensor:
        chosen = [v if d else greedy for v, d in zip(values, draws, strict=True)]
        return torch.tensor(chosen, dtype=dtype, device=device)

    top_k, top_p = [min(p.top_k, 2**31 - 1) for p in params], [p.top_p for p in params]
    min_p = [-p.min_p if p.as_generate else p.min_p for p in params]
    tensors = (column(torch.int32, top_k, 0), column(torch.float32, top_p, 1), column(torch.float32, min_p, 0))
    wrapped = [(s + 2**63) % 2**64 - 2**63 for s in seeds]
    pairs = [(row, token) for row, tokens in enumerate(banned) for token in tokens]
    return SamplingTensors(
        column(torch.float32, [p.temperature for p in params], 0), *tensors, torch.tensor(wrapped, device=device),
        torch.tensor(list(positions), dtype=torch.int64, device=device), not any(draws), bool((tensors[0] > 0).any()),
        bool((tensors[1] < 1).any()), bool((tensors[2] > 0).any()), bool((tensors[2] < 0).any()),
        torch.tensor(pairs, device=device) if pairs else None)
