"""Functions that Dynamo runs uncompiled, because it has traced them as often as its limit allows."""

from __future__ import annotations

import types
import weakref

import torch

from quire.passes.fx import translator

#: Those that were traced for quire's backend.
_traced: weakref.WeakSet[types.CodeType] = weakref.WeakSet()


def note_traced() -> None:
    """Note the function that Dynamo is tracing."""
    code = getattr(getattr(getattr(translator(), "output", None), "root_tx", None), "f_code", None)
    if isinstance(code, types.CodeType):
        _traced.add(code)


def at_limit() -> str:
    """Of functions that were traced for quire as often as Dynamo allows: a sentence that names one and the remedy, for the end
    of a message. Empty if there are none."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list  # read for an error only: PyTorch may rename it

    for code in list(_traced):
        if (times := len(_debug_get_cache_entry_list(code))) >= torch._dynamo.config.recompile_limit:
            return (f" If it is compiled already: {code.co_name} ({code.co_filename}:{code.co_firstlineno}) has been traced "
                    f"{times} times, as often as torch._dynamo.config.recompile_limit allows, and runs uncompiled where no "
                    "trace fits. Call torch._dynamo.reset(), which forgets the traces, and raise the limit if so many are "
                    "needed.")
    return ""
