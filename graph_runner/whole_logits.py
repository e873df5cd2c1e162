"""lm-eval's ``HFLM`` over a paged model: its log-likelihoods, which read ``model(ids).logits``, come from the engine.

``quire.paged`` leaves a model's forward as it is: its result holds more than logits (a cache, by default), and whoever keeps
the result may read it. So a call is served only where that is impossible: lm-eval's code called, and its next instruction
takes ``.logits`` of the result, which nothing else holds then. And only where the engine computes what the forward does: token
ids and nothing else, no gradients, no hooks, the model's own dtypes. All other calls are the plain forward's.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_module

from quire.attn_ops.kv_cache import pages_for
from quire.graph_runner.lockstep import Rows, in_parts
from quire.graph_runner.model_guard import harmless
from quire.graph_runner.own_forward import reads_inputs, training_difference

if TYPE_CHECKING:
    from quire.graph_runner.engine import Engine

#: Tokens per step, each with a row of logits beside the result: enough to keep a GPU's matrix units busy.
STEP_TOKENS = 1024


def reads_logits_alone(frame: types.FrameType | None) -> bool:
    """Whether a forward was called by lm-eval's code that can see nothing but ``.logits`` of its result. ``frame``: the caller
    of the forward. Those of ``nn.Module.__call__`` and of PEFT's wrappers, which hand the result on, are passed over, unless a
    hook there gets the result."""
    if "lm_eval" not in sys.modules:
        return False
    while frame is not None and (name := str(frame.f_globals.get("__name__"))).startswith(("torch.nn.modules.module", "peft.")):
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and not all(map(harmless, owner._forward_hooks.values())):
            return False
        frame = frame.f_back
    return frame is not None and name.partition(".")[0] == "lm_eval" and _takes_logits(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=256)
def _takes_logits(code: types.CodeType, call: int) -> bool:
    """Whether the instruction after the one at offset ``call`` is ``.logits``, of the value that the call returns."""
    following = next(found for found in dis.get_instructions(code) if found.offset > call and found.opname != "EXTENDED_ARG")
    return following.opname == "LOAD_ATTR" and following.argval == "logits"


def difference(model: Any, given: Mapping[str, Any], own_forward: Any) -> str | None:
    """Why an engine might not give the logits of the forward, or None. ``given``: the arguments by name, without None.
    ``own_forward``: of the instance before it was paged, or None."""
    if unknown := [name for name in given if name != "input_ids"]:
        return f"it was given {unknown[0]}"
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
        return "it was not given input_ids of shape (batch, length)"
    if ids.device != model.device:
        return f"its ids are on {ids.device}"
    if torch.is_grad_enabled():
        return "gradients are wanted"
    if torch.is_autocast_enabled(model.device.type):
        return "torch.autocast is on, and an engine computes in the model's own dtypes"
    if (found := training_difference(model)) is not None:
        return f"the model is in training mode, and {found}"
    if not getattr(model.config, "return_dict", True):
        return "config.return_dict is False"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "modules have global hooks"
    for name, module in model.named_modules():
        if any(not harmless(hook) for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())):
            return f"{name or type(model).__name__} has a hook"
    return reads_inputs(model, own_forward)


def limits_of(engine: Engine, ids: torch.Tensor) -> str | None:
    """Why this engine does not give the model's own logits of ids (B, L), or None."""
    config, backend = engine.config, engine.runner.backend
    if engine._closed:
        return "the engine is closed"
    if engine.runner.editor.in_processor:
        return "a logits processor called it in a step of the engine"
    if engine._live.cast is not None and engine._live.cast.stand_ins:
        return f"the engine computes in {config.dtype}, and the forward does not"
    if engine.runner.paged.options.kv_cache_dtype not in (None, engine.model.dtype):
        return f"the engine's KV cache is in {config.kv_cache_dtype}"
    if backend.approximate:
        return f"{backend.name} {backend.approximate}"
    if ids.shape[1] > engine.max_model_len:
        return (f"a row has {ids.shape[1]} tokens, and the engine holds {engine.max_model_len} (see max_model_len and "
                "num_pages of quire.Engine)")
    low, high = ids.aminmax()
    if not 0 <= int(low) <= int(high) < engine.limits.vocab_size:
        return "a token id is outside the vocabulary"
    return None


def whole_logits(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    """The logits at every token: of ids (B, L) int, (B, L, V) in the model's dtype. Equal rows are computed once. Raises
    DoesNotFit if a row needs more pages than there are."""
    prompts, length = list(map(tuple, ids.tolist())), ids.shape[1]
    rows = list(dict.fromkeys(prompts))
    index = {row: i for i, row in enumerate(rows)}
    out: torch.Tensor | None = None

    def take(some: Sequence[tuple[int, ...]], row: int, start: int, logits: torch.Tensor) -> None:
        nonlocal out
        if out is None:
            out = logits.new_empty(len(rows), length, logits.shape[1])
        out[index[some[row]], start : start + len(logits)] = logits

    pages = engine.scheduler.allocator.num_total // pages_for(length, engine.config.page_size)
    together = max(1, min(engine.config.max_num_seqs, pages, -(-STEP_TOKENS // length)))
    for part, of_part in in_parts(rows, together, lambda some: Rows(engine, some, 0)):
        with of_part:
            of_part.every_logits(functools.partial(take, part), STEP_TOKENS)
    assert out is not None
    return out if len(rows) == len(prompts) else out[[index[prompt] for prompt in prompts]]
