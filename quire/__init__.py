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
    from quire.attn_ops.conformance.report import check_backend as check_backend
    from quire.attn_ops.metadata import CommonAttentionMetadata as CommonAttentionMetadata
    from quire.attn_ops.registry import backends as backends
    from quire.attn_ops.registry import register_backend as register_backend
    from quire.attn_ops.step import Step as Step
    from quire.attn_ops.step import StepLimits as StepLimits
    from quire.attn_ops.step import current_step as current_step
    from quire.graph_runner.admission import QueueFull as QueueFull
    from quire.graph_runner.calls import Score as Score
    from quire.graph_runner.engine import Engine as Engine
    from quire.graph_runner.paged import paged as paged
    from quire.graph_runner.request import Logprob as Logprob
    from quire.graph_runner.request import RequestOutput as RequestOutput
    from quire.graph_runner.request import StreamEvent as StreamEvent
    from quire.graph_runner.sampling_params import SamplingParams as SamplingParams
    from quire.graph_runner.stats import EngineStats as EngineStats
    from quire.passes.capture.paged_model import PagedKVCache as PagedKVCache
    from quire.passes.explain import assert_attention_sites as assert_attention_sites
    from quire.passes.explain import explain as explain
    from quire.passes.step import step as step

__version__ = "0.1.0"
_HOMES = {
    "AttentionBackend": "attn_ops.backend", "AttentionCapabilities": "attn_ops.backend", "AttentionSite": "attn_ops.attention",
    "CommonAttentionMetadata": "attn_ops.metadata", "CudagraphSupport": "attn_ops.backend", "Engine": "graph_runner.engine",
    "EngineStats": "graph_runner.stats", "Logprob": "graph_runner.request", "PagedKVCache": "passes.capture.paged_model",
    "QueueFull": "graph_runner.admission", "RequestOutput": "graph_runner.request",
    "SamplingParams": "graph_runner.sampling_params", "Score": "graph_runner.calls",
    "Step": "attn_ops.step", "StepLimits": "attn_ops.step",
    "StreamEvent": "graph_runner.request", "UnsupportedAttention": "attn_ops.backend",
    "assert_attention_sites": "passes.explain", "backends": "attn_ops.registry", "check_backend": "attn_ops.conformance.report",
    "current_step": "attn_ops.step", "define_paged_op": "attn_ops.backend", "explain": "passes.explain",
    "paged": "graph_runner.paged", "register_backend": "attn_ops.registry", "step": "passes.step",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    value = globals()[name] = getattr(import_module(f"quire.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
