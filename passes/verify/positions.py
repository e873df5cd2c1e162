"""No sequence's length may reach another: what depends on the longest sequence of a batch is refused, or proven not to matter.

Rotary embeddings of type "dynamic" and "longrope" choose their frequencies by the largest position of the batch. Alone, each
sequence would get those of its own length. "longrope" is served up to the length where the choice is always the same; beyond
it, keys cached with the short frequencies would have to be computed again. That nothing else is computed from the positions of
several tokens is proved with the rest of the graph (``tokens.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.fx import (
    compute_value,
    erase_dead,
    is_method,
    source_name,
    value,
)


def check_rope(config: Any, max_length: int | None = None) -> None:
    """Refuse a config whose rotary frequencies depend on the longest sequence of a batch.

    Args:
        config: a transformers config; those nested in it are checked too.
        max_length: no sequence will be longer; None: unknown.

    Raises:
        UnsupportedAttention: rope_type "dynamic", or "longrope" where a sequence may exceed its short length.
    """
    kind = getattr(config, "model_type", type(config).__name__)
    for rope, short in _ropes(config):
        name = rope.get("rope_type") or rope.get("type")
        if name == "dynamic":
            raise UnsupportedAttention(f"{kind} has rope_type 'dynamic', whose frequencies depend on the longest sequence of "
                                       "the batch; set another rope_type (yarn, linear, llama3) to serve it.")
        if name == "longrope" and (max_length is None or short is None or max_length > short):
            raise UnsupportedAttention(
                f"{kind} has rope_type 'longrope', which changes the frequencies of all sequences of a batch once one of them "
                f"is longer than {short} tokens; an engine with max_model_len={short} serves it up to that length.")


def check_model(model: torch.nn.Module, max_length: int | None = None) -> None:
    """``check_rope`` of every config that a module of ``model`` holds. Raises UnsupportedAttention."""
    configs = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "__dict__")}
    for config in configs.values():
        check_rope(config, max_length)


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


def use_short_frequencies(gm: fx.GraphModule, config: Any) -> int:
    """Replace longrope's ``max(position_ids) + 1 > original_max_position_embeddings`` by False; returns how often.

    ``check_rope`` has refused a longer ``max_model_len``, so the comparison is False in every step.

    Args:
        gm: the graph of a model whose config passed ``check_rope``. Changed in place.
    """
    shorts = {short for rope, short in _ropes(config) if "longrope" in (rope.get("rope_type"), rope.get("type"))}
    replaced = 0
    for node in list(gm.graph.nodes):
        if not is_method(node, "gt") or node.args[1] not in shorts or not is_method(plus := node.args[0], "add"):
            continue
        largest, one = plus.args
        if one != 1 or not is_method(largest, "max") or len(largest.args) != 1 or largest.kwargs:
            continue
        if not _is_given(largest.args[0]):
            continue
        with gm.graph.inserting_before(node):
            never = gm.graph.call_method("new_zeros", (largest.args[0], ()), {"dtype": torch.bool})
        compute_value(never)
        never.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        node.replace_all_uses_with(never)
        erase_dead(gm.graph, [node])
        replaced += 1
    if replaced:
        gm.recompile()
    return replaced


def _is_given(node: Any) -> bool:
    """Whether the node is the ``position_ids`` of the call."""
    return isinstance(node, fx.Node) and node.op == "placeholder" and "position" in source_name(node) and isinstance(
        value(node), torch.Tensor)


__all__ = ["check_model", "check_rope", "use_short_frequencies"]
