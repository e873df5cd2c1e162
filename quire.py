"""quire: paged-KV attention, CUDA graphs and continuous batching for Hugging Face models, as a torch.compile plug-in.

The whole public API; see the README for how to use it.
"""

from attn_ops.attention import AttentionSite
from attn_ops.backend import AttentionBackend, AttentionCapabilities, UnsupportedAttention, register_backend
from attn_ops.kv_cache import PagedKVCache
from attn_ops.metadata import CommonAttentionMetadata
from attn_ops.table import backends
from graph_runner.engine import Engine
from graph_runner.paged import paged
from graph_runner.request import RequestOutput, StreamEvent
from graph_runner.sampling_params import SamplingParams
from passes.snapshot import assert_attention_sites, explain
from passes.step import step

__version__ = "0.1.0"
__all__ = [
    "AttentionBackend", "AttentionCapabilities", "AttentionSite", "CommonAttentionMetadata", "Engine", "PagedKVCache",
    "RequestOutput", "SamplingParams", "StreamEvent", "UnsupportedAttention", "assert_attention_sites", "backends",
    "explain", "paged", "register_backend", "step",
]
