"""GPU time by kernel, from torch.profiler."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

#: (pattern of a kernel's name, kind); the first match counts.
KINDS = (
    ("^(vector|tile|wide|int4|turn|add_up)_kernel", "matrix product with norm, SwiGLU or residual"),
    ("BatchDecode|BatchPrefill|flashinfer", "attention (FlashInfer)"), ("decode_kernel|reduce_kernel", "attention, decode"),
    ("extend_kernel", "attention, prefill"), ("rope_kv_write|write_kernel", "rope, KV write"),
    ("sample_kernel|pick_kernel", "sampling"), ("pairs_kernel|sorted_kernel|order_kernel", "experts"),
    ("nvjet|gemm|cutlass|sm90_xmma|gemv|splitK|gemvNSP", "matrix product (cuBLAS)"), ("^triton_", "Inductor"),
    ("[Mm]emcpy|[Mm]emset", "copies"), ("at::native|at::cuda", "PyTorch"))


def kind(name: str) -> str:
    return next((what for pattern, what in KINDS if re.search(pattern, name)), "other")


def profiled(run: Callable[[], None], steps: int) -> dict[str, tuple[float, float]]:
    """Kernels of ``run``, which makes ``steps`` steps: name -> (calls, microseconds) per step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name][0] += 1
            found[event.name][1] += event.device_time_total if hasattr(event, "device_time_total") else event.cuda_time_total
    return {name: (calls / steps, us / steps) for name, (calls, us) in found.items()}


def longest(kernels: dict[str, tuple[float, float]], count: int = 24) -> list[dict[str, Any]]:
    """The ``count`` kernels of ``profiled`` that take most, for a row."""
    top = sorted(kernels.items(), key=lambda item: -item[1][1])[:count]
    return [dict(name=name, calls=calls, us=us) for name, (calls, us) in top]
