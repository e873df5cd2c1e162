"""``torch.compile(backend="quire")``: one trace, the plain way outside a step and the paged way inside, options, errors."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from quire import AttentionCapabilities, CommonAttentionMetadata, UnsupportedAttention, step
from quire.attn_ops.attention import attention
from quire.attn_ops.kv_cache import PagedKVCache
from quire.attn_ops.registry import get_backend
from quire.attn_ops.step import Step, running
from quire.passes.backend import QuireBackend, quire_backend
from quire.passes.options import QuireOptions
from tests.passes.models import DIM, HIDDEN, Attention, Tiny, inputs, tiny

TOLERANCE = 1e-5  # float32, sums of up to 22 numbers of order 1; eps is 1.2e-7
EAGER = {"compiler": "eager"}
TABLE = [3, 1, 7, 4, 2]


def cache(num_layers: int = 2, **options) -> PagedKVCache:
    return PagedKVCache(**{**dict(num_layers=num_layers, num_pages=9, page_size=4, num_kv_heads=2, head_dim=DIM,
                                  dtype=torch.float32, device="cpu"), **options})


def metadata(count: int, total: int) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.build([count], [total], [TABLE], page_size=4)


def compiled(model: nn.Module, **options):
    return torch.compile(model, backend=quire_backend, dynamic=True, options={**EAGER, **options})


def plain(model, sequence, begin=0):
    with torch.no_grad():
        return model(sequence[None], torch.arange(len(sequence))[None])[:, begin:]


def run(model, sequence, begin, end, kv, attention="auto"):
    """A paged step over sequence[begin:end]."""
    meta = metadata(end - begin, end)
    with step(kv, meta, attention=attention), torch.no_grad():
        return model(sequence[None, begin:end], meta.positions[None])


def close(got, wanted) -> bool:
    return (got - wanted).abs().max().item() <= TOLERANCE


# Two ways, one trace.


@pytest.mark.parametrize("order", ["plain first", "paged first", "alternating"])
def test_two_ways_one_graph(order) -> None:
    """Whichever way comes first, Dynamo traces once, and both ways are right."""
    model, (sequence,), kv = tiny(), inputs(17), cache()
    quire = compiled(model)
    steps = [lambda b=b, e=e: close(run(quire, sequence, b, e, kv), plain(model, sequence[:e], b))
             for b, e in [(0, 5), (5, 7), (7, 17)]]
    plains = [lambda n=n: close(quire(sequence[None, :n], torch.arange(n)[None]), plain(model, sequence[:n]))
              for n in (4, 9, 17)]
    calls = {"plain first": plains + steps, "paged first": steps + plains,
             "alternating": [call for pair in zip(plains, steps, strict=True) for call in pair]}[order]
    counters.clear()
    with torch.no_grad():
        assert all(call() for call in calls)
    assert counters["stats"]["unique_graphs"] == 1


def test_training_through_the_plain_way() -> None:
    """Gradients are those of the model; dropout and the like stay what they are."""
    model = tiny().train()
    twin, (sequence,) = copy.deepcopy(model), inputs(11)
    quire = compiled(model)
    for each in (quire, twin):
        each(sequence[None], torch.arange(11)[None]).square().mean().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=TOLERANCE)


# One token.


def test_a_mask_that_one_token_does_not_show() -> None:
    """A window of three, by a mask; refused, non-causal, is refused for one token too."""
    def window(module, position_ids):
        distance = position_ids[0, :, None] - position_ids[0]
        return (distance >= 0) & (distance < 3)

    model, (sequence,), kv = tiny(mask=window), inputs(9), cache()
    quire = compiled(model)
    for begin, end in [(0, 1), (1, 7), (7, 8), (8, 9)]:
        assert close(run(quire, sequence, begin, end, kv), plain(model, sequence[:end], begin))
    with pytest.raises((BackendCompilerFailed, UnsupportedAttention), match="no non-causal attention"):
        run(compiled(tiny(is_causal=False)), sequence, 0, 1, cache())


class Emitting(nn.Module):
    """A layer that calls the semantic op itself."""

    def __init__(self, layer: int, window: int | None = None) -> None:
        super().__init__()
        self.layer, self.window = layer, window
        self.qkv = nn.Linear(HIDDEN, HIDDEN * 2)

    def forward(self, x, position_ids, extra):
        q, k, v = (t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in self.qkv(x).split([16, 8, 8], dim=-1))
        out = attention(q, k, v, None, layer=self.layer, scale=0.5, window=self.window, softcap=None, chunk=None,
                        causal=True)
        return out.transpose(1, 2).flatten(2)


def test_one_token_of_a_model_that_emits_the_op() -> None:
    model, (sequence,) = Tiny(Emitting(0), Emitting(1, window=3)).eval(), inputs(9)
    quire, kv = compiled(model), cache()
    for begin, end in [(0, 1), (1, 6), (6, 7), (7, 8), (8, 9)]:
        assert close(run(quire, sequence, begin, end, kv), plain(model, sequence[:end], begin))
    model, (sequence,) = Tiny(Emitting(7), Emitting(3)).eval(), inputs(9)
    quire, kv = compiled(model), cache(layer_ids=[3, 7])
    assert close(run(quire, sequence, 0, 9, kv), plain(model, sequence))


# What goes wrong, loudly.


def test_a_doubled_layer_is_refused() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"layers \[4\] attend more than once in one forward"):
        run(compiled(Tiny(Emitting(4), Emitting(4)).eval()), inputs(9)[0], 0, 9, cache(layer_ids=[4, 5]))


def test_a_mixture_of_routes_is_refused() -> None:
    model = Tiny(Emitting(0), Attention(4, 2, is_causal=True)).eval()
    with pytest.raises(BackendCompilerFailed, match="quire does not mix the two in one model"):
        run(compiled(model), inputs(9)[0], 0, 9, cache())


@pytest.mark.parametrize("model, why", [(Tiny(), "no attention was found"), (tiny(is_causal=False), "no non-causal attention")])
def test_refused_models_still_run_plain(model, why) -> None:
    model, (sequence,) = model.eval(), inputs(9)
    quire = compiled(model)
    for _ in range(2):
        assert close(quire(sequence[None], torch.arange(9)[None]), plain(model, sequence))
        with pytest.raises((BackendCompilerFailed, UnsupportedAttention), match=why):
            run(quire, sequence, 0, 9, cache())


# Options.


def test_options() -> None:
    assert QuireOptions.of(None) == QuireOptions() == QuireOptions.of({})
    assert QuireOptions.of({"attention": "triton", "page_size": 8}).page_size == 8
    with pytest.raises(TypeError, match=r"unknown options for backend 'quire': \['atention'\]; it takes \['attention'"):
        QuireOptions.of({"atention": "triton"})
    with pytest.raises(ValueError, match="compiler must be one of inductor, inductor-whole, eager; got 'gcc'"):
        QuireOptions(compiler="gcc")
    with pytest.raises(ValueError, match=r"unknown fusions \['nope'\]; there are .*, 'all' and 'none'"):
        QuireOptions(fusions=["nope"])
    assert QuireOptions(fusions="rope").fusions == ("rope",)
    assert QuireOptions(fusions="projections, rope").fusions == ("projections", "rope")
    graph = torch.fx.symbolic_trace(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"takes no mode \(got 'reduce-overhead'\): CUDA graphs are quire's own"):
        quire_backend(graph, [], mode="reduce-overhead")


def test_the_backend_that_was_asked_for_is_used() -> None:
    """By option, or by the step; the step's choice counts, and one that cannot serve is refused, not replaced. Whether it is
    asked for by name or chosen, its graph is one."""
    model, (sequence,) = tiny(), inputs(9)
    for asked in ("torch_native", "auto"):
        torch._dynamo.reset()
        backend = QuireBackend(QuireOptions(compiler="eager", attention=asked))
        quire = torch.compile(model, backend=backend, dynamic=True)
        for name in ("auto", "torch_native"):
            assert close(run(quire, sequence, 0, 9, cache(), attention=name), plain(model, sequence))
        (graph,) = backend.graphs
        assert [p.selection.backend.name for p in graph.compilations.values()] == ["torch_native"]
    with pytest.raises(UnsupportedAttention, match="attention='flashinfer' cannot serve this model on cpu"):
        run(quire, sequence, 0, 9, cache(), attention="flashinfer")


def test_a_step_may_bring_a_backend_that_is_not_registered() -> None:
    seen = []

    def counted(*args, **kwargs):
        seen.append(kwargs)
        return get_backend("torch_native").op(*args, **kwargs)

    own = dataclasses.replace(get_backend("torch_native"), name="own", op=counted,
                              capabilities=AttentionCapabilities(devices=frozenset({"cpu"}),
                                                                 dtypes=frozenset({torch.float32})))
    model, (sequence,) = tiny(), inputs(9)
    quire = compiled(model)
    meta = metadata(9, 9)
    with running(Step(cache(), meta, attention=own)), torch.no_grad():
        out = quire(sequence[None], meta.positions[None])
    assert close(out, plain(model, sequence)) and len(seen) == 2


def test_options_of_the_cache_are_checked() -> None:
    model, (sequence,) = tiny(), inputs(9)
    raises = (ValueError, BackendCompilerFailed)  # inside a first call Dynamo wraps it
    with pytest.raises(raises, match="compiled with page_size=32, and the step's cache has 4"):
        run(compiled(model, page_size=32), sequence, 0, 9, cache())
    with pytest.raises(raises, match="compiled with layout=HND, and the step's cache has NHD"):
        run(compiled(model, layout="HND"), sequence, 0, 9, cache())
    with pytest.raises(raises, match="compiled with kv_cache_dtype=torch.int8, and the step's cache has torch.float32"):
        run(compiled(model, kv_cache_dtype=torch.int8), sequence, 0, 9, cache())
    assert close(run(compiled(model, page_size=4, layout="NHD"), sequence, 0, 9, cache()), plain(model, sequence))
    with pytest.raises(ValueError, match="layout must be 'NHD' or 'HND', got 'XYZ'"):
        QuireOptions(layout="XYZ")
    with pytest.raises(ValueError, match="max_model_len is an option of quire.Engine"):
        quire_backend(None, [], options={"max_model_len": 9})
