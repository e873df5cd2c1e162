"""The start workload: from the start of a process until the system is ready to take requests.

A fresh Python process builds the model and makes the system; the row's seconds end there. It then generates one token, on
record as ``first_token_s``, which shows work that a system puts off. ``cold``: with empty caches of Inductor, Triton, quire,
vLLM and Python, whose bytecode pip compiles where it may; ``warm``: with what the cold start left. Kernels that FlashInfer
compiled are kept in both.

quire's time is split into ``import`` (Python, torch, transformers), ``load`` (the model), the stages that
``passes/start_times.py`` records, and ``other``.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from quire.attn_ops.backend import dtype_name
from quire.graph_runner.bench import workers
from quire.graph_runner.bench.models import Models, ModelSpec
from quire.graph_runner.bench.report import Row
from quire.graph_runner.bench.systems import SYSTEMS, Limits, NotMeasured, open_system
from quire.passes.start_times import seconds

PARTS = ("trace", "compile", "kernels", "autotune", "prefill kernels", "graph memory", "capture", "set-up")
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm",
           "QUIRE_CACHE_DIR": "quire", "PYTHONPYCACHEPREFIX": "bytecode"}


def start(spec: ModelSpec, system: str, attention: str, options: dict[str, Any]) -> Iterator[Row]:
    """A row for the cold start and one for the warm one."""
    if not SYSTEMS[system].starts:
        raise NotMeasured(f"{system} has no start-up of its own: it compiles, if at all, at the first batch of a size")
    job = {**vars(spec), "dtype": dtype_name(spec.dtype), "device": str(spec.device)}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: os.path.join(folder, sub) for name, sub in _CACHES.items()}
        caches["PYTHONDONTWRITEBYTECODE"] = ""  # empty: bytecode is kept, whatever is set here
        for variant in ("cold", "warm"):
            asked = {"spec": job, "system": system, "attention": attention, "options": options, "began": time.time()}
            (row,) = workers.rows(["-m", "quire.graph_runner.bench.start"], asked, caches)
            yield {"variant": variant, **row}


def main() -> None:
    """The measured process: makes the system, generates one token, prints a row."""
    job = workers.job()
    importlib.import_module("transformers")  # part of what a user waits for
    spec = ModelSpec(**{**job["spec"], "dtype": getattr(torch, job["spec"]["dtype"]),
                        "device": torch.device(job["spec"]["device"])})
    if spec.device.type == "cuda":
        torch.zeros(1, device=spec.device)  # makes the CUDA context
    ours, models = job["system"] == "quire", Models(spec)
    parts = {"import": time.time() - job["began"]}
    if ours:
        began = time.perf_counter()
        _ = models.model
        parts["load"] = time.perf_counter() - began
    with open_system(job["system"], models, job["attention"], Limits(256, 1024), job["options"]) as system:
        ready = time.time() - job["began"]
        began = time.perf_counter()
        system.generate([[1, 2, 3, 4]], [1], 0.0)
        first = time.perf_counter() - began
        parts |= {name: seconds.get(name, 0.0) for name in PARTS if ours}
        parts["other"] = ready - sum(parts.values())
        workers.emit({"seconds": ready, "parts_s": parts, "first_token_s": first, **system.facts(spec.device)})


if __name__ == "__main__":
    main()
