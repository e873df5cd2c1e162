"""A model's weights in another dtype than the model's own: rollouts in bfloat16 of a model that is trained in float32.

``Engine(model, dtype=torch.bfloat16)`` computes what the model would with its parameters and persistent buffers in bfloat16,
as ``from_pretrained(..., dtype=torch.bfloat16)`` loads them. Buffers that are in no checkpoint stay as they are: rope's
frequencies, which ``model.to(torch.bfloat16)`` would round too. So do weights that transformers keeps in float32
(``_keep_in_fp32_modules_strict``), such as the biases that choose experts. Only tensors whose dtype differs are copied: none
of a model in bfloat16, and of LoRA on such a model at most the adapters. The model is traced, and its graphs are captured, with
the copies in the places of its own tensors; after that it has those again, and steps get the copies
(``PagedModel.stand_ins``), which follow the model (``graph_runner/copies.py``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.graph_runner.copies import Copies
from quire.graph_runner.model_parts import Apart, named_parts
from quire.passes.verify.quantized import holds_codes


class CastWeights:
    """Copies in ``dtype`` of a model's floating-point parameters and persistent buffers that have another one. ``stand_ins``:
    the copy of each tensor that has one, by the tensor's id; ``copies`` lets them follow. Raises UnsupportedAttention, with its
    name, for a weight that a cast would not convert faithfully."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self.stand_ins: dict[int, torch.Tensor] = {}
        # Of every parameter and buffer: the dictionary of its module, its name, itself and the name to show.
        self._places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, str]] = []
        originals: list[torch.Tensor] = []
        in_float32 = _kept_in_float32(model, dtype)
        for where, module in model.named_modules():
            for holder in (module._parameters, module._buffers):
                for name, t in holder.items():
                    if t is None:
                        continue
                    self._places.append((holder, name, t, f"{where}.{name}" if where else name))
                    kept = id(t) in in_float32 or (holder is module._buffers and name in module._non_persistent_buffers_set)
                    casts = not kept and (t.is_floating_point() or t.is_complex()) and t.dtype != dtype
                    if casts and id(t) not in self.stand_ins:
                        _check(t, self._places[-1][-1], dtype)
                        self.stand_ins[id(t)] = _like(t, dtype)
                        originals.append(t)
        self.copies = Copies(originals, [self.stand_ins[id(t)] for t in originals])

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While inside, the model has the copies in the places of its own tensors."""
        changed = [place for place in self._places if id(place[2]) in self.stand_ins]
        for holder, name, original, _ in changed:
            holder[name] = self.stand_ins[id(original)]
        try:
            yield
        finally:
            for holder, name, original, _ in changed:
                holder[name] = original

    def leave_out(self, model: torch.nn.Module, apart: Apart) -> None:
        """Forget the tensors in parts of the model that the trace has not read."""
        kept = {id(holder) for _, module in named_parts(model, apart) for holder in (module._parameters, module._buffers)}
        self._places = [place for place in self._places if id(place[0]) in kept]
        originals = list({id(t): t for _, _, t, _ in self._places if id(t) in self.stand_ins}.values())
        self.stand_ins = {id(t): self.stand_ins[id(t)] for t in originals}
        self.copies = Copies(originals, list(self.stand_ins.values()))

    def replaced(self) -> str | None:
        """A parameter or buffer that is another object now, as "name: replaced", or None. The copies follow in-place updates
        only."""
        return next((f"{shown}: replaced" for holder, name, t, shown in self._places if holder.get(name) is not t), None)


def _kept_in_float32(model: torch.nn.Module, dtype: torch.dtype) -> set[int]:
    """The ids of the tensors that ``from_pretrained(..., dtype=dtype)`` loads in float32: transformers finds them by name."""
    found: set[int] = set()
    for whole in model.modules():
        plan: dict[str, torch.dtype] = getattr(whole, "_get_dtype_plan", lambda dtype: {})(dtype)
        if plan:
            names = re.compile("|".join(f"(?:{name.replace('*', '.*')})" for name in plan))
            found.update(id(t) for name, t in (*whole.named_parameters(), *whole.named_buffers()) if names.search(name))
    return found


def _check(t: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    quantized = holds_codes(t) or type(t.data) is not torch.Tensor or t.dtype.itemsize < 2
    if quantized or t.is_complex() or t.is_meta:
        what = "quantized or distributed" if quantized else "complex" if t.is_complex() else "without memory (meta)"
        raise UnsupportedAttention(f"dtype={dtype} casts the weights, and {name} is {what} ({type(t).__name__}, {t.dtype}); "
                                   "leave dtype out, and the model is served as it is")


def _like(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty_like(t.data, dtype=dtype)
    made = torch.nn.Parameter(made, requires_grad=t.requires_grad) if isinstance(t, torch.nn.Parameter) else made
    # A forward may read attributes that its author gave a tensor.
    made.__dict__.update((name, held) for name, held in t.__dict__.items() if not name.startswith("_dynamo"))
    return made
