"""Nothing keeps a model's weights in memory once its owner has dropped it, whichever way quire ran it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import quire
from quire.graph_runner.engine import Engine
from tests.tiny import GREEDY, load_model

pytestmark = pytest.mark.usefixtures("tokens_unchecked")

IDS = torch.tensor([[5, 6, 7]])


def closed_engine(model: Any, **options: Any) -> None:
    with Engine(model, num_pages=8, **options) as engine:
        assert engine.generate([IDS[0].tolist()], GREEDY)[0].token_ids


def dropped_engine(model: Any) -> None:
    assert Engine(model, num_pages=8).generate([IDS[0].tolist()], GREEDY)[0].token_ids


def failing_engine(model: Any) -> None:
    with pytest.raises(ValueError):
        Engine(model, num_pages=8, attention="nothing of this name")


def paged(model: Any) -> None:
    assert quire.paged(model, num_pages=8).generate(IDS, max_new_tokens=3).shape == (1, 6)


def compiled(model: Any) -> None:
    torch.compile(model, backend="quire", options={"compiler": "eager"})(IDS)


def step_by_hand(model: Any, **options: Any) -> None:
    run = torch.compile(model, backend="quire", options={"compiler": "eager", **options})
    config = model.config  # as PagedKVCache.for_model makes it, without another trace
    cache = quire.PagedKVCache(num_layers=config.num_hidden_layers, num_pages=4, page_size=16, head_dim=config.head_dim,
                               num_kv_heads=config.num_key_value_heads, dtype=torch.float32, device="cpu")
    meta = quire.CommonAttentionMetadata.build([3], [3], [[1]], page_size=16)
    with quire.step(cache, meta), torch.no_grad():
        run(input_ids=IDS, position_ids=meta.positions[None], use_cache=False)


def explained(model: Any) -> None:
    assert quire.explain(model)


@pytest.mark.parametrize(("use", "options"), [
    (closed_engine, {"fusions": "all"}), (dropped_engine, {}), (failing_engine, {}), (compiled, {}),
    *(pytest.param(*variant, marks=pytest.mark.slow) for variant in (
        (paged, {}), (explained, {}), (closed_engine, {}), (closed_engine, {"compiler": "inductor"}), (step_by_hand, {}),
        (step_by_hand, {"fusions": "all"}))),
], ids=lambda x: getattr(x, "__name__", None) or ",".join(x.values()) or "-")
def test_weights_are_freed(use: Callable[..., None], options: dict[str, Any]) -> None:
    """Storages are looked at, since fusing gives parameters other ones and keeps the parameters."""
    model = load_model(num_layers=1)
    gone = [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
    use(model, **options)
    storages = {s._cdata for p in model.parameters() if (s := p.untyped_storage()).nbytes()}
    assert storages
    del model
    gc.collect()
    assert not [ref for ref in gone if ref() is not None]
    alive = {t.untyped_storage()._cdata for t in gc.get_objects()
             if type(t) is torch.Tensor and t.device.type == "cpu" and t.layout is torch.strided}
    assert not storages & alive
