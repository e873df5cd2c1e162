"""Whether transformers' code alone decides what attention its interface stands for.

For a trace by the interface (``hf_interface.py``) the implementation has another name, and what transformers calls by its own
names is not traced. So code of the user that chooses by the name would choose something else then: a class with an eager
attention of its own, or with a branch for one implementation. Such a model is traced as it is, and its attention is raised.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from quire.passes.capture import hf_interface
from quire.passes.capture.followed import names_of
from quire.passes.capture.own_masks import ChosenByUser, own_functions, strings_of
from quire.passes.fx import module_path
from quire.passes.verify.sites import site_nodes

_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\w+)')
#: What the call of a layer asks for, and who makes the mask of that. Without quire the mask alone decides.
_MAKERS = {"window": "create_sliding_window_causal_mask", "chunk": "create_chunked_causal_mask"}
_NAME = "_attn_implementation"  # also the beginning of others that hold it


def check_code(model: torch.nn.Module | None, read: Mapping[str, Any]) -> None:
    """``model``: None if its own code was checked. ``read``: of ``Reads.values``, or ``functions_beside``. Raises ChosenByUser:
    code that is not transformers' own reads the implementation's name."""
    for where, function in own_functions(model, read):
        code = function.__code__
        if any(name.startswith(_NAME) for name in names_of(code) | strings_of(code)):
            raise _chosen(where)


def check_callers(graph: fx.Graph) -> None:
    """``graph``: traced by the interface. Raises ChosenByUser: other code than transformers' own calls the attention function
    of a site."""
    import transformers

    package = os.path.join(Path(transformers.__file__).parent, "")
    for node in site_nodes(graph):
        frames = _FRAME.findall(node.stack_trace or "")
        if not frames:
            raise _chosen("code that the trace does not name")
        ours = next((i for i, (file, *_) in enumerate(frames) if file == hf_interface.__file__), 0)
        if ours and not frames[ours - 1][0].startswith(package):
            raise _chosen(frames[ours - 1][2])


def check_mask_makers(graph: fx.Graph, made: Collection[str]) -> None:
    """``graph``: traced by the interface. ``made``: names of functions that its code read, or may have. Raises ChosenByUser:
    a layer has a window or chunk, of which that code makes no mask."""
    for node in site_nodes(graph):
        for option, maker in _MAKERS.items():
            if node.kwargs.get(option) is not None and maker not in made:
                where, size = module_path(node) or node.name, node.kwargs[option]
                raise ChosenByUser(f"the layer at {where} has a {option} of {size}, but "
                                   f"the forward around it makes no mask of that (by {maker})")


def names_around(graph: fx.Graph) -> set[str]:
    """Names that the functions read in which the sites' attention was called, and the functions of these names in their files.
    For a trace of which nobody notes what it reads."""
    frames = {frame for node in site_nodes(graph) for frame in _FRAME.findall(node.stack_trace or "")}
    found = set[str]()
    for file, line, name in frames:
        codes = _codes(file)
        for code in codes:
            if code.co_name == name and int(line) in {at for *_, at in code.co_lines()}:
                found |= (names := names_of(code))
                found |= {inner for each in codes if each.co_name in names for inner in names_of(each)}
    return found


@functools.cache
def _codes(file: str) -> list[types.CodeType]:
    """The code of all functions of a file; none if it cannot be read."""
    try:
        codes = [compile(Path(file).read_text(encoding="utf-8"), file, "exec")]
    except (OSError, SyntaxError, ValueError):
        return []
    for code in codes:  # grows
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return codes[1:]


def functions_beside(model: torch.nn.Module) -> dict[str, Any]:
    """The functions that methods of the model's modules may call by name, one through another, and those in the files of
    transformers' modules; by name. For a trace of which nobody notes what it reads."""
    files = sorted(file for file in {type(module).__module__ for module in model.modules()} & sys.modules.keys()
                   if file.startswith("transformers."))
    found = {f"{file}.{name}": f for file in files for name, f in vars(sys.modules[file]).items()
             if isinstance(f, types.FunctionType)}
    left = [f for _, f in own_functions(model, found)]
    while left:
        scope, code = (f := left.pop()).__globals__, f.__code__
        for name in names_of(code) & scope.keys():
            called, where = scope[name], f"{scope['__name__']}.{name}"
            if isinstance(called, types.FunctionType) and where not in found:
                found[where] = called
                left += [g for _, g in own_functions(None, {where: called})]
    return found


def _chosen(where: str) -> ChosenByUser:
    return ChosenByUser(f"{where}, which is not transformers' code, chooses the attention function by the implementation's "
                        "name, so quire's attention may stand for another one than it computes")
