"""quire: paged-KV attention, CUDA graphs and continuous batching for Hugging Face models, as a torch.compile plug-in.

The whole public API; see the README for how to use it. Names are imported at first use: ``quire.attn_ops`` runs without
transformers, and a process that only compiles kernels starts without the engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.attn_ops.attention import AttentionSite as AttentionSite
    from quire.attn_ops.backend import AttentionBackend as AttentionBackend
    from quire.attn_ops.backend import AttentionCapabilities as AttentionCapabilities
    from quire.attn_ops.backend import CudagraphSupport as CudagraphSupport
    from quire.attn_ops.backend import UnsupportedAttention as UnsupportedAttention
    from quire.attn_ops.backend import define_paged_op as define_paged_op
    from quire.attn_ops.backend import define_state_op as define_state_op
    from quire.attn_ops.conformance.report import check_backend as check_backend
    from quire.attn_ops.metadata import CommonAttentionMetadata as CommonAttentionMetadata
    from quire.attn_ops.metadata import make_draft_metadata as make_draft_metadata
    from quire.attn_ops.mla import define_mla_op as define_mla_op
    from quire.attn_ops.ops.cross import cross_attention as cross_attention
    from quire.attn_ops.ops.merge_state import merge_state as merge_state
    from quire.attn_ops.ops.merge_state import merge_states as merge_states
    from quire.attn_ops.ops.tree import build_tree_mask as build_tree_mask
    from quire.attn_ops.ops.tree import tree_attention as tree_attention
    from quire.attn_ops.ops.tree import tree_positions as tree_positions
    from quire.attn_ops.ops.varlen import varlen_attention as varlen_attention
    from quire.attn_ops.registry import backends as backends
    from quire.attn_ops.registry import register_backend as register_backend
    from quire.attn_ops.step import Step as Step
    from quire.attn_ops.step import StepLimits as StepLimits
    from quire.attn_ops.step import current_step as current_step
    from quire.graph_runner.admission import QueueFull as QueueFull
    from quire.graph_runner.beam_search import BeamSearchOutput as BeamSearchOutput
    from quire.graph_runner.beam_search import BeamSearchParams as BeamSearchParams
    from quire.graph_runner.beam_search import BeamSearchSequence as BeamSearchSequence
    from quire.graph_runner.calls import Score as Score
    from quire.graph_runner.engine import Engine as Engine
    from quire.graph_runner.paged import paged as paged
    from quire.graph_runner.request import CompletionOutput as CompletionOutput
    from quire.graph_runner.request import Logprob as Logprob
    from quire.graph_runner.request import RequestOutput as RequestOutput
    from quire.graph_runner.request import StreamEvent as StreamEvent
    from quire.graph_runner.sampling_params import SamplingParams as SamplingParams
    from quire.graph_runner.stats import EngineStats as EngineStats
    from quire.graph_runner.weights import WeightUpdateError as WeightUpdateError
    from quire.graph_runner.weights_group import WeightsGroup as WeightsGroup
    from quire.passes.capture.encoder_attention import encoder_attention as encoder_attention
    from quire.passes.capture.paged_model import PagedKVCache as PagedKVCache
    from quire.passes.explain import assert_attention_sites as assert_attention_sites
    from quire.passes.explain import explain as explain
    from quire.passes.step import step as step

__version__ = "0.1.0"
_HOMES = {
    "AttentionBackend": "attn_ops.backend", "AttentionCapabilities": "attn_ops.backend",
    "AttentionSite": "attn_ops.attention", "BeamSearchOutput": "graph_runner.beam_search",
    "BeamSearchParams": "graph_runner.beam_search", "BeamSearchSequence": "graph_runner.beam_search",
    "CommonAttentionMetadata": "attn_ops.metadata",
    "CompletionOutput": "graph_runner.request", "CudagraphSupport": "attn_ops.backend",
    "Engine": "graph_runner.engine", "EngineStats": "graph_runner.stats",
    "Logprob": "graph_runner.request", "PagedKVCache": "passes.capture.paged_model", "QueueFull": "graph_runner.admission",
    "RequestOutput": "graph_runner.request", "SamplingParams": "graph_runner.sampling_params", "Score": "graph_runner.calls",
    "Step": "attn_ops.step", "StepLimits": "attn_ops.step", "StreamEvent": "graph_runner.request",
    "UnsupportedAttention": "attn_ops.backend", "WeightUpdateError": "graph_runner.weights",
    "WeightsGroup": "graph_runner.weights_group", "assert_attention_sites": "passes.explain", "backends": "attn_ops.registry",
    "build_tree_mask": "attn_ops.ops.tree", "check_backend": "attn_ops.conformance.report",
    "cross_attention": "attn_ops.ops.cross", "current_step": "attn_ops.step", "define_mla_op": "attn_ops.mla",
    "define_paged_op": "attn_ops.backend", "define_state_op": "attn_ops.backend",
    "encoder_attention": "passes.capture.encoder_attention", "explain": "passes.explain",
    "make_draft_metadata": "attn_ops.metadata", "merge_state": "attn_ops.ops.merge_state",
    "merge_states": "attn_ops.ops.merge_state", "paged": "graph_runner.paged", "register_backend": "attn_ops.registry",
    "step": "passes.step", "tree_attention": "attn_ops.ops.tree", "tree_positions": "attn_ops.ops.tree",
    "varlen_attention": "attn_ops.ops.varlen",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    value = globals()[name] = getattr(import_module(f"quire.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
