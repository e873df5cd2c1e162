"""Compilation piece by piece: which pieces share code, that they compute what the whole graph does, and what is left whole."""

from __future__ import annotations

import logging
import operator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

import quire.passes.compile.inductor
from quire.passes.compile.regions import _Piece, _Values, compile_by_regions
from tests.passes.models import HIDDEN, Attention, Tiny, listing, served, trace

TOLERANCE = 1e-5  # float32, sums of up to 22 numbers of order 1; eps is 1.2e-7


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs given to the compiler, which here runs them op by op."""
    seen: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        assert len(inputs) == len(gm.graph.find_nodes(op="placeholder"))
        seen.append(gm)
        return gm.forward

    monkeypatch.setattr(quire.passes.compile.inductor, "inductor", keep)
    return seen


def model(layers: int, **options: Any) -> Tiny:
    return Tiny(*(Attention(4, 2, is_causal=True, **options) for _ in range(layers))).eval()


@pytest.mark.parametrize("layers", [3, 6])
@pytest.mark.parametrize("attention", ["torch_native", "triton"])
def test_equal_layers_are_compiled_once(layers: int, attention: str, compiled: list[fx.GraphModule]) -> None:
    """Before the first attention, between two, behind the last: three, however many layers; each with its own weights."""
    net = model(layers)
    assert served(trace(net, compiler="inductor"), net, attention=attention) <= TOLERANCE
    assert len(compiled) == 3


def test_a_piece(compiled: list[fx.GraphModule]) -> None:
    """From behind one attention to behind the next; caches and tables are inputs."""
    net = model(3)
    served(trace(net, compiler="inductor"), net, attention="triton")
    assert_expected_inline(listing(compiled[1].graph), """\
in_0: size s0
in_1: [s0, 4, 4]
in_2: [16, 16]
in_3: [1, s0, 16]
in_4: [32, 16]
in_5: [32]
in_6: [s1, 4, 2, 4]
in_7: [s2, 4, 2, 4]
in_8: [s3]
in_9: [s4, s5]
in_10: [s6]
in_11: [s7]
in_12: [16384]
view_9 = view(in_1, 1, -1, 4, 4)
transpose_14 = transpose(view_9, 1, 2)
transpose_3 = transpose(transpose_14, 1, 2)
reshape = reshape(transpose_3, 1, in_0, -1)
linear_1 = linear(reshape, in_2, None)
x_1 = add(in_3, linear_1)
linear_2 = linear(x_1, in_4, in_5)
split_1 = split(linear_2, [16, 8, 8], dim=-1)
t_3 = getitem(split_1, 0)
t_4 = getitem(split_1, 1)
t_5 = getitem(split_1, 2)
view_3 = view(t_3, 1, in_0, -1, 4)
q_1 = transpose(view_3, 1, 2)
view_4 = view(t_4, 1, in_0, -1, 4)
k_2 = transpose(view_4, 1, 2)
view_5 = view(t_5, 1, in_0, -1, 4)
v_2 = transpose(view_5, 1, 2)
transpose_15 = transpose(q_1, 1, 2)
flatten_3 = flatten(transpose_15, 0, 1)
transpose_16 = transpose(k_2, 1, 2)
flatten_4 = flatten(transpose_16, 0, 1)
transpose_17 = transpose(v_2, 1, 2)
flatten_5 = flatten(transpose_17, 0, 1)
triton_paged_attention_default_1 = triton_paged_attention.default(flatten_3, flatten_4, flatten_5, in_6, in_7,
    None, None, in_8, in_9, in_10, in_11, None, [in_12], scale=0.5, window=None, softcap=None, chunk=None)
return (x_1, triton_paged_attention_default_1)""")


def test_layers_that_differ_are_compiled_apart(compiled: list[fx.GraphModule]) -> None:
    """A constant, a shape or an operation that differs is another piece: no layer runs with another's."""
    scaled, wide = (Attention(4, 2, is_causal=True, scale=0.9), Attention(8, 2, is_causal=True))
    same = [Attention(4, 2, is_causal=True) for _ in range(3)]
    net = Tiny(*same, scaled, wide, nn.Sequential()).eval()
    net.layers = net.layers[:5]
    assert served(trace(net, compiler="inductor"), net) <= TOLERANCE
    # embed + 0; 0 -> 1, 1 -> 2; 2 -> scaled; scaled -> wide; wide -> logits
    assert len(compiled) == 5


