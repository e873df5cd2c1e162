"""Backend ``ascend``: Huawei's NPUs through torch_npu. Not verified on hardware. Its kernels take the lengths on the host,
which a step's metadata has. Steps are not captured: an NPU graph needs new lengths on the host at each replay."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from quire.attn_ops.backend import AttentionBackend, AttentionCapabilities, CudagraphSupport, define_paged_op
from quire.attn_ops.kv_quant import write_kv
from quire.attn_ops.step import current_step
from quire.attn_ops.vendor import missing, wrong_device

NAME = "ascend"
MASK = 128  # rows and columns of the additive causal mask that the prefill kernel takes


def causal_mask(dtype: torch.dtype, device: torch.device) -> Tensor:
    """(128, 128): 0 where a key is seen; else -inf for float16, and 1 for other dtypes, as the kernel takes it."""
    hidden = torch.ones(MASK, MASK, dtype=torch.bool, device=device).triu(1)
    return torch.zeros(MASK, MASK, dtype=dtype, device=device).masked_fill(
        hidden, float("-inf") if dtype == torch.float16 else 1.0)


def paged_attention(q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                    v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                    seq_lens: Tensor, sinks: Tensor | None, prepared: list[Tensor], *, scale: float, window: int | None,
                    softcap: float | None, chunk: int | None) -> Tensor:
    BACKEND.capabilities.refuse(NAME, k_scale, window=window, softcap=softcap, chunk=chunk, sinks=sinks)
    step = current_step()
    if step is None:
        raise RuntimeError("ascend_paged_attention needs the lengths on the host: run it inside `with quire.step(...)`")
    write_kv(k, v, k_cache, v_cache, None, None, slot_mapping)
    lens, counts = step.metadata.seq_lens_cpu.int(), step.metadata.query_start_loc_cpu.diff().int()
    rows = counts.nonzero()[:, 0]  # the kernels take no rows without tokens
    heads, kv_heads, dim = q.shape[1], k_cache.shape[2], q.shape[2]
    out, live = q.new_zeros(q.shape), int(counts.sum())
    if not live:
        return out
    lib, table = importlib.import_module("torch_npu"), block_table[rows.to(block_table.device)]
    query = q[:live].contiguous()
    if int(counts.max()) == 1:
        lib._npu_paged_attention(query=query, key_cache=k_cache, value_cache=v_cache, num_kv_heads=kv_heads, num_heads=heads,
                                 scale_value=scale, block_table=table, context_lens=lens[rows], out=out[:live])
    else:
        lib._npu_flash_attention_qlens(
            query=query.view(live, heads * dim), key_cache=k_cache, value_cache=v_cache, block_table=table,
            mask=causal_mask(q.dtype, q.device), seq_len=counts[rows], context_lens=lens[rows], num_kv_heads=kv_heads,
            num_heads=heads, scale_value=scale, out=out[:live].view(live, heads * dim))
    return out


def available(device: torch.device) -> str | None:
    install = "pip install torch-npu, of the version of your torch, after CANN"
    return wrong_device(device, "npu") or missing("torch_npu", install)


BACKEND = AttentionBackend(
    name=NAME,
    capabilities=AttentionCapabilities(
        devices=frozenset({"npu"}), dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_dims=lambda d, dv: d == dv and d <= 128, head_dims_note="up to 128, the same for values",
        page_sizes=lambda p: p == 128, page_sizes_note="128", layouts=frozenset({"NHD"}),
        cudagraph_support=CudagraphSupport.NEVER,
    ),
    available=available,
    op=define_paged_op(NAME, paged_attention, devices=("PrivateUse1",)),
    packages=("torch-npu",), verified=False,
)
