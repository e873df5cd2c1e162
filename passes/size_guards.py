"""What a compiler assumed about sizes, checked at each call.

One graph serves every batch shape, so Dynamo's guards are dropped. But a compiler may decide something by a size (or by a
float that Dynamo made an input) while it compiles, and note it as a guard: that a buffer is small enough for 32-bit offsets,
say. ``checked`` makes the compiled graph test those assumptions, once for every new combination of sizes, and refuse a batch
that breaks one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter

from passes.graph_tools import placeholders, value


@dataclass
class Assumptions:
    """Conditions on the inputs' sizes, as Python source over names of symbols; ``origins``: how to read each off the inputs."""

    origins: dict[str, Callable[..., Any]]
    conditions: list[str] = field(default_factory=list)
    symbols: set[str] = field(default_factory=set)


@contextlib.contextmanager
def watched(graph: fx.Graph) -> Iterator[Assumptions]:
    """The assumptions that are made while inside about the inputs of ``graph``."""
    found = Assumptions(_origins(graph))  # now: a symbol that gets specialised is no longer called by its name
    env = next((m.shape_env for n in placeholders(graph) if (m := getattr(value(n), "fake_mode", None)) is not None), None)
    before = len(env.guards) if env is not None else 0
    yield found
    for guard in env.guards[before:] if env is not None else ():
        names = {str(s) for s in guard.expr.free_symbols}
        if names <= found.origins.keys():  # else about a value inside the graph, which the graph itself asserts
            found.conditions.append(PythonPrinter().doprint(guard.expr))
            found.symbols |= names


def _origins(graph: fx.Graph) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for i, node in enumerate(placeholders(graph)):
        x = value(node)
        if isinstance(x, torch.SymInt):
            found.setdefault(str(x), lambda args, i=i: args[i])
        elif isinstance(x, torch.Tensor):
            for dim, size in enumerate(x.shape):
                if isinstance(size, torch.SymInt):
                    found.setdefault(str(size), lambda args, i=i, dim=dim: args[i].shape[dim])
            for user in node.users:  # a float comes as a tensor on the CPU
                if user.target == "item" and isinstance(value(user), torch.SymFloat):
                    found.setdefault(str(value(user)), lambda args, i=i: args[i].item())
    return found


def checked(run: Callable[..., Any], assumed: Assumptions) -> Callable[..., Any]:
    """``run``, which first checks what was assumed about its arguments.

    Raises (when called):
        RuntimeError: a condition does not hold; gives the condition and the sizes.
    """
    if not assumed.conditions:
        return run
    names = sorted(assumed.symbols)
    readers = [assumed.origins[n] for n in names]
    tests = [compile(c, "<assumed by the compiler>", "eval") for c in assumed.conditions]
    seen: set[tuple[Any, ...]] = set()

    def guarded(*args: Any) -> Any:
        sizes = tuple(read(args) for read in readers)
        if sizes not in seen:
            given = dict(zip(names, sizes, strict=True))
            for test, condition in zip(tests, assumed.conditions, strict=True):
                if not eval(test, {"math": math, "torch": torch}, given):
                    raise RuntimeError(
                        f"the compiled graph assumes {condition}, and this batch has "
                        f"{', '.join(f'{n} = {size}' for n, size in given.items())}. Schedule fewer tokens a step "
                        "(max_num_batched_tokens), or run with compiler='eager'.")
            seen.add(sizes)
        return run(*args)

    return guarded


__all__ = ["Assumptions", "checked", "watched"]
