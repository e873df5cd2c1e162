"""Trees of drafts: the mask shows a draft its ancestors and nothing else, in the kernel too; else a verified draft would have
depended on one that was not taken."""

from __future__ import annotations

import math
import random

import pytest
import torch

from quire import AttentionSite, UnsupportedAttention
from quire.attn_ops.backends import torch_native
from quire.attn_ops.conformance.batches import Failure, compare_numbers, lay_out
from quire.attn_ops.conformance.checks import Kit
from quire.attn_ops.ops import tree
from quire.attn_ops.ops.tree import build_tree_mask, tree_attention, tree_attention_state, tree_positions
from tests.attn_ops.cases import make_backend, run_check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the kernel: in Triton's interpreter where there is no GPU
SITE = AttentionSite(layer=0, num_heads=4, num_kv_heads=2, head_dim=16, head_dim_v=16, dtype=torch.float32, scale=0.25)


def trees(rng: random.Random) -> list[list[int]]:
    """Parents by sequence, in any order."""
    found = []
    for _ in range(rng.randint(1, 4)):
        order = rng.sample(range(n := rng.randint(0, 9)), n)
        parents = [-1] * n
        for i, node in enumerate(order):
            parents[node] = rng.choice([-1, *order[:i]])
        found.append(parents)
    return found


def test_mask_and_positions() -> None:
    rng = random.Random(0)
    for _ in range(60):
        shapes, pad, width = trees(rng), rng.randint(0, 2), rng.randint(9, 12)
        start = torch.tensor([0, *map(len, shapes)]).cumsum(0).int()
        parents = torch.tensor([p for shape in shapes for p in shape] + [-1] * pad, dtype=torch.int32)
        mask = build_tree_mask(parents, start, width)
        wanted, depth = torch.zeros(len(parents), width, dtype=torch.bool), []
        for begin, shape in zip(start.tolist(), shapes, strict=False):
            for node in range(len(shape)):
                up = node
                while up >= 0:
                    wanted[begin + node, up] = True
                    up = shape[up]
                depth.append(int(wanted[begin + node].sum()) - 1)
        assert torch.equal(mask, wanted)
        lens = torch.tensor([len(shape) for shape in shapes])
        before = torch.tensor([rng.randint(0, 5) for _ in shapes])
        positions = tree_positions(mask, start, (before + lens).int())
        wanted_positions = [a + b for a, b in zip(before.repeat_interleave(lens).tolist(), depth, strict=True)]
        assert positions.tolist() == wanted_positions + [0] * pad


def states(dtype: torch.dtype, group: int, dims: tuple[int, int], softcap: float | None, launcher) -> None:
    generator = torch.Generator().manual_seed(0)
    lens, pad = [5, 0, 40, 1], 3
    start = torch.tensor([0, *lens], device=DEVICE).cumsum(0).int()
    tokens = sum(lens) + pad
    q, k, v = (torch.randn(tokens, heads, dim, generator=generator).to(DEVICE, dtype)
               for heads, dim in ((2 * group, dims[0]), (2, dims[0]), (2, dims[1])))
    for x in (q, k, v):
        x[sum(lens):] = math.nan
    mask = torch.rand(tokens, 40, generator=generator).to(DEVICE) < 0.4
    mask[1] = False  # sees nothing
    out, lse = launcher(q, k, v, start, mask, scale=0.3, softcap=softcap)
    wide = [x.double() for x in (q, k, v)]
    expected, total = tree.tree_attention_state_eager(*wide, start, mask, scale=0.3, softcap=softcap)
    compare_numbers(out, expected, expected.abs() * torch.finfo(dtype).eps + 1e-5)
    compare_numbers(lse, total.double(), torch.full_like(total.double(), 1e-4), "lse")
    assert out.dtype == dtype and not out[1].count_nonzero() and (lse[1] == -math.inf).all()
    assert not out[-pad:].count_nonzero() and (lse[-pad:] == -math.inf).all()


