"""What a fusion pass works on, and the weights that fusions make.

A fusion pass is one function ``(Fusion) -> number of matches`` in a file of its own. It rewrites ``Fusion.graph`` in place and
does nothing else (``passes/fusions/registry.py``).
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.tuning.small_linear import LinearShape
from quire.passes.fake_values import made_like
from quire.passes.fx import LINEAR, add_input, argument, is_function, placeholders, value
from quire.passes.verify.quantized import addresses

logger = logging.getLogger(__name__)


def _references(tensor: torch.Tensor) -> int:
    """Number of tensors that refer to the storage of ``tensor``, up to a constant."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_ONE = _references(torch.empty(1, device="cpu"))


def _in_shared_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_shared()  # always true on CUDA


def owns_memory(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is all of its storage and nothing else refers to it: no view, flat buffer or tie by ``.data``, and no
    other process. (CUDA memory that another process maps is not recognized.)"""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return whole and _references(tensor) == _ONE and not _in_shared_memory(tensor)


def _is_view(tensor: torch.Tensor, of: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()


@dataclass
class FusedWeights:
    """Tensors that hold several parameters, or codes or scales of quantized ones, end to end along dim 0: ``fused``, by the ids
    of the parameters. ``small_linears``: shapes of the layers that the pass of that name gave to its kernel.

    The parameters become views of them, so nothing is stored twice and in-place updates (optimizers, ``load_state_dict``) reach
    the fused tensor. Nothing here keeps a parameter alive: see NOTE [Not kept alive].

    NOTE [Memory of fused parameters]: a parameter is moved only if it owns its memory alone (``owns_memory``), so no flat
    buffer, tied tensor or process keeps an old copy. Its old storage is freed: else the weights would take twice the memory.
    ``restore`` gives it one like the old: the parameter alone, whole, from offset 0, with its present values. Only the address
    differs. A view or tie made of a fused parameter in between keeps the fused memory, and no longer follows the parameter.
    """

    fused: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    small_linears: set[LinearShape] = field(default_factory=set)
    _members: dict[tuple[int, ...], list[weakref.ref[torch.Tensor]]] = field(default_factory=dict)
    _warned: bool = False

    @property
    def parameters(self) -> dict[tuple[int, ...], list[torch.Tensor]]:
        """The parameters in each of ``fused`` that are still alive."""
        return {key: [p for ref in refs if (p := ref()) is not None] for key, refs in self._members.items()}

    def can_fuse(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether ``fuse`` may move these: each owns its memory, or they are fused already."""
        if self._are_fused(parameters) or all(map(owns_memory, parameters)):
            return True
        if not self._warned:
            self._warned = True
            logger.warning("some parameters share memory with other tensors, which fusing would break: they are not fused")
        return False

    def fuse(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """One tensor holding ``parameters`` end to end along dim 0; they become views of it. Of three dims (scales of int4,
        whose rows are dim 1) the first two become one."""
        key = tuple(map(id, parameters))
        if not self._are_fused(parameters):
            with torch.inference_mode(False), torch.no_grad():
                dtype = parameters[0].dtype
                codes = dtype.itemsize == 1  # not every version of torch concatenates every dtype of one byte
                rows = [p.detach().flatten(0, 1) if p.dim() == 3 else p.detach() for p in parameters]
                fused = torch.cat([p.view(torch.uint8) if codes else p for p in rows]).view(dtype)
                for p, part in zip(parameters, fused.split([len(each) for each in rows]), strict=True):
                    part = part.view(p.shape)
                    with torch.inference_mode(p.is_inference()):  # a parameter of that mode stays one
                        p.data = p.new_empty(0).set_(part.untyped_storage(), part.storage_offset(), p.shape, part.stride())
            self.fused[key], self._members[key] = fused, [weakref.ref(p) for p in parameters]
        return self.fused[key]

    def drop(self) -> None:
        """Forget the fused tensors; parameters stay views of them."""
        self.fused.clear()
        self._members.clear()

    def restore(self) -> None:
        """Give every parameter that is still a view memory of its own. See NOTE [Memory of fused parameters]."""
        with torch.inference_mode(False), torch.no_grad():
            for key, members in self.parameters.items():
                for p in members:
                    if _is_view(p, self.fused[key]) and not _in_shared_memory(p):
                        with torch.inference_mode(p.is_inference()):
                            p.data = p.detach().clone()
                self.fused[key] = torch.empty(0)  # freed now, group by group
        self.drop()

    def _are_fused(self, parameters: Sequence[torch.Tensor]) -> bool:
        key = tuple(map(id, parameters))  # an id alone may be that of a parameter which is gone
        refs = self._members.get(key, [])
        return len(refs) == len(parameters) > 0 and all(
            ref() is p and _is_view(p, self.fused[key]) for ref, p in zip(refs, parameters, strict=True))


@dataclass(frozen=True)
class FusedInputs:
    """What fusion changed about the inputs of a graph: ``tensors`` of the inputs that passes added, after the graph's own, and
    (index, addresses) of those of the graph's own inputs that are views of fused tensors."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    addresses: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def hold(self, inputs: Sequence[Any]) -> bool:
        """Whether the parameters among the ``inputs`` of a call are the fused ones: not another module's, nor replaced."""
        return all(addresses(inputs[i]) == there for i, there in self.addresses)


class Fusion:
    """What a fusion pass works on: the ``graph``, without dropouts that do nothing, which are removed here; the values behind
    the placeholders of a raised one, ``real``; the ``weights`` made of parameters; the ``backend`` of a lowered one; and the
    tensors given to ``add_weight``, ``added``."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any] = (), weights: FusedWeights | None = None,
                 backend: AttentionBackend | None = None) -> None:
        self.graph, self.weights, self.backend = gm.graph, weights or FusedWeights(), backend
        self.real: dict[fx.Node, Any] = dict(zip(placeholders(gm.graph), inputs, strict=False))
        self.added: list[torch.Tensor] = []
        _remove_idle_dropouts(gm.graph)

    def tensor(self, node: Any) -> torch.Tensor | None:
        """The real tensor behind a placeholder; None for any other node."""
        found = self.real.get(node)
        return found if isinstance(found, torch.Tensor) else None

    def add_weight(self, tensor: torch.Tensor, like: fx.Node) -> fx.Node:
        """A new placeholder for ``tensor``, after all others; its fake value has the mode of that of ``like``."""
        with value(like).fake_mode:
            example = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        node = add_input(self.graph, f"quire_fused_{len(self.added)}", example)
        self.added.append(tensor)
        self.real[node] = tensor
        return node


def columns(product: fx.Node, sizes: Sequence[int]) -> list[fx.Node]:
    """``product``, which has its value, split along its last dimension, at the place of insertion; itself for one size."""
    if len(sizes) == 1:
        return [product]
    split = made_like(product.graph.call_function(torch.split, (product, list(sizes)), {"dim": -1}), product)
    return [product.graph.call_function(operator.getitem, (split, i)) for i in range(len(sizes))]


class Part(NamedTuple):
    """Columns of a linear layer's product: the product, and where they begin."""

    product: fx.Node
    start: int


def part_of(node: Any) -> Part | None:
    """Columns of a product that was split, or all of one."""
    split: Any = node.args[0] if is_function(node, (operator.getitem,)) else None
    if is_function(split, (torch.split, torch.functional.split)) and isinstance(split.args[1], (list, tuple)) \
            and argument(split, 2, "dim", 0) in (-1, value(split.args[0]).dim() - 1):
        return Part(split.args[0], sum(split.args[1][: node.args[1]]))
    return Part(node, 0) if is_function(node, LINEAR) else None


def bias_of(layer: fx.Node) -> Any:
    return argument(layer, 2, "bias")


def _remove_idle_dropouts(graph: fx.Graph) -> None:
    """Those of modules in evaluation mode, which return what they are given: patterns do not have to look past them."""
    for node in graph.find_nodes(op="call_function", target=torch.nn.functional.dropout):
        if argument(node, 2, "training", True) is False:
            node.replace_all_uses_with(argument(node, 0, "input"))
            graph.erase_node(node)