class Counts(nn.Module):
    """Computes with the number of tokens, as mixtures of experts do; Dynamo computes the product once for all layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = x.shape[1]
        return self.inner(x, position_ids, extra) + x.new_ones(6 * tokens).view(1, tokens, 6)[..., :1]


def test_sizes_are_computed_by_each_piece(compiled: list[fx.GraphModule]) -> None:
    net = Tiny(*(Counts(Attention(4, 2, is_causal=True)) for _ in range(4))).eval()
    graph = trace(net, compiler="inductor")
    products = [n for n in graph.gm.graph.nodes if n.target is operator.mul]
    assert len(products) == 1 and len(products[0].users) == 4
    assert served(graph, net) <= TOLERANCE
    assert len(compiled) == 3


class Scale(nn.Module):
    """Multiplies by a number of its own."""

    def __init__(self, inner: nn.Module, by: float) -> None:
        super().__init__()
        self.inner, self.by = inner, by

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.inner(x, position_ids, extra) / self.by


def test_constants_between_sites_are_compared(compiled: list[fx.GraphModule]) -> None:
    net = Tiny(*(Scale(Attention(4, 2, is_causal=True), by) for by in (2, 2, 2, 4, 2))).eval()
    assert served(trace(net, compiler="inductor"), net) <= TOLERANCE
    assert len(compiled) == 4


def test_floats_that_are_inputs(compiled: list[fx.GraphModule]) -> None:
    """Floats that Dynamo made inputs (dynamic=True) differ between layers that share code."""
    net = Tiny(*(Scale(Attention(4, 2, is_causal=True), by) for by in (0.5, 0.25, 0.75, 0.125, 0.5))).eval()
    assert served(trace(net, compiler="inductor"), net) <= TOLERANCE
    assert len(compiled) == 3


class InPlace(nn.Module):
    """Adds attention's result to its input in place: the memory belongs to the layer before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
        x += self.inner(x, position_ids, extra)
        return x * 0.5


@pytest.mark.parametrize("net", [
    model(6), model(5, scale=0.7), Tiny(*(Counts(Attention(4, 2, is_causal=True)) for _ in range(5))).eval(),
], ids=["plain", "scaled", "sizes"])
def test_values_of_equal_pieces_are_those_of_the_first(net: Tiny, compiled: list[fx.GraphModule],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied, not computed: and they are what computing them gives."""
    copy, copies = _Values.copy, []

    def checked(self: _Values, piece: Any, like: Any, at: int) -> bool:
        def outputs() -> list[str]:
            return [f"{t.dtype} {t.device} {tuple(t.shape)} {t.stride()} {t.storage_offset()}"
                    for t in map(self.of.get, piece.outputs)]

        done = copy(self, piece, like, at)
        assert done
        found = outputs()
        self.compute(piece.nodes, at)
        assert outputs() == found
        copies.append(found)
        return done

    monkeypatch.setattr(_Values, "copy", checked)
    assert served(trace(net, compiler="inductor"), net) <= TOLERANCE
    assert len(copies) == len(net.layers) - 2 and len(compiled) == 3


def test_values_are_not_copied_where_that_would_be_wrong() -> None:
    """What shares memory, and what has sizes of its own."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from quire.passes.rewrite.lower import fake_input

    fake = FakeTensorMode(shape_env=ShapeEnv())

    def input_of(name: str, size: int) -> torch.Tensor:
        return fake_input(fake, name, torch.empty(size, 4, device="meta"), (True, False), torch.device("cpu"))

    one, two = input_of("one", 11), input_of("two", 13)
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("a", "b", "made_a", "made_b", "made_c", "made_d")}
    a, b, made_a, made_b, made_c, made_d = nodes.values()
    values = object.__new__(_Values)
    values._fake, values._made_in, values._caches = fake, {}, set()
    with fake:
        fresh, of_one = torch.empty(3, 4), one + 1
        values.of = {a: one, b: one, made_a: of_one}
        assert values.copy(_Piece([], [b], [made_b]), _Piece([], [a], [made_a]), 1)
        assert str(values.of[made_b].shape) == str(of_one.shape) and values.of[made_b] is not of_one
        values.of = {a: one, b: two, made_a: of_one}  # the other piece's tokens are another number
        assert not values.copy(_Piece([], [b], [made_b]), _Piece([], [a], [made_a]), 1)
        values.of = {a: one, b: two, made_a: fresh}
        assert values.copy(_Piece([], [b], [made_b]), _Piece([], [a], [made_a]), 1)
        values.of = {a: one, b: one, made_a: one.view(-1)}  # a view of an input
        assert not values.copy(_Piece([], [b], [made_b]), _Piece([], [a], [made_a]), 1)
        values.of = {a: one, b: one, made_a: fresh, made_c: fresh[1:]}  # two views of one tensor
        assert not values.copy(_Piece([], [b], [made_b, made_d]), _Piece([], [a], [made_a, made_c]), 1)
        assert made_b not in values.of


