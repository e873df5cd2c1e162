"""Versions of tensors, whatever they were made in. A model loaded under ``torch.inference_mode()`` could else not be served, or
a change of weights that PyTorch counts would go unseen."""

from __future__ import annotations

import copy

import pytest
import torch

from quire.passes.tensor_version import has_version, version_of


def made_in_inference_mode() -> torch.nn.Parameter:
    with torch.inference_mode():
        return torch.nn.Parameter(torch.ones(3), requires_grad=False)


def moved() -> torch.nn.Parameter:
    """As ``model.to(dtype)`` leaves one."""
    p = made_in_inference_mode()
    p.data = torch.ones(3)
    assert not p.is_inference()
    return p


@pytest.mark.parametrize("make", [made_in_inference_mode, moved])
def test_without_a_counter(make) -> None:
    p = make()
    with pytest.raises(RuntimeError, match="do not track version counter"):
        p._version  # noqa: B018
    with torch.inference_mode():
        p.mul_(2)
    assert version_of(p) == 0 and not has_version(p)


def test_with_a_counter() -> None:
    plain, memory = torch.nn.Parameter(torch.ones(3)), made_in_inference_mode()
    assert has_version(plain) and version_of(plain) == 0
    with torch.no_grad():
        plain.mul_(2)
    assert version_of(plain) == plain._version == 1
    assert has_version(copy.deepcopy(memory)), "made outside of inference mode"
