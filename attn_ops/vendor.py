"""What backends of vendors' packages share: why a package cannot be used, and tables by token.

A file of a backend imports its package at the first call, never before: `quire backends` and the registry load without it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from typing import Any

import torch

from quire.attn_ops.library import define_op


def missing(module: str, install: str) -> str | None:
    """None if ``module`` can be imported, else that it is not installed, with the command that installs it."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        found = False
    return None if found else f"{module} is not installed: {install}"


def too_old(distribution: str, oldest: str, install: str | None = None) -> str | None:
    """None if the installed version of ``distribution`` is ``oldest`` or newer, or unknown; else how to get a newer one.

    Args:
        install: how to install it, where other distributions have a module of the same name: then one must be of this.
    """

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(int(n) for n in re.match(r"[\d.]*", version)[0].split(".") if n)  # type: ignore[index]

    try:
        have = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None if install is None else f"the module that is installed is not that of {distribution}: {install}"
    if numbers(have) >= numbers(oldest):
        return None
    return f"{distribution} {have} is installed, its calls are those of {oldest} or newer: pip install -U {distribution}"


def wrong_gpu(device: torch.device, *majors: int) -> str | None:
    """None on a CUDA device whose compute capability is one of ``majors``, else what it needs."""
    if device.type != "cuda":
        return f"runs on cuda, not {device.type}"
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


def by_token(slot_mapping: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
             ) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token as a sequence of its own, for kernels that decode: its row of ``block_table`` (T, W) int32, and the keys that
    it sees, its own included (T,) int32; 0 for padding tokens. Device work only."""
    token = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    row = torch.searchsorted(query_start_loc[1:].long(), token, right=True).clamp_max(seq_lens.shape[0] - 1)
    lens = seq_lens[row] - query_start_loc[row + 1] + token + 1
    return block_table[row], torch.where(token < query_start_loc[-1], lens, 0).to(torch.int32)


def slots_end_to_end(block_table: torch.Tensor, lens: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B + 1,) int32 prefix sums of ``lens`` (B,), and the slot of each token of each sequence, end to end, int32: as many as
    the block table has room for, zeros behind the last."""
    indptr = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    at = torch.arange(block_table.numel() * page_size, device=block_table.device)
    row = torch.searchsorted(indptr[1:].long(), at, right=True).clamp_max(max(0, lens.shape[0] - 1))
    position = (at - indptr[row]).clamp(0, block_table.shape[1] * page_size - 1)
    slots = block_table[row, position // page_size] * page_size + position % page_size
    return indptr, torch.where(at < indptr[-1], slots, 0).to(torch.int32)


def define_by_token(name: str, multiple: Callable[[int], int] = lambda page_size: 1) -> Any:
    """Register ``by_token`` as the op ``quire::<name>_prepare``, for ``AttentionBackend.prepare``; return its overload.

    Args:
        multiple: page size -> number of which the columns of the table must be a multiple; added ones are the null page.
    """

    def prepare(slot_mapping: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
                page_size: int) -> list[torch.Tensor]:
        table, lens = by_token(slot_mapping, block_table, query_start_loc, seq_lens)
        return [widened(table, multiple(page_size)), lens]

    def fake(slot_mapping: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
             page_size: int) -> list[torch.Tensor]:
        tokens, columns = slot_mapping.shape[0], multiple(page_size)
        return [block_table.new_empty(tokens, -(-block_table.shape[1] // columns) * columns), seq_lens.new_empty(tokens)]

    return define_op(f"{name}_prepare(Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, "
                     "int page_size) -> Tensor[]", cpu=prepare, cuda=prepare, fake=fake)


def widened(table: torch.Tensor, columns: int) -> torch.Tensor:
    """A table of pages (T, W) with null pages added up to a multiple of ``columns``."""
    return torch.nn.functional.pad(table, (0, -table.shape[1] % columns))


__all__ = ["by_token", "define_by_token", "missing", "no_compiler", "slots_end_to_end", "too_old",
           "widened", "wrong_gpu"]
