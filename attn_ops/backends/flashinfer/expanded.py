"""MLA's expanded keys and values (``attn_ops/mla_prefill.py``) by FlashInfer's kernels for Hopper GPUs, for the long prompts of
a backend that serves MLA.

A step has parts: its own keys, and each chunk of the prefixes. A part is planned by the first layer that runs it, for all
layers of a kind; the other backend serves one whose planning fails. The keys of all heads are put together first, each head's
own numbers and the rotary ones, which all share; values are read where the expansion left them. See NOTE [Values behind a
sequence]: a part is attended to in runs of sequences, each from tensors that end with it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import ExpandedPart
from quire.attn_ops.backends.flashinfer.contiguous import loadable
from quire.attn_ops.backends.flashinfer.modules import HOPPER
from quire.attn_ops.backends.flashinfer.routes import MOST_RUNS, TILE
from quire.attn_ops.backends.flashinfer.state import MIN_WORKSPACE, RAGGED
from quire.attn_ops.mla_prefill import Expanded, Faster
from quire.attn_ops.tuning.prefill import PrefillTime

logger = logging.getLogger(__name__)
#: What was seen right and measured: DeepSeek's heads, of a key's own and its rotary numbers, and of values.
NOPE, ROPE, DIM_V = 128, 64, 128
MOST_WRAPPERS = 12  # of a step; each has 8 MB of FlashInfer's on the GPU and 8 MB pinned
#: Fitted within 20 % on `benchmarks/backend_kernels.py expanded` of an H200 (``h200_expanded.json``): 16 and 128 heads, 1 to 8
#: sequences. ``per_mb`` is for putting keys together, too.
TIME = PrefillTime(launch=34.0, per_operation=1.35, per_key=0.0, per_mb=1.81)


def takes(site: AttentionSite, device: torch.device) -> bool:
    """``ExpandedPart.takes``."""
    return (site.latent is not None and site.latent.rope == ROPE and (site.head_dim, site.head_dim_v) == (NOPE + ROPE, DIM_V)
            and site.dtype == torch.bfloat16 and device.type == "cuda" and _is_hopper(device))


def _is_hopper(device: torch.device) -> bool:
    try:
        return bool(torch.cuda.get_device_properties(device).major == HOPPER)
    except (AssertionError, RuntimeError):  # no such GPU: it is only asked about
        return False


def runs(query_lens: np.ndarray, key_lens: np.ndarray) -> list[tuple[int, int]]:
    """(first row, row after the last) of the parts of (B,) sequences: those with queries and keys, side by side, of which none
    but the last ends within a tile of keys."""
    found, begin = list[tuple[int, int]](), -1
    for row, (queries, keys) in enumerate(zip(query_lens.tolist(), key_lens.tolist(), strict=True)):
        if queries and keys:
            begin = row if begin < 0 else begin
            if keys % TILE == 0:
                continue
            found.append((begin, row + 1))
        elif begin >= 0:
            found.append((begin, row))
        begin = -1
    return found if begin < 0 else [*found, (begin, len(query_lens))]


class Segment(NamedTuple):
    """FlashInfer's wrapper, planned, and the tokens of its queries and keys."""

    wrapper: Any
    queries: slice
    keys: slice


