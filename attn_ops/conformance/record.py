"""Results of the kit, and their form on disk: ``{"environment": ..., "runs": [...]}``."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.attn_ops.registry import all_backends
from quire.attn_ops.tuning.store import device_name


@dataclass(frozen=True)
class Result:
    """One line of the report. ``status``: "ok", "FAIL" or "skip".

    ``error``: the largest difference from the expected numbers; ``of_bound``: the largest in units of what is allowed; None
    where nothing was compared.
    """

    check: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    error: float | None = None
    of_bound: float | None = None


def read_results(files: Sequence[str | Path], asked: dict[str, Any]) -> dict[str, Result]:
    """The results, by check and without failures, of the run of a backend, device, dtype and KV dtype; of files with this
    device and these versions."""
    device = asked["device"]
    here, found = environment([device]), dict[str, Result]()
    for file in files:
        record = json.loads(Path(file).read_text())
        env = record["environment"]
        if env["versions"] != here["versions"] or env["devices"].get(device) != here["devices"][device]:
            continue
        for run in record["runs"]:
            if all(run[key] == value for key, value in asked.items()):
                found |= {r["check"]: Result(**r) for r in run["results"] if r["status"] != "FAIL"}
    return found


def environment(devices: Sequence[str]) -> dict[str, Any]:
    """Date, devices, and versions of torch and of the packages that backends name."""
    versions = {"quire": "", "torch": torch.__version__}
    for name in ("quire", *sorted({p for b in all_backends().values() for p in b.packages})):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions.pop(name, None)
    return {"date": datetime.date.today().isoformat(), "python": platform.python_version(), "versions": versions,
            "devices": {d: device_name(torch.device(d)) for d in devices}}


def write_record(path: str | Path, runs: Sequence[dict[str, Any]]) -> None:
    """Write runs and their environment to a JSON file."""
    record = {"environment": environment(sorted({run["device"] for run in runs})), "runs": list(runs)}
    whole, part = Path(path), Path(f"{path}.part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(whole)  # a reader never sees half a file
