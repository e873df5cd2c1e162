"""Refuses models whose forward, or a hook of it, changes Python objects: a graph would not change them."""

from __future__ import annotations

import re

import torch

from quire.attn_ops.backend import UnsupportedAttention

# transformers sets a context variable in each forward and sets it back; rotary embeddings of some kinds update themselves and
# the rope parameters of their config for the length at hand (those whose frequencies come of it are refused by their config).
_OWN_CHANGES = re.compile(r"^G\['__import_transformers_|rotary|\.config\b")


def check_side_effects() -> None:
    """Called by a backend during the trace. Dynamo replays side effects in its own code, with the values of the trace; a
    captured CUDA graph does not. Torch 2.11 cannot tell.

    Raises:
        UnsupportedAttention: names the objects.
    """
    output = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output
    if not hasattr(output, "get_replayed_side_effect_source_refs"):
        return
    sources = [str(source) for source in output.get_replayed_side_effect_source_refs()]
    changed = [_readable(s) for s in sources if not _OWN_CHANGES.search(s)]
    if changed:
        raise UnsupportedAttention(
            f"the model's forward, or a hook of it, changes what outlives the call: {', '.join(changed[:5])}. It runs only "
            "when traced, so later changes would be lost; let it return what it makes, and remove hooks that record")


def _readable(source: str) -> str:
    """Dynamo's name of an object for users: ``L['self']._call._modules['layers']`` is ``model.layers``."""
    where, hook, _ = source.partition("._forward_")
    where = re.sub(r"\._modules\['(\w+)'\]", r".\1", re.sub(r"^L\['self'\]\._call\b", "model", where))
    where = re.sub(r"^G\['(\w+)'\]", r"\1", re.sub(r"^G\['__import_\w+'\]\.", "", where))
    return f"what a hook of {where} holds" if hook else where


__all__ = ["check_side_effects"]
