"""What a traced model may not change without being noticed, and what it may."""

from __future__ import annotations

import pytest
import torch

from graph_runner.watch import ModelWatch


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))


def replace_layer(m) -> None:
    m[0] = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("change, what", [
    (lambda m: m[0].register_forward_hook(lambda *a: None), "0: its forward hooks changed"),
    (lambda m: m.register_forward_pre_hook(lambda *a: None), "Sequential: its forward pre-hooks changed"),
    (replace_layer, "0: the module itself changed"),
    (lambda m: m.append(torch.nn.ReLU()), "module 2 was added"),
    (lambda m: setattr(m[1], "eps", 1e-3), "1: its settings changed"),
    (lambda m: m.to(torch.bfloat16), "0: its parameters changed"),
    (lambda m: setattr(m[0], "forward", lambda x: x), "0: its forward changed"),
], ids=["hook", "pre_hook", "layer", "added", "setting", "dtype", "forward"])
def test_change(change, what) -> None:
    m = model()
    watch = ModelWatch(m, addresses=False)
    assert watch.change() is None and watch.glance(2) is None  # of three modules, so the next glance begins at the last
    change(m)
    assert watch.change() == what
    assert what in (watch.glance(2), watch.glance(2))
    watch.check_if_due()  # it is not
    watch.due = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{what}.*undo the change, or close the engine"):
            watch.check_if_due()


def test_what_may_change() -> None:
    m = model()
    watch, strict = ModelWatch(m, addresses=False), ModelWatch(m, addresses=True)
    m.train()
    with torch.no_grad():
        m[0].weight.add_(1)
    assert watch.change() is None and strict.change() is None
    m[0].weight.data = torch.zeros(2, 2)
    assert watch.change() is None and strict.change() == "0: its parameters changed"
