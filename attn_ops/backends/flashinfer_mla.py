"""Backend ``flashinfer_mla``: FlashInfer's kernel for MLA on the latent cache, in absorbed terms, on CUDA.

FlashInfer divides a batch's work among the processors on the host: ``plan`` does it once per step for each kind of layer (query
heads and scale). Only batches of one token per sequence are captured in CUDA graphs; a graph's kernel reads buffers that
``plan`` refills before each replay. A graph may hold several steps: the plans of all are made before, each with page numbers
and a workspace of its own, and the op takes that of ``Step.number``. Its calls are those of flashinfer-python 0.6.18.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, CudagraphSupport, define_prepare
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.kv_store import store_latent
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.mla import absorb_query, define_mla_op, expand_output, split_weight
from quire.attn_ops.plans import StepPlan, StepPlans, planned_step
from quire.attn_ops.step import Step, StepLimits
from quire.attn_ops.vendor import mla_only, no_flashinfer, wrong_device

NAME = "flashinfer_mla"
LIBRARY = "flashinfer.mla"
WORKSPACE = 128 << 20  # bytes; FlashInfer's recommendation
RANK, ROPE = 512, 64


def page_table(seq_lens: np.ndarray, page_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(B,) lengths of at least 1 -> indptr (B + 1,) int32, and row and column in the block table of each page."""
    pages = -(-seq_lens.astype(np.int64) // page_size)
    indptr = np.zeros(len(pages) + 1, dtype=np.int32)
    np.cumsum(pages, out=indptr[1:])
    row = np.repeat(np.arange(len(pages)), pages)
    return indptr, row, np.arange(indptr[-1]) - indptr[row]


class MlaPlan(StepPlan):
    """The plan of one step and its page numbers, ``indices``, which graphs read: all share these, because each is planned anew
    before its replay. ``places``: of the page numbers in the block table; ``places_cpu`` is pinned."""

    def __init__(self, device: torch.device, limits: StepLimits, number: int) -> None:
        pinned = device.type == "cuda"
        super().__init__(number, torch.cuda.Event() if pinned else None)
        pages = max(1, limits.max_num_seqs) * max(1, limits.max_pages_per_seq)
        self.places_cpu = torch.zeros(pages, dtype=torch.int64, pin_memory=pinned)
        self.places = torch.zeros(pages, dtype=torch.int64, device=device)
        self.indices = torch.zeros(pages, dtype=torch.int32, device=device)
        self.key: Any = None
        self.num_tokens = self.last = 0  # last: the token after those that the kernel attends


class State:
    """Workspace and plans of one engine. ``kinds`` of layers: (heads, scale, dtype). All wrappers share one workspace, which is
    written while kernels run, one after the other; each has one of its own for what is planned."""

    def __init__(self, sites: Sequence[AttentionSite], cache: PagedKVCache, limits: StepLimits) -> None:
        self.wrapper: Any = importlib.import_module(LIBRARY).BatchMLAPagedAttentionWrapper
        self.page_size, self.device, self.limits = cache.page_size, cache.k[0].device, limits
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=self.device)
        self.plans = StepPlans(functools.partial(MlaPlan, self.device, limits))
        self.kinds = {(s.num_heads, s.scale, s.dtype) for s in sites if s.latent is not None}
        self.wrappers: dict[Any, Any] = {}  # by kind, graph and number of the step
        self.graph_rows: dict[tuple[Any, int], int] = {}  # by graph and number of the step

    def plan(self, metadata: CommonAttentionMetadata, step: Step) -> None:
        """Plan every kind of layer, after the copies of the last plan of this number are done."""
        plan, key = self.plans.begin(step), step.graph_key
        starts, lens = metadata.query_start_loc_cpu.numpy(), metadata.seq_lens_cpu.numpy()
        rows = metadata.num_reqs
        if key is not None:
            place, name = (key, plan.number), f"{key!r}" + (f" (step number {plan.number})" if plan.number else "")
            rows = self.graph_rows.setdefault(place, metadata.num_tokens) if step.capturing else self.graph_rows.get(place, 0)
            # Rows of padding follow, without tokens; at the capture all are such.
            if rows != metadata.num_tokens or rows >= len(starts) or not np.array_equal(
                    starts, np.minimum(np.arange(len(starts)), starts[-1])):
                raise RuntimeError(f"{NAME} plans CUDA graphs for one token per sequence; graph {name} was captured for "
                                   f"{rows} and has {metadata.num_tokens} tokens of {metadata.num_reqs} sequences, padding "
                                   "included")
            starts = np.arange(rows + 1, dtype=np.int32)  # padding rows too: they read one slot of the null page
        lens = np.maximum(np.pad(lens, (0, max(0, rows - len(lens))))[:rows], 1)
        indptr, row, column = page_table(lens, self.page_size)
        table, count = metadata.block_table_tensor, int(indptr[-1])
        if rows > self.limits.max_num_seqs or count > len(plan.indices) or (count and column.max() >= table.shape[1]):
            raise ValueError(f"{NAME}: a batch of {rows} sequences on {count} pages exceeds the StepLimits of its state "
                             f"({self.limits}) or its block_table of {table.shape[1]} columns")
        plan.wait()
        plan.places_cpu[:count] = torch.from_numpy(row * table.stride(0) + column)
        plan.places[:count].copy_(plan.places_cpu[:count], non_blocking=True)
        flat = table.as_strided(((table.shape[0] - 1) * table.stride(0) + table.shape[1],), (1,))
        torch.index_select(flat, 0, plan.places[:count], out=plan.indices[:count])
        plan.num_tokens, plan.last = metadata.num_tokens, int(starts[rows])
        given = (torch.from_numpy(starts[: rows + 1].copy()), torch.from_numpy(indptr), plan.indices[:count],
                 torch.from_numpy(lens.astype(np.int32)))
        plan.key = key
        for heads, scale, dtype in self.kinds:
            self._wrapper((heads, scale, dtype), plan, rows).plan(
                *given, heads, RANK, ROPE, self.page_size, True, scale, dtype, dtype)
        if plan.copied is not None:
            plan.copied.record(torch.cuda.current_stream(self.device))
        plan.step = weakref.ref(step)

    def _wrapper(self, kind: Any, plan: MlaPlan, rows: int) -> Any:
        place = (kind, plan.key, plan.number)
        if place not in self.wrappers:
            buffers = {} if plan.key is None else {
                "use_cuda_graph": True, "qo_indptr": torch.zeros(rows + 1, dtype=torch.int32, device=self.device),
                "kv_indptr": torch.zeros(rows + 1, dtype=torch.int32, device=self.device), "kv_indices": plan.indices,
                "kv_len_arr": torch.zeros(rows, dtype=torch.int32, device=self.device)}
            self.wrappers[place] = self.wrapper(self.workspace, **buffers)
        return self.wrappers[place]


