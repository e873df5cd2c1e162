"""The start workload: from the start of a process until the system is ready to take requests.

The process is a fresh Python that builds the model, makes the system and then generates one token (no part of the time,
but on record as ``first_token_s``: a system that puts work off shows it there). ``cold``: with empty caches of
Inductor, Triton, quire and vLLM; ``warm``: with what the cold start left. Kernels that FlashInfer compiled are kept in both.

quire's time is split into ``import`` (Python, torch, transformers), ``load`` (the model), ``trace``, ``compile``,
``autotune`` (matrix shapes that nobody measured), ``capture`` (CUDA graphs, and compiling the kernels that they run first),
``set-up`` (sizing the KV cache, the trial batch) and ``other``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.graph_runner.bench.shapes import ModelSpec
from quire.graph_runner.bench.systems import NotMeasured
from quire.graph_runner.bench.workloads import Row, Tick

MARK = "QUIRE_START "
SYSTEMS = ("quire", "vllm", "vllm-transformers")
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm",
           "QUIRE_CACHE_DIR": "quire"}


def start(spec: ModelSpec, system: str, attention: str, options: dict[str, Any], tick: Tick) -> Iterator[Row]:
    """A row for the cold start and one for the warm one."""
    if system not in SYSTEMS:
        raise NotMeasured(f"{system} has no start-up of its own: it compiles, if at all, at the first batch of a size")
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: os.path.join(folder, sub) for name, sub in _CACHES.items()}
        for variant in ("cold", "warm"):
            yield {"variant": variant, **_run(spec, system, attention, options, caches)}
            tick()


def _run(spec: ModelSpec, system: str, attention: str, options: dict[str, Any], caches: dict[str, str]) -> Row:
    job = {"name": spec.name, "dtype": str(spec.dtype).removeprefix("torch."), "device": str(spec.device),
           "layers": spec.layers, "quantization": spec.quantization, "system": system, "attention": attention,
           "options": options, "began": time.time()}
    root = str(Path(__file__).resolve().parents[2])  # works from a source tree that is not installed, too
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "quire.graph_runner.bench.start_probe", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **caches, "PYTHONPATH": path})
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).strip().splitlines() or [""]
        raise RuntimeError(f"the process that starts {system} ended with exit code {done.returncode}: {said[-1]}\n"
                           + "\n".join(said[-40:]))
    return dict(json.loads(lines[-1].removeprefix(MARK)))
