"""Copies of weights that follow them.

When the engine gets work after it was idle, all are written again, whatever changed the weights; while it is busy, before each
step for which a version counter or an address of the originals has changed, or an optimizer has stepped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_count = 0
_counting = False


class Copies:
    """``copies[i]``, of the shape of ``originals[i]`` and maybe a part of a larger tensor, is that in its own dtype, rounded to
    ``through`` before (None: not), times ``factors[i]`` (None: 1)."""

    def __init__(self, originals: Sequence[torch.Tensor], copies: Sequence[torch.Tensor],
                 factors: Sequence[float] | None = None, through: torch.dtype | None = None) -> None:
        self._originals, self._copies, self._through = list(originals), list(copies), through
        self._seen: list[Any] = []
        scaled = [(c, f) for c, f in zip(copies, factors or (), strict=factors is not None) if f != 1]
        self._scaled, self._factors = [c for c, _ in scaled], [f for _, f in scaled]
        self._copy()

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return sum(c.numel() * c.element_size() for c in self._copies)

    def is_behind(self) -> bool:
        """Whether a change of the originals was counted."""
        return bool(self._copies) and self._seen != _versions(self._originals)

    def refresh(self, everything: bool) -> None:
        """Write the copies again. ``everything`` False: only if a change of the originals was counted."""
        if self._copies and (everything or self.is_behind()):
            self._copy()

    def _copy(self) -> None:
        self._seen = _versions(self._originals)  # first: an update during the copy is seen at the next step
        if self._copies:
            with torch.inference_mode(False), torch.no_grad():
                torch._foreach_copy_(self._copies, [t.detach().to(self._through or t.dtype) for t in self._originals])
                if self._scaled:
                    torch._foreach_mul_(self._scaled, self._factors)


def _versions(tensors: list[torch.Tensor]) -> list[Any]:
    return [optimizer_steps(), *((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)]


def optimizer_steps() -> int:
    """Steps of all optimizers of the process since this was first called. Those with ``fused=True``, and others with kernels of
    their own, change parameters without increasing the version counters that PyTorch has for in-place changes."""
    global _counting
    if not _counting:
        _counting = True
        register_optimizer_step_post_hook(_stepped)
    return _count


def _stepped(*_: Any) -> None:
    global _count
    _count += 1
