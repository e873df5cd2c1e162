"""How a model's forward takes a ragged batch: the names of its arguments, read from its signature."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch

from quire.attn_ops.backend import UnsupportedAttention


class Arguments(NamedTuple):
    """Of one forward.

    Attributes:
        ids: the parameter of token ids (1, T): ``input_ids``, or the only one without a default, whatever its name.
        positions: whether it takes ``position_ids``. One that does not counts tokens itself, or needs no positions.
        keep: the parameter that says which tokens' logits are wanted, or None.
        use_cache: whether it can be told not to make a cache.
    """

    ids: str
    positions: bool
    keep: str | None
    use_cache: bool

    @classmethod
    def of(cls, model: torch.nn.Module, of_transformers: bool) -> Arguments:
        """Raises UnsupportedAttention for a forward that needs more than token ids and positions, or takes no token ids."""
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD
                  and p.kind is not p.VAR_POSITIONAL and name not in ("input_ids", "position_ids", "logits_to_keep")]
        ids, kind = "input_ids", type(model).__name__
        unnamed = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and name in (ids, *needed)]
        if unnamed:
            raise UnsupportedAttention(f"{kind}.forward takes {' and '.join(unnamed)} by position only (before the / of its "
                                       "signature), and quire gives a model its token ids by name; leave out the /.")
        if ids not in named and len(needed) == 1 and needed[0] in named:
            ids, needed = needed[0], []
        if needed:
            raise UnsupportedAttention(f"{kind}.forward cannot do without {' and '.join(needed)}; quire gives a model token "
                                       "ids and positions (as position_ids).")
        if ids not in named and not takes_any:
            raise UnsupportedAttention(
                f"{kind}.forward takes no input_ids; a ragged batch cannot be given to it. quire serves causal LMs whose "
                "forward takes token ids, as input_ids or as its only parameter without a default, and position_ids if it is "
                f"to be given positions{wrapped(model)}.")
        return cls(ids, "position_ids" in named or takes_any, "logits_to_keep" if "logits_to_keep" in parameters else None,
                   "use_cache" in parameters or (takes_any and of_transformers))


def wrapped(model: Any) -> str:
    """Names the transformers model inside a module that is none, such as ``nn.DataParallel``, for messages."""
    found = next(((n, type(m).__name__) for n, m in model.named_modules() if n and hasattr(type(m), "generate")), None)
    return "" if found is None else f". Its module {found[0]!r} is a {found[1]}: give quire that one"
