"""No sequence's length may reach another: what depends on the longest sequence of a batch is refused, or proven not to matter.

Rotary embeddings of type "dynamic" and "longrope" choose their frequencies by the largest position of the batch. For "longrope"
each sequence gets those of its own length (``passes/rewrite/length_rope.py``). "dynamic" is refused: its frequencies change
with every token, so that all keys would have to be computed again each time. That nothing else is computed from the positions
of several tokens is proved with the rest of the graph (``tokens.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.fake_values import made_like
from quire.passes.fx import erase_dead
from quire.passes.rewrite.length_rope import limit_of


def check_rope(config: Any) -> None:
    """Raises UnsupportedAttention for a config with rope_type "dynamic", in it or nested in it."""
    kind = getattr(config, "model_type", type(config).__name__)
    for rope, _ in _ropes(config):
        name = rope.get("rope_type") or rope.get("type")
        if name == "dynamic":
            raise UnsupportedAttention(f"{kind} has rope_type 'dynamic', whose frequencies depend on the longest sequence of "
                                       "the batch; set another rope_type (yarn, linear, llama3) to serve it.")


def check_model(model: torch.nn.Module) -> None:
    """``check_rope`` of every config that a module of ``model`` holds. Raises UnsupportedAttention."""
    configs = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "__dict__")}
    for config in configs.values():
        check_rope(config)


def _ropes(config: Any, depth: int = 3) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Each set of rope parameters in a config, and the length up to which the short frequencies of longrope apply."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    short = getattr(config, "original_max_position_embeddings", None)
    if isinstance(rope, dict):
        for each in (rope, *(r for r in rope.values() if isinstance(r, dict))):
            yield each, each.get("original_max_position_embeddings") or short
    for name, inner in vars(config).items() if depth else ():
        if "config" in name and hasattr(inner, "__dict__") and not callable(inner):
            yield from _ropes(inner, depth - 1)


def use_short_frequencies(gm: fx.GraphModule, config: Any, max_length: int) -> int:
    """Make longrope's ``max(position_ids) + 1 > limit`` False, in place, for limits from ``max_length`` on; returns how
    often."""
    shorts = {short for rope, short in _ropes(config) if "longrope" in (rope.get("rope_type"), rope.get("type"))
              and short is not None and max_length <= short}
    replaced = 0
    for node in list(gm.graph.nodes):
        found = limit_of(node)
        if found is None or found[0] not in shorts:
            continue
        with gm.graph.inserting_before(node):
            never = made_like(gm.graph.call_method("new_zeros", (found[1], ()), {"dtype": torch.bool}), node)
        node.replace_all_uses_with(never)
        erase_dead(gm.graph, [node])
        replaced += 1
    if replaced:
        gm.recompile()
    return replaced
