"""The engine of a model that ``quire.paged`` was called on."""

from __future__ import annotations

from typing import Any

from quire.graph_runner.engine import Engine
from quire.graph_runner.paged import PagedGenerate


def engine_of(model: Any) -> Engine | None:
    """The engine behind ``model.generate``, also through the wrappers of PEFT and of data-parallel training; None if the model
    is not paged."""
    for wrapped in ("module", "base_model"):  # DistributedDataParallel's, PEFT's
        while not isinstance(vars(model).get("generate"), PagedGenerate) and wrapped in vars(model).get("_modules", ()):
            model = getattr(model, wrapped)
            model = getattr(model, "model", model) if wrapped == "base_model" else model
    generate = vars(model).get("generate")
    return generate.engine if isinstance(generate, PagedGenerate) else None


__all__ = ["engine_of"]
