"""Fusion passes after raising and before lowering: each is one file, one function Graph -> number of matches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

logger = logging.getLogger(__name__)

#: name -> pass
FUSIONS: dict[str, Callable[..., Any]] = {}


@dataclass
class FusedWeights:
    """Weights made by fusions, shared by the graphs of one backend object."""

    extra: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def tensors_of(self, graph: Any) -> list[torch.Tensor]:
        return self.extra.get(id(graph), [])

    def restore(self) -> None:
        """Give the model its own parameters back."""
        self.extra.clear()


def apply_fusions(owner: Any, gm: fx.GraphModule, inputs: list[Any], names: str | Sequence[str],
                  weights: FusedWeights) -> list[Any]:
    return []
