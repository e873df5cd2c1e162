"""``quire.step`` by hand on the three ways into it: a routed transformers model, a compiled one, a decorated one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, MixtralConfig

import quire
from quire.attn_ops.ops.experts import expert_swiglu
from quire.attn_ops.step import current_step
from quire.passes.backend import quire_backend
from tests.steps import serve
from tests.tiny import assert_unchanged, small_llama, snapshot

pytestmark = pytest.mark.usefixtures("tokens_unchecked")

PAGE = 8
LENGTHS = (19, 7, 12)
# Tokens that each step computes of each sequence.
STEPS = ((5, 7, 0), (9, 0, 3), (1, 0, 0), (4, 0, 9))


@pytest.fixture(autouse=True)
def _fresh_dynamo(request: pytest.FixtureRequest) -> None:
    """Not before a test of the module's one model, which would be traced again for each."""
    if "model" not in request.fixturenames:
        torch._dynamo.reset()


class Decorated(nn.Module):
    """Not a transformers model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(64, 32), nn.Embedding(64, 32)
        self.qkv, self.out, self.head = nn.Linear(32, 64), nn.Linear(32, 32), nn.Linear(32, 50)

    @quire.paged(compiler="eager")
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.qkv(x).split([32, 16, 16], -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


def llama() -> nn.Module:
    return small_llama(0.3, num_hidden_layers=2)


def cache_for(model: nn.Module, num_pages: int = 10, **options: Any) -> quire.PagedKVCache:
    """As PagedKVCache.for_model makes it, without another trace."""
    layers = 1 if isinstance(model, Decorated) else 2
    sizes = dict(num_layers=layers, num_pages=num_pages, page_size=PAGE, num_kv_heads=2, head_dim=8)
    return quire.PagedKVCache(**{**sizes, "dtype": torch.float32, "device": "cpu", **options})


def routed() -> tuple[nn.Module, Callable[..., Any]]:
    model = quire.paged(llama())
    return model, model


def compiled(**options: Any) -> tuple[nn.Module, Callable[..., Any]]:
    model = llama()
    return model, torch.compile(model, backend=quire_backend, options={"compiler": "eager", **options})


def compiled_and_fused() -> tuple[nn.Module, Callable[..., Any]]:
    return compiled(fusions="all")


def decorated() -> tuple[nn.Module, Callable[..., Any]]:
    model = Decorated().eval()
    return model, model


def logits_of(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.logits


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (n,), generator=generator) for n in LENGTHS]


def plain(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return logits_of(model(input_ids=ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False))[0]


def in_steps(call: Callable[..., Any], cache: quire.PagedKVCache, ids: list[torch.Tensor], pad: int = 0, steps: Any = STEPS
             ) -> list[torch.Tensor]:
    """Logits of each sequence; with ``pad`` tokens and rows more in each step."""
    def one_step(tokens: torch.Tensor, meta: quire.CommonAttentionMetadata) -> torch.Tensor:
        meta = meta.padded(meta.num_tokens + pad, meta.num_reqs + pad)
        row = torch.cat([tokens, tokens.new_zeros(pad)])
        with torch.no_grad(), quire.step(cache, meta):
            out = logits_of(call(input_ids=row[None], position_ids=meta.positions[None], use_cache=False))[0]
        assert len(out) == len(row)
        return out

    return serve(one_step, ids, steps, PAGE)


@pytest.mark.parametrize("way", [routed, pytest.param(compiled, marks=pytest.mark.slow), compiled_and_fused, decorated],
                         ids=lambda f: f.__name__)
def test_logits(way) -> None:
    """On caches of either layout, padded and not; and on an int8 cache, near the plain logits and not on them."""
    model, call = way()
    ids, before = sequences(), snapshot(model)
    want = [plain(model, i) for i in ids]
    for layout, pad in (("NHD", 0), ("HND", 3)):
        cache = cache_for(model, layout=layout)
        for t in [*cache.k, *cache.v]:
            t.normal_(0, 30)
        for got, w in zip(in_steps(call, cache, ids, pad), want, strict=True):
            assert (got - w).abs().max() <= 1e-5 * w.abs().max()  # float32, summed in another order
    cache = cache_for(model, dtype=torch.int8)
    for got, w in zip(in_steps(call, cache, ids), want, strict=True):
        off = (got - w).abs().max() / w.abs().max()
        assert 1e-4 <= off <= 5e-2  # codes are 1/254 of a vector's largest number off, at most, in each of the layers
    assert all(scale.count_nonzero() == 2 * sum(LENGTHS) for scale in [*cache.k_scale, *cache.v_scale])
    # Outside of a step it is the plain model, as before.
    assert torch.equal(plain(model, ids[0]), want[0])
    if way is not compiled_and_fused:  # its parameters are views until the process ends: there is nothing to close
        assert_unchanged(model, before)
    assert all(torch.equal(v, before["state"][k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("switched", [pytest.param(False, marks=pytest.mark.slow), True])
def test_experts_in_a_step(switched, monkeypatch) -> None:
    """A model with experts, switched over inside a step as on a GPU; outside it runs by its own implementation."""
    seen = []
    monkeypatch.setattr("quire.passes.capture.hf_experts.wanted", lambda model: switched)

    def counted(*args):
        if not torch.compiler.is_compiling():  # the model is also traced, to be verified
            seen.append(0)
        return expert_swiglu(*args)

    monkeypatch.setattr("quire.passes.capture.hf_experts.expert_swiglu", counted)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=64, num_local_experts=4, num_experts_per_tok=2)).eval()
    want = [plain(model, i) for i in sequences()]
    model = quire.paged(model)
    for got, w in zip(in_steps(model, cache_for(model), sequences(), pad=1), want, strict=True):
        assert (got - w).abs().max() <= 1e-5 * w.abs().max()  # float32, summed in another order
    assert len(seen) == 2 * len(STEPS) * switched
    assert torch.equal(plain(model, sequences()[0]), want[0]) and len(seen) == 2 * len(STEPS) * switched
    assert model.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("way", [pytest.param(routed, marks=pytest.mark.slow), compiled, decorated], ids=lambda f: f.__name__)
def test_no_gradients(way) -> None:
    """Gradients are turned off and on in llama's forward (rotary embeddings), and the caller has them on."""
    model, call = way()
    meta = quire.CommonAttentionMetadata.build([9], [9], [[5, 2, 9]], page_size=PAGE)
    with torch.enable_grad(), quire.step(cache_for(model), meta):
        out = call(input_ids=sequences()[0][None, :9], position_ids=meta.positions[None], use_cache=False)
        assert torch.is_grad_enabled()
    assert not logits_of(out).requires_grad
    assert logits_of(model(sequences()[0][None, :9], position_ids=meta.positions[None])).requires_grad


