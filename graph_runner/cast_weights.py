"""A model's weights in another dtype than the model's own: rollouts in bfloat16 of a model that is trained in float32.

``Engine(model, dtype=torch.bfloat16)`` computes what the model would with its parameters and persistent buffers in bfloat16,
as ``from_pretrained(..., dtype=torch.bfloat16)`` loads them. Buffers that are in no checkpoint stay as they are: rope's
frequencies, which ``model.to(torch.bfloat16)`` would round too. Only tensors whose dtype differs are copied: none of a model in
bfloat16, and of LoRA on such a model at most the adapters. The model is traced, and its graphs are captured, with the copies in
the places of its own tensors; after that it has those again, and steps get the copies (``PagedModel.stand_ins``).

The copies follow the model. When the engine gets work after it was idle, all are written again, whatever changed the weights;
while it is busy, before each step for which a version counter or an address of the originals has changed, or an optimizer
has stepped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.verify.quantized import holds_codes

_count = 0
_counting = False


class CastWeights:
    """Copies in ``dtype`` of a model's floating-point parameters and persistent buffers that have another one. ``stand_ins``:
    the copy of each tensor that has one, by the tensor's id. Raises UnsupportedAttention, with its name, for a weight that a
    cast would not convert faithfully."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self.stand_ins: dict[int, torch.Tensor] = {}
        # Of every parameter and buffer: the dictionary of its module, its name, itself and the name to show.
        self._places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, str]] = []
        self._originals: list[torch.Tensor] = []
        for where, module in model.named_modules():
            for holder in (module._parameters, module._buffers):
                for name, t in holder.items():
                    if t is None:
                        continue
                    self._places.append((holder, name, t, f"{where}.{name}" if where else name))
                    kept = holder is module._buffers and name in module._non_persistent_buffers_set
                    casts = not kept and (t.is_floating_point() or t.is_complex()) and t.dtype != dtype
                    if casts and id(t) not in self.stand_ins:
                        _check(t, self._places[-1][-1], dtype)
                        self.stand_ins[id(t)] = _like(t, dtype)
                        self._originals.append(t)
        self._copies = [self.stand_ins[id(t)] for t in self._originals]
        self._seen: list[Any] = []
        self._copy()

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return sum(c.numel() * c.element_size() for c in self._copies)

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

    def replaced(self) -> str | None:
        """A parameter or buffer that is another object now, as "name: replaced", or None. The copies follow in-place updates
        only."""
        for holder, name, t, shown in self._places:
            if holder.get(name) is not t:
                return f"{shown}: replaced"
        return None

    def refresh(self, everything: bool) -> None:
        """Write the copies again. ``everything`` False: only if a change of the originals was counted."""
        if self._copies and (everything or self._seen != _versions(self._originals)):
            self._copy()

    def _copy(self) -> None:
        self._seen = _versions(self._originals)  # first: an update during the copy is seen at the next step
        if self._copies:
            with torch.inference_mode(False), torch.no_grad():
                torch._foreach_copy_(self._copies, [t.detach() for t in self._originals])


def _check(t: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    quantized = holds_codes(t) or type(t.data) is not torch.Tensor or t.dtype.itemsize < 2
    if quantized or t.is_complex() or t.is_meta:
        what = "quantized or distributed" if quantized else "complex" if t.is_complex() else "without memory (meta)"
        raise UnsupportedAttention(f"dtype={dtype} casts the weights, and {name} is {what} ({type(t).__name__}, {t.dtype}); "
                                   "leave dtype out, and the model is served as it is")


def _like(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty_like(t.data, dtype=dtype)
    return torch.nn.Parameter(made, requires_grad=t.requires_grad) if isinstance(t, torch.nn.Parameter) else made


def _versions(tensors: list[torch.Tensor]) -> list[Any]:
    return [optimizer_steps(), *((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)]


def optimizer_steps() -> int:
    """Steps of all optimizers of the process since this was first called. Those with ``fused=True``, and others with kernels of
    their own, change parameters without increasing the version counters that PyTorch has for in-place changes."""
    global _counting
    if not _counting:
        _counting = True
        register_optimizer_step_post_hook(_stepped)
    return _count


def _stepped(*_: Any) -> None:
    global _count
    _count += 1
