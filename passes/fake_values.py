"""The fake values of nodes, computed from those of their inputs.

Computing with symbolic sizes takes up to a millisecond per node, and a model repeats its layers. So of nodes that do the same
with inputs alike only the first is computed, and the others get fakes like its result: in memory of their own, or in that of
the same input. (PyTorch's own cache of fakes makes each result twice, to see that it can, and is off.) What an operation makes
of fakes follows from their metadata, what memory they share, and the state of PyTorch (gradients, autocast). A node that gives
neither tensors nor numbers may be there to change that state, so after one nothing is taken from another node any more. Known
not to change it: operators, an assignment to parts of a tensor, and what ``nn.Module()`` leaves in the graph, as in
``self.layers[:n]``.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import re
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves, tree_structure

from quire.passes.fx import evaluate, sizes_of, storage_of, value, written_by

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_PASSES_ON = re.compile(r"[/\\]torch[/\\](fx[/\\]experimental[/\\]|__init__\.py$)|[/\\]fake_values\.py$")
_KEEPS_STATE = (operator.setitem, torch._C._log_api_usage_once)
#: Makes a result like another one, of inputs like its inputs. It holds no fake, which would keep the mode.
Make = Callable[[list[Any], FakeTensorMode], Any]
#: None: a node has perhaps changed the state of PyTorch.
_made: weakref.WeakKeyDictionary[FakeTensorMode, dict[Any, Make] | None] = weakref.WeakKeyDictionary()


class _Odd(Exception):
    """A node of which nothing is taken from another."""


@dataclass(frozen=True)
class At:
    """Stands for a node, by its place among the inputs of another or in a graph."""

    index: int


class Symbols(ShapeEnv):
    """A ShapeEnv that knows by itself which files do not ask for a symbol or a guard but pass it on: PyTorch imports all of
    torch.export for that."""

    def _get_user_frame(self) -> types.FrameType | None:
        frame = inspect.currentframe()
        while frame is not None and _PASSES_ON.search(frame.f_code.co_filename):
            frame = frame.f_back
        return frame


class Replay(fx.Interpreter):
    """Sets the example_value of all nodes. Run it in ``mode``, without gradients, with fakes of that mode."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self._mode = mode

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        result = n.meta["example_value"] = computed(n, value, self._mode, super().run_node)
        return result


def compute_value(node: fx.Node) -> fx.Node:
    """Give a new node the fake value that follows from its inputs' fake values; returns the node."""
    leaves = (t for x in node.all_input_nodes for t in tree_leaves(value(x)))
    mode = next((m for t in leaves if (m := getattr(t, "fake_mode", None)) is not None), None)

    def compute(node: fx.Node) -> Any:
        inputs = {n: value(n) for n in node.all_input_nodes}
        evaluate([node], inputs)
        return inputs[node]

    with torch.no_grad(), enable_python_dispatcher(), mode or contextlib.nullcontext():
        node.meta["example_value"] = compute(node) if mode is None else computed(node, value, mode, compute)
    return node


def made_like(node: fx.Node, like: fx.Node) -> fx.Node:
    """``compute_value`` of a new node, which counts as one of the module that made ``like``."""
    node.meta["nn_module_stack"] = like.meta.get("nn_module_stack")
    return compute_value(node)


def computed(node: fx.Node, of: Callable[[fx.Node], Any], mode: FakeTensorMode, compute: Callable[[fx.Node], Any]
             ) -> Any:
    """What ``compute`` gives for a node in ``mode``, or a value like that of an equal one. ``of``: the values of its inputs."""
    made = _made.setdefault(mode, {})
    try:
        if made is None:
            raise _Odd
        inputs = [leaf for x in node.all_input_nodes for leaf in tree_leaves(of(x))]
        key = _key(node, of, inputs)
    except _Odd:
        with disable_fake_tensor_cache(mode):
            result = compute(node)
        if not (isinstance(node.target, torch._ops.OpOverload) or node.target in _KEEPS_STATE) and not all(
                isinstance(x, (torch.Tensor, *_NUMBERS)) or type(x) in _PLAIN and x is not None
                for x in tree_leaves(result, is_leaf=lambda x: x is None)):
            _made[mode] = None
        return result
    if key in made:
        return made[key](inputs, mode)
    with disable_fake_tensor_cache(mode):
        result = compute(node)
    if (make := again(result, inputs)) is not None:
        made[key] = make
    return result


