"""``AttentionMetadataBuilder``, for engines whose backends need metadata objects of their own, as in vLLM. quire's backends are
records whose ``plan`` and ``prepare`` do this work (``attn_ops/backend.py``), so its engine has no builder.
Also the parameters of each layer that a plan depends on (``PerLayerParameters``), and which layers share them: a plan made for
one window and scale is wrong for a layer with others."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, make_dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import CudagraphSupport
from quire.attn_ops.metadata.core import CommonAttentionMetadata
from quire.attn_ops.metadata.split import InputBatch, SchedulerOutput, reorder_batch_to_split_decodes_and_prefills

M = TypeVar("M")
AttentionCGSupport = CudagraphSupport  # the name that authors of builders know


class AttentionMetadataBuilder(abc.ABC, Generic[M]):
    """Makes a backend's metadata M from a batch's, for one group of like layers.

    Every tensor that a captured kernel reads must be a buffer at a fixed address, written in place by ``build``. Host numbers
    (longest query, splits) are constants of a captured graph: they must be upper bounds.

    Of the engine's ``config``, ``speculative_config.num_speculative_tokens`` is read, if there is one.
    ``reorder_batch_threshold``: rows of at most this many tokens must be at the front of the batch; None: any order.
    """

    cudagraph_support: ClassVar[CudagraphSupport] = CudagraphSupport.NEVER
    reorder_batch_threshold: int | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: Sequence[Any], config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names, self.config, self.device = kv_cache_spec, list(layer_names), config, device

    def _init_reorder_batch_threshold(self, reorder_batch_threshold: int | None = 1, supports_spec_as_decode: bool = False
                                      ) -> None:
        """Set the threshold; with ``supports_spec_as_decode`` a row of a token and its speculative ones is a decode too."""
        speculative = getattr(getattr(self.config, "speculative_config", None), "num_speculative_tokens", None)
        if reorder_batch_threshold is not None and supports_spec_as_decode and speculative is not None:
            reorder_batch_threshold = max(reorder_batch_threshold, 1 + speculative)
        self.reorder_batch_threshold = reorder_batch_threshold

    @abc.abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> M:
        """The metadata of a batch. ``common_prefix_len``: tokens at the start of all sequences that are the same pages, for
        ``use_cascade_attention``. ``fast_build``: build fast rather than run fast; the result serves few layers."""

    def reorder_batch(self, input_batch: InputBatch, scheduler_output: SchedulerOutput) -> bool:
        """Bring the engine's batch into the order that ``build`` needs. Returns whether anything moved."""
        if self.reorder_batch_threshold is None:
            return False
        return reorder_batch_to_split_decodes_and_prefills(input_batch, scheduler_output, self.reorder_batch_threshold)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """The metadata with which a graph is captured: those of ``build``, unless a backend needs upper bounds there."""
        return self.build(0, common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> M:
        """The metadata of draft token (or tree level) ``draft_index`` of a draft model."""
        return self.build(0, common_attn_metadata, fast_build=True)

    def use_cascade_attention(self, common_prefix_len: int, query_lens: np.ndarray, num_query_heads: int, num_kv_heads: int,
                              use_alibi: bool, use_sliding_window: bool, use_local_attention: bool, num_sms: int) -> bool:
        """Whether to attend to the common prefix once for all sequences. A backend with cascades overrides it."""
        return False


def subclass_attention_backend(name_prefix: str, attention_backend_cls: type, builder_cls: type) -> type:
    """A subclass of an engine's backend class whose ``get_builder_cls()`` returns ``builder_cls``, on the class and on its
    instances. quire's own backends are records: see ``create_fast_prefill_custom_backend``."""
    get = staticmethod(lambda: builder_cls)
    return type(name_prefix + attention_backend_cls.__name__, (attention_backend_cls,), {"get_builder_cls": get})


def subclass_attention_metadata(name_prefix: str, metadata_cls: type, fields: Sequence[tuple[str, Any, Any]]) -> type:
    """A dataclass that has ``metadata_cls``'s fields and these (name, type, default), frozen if ``metadata_cls`` is. Raises
    TypeError if that is no dataclass."""
    if not is_dataclass(metadata_cls):
        raise TypeError(f"{metadata_cls.__name__} is not a dataclass: fields cannot be added to it")
    frozen: bool = metadata_cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    added = [(name, kind, field(default=default)) for name, kind, default in fields]
    return make_dataclass(name_prefix + metadata_cls.__name__, added, bases=(metadata_cls,), frozen=frozen)


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
