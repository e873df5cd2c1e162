"""Only the rows that the head reads, behind the last attention: what moves, what stays, and the numbers."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from quire import CommonAttentionMetadata, Step
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.ops.small_linear import small_linear
from quire.passes.capture.paged_model import PagedModel
from quire.passes.compile.regions import compile_by_regions
from quire.passes.fake_values import compute_value
from quire.passes.fusions.base import FusedWeights, Fusion
from quire.passes.fusions.last_tokens import last_tokens
from quire.passes.fx import copy_graph, value
from quire.passes.options import QuireOptions
from quire.passes.verify.row_wise import PRODUCTS
from tests.passes.models import HIDDEN, VOCAB, Attention, RMSNorm, changes, listing
from tests.passes.verify.test_quantized import Int8
from tests.steps import ragged
from tests.tiny import load_model
from tests.zoo.harness import LENGTHS, STEPS

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

#: Two float32 results of one formula: sums over up to 48 terms of order 1, in another order where a product has other rows.
CLOSE = dict(atol=1e-5, rtol=1e-5)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, 48, bias=False), nn.Linear(HIDDEN, 48, bias=False)
        self.down = nn.Linear(48, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def block(m: Decoder, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    x = x + attended
    return x + m.mlp(m.norm2(x))


class Decoder(nn.Module):
    """Layers of a decoder; ``behind(model, x, attended)`` is what follows the attention of each. ``keeps``: it takes
    ``logits_to_keep``, as transformers' models do; ``head(model, x, logits_to_keep)`` reads them in another way."""

    def __init__(self, behind: Callable[..., torch.Tensor] = block, *, layers: int = 1, keeps: bool = True,
                 head: Callable[..., torch.Tensor] | None = None, **members: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.attention = nn.ModuleList(Attention(4, 2, is_causal=True) for _ in range(layers))
        self.norm1, self.norm2, self.norm3, self.mlp = RMSNorm(HIDDEN), RMSNorm(HIDDEN), RMSNorm(HIDDEN), MLP()
        self.behind, self.choose_head = behind, head
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        for name, member in members.items():
            setattr(self, name, member)
        if keeps:
            self.forward = self.forward_some  # type: ignore[method-assign]
        self.eval()

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for attention in self.attention:
            x = self.behind(self, x, attention(self.norm1(x), position_ids, {}))
        return x

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm3(self.hidden(input_ids, position_ids)))

    def forward_some(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: Any = 0) -> torch.Tensor:
        x = self.norm3(self.hidden(input_ids, position_ids))
        if self.choose_head is not None:
            return self.choose_head(self, x, logits_to_keep)
        x = x[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep, :]
        return self.head(x)


def traced(model: nn.Module, fusions: str = "none") -> PagedModel:
    torch._dynamo.reset()
    return PagedModel(model, QuireOptions(compiler="eager", fusions=fusions, page_size=4))


def rewritten(model: nn.Module | PagedModel) -> tuple[int, fx.Graph]:
    """(matches, the raised graph after the pass)."""
    paged = model if isinstance(model, PagedModel) else traced(model)
    fusion = Fusion(copy_graph(paged.graph.raised), paged.graph.inputs, FusedWeights())
    matches = last_tokens(fusion)
    fusion.graph.lint()
    return matches, fusion.graph


def steps(paged: PagedModel) -> list[torch.Tensor]:
    """Logits of the last token of each sequence in each step: chunks of prompts beside decoding, the last row padded."""
    vocab = getattr(getattr(paged.model, "config", None), "vocab_size", VOCAB)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(vocab, (n,), generator=generator) for n in LENGTHS]
    cache = PagedKVCache.for_sites(paged.sites, num_pages=20, page_size=4, device="cpu")
    found = []
    for ids, meta, rows in ragged(sequences, STEPS, 4):
        last = meta.query_start_loc[1:].long() - 1
        padded = meta.padded(len(ids) + 2, len(rows) + 1)
        out = paged(Step(cache, padded, attention="torch_native"), torch.cat([ids, ids.new_zeros(2)]), padded.positions,
                    torch.cat([last, last.new_zeros(1)]))
        found.append(out[: len(rows)])
    return found