def test_writes_across_pieces_are_compiled_whole(compiled: list[fx.GraphModule], caplog: pytest.LogCaptureFixture) -> None:
    net = Tiny(*(InPlace(Attention(4, 2, is_causal=True)) for _ in range(4))).eval()
    with caplog.at_level(logging.INFO, "quire.passes.compile.regions"):
        assert served(trace(net, compiler="inductor"), net) <= TOLERANCE
    assert len(compiled) == 1
    assert "changes in place what it did not make" in caplog.text


class OwnInPlace(InPlace):
    """Writes only to memory of its own."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
        result = self.inner(x, position_ids, extra) * 2
        result += x
        result.mul_(0.25)
        return result


def test_writes_within_a_piece_are_fine(compiled: list[fx.GraphModule]) -> None:
    net = Tiny(*(OwnInPlace(Attention(4, 2, is_causal=True)) for _ in range(4))).eval()
    assert served(trace(net, compiler="inductor"), net) <= TOLERANCE
    assert len(compiled) == 3


def test_few_layers_are_compiled_whole(compiled: list[fx.GraphModule], caplog: pytest.LogCaptureFixture) -> None:
    """Two layers make three pieces that all differ: nothing is to be had by cutting."""
    net = model(2)
    with caplog.at_level(logging.INFO, "quire.passes.compile.regions"):
        assert served(trace(net, compiler="inductor"), net) <= TOLERANCE
    assert len(compiled) == 1 and "all differ" in caplog.text


def test_inductor_whole(compiled: list[fx.GraphModule]) -> None:
    net = model(4)
    assert served(trace(net, compiler="inductor-whole"), net) <= TOLERANCE
    assert len(compiled) == 1


@pytest.mark.slow
def test_inductor() -> None:
    """With the real compiler: views, lists and sizes cross the cuts, and the caches are written in place."""
    net = Tiny(*(Scale(Attention(4, 2, is_causal=True), by) for by in (0.5, 0.25, 0.75, 0.125, 0.5))).eval()
    assert served(trace(net, compiler="inductor"), net, attention="torch_native") <= TOLERANCE



def test_values_are_dropped_after_their_last_reader() -> None:
    """The joined pieces keep no activation alive longer than a whole graph would."""
    import weakref

    graph = trace(model(4))
    alive: list[weakref.ref] = []
    most = 0

    def compile(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            nonlocal most
            out = gm(*args)
            most = max(most, sum(r() is not None for r in alive))
            alive.extend(weakref.ref(t) for t in out if t.dim() == 3 and t.shape[-1] == HIDDEN)
            return out
        return run

    from quire.attn_ops.kv_cache import PagedKVCache
    from quire.attn_ops.metadata import CommonAttentionMetadata
    from quire.attn_ops.step import Step, ensure_planned

    cache = PagedKVCache.for_sites(graph.sites, num_pages=4, page_size=16, device="cpu")
    step = Step(cache, CommonAttentionMetadata.build([5], [5], [[1]], page_size=16))
    paged = graph.compiled(step)
    ensure_planned(step, paged.lowered.target.backend, list(paged.lowered.sites))
    run = compile_by_regions(paged.lowered, compile)
    args = [5 if isinstance(x, (int, torch.SymInt)) else x for x in graph.inputs]
    args = [x[:, :5] if isinstance(x, torch.Tensor) and x.dtype == torch.int64 and x.dim() == 2 else x for x in args]
    with torch.no_grad():
        run(*args, *paged.lowered.inputs.of(step))
    assert 1 <= most <= 3  # the residual stream that goes in, and what is just made
