"""Backend ``flash_attention``: the FlashAttention package that is installed: FA3, FA4 or FA2, in this order, on CUDA.

=====  ====================  =====================================  ==================================================
FA3    flash_attn_interface  compute capability 8.x and 9.x         built from source (hopper/ in FlashAttention's tree)
FA4    flash_attn.cute       9.0; newer, pages of 128 tokens        pip install --pre flash-attn-4
FA2    flash_attn            8.0 and newer, pages of 256 tokens     pip install flash-attn
=====  ====================  =====================================  ==================================================

All three take ragged queries and a page table, and ragged keys in its place (``varlen``). Sinks follow from the log-sum-exp:
FA4's own argument for them is bfloat16 only. FA4 has passed the kit on an H200, where it splits no keys: "SplitKV not supported
on SM 9.0". The calls of FA3 and FA2 are tested against their signatures.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from quire.attn_ops.backend import AttentionBackend, AttentionCapabilities, CudagraphSupport, define_paged_op, define_prepare
from quire.attn_ops.kv_store import store_kv
from quire.attn_ops.step import current_step
from quire.attn_ops.vendor import missing, padding_tokens, too_old, wrong_gpu

NAME = "flash_attention"
#: (variant, module, majors of the compute capability, tokens that a page is a multiple of).
VARIANTS = (("FA3", "flash_attn_interface", (8, 9), 1), ("FA4", "flash_attn.cute", (9,), 1),
            ("FA4", "flash_attn.cute", (10, 11, 12), 128), ("FA2", "flash_attn", (8, 9, 10, 11, 12), 256))
#: The distribution of a module, and the oldest version with the arguments that are passed here. FA3's is not published.
OLDEST = {"flash_attn.cute": ("flash-attn-4", "4.0.0b36"), "flash_attn": ("flash-attn", "2.6.0")}
INSTALL = ("pip install flash-attn (FA2), pip install --pre flash-attn-4 (FA4), or build hopper/ of FlashAttention's source "
           "tree (FA3)")


@functools.cache
def variant(major: int) -> tuple[str, str, int] | None:
    """(variant, module, page multiple) for a GPU of compute capability ``major``.x; None if none is installed."""
    return next(((name, module, page) for name, module, majors, page in VARIANTS
                 if major in majors and missing(module, "") is None and _old(module) is None), None)


def _old(module: str) -> str | None:
    """Why the version of ``module`` that is installed cannot be used."""
    return too_old(*OLDEST[module]) if module in OLDEST else None


def _installed() -> tuple[str, str, int] | None:
    return variant(torch.cuda.get_device_capability()[0]) if torch.cuda.is_available() else None


def _variant_and_module() -> tuple[str, Any]:
    """Raises RuntimeError if none is installed."""
    if (found := _installed()) is None:
        raise RuntimeError(f"no FlashAttention is installed: {INSTALL}")
    return found[0], importlib.import_module(found[1])


def _prepare(slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
             page_size: int) -> list[Tensor]:
    """[padding (T, 1, 1) bool, prefix sums (B + 1,) int32 of the sequences' lengths, which FA2 takes]."""
    return [padding_tokens(slot_mapping, query_start_loc),
            torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))]


def _prepare_fake(slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                  seq_lens: Tensor, page_size: int) -> list[Tensor]:
    return [seq_lens.new_empty(slot_mapping.shape[0], 1, 1, dtype=torch.bool), seq_lens.new_empty(seq_lens.shape[0] + 1)]


def paged_attention(q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                    v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                    seq_lens: Tensor, sinks: Tensor | None, prepared: list[Tensor], *, scale: float, window: int | None,
                    softcap: float | None, chunk: int | None) -> Tensor:
    BACKEND.capabilities.refuse(NAME, k_scale, window=window, softcap=softcap, chunk=chunk, sinks=sinks)
    name, lib = _variant_and_module()
    store_kv(k, v, k_cache, v_cache, None, None, slot_mapping)
    if not q.shape[0]:
        return q.new_empty(0, q.shape[1], v_cache.shape[3])
    # The kernels take lengths from the tables; the longest ones are upper bounds, those of the whole step for a part of it.
    step, room = current_step(), block_table.shape[1] * k_cache.shape[1]
    longest_query = q.shape[0] if step is None or step.graph_key is not None else max(1, step.metadata.max_query_len)
    longest = room if step is None or step.graph_key is not None else max(1, min(room, step.metadata.max_seq_len))
    padding, ends = prepared or _prepare(slot_mapping, block_table, query_start_loc, seq_lens, k_cache.shape[1])
    none, with_lse = None if name == "FA4" else -1, sinks is not None
    arguments = q.detach().contiguous(), k_cache, v_cache
    options: dict[str, Any] = {
        "cu_seqlens_q": query_start_loc, "max_seqlen_q": longest_query, "softmax_scale": scale, "causal": True,
        "window_size": (none, none) if window is None else (window - 1, 0), "softcap": softcap or 0.0}
    if name == "FA3":
        found = lib.flash_attn_with_kvcache(*arguments, cache_seqlens=seq_lens, page_table=block_table, num_splits=0,
                                            return_softmax_lse=with_lse, **options)
    elif name == "FA4":
        found = lib.flash_attn_varlen_func(*arguments, max_seqlen_k=longest, seqused_k=seq_lens, page_table=block_table,
                                           return_lse=with_lse, **options)
    else:
        found = lib.flash_attn_varlen_func(*arguments, cu_seqlens_k=ends, max_seqlen_k=longest, return_attn_probs=with_lse,
                                           block_table=block_table, **options)
    out = found[0] if with_lse or name == "FA4" else found
    out = out if sinks is None else with_sinks(out, found[1], sinks)
    return out.masked_fill_(padding, 0)  # the kernels leave padding tokens as they were


