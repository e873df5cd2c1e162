"""Whether traced code may have asked for ``requires_grad`` where Dynamo's guards do not show it.

Of a tensor that the model holds they do: Dynamo guards the type of one that is asked. But code may ask what an operation gave,
which may be that very tensor (``weight.float()`` of a float32 weight), and a ``torch.autograd.Function`` may ask its context.
"""

from __future__ import annotations

import os
import sys
import types

import torch
from torch import fx
from torch._guards import TracingContext

from quire.passes.capture.followed import names_in
from quire.passes.fx import placeholders, value

#: Packages whose autograd functions compute the same whether gradients are needed or not.
_KNOWN = ("torch", "transformers", "peft", "accelerate", "trl", "bitsandbytes", "torchao")
_WORDS = frozenset(("requires_grad", "needs_input_grad", "is_leaf", "grad_fn"))


def may_ask_unseen(gm: fx.GraphModule) -> bool:
    """Whether the trace of ``gm``, which Dynamo has just made, may depend on ``requires_grad`` of any of its inputs."""
    codes = getattr(TracingContext.try_get(), "traced_code", None)
    if codes is None:
        return True
    known = tuple(os.path.dirname(file) + os.sep for name in _KNOWN
                  if (file := getattr(sys.modules.get(name), "__file__", None)))
    return any(_asks(code, gm.graph) for code in codes if not code.co_filename.startswith(known))


def _asks(code: types.CodeType, graph: fx.Graph) -> bool:
    words = names_in(code) & _WORDS
    return "needs_input_grad" in words or bool(words) and _has_gradients(graph)


def _has_gradients(graph: fx.Graph) -> bool:
    """Whether something in the graph may need gradients as an input does: it is traced without, so it is that input, or was
    computed where the model's own code switched them on."""
    inputs = {id(value(node)) for node in placeholders(graph)}
    return any(id(value(node)) in inputs or node.target is torch._C._set_grad_enabled and True in node.args
               for node in graph.nodes if node.op not in ("placeholder", "output"))
