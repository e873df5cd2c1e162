"""The raising pass: which F.scaled_dot_product_attention calls become the semantic op, as what, and which do not.

tests/adversarial/test_masks.py has the masks that are served or refused, and compares their numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.backend import QuireBackend
from quire.passes.options import QuireOptions
from quire.passes.rewrite.raise_sdpa import find_sdpa, raise_sdpa
from quire.passes.verify.sites import site_nodes
from tests.passes.models import DIM, HIDDEN, Attention, Tiny, served, tiny, trace

pytestmark = pytest.mark.usefixtures("tokens_unchecked")
# Both sides compute in float32, in sums of up to 22 numbers of order 1; eps is 1.2e-7. A wrong mask gives 1e-1.
TOLERANCE = 1e-5


def pair(position_ids):
    """Positions of queries (1, S, 1) and of keys (1, 1, S)."""
    return position_ids[..., :, None], position_ids[..., None, :]


def of_pairs(visible):
    """A mask from a function of query and key positions."""

    def mask(module, position_ids):
        return visible(*pair(position_ids))[:, None]

    return mask


causal = of_pairs(lambda i, j: j <= i)


def causal_from_shape(module, position_ids):
    n = position_ids.shape[1]
    return torch.ones(n, n, dtype=torch.bool).tril()


def window(size):
    return of_pairs(lambda i, j: (j <= i) & (j > i - size))


def chunk(size):
    return of_pairs(lambda i, j: (j <= i) & (j // size == i // size))


# What is raised, as what.


def end_included(size):
    """``i - j <= w`` is a window of w + 1 keys."""
    return of_pairs(lambda i, j: (i - j <= size - 1) & (j <= i))


class StoredSize(nn.Module):
    """A window whose size is a buffer."""

    def __init__(self, size) -> None:
        super().__init__()
        self.register_buffer("size", torch.tensor(size))

    def forward(self, owner, position_ids):
        i, j = pair(position_ids)
        return ((j <= i) & (j > i - self.size))[:, None]


@pytest.mark.parametrize("kind, size", [
    pytest.param(kind, size, marks=[pytest.mark.slow] * (size in (1024, 1025) or (kind, size) == (chunk, 131072)))
    for kind in (window, end_included, StoredSize, chunk) for size in (31, 131072, 1024, 1025)])
def test_a_long_window_is_not_read_as_plain_causal(kind, size) -> None:
    """The trace has 23 tokens; large sizes are too large to be probed as they are."""
    for site in trace(tiny(mask=kind(size))).sites:
        assert (site.window, site.chunk) == ((None, size) if kind is chunk else (size, None))


def test_different_masks_in_different_layers() -> None:
    model = Tiny(*(Attention(4, 2, mask=m) for m in (window(8), causal, chunk(4)))).eval()
    graph = trace(model)
    assert [(s.window, s.chunk) for s in graph.sites] == [(8, None), (None, None), (None, 4)]
    for i, site in enumerate(graph.sites):
        assert (site.layer, site.name, site.route, site.causal) == (i, f"layers.{i}", "raised", True)
        assert (site.num_heads, site.num_kv_heads, site.head_dim, site.scale) == (4, 2, DIM, DIM**-0.5)
    assert served(graph, model) <= TOLERANCE


class Stored(nn.Module):
    """A mask cut out of a buffer, as nanoGPT does."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("bias", table)

    def forward(self, owner, position_ids):
        n = position_ids.shape[1]
        return self.bias[:, :, :n, :n]


def stored(size, keep=None):
    table = torch.ones(size, size, dtype=torch.bool).tril() if keep is None else keep
    return Stored(table[None, None])


def test_a_stored_window_is_checked_to_its_end() -> None:
    """The buffer is a plain triangle for its first 2999 rows."""
    model = tiny(mask=stored(4000, torch.ones(4000, 4000, dtype=torch.bool).tril().triu(-2999)))
    assert {s.window for s in trace(model).sites} == {3000}


def test_no_mask_at_all_is_not_causal() -> None:
    """It is raised as what it is, and every backend refuses it."""
    graph = trace(tiny(is_causal=False))
    assert {s.causal for s in graph.sites} == {False}
    with pytest.raises(UnsupportedAttention, match="no non-causal attention"):
        served(graph, tiny(is_causal=False))


@pytest.mark.parametrize("scale", [None, 0.25, 1.0])
def test_scale(scale) -> None:
    model = tiny(scale=scale)
    graph = trace(model)
    assert {s.scale for s in graph.sites} == {DIM**-0.5 if scale is None else scale}
    assert served(graph, model) <= TOLERANCE


