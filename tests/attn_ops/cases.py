"""Test cases of paged attention by keyword: the batches of the conformance kit; and backends without an op, for tests of
registry and selection."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from quire import AttentionBackend, AttentionCapabilities, AttentionSite, check_backend
from quire.attn_ops.conformance import states
from quire.attn_ops.conformance.batches import Batch as Case
from quire.attn_ops.conformance.batches import bits, lay_out
from quire.attn_ops.conformance.batches import check as check_case
from quire.attn_ops.conformance.batches import compare as check_output
from quire.attn_ops.conformance.batches import run as run_case
from quire.attn_ops.conformance.checks import Kit, Skip
from quire.attn_ops.conformance.mla import MlaKit


def make_case(
    query_lens: Sequence[int], seq_lens: Sequence[int], *, num_heads: int, num_kv_heads: int, head_dim: int,
    head_dim_v: int | None = None, page_size: int, dtype: torch.dtype = torch.float32, window: int | None = None,
    softcap: float | None = None, chunk: int | None = None, sinks: bool = False, scale: float | None = None,
    pad_tokens: int = 0, pad_reqs: int = 0, poison: float | None = None, **options,
) -> Case:
    """``lay_out`` with the site's fields as arguments. poison: what lies in slots without an owner; noise if None."""
    site = AttentionSite(
        layer=0, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, head_dim_v=head_dim_v or head_dim,
        dtype=dtype, scale=head_dim**-0.5 if scale is None else scale, window=window, softcap=softcap, chunk=chunk, sinks=sinks)
    return lay_out(site, query_lens, seq_lens, page_size=page_size, pad=(pad_tokens, pad_reqs), fill=poison, **options)


#: The arguments of ``pass_kit``. ``opcheck`` takes longer than all other checks of the kit together.
OPCHECK = pytest.mark.parametrize("only", ["", pytest.param("opcheck", marks=pytest.mark.slow)])
#: Few checks in the fast tests.
FEW = pytest.mark.parametrize("only", ["batch", *(pytest.param(only, marks=pytest.mark.slow) for only in ("", "opcheck"))])


def pass_kit(backend: AttentionBackend, only: str = "", **options: Any) -> None:
    """Every check of the quick kit passes whose name has ``only``; without it all but ``opcheck``."""
    with contextlib.ExitStack() as stack:
        for owner in () if only else (Kit, MlaKit, states):
            stack.enter_context(mock.patch.object(owner, "opcheck", lambda kit: "left out"))
        results = check_backend(backend, "cpu", quick=True, only=only, **options)
    assert len(results) > (0 if only else 30)
    assert not [r for r in results if r.status == "FAIL"], [r for r in results if r.status == "FAIL"]


def run_check(kit: Kit | MlaKit, name: str) -> None:
    """One check of the kit by its name. One that cannot be made is a skipped test; raises Failure."""
    try:
        dict(kit.checks())[name]()
    except Skip as why:
        pytest.skip(str(why))


class ChunkKit(Kit):
    """The kit with chunks in every batch, of at least 8 tokens, and of whole pages."""

    def batch(self, rows: Any, *, page_size: int | None = None, **options: Any) -> Case:
        page = page_size or self.usual_page_size
        options.setdefault("chunk", max(8, page))
        return super().batch(rows, page_size=page, **options)


def shape_of_key(name: str) -> tuple[int, int, int, bool, torch.dtype | None]:
    """The arguments of ``launch_config.key``: tokens (padded), n, k, swiglu and codes."""
    shape, _, codes = name.partition(" ")
    tokens, n, k = (int(x) for x in shape.rstrip("s").split("x"))
    return tokens, n, k, shape.endswith("s"), getattr(torch, codes) if codes else None


SITE = AttentionSite(layer=3, num_heads=8, num_kv_heads=2, head_dim=64, head_dim_v=64, dtype=torch.float32, scale=0.125,
                     name="model.layers.3.self_attn")
EVERYTHING = dict(devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({torch.float32}), window=True, softcap=True,
                  sinks=True, chunk=True, non_causal=True)


def make_backend(name: str, *, why: str | None = None, priority: dict[str, int] | None = None, **capabilities
                 ) -> AttentionBackend:
    """A backend without an op that declares EVERYTHING but ``capabilities``. why: the reason why it is not available."""
    return AttentionBackend(name, AttentionCapabilities(**{**EVERYTHING, **capabilities}), lambda device: why, op=None,
                            priority=priority)


__all__ = ["Case", "ChunkKit", "EVERYTHING", "FEW", "OPCHECK", "SITE", "bits", "check_case", "check_output", "make_backend",
           "make_case", "pass_kit", "run_case", "run_check"]
