"""MLA prefill on expanded keys: used where it takes fewer products, in any number of chunks, and never in a CUDA graph's step,
whose prefixes grow after the capture."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.attn_ops import mla_prefill
from quire.attn_ops.attention import Latent
from quire.attn_ops.backends import torch_native
from quire.attn_ops.conformance.batches import Failure, check, compare, planned, prepared, run
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.conformance.mla import MlaKit
from quire.attn_ops.kernels.launch import recording
from quire.attn_ops.metadata import CommonAttentionMetadata
from quire.attn_ops.metadata.prefix_chunks import PrefixChunks, get_prefix_chunk_seq_lens
from tests.attn_ops.cases import run_check

KIT = MlaKit(Kit(torch_native.BACKEND, torch.device("cpu"), torch.float32))
ROWS = ((1, 20), (0, 5), (60, 60), (70, 130), (1, 9))
LITE = dict(rank=512, rope=64, nope=128, dim_v=128)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of expanded attention was causal."""
    seen: list[bool] = []
    state = mla_prefill._state

    def noted(*args, causal):
        seen.append(causal)
        return state(*args, causal=causal)

    monkeypatch.setattr(mla_prefill, "_state", noted)
    return seen


def test_rule() -> None:
    """DeepSeek-V2-Lite: 171 query tokens with a long prefix, twice as many without one; a decode never."""
    cases = ((1, 10**5, False), (170, 10**6, False), (180, 10**6, True), (330, 0, False), (350, 0, True))
    for queries, prefix, expected in cases:
        found = mla_prefill.expanding_pays(np.array([queries]), np.array([queries + prefix]), **LITE)
        assert found.tolist() == [expected], (queries, prefix)
    wide = dict(rank=16, rope=8, nope=16, dim_v=24)  # expanded keys are wider than latent ones
    assert not mla_prefill.expanding_pays(np.array([10**4]), np.array([10**4]), **wide).any()


@pytest.mark.parametrize("elements, chunks", [(1, 130), (2 * 40 * 4 * 88, 3), (1 << 26, 1)])
def test_chunks(elements: int, chunks: int, states: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_prefill, "CHUNK_ELEMENTS", elements)
    check(KIT.backend, KIT.batch(ROWS, latent=Latent(256, 32), pad=(2, 1)))
    assert states[0] and not any(states[1:]) and len(states) >= min(chunks, 3)


def test_steps_of_a_graph_stay_absorbed(states: list[bool]) -> None:
    batch = KIT.batch(ROWS, latent=Latent(256, 32))
    compare(run(KIT.backend, batch, graph_key="a graph"), batch)
    assert not states
    check(KIT.backend, KIT.batch(((1, 20), (3, 30)), latent=Latent(256, 32)))
    assert not states


def test_a_decode_may_read_pages_that_a_prefill_fills_in_the_same_step(states: list[bool]) -> None:
    """So all tokens are stored before any is attended to, whichever form they take."""
    batch = KIT.batch(((60, 60), (1, 57)), latent=Latent(256, 32), page_size=4)
    table = batch.metadata.block_table_tensor
    table[1, :14] = table[0, :14]
    alone = CommonAttentionMetadata.build([1], [57], table[1:2], page_size=4)
    order = CommonAttentionMetadata.build([1, 60], [57, 60], table.flip(0), page_size=4)
    flip = torch.arange(-1, 60) % 61  # the decode's token to the front
    batch.metadata, batch.q, batch.new_k = order, batch.q[flip], batch.new_k[flip]
    out = run(KIT.backend, batch)[:1]
    assert states
    batch.metadata, batch.q, batch.new_k = alone, batch.q[:1], batch.new_k[:1]
    torch.testing.assert_close(run(KIT.backend, batch), out)  # now that the pages are there


def test_the_kit_sees_a_prefix_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixChunks, "num_chunks", property(lambda self: 0))
    with pytest.raises(Failure, match="wrong"):
        run_check(KIT, "MLA: long prefills")


def test_kernels_of_both_forms_are_compiled_ahead(states: list[bool]) -> None:
    batch = KIT.batch(((3, 9), (1, 4)), latent=Latent(256, 32))
    with recording(), planned(KIT.backend, batch):
        KIT.backend.op(*batch.arguments(prepared(KIT.backend, batch)), **batch.options)
    assert set(states) == {True, False}


def test_chunks_on_the_device_are_those_of_the_host() -> None:
    prefix = [0, 5, 130]
    one, other = (PrefixChunks.build(prefix, capacity=60, on_device=x) for x in (None, torch.tensor(prefix)))
    starts, lens = map(torch.from_numpy, get_prefix_chunk_seq_lens(np.array(prefix), one.num_chunks, one.chunk_len))
    expected = {"starts": starts, "seq_lens": lens, "cu_seq_lens": torch.nn.functional.pad(lens.cumsum(1).int(), (1, 0))}
    for chunks in (one, other):
        for name, tensor in expected.items():
            assert torch.equal(getattr(chunks, name), tensor) and getattr(chunks, name).dtype == torch.int32
        assert chunks.lens.tolist() == lens.tolist()
