"""``quire bench attention`` on a GPU: how each backend's op is timed, and that the times reach attention="auto"."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.registry import get_backend
from quire.attn_ops.selection import select_backend
from quire.attn_ops.tuning import attention as tuning
from quire.graph_runner.bench.attention_op import Point, decode_point, measure, op_batch
from quire.graph_runner.cli import main

pytestmark = pytest.mark.alone  # times kernels
SITE = AttentionSite(0, 8, 2, 64, 64, torch.bfloat16, 0.125)


@pytest.mark.parametrize(("name", "decode", "extend"), [("triton", "graph", "graph"), ("flashinfer", "graph", "events")])
def test_how_an_op_is_timed(name: str, decode: str, extend: str) -> None:
    device = torch.device("cuda")
    backend = get_backend(name)
    if why := backend.available(device):
        pytest.skip(why)
    for point, how in ((decode_point(4, 300), decode), (Point("extend", "mixed", (1, 40), (300, 300)), extend)):
        batch = op_batch(SITE, point, page_size=16, device=device)
        timing = measure(backend, batch)
        assert timing.how == how and 0 < timing.us < 1e5 and timing.host_us > 0
        slots = batch.metadata.slot_mapping
        for k_cache, *_ in batch.caches:  # every copy was gone through
            assert torch.equal(k_cache[slots // 16, slots % 16], batch.k)


def test_measure_save_and_select(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    out = tmp_path / "out.json"
    assert main(["bench", "attention", "--heads", "8/2x64", "--batch", "1,4", "--context", "256", "--scale", "16",
                 "--attention", "triton,torch_native", "--save", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert not [r["error"] for r in rows if r["error"]]
    assert {r["how"] for r in rows if r["kind"] == "decode"} == {"graph"}
    chosen = select_backend("auto", [SITE], device=torch.device("cuda"), page_size=16)
    assert chosen.why.startswith("fastest measured: decode ") and torch.cuda.get_device_name() in chosen.why
    assert {row.device for row in tuning.load(tuning.STORE.user_file)} == {torch.cuda.get_device_name()}
