"""Evaluation mode while a model is traced, and what another thread sets meanwhile."""

from __future__ import annotations

import pytest
import torch

from quire.passes.capture.evaluating import ChangedWhileTraced, evaluating


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)).train()


def test_the_modes_come_back() -> None:
    m = model()
    m[0].eval()
    with evaluating(m):
        assert not any(module.training for module in m.modules())
    assert m.training and m[1].training and not m[0].training and "train" not in vars(m)


@pytest.mark.parametrize("part", ["model", "layer"])
def test_training_set_meanwhile_spoils_the_trace(part: str) -> None:
    """It may have dropout in it, so it is made again."""
    m = model()
    with pytest.raises(ChangedWhileTraced, match="training: False -> True, by another thread"), evaluating(m):
        (m if part == "model" else m[1]).train()
    assert m.training and m[1].training


def test_training_set_for_a_moment_spoils_the_trace() -> None:
    m = model()
    with pytest.raises(ChangedWhileTraced, match="by another thread"), evaluating(m):
        m.train()
        m.eval()
    assert not m.training


def test_evaluation_set_meanwhile_stays() -> None:
    m = model()
    with evaluating(m):
        m.eval()
    assert not any(module.training for module in m.modules())
