"""Programmatic dependent launch: a kernel is set up while the one before it drains, and waits before it reads its results.

In a decode step some two hundred kernels of 3 to 60 microseconds follow each other; between two of them the GPU idles while
the last programs of one finish and the first of the next are set up. A kernel launched with ``launch_pdl`` is set up early, as
soon as every program of its predecessor has called ``let_next_start`` or ended; ``wait_for_previous`` then blocks until the
predecessor has completed and its writes are visible. (PTX ISA, "griddepcontrol"; compute capability 9.0 and up.)

NOTE [Everyone waits]: every program of a kernel launched so must call ``wait_for_previous``, before it reads or writes anything
that another kernel touches and before it returns early: the kernel after it trusts that this one's end means that all before
it have ended too. Only constants, such as weights, may be fetched before.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl


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


@triton.jit
def fetch(pointers, PDL: tl.constexpr):
    """Ask for the cache lines at ``pointers`` (constants only) without waiting for them."""
    if PDL:
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32,
                                  is_pure=False, pack=1)


@functools.cache
def use_pdl(device: torch.device) -> bool:
    """Launch so on ``device``? QUIRE_PDL=1 turns it on where the GPU can."""
    return (os.environ.get("QUIRE_PDL", "0") == "1" and device.type == "cuda"
            and torch.cuda.get_device_capability(device) >= (9, 0))


def launch_options(pdl: bool) -> dict[str, bool]:
    """Keyword arguments of the launch (the interpreter knows no ``launch_pdl``)."""
    return {"launch_pdl": True} if pdl else {}


__all__ = ["fetch", "launch_options", "let_next_start", "use_pdl", "wait_for_previous"]
