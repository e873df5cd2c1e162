"""How a model may take the last token's row: exact through an engine, or refused. ``adversarial/test_counting.py`` has what may
follow from the row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quire import UnsupportedAttention
from quire.passes.capture.paged_model import PagedModel
from quire.passes.fx import storage_of, value
from tests.adversarial.harness import WIDTH
from tests.adversarial.test_counting import EAGER, Ends, outcome


def then(take: Callable[[torch.Tensor], torch.Tensor], change: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> Any:
    """Takes a row of x, changes something in place, and computes the logits by the row."""

    def end(m: Any, x: torch.Tensor) -> Any:
        row = take(x)
        change(m, x, row)
        return m.lm_head(m.norm(row))

    return end


def changed(m: Any, logits: torch.Tensor) -> torch.Tensor:
    logits[..., 5] = -9.0
    logits[logits < -1] = -7.0
    return logits.div_(0.7)


def written(m: Any, x: torch.Tensor) -> torch.Tensor:
    x.view(-1, WIDTH).mul_(m.wpe.weight[3])
    return m.lm_head(x[:, -1:])


def cast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = m.lm_head(x[:, [-1]]).to(torch.bfloat16)
        logits.div_(2.0)
    return logits.float()


def by_slice(x: torch.Tensor) -> torch.Tensor:
    return x[:, -1:]


def by_list(x: torch.Tensor) -> torch.Tensor:
    return x[:, [-1]]


SERVED = {
    "a slice of one sequence": lambda m, x: m.lm_head(x[0, -1:][None]),
    "a list of one sequence": lambda m, x: m.lm_head(x[0, [-1]][None]),
    "a slice from T - 1": lambda m, x: m.lm_head(x[:, x.shape[1] - 1 :]),
    "a slice from T - 1 to T": lambda m, x: m.lm_head(x[:, x.shape[1] - 1 : x.shape[1]]),
    "narrow": lambda m, x: m.lm_head(x.narrow(1, x.shape[1] - 1, 1)),
    "narrow from the end": lambda m, x: m.lm_head(torch.narrow(x, dim=-2, start=-1, length=1)),
    "a copy of what is changed then": then(by_list, lambda m, x, row: x.clamp_(-0.5, 0.5)),
    "a changed copy": then(by_list, lambda m, x, row: row.view(-1, WIDTH).clamp_(-0.5, 0.5)),
    "a changed slice": then(by_slice, lambda m, x, row: row.clamp_(-0.5, 0.5)),
    "a slice changed in parts": then(by_slice, lambda m, x, row: row.chunk(2, -1)[0].clamp_(-0.5, 0.5)),
    "a slice of what was changed": written,
    "changed logits": lambda m, x: changed(m, m.lm_head(x[:, -1:])),
    "changed logits of torch.autocast": cast,
    "changed last logits": lambda m, x: changed(m, m.lm_head(x)[:, -1:]),
}
OTHERS = {
    "one before the last, by a slice": lambda m, x: m.lm_head(x[:, -2:-1]),
    "one before the last, by its number": lambda m, x: m.lm_head(x.narrow(1, x.shape[1] - 2, 1)),
    "no slice": lambda m, x: m.lm_head(x[:, -1])[:, None],
}


def test_values_within_autocast_have_its_dtype() -> None:
    """What follows the rewrite, such as fusions, would take the head for one in float32."""
    with contextlib.closing(PagedModel(Ends(cast), EAGER)) as paged:
        head = [n for n in paged.graph.raised.graph.nodes if n.target is F.linear][-1]
        assert value(head).dtype == torch.bfloat16 and str(value(head).shape[1]) != "1"


@pytest.mark.parametrize("end", SERVED.values(), ids=SERVED)
def test_served(end: Any) -> None:
    """Each wanted token gets the logits that the model gives for the tokens up to it."""
    assert outcome(lambda kind: Ends(end), "engine") == "exact"


@pytest.mark.parametrize("end", OTHERS.values(), ids=OTHERS)
def test_other_rows_are_refused(end: Any) -> None:
    with pytest.raises(UnsupportedAttention, match="not the last one, or is taken in a way that quire does not follow"):
        PagedModel(Ends(end), EAGER)


# A slice is a view in the model. Each changes the numbers of the row in it, and would not do so with a copy of the row.
CHANGED = {
    "clamped": then(by_slice, lambda m, x, row: x.clamp_(-0.5, 0.5)),
    "added to": then(by_slice, lambda m, x, row: x.__iadd__(m.wpe.weight[3])),
    "an argument out": then(by_slice, lambda m, x, row: torch.add(x, 1.0, out=x)),
    "an option inplace": then(by_slice, lambda m, x, row: F.relu(x, inplace=True)),
    "through another view": then(by_slice, lambda m, x, row: x.view(-1, WIDTH).mul_(m.wpe.weight[3])),
    "after narrow": then(lambda x: x.narrow(1, x.shape[1] - 1, 1), lambda m, x, row: x.clamp_(-0.5, 0.5)),
    "a view of the slice": then(lambda x: x[0, -1:][None].mT.mT, lambda m, x, row: x.clamp_(-0.5, 0.5)),
    "through the slice": lambda m, x: m.lm_head(by_slice(x).clamp_(-0.5, 0.5) + by_slice(x)),
}


@pytest.mark.parametrize("end", CHANGED.values(), ids=CHANGED)
def test_a_slice_of_what_is_changed_then_is_refused(end: Any) -> None:
    """A user would get the logits of the row from before the change, and no error."""
    found = outcome(lambda kind: Ends(end), "engine")
    assert "view of memory that is changed in place later" in found and "[:, [-1], :], which is a copy" in found


def test_a_slice_of_what_an_earlier_pass_has_replaced() -> None:
    """The values of the slice and of what it is a slice of are then in two memories, and in the model in one."""

    def end(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)  # without a dimension of heads
        return then(by_slice, lambda m, x, row: x.clamp_(-0.5, 0.5))(m, x)

    with pytest.raises(UnsupportedAttention, match="view of memory that is changed in place later"):
        PagedModel(Ends(end), EAGER)


@pytest.mark.parametrize("of", [
    lambda row: row.transpose(1, 2).contiguous(), lambda row: row.unflatten(-1, (4, -1)).transpose(1, 2).reshape(4, -1),
], ids=["contiguous", "reshape"])
def test_what_is_a_view_of_one_row_alone_is_refused(of: Any) -> None:
    """Of several rows it is a copy: a user would get logits without the change."""
    found = outcome(lambda kind: Ends(then(by_list, lambda m, x, row: of(row).clamp_(-0.5, 0.5))), "engine")
    assert "whether it is a view" in found


def test_views_beside_the_way_to_the_logits_stay_views() -> None:
    """What follows the rewrite finds what a change in place changes by the memory of the values in the graph."""
    end = then(by_list, lambda m, x, row: row.view(-1, WIDTH).clamp_(-0.5, 0.5))
    with contextlib.closing(PagedModel(Ends(end), EAGER)) as paged:
        views = [n for n in paged.graph.raised.graph.nodes if n.target in ("view", "clamp_")][-2:]
        assert [n.target for n in views] == ["view", "clamp_"]
        for n in views:
            assert storage_of(value(n)) == storage_of(value(n.args[0])) and str(value(n).shape[0]) != "1"
