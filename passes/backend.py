"""``torch.compile(model, backend="quire")``: one traced graph, two ways to run it.

With no paged step in progress the graph runs as it is, through Inductor: the model behaves as under plain ``torch.compile``,
training included. Inside ``quire.step`` the same graph runs raised, verified, lowered and fused, on the step's KV cache
(``passes/pipeline.py``). Which one is decided at each call, so no guard and no second trace is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from quire.attn_ops.step import current_step
from quire.passes.capture.traced import TracedGraph
from quire.passes.fusions.base import FusedWeights
from quire.passes.fx import copy_graph
from quire.passes.options import QuireOptions
from quire.passes.pipeline import PagedGraph


@dataclass(eq=False)  # Dynamo compares backends with ==
class QuireBackend:
    """The Dynamo backend as an object, which keeps the graphs that it was given; torch.compile users get it by name."""

    options: QuireOptions
    weights: FusedWeights = field(default_factory=FusedWeights)
    graphs: list[QuireGraph] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> QuireGraph:
        graph = QuireGraph(TracedGraph(gm, example_inputs), self)
        self.graphs.append(graph)
        step = current_step()
        if step is not None:  # compile while Dynamo waits, so that errors are a compilation's
            graph.paged.compiled(step)
        return graph


class QuireGraph:
    """One graph that Dynamo traced, callable with its inputs."""

    def __init__(self, traced: TracedGraph, owner: QuireBackend) -> None:
        self.traced, self.owner = traced, owner
        self.paged = PagedGraph(traced, owner.options, owner.weights)
        self._plain: Callable[..., Any] | None = None
        for tensor in traced.module_tensors[:1]:  # See NOTE [Not kept alive]: what fusions made goes with the model
            weakref.finalize(tensor, self.paged.drop).atexit = False

    def __call__(self, *args: Any) -> Any:
        step = current_step()
        if step is not None:
            return self.paged(step, *args)
        if self._plain is None:
            self._plain = self._compile_plain()
        return self._plain(*args)

    def _compile_plain(self) -> Callable[..., Any]:
        gm = self.traced.gm
        if self.owner.options.compiler == "eager":
            return gm.forward
        # Its own guards: this may be long after tracing. Sizes that were found to vary are not made constants again.
        varies = any(isinstance(x, torch.SymInt) for x in self.traced.inputs)
        return torch.compile(copy_graph(gm), backend="inductor", dynamic=True if varies else None)


def quire_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None,
                  mode: str | None = None) -> Callable[..., Any]:
    """Entry point ``torch_dynamo_backends: quire``. ``options``: see QuireOptions.

    Raises:
        TypeError: an unknown option. ValueError: a ``mode`` (Inductor's modes would bring their own CUDA graphs).
    """
    if mode not in (None, "default"):
        raise ValueError(f"backend 'quire' takes no mode (got {mode!r}): CUDA graphs are quire's own. Use options={{...}}")
    chosen = QuireOptions.of(options)
    if chosen.max_model_len is not None:
        raise ValueError("max_model_len is an option of quire.Engine; in a step by hand sequences are as long as you make them")
    return QuireBackend(chosen)(gm, example_inputs)


__all__ = ["QuireBackend", "QuireGraph", "QuireOptions", "quire_backend"]
