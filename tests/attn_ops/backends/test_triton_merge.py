"""Partial results of a context that is cut into parts become one: both ways of merging, for any number of parts."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")  # tests/conftest.py has set TRITON_INTERPRET by now, where there is no GPU

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(triton.language.sum, triton.runtime.JITFunction):
    pytest.skip("triton was imported before TRITON_INTERPRET=1 could be set: set it outside, or run this file alone",
                allow_module_level=True)
import triton.language as tl  # noqa: E402

from quire.attn_ops.backends.triton.common import merge_partials  # noqa: E402

ROWS, DIM, SLOT, FIRST = 3, 24, 2, 5  # heads and numbers that are no powers of two; parts before those of the slot


@triton.jit
def merge(out, partial, lse, first, stride, active, ROWS: tl.constexpr, ROWS_P2: tl.constexpr, DIM: tl.constexpr,
          DIM_P2: tl.constexpr, STEP: tl.constexpr):
    merged = merge_partials(partial, lse, tl.cast(first, tl.int64), stride, active, ROWS, ROWS_P2, DIM, DIM_P2, STEP)
    rows, columns = tl.arange(0, ROWS_P2), tl.arange(0, DIM_P2)
    tl.store(out + rows[:, None] * DIM + columns[None, :], merged, mask=(rows < ROWS)[:, None] & (columns < DIM)[None, :])


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("active", [1, 2, 7, 31, 32, 33, 64, 70])
def test_parts_are_weighed_by_their_sums(step: int, active: int) -> None:
    """Also where they lie ``stride`` apart among those of other slots, which must not be read, and where one part outweighs
    the others by more than float32 could hold as a sum."""
    generator = torch.Generator().manual_seed(active)
    parts = torch.full((FIRST + active * SLOT + 40, ROWS, DIM), float("nan"))
    lse = torch.full(parts.shape[:2], float("nan"))
    mine = FIRST + SLOT * torch.arange(active)
    parts[mine] = torch.randn(active, ROWS, DIM, generator=generator)
    lse[mine] = torch.randn(active, ROWS, generator=generator) * 3
    lse[mine[active // 2], 1] = 300.0
    weights = torch.softmax(lse[mine].double() * torch.log(torch.tensor(2.0, dtype=torch.float64)), 0)
    expected = (parts[mine].double() * weights[..., None]).sum(0)
    out = torch.full((ROWS, DIM), float("nan"), device=DEVICE)
    merge[(1,)](out, parts.to(DEVICE), lse.to(DEVICE), FIRST, SLOT, active, ROWS, 4, DIM, 32, step)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-6, atol=1e-6)  # sums of float32
