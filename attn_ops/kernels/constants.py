"""Functions of constants that kernels call while they are compiled."""

from __future__ import annotations

import triton

from quire.attn_ops.kernels import host

next_power_of_2 = triton.constexpr_function(host.next_power_of_2)
