"""Methods of a runner, whatever is set in the thread that calls them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch


def by_itself(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run the method of a runner, which has a ``device``, or its ``__init__``, whose first argument is the model.

    Autocast is off: a step holds requests of several threads, and what is compiled or captured under autocast stays so. The
    model's GPU is the current one, on whose stream events are recorded.
    """

    @functools.wraps(method)
    def run(runner: Any, *args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            device = runner.device if hasattr(runner, "device") else next(args[0].parameters()).device
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            return method(runner, *args)

    return run


__all__ = ["by_itself"]
