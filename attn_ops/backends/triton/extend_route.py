"""Which steps copy the keys of long prompts to contiguous memory first (``extend_contiguous.py``), and which follow the pages.

Following pages costs more time per pair of query and key; copying costs time per key, and memory. So what counts is how many
queries read each key. Both sides are estimated from the lengths, which the host knows of the step in progress, unless it runs
as a CUDA graph, which is replayed at any length.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backends.triton.plan import Batch, tuned
from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.host import Caches
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.step import Step, current_step
from quire.attn_ops.tuning.prefill import PrefillTime


class Rates(NamedTuple):
    """A kernel's time over the whole GPU, by padded head dim (WIDTHS): seconds per pair of query and key of one head, and per
    program, which begins and ends whatever its keys are."""

    pair: tuple[float, ...]
    program: tuple[float, ...]

    def of(self, width: float) -> tuple[float, float]:
        return float(np.interp(width, WIDTHS, self.pair)), float(np.interp(width, WIDTHS, self.program))


#: Fitted on h200_extend.json, less 110 us of each time for the host: within 8 % for chunks of 8192 tokens, 16 % for
#: 64 x 1024.
WIDTHS = (64, 128, 256)
PAGED = Rates((0.755e-12, 1.163e-12, 3.08e-12), (17e-9, 35e-9, 54e-9))
CONTIGUOUS = Rates((0.589e-12, 0.930e-12, 1.69e-12), (10e-9, 17e-9, 93e-9))
QUANTIZED = 1.56  # how much longer the kernel of pages takes for codes and scales
SPLIT = 1.4  # and where it has too few tiles for the GPU, divides keys among programs and merges: of one point, 512 after 16384
MORE_LAUNCHES = 10e-6  # of the copy, and of the end of one kernel before the next
PAGED_ROWS = 128  # of a tile: tokens x heads of a group
WORTH = 0.95  # of the time by pages: estimates of short steps are off by more than of long ones
#: Of ``extend_contiguous.attend_to_expanded``, fitted within 15 % on `benchmarks/backend_kernels.py expanded` of an H200
#: (``h200_expanded.json``), but for one prompt of 1024 tokens, whose time is the host's.
EXPANDED_TIME = PrefillTime(launch=35.0, per_operation=1.91, per_key=0.0, per_mb=1.03)


class RouteConfig(NamedTuple):
    """Args:
        mode: "auto": where it takes less time, on GPUs where that was measured; "always": wherever it is possible; "never".
            QUIRE_GATHER_KV=1 and QUIRE_GATHER_KV=0 make the latter two the default.
        max_bytes: of contiguous keys and values, of one layer: every layer uses the same memory.
    """

    mode: str
    max_bytes: int


class Route(NamedTuple):
    """A step's way by contiguous keys: where the keys of each sequence begin (B + 1,), on the device; how many there are; and
    whether sequences with one query token are served elsewhere."""

    kv_starts: torch.Tensor
    num_keys: int
    skip_single: bool


def config() -> RouteConfig:
    return tuned(RouteConfig(_default_mode(), host.MAX_GATHERED))


@functools.cache
def _default_mode() -> str:
    return {"0": "never", "1": "always"}.get(os.environ.get("QUIRE_GATHER_KV", ""), "auto")


def possible(dims: tuple[int, int], dtype: torch.dtype, window: int | None, chunk: int | None, device: torch.device) -> bool:
    """Whether the contiguous kernel serves such a layer. Layers with a window or chunk read few keys of each sequence."""
    mode = config().mode
    if mode == "never" or window is not None or chunk is not None or dtype.itemsize != 2:
        return False
    if any(host.next_power_of_2(d, 16) not in (64, 128, 256) for d in dims):
        return False
    return mode == "always" or host.is_hopper(device)


def serves_expanded(nope: int, rope: int, dim_v: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``extend_contiguous.attend_to_expanded`` takes heads of MLA with such dims: its descriptors load blocks of
    columns, by powers of two, and wider ones were not measured."""
    return (nope in (64, 128) and dim_v in (64, 128) and rope in (16, 32, 64, 128)
            and possible((nope, dim_v), dtype, None, None, device))


