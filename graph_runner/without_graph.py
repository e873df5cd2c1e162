"""Which steps of prompts run without the CUDA graph that was captured for their shape.

A graph spares the host the launches, but holds only kernels that do not depend on lengths. Some backends have faster ones for
long prompts (``AttentionBackend.without_graph``). Such a step takes the longer of what the host needs for launching it and
what the GPU needs for its matrix products and its attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend
from quire.graph_runner.request import ScheduledBatch

#: Estimates that differ by less do not pay for launching, which a busy host may delay.
WORTH = 0.97
REASON = "attention to prompts of such lengths takes less time without a graph"


@dataclass
class WithoutGraph:
    """The rule for one model and backend.

    Args:
        launch_us: microseconds that the host takes to launch a step, of a slow host if it is not measured.
        token_us: microseconds of matrix products per token.
    """

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
