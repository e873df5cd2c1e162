"""What backends of vendors' packages share: why a package cannot be used, tables by token, and ops of kernels that only decode.
They import their packages at the first call, never before: `quire backends` and the registry load without them."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from quire.attn_ops.backend import AttentionBackend, AttentionCapabilities, define_paged_op, define_prepare
from quire.attn_ops.kv_store import store_kv, store_latent
from quire.attn_ops.mla import absorb_query, define_mla_op, expand_output, split_weight
from quire.attn_ops.step import current_step
from quire.attn_ops.tuning.store import installed_version

#: Why kernels of several packages serve no cache with a scale for each token. A key's scale multiplies its own score, inside
#: the softmax, and a value's its own weight: neither is a factor of a query or of a result. Those of them that keep NaN can
#: serve fixed scales (``kv_quant.py``).
ONE_SCALE = ("its kernels take one scale for a whole cache, and quire's have one for each token and head, which no factor on "
             "queries or results can replace")


def missing(module: str, install: str) -> str | None:
    """None if ``module`` can be imported, else that it is not installed, with the command that installs it."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        found = False
    return None if found else f"{module} is not installed: {install}"


def too_old(distribution: str, oldest: str, install: str | None = None) -> str | None:
    """None if the installed version of ``distribution`` is ``oldest`` or newer, or unknown; else how to get a newer one.
    ``install``: how to install it, where other distributions have a module of the same name: then one must be of this."""
    if (have := installed_version(distribution)) is None:
        return None if install is None else f"the module that is installed is not that of {distribution}: {install}"
    if Version(have) >= Version(oldest):
        return None
    pre = "--pre " if Version(oldest).is_prerelease else ""
    return f"{distribution} {have} is installed, its calls are those of {oldest} or newer: pip install -U {pre}{distribution}"


def wrong_device(device: torch.device, kind: str) -> str | None:
    return None if device.type == kind else f"runs on {kind}, not {device.type}"


def no_rocm(device: torch.device) -> str | None:
    return None if device.type == "cuda" and torch.version.hip else "runs on AMD GPUs with a ROCm build of torch"


def wrong_gpu(device: torch.device, *majors: int) -> str | None:
    """None on a CUDA device whose compute capability is one of ``majors``, else what it needs."""
    if why := wrong_device(device, "cuda"):
        return why
    if not torch.cuda.is_available() or torch.version.hip:
        return "no NVIDIA GPU is visible to PyTorch"
    have = torch.cuda.get_device_capability(device)
    if majors and have[0] not in majors:
        return f"needs compute capability {', '.join(f'{m}.x' for m in majors)}, the GPU has {have[0]}.{have[1]}"
    return None


def no_compiler(package: str, prebuilt: str) -> str | None:
    """None if nvcc or ``prebuilt``, a distribution of the kernels that ``package`` compiles, is there; else what to install."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else f"{os.environ.get('PATH')}:/usr/local/cuda/bin")
    if nvcc is None and importlib.util.find_spec(prebuilt.replace("-", "_")) is None:
        return (f"{package} compiles its kernels at first use, and there is no nvcc: install the CUDA toolkit and set "
                f"CUDA_HOME, or pip install {prebuilt}")
    return None


def no_flashinfer(oldest: str, install: str = "pip install flashinfer-python") -> str | None:
    """None if FlashInfer of this version or a newer one is there, with its kernels or a compiler; else what to install."""
    return (missing("flashinfer", install) or too_old("flashinfer-python", oldest)
            or no_compiler("flashinfer", "flashinfer-jit-cache"))


def workspace(size: int, device: torch.device) -> Tensor:
    """Bytes, zero at first, as some kernels keep counters in them."""
    return torch.zeros(size, dtype=torch.uint8, device=device)


def by_token(slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Each token as a sequence of its own, for kernels that decode: its row of ``block_table`` (T, W) int32, and the keys that
    it sees, its own included (T,) int32; 0 for padding tokens. Device work only."""
    token = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    row = torch.searchsorted(query_start_loc[1:].long(), token, right=True).clamp_max(seq_lens.shape[0] - 1)
    lens = seq_lens[row] - query_start_loc[row + 1] + token + 1
    return block_table[row], torch.where(token < query_start_loc[-1], lens, 0).to(torch.int32)


def padding_tokens(slot_mapping: Tensor, query_start_loc: Tensor) -> Tensor:
    """(T, 1, 1) bool: the tokens behind the last sequence's. Kernels that leave anything for them have it replaced by zeros."""
    return (torch.arange(slot_mapping.shape[0], device=slot_mapping.device) >= query_start_loc[-1])[:, None, None]


