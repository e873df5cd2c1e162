"""The kit on caches with one fixed scale per layer: a backend that takes them in its own way fails there, and nowhere else."""

from __future__ import annotations

import pytest

from quire.attn_ops.backends import torch_native
from quire.attn_ops.kv_quant import QMAX, is_fixed
from tests.attn_ops.conformance.test_kit import FIXED, broken, failures


def clamp(given):
    """What does not fit a fixed scale becomes the largest code, as vendors' kernels that store do."""
    for name in ("k", "v"):
        if is_fixed(given["k_scale"]) and given[name] is not None:
            most = QMAX[given["k_cache"].dtype] * float(given[f"{name}_scale"])
            given[name] = given[name].clamp(-most, most)


def read_nan_as_480(given):
    """Codes widened by moving bits: that of NaN becomes a number."""
    if is_fixed(given["k_scale"]):
        torch_native.paged_attention(**given)
        wide = {f"{n}_cache": (given[f"{n}_cache"].float() * given[f"{n}_scale"]).nan_to_num(nan=480.0) for n in ("k", "v")}
        return torch_native.paged_attention(**{**given, **wide, "k": None, "v": None, "k_scale": None, "v_scale": None})


def one_scale_for_both(given):
    if is_fixed(given["k_scale"]):
        given["v_scale"] = given["k_scale"]


@pytest.mark.parametrize("change", [clamp, read_nan_as_480, one_scale_for_both], ids=lambda f: f.__name__)
def test_a_backend_that_takes_a_fixed_scale_in_its_own_way_fails(change) -> None:
    assert failures(broken(change), "KV cache") == FIXED
