"""Copies of weights that follow them.

When the engine gets work after it was idle, all are written again, whatever changed the weights; while it is busy, before each
step for which a version counter or an address of the originals has changed, or something has written that tells otherwise
(``uncounted_writes``).
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from quire.passes.tensor_version import has_version

_VERSION, _ADDRESS = operator.attrgetter("_version"), operator.attrgetter("_cdata")
_count = 0


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
        if not self._copies:
            return False
        try:
            return self._seen != self._counts()
        except RuntimeError:  # an original has lost its counter: torch.utils.swap_tensors
            return True

    def _counts(self) -> list[Any]:
        """What differs after a change: engines call this before each step, so the loops are C's."""
        return [uncounted_writes(), *map(_VERSION, self._counted), *map(torch.Tensor.data_ptr, self._originals),
                *map(_ADDRESS, map(torch.Tensor.untyped_storage, self._originals)),
                *map(torch.Tensor.is_inference, self._uncounted)]

    def refresh(self, everything: bool) -> None:
        """Write the copies again. ``everything`` False: only if a change of the originals was counted."""
        if self._copies and (everything or self.is_behind()):
            self._copy()

    def _copy(self) -> None:
        self._counted = [t for t in self._originals if has_version(t)]
        self._uncounted = [t for t in self._originals if not has_version(t)]
        self._seen = self._counts()  # first: an update during the copy is seen at the next step
        self._storages = [StorageWeakRef(t.untyped_storage()) for t in self._originals]  # hold addresses, no memory
        if self._copies:
            with torch.inference_mode(False), torch.no_grad():
                torch._foreach_copy_(self._copies, [t.detach().to(self._through or t.dtype) for t in self._originals])
                if self._scaled:
                    torch._foreach_mul_(self._scaled, self._factors)


def uncounted_writes() -> int:
    """How often, since this was first called, something in the process has written parameters without increasing the version
    counters that PyTorch has for in-place changes: steps of all optimizers (those with ``fused=True``, and others with kernels
    of their own), and of PEFT ``hotswap_adapter`` and what ``count_merges`` names, which write through ``p.data``."""
    _count_steps()
    if "peft" in sys.modules:
        _count_hotswaps()
    return _count


def count_merges(layers: Iterable[torch.nn.Module]) -> None:
    """Let ``uncounted_writes`` count calls of ``merge`` and ``unmerge`` of PEFT's layers of these classes."""
    for kind in {kind for layer in layers for kind in type(layer).__mro__}:
        for name in {"merge", "unmerge"}.intersection(vars(kind)):
            if not hasattr(write := vars(kind)[name], "counted_by_quire"):
                setattr(kind, name, _counted(write))


def _wrote(*_: Any) -> None:
    global _count
    _count += 1


_count_steps = functools.cache(lambda: register_optimizer_step_post_hook(_wrote))


@functools.cache
def _count_hotswaps() -> None:
    """PEFT has no hook for it: the function that ``hotswap_adapter`` calls is replaced."""
    try:
        from peft.utils import hotswap
    except ImportError:  # a PEFT that has none
        return
    hotswap.hotswap_adapter_from_state_dict = _counted(hotswap.hotswap_adapter_from_state_dict)


def _counted(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def counted(*args: Any, **options: Any) -> Any:
        try:
            return write(*args, **options)
        finally:  # it may have written some
            _wrote()

    counted.counted_by_quire = True  # type: ignore[attr-defined]
    return counted
