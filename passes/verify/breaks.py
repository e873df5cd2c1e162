"""Refuses graphs that are not what runs: parts of a compiled function, and calls of functions of torch that were replaced."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch
from torch import fx

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.capture.reads import is_code_of
from quire.passes.fx import translator

_KEY = "quire_broken"
#: What operations of a graph are, besides Python functions of torch.
_OPERATIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
               type, torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator,
               torch._library.custom_ops.CustomOpDef)
#: torch's functions of two functions, which it makes when it is imported: ``F.max_pool2d`` with indices and without.
_DISPATCHED = frozenset(f for module in (torch.functional, torch.nn.functional) for f in vars(module).values()
                        if isinstance(f, types.FunctionType) and "<locals>" in f.__qualname__ and is_code_of(f, "torch"))


def check_whole(graph: fx.Graph) -> None:
    """Raises UnsupportedAttention, which names the break, for a graph that ``note_breaks`` found not to be the whole."""
    broken = getattr(graph.owning_module, "meta", {}).get(_KEY)
    if broken:
        raise UnsupportedAttention(
            f"the model is compiled in parts: torch.compile cuts its graph ({broken}), and what runs between the parts cannot "
            "be checked. quire.paged and quire.Engine trace the whole model, where they can; or remove what breaks the graph "
            "(torch._dynamo.explain, or fullgraph=True, says where)")


def check_names(graph: fx.Graph) -> None:
    """Refuse a graph that calls a function which it cannot show: one of torch in whose place a patch is (the code made of a
    graph calls it by its name, and would run the patch, inside of which Dynamo has found the function), or one that Dynamo was
    asked not to look into. Raises UnsupportedAttention, which names the function."""
    for target in {n.target for n in graph.nodes if n.op == "call_function"}:
        if isinstance(target, types.FunctionType):
            own = not is_code_of(target, "torch", "quire", "transformers")
            # In closures of torch's that are made later Dynamo holds functions of others.
            if own or ("<locals>" in target.__qualname__ and target not in _DISPATCHED):
                name = f"{target.__module__}.{target.__qualname__}" if own else "a function of the model's"
                raise UnsupportedAttention(
                    f"{name} is one operation of the graph (torch.compiler.allow_in_graph, nonstrict_trace), so that what it "
                    "computes, keeps and writes cannot be checked; let torch.compile trace it, or make it a method of a module")
        elif not isinstance(target, _OPERATIONS):
            raise UnsupportedAttention(f"the model's forward calls {target!r}, which is no operation of PyTorch (NumPy, in a "
                                       "torch.compile trace?), so that what it keeps and writes cannot be checked; compute "
                                       "with tensors")
        holder = sys.modules.get(getattr(target, "__module__", None) or "")
        name = getattr(target, "__name__", "")
        found = getattr(holder, name, target)
        if found is not target and not is_code_of(found, "torch"):
            raise UnsupportedAttention(
                f"{target.__module__}.{name} was replaced by {getattr(found, '__qualname__', found)!r}, and a graph cannot "
                f"hold both; undo that, and replace the forward of the modules that call {name} instead.")


def note_breaks(gm: fx.GraphModule) -> None:
    """Called by a Dynamo backend with its graph: note whether it is a part of the traced function only."""
    tx = translator()
    if tx is None:
        return
    reason = tx.output.compile_subgraph_reason
    if reason is not None and reason.graph_break:
        gm.meta[_KEY] = f"graph break in {tx.f_code.co_name}: {reason.reason.splitlines()[0]}"
    elif tx.f_code.co_name.startswith("torch_dynamo_resume_in_"):
        gm.meta[_KEY] = f"the graph begins behind a break in {tx.f_code.co_name.removeprefix('torch_dynamo_resume_in_')}"
    elif (caller := _untraced_caller()) is not None:
        gm.meta[_KEY] = f"{caller} runs uncompiled"


def _untraced_caller() -> str | None:
    """The Python function that called the one being traced, if it is not torch.compile's own wrapper: Dynamo gave it up."""
    frame: Any = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "__call__" and _is_in(frame, "_dynamo", "convert_frame.py")
                                     and not _is_in(frame.f_back, "_dynamo", "convert_frame.py")):
        frame = frame.f_back
    frame = frame.f_back if frame is not None else None
    while frame is not None and _is_in(frame, "nn", "modules", "module.py"):  # of the compiled module: its call, and hooks
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and (module._forward_hooks or module._forward_pre_hooks):
            return f"a hook of {type(module).__name__}"
        frame = frame.f_back
    return None if frame is None or _is_in(frame, "_dynamo", "") else str(frame.f_code.co_qualname)


def _is_in(frame: Any, *path: str) -> bool:
    return frame is not None and os.path.join(os.sep, "torch", *path) in frame.f_code.co_filename
