"""How a backend is chosen by priority; tests/attn_ops/tuning has the choice by measurement."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quire import CudagraphSupport, UnsupportedAttention, register_backend
from quire.attn_ops.composite import common_capabilities
from quire.attn_ops.registry import get_backend
from quire.attn_ops.selection import select_backend
from tests.attn_ops.cases import SITE, make_backend

CPU = torch.device("cpu")


def test_auto_walks_by_priority(empty) -> None:
    """Lowest first; without a priority for the device a backend is not tried; the reasons of those before are kept."""
    for b in (make_backend("slow", priority={"cpu": 9}),
              make_backend("absent", why="not installed (pip install it)", priority={"cpu": 1}),
              make_backend("no_sinks", priority={"cpu": 2}, sinks=False), make_backend("unranked"),
              make_backend("gpu", priority={"cuda": 0})):
        register_backend(b)
    chosen = select_backend("auto", [SITE], device=CPU, page_size=16)
    assert chosen.backend.name == "no_sinks"
    assert chosen.passed_over == {"absent": ["not installed (pip install it)"]}
    chosen = select_backend("auto", [SITE, dataclasses.replace(SITE, sinks=True)], device=CPU, page_size=16)
    assert str(chosen) == ("slow; absent passed over: not installed (pip install it); no_sinks passed over: no sinks")


def test_one_site_out_of_many_decides(empty) -> None:
    register_backend(make_backend("no_window", priority={"cpu": 0}, window=False))
    sites = [SITE, dataclasses.replace(SITE, layer=7, name="model.layers.7.attn", window=128)]
    with pytest.raises(UnsupportedAttention) as error:
        select_backend("auto", sites, device=CPU, page_size=16)
    assert str(error.value) == (
        "attention='auto' cannot serve this model on cpu with page_size=16. attention site 7 (model.layers.7.attn) "
        "needs GQA 8:2x64, float32, window=128. Why not:\n  no_window: no window")


def test_a_forced_backend_that_does_not_fit_says_who_does(empty) -> None:
    register_backend(make_backend("bad", page_sizes=lambda p: False, page_sizes_note="none", layouts=frozenset({"NHD"})))
    register_backend(make_backend("good", priority={"cpu": 0}))
    register_backend(make_backend("also_bad", why="no GPU"))
    with pytest.raises(UnsupportedAttention) as error:
        select_backend("bad", [SITE], device=CPU, page_size=16, layout="HND")
    assert str(error.value) == (
        "attention='bad' cannot serve this model on cpu with page_size=16. attention site 3 (model.layers.3.self_attn) "
        "needs GQA 8:2x64, float32. Why not:\n  bad: page size 16 (has none); KV layout HND (has NHD)"
        "\nCan serve it here: good (or attention='auto').")


def test_fixed_scales_are_served_by_who_declares_them(empty) -> None:
    """Also by "auto", and by a backend made of others only if each of them does; the refusal says what to give instead."""
    fp8 = frozenset({torch.float8_e4m3fn})
    register_backend(make_backend("by_token", priority={"cpu": 0}, kv_dtypes=fp8))
    register_backend(make_backend("fixed", priority={"cpu": 1}, fixed_scale_kv_dtypes=fp8))
    where = dict(device=CPU, page_size=16, kv_dtype=torch.float8_e4m3fn)
    assert select_backend("auto", [SITE], **where).backend.name == "by_token"
    assert select_backend("auto", [SITE], **where, fixed_scale=True).backend.name == "fixed"
    with pytest.raises(UnsupportedAttention, match=r"per layer, kv_scales \(has none\)\nCan serve it here: fixed"):
        select_backend("by_token", [SITE], **where, fixed_scale=True)
    with pytest.raises(UnsupportedAttention, match="give kv_scales=, a number or .*\nCan serve it here: by_token"):
        select_backend("fixed", [SITE], **where)
    parts = [get_backend("by_token"), get_backend("fixed")]
    both = common_capabilities(parts, lambda site: parts, CudagraphSupport.NEVER)
    assert both.fixed_scale_kv_dtypes == frozenset()
    assert both.reasons_against(SITE, **where, fixed_scale=True) == [
        "by_token: KV cache of float8_e4m3fn with one fixed scale per layer, kv_scales (has none)"]


def test_a_forced_backend_is_never_replaced(empty) -> None:
    register_backend(make_backend("absent", why="install it"))
    register_backend(make_backend("there", priority={"cpu": 0}, window=False))
    with pytest.raises(UnsupportedAttention, match="absent: install it\nNo other backend here can serve it."):
        select_backend("absent", [dataclasses.replace(SITE, window=4)], device=CPU, page_size=16)


def test_no_candidate_at_all(empty) -> None:
    with pytest.raises(UnsupportedAttention, match="attention='auto' cannot serve this model on cpu"):
        select_backend("auto", [SITE], device=CPU, page_size=16)