def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
           scale: float, window: int | None, softcap: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """``varlen_attention_eager``; reads the longest lengths on the host. Raises ValueError for a dtype or head dims that the
    kernels lack."""
    caps, (dim, dim_v) = BACKEND.capabilities, (q.shape[2], v.shape[2])
    if q.dtype not in caps.dtypes or not _head_dims(dim, dim_v, paged=False):
        raise ValueError(f"implementation={NAME!r}: {q.dtype} and head dims {dim}/{dim_v}; it has "
                         f"{', '.join(sorted(map(str, caps.dtypes)))} and multiples of 8 up to 256, the same for values"
                         + ("; on Blackwell up to 128, and 256" if (_installed() or ("",))[0] == "FA4" else ""))
    name, lib = _variant_and_module()
    lens_q, lens_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    if not q.shape[0] or not len(lens_q) or not k.shape[0]:
        return q.new_zeros(q.shape[0], q.shape[1], dim_v), q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    longest_q, longest_k = (max(1, int(lens.max())) for lens in (lens_q, lens_k))
    none = None if name == "FA4" else -1
    before, after = (none, none) if window is None else (window - 1, 0 if causal else window - 1)
    out, lse, *_ = lib.flash_attn_varlen_func(
        q.detach().contiguous(), k.detach().contiguous(), v.detach().contiguous(), cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k, softmax_scale=scale, causal=causal,
        window_size=(before, after), softcap=softcap or 0.0,
        **{"return_lse" if name == "FA4" else "return_attn_probs": True})
    # Where a query has no keys, and also where its scores have a NaN, some kernels write an lse of +inf: the lengths tell.
    token = torch.arange(q.shape[0], device=q.device)
    row = torch.searchsorted(cu_seqlens_q[1:].long(), token, right=True).clamp_max(len(lens_q) - 1)
    keys = lens_k[row]
    seen = (token < cu_seqlens_q[-1]) & (keys > 0)
    if causal or window is not None:
        seen &= token - cu_seqlens_q[row + 1] + keys >= (0 if causal or window is None else 1 - window)
    lse = lse.transpose(0, 1).float()
    return (torch.where(seen[:, None, None], out, 0),
            torch.where(seen[:, None], lse.masked_fill(~lse.isfinite(), float("nan")), float("-inf")))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """out (T, H, Dv), lse (H, T), natural: sinks leave exp(lse) / (exp(lse) + exp(sink)) of the weight for the keys."""
    return (out * torch.sigmoid(lse.transpose(0, 1) - sinks.float())[..., None]).to(out.dtype)


def _head_dims(dim: int, dim_v: int, paged: bool = True) -> bool:
    name, _, page = _installed() or ("", "", 1)
    # What FA4 4.0.0b36 asserts: multiples of 16 where pages are not its tiles of keys ("Paged KV does not support irregular
    # head dim"; compiled for Hopper on a CPU, with FLASH_ATTENTION_ARCH=sm_90), and on Blackwell no dims between 128 and 256.
    multiple = 16 if paged and name == "FA4" else 8
    largest = 128 if name == "FA4" and page == 128 else 256
    return dim == dim_v and dim % multiple == 0 and (dim <= largest or dim == 256)


def available(device: torch.device) -> str | None:
    if why := wrong_gpu(device, 8, 9, 10, 11, 12):
        return why
    major = torch.cuda.get_device_capability(device)[0]
    if variant(major) is not None:
        return None
    old = (_old(module) for _, module, majors, _ in VARIANTS if major in majors and missing(module, "") is None)
    return next(filter(None, old), f"no FlashAttention is installed: {INSTALL}")


BACKEND = AttentionBackend(
    name=NAME,
    capabilities=AttentionCapabilities(
        devices=frozenset({"cuda"}), dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=_head_dims,
        head_dims_note="multiples of 8 up to 256, the same for values; FA4: multiples of 16, on Blackwell up to 128, and 256",
        page_sizes=lambda p: p % (found[2] if (found := _installed()) else 1) == 0,
        page_sizes_note="any; multiples of 256 with FA2, of 128 with FA4 on Blackwell", layouts=frozenset({"NHD"}),
        kv_dtypes_note="its kernels take one scale per sequence and head, and quire's caches have one for each token",
        min_compute_capability=(8, 0), window=True, softcap=True, sinks=True, any_batch=True,
        cudagraph_support=CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    ),
    available=available,
    op=define_paged_op(NAME, paged_attention, devices=("CUDA",)),
    prepare=define_prepare(NAME, _prepare, _prepare_fake),
    varlen=varlen, packages=("flash-attn", "flash-attn-3", "flash-attn-4"),
    verified_note="FA4 on Hopper; not FA3 and FA2, nor FA4 on Blackwell",
)
