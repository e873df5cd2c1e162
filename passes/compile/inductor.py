"""From a lowered graph to something that runs: Inductor, layer by layer or whole, or the graph as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import fx

from quire.passes.compile.regions import Look, compile_by_regions
from quire.passes.fx import placeholders, value
from quire.passes.rewrite.lower import Lowered

COMPILERS = ("inductor", "inductor-whole", "eager")


def compile_lowered(lowered: Lowered, compiler: str, look: Look | None = None) -> Callable[..., Any]:
    """``lowered.gm`` as a callable that takes its placeholders' values; ``compiler`` is one of COMPILERS. ``look``: see
    ``compile_by_regions``; a graph that is not cut is not looked at."""
    if compiler == "eager":
        return lowered.gm.forward
    if compiler == "inductor-whole":
        return inductor(lowered.gm, [value(n) for n in placeholders(lowered.gm.graph)])
    return compile_by_regions(lowered, inductor, look=look)


def inductor(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile for fake ``inputs``. CUDA graphs are ours to capture; Inductor's own would record again for every new cache.
    Weights keep their shapes: to decide whether to pad them, Inductor of torch 2.11 compares the number of tokens with them,
    and assumes the answer for good."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch._inductor.compile_fx import compile_fx

    settings = {"triton.cudagraphs": False, "shape_padding": False}
    compiled: Any = functools.partial(compile_fx, gm, inputs, config_patches=settings)
    before = set(TensorifyState.force_specializations)
    try:
        return compiled()
    except TensorifyScalarRestartAnalysis:
        # Floats that Dynamo made inputs (dynamic=True does so) and that must be constants are noted by now. Dynamo would trace
        # anew; the second try makes guards of their values, which passes/compile/size_guards.py sees.
        return compiled()
    finally:
        TensorifyState.force_specializations.intersection_update(before)


__all__ = ["COMPILERS", "compile_lowered", "inductor"]
