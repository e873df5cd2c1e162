"""The fusion passes, in the order in which they run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from quire.passes.fusions.base import FusedInputs, FusedWeights, Fusion
from quire.passes.fusions.complex_product import real_products
from quire.passes.fusions.expert_gate import fuse_expert_gate
from quire.passes.fusions.float_linear import fuse_float_linear
from quire.passes.fusions.last_tokens import last_tokens
from quire.passes.fusions.lora_group import group_lora
from quire.passes.fusions.lora_linear import fuse_lora_linear
from quire.passes.fusions.projections import fuse_projections
from quire.passes.fusions.quantized_linear import quantized_linear
from quire.passes.fusions.rope import fuse_rope
from quire.passes.fusions.router import fuse_router
from quire.passes.fusions.routing import fuse_topk
from quire.passes.fusions.small_linear import fuse_small_linear
from quire.passes.rewrite.lower import Lowered
from quire.passes.verify.quantized import addresses, parts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FusionPass:
    """``batches``: "small": only in a graph of its own, for at most ``MAX_TOKENS`` tokens; "large": not in that graph."""

    name: str  # by which ``QuireOptions.fusions`` chooses it
    run: Callable[[Fusion], int]  # rewrites the graph and returns the number of matches
    stage: Literal["raised", "lowered"] = "raised"  # the graph that it rewrites; the caches are in the lowered one
    batches: Literal["all", "small", "large"] = "all"


FUSIONS = (
    FusionPass("quantized", quantized_linear),
    FusionPass("projections", fuse_projections),
    FusionPass("float_linear", fuse_float_linear, batches="small"),
    FusionPass("router", fuse_router, batches="small"),
    FusionPass("routing", fuse_topk),
    FusionPass("expert_gate", fuse_expert_gate),
    FusionPass("last_tokens", last_tokens, batches="large"),
    FusionPass("lora_group", group_lora),
    FusionPass("lora_linear", fuse_lora_linear),
    FusionPass("small_linear", fuse_small_linear, batches="small"),
    FusionPass("rope", fuse_rope, stage="lowered"),
    FusionPass("complex", real_products, stage="lowered"),
)


def fusion_names() -> list[str]:
    return [each.name for each in FUSIONS]


def has_small_passes(names: str | Sequence[str]) -> bool:
    """Whether this choice of passes makes a graph of its own for small batches."""
    return any(each.batches == "small" and _chosen(each, names) for each in FUSIONS)


def apply_fusions(gm: fx.GraphModule, inputs: Sequence[Any], names: str | Sequence[str], weights: FusedWeights,
                  small: bool = False) -> FusedInputs:
    """Run the passes of these ``names`` ("all", "none") on a raised graph, in place; ``small``: that for small batches."""
    if names == "none":
        return FusedInputs()
    fusion = Fusion(gm, inputs, weights)
    _run(fusion, "raised", names, small)
    fused = {id(p) for group in weights.parameters.values() for p in group}
    views = [(i, addresses(x)) for i, x in enumerate(inputs)
             if isinstance(x, torch.Tensor) and any(id(part) in fused for part in parts(x))]
    return FusedInputs(fusion.added, views)


def apply_lowered_fusions(lowered: Lowered, names: str | Sequence[str], small: bool = False) -> None:
    """Run the passes on a lowered graph, in place; for a backend that needs q before its rotation, with the pass for it."""
    backend = lowered.target.backend
    if backend.unrotated and not (names == "all" or "rope" in names):
        names = ("rope",) if isinstance(names, str) else (*names, "rope")
    _run(Fusion(lowered.gm, backend=backend), "lowered", names, small)
    lowered.gm.recompile()


def _chosen(each: FusionPass, names: str | Sequence[str]) -> bool:
    return names == "all" or (names != "none" and each.name in names)


def _run(fusion: Fusion, stage: str, names: str | Sequence[str], small: bool) -> None:
    for each in FUSIONS:
        if each.stage == stage and _chosen(each, names) and each.batches != ("large" if small else "small"):
            matches = each.run(fusion)
            logger.info("%s: %d matches", each.name, matches)
    fusion.graph.lint()
