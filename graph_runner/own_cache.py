"""Whether a model's own forward gives with a KV cache what it gives without one.

quire traces a model without a cache, and ``generate`` runs it with one. A user's forward, hook or wrapper may do something else
where there is a cache. ``passes/capture/followed.py`` reads the code for that; this asks by running, on a few tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from quire.passes.capture.evaluating import ChangedWhileTraced, evaluating
from quire.passes.capture.followed import functions_of, is_known
from quire.passes.capture.in_float32 import InFloat32
from quire.passes.capture.paged_model import PagedModel
from quire.passes.capture.results import logits_of
from quire.passes.verify.sites import text_config

logger = logging.getLogger(__name__)
STEPS = 3  # of one token each, behind the others


def has_users_code(model: torch.nn.Module) -> bool:
    """Whether a module's class, its forward or a hook may be the user's."""
    if torch.nn.modules.module._has_any_global_hook():
        return True
    classes = {type(module) for module in model.modules()}
    return any(not is_known(cls.__module__) for each in classes for cls in each.__mro__ if cls is not object) or any(
        functions_of(each.forward) or functions_of(each.__call__) for each in classes) or any(
        "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def both_ways(paged: PagedModel, ids: torch.Tensor, mode: InFloat32) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Logits (T, V) of the model's own forward of ids (T,), without a cache and with one. None: no code of the user's is in it,
    it does not run so, or it leaves the cache empty, and is served as it is without one."""
    model: Any = paged.model
    if paged.config is None or getattr(text_config(paged.config), "use_cache", True) is False or len(ids) <= STEPS \
            or not has_users_code(model):
        return None
    found, seen = list[torch.Tensor](), 0
    try:
        from transformers import DynamicCache

        cache, positions = DynamicCache(config=paged.config), torch.arange(len(ids), device=ids.device)[None]
        with mode:
            plain = paged.by_itself(ids, positions[0]).float()
        with evaluating(model), mode:
            for end in range(len(ids) - STEPS, len(ids) + 1):
                mask = torch.ones(1, end, dtype=torch.int64, device=ids.device)
                out = model(input_ids=ids[None, seen:end], position_ids=positions[:, seen:end], attention_mask=mask,
                            past_key_values=cache, use_cache=True)
                if not cache.get_seq_length():
                    return None
                found.append(logits_of(out)[0, -(end - seen):].float())
                seen = end
    except ChangedWhileTraced:
        raise
    except Exception as error:
        logger.info("packing check: the model does not run with a cache: %s: %s", type(error).__name__, error)
        return None
    return plain, torch.cat(found)