def in_cuts(call: Callable[..., Any], cache: quire.PagedKVCache, ids: torch.Tensor, cuts: tuple[int, ...]) -> torch.Tensor:
    """Logits of one sequence computed in steps of ``cuts`` tokens."""
    return in_steps(call, cache, [ids], steps=[(n,) for n in cuts])[0]


@pytest.mark.parametrize(("way", "cuts"), [
    (decorated, (5, 1, 1, 3, 1)),  # test_logits has a step of one token of the others
    *(pytest.param(way, (5, 1, 1, 3, 1), marks=pytest.mark.slow) for way in (routed, compiled, compiled_and_fused)),
    *(pytest.param(way, (1, 1, 1, 8), marks=pytest.mark.slow) for way in (routed, compiled, compiled_and_fused, decorated)),
], ids=lambda x: getattr(x, "__name__", str(x)))
def test_steps_of_one_token(way, cuts) -> None:
    """Before and after longer steps. Dynamo makes a trace of its own for one token; see passes/capture/retrace.py."""
    model, call = way()
    ids, cache = sequences()[0][:11], cache_for(model)
    want = plain(model, ids)
    assert (in_cuts(call, cache, ids, cuts) - want).abs().max() <= 1e-5 * want.abs().max()
    assert sum(bool(t.any()) for t in cache.k[0].flatten(0, 1)) == 11  # the padding of one token is not stored
    if way is compiled_and_fused:
        assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) < len(list(model.parameters()))


