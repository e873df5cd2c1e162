"""``torch.compile(model, backend="quire")``: one traced graph, two ways to run it.

Outside paged steps it runs as it is, through Inductor: as under plain ``torch.compile``, training included. Inside
``quire.step`` it runs raised, verified, lowered and fused, on the step's KV cache (``passes/pipeline.py``). Each call decides.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from quire.attn_ops.step import current_step
from quire.passes.capture.retrace import TracedCall
from quire.passes.capture.traced import TracedGraph
from quire.passes.fusions.base import FusedWeights
from quire.passes.fx import is_module_tensor, placeholders
from quire.passes.options import QuireOptions
from quire.passes.recompile_limit import note_traced


@dataclass(eq=False)  # Dynamo compares backends with ==
class QuireBackend:
    """The Dynamo backend as an object, which keeps the graphs that it was given; torch.compile users get it by name."""

    options: QuireOptions
    weights: FusedWeights = field(default_factory=FusedWeights)
    graphs: list[TracedGraph] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> TracedGraph:
        note_traced()
        graph = TracedGraph(gm, example_inputs, self.options, self.weights, call=TracedCall.current())
        self.graphs.append(graph)
        if (tensor := _first_tensor(gm, example_inputs)) is not None:  # See NOTE [Not kept alive]: weights go with the model
            weakref.finalize(tensor, graph.drop).atexit = False
        if (step := current_step()) is not None:
            graph.prepare(step)
        return graph


def quire_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None,
                  mode: str | None = None) -> TracedGraph:
    """Entry point ``torch_dynamo_backends: quire``. ``options``: see QuireOptions. Raises TypeError for an unknown option,
    ValueError for a ``mode`` (Inductor's modes bring their own CUDA graphs)."""
    if mode not in (None, "default"):
        raise ValueError(f"backend 'quire' takes no mode (got {mode!r}): CUDA graphs are quire's own. Use options={{...}}")
    chosen = QuireOptions.of(options)
    if chosen.max_model_len is not None:
        raise ValueError("max_model_len is an option of quire.Engine; in a step by hand sequences are as long as you make them")
    if chosen.window_tables:
        raise ValueError("window_tables is for quire.Engine; in a step by hand all layers have one block table")
    if chosen.kv_sharing_fast_prefill:
        raise ValueError("kv_sharing_fast_prefill is an option of quire.Engine, which knows the tokens whose logits are wanted")
    first = _first_tensor(gm, example_inputs)
    weights = FusedWeights() if first is None else _weights.setdefault(first, FusedWeights())
    return QuireBackend(chosen, weights)(gm, example_inputs)


#: By the first parameter of a graph. Graphs of one model share what fusions make, else each would take the parameters over.
_weights = WeakTensorKeyDictionary()


def _first_tensor(gm: fx.GraphModule, inputs: Sequence[Any]) -> torch.Tensor | None:
    pairs = zip(placeholders(gm.graph), inputs, strict=True)
    return next((x for node, x in pairs if is_module_tensor(node) and isinstance(x, torch.Tensor)), None)