def seconds(query_lens: np.ndarray, seq_lens: np.ndarray, heads: int, kv_heads: int, dims: tuple[int, int], cache_bytes: int,
            num_sms: int) -> tuple[float, float]:
    """Estimated time of a layer's attention by pages, and by contiguous keys, the copy included, for sequences with query_lens
    and seq_lens (B,). ``dims``: D and Dv. ``cache_bytes``: of a number in the cache; 1 where it is quantized."""
    query, keys = query_lens.astype(np.int64), seq_lens.astype(np.int64)
    widths = [host.next_power_of_2(d, 16) for d in dims]
    mean, block_m, per_sm = sum(widths) / 2, *((64, 2) if max(widths) <= 128 else (128, 1))  # of extend_contiguous.config
    pairs, slots = heads * float((query * (keys - query) + query * (query + 1) // 2).sum()), num_sms * per_sm
    pair, program = PAGED.of(mean)
    tiles = kv_heads * float((-(-query * (heads // kv_heads) // PAGED_ROWS)).sum())
    codes = QUANTIZED if cache_bytes == 1 else 1.0
    by_pages = (codes * pair * pairs + program * tiles) * (SPLIT if tiles < num_sms else 1.0)
    pair, program = CONTIGUOUS.of(mean)
    by_rows = pair * pairs + program * heads * float((-(-query // block_m)).sum())
    longest = slots * (pair * block_m * float(keys.max(initial=0)) + program)  # of one program
    copy = float(keys.sum()) * kv_heads * (sum(dims) * cache_bytes + sum(widths) * 2) / host.GATHER_BANDWIDTH
    return by_pages, max(by_rows, longest) + copy + MORE_LAUNCHES


def without_graph(sites: Sequence[AttentionSite], device: torch.device, state: None, query_lens: np.ndarray,
                  seq_lens: np.ndarray) -> tuple[float, float]:
    """``AttentionBackend.without_graph``, of the layers for which the way by contiguous keys is possible."""
    query_lens, seq_lens, paged, best = query_lens[query_lens > 1], seq_lens[query_lens > 1], 0.0, 0.0
    for (heads, kv_heads, dims, itemsize), layers in _kinds(sites, device).items():
        pages, contiguous = seconds(query_lens, seq_lens, heads, kv_heads, dims, itemsize, host.num_sms(device))
        fits = _bytes_per_token(kv_heads, dims) * int(seq_lens.sum()) <= config().max_bytes
        paged += layers * pages * 1e6
        best += layers * (contiguous if fits and contiguous <= WORTH * pages else pages) * 1e6
    return paged, best


def scratch_bytes(sites: Sequence[AttentionSite], device: torch.device, tokens: int) -> int:
    """``AttentionBackend.scratch_bytes``: contiguous keys and values of one layer."""
    most = max((_bytes_per_token(kv_heads, dims) for _, kv_heads, dims, _ in _kinds(sites, device)), default=0)
    return min(most * tokens, config().max_bytes)


def _kinds(sites: Sequence[AttentionSite], device: torch.device) -> Counter[tuple[int, int, tuple[int, int], int]]:
    """The layers for which the way by contiguous keys is possible, counted by heads, KV heads, dims and bytes of a number."""
    return Counter((s.num_heads, s.num_kv_heads, (s.head_dim, s.head_dim_v), s.dtype.itemsize) for s in sites
                   if s.latent is None and possible((s.head_dim, s.head_dim_v), s.dtype, s.window, s.chunk, device))


def _bytes_per_token(kv_heads: int, dims: tuple[int, int]) -> int:
    """Of contiguous keys and values in half precision."""
    return 2 * kv_heads * sum(host.next_power_of_2(d, 16) for d in dims)


def metadata_of(q: torch.Tensor, query_start_loc: torch.Tensor) -> tuple[Step, CommonAttentionMetadata] | None:
    """The step in progress and its metadata, if these lengths are the step's and no graph's, which is replayed for others."""
    step = current_step()
    if step is None or step.graph_key is not None or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    meta = step.metadata
    same = (meta.num_tokens == q.shape[0] and meta.query_start_loc.shape == query_start_loc.shape
            and meta.query_start_loc.data_ptr() == query_start_loc.data_ptr())
    return (step, meta) if same else None


def find_route(q: torch.Tensor, caches: Caches, batch: Batch, window: int | None, chunk: int | None, skip_single: bool
               ) -> Route | None:
    """The way by contiguous keys for this layer of the step, where it is possible and takes less time; else None. Worked out
    once per step for alike layers."""
    found = metadata_of(q, batch.query_start_loc)
    if found is None or found[1].seq_lens.data_ptr() != batch.seq_lens.data_ptr():
        return None
    step, meta = found
    key = ("contiguous keys", q.shape[1], caches.k.shape[2:], caches.v.shape[3], q.dtype, caches.k.dtype, window, chunk,
           skip_single)
    if key not in step.notes:
        dims = caches.k.shape[3], caches.v.shape[3]
        step.notes[key] = _route(meta, batch, q.shape[1], caches, skip_single) if possible(
            dims, q.dtype, window, chunk, q.device) else None
    return step.notes[key]


def _route(meta: CommonAttentionMetadata, batch: Batch, heads: int, caches: Caches, skip_single: bool) -> Route | None:
    dims, kv_heads = (caches.k.shape[3], caches.v.shape[3]), caches.k.shape[2]
    query_lens, fewest = meta.query_lens_cpu.numpy(), 2 if skip_single else 1
    wanted = query_lens >= fewest
    query_lens, seq_lens = query_lens[wanted], meta.seq_lens_cpu.numpy()[wanted]
    num_keys = int(seq_lens.sum(dtype=np.int64))
    now = config()
    if not num_keys or _bytes_per_token(kv_heads, dims) * num_keys > now.max_bytes:
        return None
    device = batch.seq_lens.device
    if now.mode != "always":
        paged, contiguous = seconds(query_lens, seq_lens, heads, kv_heads, dims, caches.k.dtype.itemsize, host.num_sms(device))
        if contiguous > WORTH * paged:
            return None
    starts = host.kernel_module("kernels.gather_kv").kv_starts(batch.query_start_loc, batch.seq_lens, fewest)
    return Route(starts, num_keys, skip_single)
