"""The ``quire`` library of custom ops, and the one way to add an op to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.attn_ops.kernels.launch import implementations

LIBRARY = torch.library.Library("quire", "FRAGMENT")


def define_op(schema: str, *, cpu: Callable[..., Any] | None, cuda: Callable[..., Any] | None, fake: Callable[..., Any],
              launches: bool = False) -> Any:
    """Register ``quire::<schema>`` and return its overload. By ``Library`` and not ``custom_op``: a quarter of the call
    overhead, which eager steps pay once per layer.

    Args:
        cpu, cuda: implementations by device; None: no implementation for it.  fake: shapes, strides and dtypes of the results.
        launches: ``cuda`` launches all its Triton kernels with ``kernels.launch.launch`` and works on fake tensors, so that an
            engine can compile the kernels ahead.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key, implementation in (("CPU", cpu), ("CUDA", cuda)):
        if implementation is not None:
            LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"quire::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.quire, name).default
    if launches:
        assert cuda is not None
        implementations[op] = cuda
    return op
