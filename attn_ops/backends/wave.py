"""Backend ``wave``: the paged decoding kernels of IREE's Wave (package wave-lang) on AMD's MI300 and newer. Not verified on
hardware; its calls are tested against the signatures of wave-lang 3.9.1.

A decoder (``paged_by_token``). Wave makes two kernels for each kind of layer: partial results over splits of the keys, and
their sum. They read pages of one token: the slots of all rows are laid end to end. A kernel is compiled at its first call.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from quire.attn_ops.backend import AttentionCapabilities, CudagraphSupport
from quire.attn_ops.vendor import decoder, missing, no_rocm, paged_by_token, slots_end_to_end, too_old

NAME = "wave"
SPLITS = 8  # of the keys of a sequence
SLOTS = 1 << 24  # laid out at a time: tokens of a batch times the room of its block table
PACKAGE = "wave_lang.kernel.wave"
TEMPLATE = f"{PACKAGE}.templates.paged_decode_attention"


@functools.cache
def kernels(heads: int, kv_heads: int, dim: int, dim_v: int, dtype: torch.dtype, scale: float, softcap: float
            ) -> tuple[Any, Any]:
    """Both kernels, compiled. The number of sequences is one of their arguments."""
    module, utils = importlib.import_module(TEMPLATE), importlib.import_module(f"{PACKAGE}.utils.general_utils")
    compiler, run = importlib.import_module(f"{PACKAGE}.compile"), importlib.import_module(f"{PACKAGE}.utils.run_utils")
    mma = importlib.import_module(f"{PACKAGE}.constraints").MMAType
    shape = module.paged_decode_attention_shape(
        num_query_heads=heads, num_kv_heads=kv_heads, head_size=dim, head_size_kv=dim_v, block_size=1, num_seqs=1)
    variant = mma.F32_16x16x16_F16
    first, second, symbols, more, dynamic, dynamic_more = module.get_paged_decode_attention_kernels(
        shape, (variant, variant), SPLITS, input_dtype=dtype, output_dtype=dtype, layer_scaling=scale, logit_cap=softcap)

    def compiled(kernel: Any, subs: dict[Any, Any], sizes: list[Any]) -> Any:
        options = compiler.WaveCompileOptions(
            subs={**subs, **utils.get_default_scheduling_params()}, canonicalize=True, dynamic_symbols=sizes,
            use_buffer_ops=True, waves_per_eu=2, denorm_fp_math_f32="preserve-sign", wave_runtime=True)
        return compiler.wave_compile(run.set_default_run_config(options), kernel)

    return compiled(first, symbols, dynamic), compiled(second, more, dynamic_more)


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, *,
           scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    (tokens, heads, dim), dim_v, page_size = q.shape, v_cache.shape[3], k_cache.shape[1]
    out = q.new_empty(tokens, heads, dim_v)
    first, second = kernels(heads, k_cache.shape[2], dim, dim_v, q.dtype, scale, softcap or 0.0)
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    rows = max(1, SLOTS // (table.shape[1] * page_size))
    for begin in range(0, tokens, rows):
        end = min(begin + rows, tokens)
        indptr, slots = slots_end_to_end(table[begin:end], lens[begin:end], page_size)
        partial = torch.empty(SPLITS, end - begin, heads, dim_v, dtype=torch.float32, device=q.device)
        highest = torch.empty(SPLITS, end - begin, heads, dtype=torch.float32, device=q.device)
        first(q[begin:end], keys, values, indptr, slots, partial, highest)
        second(partial, highest, indptr, out[begin:end])
    return out


def available(device: torch.device) -> str | None:
    return no_rocm(device) or missing("wave_lang", "pip install wave-lang") or too_old("wave-lang", "3.9.1")


CAPABILITIES = AttentionCapabilities(
    devices=frozenset({"cuda"}), dtypes=frozenset({torch.float16}),
    head_dims=lambda d, dv: d % 64 == 0 and dv % 64 == 0 and max(d, dv) <= 256,
    head_dims_note="multiples of 64 up to 256", layouts=frozenset({"NHD"}), softcap=True,
    cudagraph_support=CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE,
)
paged_attention = paged_by_token(NAME, CAPABILITIES, attend)
BACKEND = decoder(NAME, CAPABILITIES, available, paged_attention, packages=("wave-lang",), verified=False)
