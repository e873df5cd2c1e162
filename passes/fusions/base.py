"""The fusion passes, their order, and the weights they make.

Each pass is one file and one function ``(Fusion) -> number of matches``; it rewrites the raised graph before lowering. A pass
may need a new tensor (a fused weight): it adds it with ``Fusion.add_weight``, and the graph gets one more input.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource

from quire.attn_ops.tuning.small_linear import LinearShape
from quire.passes.fx import placeholders, value
from quire.passes.verify.quantized import addresses, parts

logger = logging.getLogger(__name__)


@dataclass
class FusedWeights:
    """Tensors that hold several parameters, or codes or scales of quantised ones, end to end; these are views of them, so
    nothing is stored twice.

    In-place updates of a parameter (optimizers, ``load_state_dict``) reach the fused tensor. ``restore`` gives each parameter
    memory of its own again. See NOTE [Not kept alive].
    """

    fused: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    _parameters: dict[tuple[int, ...], list[weakref.ref[torch.Tensor]]] = field(default_factory=dict)
    small_linears: set[LinearShape] = field(default_factory=set)  # shapes that the pass of that name gave to its kernel

    def fuse(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """One tensor holding ``parameters`` end to end along dim 0; they become views of it."""
        key = tuple(id(p) for p in parameters)
        held = self._parameters.get(key, [])
        known = len(held) == len(parameters) and all(ref() is p for ref, p in zip(held, parameters, strict=True))
        if not known:  # an id alone may be that of a parameter which is gone
            with torch.inference_mode(False), torch.no_grad():
                dtype = parameters[0].dtype
                as_bytes = dtype.itemsize == 1  # not every version joins every dtype of codes
                fused = torch.cat([p.detach().view(torch.uint8) if as_bytes else p.detach() for p in parameters]).view(dtype)
                at = 0
                for p in parameters:
                    p.data = fused[at : at + p.shape[0]]
                    at += p.shape[0]
            self.fused[key], self._parameters[key] = fused, [weakref.ref(p) for p in parameters]
        return self.fused[key]

    @property
    def parameters(self) -> dict[tuple[int, ...], list[torch.Tensor]]:
        """Those behind each of ``fused`` that are still there."""
        return {key: [p for ref in refs if (p := ref()) is not None] for key, refs in self._parameters.items()}

    def drop(self) -> None:
        """Forget the fused tensors; parameters stay views of them."""
        self.fused.clear()
        self._parameters.clear()

    def restore(self) -> None:
        """Give every parameter memory of its own."""
        with torch.inference_mode(False), torch.no_grad():
            for key, group in self.parameters.items():
                for p in group:
                    if p.untyped_storage().data_ptr() == self.fused[key].untyped_storage().data_ptr():
                        p.data = p.detach().clone()
                self.fused[key] = torch.empty(0)
        self.drop()


@dataclass(frozen=True)
class FusedInputs:
    """What fusion means for the inputs of a graph.

    Args:
        tensors: of the inputs that passes added, which come after the graph's own.
        addresses: (index, addresses) of those of the graph's own inputs that are views of fused tensors.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    addresses: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def hold(self, inputs: Sequence[Any]) -> bool:
        """Are the parameters among the ``inputs`` of a call the fused ones? They are not if the graph now runs for another
        module of the same class, or if a parameter was replaced (``p.data = ...``, ``load_state_dict(assign=True)``)."""
        return all(addresses(inputs[i]) == there for i, there in self.addresses)


class Fusion:
    """What a fusion pass works on: the graph, the real tensors behind its placeholders, and a way to add inputs."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], weights: FusedWeights) -> None:
        self.gm, self.graph, self.weights = gm, gm.graph, weights
        self.real = dict(zip(placeholders(gm.graph), inputs, strict=True))
        self.added: list[torch.Tensor] = []
        self._new: dict[fx.Node, torch.Tensor] = {}

    def tensor(self, node: fx.Node) -> torch.Tensor | None:
        """The real tensor behind a placeholder, the graph's own or an added one; None for any other node."""
        found = self._new.get(node, self.real.get(node))
        return found if isinstance(found, torch.Tensor) else None

    def add_weight(self, tensor: torch.Tensor, like: fx.Node) -> fx.Node:
        """A new placeholder, after all others, that will be given ``tensor``."""
        last = placeholders(self.graph)[-1]
        name = f"quire_fused_{len(self.added)}"
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(name)
        with value(like).fake_mode:
            node.meta["example_value"] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype,
                                                             device=tensor.device)
        node._dynamo_source = ConstantSource(name)
        self.added.append(tensor)
        self._new[node] = tensor
        return node


@dataclass(frozen=True)
class Pass:
    """One fusion pass. ``small_only``: it belongs in the graph for small batches alone; ``large_only``: in the other one alone,
    if there are two. ``lowered``: it rewrites the lowered graph, where the caches are, and not the raised one."""

    run: Callable[[Any], int]
    small_only: bool = False
    large_only: bool = False
    lowered: bool = False


def _passes() -> dict[str, Pass]:
    from quire.passes.fusions.last_tokens import last_tokens
    from quire.passes.fusions.projections import fuse_projections
    from quire.passes.fusions.quantized_linear import quantized_linear
    from quire.passes.fusions.rope import fuse_rope
    from quire.passes.fusions.small_linear import fuse_small_linear

    return {"quantized": Pass(quantized_linear), "projections": Pass(fuse_projections),
            "last_tokens": Pass(last_tokens, large_only=True), "small_linear": Pass(fuse_small_linear, small_only=True),
            "rope": Pass(fuse_rope, lowered=True)}


def has_small_passes(names: str | Sequence[str]) -> bool:
    """Does this choice of passes make a graph of its own for small batches?"""
    return names != "none" and any(p.small_only and (names == "all" or n in names) for n, p in _passes().items())


def fusion_names() -> list[str]:
    return list(_passes())


def apply_fusions(gm: fx.GraphModule, inputs: Sequence[Any], names: str | Sequence[str], weights: FusedWeights,
                  small: bool = False) -> FusedInputs:
    """Run those of the passes called ``names`` ("all", "none" or several) that rewrite the raised graph, in their order.

    ``small``: for the graph of small batches, else without the passes that belong there only.
    """
    if names == "none":
        return FusedInputs()
    fusion = Fusion(gm, inputs, weights)
    _run(fusion, gm, names, small, lowered=False)
    fused = {id(p) for group in weights.parameters.values() for p in group}
    views = [(i, addresses(x)) for i, x in enumerate(inputs)
             if isinstance(x, torch.Tensor) and any(id(part) in fused for part in parts(x))]
    return FusedInputs(fusion.added, views)


def apply_lowered_fusions(lowered: Any, names: str | Sequence[str], small: bool = False) -> None:
    """Run those of the passes called ``names`` that rewrite the lowered graph."""
    _run(lowered, lowered.gm, names, small, lowered=True)
    lowered.gm.recompile()


def _run(subject: Any, gm: fx.GraphModule, names: str | Sequence[str], small: bool, lowered: bool) -> None:
    for name, each in _passes().items():
        in_this_graph = not each.large_only if small else not each.small_only
        if (names == "all" or name in names) and in_this_graph and each.lowered == lowered:
            matches = each.run(subject)
            gm.graph.lint()
            logger.info("%s: %d matches", name, matches)


__all__ = ["FusedInputs", "FusedWeights", "Fusion", "Pass", "apply_fusions", "apply_lowered_fusions", "fusion_names",
           "has_small_passes"]
