"""The kit's checks of attention as a state: torch_native passes them, on every cache, and a wrong state is seen; else what is
merged of it, a shared prefix or a tree of drafts, would be wrong without a word."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quire.attn_ops.backends import torch_native
from quire.attn_ops.conformance.batches import Failure
from quire.attn_ops.conformance.checks import Kit
from tests.attn_ops.cases import run_check

CPU = torch.device("cpu")


def run(backend, name: str, kv_dtype: torch.dtype | None = None, dtype: torch.dtype = torch.float32) -> None:
    run_check(Kit(backend, CPU, dtype, kv_dtype), name)


@pytest.mark.parametrize(("kv_dtype", "dtype"), [
    *((kv, torch.float32) for kv in (None, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)), (None, torch.bfloat16),
], ids=str)
def test_torch_native(kv_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    run(torch_native.BACKEND, "states: causal, to all", kv_dtype, dtype)
    run(torch_native.BACKEND, "trees of drafts", kv_dtype, dtype)


@pytest.mark.slow
def test_opcheck() -> None:
    run(torch_native.BACKEND, "states: opcheck")


@pytest.mark.parametrize("change", [
    lambda out, lse: (out, lse / torch.tensor(2.0).log()),
    lambda out, lse: (out, lse.masked_fill(lse == float("-inf"), float("inf"))),
    lambda out, lse: (out.masked_fill((lse == float("-inf"))[..., None], 1.0), lse),
], ids=["base two", "positive where empty", "garbage where empty"])
def test_a_wrong_lse_is_seen(change) -> None:
    wrong = dataclasses.replace(torch_native.BACKEND, state_op=lambda *args, **options: change(
        *torch_native.attention_state(*args, **options)))
    with pytest.raises(Failure):
        run(wrong, "states: causal, to all")


@pytest.mark.parametrize("change", [{"causal": True}, {"causal": False}, {"softcap": None}], ids=str)
def test_an_ignored_option_is_seen(change) -> None:
    wrong = dataclasses.replace(torch_native.BACKEND, state_op=lambda *args, **options: torch_native.attention_state(
        *args, **{**options, **change}))
    with pytest.raises(Failure):
        run(wrong, "states: causal, to all")


def test_keys_that_are_not_stored_are_seen() -> None:
    def unstored(q, k, v, k_cache, v_cache, *rest, **options):
        return torch_native.attention_state(q, k, v, k_cache.clone(), v_cache.clone(), *rest, **options)

    with pytest.raises(Failure, match="are not in the cache"):
        run(dataclasses.replace(torch_native.BACKEND, state_op=unstored), "states: causal, to all")
