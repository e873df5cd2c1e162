"""Products of complex numbers in real ones: faster steps for DeepSeek V2 and its relatives, the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from quire.passes.fusions.base import Fusion
from quire.passes.fusions.complex_product import real_products
from tests.passes.models import listing
from tests.passes.rotary import Rotary, complex_numbers, runs, same

pytestmark = pytest.mark.usefixtures("tokens_unchecked")


@pytest.mark.parametrize("late", [False, True])
def test_a_rotation_in_real_numbers(late: bool) -> None:
    """No complex number is left in the layer, and its output stays."""
    code = listing(same(Rotary(complex_numbers, tables="complex", late=late), "complex").gm.graph)
    assert "view_as_complex" not in code and code.count(" = view_as_real(") == 1  # of the table, for q and k


@pytest.mark.parametrize("apply", [lambda x, f, _: complex_numbers(x, f.conj(), f),
                                   lambda x, f, _: complex_numbers(x, f * f, f)], ids=["conjugate", "squared"])
def test_other_tables(apply) -> None:
    """A conjugated view stays as it is; any other factor is read as real numbers."""
    code = listing(same(Rotary(apply, tables="complex"), "complex").gm.graph)
    assert ("view_as_complex" in code) == ("conj" in code)


def test_a_product_that_is_read_as_complex_numbers_too() -> None:
    def apply(x, f, _):
        turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * f
        return torch.view_as_real(turned).flatten(-2).type_as(x) + 0 * turned.abs().sum(-1, keepdim=True)

    (plain, _, _), (lowered, _, _) = runs(Rotary(apply, tables="complex"), "none", "complex")
    assert all("view_as_complex" in listing(each.gm.graph) for each in (plain, lowered))


@pytest.mark.parametrize("what", ["pairs", "table"])
def test_numbers_that_are_changed_after_the_product(what: str) -> None:
    """Read where the product is used, they would be those of after the change."""
    def apply(x, f, _):
        pairs = x.float().reshape(*x.shape[:-1], -1, 2).clone()
        turned = torch.view_as_complex(pairs) * f
        (pairs if what == "pairs" else torch.view_as_real(f)).mul_(0.5)
        return torch.view_as_real(turned).flatten(-2).type_as(x)

    assert "view_as_complex" in listing(same(Rotary(apply, tables="complex"), "complex").gm.graph)


def test_a_table_that_is_an_input() -> None:
    """Inputs stay at the head of the graph: compilers count on it."""
    graph = fx.Graph()
    pairs, freqs, last = torch.randn(3, 4, 2), torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4, 2)
    inputs = [graph.placeholder(name) for name in ("pairs", "freqs", "last")]
    numbers = graph.call_function(torch.view_as_complex, (inputs[0],))
    product = graph.call_function(torch.mul, (numbers, inputs[1]))
    real = graph.call_function(torch.view_as_real, (product,))
    graph.output(graph.call_function(torch.add, (real, inputs[2])))
    for node, example in zip((*inputs, numbers, product), (pairs, freqs, last, freqs, freqs), strict=True):
        node.meta["example_value"] = example
    gm = fx.GraphModule(torch.nn.Module(), graph)
    wanted = gm(pairs, freqs, last)
    assert real_products(Fusion(gm)) == 1
    gm.recompile()
    assert [n.op for n in gm.graph.nodes][:4] == ["placeholder"] * 3 + ["call_function"]
    torch.testing.assert_close(gm(pairs, freqs, last), wanted)


def test_a_product_of_a_product() -> None:
    """With nothing in between, both are replaced."""
    def twice(pairs: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        once = torch.view_as_real(torch.view_as_complex(pairs) * freqs)
        return torch.view_as_real(torch.view_as_complex(once) * freqs)

    gm, given = fx.symbolic_trace(twice), (torch.randn(3, 4, 2), torch.randn(3, 4, dtype=torch.complex64))
    nodes = dict(zip((n.name for n in gm.graph.nodes), gm.graph.nodes, strict=True))
    for name, node in nodes.items():
        node.meta["example_value"] = given[0] if "real" in name or name == "pairs" else given[1]
    wanted = gm(*given)
    assert real_products(Fusion(gm)) == 2
    gm.graph.lint()
    gm.recompile()
    assert "view_as_complex" not in listing(gm.graph)
    torch.testing.assert_close(gm(*given), wanted)
