"""No sequence's length may reach another: what depends on the longest sequence of a batch is refused, or proven not to matter.

Rotary embeddings of type "dynamic" and "longrope" choose their frequencies by the largest position of the batch. Alone, each
sequence would get those of its own length. "longrope" is served up to the length where the choice is always the same; beyond
it, keys cached with the short frequencies would have to be computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.fx import (
    ancestors,
    compute_value,
    erase_dead,
    is_method,
    is_module_tensor,
    is_pure,
    module_path,
    source_name,
    symbolic,
    value,
)

_REDUCTIONS = ("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "sum", "prod", "any", "all", "count_nonzero",
               "median", "mode", "kthvalue", "topk", "unique", "bincount")


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
                f"is longer than {short} tokens; quire.Engine serves it up to that length: max_model_len={short}.")


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


def check_reductions(graph: fx.Graph, tokens: Any) -> None:
    """Refuse a graph that reduces positions along the row and uses the result.

    Raises:
        UnsupportedAttention: names the operation and the module.
    """
    if not symbolic(tokens):
        return
    live = {n for end in graph.nodes if not is_pure(end) and end.op != "placeholder" for n in end.all_input_nodes}
    for node in reversed(graph.nodes):
        live |= set(node.all_input_nodes) if node in live else set()
    for node in graph.nodes:
        if node not in live or not is_method(node, *_REDUCTIONS) or not node.args or isinstance(
                value(node.args[1]) if len(node.args) > 1 else None, torch.Tensor):
            continue
        before = value(node.args[0])
        leaves = [n for n in ancestors(node) if n.op == "placeholder" and isinstance(value(n), torch.Tensor)]
        given = [n for n in leaves if not is_module_tensor(n)]
        if not isinstance(before, torch.Tensor) or not given or not all(map(_is_given, given)):
            continue  # of hidden states, say the tokens of each expert: not a question of positions
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        along = [k for k, n in enumerate(before.shape) if str(n) == str(tokens)]
        dims = range(before.dim()) if dim is None else [d % before.dim() for d in ([dim] if isinstance(dim, int) else dim)]
        if not before.is_floating_point() and set(along) & set(dims):
            raise UnsupportedAttention(
                f"{module_path(node) or 'the model'} reduces positions along the batch ({node.name}), so the longest sequence "
                "would change the others (a rotary embedding that depends on the length?); compute it from each token's own "
                "position.")


def _is_given(node: Any) -> bool:
    """Whether the node is the ``position_ids`` of the call."""
    return isinstance(node, fx.Node) and node.op == "placeholder" and "position" in source_name(node) and isinstance(
        value(node), torch.Tensor)


__all__ = ["check_model", "check_reductions", "check_rope", "use_short_frequencies"]
