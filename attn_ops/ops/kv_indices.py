"""Index tensors for attention kernels that read no block table: flat key indices, page tables, splits. As ops.

``req_to_token`` (R, C) int32 has the slot of token t of request r at [r, t] (SGLang's table of tokens; ``page_size`` 1 of a
block table). ``req_pool_indices`` (B,) are the rows of a batch in it. All results are written into given buffers, with device
work only: the ops may be captured, and ``out`` may be larger than needed. What lies past the live entries stays as it was.
Lengths may be 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor

from quire.attn_ops.library import define_op

P = ParamSpec("P")


def _as_op(arguments: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Make a function the op of its name with these arguments."""
    def register(function: Callable[P, None]) -> Callable[P, None]:
        op = define_op(f"{function.__name__}({arguments}) -> ()", cpu=function, cuda=function, fake=lambda *_, **__: None)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            op(*args, **kwargs)

        return call

    return register


def _tokens(req_to_token: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """req_to_token[rows, columns] with columns held inside the table; offsets in int64."""
    return req_to_token[rows.long(), columns.clamp(0, req_to_token.shape[1] - 1)]


@_as_op("Tensor req_to_token, Tensor req_pool_indices, Tensor kv_lens, Tensor kv_indptr, Tensor? kv_start, Tensor(a!) out")
def create_flashinfer_kv_indices(req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor,
                                 kv_indptr: Tensor, kv_start: Tensor | None, out: Tensor) -> None:
    """out[kv_indptr[i] : kv_indptr[i] + kv_lens[i]] = the slots of request i's tokens from kv_start[i] (default 0) on."""
    if not kv_lens.shape[0] or not out.shape[0]:
        return
    begin = kv_indptr[:-1].long()
    place = torch.arange(out.shape[0], device=out.device)
    row = (torch.searchsorted(begin, place, right=True) - 1).clamp_min(0)
    offset = place - begin[row]
    live = (offset >= 0) & (offset < kv_lens[row])
    column = offset if kv_start is None else offset + kv_start[row]
    found = _tokens(req_to_token, req_pool_indices[row], column).to(out.dtype)
    out.copy_(torch.where(live, found, out))


@_as_op("Tensor req_to_token, Tensor req_pool_indices, Tensor kv_lens, Tensor? kv_start, Tensor(a!) out, int page_size=64")
def create_flashmla_kv_indices(req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor,
                               kv_start: Tensor | None, out: Tensor, page_size: int = 64) -> None:
    """out[i, p] = the page of tokens p * page_size and following of request i, for p < ceil(kv_lens[i] / page_size). kv_start
    must be a multiple of the page size."""
    out = out[: kv_lens.shape[0]]
    page = torch.arange(out.shape[1], device=out.device)
    column = (page * page_size).expand(out.shape[0], -1)
    if kv_start is not None:
        column = column + kv_start.long()[:, None]
    live = page * page_size < kv_lens[:, None]
    found = torch.div(_tokens(req_to_token, req_pool_indices[:, None], column), page_size, rounding_mode="floor")
    out.copy_(torch.where(live, found.to(out.dtype), out))


@_as_op("Tensor(a!) out, Tensor seq_lens, int num_heads, int num_kv_heads, int max_kv_splits, int num_cores, "
        "bool static=False")
def get_num_kv_splits(out: Tensor, seq_lens: Tensor, num_heads: int, num_kv_heads: int, max_kv_splits: int,
                      num_cores: int, static: bool = False) -> None:
    """Parts into which a decode kernel divides the keys of each query row, between 1 and ``max_kv_splits``: more for long
    sequences than for short ones, and for a small batch enough to occupy ``num_cores`` multiprocessors (0: unknown). The
    formula is SGLang's; empty sequences get 1 and count for nothing (there they divide by zero). ``out``: (B * g,) int32, g
    query rows per sequence. ``seq_lens``: (B,). ``static``: all get ``max_kv_splits``. Raises ValueError if ``out`` has no
    multiple of B rows."""
    rows = seq_lens.shape[0]
    if rows < 1 or out.shape[0] % rows:
        raise ValueError(f"num_kv_splits has {out.shape[0]} rows, not a multiple of the {rows} sequences")
    if static or num_cores < 1:
        out.fill_(max_kv_splits)
        return
    repeat = out.shape[0] // rows
    lens = seq_lens.double()
    longest = lens.max().clamp_min(1)
    shortest = torch.where(lens > 0, lens, longest).min()  # empty rows, which padding leaves, do not count
    shortest = torch.where(longest * 8 < shortest * 10, longest, shortest)
    first = (longest / shortest).ceil().clamp_max(max_kv_splits)
    group = num_heads // num_kv_heads
    programs = rows * repeat * (num_heads if group == 1 else -(-num_heads // min(16, group)))
    cores = num_cores * (longest / 64).log2().clamp_min(1)
    second = (cores / programs).ceil().clamp_max(max_kv_splits)
    by_first, by_second = ((lens / (longest / splits).ceil()).ceil() for splits in (first, second))
    out.copy_(torch.maximum(by_first, by_second).clamp_min(1).repeat_interleave(repeat).to(out.dtype))


@_as_op("Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, Tensor query_lens, int window, *, "
        "Tensor(a!) kv_indptr, Tensor(b!) kv_lens, Tensor(c!) kv_start, Tensor(d!) out, bool prefix_only=False, "
        "Tensor? slot_map=None")
def update_sliding_window_buffer(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, query_lens: Tensor,
                                 window: int, *, kv_indptr: Tensor, kv_lens: Tensor, kv_start: Tensor, out: Tensor,
                                 prefix_only: bool = False, slot_map: Tensor | None = None) -> None:
    """Key indices of a window layer: the keys that any query of a sequence sees.

    The window is Hugging Face's: the query at position i sees keys j with i - window < j <= i. So a decode has
    min(seq_len, window) keys (SGLang's has one fewer), and a sequence with more queries those from its first query's window
    on, of which the kernel still masks some. Written: kv_indptr (B + 1,), kv_lens, kv_start (B,), out. ``prefix_only``: leave
    out the tokens of this step. ``slot_map``: slots of the window layers' pool by slot of the full one.
    """
    done = seq_lens - query_lens
    kv_start.copy_((done - window + 1).clamp_min(0))
    kv_lens.copy_((done if prefix_only else seq_lens) - kv_start)
    kv_indptr[0] = 0
    kv_indptr[1:] = kv_lens.cumsum(0)
    create_flashinfer_kv_indices(req_to_token, req_pool_indices, kv_lens, kv_indptr, kv_start, out)
    if slot_map is not None:
        live = torch.arange(out.shape[0], device=out.device) < kv_indptr[-1]
        slots = torch.where(live, out, 0).long()
        out.copy_(torch.where(live, slot_map[slots].to(out.dtype), out))


@_as_op("Tensor(a!) out, Tensor prefix_table, Tensor draft_table, Tensor prefix_lens, Tensor draft_lens, int num_draft")
def prepare_swa_spec_page_table(out: Tensor, prefix_table: Tensor, draft_table: Tensor,
                                prefix_lens: Tensor, draft_lens: Tensor, num_draft: int) -> None:
    """Page tables (page size 1) for tree verification in kernels with one window per call: row r of ``out`` is the prefix of
    sequence r // num_draft, then the draft tokens that draft token r sees. Raises ValueError for row counts that do not fit
    each other."""
    if out.shape[0] != prefix_table.shape[0] * num_draft or draft_table.shape[0] != out.shape[0]:
        raise ValueError(f"{prefix_table.shape[0]} sequences of {num_draft} draft tokens need "
                         f"{prefix_table.shape[0] * num_draft} rows; out has {len(out)}, draft_table {len(draft_table)}")
    column = torch.arange(out.shape[1], device=out.device).expand(out.shape[0], -1)
    owner = torch.arange(out.shape[0], device=out.device) // num_draft
    ends = prefix_lens.long()[owner][:, None]
    prefix = prefix_table[owner[:, None], column.clamp_max(prefix_table.shape[1] - 1)]
    draft = draft_table.gather(1, (column - ends).clamp(0, draft_table.shape[1] - 1))
    live = column < ends + draft_lens[:, None]
    out.copy_(torch.where(live, torch.where(column < ends, prefix, draft).to(out.dtype), out))


@_as_op("Tensor(a!) cache_seqlens, Tensor(b!) cu_seqlens_k, Tensor(c!) page_table, Tensor req_to_token, "
        "Tensor req_pool_indices, Tensor seq_lens, int seq_len_delta, int page_size, Tensor? slot_map=None, "
        "Tensor(d!)? window_page_table=None")
def normal_decode_set_metadata(cache_seqlens: Tensor, cu_seqlens_k: Tensor, page_table: Tensor, req_to_token: Tensor,
                               req_pool_indices: Tensor, seq_lens: Tensor, seq_len_delta: int, page_size: int,
                               slot_map: Tensor | None = None, window_page_table: Tensor | None = None) -> None:
    """A decode step's lengths (seq_lens + seq_len_delta), their prefix sums, and the live part of its page table; that of the
    window layers' pool too, if ``slot_map`` (slots there by slot of the full pool) is given."""
    cache_seqlens.copy_(seq_lens + seq_len_delta)
    cu_seqlens_k[0] = 0
    cu_seqlens_k[1:] = cache_seqlens.cumsum(0)
    create_flashmla_kv_indices(req_to_token, req_pool_indices, cache_seqlens, None, page_table, page_size)
    if slot_map is not None and window_page_table is not None:
        first = torch.arange(page_table.shape[1], device=page_table.device) * page_size
        slots = _tokens(req_to_token, req_pool_indices[:, None], first.expand(page_table.shape[0], -1)).long()
        live = first < cache_seqlens[:, None]
        pages = torch.div(slot_map[torch.where(live, slots, 0)], page_size, rounding_mode="floor").to(window_page_table.dtype)
        window_page_table.copy_(torch.where(live, pages, window_page_table))
