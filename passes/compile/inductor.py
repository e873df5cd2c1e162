"""Compile a lowered graph: with Inductor, layer by layer or whole, or run it op by op."""

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
    """``lowered.gm`` as a callable that takes its placeholders' values.

    Args:
        compiler: one of COMPILERS.
        look: see ``compile_by_regions``; not called for a graph that is not cut.
    """
    if compiler == "eager":
        return lowered.gm.forward
    if compiler == "inductor-whole":
        return inductor(lowered.gm, [value(n) for n in placeholders(lowered.gm.graph)])
    return compile_by_regions(lowered, inductor, look=look)


def inductor(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile for fake ``inputs``, without two features of Inductor: its CUDA graphs, which would record again for every new
    cache, and the padding of weights, for which Inductor of torch 2.11 makes an assumption about the number of tokens.

    Sums of eight terms are unrolled, as those of fewer are: as a reduction, the weighted sum of eight experts took 40 us
    per layer for 32 tokens on an H200 (benchmarks/results/h200_profile_qwen3-30b-a3b.json)."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch._inductor.compile_fx import compile_fx

    settings = {"triton.cudagraphs": False, "shape_padding": False, "unroll_reductions_threshold": 9}
    compiled: Any = functools.partial(compile_fx, gm, inputs, config_patches=settings)
    before = set(TensorifyState.force_specializations)
    try:
        return compiled()
    except TensorifyScalarRestartAnalysis:
        # Floats that Dynamo made inputs (with dynamic=True) but that must be constants are noted by now. Dynamo would trace
        # again; the second try makes guards of their values, which passes/compile/size_guards.py sees.
        return compiled()
    finally:
        TensorifyState.force_specializations.intersection_update(before)


__all__ = ["COMPILERS", "compile_lowered", "inductor"]
