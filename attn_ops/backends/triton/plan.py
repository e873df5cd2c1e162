"""What a launch of ``decode`` or ``extend`` needs besides tensors: it follows from shapes, and is worked out once per shape."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from quire.attn_ops.kernels import host

#: Parts of long sequences beyond one for each, in a schedule (``schedule.py``): there is a program for each of them and each
#: block of heads, which takes 2 ns if it finds no part.
EXTRA_PARTS = 128
#: Ways to cut keys, by sixteenths of the fewest keys per part: three parts where the first has two, three where it has four.
CUTS = (16, 11, 22)
C = TypeVar("C", bound=Any)
_overrides: dict[type, dict[str, Any]] = {}
_planners: list[Any] = []


def cut_sizes(fewest: int) -> tuple[int, ...]:
    """Keys per part, by cut."""
    return tuple(max(1, fewest * sixteenths // 16) for sixteenths in CUTS)


def schedule_size(num_reqs: int) -> int:
    """int32 elements of a schedule for so many sequences."""
    return len(CUTS) * (3 + num_reqs + EXTRA_PARTS)


def scheduled_reqs(size: int) -> int:
    """The sequences of a schedule of that size."""
    return size // len(CUTS) - 3 - EXTRA_PARTS


class Site(NamedTuple):
    """Constants of an attention site: query heads, window and chunk (0: none)."""

    heads: int
    window: int
    chunk: int


class Batch(NamedTuple):
    """The paged op's tensors of metadata, for a kernel."""

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor


class Plan(NamedTuple):
    """Args:
        grid: of the launch.  params: DecodeConfig, ExtendConfig or MlaConfig.
        splits: most programs per slot; of a decode, programs per block of heads.
        workspace: float32 elements for partial results; 0: none.
        constants: the kernel's constant arguments: (site, layout of the cache, tile), of MLA (tile,).
        items: tokens or sequences that are served.  scheduled: by a schedule (``schedule.py``), not ``splits`` each.
    """

    grid: tuple[int]
    params: Any
    splits: int
    workspace: int
    constants: tuple[Any, ...]
    items: int = 0
    scheduled: bool = False

    def buffers(self, prepared: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Workspace and zeroed counters, those of the forward if it has any; None where keys are not split."""
        if not self.workspace:
            return None, None
        counters = prepared[0] if prepared else host.new_counters(device)
        return torch.empty(self.workspace, dtype=torch.float32, device=device), counters


def planner(function: C) -> C:
    """Cache a function from shapes to a Plan."""
    cached: Any = functools.lru_cache(maxsize=4096)(function)
    _planners.append(cached)
    return cached


def tuned(config: C) -> C:
    """``config``, a NamedTuple, with the fields that ``overridden`` sets."""
    return config._replace(**_overrides.get(type(config), {}))


@contextlib.contextmanager
def overridden(kind: Callable[..., Any], **params: Any) -> Iterator[None]:
    """Set fields of DecodeConfig or ExtendConfig (``kind``) by hand; for benchmarks and tests, not thread-safe."""
    assert isinstance(kind, type)
    saved = _overrides.get(kind, {})
    try:
        _overrides[kind] = saved | params
        for cached in _planners:
            cached.cache_clear()
        yield
    finally:
        _overrides[kind] = saved
        for cached in _planners:
            cached.cache_clear()
