"""Refuses models whose forward, or a hook of it, changes Python objects: a graph would not change them."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.capture.reads import readable
from quire.passes.fx import translator

#: What transformers' rotary embeddings of some types set on themselves in each forward, behind a layer type or not. Those whose
#: frequencies follow from it are refused by their config.
_ROTARY = re.compile(r"(\w+_)?(long_inv_freq|original_inv_freq|inv_freq|max_seq_len_cached|attention_scaling)")
#: What their initialization sets in the rope parameters of their config.
_ROPE_KEYS = frozenset({"rope_type", "rope_theta", "factor", "attention_factor", "original_max_position_embeddings", "truncate",
                        "short_factor", "long_factor", "partial_rotary_factor", "beta_fast", "beta_slow", "mscale",
                        "mscale_all_dim", "low_freq_factor", "high_freq_factor"})

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_ABSENT = object()
_KEPT, _CHANGED = "quire_kept_tensors", "quire_changed_objects"
_LEFT_OVER = "the model's forward, or a hook of it, changes what outlives the call: "


def check_side_effects() -> list[str]:
    """Called by a backend during the trace. Dynamo replays side effects in its own code, with the values of the trace; a
    captured CUDA graph, or a graph from the disk, does not. Raises UnsupportedAttention, which names the objects.

    Returns:
        expressions of what may stay as it is because it has the value that the forward assigns: no guard is on it.
    """
    output = translator().output
    changed = [source for source, _ in _changed(output)]
    if changed:
        raise UnsupportedAttention(
            f"{_LEFT_OVER}{', '.join(changed[:5])}. It runs only "
            "when traced, so later changes would be lost; let it return what it makes, and remove hooks that record. If the "
            "first call only fills a cache, call the model once before")
    return [f"vars({source})[{name!r}]" for variable, stores in output.side_effects.store_attr_mutations.items()
            if (source := _name(variable)) and _holds_all(source, variable, output) for name in stores]


def note_changes(gm: torch.fx.GraphModule) -> None:
    """Called by a Dynamo backend with its graph: note what the forward changes, and where it stores tensors, call by call."""
    tx = translator()
    if tx is None:
        return
    output = tx.output
    found, changed = list[Any](), _changed(output)
    for source, variable in changed:
        places = {source: variable} | {f"{source}.{name}": stored for name, stored in
                                       output.side_effects.store_attr_mutations.get(variable, {}).items()}
        for place, stored in places.items():
            # By type: isinstance would make inputs of what the object held before.
            VariableTracker.visit(lambda v: found.append(place) if issubclass(type(v), TensorVariable) else None,  # noqa: B023
                                  stored)
    if found:
        gm.meta[_KEPT] = ", ".join(dict.fromkeys(found))
    if changed:
        gm.meta[_CHANGED] = ", ".join(source for source, _ in changed[:5])


def check_changes(gm: torch.fx.GraphModule) -> None:
    """Raises UnsupportedAttention, which names the objects, for a graph of which ``note_changes`` noted something."""
    if _KEPT in gm.meta:
        raise UnsupportedAttention(
            f"the model's forward stores tensors that it computes ({gm.meta[_KEPT]}), so what one step computes would reach "
            "the sequences of the next; let it return what it makes, or run without storing it. If the first call only fills a "
            "cache, call the model once before")
    if _CHANGED in gm.meta:
        raise UnsupportedAttention(
            f"{_LEFT_OVER}{gm.meta[_CHANGED]}. A step serves several sequences in one call and one sequence in several, so "
            "what counts or collects calls would have other values than alone; let the forward return what it makes")


def _changed(output: Any) -> list[tuple[str, Any]]:
    """(name for users, Dynamo's variable) of each object that the traced function changes."""
    written = {_name(var): var for var in output.side_effects.id_to_variable.values()}
    if hasattr(output, "get_replayed_side_effect_source_refs"):
        sources = [str(source) for source in output.get_replayed_side_effect_source_refs()]
    else:  # torch 2.11: as that method does
        sources = [_name(var) for var in output.side_effects._get_modified_vars()
                   if isinstance(var.mutation_type, (AttributeMutationExisting, ValueMutationExisting))]
    return [(readable(s), written.get(s)) for s in sources if not _is_harmless(s, written.get(s), output)]


def _name(variable: Any) -> str:
    try:
        name = getattr(getattr(variable, "source", None), "name", "")
        return name() if callable(name) else str(name)
    except NotImplementedError:  # of an object that Dynamo made
        return ""


def _is_harmless(source: str, variable: Any, output: Any) -> bool:
    """Whether transformers itself makes this change (context variables, rotary modules with their config), or it is none."""
    try:
        found = _resolve(source, output)
    except Exception:
        return False
    if _holds_all(source, variable, output):
        return True  # nothing changes: bitsandbytes 0.49 sets a dtype to what it is in each forward
    attributes = set(output.side_effects.store_attr_mutations.get(variable, {}))
    if _of_transformers(found) and type(found).__name__ == "CompileableContextVar":
        return attributes <= {"global_var", "compiling"}  # set in each forward, and reset at its end
    if isinstance(found, torch.nn.Module):
        return _of_transformers(found) and hasattr(found, "rope_type") and all(map(_ROTARY.fullmatch, attributes))
    if _of_transformers(found) and hasattr(found, "rope_parameters"):
        return bool(attributes) and attributes <= {"rope_parameters"}
    if type(found) is dict and ".rope_parameters" in source:
        owner = _resolve(source.rpartition(".rope_parameters")[0], output)
        keys = {key.vt.as_python_constant() for key in getattr(variable, "items", {})}
        return _of_transformers(owner) and keys <= _ROPE_KEYS | set(found)
    return False


def _holds_all(source: str, variable: Any, output: Any) -> bool:
    """Whether all that the trace does with an object is to store in its attributes the plain values that they hold."""
    stores = output.side_effects.store_attr_mutations.get(variable, {})
    if not stores or getattr(variable, "items", None):
        return False
    try:
        held = vars(_resolve(source, output))
        values = {name: stored.as_python_constant() for name, stored in stores.items() if stored.is_python_constant()}
        return len(values) == len(stores) and all(
            type(x) in _PLAIN and type(x) is type(held.get(name, _ABSENT)) and x == held[name] for name, x in values.items())
    except Exception:
        return False


def _resolve(source: str, output: Any) -> Any:
    """The object of a source, which is a Python expression over local and global variables and imported modules."""
    source = re.sub(r"^G\['__import_(\w+)'\]", lambda match: f"modules[{match[1].replace('_dot_', '.')!r}]", source)
    return eval(source, {"L": output.local_scope, "G": output.global_scope, "modules": sys.modules})


def _of_transformers(found: Any) -> bool:
    return type(found).__module__.startswith("transformers.")
