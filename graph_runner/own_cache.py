"""Whether a model's own forward gives with a KV cache, and beside other rows, what it gives without one and alone.

quire traces a model without a cache, and ``generate`` runs it with one, and with as many rows as there are prompts. A user's
forward, hook or wrapper may do something else then. ``passes/capture/followed.py`` reads the code for what asks for a cache;
this asks by running, on a few tokens.
"""

from __future__ import annotations

import abc
import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.graph_runner.on_instance import OnInstance
from quire.passes.capture.evaluating import ChangedWhileTraced, evaluating
from quire.passes.capture.followed import functions_of, held_by, is_known, reached
from quire.passes.capture.in_float32 import InFloat32
from quire.passes.capture.paged_model import PagedModel
from quire.passes.capture.results import logits_of

logger = logging.getLogger(__name__)
STEPS = 3  # of one token each, behind the others
#: Rows of a trial. Code may ask for the first row of a batch, or for the last, or have something for each of two.
ROWS = (3, 2)
#: Tokens of a row, at most, of which all rows are compared: the logits of longer ones are gigabytes, and the first is.
FEW = 256
_BARE = (object, abc.ABC, Generic)


def has_users_code(model: torch.nn.Module, asked: Callable[[Any], bool] = lambda held: True) -> bool:
    """Whether a module's class, its forward, a hook or a function that it holds may be the user's. ``asked``: of hooks, and of
    forwards on instances, whether they may be."""
    if torch.nn.modules.module._has_any_global_hook():
        return True
    classes = {type(module) for module in model.modules()}
    return any(not is_known(cls.__module__) for each in classes for cls in each.__mro__ if cls not in _BARE) or any(
        functions_of(each.forward) or functions_of(each.__call__) for each in classes) or any(
        any(map(asked, around_forward(module))) or any(map(may_be_users, functions_held(module))) for module in model.modules())


def around_forward(module: torch.nn.Module) -> Iterator[Any]:
    """The hooks of a module, and the forward in the place of its class's."""
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()
    if "forward" in vars(module):
        forward = vars(module)["forward"]
        yield forward.original if isinstance(forward, OnInstance) and forward.original is not None else forward


def functions_held(module: torch.nn.Module) -> Iterator[Any]:
    """The functions among a module's attributes, and other objects that can be called: an activation, say."""
    for held in vars(module).values():
        if callable(held) and not isinstance(held, (type, torch.nn.Module)):
            yield held


def may_be_users(held: Any) -> bool:
    """Whether a hook, or a forward on an instance, or what it is made of, may be the user's."""
    if isinstance(held, functools.partial):
        return any(may_be_users(each) for each in (held.func, *held.args, *held.keywords.values())
                   if callable(each) and not isinstance(each, (type, torch.nn.Module)))
    if isinstance(held, (types.FunctionType, types.MethodType)):
        return bool(functions_of(held))
    known = held.__module__ if isinstance(held, types.BuiltinFunctionType) else type(held).__module__
    return not is_known(known) or bool(functions_of(held))


def users_around(model: torch.nn.Module) -> list[Any]:
    """The hooks of modules, and forwards on instances, that may be the user's, or are those of torch.nn.utils (pruning, norms
    of weights), which set attributes as the user asked."""
    return [held for module in model.modules() for held in around_forward(module)
            if may_be_users(held) or type(held).__module__.startswith("torch.nn.utils.")]


def switches_of(hooks: Sequence[Any]) -> list[bool]:
    """What is on or off of all that hooks may read."""
    read = [held for each in hooks for first, owner in functions_of(each) for function, its in reached(first, owner)
            for held in (its, *held_by(function).values()) if not isinstance(held, types.ModuleType)]
    return [x for held in read for x in (held, *getattr(held, "__dict__", {}).values()) if isinstance(x, bool)]