def same(model: nn.Module | PagedModel, fusions: str = "last_tokens") -> None:
    """On one trace, with the fusions and without."""
    paged = model if isinstance(model, PagedModel) else traced(model)
    wanted = steps(paged)
    paged.graph.options = dataclasses.replace(paged.graph.options, fusions=fusions)
    paged.graph.compilations.clear()
    for got, want in zip(steps(paged), wanted, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
    paged.close()


def sizes_of_products(graph: fx.Graph) -> list[str]:
    """What the rows of each matrix product are, from the first to the head: T or B."""
    index = next(n for n in graph.nodes if "logits_indices" in n.name)
    found = [n for n in graph.nodes if n in PRODUCTS or n.target is operator.matmul]
    return ["B" if str(value(index).shape[0]) in map(str, value(n).shape) else "T" for n in found]


def test_before_and_after() -> None:
    model = traced(Decoder(lambda m, x, attended: x + attended))
    before, (matches, graph) = listing(model.graph.raised.graph), rewritten(model)
    assert matches == 1
    assert_expected_inline(changes(before, listing(graph)), """\
-linear_1 = linear(reshape, l_self_call_modules_attention_modules_0_modules_out_parameters_weight_, None)
-x_1 = add(x, linear_1)
-wide_1 = to(x_1, torch.float32)
-pow_2 = pow(wide_1, 2)
-mean_1 = mean(pow_2, -1, keepdim=True)
-add_2 = add(mean_1, 1e-06)
-rsqrt_1 = rsqrt(add_2)
-mul_2 = mul(wide_1, rsqrt_1)
-to_3 = to(mul_2, torch.float32)
-x_2 = mul(l_self_call_modules_norm3_parameters_weight_, to_3)
-x_3 = getitem(x_2, (slice(None, None, None), l_logits_indices_, slice(None, None, None)))
-out_1 = linear(x_3, l_self_call_modules_head_parameters_weight_, None)
+getitem = getitem(reshape, (slice(None, None, None), l_logits_indices_))
+linear_2 = linear(getitem, l_self_call_modules_attention_modules_0_modules_out_parameters_weight_, None)
+getitem_1 = getitem(x, (slice(None, None, None), l_logits_indices_))
+add_3 = add(getitem_1, linear_2)
+to = to(add_3, torch.float32)
+pow_3 = pow(to, 2)
+mean_2 = mean(pow_3, -1, keepdim=True)
+add_4 = add(mean_2, 1e-06)
+rsqrt_2 = rsqrt(add_4)
+mul_3 = mul(to, rsqrt_2)
+to_4 = to(mul_3, torch.float32)
+mul_4 = mul(l_self_call_modules_norm3_parameters_weight_, to_4)
+out_1 = linear(mul_4, l_self_call_modules_head_parameters_weight_, None)""")


def test_numbers_and_operations() -> None:
    """A batch whose steps mix chunks of prompts with decoding; and the multiplications of a prefill of 20 tokens."""
    model = Decoder()
    same(model)
    counted = []
    for fusions in ("none", "last_tokens"):
        paged = traced(model, fusions)
        cache = PagedKVCache.for_sites(paged.sites, num_pages=8, page_size=4, device="cpu")
        meta = CommonAttentionMetadata.build([16, 4], [16, 4], [[1, 2, 3, 4], [5]], page_size=4)
        with FlopCounterMode(display=False) as counter:
            paged(Step(cache, meta), torch.zeros(20, dtype=torch.int64), meta.positions, torch.tensor([15, 19]))
        products = counter.get_flop_counts()["Global"]
        counted.append(sum(n for op, n in products.items() if "mm" in str(op) and "bmm" not in str(op)) // 2)
    qkv, others, head = HIDDEN * 32, HIDDEN * HIDDEN + 3 * HIDDEN * 48, HIDDEN * VOCAB
    assert counted == [20 * (qkv + others) + 2 * head, 20 * qkv + 2 * (others + head)]


@pytest.mark.parametrize("fusions, products", [
    pytest.param("last_tokens", "TBBBB" "B", marks=pytest.mark.slow),
    pytest.param("projections,last_tokens", "TBBB" "B", marks=pytest.mark.slow),
    pytest.param("all", "TBBB" "B", marks=pytest.mark.slow),
])
def test_with_the_other_passes(fusions, products) -> None:
    """On the model that ships, on three layers, and on one: gate and up, which may be one product by then, go along."""
    same(load_model(), fusions)
    same(Decoder(layers=3), fusions)
    paged = traced(Decoder(), fusions)
    assert "".join(sizes_of_products(paged.graph.compiled().lowered.gm.graph)) == products
    paged.close()


def two_gathers(m: Decoder, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """By one index, of one value."""
    return m.head(x[:, keep, :]) + m.second(x[:, keep])


def one_copy_changed(m: Decoder, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    one, other = x[:, keep, :], x[:, keep, :]
    one.add_(1)
    return m.head(one) + m.head(other)


@pytest.mark.parametrize("doubt", ["another value", "a guard"])
def test_in_doubt_the_graph_stays(doubt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New nodes are removed if their value is not the expected one, or if computing it added a guard on a size."""
    model = traced(Decoder())
    before = listing(model.graph.raised.graph)

    def compute_and_doubt(node: fx.Node) -> fx.Node:
        compute_value(node)
        if doubt == "a guard":
            assert value(node).shape[1] != 12345
        elif value(node).shape[-1] == 48:
            node.meta["example_value"] = value(node).double()
        return node

    monkeypatch.setattr("quire.passes.fusions.last_tokens.compute_value", compute_and_doubt)
    matches, graph = rewritten(model)
    assert matches == 0 and listing(graph) == before


def reads_by_view(m: Decoder, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:  # GPT-2's and OPT's way
    x = x + attended
    flat = torch.addmm(m.conv_bias, m.norm2(x).view(-1, HIDDEN), m.conv).view(x.size())
    return F.dropout(flat, 0.1, m.training) + x


def halves(m: Decoder, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:  # Phi-3's way
    x = x + attended
    gate, up = F.linear(x, m.both).chunk(2, dim=-1)
    return x + m.mlp.down(torch.cat([(gate * up)[..., :24], (gate * up)[..., 24:]], dim=-1))


def in_parallel(m: Decoder, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:  # Falcon's way
    out = torch.matmul(m.norm2(x), m.square)
    out += attended
    return x + out


def with_softmax(m: Decoder, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    x = F.layer_norm(x + attended, (HIDDEN,), m.norm2.weight)
    return (x + m.mlp(x)) * F.softmax(x, dim=-1) - x.sum(-1, keepdim=True)


def parameters() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    made = dict(conv=(HIDDEN, HIDDEN), conv_bias=(HIDDEN,), both=(96, HIDDEN), square=(HIDDEN, HIDDEN))
    return {n: nn.Parameter(torch.randn(s, generator=generator) / 4) for n, s in made.items()}


# -- what must not move


def changed_in_place(m: Decoder, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    x += attended  # the residual stream, which is read before and after
    return x + m.mlp(m.norm2(x))


def changed_through_a_view(m: Decoder, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    x = x + attended
    out = m.mlp.down(F.silu(m.mlp.gate(x)) * m.mlp.up(x))
    x[..., 0].mul_(2)
    return x + out


def changed_by_relu(m: Decoder, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    x = x + attended
    out = m.mlp(x)
    F.relu(x, True)
    return x + out


def experts(m: Decoder, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Tokens are sorted by expert: rows of the result depend on other rows' places."""
    x = x + attended
    flat = m.norm2(x).view(-1, HIDDEN)
    order = (flat @ m.square)[:, :2].argmax(-1).sort().indices
    done = torch.zeros_like(flat)
    done[order] = flat[order] @ m.square
    return x + done.view_as(x)


def unknown(m: Decoder, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    x = x + attended
    return torch.lerp(x, m.mlp(x), 0.5)  # row-wise, but not in the table


def quantized() -> Decoder:
    """A quantized layer may depend on the number of rows."""
    model = Decoder()
    for layer in (model.attention[0].out, model.mlp.down):
        layer.weight = nn.Parameter(Int8.of(layer.weight), requires_grad=False)
    return model


def behind(function: Callable[..., torch.Tensor]) -> Callable[[], Decoder]:
    return lambda: Decoder(function, **parameters())


@pytest.mark.parametrize("make, matches, products", [
    (behind(reads_by_view), 1, "TBBB"), pytest.param(behind(halves), 1, "TBBBB", marks=pytest.mark.slow),
    pytest.param(behind(in_parallel), 1, "TBBB", marks=pytest.mark.slow),
    (behind(with_softmax), 1, "TBBBBB"),
    (lambda: Decoder(keeps=False), 1, "TBBBBB"),  # all logits, indexed afterwards: the head goes along
    (lambda: Decoder(head=two_gathers, second=nn.Linear(HIDDEN, VOCAB)), 2, "TBBBBBB"),
    # Rows are taken behind what must stay.
    (behind(changed_in_place), 1, "TTBBBB"), (behind(changed_through_a_view), 1, "TTTTTB"),
    pytest.param(behind(changed_by_relu), 1, "TTTTTB", marks=pytest.mark.slow),
    (behind(experts), 1, "TTTTB"), (behind(unknown), 1, "TTTTTB"),
    (quantized, 1, "TTTTTB"), (lambda: Decoder(head=one_copy_changed), 0, "TTTTTBB"),
], ids=["views", "halves", "in parallel", "softmax", "all logits", "two gathers", "changed in place", "changed through a view",
        "changed by relu", "experts", "unknown", "quantized", "one copy changed"])
def test_what_moves_and_what_stays(make: Callable[[], Decoder], matches: int, products: str) -> None:
    """The first product is that of q, k and v, and the last one the head."""
    model = traced(make())
    found, graph = rewritten(model)
    assert (found, "".join(sizes_of_products(graph))) == (matches, products)
    same(model)


class ReadsHidden(Decoder):
    """The hidden states have another reader: they stay whole, and the rest is for the rows."""

    def forward_some(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: Any = 0) -> torch.Tensor:
        x = self.hidden(input_ids, position_ids)
        return self.head(self.norm3(x)[:, logits_to_keep, :]) + x.amax() * 0


def test_other_readers_keep_all_rows() -> None:
    matches, graph = rewritten(ReadsHidden())
    assert (matches, "".join(sizes_of_products(graph))) == (1, "TTTTTB")
    (largest,) = [n for n in graph.nodes if n.target == "amax"]
    (ids,) = [n for n in graph.nodes if "input_ids" in n.name]
    assert str(value(largest.args[0]).shape[1]) == str(value(ids).shape[1])


def test_nothing_to_move() -> None:
    """Rows are taken right behind an operation that is not row-wise; and the index must be an input."""
    def not_row_wise(m: Decoder, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return torch.lerp(x, attended, 0.5)

    model = Decoder(not_row_wise)
    model.norm3 = nn.Identity()
    assert rewritten(model)[0] == 0
    model = Decoder()
    some = model.forward_some
    model.forward = lambda input_ids, position_ids, logits_to_keep: some(input_ids, position_ids, logits_to_keep + 0)
    matches, graph = rewritten(model)
    assert matches == 0 and sizes_of_products(graph)[:5] == ["T"] * 5


def test_pieces_stay_equal() -> None:
    """Four layers have five pieces, three of them different, as without the pass (passes/compile/regions.py)."""
    counts = []
    for fusions in ("none", "last_tokens"):
        lowered = traced(Decoder(layers=4), fusions).graph.compiled().lowered
        compiler = Mock()
        compile_by_regions(lowered, compiler)
        counts.append(compiler.call_count)
    assert counts == [3, 3]


def test_small_batches_are_left_alone() -> None:
    """The graph for at most 32 tokens has kernels of its own; the norm is not folded into the head's."""
    model = Decoder().to(torch.bfloat16)
    paged = traced(model, "all")
    graphs = {}
    for small in (False, True):
        target = paged.graph.compiled().lowered.target
        lowered, _ = paged.graph.lowered(target, "all", small)
        graphs[small] = lowered.gm.graph
    paged.close()
    heads = [n for n in graphs[True].nodes if n.target is small_linear]
    assert len(heads) == 5 and heads[-1].args[3] is None
    assert [sum("logits_indices" in str(n.args) for n in g.nodes) for g in graphs.values()] == [2, 1]