def slots_end_to_end(block_table: Tensor, lens: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """(B + 1,) int32 prefix sums of ``lens`` (B,), and the slot of each token of each sequence, end to end, int32: as many as
    the block table has room for, zeros behind the last."""
    indptr = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    at = torch.arange(block_table.numel() * page_size, device=block_table.device)
    row = torch.searchsorted(indptr[1:].long(), at, right=True).clamp_max(max(0, lens.shape[0] - 1))
    position = (at - indptr[row]).clamp(0, block_table.shape[1] * page_size - 1)
    slots = block_table[row, position // page_size] * page_size + position % page_size
    return indptr, torch.where(at < indptr[-1], slots, 0).to(torch.int32)


def define_by_token(name: str, multiple: Callable[[int], int] | None = None) -> Any:
    """``tables_by_token`` as an op for ``AttentionBackend.prepare``, once for all layers. ``multiple``: page size -> number of
    which the columns of the table must be a multiple; added ones are the null page."""

    def fake(slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
             page_size: int) -> list[Tensor]:
        tokens, columns = slot_mapping.shape[0], multiple(page_size) if multiple else 1
        return [block_table.new_empty(tokens, -(-block_table.shape[1] // columns) * columns), seq_lens.new_empty(tokens),
                seq_lens.new_empty(tokens, 1, 1, dtype=torch.bool)]

    return define_prepare(name, functools.partial(tables_by_token, multiple), fake)


def tables_by_token(multiple: Callable[[int], int] | None, slot_mapping: Tensor, block_table: Tensor,
                    query_start_loc: Tensor, seq_lens: Tensor, page_size: int) -> list[Tensor]:
    """[table, lens, padding]: ``by_token`` with lens of at least 1, as padding reads a key too, and ``padding_tokens``."""
    table, lens = by_token(slot_mapping, block_table, query_start_loc, seq_lens)
    table = torch.nn.functional.pad(table, (0, -table.shape[1] % (multiple(page_size) if multiple else 1)))
    return [table, lens.clamp_min(1), padding_tokens(slot_mapping, query_start_loc)]


def state_of(name: str, make: Callable[[], Any]) -> Any:
    """The state of that backend in the step's engine; a new one outside a step."""
    step = current_step()
    return step.states[name] if step is not None and name in step.states else make()


def paged_by_token(name: str, capabilities: AttentionCapabilities, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The paged op of a kernel that decodes: each token of a ragged batch is a sequence of its own. That is right for any
    batch, reads nothing on the host, and can be captured; prefill reads its keys once per token, and is slow: choose another
    backend for it, step by step. ``attend``: q (T, H, D) contiguous, the caches, and table and lens of ``tables_by_token``;
    scale, window, softcap and sinks by name -> (T, H, Dv), a new tensor. Not called without a token."""

    def paged_attention(q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
                        v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
                        seq_lens: Tensor, sinks: Tensor | None, prepared: list[Tensor], *, scale: float, window: int | None,
                        softcap: float | None, chunk: int | None) -> Tensor:
        capabilities.refuse(name, k_scale, window=window, softcap=softcap, chunk=chunk, sinks=sinks)
        store_kv(k, v, k_cache, v_cache, None, None, slot_mapping)
        if not q.shape[0]:
            return q.new_empty(0, q.shape[1], v_cache.shape[3])
        table, lens, padding = prepared or tables_by_token(
            None, slot_mapping, block_table, query_start_loc, seq_lens, k_cache.shape[1])
        with torch.cuda.device_of(q):
            out = attend(q.detach().contiguous(), k_cache, v_cache, table, lens, scale=scale, window=window, softcap=softcap,
                         sinks=sinks)
        return out.masked_fill_(padding, 0)

    return paged_attention


def mla_by_token(attend: Callable[..., Tensor], multiple: Callable[[int], int] | None = None) -> Callable[..., Tensor]:
    """The MLA op of a kernel that decodes on the latent cache, in absorbed terms; see ``paged_by_token`` and
    ``define_by_token``. ``attend``: (query (T, H, rank), its rotary part (T, H, R), cache (pages, page_size, rank + R), table,
    lens, scale, Dn) -> (T, H, rank)."""

    def mla_paged_attention(q: Tensor, c: Tensor, k_rope: Tensor, kv_b: Tensor, cache: Tensor, slot_mapping: Tensor,
                            block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, prepared: list[Tensor], *,
                            scale: float) -> Tensor:
        heads, nope = q.shape[1], q.shape[2] - k_rope.shape[1]
        store_latent(c, k_rope, cache, slot_mapping)
        w_uk, w_uv = split_weight(kv_b, heads, nope)
        if not q.shape[0]:
            return q.new_empty(0, heads, w_uv.shape[1])
        table, lens, padding = prepared or tables_by_token(
            multiple, slot_mapping, block_table, query_start_loc, seq_lens, cache.shape[1])
        with torch.cuda.device_of(q):
            out = attend(absorb_query(q[..., :nope], w_uk), q[..., nope:], cache.squeeze(2), table, lens, scale, nope)
        return expand_output(out.masked_fill_(padding, 0.0), w_uv)

    return mla_paged_attention


def mla_only(rank: int, rope: int, **more: Any) -> AttentionCapabilities:
    """Those of kernels on CUDA that serve MLA alone, of these sizes."""
    return AttentionCapabilities(
        devices=frozenset({"cuda"}), head_dims=lambda d, dv: False, head_dims_note="MLA only", mla=True,
        mla_dims=lambda *dims: dims == (rank, rope), mla_dims_note=f"{rank}+{rope}", **more)


def decoder(name: str, capabilities: AttentionCapabilities, available: Callable[[torch.device], str | None],
            impl: Callable[..., Tensor], multiple: Callable[[int], int] | None = None, **more: Any) -> AttentionBackend:
    """The backend of an op of ``paged_by_token``, or with ``capabilities.mla`` of ``mla_by_token``, on CUDA. ``multiple``: see
    ``define_by_token``."""
    if capabilities.mla:
        ops = {"op": None, "mla_op": define_mla_op(name, impl, ("CUDA",))}
    else:
        ops = {"op": define_paged_op(name, impl, ("CUDA",))}
    return AttentionBackend(name, capabilities, available, **ops, prepare=define_by_token(name, multiple), **more)
