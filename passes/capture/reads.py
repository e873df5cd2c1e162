"""What a trace read of the model, as names: Dynamo's guards say so, which a whole-model trace drops."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def names_read(guards: Iterable[Any]) -> set[str]:
    """Every attribute name and key in the guards' sources and arguments. ``guards``: as ``guard_filter_fn`` gets them."""
    found: set[str] = set()
    for guard in guards:
        found.update(re.findall(r"[A-Za-z_]\w*", guard.name))
        create = getattr(getattr(guard, "orig_guard", None), "create_fn", None)  # a partial: names that were looked up in vain
        arguments = (*getattr(create, "args", ()), *(getattr(create, "keywords", None) or {}).values())
        found.update(value for value in arguments if isinstance(value, str))
    return found


__all__ = ["names_read"]
