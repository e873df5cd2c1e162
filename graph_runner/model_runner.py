"""Runs scheduled batches on a traced model: sizes the KV cache, captures graphs, stages inputs, launches, samples.

One step, all of it asynchronous on a GPU: pack the batch into a pinned buffer, copy it over, plan (backends that need it),
replay the graph of the bucket (or run the compiled graph for a shape that has none), which chooses the tokens too and writes
them where the next step will read them, sample anew for rows with filters, and copy the tokens back to be looked at later.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import CudagraphSupport
from quire.attn_ops.kv_cache import Layout, PagedKVCache, bytes_per_page, pages_for
from quire.attn_ops.step import Step, StepLimits, current_step, ensure_planned
from quire.attn_ops.tuning.small_linear import enabled as tuning_enabled
from quire.attn_ops.tuning.small_linear import tune
from quire.graph_runner.buckets import decode_buckets, token_buckets
from quire.graph_runner.cuda_graph import CudaGraphRunner
from quire.graph_runner.gc_freeze import freeze_gc
from quire.graph_runner.packing_check import TRIAL, check_packing
from quire.graph_runner.request import ScheduledBatch
from quire.graph_runner.sampler import Sampler
from quire.graph_runner.step_buffers import BatchShape, StepBuffers
from quire.passes import start_times
from quire.passes.capture.paged_model import PagedModel
from quire.passes.compile.ahead import CompileAhead, StepShape
from quire.passes.options import QuireOptions

logger = logging.getLogger(__name__)
CPU_KV_BYTES = 256 * 2**20  # KV memory on a CPU when num_pages is not given
# Mixed batches (prefill and decode) are captured up to this many tokens; larger steps keep the GPU busy for longer than the
# host needs to launch them. A token bucket is captured for few rows and for all, since the LM head runs on every row; the small
# ones for all rows only, as the head takes about as long for 128 rows as for 16.
MIXED_TOKENS = 1024
FEW_ROWS, FEW_ROWS_FROM = 16, 128


@dataclass(frozen=True)
class RunnerConfig:
    """What a ModelRunner needs to know; the engine's arguments, resolved. See ``graph_runner/engine.py`` for their meaning."""

    attention: str
    page_size: int
    num_pages: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    kv_cache_dtype: torch.dtype | None
    layout: Layout
    gpu_memory_utilization: float
    cudagraph_capture_sizes: Sequence[int] | None
    cudagraph_token_sizes: Sequence[int] | None
    compiler: str
    fusions: str | Sequence[str]
    progress: Callable[[Sequence[Any], str], Iterator[Any]] | None = None  # (what takes long, description), for a bar


@dataclass(frozen=True)
class Launched:
    """A step under way. ``tokens()`` waits for it and gives the sampled token of each row; -1 where the logits had NaN."""

    batch: ScheduledBatch
    host_tokens: torch.Tensor
    done: torch.cuda.Event | None

    def tokens(self) -> list[int]:
        if self.done is not None:
            self.done.synchronize()
        return self.host_tokens[: len(self.batch.rows)].tolist()


