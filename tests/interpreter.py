"""Triton's interpreter without work that changes nothing: tests run many kernels in it.

* Each call of a ``@triton.jit`` function from a kernel patches ``triton.language`` anew, which walks through all its members.
  Once a launch is enough: nothing is restored before the launch ends.
* Every sum, difference and product of integers is computed a second time, in int64, for a check of overflow, which is then left
  out: it is made only with ``debug``, and the interpreter's options have that off.
"""

from __future__ import annotations

import dataclasses
from types import FunctionType
from typing import Any


def make_faster() -> None:
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang"):  # not a name to rely on; 3.6 and 3.7 have it
        return
    original, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    languages = (interpreter.tl, interpreter.tl.core)
    patched: set[tuple[bool, ...]] = set()

    def patch_lang(fn: FunctionType) -> Any:
        found = tuple(any(value is language for value in fn.__globals__.values()) for language in languages)
        if found in patched:
            return None  # a call from within a kernel, which leaves no patch to restore
        patched.add(found)
        return original(fn)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
