"""The selection kernel chooses what a stable sort puts first, whatever the scores and sizes."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from quire.attn_ops.kernels import select

NAN, INF = float("nan"), float("inf")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def as_keys(scores: torch.Tensor) -> torch.Tensor:
    """The order of float32 numbers as integers: their bits, of negative ones mirrored."""
    bits = scores.float().view(torch.int32)
    return torch.where(bits >= 0, bits, -(2**31) - bits.long() - 1).int()


def check(keys: torch.Tensor, lens: list[int], picked: int, limit: int) -> None:
    """Each longer row's list, sorted, holds the first of a stable descending sort, each once."""
    found = select.largest(keys.to(DEVICE), torch.tensor(lens, dtype=torch.int32, device=DEVICE), picked, limit).cpu()
    for row, length in enumerate(lens):
        if length > limit:
            wanted = keys[row, :, :length].sort(dim=-1, descending=True, stable=True).indices[:, :picked].sort().values
            assert torch.equal(found[row].sort().values.long(), wanted), (row, length)


def sized(monkeypatch: pytest.MonkeyPatch, sample: int, rows: int) -> None:
    monkeypatch.setattr(select, "SAMPLE", sample)
    monkeypatch.setattr(select, "ROWS", rows)


def made(kind: str, size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    scores = torch.randn(size, generator=generator)
    if kind == "ties":
        return (2 * scores).round()
    if kind == "equal":
        return torch.zeros(size)
    if kind == "rising":
        return scores.sort(dim=-1).values
    if kind == "wild":  # many magnitudes, and numbers that are none
        scores = scores.sign() * 10.0 ** (30 * scores.abs().clamp_max(1.0))
        scores[torch.rand(size, generator=generator) < 0.02] = -INF
        scores[torch.rand(size, generator=generator) < 0.01] = INF
    return scores


KINDS = ["normal", "ties", "equal", "rising", "wild"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))])
@pytest.mark.parametrize("kind", KINDS)
def test_chooses_what_a_stable_sort_puts_first(monkeypatch, kind: str, seed: int) -> None:
    """Rows of several steps, widths that are no multiple of one, lengths at the limit and beside it."""
    choose = random.Random(seed)
    sized(monkeypatch, 2 ** choose.randint(4, 7), 2 ** choose.randint(2, 6))
    width, heads = choose.randint(40, 700), choose.randint(1, 3)
    picked = choose.choice([1, choose.randint(1, width // 2), width - 1])
    limit = choose.choice([picked, min(width - 1, picked + choose.randint(0, 30))])
    lens = [0, limit, limit + 1, choose.randint(limit + 1, width), width]
    scores = made(kind, (len(lens), heads, width), torch.Generator().manual_seed(seed))
    check(as_keys(scores), lens, picked, limit)


def test_a_sample_that_misleads_costs_no_key(monkeypatch) -> None:
    """What the sample sees is the largest, or the smallest, of a row: its bounds are wrong."""
    sized(monkeypatch, 64, 64)
    number = torch.arange(64)
    seen = number * 16 + ((number * 40503) >> 4) % 16  # as in ``sampled_bounds``
    scores = torch.randn(1, 2, 1000, generator=torch.Generator().manual_seed(0))
    scores[0, 0, seen[seen < 1000]] += 1000
    scores[0, 1, seen[seen < 1000]] -= 1000
    for picked in (10, 50, 500, 990):
        check(as_keys(scores), [1000], picked, picked)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_scores_become_integers_in_their_order() -> None:
    """Labels of one channel: the scores are what the key says, -0 is 0, and NaN is the largest."""
    from quire.attn_ops.backends.double_sparsity import LayerLabels, Options, choose_triton

    tiny = 1e-45 if DEVICE.type == "cpu" else 1e-30  # a GPU may take denormal numbers for 0
    values = [-INF, -3e38, -1.0, -tiny, -0.0, 0.0, tiny, 1.0, 3e38, INF, NAN]
    labels = torch.tensor(values + [0.0] * 5).view(1, 16, 1, 1)
    layer = LayerLabels(labels.to(DEVICE), torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), True)
    table, lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([[0]], [11]))
    for picked, wanted in ((1, {10}), (2, {9, 10}), (5, {6, 7, 8, 9, 10}), (6, {4, 6, 7, 8, 9, 10}), (10, {*range(1, 11)})):
        found = choose_triton(torch.ones(1, 1, 1, device=DEVICE), layer, table, lens, Options(picked, 0))
        assert {*found.flatten().tolist()} == wanted
