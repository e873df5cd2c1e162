"""Positions on the device: the kernel, the definition and a loop agree bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attn_ops.ops.positions import clamp_position, compute_position, compute_position_torch, compute_position_triton

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=6), st.sampled_from([torch.int32, torch.int64]))
def test_positions(rows, dtype) -> None:
    prefix, lens = (torch.tensor([row[i] for row in rows], dtype=dtype, device=DEVICE) for i in (0, 1))
    total = int(lens.sum())
    want = [p + i for p, n in rows for i in range(n)]
    starts = [sum(n for _, n in rows[:i]) for i in range(len(rows))]
    for function in (compute_position_torch, compute_position_triton, compute_position):
        positions, start = function(prefix, lens, total)
        assert (positions.tolist(), start.tolist()) == (want, starts)
        assert (positions.dtype, start.dtype) == (torch.int64, torch.int32)


def test_long_sequences_and_many() -> None:
    """More tokens than a block of the kernel, and more sequences."""
    for lens in ([1300, 5], [1] * 600 + [3]):
        lens = torch.tensor(lens, device=DEVICE)
        prefix = torch.arange(len(lens), device=DEVICE)
        total = int(lens.sum())
        a, b = compute_position_torch(prefix, lens, total), compute_position_triton(prefix, lens, total)
        assert all(map(torch.equal, a, b))


def test_the_op_is_sound() -> None:
    torch.library.opcheck(compute_position, (torch.tensor([4, 0]), torch.tensor([2, 3]), 5))
    assert clamp_position(torch.tensor([5, 1, 0], dtype=torch.int32)).tolist() == [4, 0, 0]