class ExpandedKeys:
    """Of one engine: the workspace and the plans of a step. Wrappers are planned anew in each step, after the copies of their
    last plans are done, which FlashInfer makes from pinned memory of its own. Parts of the same lengths share their plan."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.make = device, getattr(importlib.import_module("flashinfer"), RAGGED)
        self.workspace = torch.zeros(MIN_WORKSPACE, dtype=torch.uint8, device=device)
        self.wrappers: list[Any] = []
        self.used = 0  # wrappers, in this step
        self.planned: dict[Any, list[Segment]] = {}  # none: not taken
        self.copied: Any = None
        self.failed = False

    def begin(self) -> Faster:
        """For the parts of one step."""
        self.planned, self.used = {}, 0
        if self.copied is not None:
            self.copied.synchronize()
        return self._of_part

    def _of_part(self, query_lens: np.ndarray, key_lens: np.ndarray, *sizes: int, **options: Any) -> Expanded | None:
        key = (query_lens.tobytes(), key_lens.tobytes(), sizes, *options.values())
        if key not in self.planned:
            try:
                self.planned[key] = self._plan(query_lens, key_lens, sizes, options)
            except Exception as error:  # nothing has run yet: the other backend can serve the part
                self.planned[key] = []
                if not self.failed:
                    logger.warning("flashinfer: a part of a prompt is not served, later ones are tried: %s: %s",
                                   type(error).__name__, error)
                self.failed = True
        segments = self.planned[key]
        return functools.partial(self._attend, segments) if segments else None

    def _plan(self, query_lens: np.ndarray, key_lens: np.ndarray, sizes: tuple[int, ...], options: dict[str, Any]
              ) -> list[Segment]:
        """No segment for a part in more runs than pay, or in one more than there are wrappers for."""
        parts, found = runs(query_lens, key_lens), list[Segment]()
        if len(parts) > MOST_RUNS or self.used + len(parts) > MOST_WRAPPERS:
            return []
        starts = [np.concatenate(([0], np.cumsum(lens))).astype(np.int32) for lens in (query_lens, key_lens)]
        heads, dim, dim_v = sizes
        for begin, end in parts:
            if self.used == len(self.wrappers):
                self.wrappers.append(self.make(self.workspace, "NHD", backend="fa3"))
            wrapper, self.used = self.wrappers[self.used], self.used + 1
            wrapper.plan(*(torch.from_numpy(each[begin : end + 1] - each[begin]) for each in starts), heads, heads, dim, dim_v,
                         causal=options["causal"], sm_scale=options["scale"], q_data_type=options["dtype"],
                         kv_data_type=options["dtype"])
            found.append(Segment(wrapper, *(slice(int(each[begin]), int(each[end])) for each in starts)))
        self.copied = torch.cuda.Event()
        self.copied.record(torch.cuda.current_stream(self.device))
        return found

    @staticmethod
    def _attend(segments: list[Segment], q: Tensor, kv: Tensor, k_rope: Tensor, *of_device: Tensor, **planned: Any
                ) -> tuple[Tensor, Tensor]:
        heads, dim, nope = q.shape[1], q.shape[2], q.shape[2] - k_rope.shape[1]
        kv = kv.unflatten(1, (heads, -1))
        k = kv.new_empty(kv.shape[0], heads, dim)
        k[..., :nope] = kv[..., :nope]
        k[..., nope:] = k_rope[:, None]
        q, out = loadable(q), q.new_empty(q.shape[0], heads, kv.shape[2] - nope)
        lse = torch.empty(q.shape[0], heads, dtype=torch.float32, device=q.device)
        if sum(s.queries.stop - s.queries.start for s in segments) < len(q):  # some see no key
            out.zero_()
            lse.fill_(-math.inf)
        for wrapper, queries, keys in segments:
            wrapper.run(q[queries], k[keys], kv[keys, :, nope:], out=out[queries], lse=lse[queries], return_lse=True)
        return out, lse.mul_(math.log(2))  # FlashInfer's is to base 2

    def try_short(self, site: AttentionSite) -> None:
        """Run a prompt of two tokens. Raises what FlashInfer raises."""
        assert site.latent is not None
        made, lens = functools.partial(torch.zeros, 2, dtype=site.dtype, device=self.device), np.array([2])
        rope, sizes = site.latent.rope, (site.num_heads, site.head_dim, site.head_dim_v)
        self.begin()
        segments = self._plan(lens, lens, sizes, {"dtype": site.dtype, "scale": site.scale, "causal": True})
        self._attend(segments, made(site.num_heads, site.head_dim),
                     made(site.num_heads * (site.head_dim - rope + site.head_dim_v)), made(rope))


PART = ExpandedPart(takes, TIME, ExpandedKeys)
