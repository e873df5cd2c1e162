"""Batch metadata of a paged step, and what backends and engines derive from it.

``core`` describes a batch; the engine, ``quire.step`` and every backend use it. The other files are pure functions from one
batch to another, or to index tensors, under the names that authors of backends and engines know from vLLM and SGLang. Index
tensors for kernels that do not read a block table are ops: ``quire.attn_ops.ops.kv_indices``.
"""

from quire.attn_ops.metadata.builder import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    PerLayerParameters,
    get_per_layer_parameters,
    group_layers,
    infer_global_hyperparameters,
    subclass_attention_backend,
    subclass_attention_metadata,
)
from quire.attn_ops.metadata.core import NULL_PAGE, PAD_SLOT_ID, CommonAttentionMetadata
from quire.attn_ops.metadata.draft import (
    compute_causal_conv1d_metadata,
    make_draft_metadata,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
)
from quire.attn_ops.metadata.kv_sharing import (
    KV_SHARING_FAST_PREFILL_METADATA_FIELDS,
    KVSharingFastPrefillMetadata,
    create_fast_prefill_custom_backend,
    make_kv_sharing_fast_prefill_common_attn_metadata,
)
from quire.attn_ops.metadata.layout import (
    KVCacheLayoutType,
    get_kv_cache_layout,
    is_valid_kv_cache_layout,
    set_kv_cache_layout,
)
from quire.attn_ops.metadata.local import make_local_attention_virtual_batches
from quire.attn_ops.metadata.split import (
    decode_first_order,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    split_prefill_chunks,
)
from quire.attn_ops.metadata.ubatch import UBatchSlice, create_ubatch_slices, slice_query_start_locs, split_attn_metadata

__all__ = [
    "AttentionCGSupport", "AttentionMetadataBuilder", "CommonAttentionMetadata", "KV_SHARING_FAST_PREFILL_METADATA_FIELDS",
    "KVCacheLayoutType", "KVSharingFastPrefillMetadata", "NULL_PAGE", "PAD_SLOT_ID", "PerLayerParameters", "UBatchSlice",
    "compute_causal_conv1d_metadata", "create_fast_prefill_custom_backend", "create_ubatch_slices", "decode_first_order",
    "get_kv_cache_layout", "get_per_layer_parameters", "group_layers", "infer_global_hyperparameters",
    "is_valid_kv_cache_layout", "make_draft_metadata", "make_kv_sharing_fast_prefill_common_attn_metadata",
    "make_local_attention_virtual_batches", "reorder_batch_to_split_decodes_and_prefills",
    "reshape_attn_output_for_spec_decode", "reshape_query_for_spec_decode", "set_kv_cache_layout", "slice_query_start_locs",
    "split_attn_metadata", "split_decodes_and_prefills", "split_decodes_prefills_and_extends", "split_prefill_chunks",
    "subclass_attention_backend", "subclass_attention_metadata",
]
