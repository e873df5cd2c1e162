"""The logits among what a forward returns."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.verify.sites import text_config

_DO = "return the logits (1, T, vocabulary) alone, or an object that has logits"


def logits_of(out: Any) -> Any:
    """The tensor itself, ``.logits`` (of a named tuple, too), or the first of a tuple: ``check_first`` says whether it is."""
    if isinstance(out, torch.Tensor):
        return out
    if type(out) is tuple and out:
        return out[0]
    if not hasattr(out, "logits"):
        raise UnsupportedAttention("the model has no language-model head: its result has no logits")
    return out.logits


def vocabulary(model: torch.nn.Module) -> tuple[int, ...]:
    """The widths that logits of ``model`` may have: its head, embedding or config say so. Empty if none of them does."""
    sizes = [getattr(text_config(config), "vocab_size", None) if (config := getattr(model, "config", None)) else None]
    for method, size in (("get_output_embeddings", "out_features"), ("get_input_embeddings", "num_embeddings")):
        with contextlib.suppress(NotImplementedError):  # transformers' own, of some models
            sizes.append(getattr(getattr(model, method, lambda: None)(), size, None))
    return tuple(dict.fromkeys(n for n in sizes if isinstance(n, int)))


def check_first(out: Any, vocabulary: Sequence[int]) -> None:
    """Raises UnsupportedAttention for a tuple whose first member is not proven to be the logits, such as ``(hidden, logits)``:
    it is as wide as the vocabulary and no other member is, or, where no vocabulary is known, nothing is beside it but numbers
    (a loss). ``vocabulary``: the widths that logits of this model may have; empty: unknown. Runs inside a trace."""
    if type(out) is not tuple or not out:
        return
    if not isinstance(out[0], torch.Tensor):
        raise UnsupportedAttention("the forward returns a tuple that does not begin with the logits; " + _DO)
    others = [x for x in _leaves(out[1:]) if not _is_number(x)]
    if vocabulary and (not _is_of(out[0], vocabulary) or any([_is_of(x, vocabulary) for x in others])):
        raise UnsupportedAttention("the forward returns a tuple of which not the first member alone is as wide as the "
                                   "vocabulary of the model; " + _DO)
    if others and not vocabulary:
        raise UnsupportedAttention("the forward returns a tuple with more than numbers beside its first tensor, and quire "
                                   "knows no vocabulary of the model that would tell which are the logits; " + _DO)


def check_rows(logits: Any) -> None:
    """Raises UnsupportedAttention for logits of one row of tokens that are not (1, T, vocabulary). Runs inside a trace."""
    if logits.dim() != 3:
        raise UnsupportedAttention("the model has no language-model head: its logits are not (batch, tokens, vocabulary). "
                                   "(Those of the last token alone are, if they are taken as hidden[:, [-1], :].)")
    if not statically_known_true(logits.shape[0] == 1):
        raise UnsupportedAttention("the forward gives logits of several rows for one row of tokens, as where a hook adds a "
                                   "vector for each row of a batch. quire computes each sequence alone: do the same to every "
                                   "row")


def _leaves(out: Any) -> list[Any]:
    if isinstance(out, dict):
        return _leaves(list(out.values()))
    return [x for each in out for x in _leaves(each)] if isinstance(out, (tuple, list)) else [out]


def _is_number(x: Any) -> bool:
    return x.dim() == 0 if isinstance(x, torch.Tensor) else x is None or isinstance(x, (bool, int, float, str))


def _is_of(x: Any, vocabulary: Sequence[int]) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0 and any([statically_known_true(x.shape[-1] == n) for n in vocabulary])
