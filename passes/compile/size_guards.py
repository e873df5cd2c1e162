"""What a compiler assumed about sizes, checked at each call.

One graph serves every batch shape, so Dynamo's guards are dropped. But a compiler may decide something by a size (or by a float
that Dynamo made an input), and note it as a guard: that a buffer is small enough for 32-bit offsets, say. ``checked`` tests
those assumptions once for every new combination of sizes, and refuses a batch that breaks one.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.fx import fake_mode, placeholders, value

SYMBOL = re.compile(r"\b[a-z]+\d+\b")  # names of symbols in expressions


@dataclass
class Assumptions:
    """Conditions on the inputs' sizes, as Python source over names of symbols. ``origins``: how to read the number of each
    symbol from the inputs. ``roles``: what each symbol counts, such as "tokens"."""

    origins: dict[str, Callable[..., Any]]
    roles: dict[str, str]
    conditions: list[str] = field(default_factory=list)

    def broken(self, sizes: dict[str, Any]) -> str | None:
        """The first condition on symbols of ``sizes`` alone that does not hold for them, with roles for symbols."""
        for condition in self.conditions:
            names = set(SYMBOL.findall(condition)) & self.origins.keys()
            if names <= sizes.keys() and not eval(condition, {"math": math, "torch": torch}, sizes):
                return SYMBOL.sub(lambda match: self.roles.get(match[0], match[0]), condition)
        return None


def forget_bounds(size: Any) -> None:
    """Let a dynamic ``size`` be any number from 2 on, whatever a trace found it to be bounded by: a model may assert that a
    sequence has no more tokens than a table has rows, and a step has those of many. The compiler takes a known bound for
    granted, and would note no condition for it."""
    env, symbol, any_number = size.node.shape_env, size.node.expr, ValueRanges(2, int_oo)
    if env.var_to_range.get(symbol, any_number) != any_number:
        env.var_to_range[symbol] = any_number
        env._update_version_counter()  # what follows from the bound is remembered


@contextlib.contextmanager
def watched(graph: fx.Graph, earlier: list[Any]) -> Iterator[Assumptions]:
    """Collect the assumptions about the inputs of ``graph`` that are made inside. ``earlier``: guards of previous compilations
    of graphs with the same symbols, which count too, as a guard is noted only once; the new ones are added. Raises
    UnsupportedAttention if something was assumed about a size that no input has, which could not be checked."""
    found = Assumptions(*_origins(graph))  # now: a symbol that gets specialized loses its name
    mode = fake_mode(graph)
    env = mode.shape_env if mode is not None else None
    before = len(env.guards) if env is not None else 0
    yield found
    new = [guard.expr for guard in (env.guards[before:] if env is not None else ())]
    for expr in new:
        unknown = [s for s in map(str, expr.free_symbols) if s not in found.origins and not s.startswith("u")]  # u: unbacked
        if unknown:
            raise UnsupportedAttention(f"the compiler assumes {expr}, and no input of the graph has the size {unknown[0]}, so "
                                       "this could not be checked; compiler='eager' runs the graph as it is.")
    earlier += new
    for expr in dict.fromkeys(earlier):
        names = {str(s) for s in expr.free_symbols}
        if names <= found.origins.keys():  # else about a value made inside the graph, which the graph itself asserts
            found.conditions.append(PythonPrinter().doprint(expr))


#: (part of an input's name, dimension or None for any, what it counts)
_ROLES = (("input_ids", None, "tokens"), ("position_ids", None, "tokens"), ("slot_mapping", 0, "tokens"),
          ("seq_lens", 0, "rows"), ("logits_indices", 0, "rows"), ("block_table", 1, "pages_of_a_row"))


def _origins(graph: fx.Graph) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    found: dict[str, Callable[..., Any]] = {}
    roles: dict[str, str] = {}
    for i, node in enumerate(placeholders(graph)):
        x = value(node)
        if isinstance(x, torch.SymInt):
            found.setdefault(str(x), lambda args, i=i: args[i])
        elif isinstance(x, torch.Tensor):
            for dim, size in enumerate(x.shape):
                if isinstance(size, torch.SymInt):
                    found.setdefault(str(size), lambda args, i=i, dim=dim: args[i].shape[dim])
                    for role in (role for name, at, role in _ROLES if name in node.name and at in (dim, None)):
                        roles.setdefault(str(size), role)
            for user in node.users:  # a float comes as a tensor on the CPU
                if user.target == "item" and isinstance(value(user), torch.SymFloat):
                    found.setdefault(str(value(user)), lambda args, i=i: args[i].item())
    return found, roles


def checked(run: Callable[..., Any], assumed: Assumptions) -> Callable[..., Any]:
    """``run``, which first checks what was assumed of its arguments. It raises RuntimeError, with the condition and sizes."""
    if not assumed.conditions:
        return run
    names = sorted(set(SYMBOL.findall(" ".join(assumed.conditions))) & assumed.origins.keys())
    readers = [assumed.origins[n] for n in names]
    seen: set[tuple[Any, ...]] = set()

    def guarded(*args: Any) -> Any:
        sizes = tuple(read(args) for read in readers)
        if sizes not in seen:
            given = dict(zip(names, sizes, strict=True))
            condition = assumed.broken(given)
            if condition is not None:
                raise RuntimeError(
                    f"the compiled graph assumes {condition}, and this batch has "
                    f"{', '.join(f'{assumed.roles.get(n, n)} = {size}' for n, size in given.items())}. Schedule fewer tokens "
                    "per step (max_num_batched_tokens), or run with compiler='eager'.")
            seen.add(sizes)
        return run(*args)

    return guarded