@pytest.mark.parametrize("way", [pytest.param(compiled, marks=pytest.mark.slow), decorated], ids=lambda f: f.__name__)
def test_lengths_traced_before_the_step(way) -> None:
    """Outside of a step Dynamo traces the first length as a constant; a step of that length runs another trace."""
    model, call = way()
    ids = sequences()[0][:11]
    want = plain(model, ids)
    for length in (1, 4):
        plain(call, ids[:length])
    assert (in_cuts(call, cache_for(model), ids, (4, 1, 4, 1, 1)) - want).abs().max() <= 1e-5 * want.abs().max()


class OnePath(Decorated):
    """Takes another path for a row of one token; ``result`` adds a second result there."""

    def __init__(self, result: bool) -> None:
        super().__init__()
        self.result = result

    @quire.paged(compiler="eager")
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool = False) -> Any:
        out = Decorated.forward.__wrapped__(self, input_ids, position_ids)
        if input_ids.shape[1] == 1:
            return (out, out * 2) if self.result else out * 2
        return (out,)[0]


def test_a_path_for_rows_of_one_token() -> None:
    """A row holds any number of sequences, so a row of one token must compute what longer rows do; or the model is refused."""
    ids = sequences()[0][:7]
    for result, found in ((False, "something else for a row of one token"),
                          (True, "something else for a row of 1 tokens .*2 outputs, not 1")):
        with pytest.raises(quire.UnsupportedAttention, match=found):
            in_cuts(OnePath(result).eval(), cache_for(Decorated()), ids, (5, 1))


def metadata(*counts: int, **options: Any) -> quire.CommonAttentionMetadata:
    table = [[i + 1] for i in range(len(counts))]
    return quire.CommonAttentionMetadata.build(counts, counts, table, **{"page_size": PAGE, **options})


@pytest.fixture(scope="module")
def model():
    return quire.paged(llama())


@pytest.fixture
def cache(model):
    return cache_for(model)


def run(model: Any, tokens: int) -> Any:
    ids = torch.arange(3, 3 + tokens)[None]
    with torch.no_grad():
        return model(input_ids=ids, position_ids=torch.arange(tokens)[None], use_cache=False)


def test_a_model_that_is_not_routed(cache) -> None:
    message = (r"a paged step ended in which layers \[0, 1\] of the KV cache were not attended through quire.*"
               "Compile the model with .*, decorate its forward with quire.paged, or call quire.paged.model. first")
    with pytest.raises(RuntimeError, match=message), quire.step(cache, metadata(3, 2)):
        run(llama(), 5)
    assert current_step() is None


@pytest.mark.parametrize("layers, error, message", [
    (3, RuntimeError, r"layers \[2\] of the KV cache were not attended"),
    (1, ValueError, r"the KV cache has no layer 1; its layers are \[0\]")])
def test_a_cache_of_other_layers(layers, error, message, model) -> None:
    with pytest.raises(error, match=message), quire.step(cache_for(model, num_layers=layers), metadata(5)):
        run(model, 5)


def test_nested(cache, model) -> None:
    with quire.step(cache, metadata(5)):
        with pytest.raises(RuntimeError, match="quire.step inside quire.step: one paged step at a time"):
            with quire.step(cache, metadata(5)):
                raise AssertionError("entered")
        run(model, 5)


@pytest.mark.parametrize("options, message", [
    (dict(page_size=4), "the metadata was built for pages of 4 tokens, the cache has pages of 8"),
    (dict(device="meta"), "the metadata is on meta, the cache on cpu")])