@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_a_scale_that_is_not_positive_is_refused(scale: float) -> None:
    """Kernels fold it into the exponent, and torch's own gives NaN with some masks."""
    graph = trace(tiny(scale=scale))
    with pytest.raises(UnsupportedAttention, match=f"has scale {scale}"):
        _ = graph.sites


class OfTwo(nn.Module):
    """Keys, or only values, in a batch of two for queries in a batch of one."""

    def __init__(self, keys: bool) -> None:
        super().__init__()
        self.keys, self.qkv = keys, nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, x, position_ids, extra):
        q, k, v = (t.view(1, -1, HIDDEN // DIM, DIM).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, torch.cat([k, q]) if self.keys else k, torch.cat([v, 2 * v]), is_causal=True)
        return out.sum(0, keepdim=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("keys", [True, False])
def test_keys_and_values_of_another_batch_are_refused(keys: bool) -> None:
    """The cache has one key for each token of the row."""
    graph = trace(Tiny(OfTwo(keys)).eval())
    with pytest.raises(UnsupportedAttention, match=r"keys or values of shape \(2, .* for queries of shape \(1, "):
        _ = graph.sites


# Repeated keys.


def expand_reshape(x, times):
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, times, length, dim).reshape(batch, heads * times, length, dim)


REPEATS = {
    "expand_reshape": expand_reshape, "repeat_interleave": lambda x, times: x.repeat_interleave(times, dim=1),
    "repeat_interleave_torch": lambda x, times: torch.repeat_interleave(x, times, 1),
    "flatten": lambda x, times: x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2),
    "unsqueeze_repeat": lambda x, times: x.unsqueeze(2).repeat(1, 1, times, 1, 1).view(x.shape[0], -1, *x.shape[2:]),
}


# Heads 0 1 0 1 and not 0 0 1 1, or one of them changed: another model. Its keys are cached as they are, which is right.
TILES = {
    "repeat": lambda x, times: x.repeat(1, times, 1, 1), "cat": lambda x, times: torch.cat([x] * times, dim=1),
    "expand_other_side": lambda x, times: x.unsqueeze(1).expand(-1, times, -1, -1, -1).flatten(1, 2),
    "changed_copy": lambda x, times: x.repeat_interleave(times, 1) * torch.tensor([1.0, 2.0, 1.0, 1.0]).view(1, 4, 1, 1),
}


@pytest.mark.parametrize("repeat, heads, kv_heads, cached, options", [
    *((repeat, 4, 2, 2, {}) for repeat in REPEATS.values()), (expand_reshape, 4, 1, 1, {}), (expand_reshape, 6, 3, 3, {}),
    *((repeat, 4, 2, 4, {}) for repeat in TILES.values()),
    (None, 4, 2, 2, dict(enable_gqa=True)), (None, 4, 1, 1, {}),  # by F.sdpa: its flag, and (B, 1, S, D) keys without it
], ids=[*REPEATS, "one key head", "three key heads", *TILES, "enable_gqa", "broadcast"])
def test_repeated_keys_are_peeled_and_others_are_not(repeat, heads, kv_heads, cached, options) -> None:
    model = tiny(heads, kv_heads, repeat=repeat, **options)
    graph = trace(model)
    assert {(s.num_heads, s.num_kv_heads) for s in graph.sites} == {(heads, cached)}
    assert served(graph, model) <= TOLERANCE


@pytest.mark.parametrize("picked", [lambda n: n % 16, lambda n: n.clamp(max=15)])
def test_keys_picked_by_number_behind_a_repeat(picked) -> None:
    """Of short rows these are all keys, and of longer ones they are not."""
    model = tiny(4, 2, repeat=lambda x, times: x.repeat_interleave(times, 1)[:, :, picked(torch.arange(x.shape[2]))])
    refused(model, "both to compute and to pick rows")


# What is refused.


def refused(model, message, **options) -> None:
    graph = trace(model, **options)  # the plain way works
    with pytest.raises(UnsupportedAttention, match=message):
        _ = graph.sites


def alibi(module, position_ids):
    i, j = pair(position_ids)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(1, 4, 1, 1)
    return torch.where(j <= i, -(i - j) * slopes, -math.inf)


class Autocast(nn.Module):
    """Calls F.sdpa with float32 operands under torch.autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, HIDDEN)

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)[:, None]
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]


def test_under_autocast_the_op_computes_in_its_dtype() -> None:
    """torch.autocast casts the operands of F.sdpa; the semantic op does not know of it."""
    (site,) = trace(Autocast().eval()).sites
    assert site.dtype == torch.bfloat16


def test_the_refusal_names_the_layer() -> None:
    model = Tiny(Attention(4, 2, is_causal=True), Attention(4, 2, mask=alibi)).eval()
    refused(model, r"cannot be paged:\n  layers.1: its mask is not proven .* .node mul.* of layers.1.; .* can be served")
    refused(tiny(mask=from_argument), "an attention_mask was passed; a paged batch is ragged and takes none",
            attention_mask=torch.ones(1, 23, dtype=torch.bool))


def from_argument(module, position_ids, attention_mask):
    return causal(module, position_ids) & attention_mask[:, None, None, :]


@pytest.mark.parametrize("shape", [(1, 1, 23, 23), (23, 23)])
def test_a_mask_that_the_caller_passes_is_refused(shape) -> None:
    """It is causal in this call; in another it may not be."""
    refused(tiny(mask=lambda module, position_ids, given: given), "it depends on L.*given",
            given=torch.ones(shape, dtype=torch.bool).tril())


def test_static_trace_is_refused() -> None:
    """A trace for 23 tokens only: a window of 31 would look like plain causal."""
    refused(tiny(mask=window(31)), "traced for exactly 23 tokens.*compile with dynamic=True", dynamic=False)
    refused(tiny(), "the graph was traced for exactly 23 tokens", dynamic=False)


def chosen_by_token_count(module, position_ids):
    return causal(module, position_ids) if position_ids.shape[1] > 8 else window(4)(module, position_ids)


@pytest.mark.parametrize("mask, message", [
    (of_pairs(lambda i, j: (j <= i) & (j > i - 4096) & (i < 1_000_000)), "its numbers are too large"),
    (stored(8200), "its table serves more than 8192 positions"),
    (chosen_by_token_count, r"a path of its own, or cannot run, for some numbers of tokens \(s\d+ > 8\)"),
], ids=["another_large_constant", "too_large_to_check", "by_token_count"])
def test_masks_that_are_refused(mask, message) -> None:
    refused(tiny(mask=mask), message)


class Rounded(nn.Module):
    """Numbers of positions that bfloat16 does not tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", 1000 + torch.arange(64) * 0.01)

    def forward(self, owner, position_ids):
        i, j = pair(self.table[position_ids].bfloat16())
        return (j <= i)[:, None]


def begins_late(module, position_ids):
    n = position_ids.shape[1]
    return causal(module, position_ids) & (torch.arange(2, end=n + 2)[:, None] - torch.arange(n) < 12)


def truncated(i, j):
    both = torch.stack([torch.where(i - j < 8, 0.5, 0.5), torch.where(i - j < 8, 0.5, 1.5)])
    return (j <= i) & (both.sum(0, dtype=torch.long) != 2)


@pytest.mark.parametrize("mask", [
    of_pairs(lambda i, j: (j <= i) & (torch.clamp_max(i - j, max=7) < 8)),
    of_pairs(lambda i, j: (j <= i) & ~(torch.where(i - j >= 8, 3.0, 0.0) * 0.3 == 3 * 0.3)),  # in float32 it is not
    of_pairs(truncated), Rounded(), begins_late,
], ids=["clamp_max by name", "a rounded number", "a truncated sum", "a rounded table", "arange from a start to a named end"])
def test_masks_that_are_easily_misread(mask) -> None:
    """They are refused, or served with the numbers of the model."""
    model = tiny(mask=mask)
    graph = trace(model)
    try:
        _ = graph.sites
    except UnsupportedAttention:
        return
    assert served(graph, model) <= TOLERANCE


sdpa = nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("attend, message", [
    (lambda q: sdpa(*[q[:, :, :, None].expand(-1, -1, -1, 1, -1)] * 3).flatten(2, 4),
     r"query has 5 dimensions, need \(B, H, S, D\)"),
    # F.sdpa broadcasts the only key head to the value heads; a cache has as many of the one as of the other.
    (lambda q: sdpa(q, q[:, :1], q, is_causal=True), "4 query heads, 1 key heads, 4 value heads"),
    (lambda q: sdpa(q, *[torch.cat([q[:, :, :3], q], dim=2)] * 2), r"keys for s\d+ queries: a KV cache in the graph"),
], ids=["five_dimensions", "heads_that_do_not_fit", "keys_longer_than_queries"])
def test_calls_that_are_refused(attend, message) -> None:
    class Odd(Attention):
        def forward(self, x, position_ids, extra):
            q = x.view(*x.shape[:2], 4, DIM).transpose(1, 2)
            return attend(q).transpose(1, 2).reshape(x.shape[0], -1, HIDDEN)

    refused(Tiny(Odd(4, 4)).eval(), message)


def test_one_refusal_refuses_the_model() -> None:
    """All or nothing: a model half on the paged cache would be wrong."""
    graph = trace(Tiny(Attention(4, 2, is_causal=True), Attention(4, 2, is_causal=True, dropout_p=0.5)).eval())
    with pytest.raises(UnsupportedAttention, match="layers.1: dropout"):
        served(graph, tiny())


def test_positions_made_by_the_model_are_refused() -> None:
    """In another way than by arange over the tokens, or the first rows of a table."""

    class Counts(Tiny):
        def forward(self, input_ids, position_ids):
            return super().forward(input_ids, torch.arange(input_ids.shape[1] + 1)[None, 1:])

    refused(Counts(Attention(4, 2, is_causal=True)).eval(), "the model makes positions of its own")


def test_a_mask_changed_in_place() -> None:
    """Nodes that write do not lie on the way to the mask, and count nevertheless."""

    def by_a_view(module, position_ids):
        keep = causal_from_shape(module, position_ids)
        keep[2:].fill_(True)
        return keep

    def whole(module, position_ids):
        return torch.zeros(*[position_ids.shape[1]] * 2).masked_fill_(~causal_from_shape(module, position_ids), -math.inf)

    refused(tiny(mask=by_a_view), "a tensor that it is made of is changed in place")
    graph = trace(model := tiny(mask=whole))
    assert {(s.window, s.chunk) for s in graph.sites} == {(None, None)} and served(graph, model) <= TOLERANCE


def test_a_mask_changed_between_two_layers() -> None:
    class Between(Tiny):
        def forward(self, input_ids, position_ids):
            x = self.embed(input_ids) + self.place(position_ids)
            keep = causal(self, position_ids)
            x = x + self.layers[0](x, position_ids, {"keep": keep})
            keep.fill_(True)
            return self.head(x + self.layers[1](x, position_ids, {"keep": keep}))

    model = Between(*(Attention(4, 2, mask=lambda module, p, keep: keep) for _ in range(2))).eval()
    assert [s.causal for s in trace(model).sites] == [True, False]


class ReadsWhatTheMaskChanged(Tiny):
    """Positions are changed in place for the masks and read again behind them, under another name."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        changed = again = position_ids * 1
        x = self.embed(input_ids) + self.place(position_ids)
        changed += 1
        for layer in self.layers:
            x = x + layer(x, changed, {})
        return self.head(x + self.place(again))


def test_a_change_for_the_mask_that_others_read_stays() -> None:
    model = ReadsWhatTheMaskChanged(Attention(4, 2, mask=causal)).eval()
    assert served(trace(model), model) <= TOLERANCE


def test_other_positions_of_the_call_are_not_those_of_the_tokens() -> None:
    model = tiny(mask=lambda module, p, positions: (positions[:, None] <= p[..., None])[:, None])
    refused(model, "it depends on L.*positions", positions=torch.arange(23)[None])


# The pass itself.


def test_counts_and_leaves_nothing_of_the_mask() -> None:
    graph = trace(tiny(mask=window(8)))
    gm = graph.raised
    assert find_sdpa(gm.graph) == [] and len(site_nodes(gm.graph)) == 2
    names = {getattr(n.target, "__name__", n.target) for n in gm.graph.nodes}
    assert not names & {"le", "gt", "and_", "repeat_interleave"}  # the mask and the repeats are gone
    assert raise_sdpa(gm) == (0, {})
    # Dynamo reads its own module again, and the plain way runs it.
    graph = trace(tiny(mask=window(8)))
    before = str(graph.gm.graph)
    _ = graph.sites
    assert str(graph.gm.graph) == before and len(find_sdpa(graph.gm.graph)) == 2


def test_one_backend_object_raises_each_graph_apart() -> None:
    backend = QuireBackend(QuireOptions(compiler="eager"))
    for size in (8, 16):
        torch.compile(tiny(mask=window(size)), backend=backend, dynamic=True)(
            torch.zeros(1, 9, dtype=torch.long), torch.arange(9)[None])
    assert [{s.window for s in g.sites} for g in backend.graphs] == [{8}, {16}]
