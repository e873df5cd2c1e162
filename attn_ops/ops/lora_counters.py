"""Counters of launches in which some programs wait for others: ``torch.ops.quire.lora_counters``. See NOTE [First products in
the same launch] in attn_ops/kernels/lora.py."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from quire.attn_ops.kernels.launch import is_recording
from quire.attn_ops.library import define_op

#: Counters per forward; and, by the address of a result of ``lora_counters`` that is alive, how many are taken. Each launch has
#: its own, from a multiple of 16 bytes on: kernels are compiled for pointers to such.
COUNTERS, LINE = 16384, 4
_taken: dict[int, int] = {}


def lora_counters_eager(like: Tensor) -> Tensor:
    """Int32 zeros on the device of ``like``: the ``counters`` of all the layers of a forward, made once."""
    made = torch.zeros(COUNTERS, dtype=torch.int32, device=like.device)
    address = made.data_ptr()
    _taken[address] = 0
    weakref.finalize(made, _taken.pop, address, None)
    return made


def next_counters(x: Tensor, counters: Tensor | None, count: int) -> Tensor:
    """The next ``count`` counters of a forward; new ones where it has too few left."""
    if counters is not None and is_recording():
        return counters
    address = 0 if counters is None else counters.data_ptr()
    number = _taken.get(address, COUNTERS)
    if counters is None or number + count > COUNTERS:
        return torch.zeros(count, dtype=torch.int32, device=x.device)
    _taken[address] = number + -(-count // LINE) * LINE
    return counters[number:]


lora_counters = define_op(
    "lora_counters(Tensor like) -> Tensor", cpu=lora_counters_eager, cuda=lora_counters_eager,
    fake=lambda like: like.new_empty(COUNTERS, dtype=torch.int32))
