"""A model in use: its runner, traced again when the model changes."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from quire.graph_runner import loading
from quire.graph_runner.config import EngineConfig
from quire.graph_runner.model_guard import ModelGuard, buffer_versions
from quire.graph_runner.model_runner import ModelRunner
from quire.graph_runner.paged_forward import own_forward
from quire.graph_runner.window_pages import Reach, fit_requests
from quire.passes.capture.lora import can_choose

logger = logging.getLogger(__name__)


class LiveModel:
    """The runner of a model, and the guard of what its trace read.

    Attributes:
        config: the options, with the lengths and the number of pages that were chosen.
        runner: of the latest trace.
        num_pages: pages of the KV cache, the same for every trace.
        adapters: whether each request has adapters of its own.
    """

    def __init__(self, model: torch.nn.Module, config: EngineConfig) -> None:
        self.model, self.config = model, loading.limited(config, model)
        loading.check_model(model, self.config.max_model_len)
        self.adapters = False
        self._stale: str | None = None  # a change after which the model could not be traced
        self._trace()
        self.num_pages = self.runner.cache.num_pages
        self.config = replace(self.config, num_pages=self.num_pages)
        self._longest = self.limits()[0]

    def _trace(self) -> None:
        versions = buffer_versions(self.model)
        self.adapters = self.adapters and can_choose(self.model)
        with own_forward(self.model):
            self.runner = ModelRunner(self.model, self.config, self.adapters)
        self._guard = ModelGuard(self.model, addresses=self.runner.device.type == "cuda", reads=self.runner.paged.reads or None,
                                 buffer_values=any(site.route != "interface" for site in self.runner.sites), versions=versions)

    def change(self, everything: bool = True) -> str | None:
        """Describes a change of the model since it was traced, or None. ``everything``: compare the whole model, else the next
        few modules."""
        if self._stale is not None or not self.runner.paged.traced:
            return self._stale or "torch._dynamo.reset() dropped its trace"
        return self._guard.change() if everything else self._guard.next_change()

    def limits(self) -> tuple[int, int | None, Reach | None]:
        """The maximum length of a request, the maximum chunk of a prefill, and how far back attention reaches."""
        config, reach = self.config, self.runner.reach
        return *fit_requests(reach, self.num_pages, config.page_size, config.prefill_chunk_size,
                             config.max_num_batched_tokens, self.runner.max_model_len), reach

    def trace_again(self, change: str, own_adapters: bool = False) -> None:
        """Replace the runner by one for the model as it is now; no step may be in flight. ``own_adapters``: from now on each
        request has adapters of its own, as long as the model allows it.

        Raises:
            RuntimeError: the model cannot be served any more. ``change`` then returns the same change; call this again.
        """
        logger.warning("%s changed (%s): tracing it again", type(self.model).__name__, change)
        self._stale, before = change, self.adapters
        self.adapters |= own_adapters
        self.runner.close()
        try:
            self._trace()
            if self.limits()[0] < self._longest:
                raise ValueError("its attention reaches further back than before, so that requests may need more KV cache than "
                                 "there is")
        except Exception as error:
            self.adapters = before  # if they are the reason, the next step can go on without
            raise RuntimeError(f"the model was changed after the engine traced it ({change}), and cannot be served as it is "
                               f"now: {error}. Undo the change, or close the engine") from error
        self._stale = None


__all__ = ["LiveModel"]
