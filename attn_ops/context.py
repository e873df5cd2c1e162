"""Values of context variables for the length of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def setting(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """Inside, in this context, ``variable`` has that value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