@pytest.mark.parametrize(("dtype", "group", "dims", "softcap"), [
    (torch.float32, 2, (16, 16), None), (torch.float16, 3, (24, 40), None), (torch.float32, 1, (64, 32), 4.0)], ids=str)
def test_kernel(dtype: torch.dtype, group: int, dims: tuple[int, int], softcap: float | None) -> None:
    pytest.importorskip("triton")
    states(dtype, group, dims, softcap, tree.tree_attention_state_triton)
    states(dtype, group, dims, softcap, tree.tree_attention_state_eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_a_draft_does_not_see_is_not_read(bad: float, dtype: torch.dtype) -> None:
    """Not even times zero: a draft that overflows spoils the drafts that see it, in the columns where it does."""
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, heads, 16, generator=generator).to(DEVICE, dtype) for heads in (4, 2, 2))
    k[3, 1], v[5, 0, 2], v[38, 1, 7] = bad, bad, bad
    start = torch.tensor([0, 40], dtype=torch.int32, device=DEVICE)
    mask = torch.rand(40, 40, generator=generator).to(DEVICE) < 0.4
    mask.fill_diagonal_(True)
    out, lse = tree.tree_attention_state_triton(q, k, v, start, mask, scale=0.3, softcap=None)
    expected, total = tree.tree_attention_state_eager(q, k, v, start, mask, scale=0.3, softcap=None)
    assert lse[mask[:, 3], 2:].isnan().any() and not out.isfinite().all()
    assert out[~mask[:, 3] & ~mask[:, 5] & ~mask[:, 38]].isfinite().all()
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, total, equal_nan=True, rtol=1e-5, atol=1e-4)


def test_a_sequence_without_mask_is_attention() -> None:
    """A chain is a causal step."""
    batch = lay_out(SITE, [4, 1], [9, 3], page_size=4)
    start = batch.metadata.query_start_loc
    mask = build_tree_mask(torch.tensor([-1, 0, 1, 2, -1]), start, 4)
    assert torch.equal(mask[:4], torch.ones(4, 4).tril().bool())
    out = tree_attention(torch_native.BACKEND, batch.q, batch.new_k, batch.new_v, batch.cache, 0, batch.metadata, mask,
                         scale=SITE.scale)
    compare_numbers(out, batch.expected, batch.bound)


def test_the_kit_sees_a_mask_that_is_not_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "tree_attention_state", lambda q, k, v, start, mask, **options: tree_attention_state(
        q, k, v, start, torch.ones_like(mask), **options))
    with pytest.raises(Failure, match="wrong"):
        run_check(Kit(torch_native.BACKEND, torch.device("cpu"), torch.float32), "trees of drafts")


@pytest.mark.slow
def test_opcheck() -> None:
    q, k = torch.randn(7, 4, 8), torch.randn(7, 2, 8)
    for softcap in (None, 2.0):
        torch.library.opcheck(tree_attention_state, (q, k, k, torch.tensor([0, 4, 6]).int(), torch.rand(7, 4) < 0.5),
                              {"scale": 0.3, "softcap": softcap})


def test_bad_input() -> None:
    batch = lay_out(SITE, [4, 1], [9, 3], page_size=4)
    given = (batch.q, batch.new_k, batch.new_v, batch.cache, 0, batch.metadata)
    mask = torch.ones(5, 4, dtype=torch.bool)
    with pytest.raises(UnsupportedAttention, match="without does not return the log-sum-exp"):
        tree_attention(make_backend("without"), *given, mask, scale=1.0)
    with pytest.raises(ValueError, match="3 columns for sequences of up to 4 drafts"):
        tree_attention(torch_native.BACKEND, *given, mask[:, :3], scale=1.0)
    for wrong in (mask[:2], mask.int()):
        with pytest.raises(ValueError, match="takes a bool mask"):
            tree_attention(torch_native.BACKEND, *given, wrong, scale=1.0)
