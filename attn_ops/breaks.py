"""Breaks: attention calls at which the recording of a step into graphs is interrupted.

Some attention cannot be recorded for every batch: its work is planned on the host for the lengths. So whoever records a step
may install a recorder, which gets each call of a paged op in the place of its implementation: it ends a graph there, notes the
call, and begins the next graph (``graph_runner/device_graph.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

from quire.attn_ops.context import setting

Implementation = Callable[..., torch.Tensor]
#: (implementation of a paged op, its fake, positional arguments, named arguments) -> the op's result
Recorder = Callable[[Implementation, Implementation, tuple[Any, ...], dict[str, Any]], torch.Tensor]
_recorder: ContextVar[Recorder | None] = ContextVar("quire_break_recorder", default=None)


def breaking(recorder: Recorder) -> AbstractContextManager[Recorder]:
    """While inside, in this context, paged ops go to ``recorder``."""
    return setting(_recorder, recorder)


def breakable(implementation: Implementation, fake: Implementation) -> Implementation:
    """The implementation of a paged op, with a break where a recorder is installed."""

    @functools.wraps(implementation)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        recorder = _recorder.get()
        return implementation(*args, **kwargs) if recorder is None else recorder(implementation, fake, args, kwargs)

    return call


def left_out(implementation: Implementation, fake: Implementation, args: tuple[Any, ...], kwargs: dict[str, Any]
             ) -> torch.Tensor:
    """A recorder for running the rest of a step: attention gives zeros, and writes nothing."""
    return fake(*args, **kwargs).zero_()
