"""Beam search: transformers' own loop, whose forward and cache are rows in the pages of an engine.

``GenerationMixin._beam_search`` keeps the beams, their scores and their end conditions, and calls the processors and criteria
that transformers prepared. It reaches the model by a few methods of ``self``, which ``_Forward`` has instead. So length
penalties, early stopping, end tokens and sampled beams are transformers' own; only the logits come from here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from quire.graph_runner.lockstep import Rows


class _Forward:
    """Stands for ``model`` in transformers' loop, for a call whose beams are ``rows``."""

    def __init__(self, model: Any, rows: Rows) -> None:
        self._model, self._rows = model, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _prefill(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self._rows.logits()[:, None])

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": input_ids}

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> SimpleNamespace:
        self._rows.append(input_ids[:, -1].tolist())
        return self._prefill(input_ids)

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return model_kwargs

    def _reorder_cache(self, cache: Any, beam_idx: torch.Tensor) -> Any:
        self._rows.reorder(beam_idx.tolist())
        return cache


def beam_search(plain: Callable[..., Any], rows: Rows, input_ids: torch.Tensor, **options: Any) -> Any:
    """What ``plain``, a model's ``_beam_search``, returns, with logits from the engine.

    Args:
        rows: not entered yet, with the prompts of the beams without padding.
        input_ids: (rows, length) int, padding included.
        options: the others of ``plain``, as transformers prepared them, without what is for the model.
    """
    loop, model = plain.__func__, plain.__self__  # type: ignore[attr-defined]
    with rows:
        found = loop(_Forward(model, rows), input_ids, past_key_values=rows, use_cache=True, **options)
    if hasattr(found, "past_key_values"):
        found.past_key_values = None  # keys and values were in the engine's pages
    return found
