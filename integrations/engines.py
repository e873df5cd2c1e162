"""The engine of a model that ``quire.paged`` was called on."""

from __future__ import annotations

from typing import Any

from quire.graph_runner.engine import Engine
from quire.graph_runner.paged import PagedGenerate, adapted_model
from quire.passes.capture.unserved_adapters import check_adapters_served


def engine_of(model: Any) -> Engine | None:
    """The engine behind ``model.generate``, also through the wrappers of PEFT and of data-parallel training; None if the model
    is not paged. Raises UnsupportedAttention if it does not serve what PEFT's wrapper does."""
    while "module" in vars(model).get("_modules", ()):  # DistributedDataParallel's
        model = model.module
    inner = adapted_model(model)
    if inner is not None:
        check_adapters_served(model)
        model = inner
    generate = vars(model).get("generate")
    return generate.engine if isinstance(generate, PagedGenerate) else None
