"""Copies follow what PyTorch counts of their originals, and other memory. One that does not serves weights of the past."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch

from quire.graph_runner.copies import Copies


def fused_step(p: torch.nn.Parameter) -> None:
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=0.5, fused=True).step()


#: Of an original in place; no version counter shows the last three.
CHANGES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "in place": lambda p: p.detach().mul_(2),
    "other memory": lambda p: setattr(p, "data", p.detach() + 1),
    "swapped": lambda p: torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach() + 1)),
    "a fused optimizer": fused_step,
}


@pytest.mark.parametrize("which", CHANGES)
def test_changes_that_are_seen(which: str) -> None:
    originals = [torch.nn.Parameter(torch.arange(4.0)) for _ in range(3)]
    places = torch.zeros(3, 4, dtype=torch.float64)
    copies = Copies(originals, list(places), [1.0, 2.0, 3.0])
    for changed in (1, 2):
        places[0, 0] = 7  # stays while nothing has changed
        assert not copies.is_behind()
        copies.refresh(everything=False)
        assert places[0, 0] == 7
        CHANGES[which](originals[changed])
        assert copies.is_behind()
        copies.refresh(everything=False)
        assert torch.equal(places, torch.stack([p.detach() * f for f, p in enumerate(originals, 1)]).double())


def test_originals_whose_memory_is_replaced_twice() -> None:
    """The second time by memory at the address of the first, as an allocator gives it."""
    memory = numpy.ones((64, 64), numpy.float32)
    original, place = torch.nn.Parameter(torch.from_numpy(memory)), torch.empty(64, 64)
    copies = Copies([original], [place])
    for _ in range(3):
        address = original.data_ptr()
        original.data = torch.zeros(64, 64)
        memory *= 2
        original.data = torch.from_numpy(memory)
        assert original.data_ptr() == address and copies.is_behind()
        copies.refresh(everything=False)
        assert torch.equal(place, original)


def test_originals_without_a_counter() -> None:
    """Made in inference mode they have none, and may get other memory, or swap with one that has; as may the others."""
    with torch.inference_mode():
        bare = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)
    plain = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)
    places = torch.zeros(2, 4)
    copies = Copies([bare, plain], list(places))
    assert not copies.is_behind()
    for step, change in enumerate((lambda: setattr(bare, "data", torch.ones(4)), lambda: plain.mul_(3),
                                   lambda: torch.utils.swap_tensors(bare, plain), lambda: bare.mul_(3))):
        change()
        assert copies.is_behind(), step
        copies.refresh(everything=False)
        assert torch.equal(places, torch.stack([bare, plain])) and not copies.is_behind(), step
