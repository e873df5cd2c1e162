"""Programmatic dependent launch (PDL): a kernel is set up while the one before it drains, and waits before reading its results.

In a decode step some two hundred kernels of 3 to 60 microseconds follow each other; between two of them the GPU idles while
one's last programs finish and the next's first programs are set up. A kernel launched with PDL is set up as soon as every
program of its predecessor has called ``let_next_start`` or ended; ``wait_for_previous`` then blocks until the predecessor has
completed and its writes are visible. (PTX ISA, "griddepcontrol"; compute capability 9.0 and up.) Waiting programs hold
registers and shared memory: so ``let_next_start`` comes after a kernel's loop, and steps of several tokens, whose kernels fill
the GPU, use PDL in pairs only (``host.use_pdl``; times: docs/performance.md).

NOTE [Reads before the wait]: a kernel may read something before it waits, if the kernel before does not write it, and waits
itself before it lets the next one start: then all that came earlier has completed. ``vector_kernel``,
``tile_kernel``, ``rows_shrink_kernel`` and ``rows_shrink_all_kernel`` do, before the kernels that read adapters' B so.

NOTE [Everyone waits]: every program of a kernel launched with PDL must call ``wait_for_previous``, before it reads or writes
anything that another kernel touches and before it returns early: the next kernel relies on this one's end implying that all
before it have ended.

NOTE [Pairs]: where one op launches two kernels of which one is short (a norm and its product, a product and the sum of its
parts), the second is launched with PDL for any number of tokens, and the first lets it start though it is not launched so
itself (``launch``'s ``dependent``): waiting for the kernel before, which has ended then, returns at once. The programs of the
short one leave room for those of the long one.
"""

from __future__ import annotations

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
