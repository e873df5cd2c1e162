"""Counts the steps of optimizers: those with ``fused=True``, and others with kernels of their own, change parameters without
increasing the version counters that PyTorch has for in-place changes."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_count = 0
_counting = False


def optimizer_steps() -> int:
    """Steps of all optimizers of the process since this was first called."""
    global _counting
    if not _counting:
        _counting = True
        register_optimizer_step_post_hook(_stepped)
    return _count


def _stepped(*_: Any) -> None:
    global _count
    _count += 1
