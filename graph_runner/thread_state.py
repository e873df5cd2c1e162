"""Steps run with torch's default settings, whatever the calling thread has set."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch


def isolated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method of a runner without what the caller's thread has set, and without gradients.

    Autocast is off: a step holds requests of several threads, and what is compiled or captured under autocast stays so. So is
    inference mode, which a runner's tensors outlive. The GPU of the model (``device`` of the runner; in its constructor, of the
    first argument's parameters) is the current one, on whose stream events are recorded.
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
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            return method(runner, *args)

    return run
