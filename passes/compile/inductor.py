"""Compile a lowered graph: with Inductor, layer by layer or whole, or run it op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.compiler import config

from quire.passes import sources
from quire.passes.compile.regions import Look, compile_by_regions
from quire.passes.fx import placeholders, value, written
from quire.passes.rewrite.lower import Lowered

COMPILERS = ("inductor", "inductor-whole", "eager")


def compile_lowered(lowered: Lowered, compiler: str, look: Look | None = None) -> Callable[..., Any]:
    """``lowered.gm`` as a callable on its placeholders' values, by one of COMPILERS. ``look``: of ``compile_by_regions``."""
    if compiler == "eager":
        return written(lowered.gm).forward
    if compiler == "inductor-whole":
        return inductor(lowered.gm, [value(n) for n in placeholders(lowered.gm.graph)])
    return compile_by_regions(lowered, inductor, look=look)


#: Inductor's options. Its CUDA graphs would record again for every new cache; the padding of weights makes Inductor of torch
#: 2.11 assume something about the number of tokens. Sums of eight terms are unrolled, as those of fewer are: as a reduction,
#: the weighted sum of eight experts took 40 us per layer for 32 tokens on an H200
#: (benchmarks/results/h200_profile_qwen3-30b-a3b.json).
SETTINGS = {"triton.cudagraphs": False, "shape_padding": False, "unroll_reductions_threshold": 9}


def inductor(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile for fake ``inputs`` with ``SETTINGS``. Inductor's caches know a graph by its operations, but not what quire's ops
    say of their results, which the compiled code relies on: so quire's source is part of their keys."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch._inductor.compile_fx import compile_fx

    def compiled() -> Callable[..., Any]:
        with config.patch(  # type: ignore[attr-defined]
                cache_key_tag=f"{config.cache_key_tag} quire {sources.digest()}".strip()):
            made: Any = compile_fx(gm, inputs, config_patches=SETTINGS)
            return made

    before = set(TensorifyState.force_specializations)
    try:
        return compiled()
    except TensorifyScalarRestartAnalysis:
        # Floats that Dynamo made inputs (with dynamic=True) but that must be constants are noted by now. Dynamo would trace
        # again; the second try makes guards of their values, which passes/compile/size_guards.py sees.
        return compiled()
    finally:
        TensorifyState.force_specializations.intersection_update(before)
