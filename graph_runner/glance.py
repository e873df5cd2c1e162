"""A quick check that the attributes of a module are what they were, for ``model_guard.py``."""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

_PLAIN = frozenset((bool, int, float, complex, str, bytes, range, type(None), torch.dtype, torch.device, torch.Size,
                    torch.layout, torch.memory_format))
CONTAINERS = (list, tuple, dict, set, frozenset)


def is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or isinstance(value, (enum.Enum, int, float, str))


class Items(NamedTuple):
    """What is in a dict, list or set, ``kind``: ``keys`` of a dict or members of a set, ``values``, and what is in those of
    them, by number, that are containers themselves."""

    kind: Any
    keys: Any
    values: tuple[Any, ...]
    inner: tuple[tuple[int, Items], ...]

    @classmethod
    def of(cls, value: Any, depth: int = 3) -> Items | None:
        """None for containers of other types, with keys or members that are not plain, or with more than ``depth`` others
        inside each other, such as itself."""
        kind = type(value)
        if not depth or kind not in (dict, list, set) or kind is not list and not all(map(is_plain, value)):
            return None
        values: tuple[Any, ...] = () if kind is set else tuple(value.values() if kind is dict else value)
        inner = list[tuple[int, Items]]()
        for i, v in enumerate(values):
            if isinstance(v, CONTAINERS) and not is_plain(v):
                if (items := cls.of(v, depth - 1)) is None:
                    return None
                inner.append((i, items))
        return cls(kind, tuple(value) if kind is dict else frozenset(value) if kind is set else None, values,
                   tuple(inner))

    def are_in(self, value: Any) -> bool:
        """Whether ``value`` has these, as objects: what is equal may be of another type."""
        if type(value) is not self.kind:
            return False
        if self.kind is set:
            return value == self.keys
        if len(value) != len(self.values):
            return False
        if self.kind is dict and not all(map(value.__contains__, self.keys)):
            return False
        found: list[Any] = [value[key] for key in self.keys] if self.kind is dict else value
        return all(map(operator.is_, found, self.values)) and all(items.are_in(self.values[i]) for i, items in self.inner)


class Glance(NamedTuple):
    """Quick check of a module that has no hooks and no forward of its own: if all this is unchanged, so are its facts, which
    take ten times as long to compare. ``names``: of all attributes. ``same``: those that must be the same objects: plain
    values, and what is compared as an object. ``kinds``: those that are not compared as long as they are of these types.
    ``held``: what must be in those that may change in place. ``tensors``: see ``ModelGuard._tensors``."""

    names: frozenset[str]
    same: Mapping[str, Any]
    kinds: Mapping[str, type]
    held: Mapping[str, Items]
    tensors: tuple[Any, ...]

    def holds(self, own: dict[str, Any]) -> bool:
        """Whether the attributes ``own`` are as they were."""
        get = own.__getitem__  # of the same names, or it is not called
        return (own.keys() == self.names and all(map(operator.is_, map(get, self.same), self.same.values()))
                and all(map(operator.is_, map(type, map(get, self.kinds)), self.kinds.values()))
                and all(items.are_in(own[name]) for name, items in self.held.items()))
