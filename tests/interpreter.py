"""Triton's interpreter without work that changes nothing: tests run many kernels in it.

* Each call of a ``@triton.jit`` function from a kernel patches ``triton.language`` anew, which walks through all its members.
  Once a launch is enough: nothing is restored before the launch ends.
* Every sum, difference and product of integers is computed a second time, in int64, for a check of overflow, which is then left
  out: it is made only with ``debug``, and the interpreter's options have that off.
* Each call of a function of ``triton.language`` builds its keyword arguments twice, and asks whether one of them is there.
* Every value makes its type, and its shape in ``constexpr``, anew. Both follow from the element type and the sizes, and nothing
  changes them: equal ones share them. The same holds for the dtype of NumPy that stands for a type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import FunctionType
from typing import Any


def make_faster() -> None:
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang"):  # not a name to rely on; 3.6 and 3.7 have it
        return
    original, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    languages = (interpreter.tl, interpreter.tl.core)
    seen: dict[FunctionType, tuple[bool, ...]] = {}
    patched: set[tuple[bool, ...]] = set()

    def patch_lang(fn: FunctionType) -> Any:
        if (found := seen.get(fn)) is None:
            found = seen[fn] = tuple(any(v is language for v in fn.__globals__.values()) for language in languages)
        if found in patched:
            return None  # a call from within a kernel, which leaves no patch to restore
        patched.add(found)
        return original(fn)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_attr(obj: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def patched_member(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return function(*args, **kwargs, _semantic=semantic)

        scope.set_attr(obj, name, patched_member)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call
    if hasattr(interpreter, "interpreter_semantic"):
        interpreter._patch_attr = patch_attr
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    _share_types(interpreter)


def _share_types(interpreter: Any) -> None:
    core, numpy_type = interpreter.tl.core, interpreter._get_np_dtype
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        values = shape.values if type(shape) is core.tuple else shape
        sizes = tuple([s.value if type(s) is core.constexpr else s for s in values])
        known = blocks.get(key := (element_ty.name, sizes))
        if known is None or {*map(type, sizes)} != {int}:  # 8.0 is refused, and the same key as 8
            make_block(self, element_ty, shape)
            blocks[key] = {k: v for k, v in vars(self).items() if k != "element_ty"}
        else:
            self.element_ty = element_ty
            vars(self).update(known)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        known = shapes.get(type.name)
        if known is None:
            make_tensor(self, handle, type)
            shapes[type.name] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = known

    def dtype(type: Any) -> Any:
        if (known := numpy_types.get(type.name)) is None:
            known = numpy_types[type.name] = numpy_type(type)
        return known

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block_type, tensor, dtype
