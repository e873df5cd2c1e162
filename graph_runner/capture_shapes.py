"""Which steps are captured, decode batches by their rows, mixed ones (prompts, or prompts and decodes) by their tokens; and
which run without a graph all the same.

NOTE [How far mixed steps are captured]: a step without a graph takes the host LAUNCH_SECONDS for each weight matrix, whatever
its size, and the GPU 2 * tokens * elements / FLOPS seconds. Up to the number of tokens at which both are equal a graph saves
time, and its padding costs nothing, as the host would be the slower one; beyond, padding (at most 12.5 %, ``token_buckets``)
would cost more than launching. For Llama-3.1-8B (31 M elements per matrix) that is below MIXED_TOKENS, for Llama-3.2-1B 2,200
tokens, for Qwen3-0.6B 8,700. Experts count whole, though a token meets a few of them, so mixtures stay at MIXED_TOKENS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, CudagraphSupport
from quire.graph_runner.buckets import decode_buckets, token_buckets
from quire.graph_runner.config import EngineConfig
from quire.graph_runner.request import ScheduledBatch
from quire.graph_runner.step_buffers import BatchShape

#: Tokens up to which mixed steps are captured for every model.
MIXED_TOKENS = 1024
# Judged, not fitted. A step of 8192 tokens of Qwen3-0.6B took one host 193 us per matrix (h200_profile_qwen3-0.6b.json): a
# third of that, for faster hosts. Products of 8192 tokens run at 700 TFLOP/s and more (h200_profile.json), of fewer at less.
LAUNCH_SECONDS, FLOPS = 65e-6, 600e12
SLOW_HOST = 3  # that host's times LAUNCH_SECONDS
#: Major compute capabilities of GPUs with such rates.
FAST_GPUS = (9, 10)
# A token bucket is captured for few rows and for all, since the LM head runs on every row; small ones for all rows only, as the
# head takes about as long for 128 rows as for 16.
FEW_ROWS, FEW_ROWS_FROM = 16, 128
#: Estimates that differ by less do not pay for launching, which a busy host may delay.
WORTH = 0.97
REASON = "attention to prompts of such lengths takes less time without a graph"


def launch_bound_tokens(parameters: Iterable[torch.Tensor], vocab_size: int) -> int:
    """Tokens up to which the host takes longer to launch a step than a fast GPU to run it, at least MIXED_TOKENS. See NOTE [How
    far mixed steps are captured]. ``parameters``: of the model. Embedding and head, of ``vocab_size`` rows, do not count: they
    take a token or a row each."""
    sizes = _matrix_sizes(parameters, vocab_size)
    if not sizes:
        return MIXED_TOKENS
    tokens = int(LAUNCH_SECONDS * FLOPS / 2 * len(sizes) / sum(sizes))
    return max(MIXED_TOKENS, 1 << (tokens.bit_length() - 1) if tokens else 0)


def step_us(parameters: Iterable[torch.Tensor], vocab_size: int) -> tuple[float, float]:
    """Microseconds that a slow host takes to launch a step without a graph, and those per token of a fast GPU for the matrix
    products of a long step. Arguments: of ``launch_bound_tokens``."""
    sizes = _matrix_sizes(parameters, vocab_size)
    return SLOW_HOST * LAUNCH_SECONDS * 1e6 * len(sizes), 2e6 / FLOPS * sum(sizes)


def _matrix_sizes(parameters: Iterable[torch.Tensor], vocab_size: int) -> list[int]:
    """Elements of the matrices that every token of a step meets."""
    return [p.numel() for p in parameters if p.dim() >= 2 and p.shape[0] != vocab_size and p.itemsize <= 2]


def capture_shapes(config: EngineConfig, support: CudagraphSupport, device: torch.device, launch_bound: int
                   ) -> list[BatchShape]:
    """Shapes to capture: decode batches if the backend allows it (``support``), mixed ones too if it allows any batch; all in
    pieces. ``launch_bound``: of the model, by ``launch_bound_tokens``; MIXED_TOKENS where a graph may take longer than
    launching (``AttentionBackend.same_in_graphs``)."""
    sizes, token_sizes, most = (config.cudagraph_capture_sizes, config.cudagraph_token_sizes,
                                config.max_cudagraph_capture_size)
    found: list[BatchShape] = []
    pieces = config.cudagraph_piecewise
    if (pieces or support >= CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE) and (sizes is None or len(sizes)):
        listed = sizes is not None and not isinstance(sizes, str)
        rows = config.max_num_seqs if most is None or listed else min(most, config.max_num_seqs)
        found += [BatchShape(n, n) for n in decode_buckets(rows, sizes)]
    if token_sizes is None:  # by default on a GPU, and with decode graphs only
        fast = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in FAST_GPUS
        # A bucket in pieces is a graph for every layer: more of them only on request.
        limit = most or (launch_bound if fast and not pieces else MIXED_TOKENS)
        wanted = found and device.type == "cuda"
        token_sizes = token_buckets(min(limit, config.max_num_batched_tokens)) if wanted else []
    elif token_sizes:
        limit = min(most or MIXED_TOKENS, config.max_num_batched_tokens) if isinstance(token_sizes, str) else (
            config.max_num_batched_tokens)
        token_sizes = token_buckets(limit, token_sizes)
    if pieces or support is CudagraphSupport.ALWAYS:
        for rows in {min(FEW_ROWS, config.max_num_seqs), config.max_num_seqs}:
            found += [BatchShape(n, min(rows, n - 1)) for n in token_sizes
                      if n > (1 if rows == config.max_num_seqs else FEW_ROWS_FROM)]
    return found


@dataclass
class WithoutGraph:
    """Which steps of prompts run without the graph that was captured for their shape: the rule for one model and backend.

    A graph holds only kernels that do not depend on lengths. Some backends have faster ones for long prompts
    (``AttentionBackend.without_graph``). Such a step takes the longer of what the host needs for launching it (``launch_us``,
    of a slow host if it is not measured) and what the GPU needs for its matrix products (``token_us`` per token) and its
    attention."""

    backend: AttentionBackend
    sites: Sequence[AttentionSite]
    device: torch.device
    launch_us: float
    token_us: float

    def measure(self, launch: Callable[[], Any]) -> None:
        """Time ``launch``, which launches a step that ran before. It also waits where the GPU's queue is full, so this is never
        more than a slow host's time."""
        began = time.perf_counter()
        launch()
        self.launch_us = min(self.launch_us, (time.perf_counter() - began) * 1e6)

    def reason(self, batch: ScheduledBatch, states: Mapping[str, Any]) -> str | None:
        """Why the batch takes less time without a graph; None: it does not. ``states``: of the backends, by name."""
        if self.backend.without_graph is None or batch.forward_mode.is_decode():
            return None
        new = np.array([row.num_new for row in batch.rows])
        with_graph, without = self.backend.without_graph(self.sites, self.device, states.get(self.backend.name), new,
                                                         new + np.array([row.start for row in batch.rows]))
        products = batch.num_tokens * self.token_us
        return REASON if max(self.launch_us, products + without) < WORTH * (products + with_graph) else None