def again(result: Any, inputs: list[Any]) -> Make | None:
    """Makes a result like this one; None: only computing it does."""
    if (kind := type(result)) in (tuple, list):
        each = [again(x, inputs) if isinstance(x, torch.Tensor) else None for x in result]
        if None in each:
            return None
        own = [storage_of(x) for x in result if _place(x, inputs) is None]
        if len(own) != len(set(own)):
            return None
        return lambda inputs, mode: kind(make(inputs, mode) for make in each if make is not None)
    if not isinstance(result, torch.Tensor):
        return None  # as cheap to compute
    same = next((i for i, x in enumerate(inputs) if x is result), None)
    if same is not None:
        return lambda inputs, mode: inputs[same]
    try:
        _described(result, {})
    except _Odd:
        return None
    sizes, strides, offset = result.shape, result.stride(), result.storage_offset()
    dtype, device, at = result.dtype, result.device, _place(result, inputs)
    if result.requires_grad or isinstance(result, torch.nn.Parameter) or not _symbols(result) <= {
            s for x in inputs for s in _symbols(x)}:  # sizes that depend on data
        return None
    if offset != 0 if at is None else inputs[at].dtype != dtype or inputs[at].device != device:  # a view as another dtype
        return None
    nbytes = result.untyped_storage().nbytes()

    def make(inputs: list[Any], mode: FakeTensorMode) -> torch.Tensor:
        with in_kernel_invocation_manager(mode):
            memory = torch.empty(0, dtype=dtype, device="meta") if at is None else inputs[at]
            if at is None:  # made with that size it would be computed from the symbols again, which takes most of the time
                torch.ops.inductor.resize_storage_bytes_(memory, nbytes)
            return FakeTensor(mode, memory.as_strided(sizes, strides, offset), device)

    return make


def _place(x: torch.Tensor, inputs: list[Any]) -> int | None:
    """The number of the first input in whose memory a tensor is."""
    return next((i for i, y in enumerate(inputs) if isinstance(y, torch.Tensor) and storage_of(y) == storage_of(x)), None)


def _key(node: fx.Node, of: Callable[[fx.Node], Any], inputs: list[Any]) -> Any:
    """Equal for nodes that give the same, up to memory. Raises _Odd if the node changes something or reads odd values."""
    if node.op not in ("call_function", "call_method") or written_by(node) or not any(
            isinstance(x, torch.Tensor) for x in inputs) or torch._C._functorch.maybe_current_level() is not None:
        raise _Odd
    number: dict[fx.Node, Any] = {x: At(i) for i, x in enumerate(node.all_input_nodes)}
    # As text: True is not 1, 0.0 is not -0.0.
    spelled = repr(fx.node.map_arg((node.args, node.kwargs), lambda n: number[n]))
    nested = tuple(repr(tree_structure(of(x))) for x in node.all_input_nodes)
    state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), *(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")))
    memory: dict[int, int] = {}
    return node.op, node.target, spelled, nested, state, tuple(_described(x, memory) for x in inputs)


def _described(x: Any, memory: dict[int, int]) -> Any:
    """What computing with a value depends on. ``memory``: storages, numbered as they come."""
    if isinstance(x, torch.Tensor):
        if type(x) is not FakeTensor or x.constant is not None or x.layout is not torch.strided or x.is_conj() or x.is_neg():
            raise _Odd
        return (x.dtype, x.device, x.requires_grad, isinstance(x, torch.nn.Parameter), sizes_of(x),
                memory.setdefault(storage_of(x), len(memory)))
    if isinstance(x, _NUMBERS):
        return type(x), x.node.expr
    if type(x) in _PLAIN:
        return type(x), repr(x)
    raise _Odd


def any_sizes(fake: FakeTensorMode) -> contextlib.AbstractContextManager[Any]:
    """A context in which sizes that depend on data may be made without being accounted for."""
    return fake.shape_env.ignore_fresh_unbacked_symbols() if fake.shape_env is not None else contextlib.nullcontext()


def fake_input(fake: FakeTensorMode, name: str, like: torch.Tensor, dynamic: Sequence[bool], device: torch.device
               ) -> torch.Tensor:
    """A fake of ``like`` on ``device`` whose sizes marked ``dynamic`` are symbols."""
    form: Any = (like.shape, like.stride())
    if fake.shape_env is not None:
        *form, _ = fake.shape_env.create_symbolic_sizes_strides_storage_offset(
            like, ConstantSource(name), symbolic_context=symbolic_sizes(dynamic))
    with fake, disable_fake_tensor_cache(fake):
        return torch.empty_strided(*form, dtype=like.dtype, device=device)


def fake_beside(first: FakeTensor, like: torch.Tensor) -> torch.Tensor:
    """A fake of ``like`` on the device of the fake ``first``, as long as that in dimension 0, which no stride depends on."""
    with first.fake_mode, disable_fake_tensor_cache(first.fake_mode):
        return torch.empty_strided((first.shape[0], *like.shape[1:]), like.stride(), dtype=like.dtype, device=first.device)


def symbolic_sizes(dynamic: Sequence[bool], base: Any = None) -> Any:
    """Which sizes of a fake are symbols, as Dynamo says it. ``base``: the same of the tensor of which it is a view."""
    return StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC if d else DimDynamic.STATIC for d in dynamic],
                                    view_base_context=base)


def _symbols(x: Any) -> set[Any]:
    numbers = (*x.shape, *x.stride(), x.storage_offset()) if isinstance(x, torch.Tensor) else (x,)
    return {s for n in numbers if isinstance(n, _NUMBERS) for s in n.node.expr.free_symbols}
