"""The engine: requests in, tokens out, with continuous batching over one traced model and one paged KV cache.

A turn of the engine (``step``) asks the scheduler for a batch, launches it, and takes in the results of the launch before.
So on a GPU the host prepares step n + 1 while the device runs step n: sampled tokens stay on the device, where the next
step reads them, and the host sees them a step late. A request that ends by a stop token has then run a step too many, whose
result is dropped.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from quire.attn_ops.kv_cache import Layout
from quire.graph_runner import loading
from quire.graph_runner.block_allocator import BlockAllocator
from quire.graph_runner.detokenizer import Detokenizer
from quire.graph_runner.engine_lock import Turns, alone
from quire.graph_runner.gc_freeze import ServingFreeze
from quire.graph_runner.model_guard import ModelWatch
from quire.graph_runner.model_runner import Launched, ModelRunner, RunnerConfig
from quire.graph_runner.paged_forward import own_forward
from quire.graph_runner.request import (
    FinishReason,
    Prompt,
    Request,
    RequestOutput,
    StreamEvent,
    pairs_of,
    params_of,
    token_ids_of,
)
from quire.graph_runner.sampling_params import SamplingParams
from quire.graph_runner.scheduler import NeedsDrain, Scheduler


class Engine:
    """Serves one causal LM in this process. Use as a context manager, or call ``close``: the model is then as it was.
    Threads may share an engine: their requests run together, in the model's dtypes (``torch.autocast`` does not count).

    Args:
        model: a transformers causal LM, a module with such a forward, or a path to a saved model.
        tokenizer: for prompts and results as text; loaded from the path if ``model`` is one. Token ids need none.
        attention: backend name, or "auto" (``quire.backends()`` lists them).
        page_size: tokens a page of the KV cache.
        num_pages: pages of the KV cache, the null page included. None: what fits in GPU memory, 256 MiB's worth on a CPU.
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens in a step; longer prompts are computed in chunks.
        kv_cache_dtype: "auto" (the model's), or quantised: "int8", "fp8" (e4m3), "fp8_e5m2"; also a torch dtype or its name.
        max_model_len: most tokens of a request, prompt and continuation. None: what the model and the cache allow.
        gpu_memory_utilization: share of the GPU's memory that may be in use, for sizing the KV cache.
        kv_layout: "NHD" or "HND".
        prefill_chunk_size: most prompt tokens of one request in a step. None: max_num_batched_tokens.
        cudagraph_capture_sizes: decode batch sizes to capture; None: the default buckets, []: none.
        cudagraph_token_sizes: token counts of mixed batches to capture, for backends that allow it; None: default buckets up
            to 1024 on a GPU, none on a CPU. []: none.
        compiler: "inductor", "eager", or "auto": inductor on a GPU, eager on a CPU (where compiling costs more than it saves).
        fusions: fusion passes: "all", "none", "auto" (all on a GPU), or names (a sequence, or with commas between).
        async_stepping: take results in one step late (see above). None: on a GPU.
        seed: of the requests that bring none.

    Raises:
        UnsupportedAttention: the model, or one of its attention sites, cannot be served; says which and why.
        ValueError: an argument out of range, or an unknown backend.
    """

    def __init__(
        self, model: torch.nn.Module | str, tokenizer: Any = None, *, attention: str = "auto", page_size: int = 16,
        num_pages: int | None = None, max_num_seqs: int = 256, max_num_batched_tokens: int = 8192,
        kv_cache_dtype: str | torch.dtype = "auto", max_model_len: int | None = None, gpu_memory_utilization: float = 0.9,
        kv_layout: Layout = "NHD", prefill_chunk_size: int | None = None,
        cudagraph_capture_sizes: Sequence[int] | None = None, cudagraph_token_sizes: Sequence[int] | None = None,
        compiler: str = "auto", fusions: str | Sequence[str] = "auto", async_stepping: bool | None = None, seed: int = 0,
    ) -> None:
        loading.check_arguments(gpu_memory_utilization, tokenizer, async_stepping, seed=seed, num_pages=num_pages,
                                page_size=page_size, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
                                max_num_batched_tokens=max_num_batched_tokens, prefill_chunk_size=prefill_chunk_size)
        self.model, self.tokenizer = loading.load(model, tokenizer)
        device, self._vocab_size = next(self.model.parameters()).device, loading.vocab_size(self.model)
        on_gpu = device.type == "cuda"
        length = loading.model_length(self.model, max_model_len)
        if num_pages is not None:
            length = min(length, (num_pages - 1) * page_size)
        max_num_batched_tokens = min(max_num_batched_tokens, max(length * max_num_seqs, 1))
        config = RunnerConfig(
            attention=attention, page_size=page_size, num_pages=num_pages, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, max_model_len=length, vocab_size=self._vocab_size, layout=kv_layout,
            kv_cache_dtype=loading.kv_dtype(kv_cache_dtype), gpu_memory_utilization=gpu_memory_utilization,
            cudagraph_capture_sizes=cudagraph_capture_sizes, cudagraph_token_sizes=cudagraph_token_sizes,
            compiler=loading.default_compiler(compiler, device),
            fusions=("all" if on_gpu else "none") if fusions == "auto" else fusions,
            progress=loading.progress_bar if on_gpu else None)
        with own_forward(self.model):
            self.runner = ModelRunner(self.model, config)
        self.watch = ModelWatch(self.model, addresses=on_gpu)
        self.max_model_len = min(length, (self.runner.cache.num_pages - 1) * page_size)
        self.scheduler = Scheduler(BlockAllocator(self.runner.cache.num_pages), page_size=page_size,
                                   max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
                                   prefill_chunk_size=prefill_chunk_size)
        self._eos = loading.eos_token_ids(self.model, self.tokenizer)
        self._depth = int(on_gpu if async_stepping is None else async_stepping)
        self._random = random.Random(seed if seed is None else int(seed))
        self._in_flight: deque[Launched] = deque()
        self._arrived: deque[tuple[Any, int]] = deque()  # their results, as yet to be looked at
        self._gc, self.turns = ServingFreeze(), Turns()
        self._requests: dict[int, Request] = {}
        self._texts: dict[int, Detokenizer] = {}
        self._inboxes: dict[int, deque[StreamEvent]] = {}  # events of requests that a stream waits for
        self._unclaimed: list[StreamEvent] = []  # events of the others, for the next ``step``
        self._next_id = 0
        self._closed = self._failed = False

    # -- requests ---------------------------------------------------------------------------------------------------

    @alone
    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> list[int]:
        """Queue a prompt; the ids of its requests (``params.n`` of them).

        Raises:
            ValueError, TypeError: the prompt cannot be served; says why. Nothing else is affected.
        """
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")
        self.watch.due |= not self._requests
        params, ids = params_of(params), token_ids_of(prompt, self.tokenizer, self._vocab_size, self.max_model_len)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need text, and the engine has no tokenizer; pass one, or use stop_token_ids")
        limit = self.max_model_len if params.max_tokens is None else min(self.max_model_len, len(ids) + params.max_tokens)
        stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos)
        made = []
        for k in range(params.n):
            base = params.seed if params.seed is not None else self._random.getrandbits(62)
            request = Request(
                self._next_id, ids, params, RequestOutput(self._next_id, prompt if isinstance(prompt, str) else None, ids),
                seed=(base + k * 0x9E3779B9) % 2**63, stop_token_ids=stops, max_total_tokens=limit)
            self._next_id += 1
            self._requests[request.request_id] = request
            if self.tokenizer is not None and params.detokenize:
                self._texts[request.request_id] = Detokenizer(
                    self.tokenizer, ids, params.skip_special_tokens, params.stop or (), params.include_stop_str_in_output)
            self.scheduler.add(request)
            made.append(request.request_id)
        return made

    def abort(self, request_id: int) -> None:
        """End a request now (in a turn: after it); its output so far stays, with finish_reason "abort". Others are ignored."""
        self.turns.soon(lambda: self._abort([request_id]))

    def _abort(self, request_ids: list[int], unheard: bool = False) -> None:
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self._deliver(self._finish(request, FinishReason.ABORT))
            if unheard:
                self._inboxes.pop(request_id, None)
        if not self._requests:
            self._gc.release()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests or self._unclaimed)

    # -- a turn -----------------------------------------------------------------------------------------------------

    @alone
    def step(self) -> list[StreamEvent]:
        """One turn: launch the next batch, take in results. The events are of requests that got tokens or ended since the
        last ``step``, those that ``stream`` and ``generate`` wait for excepted."""
        self._turn()
        events, self._unclaimed = self._unclaimed, []
        return events

    def _deliver(self, event: StreamEvent) -> None:
        self._inboxes.get(event.index, self._unclaimed).append(event)

    @alone
    def _turn(self) -> None:
        self.watch.check(self.watch.glance())
        if self._failed:  # that step may have replaced newest tokens on the device; from here the host has them all
            self._collect(0)
            self._failed = False
        if self._requests:
            self._gc.turn()
        try:
            batch = self.scheduler.schedule()
        except NeedsDrain:
            self._collect(0)
            batch = self.scheduler.schedule()
        if batch is not None:
            try:
                self._in_flight.append(self.runner.launch(batch))
            except BaseException as error:
                self._failed = True
                self.scheduler.take_back(batch)
                if not isinstance(error, torch.OutOfMemoryError):
                    raise
                for row in batch.rows:
                    self._deliver(self._finish(row.request, FinishReason.ERROR, error=(
                        f"out of GPU memory in a step of {batch.num_tokens} tokens: {error}. Lower max_num_batched_tokens or "
                        "gpu_memory_utilization.")))
        self.watch.check_if_due()  # after the launch: a GPU is busy meanwhile, and nobody has seen a result yet
        self._collect(self._depth if batch is not None else 0)
        if not self._requests:
            self._gc.release()

    def _collect(self, leave: int) -> None:
        """Take in the results of all launched steps but the last ``leave``."""
        while self._arrived or len(self._in_flight) > leave:
            if not self._arrived:
                tokens = self._in_flight[0].tokens()
                self._arrived.extend(zip(self._in_flight.popleft().batch.rows, tokens, strict=True))
            while self._arrived:  # interrupted in between, it goes on here
                row, token = self._arrived.popleft()
                if row.samples:
                    row.request.num_pending -= 1
                    if not row.request.finished:
                        self._deliver(self._take(row.request, token))

    def _take(self, request: Request, token: int) -> StreamEvent:
        """A new token of a request: append it, decode it, see whether it ends the request."""
        if token < 0:
            return self._finish(request, FinishReason.ERROR, error=(
                f"the logits for token {len(request.token_ids)} contain NaN, or are all -inf; the model overflowed"))
        output, params = request.output, request.params
        ends, full = request.append(token)
        piece = ""
        text = self._texts.get(request.request_id)
        if text is not None and not (ends and params.skip_special_tokens):
            piece = text.add([token], may_stop=len(output.token_ids) >= params.min_tokens)
            if text.error is not None:
                return self._finish(request, FinishReason.ERROR, [token], error=text.error)
            output.text, output.stop_reason = text.text, text.stopped_by
            if text.stopped_by is not None:
                return self._finish(request, FinishReason.STOP, [token], piece)
        if ends:
            output.stop_reason = None if token in self._eos else token
            return self._finish(request, FinishReason.STOP, [token], piece)
        if full:
            return self._finish(request, FinishReason.LENGTH, [token], piece)
        return StreamEvent(request.request_id, [token], piece, False, output)

    def _finish(self, request: Request, reason: FinishReason, tokens: list[int] | None = None, text: str = "", *,
                error: str | None = None) -> StreamEvent:
        self.scheduler.finish(request)
        self._requests.pop(request.request_id, None)
        if (waiting := self._texts.pop(request.request_id, None)) is not None:
            text += waiting.flush()
            request.output.text = waiting.text
            if waiting.error is not None:
                reason, error = FinishReason.ERROR, waiting.error
        request.output.finish_reason, request.output.error = reason.value, error
        return StreamEvent(request.request_id, tokens or [], text, True, request.output)

    # -- whole runs -------------------------------------------------------------------------------------------------

    def stream(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
               ) -> Iterator[StreamEvent]:
        """Run the prompts together and yield tokens as they come. ``event.index`` is the prompt's place (with n > 1 the n
        results of a prompt follow each other). A prompt that cannot be served yields one event whose output has ``error``."""
        pairs = pairs_of(prompts, params)
        place: dict[int, int] = {}
        inbox: deque[StreamEvent] = deque()
        at = 0
        try:
            for prompt, p in pairs:
                try:
                    for request_id in self.add_request(prompt, p):
                        self._requests[request_id].output.index = place[request_id] = at
                        self._inboxes[request_id] = inbox
                        at += 1
                except (ValueError, TypeError) as error:
                    yield StreamEvent(at, [], "", True, RequestOutput.refused(at, prompt, error))
                    at += 1
            left = len(place)
            while left:
                while not inbox:
                    self._turn()
                event = inbox.popleft()
                left -= event.finished
                yield StreamEvent(place[event.index], event.token_ids, event.text, event.finished, event.output)
        finally:
            self.turns.soon(lambda: self._abort(list(place), unheard=True))  # those unfinished: the caller stopped listening

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
                 ) -> list[RequestOutput]:
        """Run the prompts together; the results in their order. A prompt that fails has ``error`` set, the others run on."""
        return sorted((e.output for e in self.stream(prompts, params) if e.finished), key=lambda output: output.index)

    @alone
    def close(self) -> None:
        """Abort what runs, free cache and graphs, and give the model back as it was. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._abort(list(self._requests))
            self._collect(0)
            self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


__all__ = ["Engine"]
