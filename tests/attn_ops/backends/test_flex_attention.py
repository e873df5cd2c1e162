"""FlexAttention through the kit; that batches compile nothing anew."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from quire.attn_ops.backends.flex_attention import block_mask
from quire.attn_ops.conformance.batches import check
from quire.attn_ops.conformance.checks import DECODE, MIXED, Kit
from quire.attn_ops.registry import get_backend
from tests.attn_ops.cases import pass_kit

BACKEND = get_backend("flex_attention")


@pytest.mark.parametrize(("only", "dtype"), [
    ("mixed batch", torch.float32), ("KV cache int8", torch.float32),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("", torch.float32), ("opcheck", torch.float32), ("", torch.bfloat16)))], ids=str)
def test_the_kit(only: str, dtype: torch.dtype) -> None:
    pass_kit(BACKEND, only, dtype=dtype)


def test_batches_of_other_shapes_compile_nothing() -> None:
    kit = Kit(BACKEND, torch.device("cpu"), torch.float32)
    for rows in (DECODE, MIXED, [(1, 40)] * 3, [(9, 40), (2, 7)], [(1, 1500)] * 2, [(64, 1300), (1, 5)],
                 [(150, 200)] * 2):
        check(BACKEND, kit.batch(rows))
    before = counters["stats"]["unique_graphs"]
    for rows in ([(1, 30)] * 7, [(5, 11), (4, 400), (1, 3)], [(1, 2000), (1, 9)], [(60, 1800), (1, 5), (20, 20)],
                 [(1, 40)] * 30, [(200, 300)] * 2):
        check(BACKEND, kit.batch(rows))
    assert counters["stats"]["unique_graphs"] == before


def test_the_block_mask_has_just_the_blocks_that_are_seen() -> None:
    first = torch.tensor([[0, 130, 400, 0]]).repeat_interleave(128, 1)
    last = torch.tensor([[127, 300, 400, -1]]).repeat_interleave(128, 1)
    mask = block_mask(first, last, 512, lambda b, h, i, j: j >= 0)
    assert mask.kv_num_blocks.tolist() == [[[1, 2, 1, 0]]]
    assert [row[:n] for row, n in zip(mask.kv_indices[0, 0].tolist(), (1, 2, 1, 0), strict=True)] == [[0], [1, 2], [3], []]
