"""Encoders and vision towers of transformers on quire's ragged attention (``attn_ops/ops/varlen.py``).

A vision tower packs images into one row and keeps them apart by ``cu_seqlens``. Transformers passes these on only to
implementations with "flash" in their name; for others it cuts the row on the host and calls attention image by image.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.context import setting
from quire.attn_ops.ops.varlen import check_implementation, varlen_attention
from quire.passes.capture.hf_interface import HARMLESS, configs_of, implementation_set

NAME = "quire_flash_varlen"
_IMPLEMENTATION: ContextVar[str | None] = ContextVar("quire_encoder_attention", default=None)


def attention_function(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None, cu_seq_lens_k: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: (B, H, S, D) query, un-repeated key and value -> ((B, S, H, Dv), None). Every query sees all
    keys of its row, or of its sequence by ``cu_seq_lens``. Raises UnsupportedAttention for what would be ignored."""
    where, implementation = type(module).__name__, _IMPLEMENTATION.get()
    if implementation is None:
        raise RuntimeError(f"{where} runs with attention implementation {NAME!r} outside quire.encoder_attention")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal  # absent: as sdpa takes it
    unknown = [n for n, val in kwargs.items() if val is not None and val is not False and n not in HARMLESS]
    for wrong, what in ((attention_mask is not None, "a mask"), (bool(dropout), "dropout; call model.eval() first"),
                        (bool(causal), "causal attention"), (bool(unknown), f"{', '.join(unknown)}")):
        if wrong:
            raise UnsupportedAttention(f"{where} asks for {what}; quire.encoder_attention has attention of all to all only")
    rows, length, keys = query.shape[0], query.shape[2], key.shape[2]
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        steps = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
        cu_seq_lens_q, cu_seq_lens_k = steps * length, steps * keys
    elif rows != 1:
        raise UnsupportedAttention(f"{where} passes cu_seq_lens and {rows} rows; one ragged row is expected")
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out, _ = varlen_attention(q, k, v, cu_seq_lens_q.int(), cu_seq_lens_k.int(), implementation=implementation,
                              scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling))
    return out.unflatten(0, (rows, length)), None


def _no_mask(*args: Any, attention_mask: torch.Tensor | None = None, mask_function: Any = None,
             allow_is_bidirectional_skip: bool = True, **kwargs: Any) -> None:
    """In the place of a mask by which every query sees all keys, and which its caller can do without. Raises
    UnsupportedAttention for any other."""
    from transformers.masking_utils import bidirectional_mask_function

    if mask_function is not bidirectional_mask_function or not allow_is_bidirectional_skip:
        raise UnsupportedAttention(
            "quire.encoder_attention has attention of all to all only, and the model makes another mask: causal, of a window, "
            "of blocks, or one that it changes afterwards. Run it without")
    if attention_mask is not None and not bool(attention_mask.bool().all()):
        raise UnsupportedAttention("quire.encoder_attention takes no padding mask; give sequences of one length, or a ragged "
                                   "row")


@contextlib.contextmanager
def encoder_attention(tower: torch.nn.Module, implementation: str = "auto") -> Iterator[None]:
    """While inside, this encoder or vision tower of transformers attends with ``quire.varlen_attention``; afterwards as before.
    Layers that do not call transformers' attention interface attend as they did.

    Args:
        tower: such as ``model.model.visual``. Its config is changed meanwhile, so no other thread may run it.
        implementation: of ``varlen_attention``.

    Raises:
        ValueError: an unknown implementation, or a tower without a config of transformers.
        UnsupportedAttention: an implementation of the user's own; in a call, masks (padding, causal, windows), dropout.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    check_implementation(implementation)
    configs = configs_of(tower)
    if not configs:
        raise ValueError(f"{type(tower).__name__} has no config of transformers, whose attention could be chosen")
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, attention_function)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
    with implementation_set(configs, NAME), setting(_IMPLEMENTATION, implementation):
        yield
