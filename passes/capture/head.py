"""Refuses transformers models without a language-model head: their logits are not over tokens."""

from __future__ import annotations

import re
from typing import Any

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.verify.sites import text_config

#: Classes of checkpoints without the weights of a language-model head. ``GPT2LMHeadModel`` has them.
_HEADLESS = re.compile(r".*(For(Token|Sequence)Classification|ForQuestionAnswering|ForMultipleChoice|RewardModel"
                       r"|(?<!Head)(?<!Heads)Model)")


def check_checkpoint(model: torch.nn.Module) -> None:
    """Raises UnsupportedAttention for a model loaded from a checkpoint of another kind: its head has random weights."""
    config: Any = getattr(model, "config", None)
    names = getattr(config, "architectures", None) or []
    loaded = bool(getattr(config, "_name_or_path", "")) and not getattr(config, "tie_word_embeddings", False)
    if loaded and names and type(model).__name__ not in names and all(map(_HEADLESS.fullmatch, names)):
        raise UnsupportedAttention(f"the checkpoint {config._name_or_path} is of {', '.join(names)}, without the weights of a "
                                   f"language-model head: that of this {type(model).__name__} is random.")


def check_logits(model: torch.nn.Module, width: int) -> None:
    """Raises UnsupportedAttention for a transformers model whose logits, ``width`` per token, are not over its vocabulary."""
    head, embedding = (getattr(model, name, lambda: None)() for name in ("get_output_embeddings", "get_input_embeddings"))
    rows = getattr(getattr(embedding, "weight", None), "shape", [None])[0]
    if rows is None and (config := getattr(model, "config", None)) is not None:  # a module of the user's around a model
        rows = getattr(text_config(config), "vocab_size", None)
    if getattr(model, "config", None) is not None and head is None and rows is not None and width != rows:
        raise UnsupportedAttention(f"{type(model).__name__} has no language-model head: it gives {width} logits per token, and "
                                   f"its vocabulary has {rows} tokens.")
    if rows is not None and width > rows:
        raise UnsupportedAttention(f"{type(model).__name__} gives {width} logits per token, and its embedding has {rows} rows: "
                                   f"a token of {rows} or more could be sampled, and not be read. Make the two equal: "
                                   "model.resize_token_embeddings(n).")
