"""Dynamo's errors as users see them."""

from __future__ import annotations

import re

import torch

from quire.attn_ops.backend import UnsupportedAttention


def unwrapped(error: Exception, model: torch.nn.Module) -> Exception:
    """Our own error from inside Dynamo's, or one that names the model."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UnsupportedAttention):
            return UnsupportedAttention(str(cause))
        inner = getattr(cause, "inner_exception", None)
        cause = inner or cause.__cause__ or cause.__context__
    ours = re.search(r"UnsupportedAttention\((.*)\)$", str(error), re.MULTILINE)
    if ours is not None:  # an exception raised while tracing reaches us in Dynamo's text
        plain = re.search(r"ConstantVariable\(str: (['\"])(.*)\1\)", ours[1])  # as torch 2.11 shows it
        return UnsupportedAttention(plain[2] if plain else ours[1].strip("'\""))
    error = getattr(error, "inner_exception", None) or error  # not Dynamo's line, which prints the whole backend
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return UnsupportedAttention(f"{type(model).__name__} could not be traced into one graph: {type(error).__name__}: {first}"
                                f"{_reason(str(error))}")


def _reason(text: str) -> str:
    """What helps in Dynamo's further lines: what it met, and where in the user's code."""
    met = re.search(r"Developer debug context: *(\S.*)", text)
    places = re.findall(r'^ *(File ".*", line \d+)', text.partition("from user code")[2], re.MULTILINE)
    found = [part for part in (met and met[1].strip()[:200], places and places[-1][-90:]) if part]
    return f" ({'; '.join(found)})" if found else ""


__all__ = ["unwrapped"]
