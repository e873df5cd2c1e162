"""Backend ``flashmla``: FlashMLA's decoding kernel for MLA on the latent cache, in absorbed terms, on Hopper GPUs.
A decoder (``mla_by_token``). The package is ``sgl-flash-mla``, which keeps the dense kernels for Hopper; version 1.0.0 asks for
torch 2.14.1, but loads and runs with torch 2.11 and CUDA 13 too."""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor

from quire.attn_ops.backend import CudagraphSupport
from quire.attn_ops.vendor import decoder, missing, mla_by_token, mla_only, too_old, wrong_gpu

INSTALL = "pip install sgl-flash-mla (torch 2.14.1 or newer, CUDA 13)"
NAME, PAGE_SIZE, RANK, ROPE = "flashmla", 64, 512, 64


def attend(query: Tensor, rotary: Tensor, cache: Tensor, table: Tensor, lens: Tensor, scale: float, nope: int) -> Tensor:
    package = importlib.import_module("flash_mla")
    return package.flash_mla_with_kvcache(
        torch.cat([query, rotary], dim=-1)[:, None], cache[:, :, None], table, lens, RANK, package.get_mla_metadata()[0],
        softmax_scale=scale, causal=False, use_legacy=True)[0][:, 0]


@functools.cache
def _import_error() -> str | None:
    """Why the package does not load: its libraries are for one version of torch and CUDA."""
    try:
        importlib.import_module("flash_mla")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def available(device: torch.device) -> str | None:
    if why := wrong_gpu(device, 9) or missing("flash_mla", INSTALL) or too_old("sgl-flash-mla", "1.0.0", INSTALL):
        return why
    error = _import_error()
    return None if error is None else f"flash_mla does not load with torch {torch.__version__} ({error}): {INSTALL}"


mla_paged_attention = mla_by_token(attend)
CAPABILITIES = mla_only(
    RANK, ROPE, dtypes=frozenset({torch.float16, torch.bfloat16}), page_sizes=lambda p: p == PAGE_SIZE,
    page_sizes_note=f"{PAGE_SIZE}", layouts=frozenset({"NHD"}), min_compute_capability=(9, 0),
    cudagraph_support=CudagraphSupport.ALWAYS)
BACKEND = decoder(NAME, CAPABILITIES, available, mla_paged_attention, packages=("sgl-flash-mla",))
