"""Asynchronous matrix products of compute capability 9.0 whose left operand is in registers.

``wgmma.mma_async`` reads its registers until a ``wgmma.wait_group`` says that it is done; writing them before is undefined (PTX
ISA, "wgmma.mma_async"). Triton (3.6, 3.7) lets products of one iteration of a loop run on into the next, which writes the
registers of an operand that is converted there, such as codes to bf16. Depending on how long the products take, results are
right or off by anything (``h200_small_linear_wide_racing.json``). So a loop over products of converted operands ends with
``wait_for_products``; the barrier before the next tile is read from shared memory keeps conversions behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from quire.attn_ops.kernels.kv_quant import NO_ASSEMBLY


@triton.jit
def wait_for_products():
    """Block until the products that this warp group has started are done, on GPUs that have such products."""
    if not NO_ASSEMBLY:
        if cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0):
            tl.inline_asm_elementwise("wgmma.wait_group.sync.aligned 0; mov.b32 $0, 0;", "=r", [], tl.int32, False, 1)


__all__ = ["wait_for_products"]
