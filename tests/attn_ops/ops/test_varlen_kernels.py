"""The Triton kernels of merge_state(s) and varlen attention in Triton's interpreter, through the kit for ops; and bad input."""

from __future__ import annotations

import math

import pytest
import torch

import quire
from quire.attn_ops.conformance import ops
from quire.attn_ops.ops import merge_state, varlen

pytest.importorskip("triton")


@pytest.fixture(params=[torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def kit(request, monkeypatch) -> ops.OpKit:
    """The kit with the kernels' launchers in the place of the ops, which run eager code on a CPU."""
    monkeypatch.setattr(ops, "varlen_attention", varlen.varlen_attention_cuda)
    monkeypatch.setattr(ops, "merge_state", merge_state.merge_state_triton)
    monkeypatch.setattr(ops, "merge_states", merge_state.merge_states_triton)
    return ops.OpKit(torch.device("cpu"), request.param)


@pytest.fixture(params=[False, True], ids=["one row", "several rows"])
def rows(request, monkeypatch) -> None:
    """Pairs of token and head that a program of the merge has, as for few and for many of them."""
    if request.param:
        monkeypatch.setattr(merge_state, "MANY_ROWS", 1)


def test_padding_and_merging(kit: ops.OpKit, rows: None) -> None:
    kit.merge_two()
    kit.merge_many()
    kit.merge_empty()
    kit.varlen_padding()
    kit.varlen_merges()
    out, lse = torch.ones(2, 3, 1, 4), torch.zeros(2, 3, 1)
    lse[0, 1] = float("nan")
    merged, total = ops.merge_states(out, lse)
    assert merged[0].isnan().all() and total[0].isnan().all() and merged[1].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"window": 7}, {"window": 7, "causal": True}, {"softcap": 4.0}], ids=str)
def test_ragged_sequences(kit: ops.OpKit, options) -> None:
    for lens, dims in zip(ops.ENCODERS, ((32, 32), (24, 40)), strict=True):
        kit.check_varlen(kit.inputs(*lens, dims=dims), **options)


@pytest.mark.parametrize("states", [1, 3, 32, 33, 70])
def test_many_states(states: int, rows: None) -> None:
    """More than are loaded at a time, some of them empty, into another dtype."""
    generator = torch.Generator().manual_seed(states)
    out, lse = torch.randn(2, states, 3, 20, generator=generator), 3 * torch.randn(2, states, 3, generator=generator)
    empty = torch.rand(lse.shape, generator=generator) < 0.3
    empty[0, :, 0], empty[1, 0] = True, False
    out[empty], lse[empty] = float("nan"), float("-inf")
    lse[1, states // 2, 0] += 50.0
    wanted = merge_state.merge_states_eager(out, lse)
    for dtype, error in ((None, 1e-6), (torch.float16, 2e-3)):  # rounding of at most 4
        merged, total = merge_state.merge_states_triton(out, lse, dtype)
        assert merged.dtype == (dtype or torch.float32)
        torch.testing.assert_close(merged.float(), wanted[0], atol=error, rtol=1e-5)
        torch.testing.assert_close(total, wanted[1], atol=1e-5, rtol=1e-6)


def test_binary_logarithms_into_given_memory(rows: None) -> None:
    """As FlashInfer's kernels give them: a prompt's own keys and its prefix are merged without a copy."""
    generator = torch.Generator().manual_seed(0)
    out, lse = torch.randn(2, 7, 3, 20, generator=generator), 3 * torch.randn(2, 7, 3, generator=generator)
    out[1, 2], lse[1, 2], lse[:, 3] = float("nan"), float("-inf"), float("-inf")
    wanted = merge_state.merge_state_eager(out[0], lse[0], out[1], lse[1])
    held = torch.full((7, 3, 20), float("nan"))
    binary = lse / math.log(2)
    merged, total = merge_state.merge_state_triton(out[0], binary[0], out[1], binary[1], merged=held, binary=True)
    assert merged is held
    torch.testing.assert_close(merged, wanted[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(total * math.log(2), wanted[1], atol=1e-5, rtol=1e-6)
    for wrong in (held[1:], held.half(), held.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(ValueError, match="the merged output is contiguous and like the states"):
            merge_state.merge_state_triton(out[0], binary[0], out[1], binary[1], merged=wrong)


@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_a_state_with_a_broken_key_is_not_lost_when_merged(bad: float) -> None:
    """It has keys: the queries that see it have no result, whatever their other states are."""
    cu = torch.tensor([0, 20, 30], dtype=torch.int32)
    q, k, v = (torch.rand(30, heads, 16, generator=torch.Generator().manual_seed(0)) for heads in (4, 2, 2))
    k[[7, 20], 1] = bad
    broken = torch.zeros(30, 4, dtype=torch.bool)
    broken[7:, 2:] = True
    for attend in (varlen.varlen_attention_eager, varlen.varlen_attention_cuda):
        out, lse = attend(q, k, v, cu, cu, scale=0.25, causal=True)
        assert torch.equal(lse.isnan(), broken) and lse[~broken].isfinite().all()
        for merge in (merge_state.merge_state_eager, merge_state.merge_state_triton):
            merged = merge(torch.zeros_like(out), torch.zeros_like(lse), out, lse)[0]
            assert torch.equal(merged.isnan().all(-1), broken) and merged[~broken].isfinite().all()


def test_backends_by_name(kit: ops.OpKit, monkeypatch) -> None:
    """implementation="triton" is the op's own kernel, also where the op would not choose it."""
    monkeypatch.undo()
    kit.check_varlen(kit.inputs([3, 0, 9], [5, 2, 9], dims=(16, 16)), "triton")


def test_bad_input() -> None:
    x, lse, cu = torch.randn(3, 4, 8), torch.randn(3, 4), torch.tensor([0, 3], dtype=torch.int32)
    for arguments, message in (((x, lse.double()), "float32 lse"), ((x, lse[:2]), "float32 lse")):
        with pytest.raises(ValueError, match=message):
            quire.merge_state(*arguments, *arguments)
    with pytest.raises(ValueError, match="same shape and dtype"):
        quire.merge_state(x, lse, x[..., :4], lse)
    with pytest.raises(ValueError, match=r"\(T, S, H, D\)"):
        quire.merge_states(x, lse)
    for options, message in ((dict(window=0), "window must be positive"), (dict(softcap=-1.0), "softcap must be positive"),
                             (dict(implementation="fast"), "one of auto, eager, sdpa, kernel, .*; got 'fast'"),
                                 (dict(implementation="kernel"), "runs on a GPU, and q is on cpu"),
                             (dict(implementation="sdpa", softcap=2.0), "has no softcap")):
        with pytest.raises(ValueError, match=message):
            quire.varlen_attention(x, x, x, cu, cu, scale=1.0, **options)
    with pytest.raises(ValueError, match="H a multiple of Hkv"):
        quire.varlen_attention(x, x[:, :3], x[:, :3], cu, cu, scale=1.0)
    with pytest.raises(ValueError, match=r"cu_seqlens_k \(B \+ 1,\)"):
        quire.varlen_attention(x, x, x, cu, cu[:1], scale=1.0)
