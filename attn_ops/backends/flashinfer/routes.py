"""Which way the prompts of a step are served: where the kernels read their keys.

* PAGES: all keys from pages.
* COPIES: all keys from contiguous memory, to which they are copied first (``contiguous.py``).
* OWN: the step's tokens from the k and v that the op was called with, cached prefixes from pages; the two are merged
  (``contiguous.OwnKeys``). Without a cached prefix there is nothing to merge, nor to copy.

On Hopper GPUs FlashInfer's kernel loads contiguous keys with the tensor memory accelerator, and pages without it. Four prompts
of 32704 tokens took qwen3-0.6b 1,055 instead of 1,189 ms (``h200_long_contiguous.json``, ``h200_long.json``). A copy takes
time per key and merging per query, so what counts is how many queries read each key.

NOTE [Values behind a sequence]: The tensor memory accelerator loads whole tiles of TILE tokens, and the kernel gives those past
a sequence's end the weight 0, which is no help against a NaN or an infinity: 0 * NaN is NaN. What lies past the end must be
finite, or past the end of the tensor, where zeros are loaded. So the tokens of a step are read in runs (``runs``), each from a
tensor of its own, and copies of keys are padded with zeros. FlashInfer's other kernels load no value past a sequence's end.
"""

from __future__ import annotations

import enum

import numpy as np
import torch

from quire.attn_ops.kernels import host
from quire.attn_ops.tuning.prefill import pairs

TILE = 128  # tokens, a multiple of those that FlashInfer 0.6.18 loads at a time with any head dim
MOST_RUNS = 4  # each has a wrapper, with 8 MB of FlashInfer's on the GPU and 8 MB pinned
#: Seconds per operation of both products that contiguous keys spare on a Hopper GPU, by head dim: of 128 estimated from those
#: two files, of 64 measured (``h200_flashinfer_ways_64.json``). Others count as sparing nothing until they are measured.
SAVED = {64: 0.2e-15, 128: 0.3e-15}
MORE_LAUNCHES = 15e-6  # seconds: of a copy, of a further run, of a second pass and its merge; estimated


class Way(enum.Enum):
    PAGES, COPIES, OWN = "pages", "copies", "own"


def seen_right(dtype: torch.dtype, dim: int, softcap: float | None) -> bool:
    """Whether OWN may serve such a layer: what ``tests/gpu/test_flashinfer_gpu.py`` was seen to pass with on a GPU. Others go
    the other ways; of other head dims it is not measured whether OWN takes less time."""
    if dim == 64:
        return dtype == torch.bfloat16 and softcap is None
    return dim == 128 and (dtype == torch.bfloat16 or dtype == torch.float16 and softcap is None)


def padded(lens: np.ndarray) -> np.ndarray:
    """``lens`` up to whole tiles."""
    return -(-lens.astype(np.int64) // TILE) * TILE


def runs(lens: np.ndarray, whole_tiles: bool) -> list[tuple[int, int]]:
    """(first row, row after the last) of parts of a batch with (B,) tokens: in each, no row but the last one that has tokens
    ends within a tile. One part unless kernels load ``whole_tiles``. See NOTE [Values behind a sequence]."""
    found, begin, ended = [], 0, False
    for row, tokens in enumerate(lens.tolist() if whole_tiles else ()):
        if ended and tokens:
            found.append((begin, row))
            begin, ended = row, False
        ended |= tokens % TILE > 0
    return [*found, (begin, len(lens))]


def seconds(query_lens: np.ndarray, seq_lens: np.ndarray, heads: int, kv_heads: int, dim: int, *, hopper: bool, own_runs: int,
            copies: bool) -> dict[Way, float]:
    """What each way that is possible takes more than both products do on contiguous keys, for a layer and sequences of (B,)
    query tokens and keys; of ways that take the same time the first is best. Numbers have two bytes.

    Args:
        hopper: whether FlashInfer's kernels for Hopper GPUs run.
        own_runs: ``runs`` of the step's tokens; 0: the op gets no k and v that read as those of the cache.
        copies: whether keys may be copied.
    """
    per_pair = 4 * heads * dim * (SAVED.get(dim, 0.0) if hopper else 0.0)
    by_pages, among_own = (per_pair * pairs(query_lens, lens, None, None) for lens in (seq_lens, query_lens))
    found = {}
    if 0 < own_runs <= MOST_RUNS:
        found[Way.OWN] = by_pages - among_own + (own_runs - 1) * MORE_LAUNCHES
        if (seq_lens > query_lens).any():  # write and read two outputs and their lse, write one
            merged = int(query_lens.sum()) * heads * (4 * 2 * dim + 4 * 4)
            found[Way.OWN] += merged / host.GATHER_BANDWIDTH + MORE_LAUNCHES
    found[Way.PAGES] = by_pages
    copied = 4 * kv_heads * dim * int(padded(seq_lens).sum())
    if copies and dim in SAVED and copied <= host.MAX_GATHERED:
        found[Way.COPIES] = 2 * copied / host.GATHER_BANDWIDTH + MORE_LAUNCHES
    return found


def choose(query_lens: np.ndarray, seq_lens: np.ndarray, heads: int, kv_heads: int, dim: int, **possible: int) -> Way:
    """The way that takes the least time. ``possible``: arguments of ``seconds``."""
    found = seconds(query_lens, seq_lens, heads, kv_heads, dim, **possible)  # type: ignore[arg-type]
    return min(found, key=found.__getitem__)
