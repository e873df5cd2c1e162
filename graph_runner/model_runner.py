"""Runs scheduled batches on a traced model: sizes the KV cache, captures graphs, stages inputs, launches, samples.

One step, asynchronous on a GPU: ``stage`` packs the batch into a pinned buffer, copies it to the device and plans (backends
that need it); ``forward`` replays the graph of the bucket (or runs the compiled graph for a shape without one), which also
samples the tokens and writes them where the next step reads them; ``launch`` does both, resamples rows with filters, and
copies the tokens, and log probabilities where they are wanted, back to the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, CudagraphSupport
from quire.attn_ops.kernels.launch import synchronize
from quire.attn_ops.kv_cache import PagedKVCache, pages_for
from quire.attn_ops.long_prefill import wait_seconds
from quire.attn_ops.metadata.core import to_device
from quire.attn_ops.ops.logprobs import TokenLogprobs, launches_beside_sampling, token_logprobs
from quire.attn_ops.ops.small_linear import MAX_TOKENS
from quire.attn_ops.step import Step, StepLimits, current_step, ensure_planned, running
from quire.attn_ops.tuning.small_linear import enabled as tuning_enabled
from quire.attn_ops.tuning.small_linear import tune
from quire.graph_runner.adapter_places import AdapterPlaces
from quire.graph_runner.adapters import TokenAdapters
from quire.graph_runner.capture_shapes import MIXED_TOKENS, WithoutGraph, capture_shapes, launch_bound_tokens, step_us
from quire.graph_runner.config import EngineConfig
from quire.graph_runner.cuda_graph import CudaGraphRunner
from quire.graph_runner.engine_lock import isolated
from quire.graph_runner.forward_batch import ForwardBatch
from quire.graph_runner.gc_freeze import freeze_gc
from quire.graph_runner.loading import progress_bar, vocab_size
from quire.graph_runner.logits_editor import LogitsEditor
from quire.graph_runner.logprobs import RowLogprobs, ScoredRows, StepLogprobs, step_logprobs
from quire.graph_runner.model_parts import named_parts
from quire.graph_runner.packing_check import TRIAL, check_packing
from quire.graph_runner.request import ScheduledBatch, ScheduledRow
from quire.graph_runner.sampler import draw
from quire.graph_runner.step_buffers import EDITED, BatchShape, StepBuffers
from quire.graph_runner.window_pages import MemoryPlan, PoolSizes, Reach
from quire.passes import start_times
from quire.passes.capture.lora import adapter_names
from quire.passes.capture.paged_model import PagedModel
from quire.passes.compile.ahead import CompileAhead, StepShape
from quire.passes.compile.regions import each_once

logger = logging.getLogger(__name__)
CPU_KV_BYTES = 256 * 2**20  # KV memory on a CPU when num_pages is not given


@dataclass(frozen=True)
class StagedStep:
    """A batch on the device, padded to ``shape``; ``bucket`` is the captured graph that runs it, or None. ``host``: what was
    staged, on the host."""

    batch: ScheduledBatch
    forward_batch: ForwardBatch
    shape: BatchShape
    bucket: BatchShape | None
    host: dict[str, np.ndarray]
    step: Step
    scored: ScoredRows | None = None


class StepResults(NamedTuple):
    """Of a forward, padding rows included: logits (B + N, V) of B rows, then of N scored prompt tokens; tokens (B,) int64;
    their log probabilities, in rows that ask for them."""

    logits: torch.Tensor
    tokens: torch.Tensor
    logprobs: TokenLogprobs


Result = tuple[ScheduledRow, int, RowLogprobs | None]


@dataclass(frozen=True)
class Launched:
    """A launched step."""

    batch: ScheduledBatch
    host_tokens: torch.Tensor
    done: torch.cuda.Event | None
    found: StepLogprobs | None = None

    def tokens(self) -> list[int]:
        """Waits for the step; the sampled token of each row, -1 where the logits had NaN."""
        if self.done is not None:
            self.done.synchronize()
        return self.host_tokens.tolist()

    def results(self) -> list[Result]:
        """Waits for the step; each row with its token and the log probabilities that it asked for, or None."""
        tokens = self.tokens()
        found = [None] * len(tokens) if self.found is None else self.found.rows()
        return list(zip(self.batch.rows, tokens, found, strict=True))


class ModelRunner:
    """See the module's docstring. Reads the options that are for it from ``config``, whose ``max_model_len`` is set.
    ``adapters``: each request has adapters of its own (``graph_runner/adapters.py``); ``places``: for those that may be added.
    Raises UnsupportedAttention if the model cannot be served."""

    @isolated
    def __init__(self, model: torch.nn.Module, config: EngineConfig, adapters: bool = False,
                 places: AdapterPlaces | None = None) -> None:
        names = None if not adapters else adapter_names(model) if places is None else places.built_in
        self.adapters, self.places = None if names is None else TokenAdapters(model, names, places), places
        self.config, self.device, self.vocab_size = config, next(model.parameters()).device, vocab_size(model)
        if current_step() is not None:
            raise RuntimeError("an engine cannot be made inside quire.step; make it before")
        before = dict(start_times.seconds)
        self._launch_bound = launch_bound_tokens(model.parameters(), self.vocab_size)
        self._step_us = step_us(model.parameters(), self.vocab_size)
        options = config.compile_options(self.device)
        ahead = self._compile_ahead() if options.compiler == "inductor" else None
        try:
            # Tracing makes millions of objects, which the collector would walk repeatedly. Garbage may hold GPU memory.
            with freeze_gc(collect=self.device.type == "cuda"):
                self.paged = PagedModel(model, options, draws=options.compiler != "eager", ahead=ahead, adapters=names,
                                        places=None if places is None else places.lora)
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
        self.selection = self.paged.selection
        self.sites: list[AttentionSite] = list(self.selection.sites)  # as the backend serves them
        self.backend, self.reach = self.selection.backend, Reach.of(self.sites)
        self.length_limits = self.paged.graph.length_limits
        # Layers with a window have pages of their own, beside others that see everything.
        own = self.paged.graph.compiled().lowered.inputs.window_tables
        self.window_reach = Reach.of(s for s in self.sites if s.bounded) if own else None
        logger.info("attention: %s", self.selection)
        if self.device.type == "cuda" and tuning_enabled():
            with start_times.timed("autotune"):
                tune(self.paged.weights.small_linears, self.device, progress=self._progress("Measuring matrix shapes"))
        # Planning on the host may launch kernels that read the block table (flashinfer gathers its pages). Then the table is
        # updated before planning, else inside the graph.
        self.plans = self.backend.plan is not None
        self.plans_graphs = self.plans and self.backend.plans_graphs
        if self.backend.warm_up is not None:
            with start_times.timed("prefill kernels"):
                self.backend.warm_up(self.sites, self.device, wait_seconds(config.attention == "auto"))  # logs what is missing
        self._without_graph = WithoutGraph(self.backend, self.sites, self.device, *self._step_us)
        self.editor = LogitsEditor(self.device)
        width = pages_for(self.max_model_len, config.page_size)
        largest, cuda = self._largest, self.device.type == "cuda"
        self.paged.check_sizes(*largest)
        self.limits = StepLimits(largest.num_reqs, largest.num_tokens, width)
        self.buffers = StepBuffers(largest, max_pages_per_seq=width, max_num_seqs=config.max_num_seqs,
                                   page_size=config.page_size, device=self.device, graph_draws=self.paged.draws,
                                   total_lens=bool(self.length_limits), windows=self.window_reach is not None,
                                   fast_prefill=config.kv_sharing_fast_prefill, adapters=self.adapters)
        self._host_tokens = [torch.zeros(config.max_num_seqs, dtype=torch.int64, pin_memory=cuda) for _ in range(4)]
        self._next_host_tokens = 0
        self._states: dict[str, Any] = {}
        self._capture_steps: dict[BatchShape, Step] = {}
        self._replaying: Step | None = None
        self.sizes = PoolSizes(
            self.sites, config.page_size, self._kv_dtype, config.max_num_seqs, largest.num_tokens, width, self.reach,
            self.window_reach, config.enable_prefix_caching is True, self.backend.bytes_beside, config.kv_scales is not None)
        buckets = self._buckets(self.backend)
        self.graphs = CudaGraphRunner(
            self._run_captured, buckets, self.device, before_capture=self._before_capture, lazy=config.cudagraph_lazy,
            progress=self._progress("Capturing CUDA graphs"), piecewise=self._is_piecewise,
            inputs=self._inputs if config.cudagraph_debug else None, short_warm_up=each_once,
            kind=lambda bucket: (bucket.num_tokens <= MAX_TOKENS, bucket.num_tokens == bucket.num_reqs))
        # Before the KV cache takes the memory.
        check_packing(self.paged, self.sites, self.backend, page_size=config.page_size, kv_dtype=self._kv_dtype,
                      layout=config.kv_layout, device=self.device, vocab_size=self.vocab_size,
                      max_model_len=self.max_model_len, kv_scales=config.kv_scales,
                      adapters=None if self.adapters is None else self.adapters.active(TRIAL.num_tokens, self.device))
        self.step_bytes = 0  # not measured
        self.cache = self._new_cache(self._pages_that_fit() if config.num_pages is None else config.num_pages)
        self._new_states(self.cache)
        if self.graphs.buckets:
            with start_times.timed("capture"):
                self.graphs.capture()
        self._capture_steps.clear()

    @property
    def max_model_len(self) -> int:
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    @property
    def _kv_dtype(self) -> torch.dtype | None:
        return self.paged.options.kv_cache_dtype

    def _new_cache(self, num_pages: int) -> PagedKVCache:
        return PagedKVCache.for_sites(self.sites, num_pages=num_pages, page_size=self.config.page_size, device=self.device,
                                      dtype=self._kv_dtype, layout=self.config.kv_layout,
                                      window_pages=self.sizes.window_pages(num_pages), kv_scales=self.config.kv_scales)

    def _progress(self, description: str) -> Callable[[Sequence[Any]], Iterator[Any]]:
        return (lambda items: progress_bar(items, description)) if self.device.type == "cuda" else iter

    # -- sizes ------------------------------------------------------------------------------------------------------

    def _new_states(self, cache: PagedKVCache) -> None:
        self._states.clear()
        if self.backend.make_state is not None:
            self._states[self.backend.name] = self.backend.make_state(self.sites, cache, self.limits)

    def _compile_ahead(self) -> CompileAhead | None:
        """For the steps that will be captured, if the backend allows it, and for those that set-up runs."""
        width = pages_for(self.max_model_len, self.config.page_size)
        shapes = [*self._buckets(), self._largest, TRIAL]
        return CompileAhead.for_device([StepShape(*shape, width) for shape in shapes], self.device,
                                       {torch.ops.quire.sample_tokens.default: launches_beside_sampling})

    @property
    def _largest(self) -> BatchShape:
        return BatchShape(max(self.config.max_num_batched_tokens, self.config.max_num_seqs), self.config.max_num_seqs)

    def _buckets(self, backend: AttentionBackend | None = None) -> list[BatchShape]:
        """Shapes to capture with ``backend``; None: with the one that allows most."""
        if backend is None:
            support, same = CudagraphSupport.ALWAYS, True
        else:  # long MLA prefills are expanded outside graphs (``attn_ops/mla_prefill.py``)
            support = backend.capabilities.cudagraph_support
            same = backend.same_in_graphs and all(site.latent is None for site in self.sites)
        return capture_shapes(self.config, support, self.device, self._launch_bound if same else MIXED_TOKENS)

    def _is_piecewise(self, bucket: BatchShape) -> bool:
        """Whether the backend allows no graph of that shape, so that it is captured in pieces."""
        decode = bucket.num_tokens == bucket.num_reqs
        needed = CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE if decode else CudagraphSupport.ALWAYS
        return self.backend.capabilities.cudagraph_support < needed

    def _pages_that_fit(self) -> int:
        """Pages for the KV cache: CPU_KV_BYTES' worth on a CPU, what the largest step and the graphs leave free on a GPU."""
        if self.device.type != "cuda":
            return max(2, min(self.sizes.useful, self.sizes.pages_in(CPU_KV_BYTES)))
        torch.cuda.empty_cache()
        free_before = torch.cuda.mem_get_info(self.device)[0]
        self.cache = self._new_cache(2)
        allocated = torch.cuda.memory_allocated(self.device)  # the backend's workspace counts as the step's
        self._new_states(self.cache)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.buffers.stage_padding(self._largest)
        batch = self.buffers.forward_batch(self._largest)
        batch.metadata = replace(batch.metadata, logits_indices_padded=None)  # all layers on all tokens take the most
        self._compute(self._step(batch), batch)
        synchronize(self.device)
        self.step_bytes = torch.cuda.max_memory_allocated(self.device) - allocated + self.backend.scratch_bytes(
            self.sites, self.device, self.config.max_num_seqs * self.max_model_len)
        self._without_graph.measure(lambda: self._compute(self._step(batch), batch))
        synchronize(self.device)
        with start_times.timed("graph memory"):
            graphs = self.graphs.estimate()
        self._states.clear()
        self._capture_steps.clear()
        del self.cache
        torch.cuda.empty_cache()
        plan = MemoryPlan(torch.cuda.get_device_properties(self.device).total_memory,
                          torch.cuda.mem_get_info(self.device)[0], self.config.gpu_memory_utilization, self.step_bytes, graphs)
        pages = self.sizes.pages_in(plan.cache)
        logger.info("KV cache: %s; %d pages fit (%.1f GiB free before)", plan, pages, free_before / 2**30)
        if pages < 2:
            raise RuntimeError(f"no GPU memory is left for the KV cache: {plan}. Raise gpu_memory_utilization, lower "
                               "max_num_batched_tokens, or capture fewer graphs (cudagraph_capture_sizes, "
                               "cudagraph_token_sizes).")
        return min(self.sizes.useful, pages)

    # -- a step -----------------------------------------------------------------------------------------------------

    def _step(self, batch: ForwardBatch, **options: Any) -> Step:
        """The batch as attention sees it."""
        return Step(self.cache, batch.metadata, self.backend, self._states, window_metadata=batch.window_metadata,
                    adapters=batch.inputs.get("adapters"), **options)

    def _compute(self, step: Step, batch: ForwardBatch, scored: ScoredRows | None = None) -> StepResults:
        """Results of the staged batch; stores the tokens too."""
        v, rows = batch.inputs, batch.seq_lens.shape[0]
        if not (self.plans if step.graph_key is None else self.plans_graphs):
            self.buffers.update_table(batch)
        ids, indices = batch.token_ids(self.buffers.last_tokens), v["logits_indices"]
        sampling: tuple[torch.Tensor, ...] | None = None
        if self.paged.draws:
            sampling = v["temperature"], v["seed"], v["sample_position"]
        if scored is not None:
            indices = torch.cat([indices, scored.indices])
            if sampling is not None:
                sampling = tuple(torch.cat([t, t.new_zeros(len(scored.indices))]) for t in sampling)
        logits, tokens = self.paged.run(step, ids, batch.positions, indices, sampling)
        tokens = tokens[:rows]
        self._store(batch, tokens)
        return StepResults(logits, tokens, token_logprobs(logits[:rows], tokens, v["logprob_temperature"]))

    def _store(self, batch: ForwardBatch, tokens: torch.Tensor) -> None:
        """Put each row's token where the next step reads it; padding rows write to the dummy slot."""
        self.buffers.last_tokens[batch.inputs["sample_slot"]] = tokens.clamp_min(0)

    def _before_capture(self, bucket: BatchShape) -> None:
        """Stage an all-padding batch and plan for it, so that the capture has no host work."""
        self.buffers.stage_padding(bucket)
        batch = self.buffers.forward_batch(bucket)
        if self._is_piecewise(bucket):  # attention is not run while the rest is captured, so there is nothing to plan
            step = self._step(batch)
            step.planned.add(self.backend.name)
        else:
            step = self._step(batch, graph_key=bucket, capturing=True)
            ensure_planned(step, self.backend, self.sites)
        self._capture_steps[bucket] = step

    def _run_captured(self, bucket: BatchShape) -> StepResults:
        step = self._capture_steps.get(bucket) or self._replaying
        assert step is not None
        return self._compute(step, self.buffers.forward_batch(bucket))

    def bucket_for(self, batch: ScheduledBatch) -> BatchShape | None:
        """The captured graph that runs the batch, or None. Captured steps have logits for one token per row only."""
        if batch.num_scored:
            return None
        live, decode = BatchShape(batch.num_tokens, len(batch.rows)), batch.forward_mode.is_decode()
        bucket = self.graphs.can_run(live, decode, better=lambda: self._without_graph.reason(batch, self._states)
                                     ) if self.graphs.buckets else None
        self._capture_steps.clear()  # of a late capture
        return bucket

    def _inputs(self, bucket: BatchShape) -> list[torch.Tensor]:
        """The tensors that a graph reads beside the weights."""
        cache, buffers = self.cache, self.buffers
        tables = [table for t in (buffers.table, buffers.window_table) if t is not None for table in (t.device, t.rows)]
        places, apart = ((), None) if self.places is None else (self.places.lora.parameters(), self.places.apart)
        read = [p for _, part in named_parts(self.paged.model, apart) for p in part.parameters(recurse=False)]
        return [*buffers.views(bucket).values(), buffers.last_tokens, *tables, *cache.k, *cache.v, *read, *places]

    def stage(self, batch: ScheduledBatch, bucket: BatchShape | None) -> StagedStep:
        """Copy the batch's inputs to the device, padded to ``bucket`` if one is given, and plan its replay."""
        shape = bucket or BatchShape(batch.num_tokens, len(batch.rows))
        host = self.buffers.fill(batch, shape)
        self.buffers.upload(shape)
        if self.config.cudagraph_debug:
            self.buffers.poison_padding(shape, len(batch.rows), batch.num_tokens, self.vocab_size - 1,
                                        self.max_model_len - 1)
        made = self.buffers.forward_batch(shape, host, batch)
        cut = bucket is not None and self._is_piecewise(bucket)
        if self.plans if bucket is None or cut else self.plans_graphs:
            self.buffers.update_table(made)
        # Attention of a step in pieces is that of any step.
        step = self._step(made, graph_key=None if cut else bucket)
        if bucket is not None:  # else the ops plan
            ensure_planned(step, self.backend, self.sites)
        return StagedStep(batch, made, shape, bucket, host, step, ScoredRows.of(batch, self.device))

    def forward(self, staged: StagedStep) -> StepResults:
        """Results of the batch staged last; writes the KV cache."""
        if staged.bucket is None:
            return self._compute(staged.step, staged.forward_batch, staged.scored)
        self._replaying = staged.step
        with running(staged.step):  # for attention between the pieces
            return self.graphs.replay(staged.bucket)

    def copy_pages(self, copies: Sequence[tuple[int, int]], window_copies: Sequence[tuple[int, int]]) -> None:
        """Copy (from, to) pages, before any later step; of layers with a window, ``window_copies``; see ScheduledBatch."""
        windows = self.window_reach is not None
        for pairs, bounded in ((copies, False), (window_copies, True)):
            if pairs:
                pages = to_device(np.array(pairs, np.int64), self.device)
                layers = [s.layer for s in self.sites if s.bounded == bounded or not windows]
                self.cache.copy_pages(pages[:, 0], pages[:, 1], layers)

    @isolated
    def launch(self, batch: ScheduledBatch) -> Launched:
        """Start a step. Returns at once on a GPU; ``Launched.results()`` has the results."""
        self.copy_pages(batch.copies, batch.window_copies)
        staged = self.stage(batch, self.bucket_for(batch))
        logits, tokens, in_graph = self.forward(staged)
        shape, made, rows, sampled = staged.shape, staged.forward_batch, len(batch.rows), None
        self.buffers.commit()
        sampling = self.buffers.sampling(shape, staged.host, batch)
        if sampling is not None:
            # The other rows keep the graph's token, which does not depend on the rest of the batch.
            edited = (staged.host["resample"][:rows] & EDITED).any()
            own = logits[: shape.num_reqs]
            sampled = self.editor.draw(batch, own, sampling) if edited else draw(own, sampling)
            tokens = torch.where(made.inputs["resample"] != 0, sampled.tokens, tokens)
            self._store(made, tokens)
        host_tokens = self._host_tokens[self._next_host_tokens][:rows]
        self._next_host_tokens = (self._next_host_tokens + 1) % len(self._host_tokens)
        host_tokens.copy_(tokens[:rows], non_blocking=True)
        found = None
        if batch.num_scored or staged.host["logprob_temperature"][:rows].any():
            found = step_logprobs(batch, logits, tokens, host_tokens, made.inputs["logprob_temperature"], in_graph, sampled,
                                  staged.scored, to_host=self._to_host)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return Launched(batch, host_tokens, done, found)

    def _to_host(self, values: torch.Tensor) -> torch.Tensor:
        """Start copying a tensor to the host; it is there when the step is done."""
        if self.device.type != "cuda":
            return values
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)

    @isolated
    def logits_of(self, batch: ScheduledBatch) -> torch.Tensor:
        """Run a step whose rows sample nothing. (rows + N, V): logits of each row's last token, then of N scored prompt tokens,
        valid until the next step."""
        logits = self.forward(self.stage(batch, self.bucket_for(batch)))[0]
        self.buffers.commit()
        return logits[: len(batch.rows) + batch.num_scored]

    def close(self) -> None:
        """Free graphs and cache, and restore the model."""
        if hasattr(self, "graphs"):
            self.graphs.clear()
        for name in ("cache", "_states", "_replaying", "_capture_steps", "places"):
            vars(self).pop(name, None)
        if hasattr(self, "paged"):
            self.paged.close()