def test_metadata_for_another_cache(options, message, cache) -> None:
    with pytest.raises(ValueError, match=message), quire.step(cache, metadata(3, **options)):
        raise AssertionError("entered")


def test_a_page_past_the_cache(cache) -> None:
    last = cache.num_pages - 1
    build = quire.CommonAttentionMetadata.build
    with pytest.raises(ValueError, match=f"uses page {last + 1}, but the cache has {last + 1} pages, 0 to {last}"):
        with quire.step(cache, build([1, 1], [1, 1], [[last], [last + 1]], page_size=PAGE)):
            raise AssertionError("entered")
    with pytest.raises(RuntimeError, match="not attended"), quire.step(cache, build([1], [1], [[last]], page_size=PAGE)):
        pass


def test_a_page_past_those_of_a_layer() -> None:
    cache = quire.PagedKVCache(num_layers=2, num_pages=64, layer_pages=[64, 8], page_size=PAGE, num_kv_heads=2, head_dim=16,
                               dtype=torch.float32, device="cpu")
    metadata = quire.CommonAttentionMetadata.build([1], [1], [[20]], page_size=PAGE)
    with pytest.raises(ValueError, match="uses page 20, but the cache has 8 pages"), quire.step(cache, metadata):
        raise AssertionError("entered")


@pytest.mark.parametrize("way", [pytest.param(routed, marks=pytest.mark.slow), decorated], ids=lambda f: f.__name__)
def test_wrong_token_count(way) -> None:
    model, call = way()
    cache = cache_for(model)
    for tokens in (4, 6):
        message = f"the model ran on {tokens} tokens inside a paged step whose metadata has 5; pass the batch as one"
        with pytest.raises(ValueError, match=message), quire.step(cache, metadata(3, 2)):
            run(call, tokens)


@pytest.mark.parametrize("way", [pytest.param(routed, marks=pytest.mark.slow), compiled, decorated], ids=lambda f: f.__name__)
def test_positions_of_the_metadata_with_another_row(way) -> None:
    """The row meets them before quire sees it: the error of torch would name sizes of a line in the model."""
    model, call = way()
    meta = metadata(3, 2)
    message = "the model ran on 4 tokens inside a paged step whose metadata has 5; pass the batch as one"
    with pytest.raises(ValueError, match=message), quire.step(cache_for(model), meta), torch.no_grad():
        call(input_ids=torch.ones(1, 4, dtype=torch.long), position_ids=meta.positions[None], use_cache=False)


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_an_error_of_another_module_stays(error, cache, model) -> None:
    """A reward model's, say, on a row of its own."""
    class Other(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> None:
            raise failed

    failed = error("of another model")
    with pytest.raises(error) as caught, quire.step(cache, metadata(5)):
        run(model, 5)
        Other()(torch.ones(1, 3, dtype=torch.long))
    assert caught.value is failed


def test_an_error_of_a_row_of_the_right_length_stays(cache, model) -> None:
    """Blamed on the count, the user would look for the wrong thing."""
    failed = RuntimeError("of a hook")

    def fail(*given: Any) -> None:
        raise failed

    hook = model.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError) as caught, quire.step(cache, metadata(5)):
            run(model, 5)
    finally:
        hook.remove()
    assert caught.value is failed


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8), 0)
    return cache


