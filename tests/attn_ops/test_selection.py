"""How a backend is chosen by priority; tests/attn_ops/tuning has the choice by measurement."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quire import UnsupportedAttention, register_backend
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


def test_a_forced_backend_is_never_replaced(empty) -> None:
    register_backend(make_backend("absent", why="install it"))
    register_backend(make_backend("there", priority={"cpu": 0}, window=False))
    with pytest.raises(UnsupportedAttention, match="absent: install it\nNo other backend here can serve it."):
        select_backend("absent", [dataclasses.replace(SITE, window=4)], device=CPU, page_size=16)


def test_no_candidate_at_all(empty) -> None:
    with pytest.raises(UnsupportedAttention, match="attention='auto' cannot serve this model on cpu"):
        select_backend("auto", [SITE], device=CPU, page_size=16)
