"""An attention backend for quire, in one file: ``F.scaled_dot_product_attention`` on one sequence at a time, on a CPU.

    pip install ./examples/backend
    python -m quire.attn_ops.conformance --backend sdpa_example
    quire generate --demo --attention sdpa_example

``quire.attn_ops.backend`` documents the contract. This one serves windows and every head dim, and declares no more: models
with a softcap, sinks or chunks, and quantized caches, are refused with the reason before the op runs.
"""

import torch
import torch.nn.functional as F

from quire import AttentionBackend, AttentionCapabilities, UnsupportedAttention, define_paged_op


def paged_attention(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, slot_mapping: torch.Tensor, block_table: torch.Tensor,
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, sinks: torch.Tensor | None, prepared: list[torch.Tensor], *,
    scale: float, window: int | None, softcap: float | None, chunk: int | None,
) -> torch.Tensor:
    """Store k and v, then attend: q (T, H, D) -> (T, H, Dv)."""
    if sinks is not None or softcap is not None or chunk is not None or k_scale is not None:
        raise UnsupportedAttention("the sdpa_example backend has no sinks, softcap, chunks or quantized caches")
    page_size = k_cache.shape[1]
    if k is not None and v is not None:  # None: the layer shares the cache of another, which stored them
        live = slot_mapping >= 0  # -1: a padding token
        page, offset = slot_mapping[live] // page_size, slot_mapping[live] % page_size
        k_cache[page, offset], v_cache[page, offset] = k[live], v[live]
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[3])  # padding tokens stay zero
    starts = query_start_loc.tolist()  # reading lengths on the host is fine on a CPU; on a GPU it would wait for the device
    for row, length in enumerate(seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end:  # a padding row, or a sequence without tokens in this step
            continue
        pages = block_table[row, : -(-length // page_size)].long()
        keys, values = (cache[pages].flatten(0, 1)[:length].transpose(0, 1) for cache in (k_cache, v_cache))
        key_pos = torch.arange(length)
        query_pos = torch.arange(length - (end - begin), length)[:, None]  # queries are the last tokens of the sequence
        mask = key_pos <= query_pos
        if window is not None:
            mask &= key_pos > query_pos - window
        out[begin:end] = F.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1), keys, values, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)
    return out


BACKEND = AttentionBackend(
    name="sdpa_example",
    capabilities=AttentionCapabilities(devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32}), window=True,
                                       batch_invariant=True),  # one sequence at a time
    available=lambda device: None,
    op=define_paged_op("sdpa_example", paged_attention, devices=("CPU",)),
)
