"""``quire.step``: one paged step by hand, around a call of a model that was compiled by or routed through quire."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping

import torch
from torch._dynamo.exc import TorchDynamoException

from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.registry import get_backend
from quire.attn_ops.step import Step, current_step, running
from quire.passes.eager import check_step
from quire.passes.recompile_limit import at_limit


@contextlib.contextmanager
def step(cache: PagedKVCache, metadata: CommonAttentionMetadata, *, attention: str | Mapping[str, str] = "auto"
         ) -> Iterator[Step]:
    """Run the model calls inside as one paged step: attention reads and writes ``cache``.

    The model must reach quire: compiled with ``torch.compile(model, backend="quire")``, its forward decorated with
    ``quire.paged``, or a transformers model after ``quire.paged(model)``. Give it the ragged row ``input_ids[None]`` (1, T) and
    ``position_ids=metadata.positions[None]``, if it takes any, with ``use_cache=False`` and no attention mask.

    Args:
        cache: from ``PagedKVCache.for_model``.  metadata: of this step's batch.
        attention: as in ``QuireOptions``. Options given to ``torch.compile`` count only if this is "auto".

    Raises:
        RuntimeError: on leaving, if a layer of the cache did not attend through quire (the model ran unpaged, and its results
            are wrong); a step inside a step.
        ValueError: metadata that do not fit the cache, or a row of another length; an unknown backend.
    """
    if current_step() is not None:
        raise RuntimeError("quire.step inside quire.step: one paged step at a time")
    if metadata.page_size != cache.page_size:
        raise ValueError(f"the metadata was built for pages of {metadata.page_size} tokens, the cache has pages of "
                         f"{cache.page_size}")
    if metadata.slot_mapping.device.type != cache.device.type:
        raise ValueError(f"the metadata is on {metadata.slot_mapping.device}, the cache on {cache.device}")
    if metadata.max_page is not None and metadata.max_page >= (pages := min(cache.layer_pages)):
        raise ValueError(f"the block table uses page {metadata.max_page}, but the cache has {pages} pages, 0 to "
                         f"{pages - 1}; use pages of the cache, or make it with num_pages={metadata.max_page + 1}")
    current = Step(cache, metadata, "auto" if attention == "auto" else get_backend(attention), by_hand=True)
    # Sizes of traces in a step are dynamic from the start: a static trace cannot tell a window from plain causal. Numbers
    # that modules hold, such as a scale, stay constants. And hooks that are registered later make a trace of their own.
    sizes = torch._dynamo.config.patch(assume_static_by_default=False, specialize_int=True, specialize_float=True,
                                       skip_nnmodule_hook_guards=False)
    with sizes, running(current):
        try:
            yield current
        except Exception as error:
            of_model = isinstance(error, RuntimeError) or isinstance(error.__cause__, TorchDynamoException)
            attended = all(layer in current.served for layer in cache.layer_ids)  # and something else failed
            if of_model and not attended and not isinstance(error, torch.OutOfMemoryError):
                wrong = _wrong_count(current, error.__traceback__)
                if wrong is not None:
                    raise wrong from error
            raise
    missing = [layer for layer in cache.layer_ids if layer not in current.served]
    if missing:
        raise RuntimeError(
            f"a paged step ended in which layers {missing[:8]}{'...' if len(missing) > 8 else ''} of the KV cache were not "
            "attended through quire, so the model's results in it are not those of a paged model. Compile the model with "
            "torch.compile(model, backend='quire'), decorate its forward with quire.paged, or call quire.paged(model) first."
            + at_limit())


def _wrong_count(step: Step, traceback: types.TracebackType | None) -> ValueError | None:
    """The error of a row of another length than the metadata's, where the outermost call of a module or compiled function on
    the way to an error was given one: a row meets the positions of the metadata before quire sees it. None: it was not, or
    there is no such call."""
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        args, kwargs = frame.f_locals.get("args"), frame.f_locals.get("kwargs")
        of_torch = frame.f_globals.get("__name__", "").startswith(("torch.nn.", "torch._dynamo."))
        if of_torch and isinstance(args, tuple) and isinstance(kwargs, dict):
            row = next((x for x in (kwargs.get("input_ids"), *args) if isinstance(x, torch.Tensor)), None)
            if row is not None and row.dim() == 2 and len(row) == 1 and not row.is_floating_point():
                try:
                    check_step(step, row.shape[1])
                except ValueError as error:
                    return error
            return None
    return None