@torch.no_grad()
def both_ways(paged: PagedModel, ids: torch.Tensor, mode: InFloat32) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Logits (rows, T, V) of the model's own forward of ids (T,) and of other rows: of each alone and without a cache, and of
    all as in ``generate``; of fewer tokens, if that leaves the cache empty. None: no code of the user's is in the model, or it
    takes neither a cache nor several rows."""
    model: Any = paged.model
    if paged.config is None or len(ids) <= STEPS or not has_users_code(model):
        return None
    places, alone = torch.arange(len(ids), device=ids.device), list[torch.Tensor]()
    try:
        with mode:
            alone = [paged.by_itself(row, places).float() for row in _batch(ids, 2 if len(ids) <= FEW else 1)]
        with mode:
            found = torch.cat(evaluated(model, ids, STEPS)[0], 1).float()
        first = len(ids) - STEPS - 1
    except (ChangedWhileTraced, UnsupportedAttention):
        raise
    except Exception as error:
        logger.info("packing check: the model does not run with a cache: %s: %s", type(error).__name__, error)
        if not alone or (together := _together(paged, ids, places, mode)) is None:
            return None
        found, first = together.float(), len(ids) - 1
    at = first if paged.last_alone else 0  # each call gives the logits of its last token alone
    each = [alone[i % len(alone)][at : at + found.shape[1]] for i in range(len(found))]
    return torch.stack(each) if len(each) > 1 else each[0][None], found  # one may be gigabytes: not copied


def _batch(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows of ids (T,) and of the same tokens backwards, by turns."""
    return torch.stack([ids.flip(0) if i % 2 else ids for i in range(rows)])


def _trials(ids: torch.Tensor) -> tuple[int, ...]:
    return ROWS if len(ids) <= FEW else ROWS[1:]


def _together(paged: PagedModel, ids: torch.Tensor, places: torch.Tensor, mode: InFloat32) -> torch.Tensor | None:
    """Logits of several rows in one call without a cache; None: the model takes one row only."""
    for rows in _trials(ids):
        try:
            with mode, evaluating(paged.model):
                return _of_rows(paged.model(**paged.given(_batch(ids, rows), places.repeat(rows, 1))), rows, len(ids))
        except (ChangedWhileTraced, UnsupportedAttention):
            raise
        except Exception as error:
            logger.debug("%d rows without a cache: %s: %s", rows, type(error).__name__, error)
    return None


def _of_rows(out: Any, rows: int, tokens: int) -> torch.Tensor:
    """The logits (rows, n, V) of a call, of sequences of ``tokens`` tokens, or of the first row, if these are not ``FEW``.
    Raises UnsupportedAttention if they are of another number of rows."""
    logits: torch.Tensor = logits_of(out)
    if len(logits) != rows:
        raise UnsupportedAttention(f"the model's forward gives logits of {len(logits)} rows for {rows} rows of tokens. quire "
                                   "computes each sequence alone")
    return logits if tokens <= FEW else logits[:1]


def evaluated(model: Any, ids: torch.Tensor, steps: int) -> tuple[list[torch.Tensor], int]:
    """``logits_with_cache`` in evaluation mode, and of how many rows: one, if the model does not take several."""
    with evaluating(model):
        for rows in _trials(ids):
            try:
                return logits_with_cache(model, ids, steps, rows), rows
            except (ChangedWhileTraced, UnsupportedAttention):
                raise
            except Exception as error:
                logger.debug("%d rows with a cache: %s: %s", rows, type(error).__name__, error)
        return logits_with_cache(model, ids, steps, 1), 1


def logits_with_cache(model: Any, ids: torch.Tensor, steps: int, rows: int) -> list[torch.Tensor]:
    """Logits, as of ``_of_rows``, of the model's own forward of ids (T,) and others of their length, for each of its calls as
    ``generate`` makes them, with one cache: of all tokens but the last ``steps``, and of each of these; NaN where a call has
    emptied the cache. The first call alone, if it leaves it empty. Raises what the forward raises, and UnsupportedAttention for
    logits of another number of rows."""
    from transformers import DynamicCache

    parameters = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    options = {"return_dict": True} if takes_all or "return_dict" in parameters else {}
    cache, batch = DynamicCache(config=model.config), _batch(ids, rows)
    positions = torch.arange(len(ids), device=ids.device).repeat(rows, 1)
    named = takes_all or "position_ids" in parameters
    found, seen = list[torch.Tensor](), 0
    for end in range(len(ids) - steps, len(ids) + 1):
        mask = torch.ones(rows, end, dtype=torch.int64, device=ids.device)
        places = {"position_ids": positions[:, seen:end]} if named else {}
        out = model(input_ids=batch[:, seen:end], attention_mask=mask, past_key_values=cache, use_cache=True,
                    **places, **options)
        found.append(_of_rows(out, rows, len(ids))[:, -(end - seen):])
        if not cache.get_seq_length():
            if not seen:
                break
            found[-1] = torch.full_like(found[-1], float("nan"))
        seen = end
    return found
