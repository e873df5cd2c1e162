"""Evaluation mode while a model is traced, whatever other threads set meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class ChangedWhileTraced(RuntimeError):
    """Another thread changed the model while it was traced, so that the trace may be of neither state. Trace again."""


class _Train:
    """Stands for ``model.train`` for a while, and notes the modes that are asked for. A copy of the model has a copy of it,
    which works as the method does."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.modes: list[bool] = []

    def __call__(self, mode: bool = True) -> torch.nn.Module:
        self.modes.append(mode)
        return type(self.model).train(self.model, mode)


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """While inside, no module of the model is in training mode: no dropout. The modes come back, unless another thread has
    called the model's ``train`` or ``eval`` meanwhile: then its choice stays.

    Raises:
        ChangedWhileTraced: on leaving, if another thread put a module into training mode.
    """
    noted, own = _Train(model), "train" in vars(model)
    if not own:
        object.__setattr__(model, "train", noted)
    training = [m for m in model.modules() if m.training]
    for module in training:
        module.training = False

    def leave() -> ChangedWhileTraced | None:
        if not own:
            vars(model).pop("train", None)
        seen = next((name or type(model).__name__ for name, m in model.named_modules() if m.training), None)
        if not noted.modes:
            for module in training:
                module.training = True
        if seen is None and True not in noted.modes:
            return None
        return ChangedWhileTraced(f"{seen or type(model).__name__}.training: False -> True, by another thread while the model "
                                  "was traced; try again")

    try:
        yield
    except BaseException as error:
        if (changed := leave()) is not None and isinstance(error, Exception):
            raise changed from error
        raise
    if (changed := leave()) is not None:
        raise changed


__all__ = ["ChangedWhileTraced", "evaluating"]
