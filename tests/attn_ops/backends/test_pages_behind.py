"""Pages that a window or chunk has left behind: the engine gives them to others, and the table has the null page there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quire.attn_ops.metadata import NULL_PAGE
from quire.attn_ops.registry import get_backend
from quire.graph_runner.window_pages import Reach
from tests.attn_ops.cases import make_case, run_case

BATCHES = {"decode": ([1, 1, 1, 1], [45, 8, 17, 30]), "extend": ([3, 9, 1, 20], [45, 9, 17, 30])}


@pytest.mark.parametrize("kv_dtype", [None, pytest.param(torch.int8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("features", [
    dict(window=9), dict(chunk=16), dict(window=7, chunk=16, softcap=3.0)], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["torch_native", "triton"])
def test_no_bit_depends_on_them(name, batch, features, kv_dtype) -> None:
    """With NaN in the pages that are not in the table any more (no number is read, not even times zero), and in the null page
    of a backend that visits no key outside."""
    queries, seqs = BATCHES[batch]
    options = dict(num_heads=4, num_kv_heads=2, head_dim=16, page_size=4, kv_dtype=kv_dtype, **features)
    backend = get_backend(name)
    full = run_case(backend, make_case(queries, seqs, **options))
    made = make_case(queries, seqs, **options)
    reach = Reach.of([SimpleNamespace(window=features.get("window"), chunk=features.get("chunk"))])
    table, freed = made.metadata.block_table_tensor, []
    for row, (query, seq) in enumerate(zip(queries, seqs, strict=True)):
        behind = reach.first_needed(seq - query) // 4
        freed += table[row, :behind].tolist()
        table[row, :behind] = NULL_PAGE
    assert freed
    for tensor in made.held.values():
        if tensor.is_floating_point():
            tensor[freed] = float("nan")
            tensor[NULL_PAGE] = float("nan") if name == "triton" else 0
    assert torch.equal(run_case(backend, made), full)