def _without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """The model's own dtypes, whatever the caller's are: a step may hold requests of several threads, and what is compiled or
    captured under autocast would stay so when it is over."""

    @functools.wraps(method)
    def run(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return method(*args)

    return run


class ModelRunner:
    """See the module's docstring. Raises UnsupportedAttention for a model that cannot be served."""

    @_without_autocast
    @torch.inference_mode(False)  # its tensors outlive whatever mode the caller is in
    @torch.no_grad()
    def __init__(self, model: torch.nn.Module, config: RunnerConfig) -> None:
        self.config, self.device = config, next(model.parameters()).device
        if current_step() is not None:
            raise RuntimeError("an engine cannot be made inside quire.step: its own steps would be that one; make it before")
        before = dict(start_times.seconds)
        ahead = self._compile_ahead()
        options = QuireOptions(
            attention=config.attention, compiler=config.compiler, fusions=config.fusions, page_size=config.page_size,
            kv_cache_dtype=config.kv_cache_dtype, layout=config.layout, max_model_len=config.max_model_len)
        try:
            # Tracing makes objects by the million, and what lives is walked again and again. Garbage may hold a GPU's memory.
            with freeze_gc(collect=self.device.type == "cuda"):
                self.paged = PagedModel(model, options, draws=config.compiler != "eager", ahead=ahead)
                with start_times.timed("set-up"):
                    if ahead is not None:
                        ahead.wait()
                    self._set_up()
        except BaseException:
            if ahead is not None:
                ahead.close()
            self.close()
            raise
        logger.info("ready: %s", start_times.format_seconds(start_times.since(before)))

    def _set_up(self) -> None:
        config = self.config
        self.sites: list[AttentionSite] = self.paged.sites
        self.selection = self.paged.selection
        self.backend = self.selection.backend
        logger.info("attention: %s", self.selection)
        if self.device.type == "cuda" and tuning_enabled():
            with start_times.timed("autotune"):
                tune(self.paged.weights.small_linears, self.device, progress=self._progress("Measuring matrix shapes"))
        # A plan on the host may launch kernels that read the block table (flashinfer gathers its pages), before the graph
        # does: then the table is brought up to date ahead of both, else inside the graph.
        self._plans = self.backend.plan is not None
        self.sampler = Sampler()
        width = pages_for(config.max_model_len, config.page_size)
        rows = config.max_num_seqs
        most = self._most
        self.paged.check_sizes(*most)
        self.limits = StepLimits(most.num_reqs, most.num_tokens, width)
        self.buffers = StepBuffers(most, max_pages_per_seq=width, max_num_seqs=config.max_num_seqs,
                                   page_size=config.page_size, device=self.device, graph_draws=self.paged.draws)
        self._host_tokens = [torch.zeros(rows, dtype=torch.int64, pin_memory=self.device.type == "cuda") for _ in range(4)]
        self._turn = 0
        self._states: dict[str, Any] = {}
        self._capture_steps: dict[BatchShape, Step] = {}
        self._step: Step | None = None
        num_pages = config.num_pages
        if num_pages is None:
            num_pages = self._pages_that_fit(most)
        self.cache = PagedKVCache.for_sites(self.sites, num_pages=num_pages, page_size=config.page_size,
                                            device=self.device, dtype=config.kv_cache_dtype, layout=config.layout)
        check_packing(self.paged, self.sites, self.backend, page_size=config.page_size, kv_dtype=config.kv_cache_dtype,
                      layout=config.layout, device=self.device, vocab_size=config.vocab_size,
                      max_model_len=config.max_model_len)
        self._new_states(self.cache)
        buckets = self._buckets(self.backend.capabilities.cudagraph_support)
        self.graphs = CudaGraphRunner(self._run_captured, buckets, self.device,
                                      before_capture=self._before_capture,
                                      progress=self._progress("Capturing CUDA graphs"))
        if self.graphs.buckets:
            with start_times.timed("capture"):
                self.graphs.capture()
        self._capture_steps.clear()

    def _progress(self, description: str) -> Callable[[Sequence[Any]], Iterator[Any]]:
        bar = self.config.progress
        return iter if bar is None else lambda items: bar(items, description)

    # -- sizes ------------------------------------------------------------------------------------------------------

    def _new_states(self, cache: PagedKVCache) -> None:
        self._states.clear()
        if self.backend.make_state is not None:
            self._states[self.backend.name] = self.backend.make_state(self.sites, cache, self.limits)

    def _compile_ahead(self) -> CompileAhead | None:
        """For the steps that will be captured, if the backend allows it, and for those that set-up runs."""
        if self.config.compiler != "inductor":
            return None
        width = pages_for(self.config.max_model_len, self.config.page_size)
        shapes = [*self._buckets(CudagraphSupport.ALWAYS), self._most, TRIAL]
        return CompileAhead.for_device([StepShape(*shape, width) for shape in shapes], self.device)

    @property
    def _most(self) -> BatchShape:
        """The largest step."""
        return BatchShape(max(self.config.max_num_batched_tokens, self.config.max_num_seqs), self.config.max_num_seqs)

    def _buckets(self, support: CudagraphSupport) -> list[BatchShape]:
        """Shapes to capture: decode batches if the backend allows it, mixed ones too if it allows any batch."""
        config = self.config
        sizes, token_sizes = config.cudagraph_capture_sizes, config.cudagraph_token_sizes
        found: list[BatchShape] = []
        if support >= CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE and (sizes is None or len(sizes)):
            found += [BatchShape(n, n) for n in decode_buckets(config.max_num_seqs, sizes=sizes)]
        if token_sizes is None:  # by default on a GPU, and with decode graphs only
            token_sizes = token_buckets(min(MIXED_TOKENS, config.max_num_batched_tokens)) if (
                found and self.device.type == "cuda") else []
        elif token_sizes:
            token_sizes = token_buckets(config.max_num_batched_tokens, sizes=token_sizes)
        if support is CudagraphSupport.ALWAYS:
            for rows in {min(FEW_ROWS, config.max_num_seqs), config.max_num_seqs}:
                found += [BatchShape(n, min(rows, n - 1)) for n in token_sizes
                          if n > (1 if rows == config.max_num_seqs else FEW_ROWS_FROM)]
        return found

    def _pages_that_fit(self, most: BatchShape) -> int:
        """Pages for the KV cache: on a CPU CPU_KV_BYTES' worth, on a GPU what the largest step leaves of its memory."""
        config = self.config
        page = bytes_per_page(self.sites, config.page_size, config.kv_cache_dtype)
        useful = config.max_num_seqs * self.buffers.width + 1
        if self.device.type != "cuda":
            return max(2, min(useful, CPU_KV_BYTES // page))
        torch.cuda.empty_cache()
        free_before = torch.cuda.mem_get_info(self.device)[0]
        cache = PagedKVCache.for_sites(self.sites, num_pages=2, page_size=config.page_size, device=self.device,
                                       dtype=config.kv_cache_dtype, layout=config.layout)
        self._new_states(cache)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.buffers.stage_padding(most)
        step = Step(cache, self.buffers.metadata(most, None, None), self.backend, self._states)
        allocated = torch.cuda.memory_allocated(self.device)
        self._forward(step, most)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - allocated
        self._states.clear()
        del step, cache
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(self.device).total_memory
        free = torch.cuda.mem_get_info(self.device)[0]
        spare = total * (1 - config.gpu_memory_utilization)
        pages = int((free - peak - spare) // page)
        logger.info("KV cache: %.1f GiB free of %.1f, largest step takes %.1f GiB more, %d pages fit (%.1f GiB before)",
                    free / 2**30, total / 2**30, peak / 2**30, pages, free_before / 2**30)
        if pages < 2:
            raise RuntimeError(
                f"no GPU memory is left for the KV cache: {free / 2**30:.1f} GiB free, the largest step needs "
                f"{peak / 2**30:.1f} GiB and {spare / 2**30:.1f} GiB stay unused (gpu_memory_utilization="
                f"{config.gpu_memory_utilization}). Raise gpu_memory_utilization or lower max_num_batched_tokens.")
        return min(useful, pages)

    # -- a step -----------------------------------------------------------------------------------------------------

    def _forward(self, step: Step, shape: BatchShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (num_reqs, V) and tokens (num_reqs,) of the batch in the static buffers; stores the tokens too."""
        if not self._plans:
            self.buffers.update_table(shape)
        v = self.buffers.views(shape)
        source = v["token_source"]
        ids = torch.where(source >= 0, self.buffers.last_tokens[source.clamp_min(0)], v["input_ids"])
        sampling = (v["temperature"], v["seed"], v["sample_position"]) if self.paged.draws else None
        logits, tokens = self.paged.run(step, ids, v["positions"], v["logits_indices"], sampling)
        self._store(shape, tokens)
        return logits, tokens

    def _store(self, shape: BatchShape, tokens: torch.Tensor) -> None:
        """Put each row's token where the next step reads it (padding rows: into the dummy slot)."""
        self.buffers.last_tokens[self.buffers.views(shape)["sample_slot"]] = tokens.clamp_min(0)

    def _before_capture(self, bucket: BatchShape) -> None:
        """Stage an all-padding batch and plan for it; the capture then has nothing to do on the host."""
        self.buffers.stage_padding(bucket)
        step = Step(self.cache, self.buffers.metadata(bucket, None, None), self.backend, self._states, graph_key=bucket,
                    capturing=True)
        ensure_planned(step, self.backend, self.sites)
        self._capture_steps[bucket] = step

    def _run_captured(self, bucket: BatchShape) -> tuple[torch.Tensor, torch.Tensor]:
        step = self._capture_steps.get(bucket) or self._step
        assert step is not None
        return self._forward(step, bucket)

    def _stage(self, batch: ScheduledBatch, shape: BatchShape, bucket: BatchShape | None) -> tuple[dict[str, np.ndarray], Step]:
        """Put the batch, padded to ``shape``, where the device reads it. ``bucket``: the graph that will run it, if any."""
        host = self.buffers.fill(batch, shape)
        self.buffers.upload(shape)
        if self._plans:
            self.buffers.update_table(shape)
        metadata = self.buffers.metadata(shape, host, batch)
        return host, Step(self.cache, metadata, self.backend, self._states, graph_key=bucket)

    def _replay(self, step: Step, bucket: BatchShape) -> tuple[torch.Tensor, torch.Tensor]:
        self._step = step
        ensure_planned(step, self.backend, self.sites)
        return self.graphs.replay(bucket)

    @_without_autocast
    @torch.inference_mode(False)
    @torch.no_grad()
    def launch(self, batch: ScheduledBatch) -> Launched:
        """Start a step. Returns at once on a GPU; the results are in ``Launched.tokens()``."""
        live = BatchShape(batch.num_tokens, len(batch.rows))
        bucket = self.graphs.can_run(live, batch.is_decode) if self.graphs.buckets else None
        shape = bucket or live
        host, step = self._stage(batch, shape, bucket)
        logits, tokens = self._forward(step, shape) if bucket is None else self._replay(step, bucket)
        self.buffers.table.commit()
        sampling = self.buffers.sampling(shape, host, batch)
        if sampling is not None:
            # The other rows keep the graph's token, so that it does not depend on who is in the batch with them.
            tokens = torch.where(self.buffers.views(shape)["resample"] != 0, self.sampler(logits, sampling), tokens)
            self._store(shape, tokens)
        host_tokens = self._host_tokens[self._turn]
        self._turn = (self._turn + 1) % len(self._host_tokens)
        host_tokens[: live.num_reqs].copy_(tokens[: live.num_reqs], non_blocking=True)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return Launched(batch, host_tokens, done)

    def close(self) -> None:
        """Free graphs and cache, and give the model back as it was."""
        if hasattr(self, "graphs"):
            self.graphs.clear()
        for name in ("cache", "_states", "_step", "_capture_steps"):
            if hasattr(self, name):
                delattr(self, name)
        if hasattr(self, "paged"):
            self.paged.close()


__all__ = ["CPU_KV_BYTES", "Launched", "ModelRunner", "RunnerConfig"]
