"""What a backend's plan depends on, layer by layer, and which layers share it: a plan made for one window and scale is wrong
for a layer with others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from quire.attn_ops.attention import AttentionSite

K = TypeVar("K", int, str)


@dataclass(frozen=True)
class PerLayerParameters:
    """``window_left``: keys that a query sees before its own, window - 1; -1 without a window. ``sm_scale``: factor on q.k.
    ``has_same_window_lefts``, ``has_same_all_params``: set by ``infer_global_hyperparameters``; no part of equality."""

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float
    has_sinks: bool = False
    chunk: int | None = None
    has_same_window_lefts: bool | None = field(default=None, compare=False)
    has_same_all_params: bool | None = field(default=None, compare=False)


def get_per_layer_parameters(sites: Iterable[AttentionSite]) -> dict[int, PerLayerParameters]:
    """The parameters of each site, by the model's number of its layer."""
    return {s.layer: PerLayerParameters(-1 if s.window is None else s.window - 1, s.softcap, s.scale, s.sinks, s.chunk)
            for s in sites}


def group_layers(per_layer_params: Mapping[K, PerLayerParameters]) -> dict[PerLayerParameters, list[K]]:
    """The layers that one plan serves, by their parameters; groups in the order of their first layers."""
    groups: dict[PerLayerParameters, list[K]] = {}
    for layer, params in per_layer_params.items():
        groups.setdefault(params, []).append(layer)
    return groups


def infer_global_hyperparameters(per_layer_params: Mapping[K, PerLayerParameters]) -> PerLayerParameters:
    """The first layer's parameters, which hold for all layers only if ``has_same_all_params`` is True; otherwise plan by
    ``group_layers``. Raises ValueError without layers."""
    if not per_layer_params:
        raise ValueError("no layers: there are no attention parameters to infer")
    groups = group_layers(per_layer_params)
    first = next(iter(groups))
    return replace(first, has_same_window_lefts=len({p.window_left for p in groups}) == 1,
                   has_same_all_params=len(groups) == 1)