def plan(metadata: CommonAttentionMetadata, step: Step) -> None:
    """Raises RuntimeError if the step's CUDA graph was not captured for this number of tokens, or is not of single tokens, and
    ValueError for a batch larger than the StepLimits of the state."""
    step.states[NAME].plan(metadata, step)


def _prepare(slot_mapping: Tensor, *others: Any) -> list[Tensor]:
    """[(T, 1, 1) bool]: tokens without a slot; in a batch of one token per sequence these are the padding."""
    return [(slot_mapping < 0)[:, None, None]]


def mla_paged_attention(q: Tensor, c: Tensor, k_rope: Tensor, kv_b: Tensor, cache: Tensor, slot_mapping: Tensor,
                        block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, prepared: list[Tensor], *, scale: float
                        ) -> Tensor:
    _, state, planned = planned_step(NAME, f"{NAME}_mla_paged_attention")
    num_tokens, heads, nope = q.shape[0], q.shape[1], q.shape[2] - ROPE
    if num_tokens != planned.num_tokens:
        raise RuntimeError(f"{NAME}: the step was planned for {planned.num_tokens} tokens, q has {num_tokens}")
    store_latent(c, k_rope, cache, slot_mapping)
    w_uk, w_uv = split_weight(kv_b, heads, nope)
    absorbed, pages = absorb_query(q[..., :nope], w_uk), cache[:, :, 0]
    out = torch.empty_like(absorbed, memory_format=torch.contiguous_format)
    wrapper, last = state.wrappers[(heads, scale, q.dtype), planned.key, planned.number], planned.last
    wrapper.run(absorbed[:last], q[:last, :, nope:], pages[..., :RANK], pages[..., RANK:], out=out[:last])
    if last < num_tokens:
        out[last:].zero_()
    if planned.key is not None:  # a graph's padding rows read a slot of the null page
        out.masked_fill_((prepared or _prepare(slot_mapping))[0], 0.0)
    return expand_output(out, w_uv)


def available(device: torch.device) -> str | None:
    return wrong_device(device, "cuda") or no_flashinfer("0.6.18", "pip install 'quire[flashinfer]'")


BACKEND = AttentionBackend(
    name=NAME,
    capabilities=mla_only(RANK, ROPE, dtypes=frozenset({torch.float16, torch.bfloat16}), min_compute_capability=(8, 0),
                          cudagraph_support=CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE),
    available=available, op=None,
    mla_op=define_mla_op(NAME, mla_paged_attention, devices=("CUDA",)),
    priority={"cuda": 30}, make_state=State, plan=plan, packages=("flashinfer-python",),
    prepare=define_prepare(NAME, _prepare, _prepare),
)
