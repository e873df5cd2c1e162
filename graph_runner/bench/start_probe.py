"""The process that the start workload times: makes a system, says when it was ready, generates one token, ends."""

from __future__ import annotations

import importlib
import json
import sys
import time

PARTS = ("load", "trace", "compile", "kernels", "autotune", "capture", "set-up")


def main() -> None:
    job = json.loads(sys.argv[1])
    import torch

    importlib.import_module("transformers")  # a part of what a user waits for
    from quire.graph_runner.bench.shapes import ModelSpec
    from quire.graph_runner.bench.start import MARK
    from quire.graph_runner.bench.systems import Limits, Models, open_system
    from quire.passes.start_times import seconds, timed

    spec = ModelSpec(job["name"], getattr(torch, job["dtype"]), torch.device(job["device"]), job["layers"],
                     job["quantization"])
    if spec.device.type == "cuda":
        torch.zeros(1, device=spec.device)  # the CUDA context
    parts: dict[str, float] = {"import": time.time() - job["began"]}
    models = Models(spec)
    if job["system"] == "quire":
        with timed("load"):
            models.get()
    with open_system(job["system"], models, job["attention"], Limits(256, 1024), job["options"]) as system:
        ready = time.time() - job["began"]
        began = time.perf_counter()
        system.generate([[1, 2, 3, 4]], [1], 0.0)
        first = time.perf_counter() - began
        parts |= {name: seconds.get(name, 0.0) for name in PARTS if job["system"] == "quire"}
        parts["other"] = ready - sum(parts.values())
        row = {"seconds": ready, "parts_s": parts, "first_token_s": first, "attention": system.attention,
               "capture_s": system.capture_s, "peak_memory_gib": system.peak_memory_gib(spec.device)}
        print(MARK + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
