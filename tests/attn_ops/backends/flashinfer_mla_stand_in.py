"""A stand-in for FlashInfer's wrapper for MLA: it has its signatures, and at ``run`` reads tables where the library does."""

from __future__ import annotations

import torch

from quire.attn_ops.attention import attention_eager


def attend(q: torch.Tensor, keys: torch.Tensor, scale: float, causal: bool = True) -> torch.Tensor:
    """q (n, H, 576), the last of the tokens of the latent keys (L, 576) -> (n, H, 512)."""
    out = attention_eager(q.transpose(0, 1)[None], keys[None, None], keys[None, None, :, :512], None, layer=0, scale=scale,
                          window=None, softcap=None, chunk=None, causal=causal)
    return out[0].transpose(0, 1)


class Wrapper:
    """flashinfer.mla.BatchMLAPagedAttentionWrapper of flashinfer-python 0.6.18. In a CUDA graph it reads the buffers that it
    was made with; elsewhere the page numbers that ``plan`` was given, no copy of them."""

    def __init__(self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
                 kv_len_arr=None, backend="auto") -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        self.workspace, self.graph, self.buffers = float_workspace_buffer, use_cuda_graph, (qo_indptr, kv_indptr, kv_len_arr)
        self.indices = kv_indices

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
             sm_scale, q_data_type, kv_data_type, use_profiler=False) -> None:
        assert all(t.dtype is torch.int32 for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1 and len(kv_indices) == kv_indptr[-1]
        assert (head_dim_ckv, head_dim_kpe) == (512, 64) and q_data_type == kv_data_type
        if self.graph:
            for buffer, given in zip(self.buffers, (qo_indptr, kv_indptr, kv_len_arr), strict=True):
                assert len(buffer) == len(given), "the batch size is fixed"
                buffer.copy_(given)
            self.indices[: len(kv_indices)].copy_(kv_indices)
        else:
            self.buffers, self.indices = (qo_indptr, kv_indptr, kv_len_arr), kv_indices
        self.given = (qo_indptr.tolist(), kv_indptr.tolist(), kv_indices, kv_len_arr.tolist(), causal, sm_scale)

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None,
            kv_len=None, page_table=None) -> torch.Tensor:
        starts, pages, _, lens, causal, scale = self.given
        assert (starts, pages, lens) == tuple(buffer.tolist() for buffer in self.buffers), "buffers and plan disagree"
        assert ckv_cache.dim() == kpe_cache.dim() == 3 and len(q_nope) == starts[-1] and causal
        for r, length in enumerate(lens):
            own = slice(starts[r], starts[r + 1])
            rows = self.indices[pages[r] : pages[r + 1]].long()
            c, k = (x[rows].flatten(0, 1)[:length] for x in (ckv_cache, kpe_cache))
            if own.stop > own.start:
                out[own] = attend(torch.cat([q_nope[own], q_pe[own]], dim=-1), torch.cat([c, k], dim=-1), scale)
        return out
