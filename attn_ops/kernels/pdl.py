"""Programmatic dependent launch: a kernel is set up while the one before it drains, and waits before it reads its results.

In a decode step some two hundred kernels of 3 to 60 microseconds follow each other; between two of them the GPU idles while
the last programs of one finish and the first of the next are set up. A kernel launched with ``launch_pdl`` is set up early, as
soon as every program of its predecessor has called ``let_next_start`` or ended; ``wait_for_previous`` then blocks until the
predecessor has completed and its writes are visible. (PTX ISA, "griddepcontrol"; compute capability 9.0 and up.)

Programs that are set up and wait hold registers and shared memory that programs of the kernel before could use. So
``let_next_start`` stands behind a kernel's loop, and steps of several tokens, whose kernels fill the GPU, do without
(docs/performance.md has the times).

NOTE [Everyone waits]: every program of a kernel launched so must call ``wait_for_previous``, before it reads or writes anything
that another kernel touches and before it returns early: the kernel after it trusts that this one's end means that all before
it have ended too.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

#: Most tokens of a step whose kernels are launched so. See above.
MAX_TOKENS = 1


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may be set up from here on."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Block until the kernel before has completed. See NOTE [Everyone waits]."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def use_pdl(device: torch.device, tokens: int) -> bool:
    """Launch the kernels of a step of so many tokens so? With QUIRE_PDL=1 any number of tokens, with QUIRE_PDL=0 none."""
    said = _environment()
    return (tokens <= MAX_TOKENS if said is None else said) and _possible(device)


@functools.cache
def _environment() -> bool | None:
    return {"0": False, "1": True}.get(os.environ.get("QUIRE_PDL", ""))


@functools.cache
def _possible(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(pdl: bool) -> dict[str, bool]:
    """Keyword arguments of the launch (the interpreter knows no ``launch_pdl``)."""
    return {"launch_pdl": True} if pdl else {}


__all__ = ["launch_options", "let_next_start", "use_pdl", "wait_for_previous"]