@pytest.mark.parametrize("rows, inputs, error, message", [
    # Sequences lie end to end in one row.
    (2, dict(position_ids=torch.arange(5).expand(2, 5)), ValueError,
     "the model ran on 10 tokens inside a paged step whose metadata has 5"),
    # Counted from the row's start, positions would be wrong for all sequences but the first.
    (1, {}, quire.UnsupportedAttention, "no position_ids in a paged step"),
    (1, dict(attention_mask=torch.zeros(1, 1, 5, 5)), quire.UnsupportedAttention,
     "attention_mask in a paged step: .*no padding"),
    # The loss would compare the last token of a sequence with the first of the next.
    (1, dict(position_ids=torch.arange(5)[None], labels=torch.ones(1, 5, dtype=torch.long)), quire.UnsupportedAttention,
     "labels in a paged step: .*such as a loss, from the logits"),
    (1, dict(position_ids=torch.arange(5)[None], output_router_logits=True), quire.UnsupportedAttention,
     "output_router_logits in a paged step"),
    (1, dict(position_ids=torch.arange(5)[None], past_key_values=SimpleNamespace(get_seq_length=lambda: 0)),
     quire.UnsupportedAttention, r"past_key_values \(SimpleNamespace\) in a paged step"),
    (1, dict(position_ids=torch.arange(5)[None], past_key_values=filled_cache()), quire.UnsupportedAttention,
     r"past_key_values \(DynamicCache\) in a paged step: .*Pass none, or a new DynamicCache"),
], ids=["two_rows", "no_positions", "a_mask", "labels", "a_loss_of_routers", "a_cache_of_the_users", "a_filled_cache"])
def test_inputs_that_are_no_ragged_row(rows, inputs, error, message, model, cache) -> None:
    with pytest.raises(error, match=message), quire.step(cache, metadata(5)), torch.no_grad():
        model(input_ids=torch.ones(rows, 5, dtype=torch.long), use_cache=False, **inputs)


def test_unknown_and_unfit_backends(model, cache) -> None:
    with pytest.raises(ValueError, match="unknown attention backend 'nope'"):
        with quire.step(cache, metadata(5), attention="nope"):
            raise AssertionError("entered")
    with pytest.raises(quire.UnsupportedAttention, match="flashinfer.* cannot"):
        with quire.step(cache, metadata(5), attention="flashinfer"):
            run(model, 5)


def test_the_bodys_own_error_comes_out(model, cache) -> None:
    with pytest.raises(ZeroDivisionError), quire.step(cache, metadata(5)):
        raise ZeroDivisionError
    assert current_step() is None
    with quire.step(cache, metadata(5)) as step:  # and nothing is left of it
        run(model, 5)
        assert current_step() is step and step.served == {0, 1}


def test_steps_of_two_threads(model) -> None:
    """A step is a matter of its thread."""
    ids = [torch.arange(3, 3 + n) for n in (6, 11)]
    want, got = [plain(model, i) for i in ids], {}
    entered = threading.Barrier(2)

    def work(i: int) -> None:
        cache = cache_for(model)
        meta = quire.CommonAttentionMetadata.build([len(ids[i])], [len(ids[i])], [[1, 2]], page_size=PAGE)
        with torch.no_grad(), quire.step(cache, meta):
            entered.wait(60)
            if i:  # the other thread is inside its step, and runs after this one
                got[i] = model(input_ids=ids[i][None], position_ids=meta.positions[None], use_cache=False).logits[0]
            entered.wait(60)
            if not i:
                got[i] = model(input_ids=ids[i][None], position_ids=meta.positions[None], use_cache=False).logits[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(2):
        assert (got[i] - want[i]).abs().max() <= 1e-5 * want[i].abs().max()


def test_cache_for_model(model) -> None:
    made, ours = quire.PagedKVCache.for_model(model, num_pages=10, page_size=PAGE), cache_for(model)
    assert repr(made) == repr(ours) and made.layer_ids == ours.layer_ids
    assert [t.shape for t in [*made.k, *made.v]] == [t.shape for t in [*ours.k, *ours.v]]


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    """With the options that torch.compile has by default, graph breaks allowed."""
    try:
        pytest.importorskip("torch._inductor.cpp_builder").get_cpp_compiler()
    except Exception:
        pytest.skip("no C++ compiler")
    model = llama()
    ids = sequences()
    want = [plain(model, i) for i in ids]
    for got, w in zip(in_steps(torch.compile(model, backend=quire_backend), cache_for(model), ids), want, strict=True):
        assert (got - w).abs().max() <= 1e-5 * w.abs().max()
