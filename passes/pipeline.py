"""The paged way of a traced graph: lowered and fused for a backend and a cache format, compiled, and run in a step.

Order of the passes: raise_sdpa and verification (``passes/capture/traced.py``), select the backend, fusions of the raised graph, lower,
fusions of the lowered graph, compile. With fusions for small batches there are two compiled graphs, and a call picks by its
number of tokens.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext, tracing

from quire.attn_ops.backend import AttentionBackend, UnsupportedAttention
from quire.attn_ops.ops.small_linear import MAX_TOKENS
from quire.attn_ops.selection import Selection, select_backend
from quire.attn_ops.step import Step, ensure_planned
from quire.passes.capture.traced import TracedGraph
from quire.passes.compile.ahead import CompileAhead, StepShape
from quire.passes.compile.inductor import compile_lowered
from quire.passes.compile.size_guards import Assumptions, checked, watched
from quire.passes.eager import check_step
from quire.passes.fusions.base import FusedInputs, FusedWeights, apply_fusions, apply_lowered_fusions, has_small_passes
from quire.passes.fx import copy_graph, placeholders, symbolic, value
from quire.passes.options import QuireOptions
from quire.passes.rewrite.lower import Lowered, LoweringTarget, lower
from quire.passes.start_times import stage

logger = logging.getLogger(__name__)


@dataclass
class Compiled:
    """A graph compiled for one backend, cache format and set of fusions. ``run_small``: for at most MAX_TOKENS tokens."""

    lowered: Lowered
    selection: Selection
    fused: FusedInputs
    run: Callable[..., Any]
    run_small: Callable[..., Any] | None = None


class PagedGraph:
    """What a traced graph does in paged steps.

    Attributes:
        compilations: what was compiled so far, by (backend, page size, KV dtype, layout, with fusions).
        assumed: by the compiler, about sizes; of each compilation.
    """

    def __init__(self, traced: TracedGraph, options: QuireOptions, weights: FusedWeights, ahead: CompileAhead | None = None
                 ) -> None:
        self.traced, self.options, self.weights, self.ahead = traced, options, weights, ahead
        self.compilations: dict[Any, Compiled] = {}
        self.assumed: list[Assumptions] = []
        self._guards: list[Any] = []
        self._selected: dict[Any, Selection] = {}
        self._warned = False

    def __call__(self, step: Step, *args: Any) -> Any:
        """Run in ``step``, with the inputs that Dynamo gives the traced graph."""
        compiled = self.compiled(step)
        tokens = self.traced.num_tokens(args)
        if tokens is not None:
            check_step(step, tokens)
        self.traced.raised.meta["quire_stored_masks"].check(args)
        if not compiled.fused.hold(args):
            if not self._warned:
                self._warned = True
                logger.warning("parameters are not those that were fused (replaced, or another module's): running unfused")
            compiled = self.compiled(step, fusions=False)
        lowered = compiled.lowered
        ensure_planned(step, lowered.target.backend, list(lowered.sites))
        step.served.update(lowered.inputs.layers)
        run = compiled.run_small if compiled.run_small and tokens is not None and tokens <= MAX_TOKENS else compiled.run
        with torch.no_grad():
            return run(*args, *compiled.fused.tensors, *lowered.inputs.of(step))

    def compiled(self, step: Step | None = None, fusions: bool = True) -> Compiled:
        """Compiled for ``step``, or for the options before there is one. ``fusions`` False: without them, for parameters that
        are not those which were fused.

        Raises:
            UnsupportedAttention: no backend can serve the graph, or not the one asked for.
            ValueError: the options ask for another cache than the step has.
        """
        target, selection = self._target(step)
        key = (target.backend.name, target.page_size, target.kv_dtype or self.traced.sites[0].dtype, target.layout, fusions)
        if key not in self.compilations:  # by name or as "auto", a backend's graph is compiled once
            self.compilations[key] = self._compile(target, selection, self.options.fusions if fusions else "none")
        return self.compilations[key]

    def drop(self) -> None:
        """Forget what was compiled, and the weights that fusions made."""
        self.compilations.clear()
        self.weights.drop()

    def _target(self, step: Step | None) -> tuple[LoweringTarget, Selection]:
        options, sites = self.options, self.traced.sites
        attention: Any = options.attention
        page_size, kv_dtype, layout = options.page_size, options.kv_cache_dtype, options.layout or "NHD"
        if step is not None:
            if step.attention != "auto":
                attention = step.attention
            page_size, kv_dtype, layout = step.cache.page_size, step.cache.dtype, step.cache.layout
            for option, given, found in (("page_size", options.page_size, page_size), ("layout", options.layout, layout),
                                         ("kv_cache_dtype", options.kv_cache_dtype, kv_dtype)):
                if given is not None and given != found:
                    raise ValueError(f"the model is compiled with {option}={given}, and the step's cache has {found}; leave "
                                     "the option out, or make a cache that goes with it")
        assert page_size is not None
        asked = (attention.name if isinstance(attention, AttentionBackend) else attention, page_size, kv_dtype, layout)
        if asked not in self._selected:
            self._selected[asked] = select_backend(attention, sites, device=self.traced.device, page_size=page_size,
                                                   kv_dtype=kv_dtype, layout=layout)
        selection = self._selected[asked]
        return LoweringTarget(selection.backend, page_size, kv_dtype, layout), selection

    def lowered(self, target: LoweringTarget, fusions: str | Sequence[str], small: bool = False) -> tuple[Lowered, FusedInputs]:
        """Lowered and fused, not compiled. ``small``: the graph for at most MAX_TOKENS tokens."""
        gm = copy_graph(self.traced.raised)
        fused = apply_fusions(gm, self.traced.inputs, fusions, self.weights, small)
        lowered = lower(gm, target)
        apply_lowered_fusions(lowered, fusions, small)
        return lowered, fused

    def _compile(self, target: LoweringTarget, selection: Selection, fusions: str | Sequence[str]) -> Compiled:
        lowered, fused = self.lowered(target, fusions)
        if not has_small_passes(fusions):
            return Compiled(lowered, selection, fused, self._run_of(lowered))
        lowered_small, _ = self.lowered(target, fusions, small=True)
        if self.ahead is not None:
            self.ahead.start_tuning(self.weights.small_linears, self.traced.device)
        run = self._run_of(lowered, lambda shape: shape.tokens > MAX_TOKENS)
        small = self._run_of(lowered_small, lambda shape: shape.tokens <= MAX_TOKENS)
        return Compiled(lowered, selection, fused, run, small)

    def _run_of(self, lowered: Lowered, fits: Callable[[StepShape], bool] = lambda shape: True) -> Callable[..., Any]:
        inputs = [value(n) for n in placeholders(lowered.gm.graph)]  # fakes: fused parameters have moved since tracing
        with torch.no_grad(), _traced_in(self.traced.context), watched(
                lowered.gm.graph, self._guards) as assumed, stage("compile"):
            look = functools.partial(self.ahead.start, roles=assumed.roles, fits=fits) if self.ahead is not None else None
            run = compile_lowered(lowered, self.options.compiler, look)
        _check_still_dynamic(inputs)
        self.assumed.append(assumed)
        return checked(run, assumed)


def _traced_in(context: TracingContext | None) -> Any:
    """The tracing context Dynamo had: still there inside the backend call, put back if we compile later."""
    if context is None or TracingContext.try_get() is context:
        return torch.no_grad()
    return tracing(context)


def _check_still_dynamic(inputs: list[Any]) -> None:
    """Tensor subclasses (quantised weights) and custom ops run Python code while the compiler traces them, and that may
    settle the number of tokens: the compiled code would then serve this number alone, and nobody guards it."""
    for x in inputs:
        size: Any
        for size in x.shape if isinstance(x, torch.Tensor) else ():
            if symbolic(size) and size.node.shape_env.replace(size.node.expr).is_number:
                raise UnsupportedAttention(
                    f"compiling the model settled a size that changes from batch to batch (at {size}): an operation in "
                    "it, such as a quantised layer, depends on the number of tokens. compiler='eager' runs it as it is.")


__all__ = ["Compiled", "PagedGraph"]
