"""Programs that wait for others of their launch: why that ends, NOTE [First products in the same launch] in lora.py says."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_count(counter, programs):
    """Until so many programs have counted that their results are stored."""
    stored = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while stored < programs:
        stored = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
