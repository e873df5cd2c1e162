"""GPU time by kernel, from torch.profiler."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
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


def profiled(run: Callable[[], Any], steps: int, grids: bool = False) -> dict[str, tuple[float, float]]:
    """Kernels of ``run``, which makes ``steps`` steps: name -> (calls, microseconds) per step, with ``grids`` by grid too. A
    kernel that begins before the last one ends, as dependent ones do, counts from that end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return by_kernel(events, steps, grids)


def by_kernel(events: list[dict[str, Any]], steps: int, grids: bool = False) -> dict[str, tuple[float, float]]:
    """``profiled`` of the events of a Chrome trace."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    before = 0.0
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for event in sorted(on_gpu, key=lambda event: event["ts"]):
        end, grid = event["ts"] + event["dur"], event.get("args", {}).get("grid")
        one = found[f"{event['name']} {grid}" if grids else event["name"]]
        one[0] += 1
        one[1] += max(0.0, end - max(before, event["ts"]))
        before = max(before, end)
    return {name: (calls / steps, us / steps) for name, (calls, us) in found.items()}


def longest(kernels: dict[str, tuple[float, float]], count: int = 24) -> list[dict[str, Any]]:
    """The ``count`` kernels of ``profiled`` that take most, for a row."""
    top = sorted(kernels.items(), key=lambda item: -item[1][1])[:count]
    return [dict(name=name, calls=calls, us=us) for name, (calls, us) in top]
