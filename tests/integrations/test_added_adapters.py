"""Adapters added to a model whose engine is open (``max_loras``): served without a new trace where they fit, and each state
gives the tokens of transformers' own generate. A server that loads adapters would else trace and capture at each of them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

from peft import LoraConfig, get_peft_model
from peft.utils.hotswap import hotswap_adapter

import quire
from quire.graph_runner.adapter_places import AdapterPlaces
from tests.integrations.test_peft import fill, paged_only
from tests.tiny import assert_idle, hf_greedy, small_llama, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

PROMPT = [5, 6, 7, 8, 9]
PARAMS = quire.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(num_pages=60, max_num_seqs=8, max_model_len=100, enable_lora=True, max_loras=3)
ALL = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear")
FEW = LoraConfig(r=2, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "v_proj"])


def adapted(config: LoraConfig = ALL) -> Any:
    """A model in PEFT's wrapper with the adapter "one"."""
    peft = get_peft_model(small_llama(std=0.3, eos_token_id=None), config, adapter_name="one")
    fill(peft, "one", 0)
    return peft.eval()


def add(peft: Any, name: str, config: LoraConfig, seed: int) -> None:
    peft.add_adapter(name, config)
    fill(peft, name, seed)


class Pair:
    """A model with an engine, and its twin, which transformers runs; both are changed alike."""

    def __init__(self, config: LoraConfig = ALL, **options: Any) -> None:
        self.plain, self.peft = adapted(config), adapted(config)
        self.engine = quire.Engine(self.peft.base_model.model, **OPTIONS | options)

    def both(self, change: Callable[[Any], Any]) -> None:
        for peft in (self.plain, self.peft):
            change(peft)

    def want(self, *names: str | None) -> list[list[int]]:
        """Of transformers with each adapter active; "__base__": none, None: as the model is."""
        found, model = [], self.plain.base_model.model
        before = list(self.plain.active_adapters)
        for name in names:
            with self.plain.disable_adapter() if name == "__base__" else contextlib.nullcontext():
                if name not in (None, "__base__"):
                    self.plain.set_adapter(name)
                found.append(hf_greedy(model, PROMPT, 12))
            self.plain.base_model.set_adapter(before)
        return found

    def check(self, *names: str | None) -> list[list[int]]:
        with paged_only():
            got = tokens(self.engine.generate([PROMPT] * len(names), PARAMS, adapter=list(names)))
        assert got == self.want(*names), names
        return got


@contextlib.contextmanager
def pair(config: LoraConfig = ALL, **options: Any) -> Iterator[Pair]:
    made = Pair(config, **options)
    with made.engine:
        yield made
        made.engine.reset_prefix_cache()
        assert_idle(made.engine)


def traces(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("tracing it again")


def train(peft: Any, name: str) -> None:
    """A step of an optimizer whose kernels PyTorch does not count."""
    parameters = [p for key, p in peft.named_parameters() if f".{name}." in key]
    optimizer = torch.optim.AdamW(parameters, lr=0.2, fused=True)
    for i, p in enumerate(parameters):
        p.grad = torch.linspace(-1, 1, p.numel()).roll(i).view_as(p)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("options", [
    {}, dict(fusions="all", cudagraph_debug=True, cudagraph_capture_sizes=[4, 8]),
    pytest.param(dict(async_stepping=True, enable_prefix_caching=True, page_size=2, prefill_chunk_size=2),
                 marks=pytest.mark.slow)])
def test_a_life_without_a_new_trace(options, caplog) -> None:
    """Added, asked for, active, trained, rescaled, deleted and added again; also the one that the engine began with."""
    with pair(**options) as it:
        seen = it.check("one", None, "__base__")
        it.both(lambda peft: add(peft, "few", FEW, 1))
        seen += it.check("few", "one", "__base__", None)
        it.both(lambda peft: peft.set_adapter("few"))
        seen += it.check(None, "one", "few")
        it.both(lambda peft: add(peft, "all", ALL, 2))
        seen += it.check("all", "few", "__base__", "one", "all", None)
        it.both(lambda peft: train(peft, "all"))
        seen += it.check("all", "few", "one")
        weights = {name: torch.randn(p.shape) / 5 for name, p in it.peft.base_model.model.named_parameters() if ".all." in name}
        it.engine.update_weights_from_tensors(weights)
        it.plain.base_model.model.load_state_dict(weights, strict=False)
        seen += it.check("all", "few", "one")
        it.both(lambda peft: peft.set_adapter("one"))
        it.both(lambda peft: peft.delete_adapter("few"))
        seen += it.check("all", "one", None)
        with pytest.raises(ValueError, match="the model has no adapter 'few'; it has 'all', 'one'"):
            it.engine.generate(PROMPT, PARAMS, adapter="few")
        it.both(lambda peft: add(peft, "third", FEW, 3))
        seen += it.check("all", "third", "one")
        it.both(lambda peft: (peft.set_adapter("third"), peft.delete_adapter("one")))
        seen += it.check("all", "third", None)
        it.both(lambda peft: add(peft, "one", FEW, 4))
        seen += it.check("all", "one", "third", "__base__")
        it.both(lambda peft: [m.set_scale("all", 0.5) for m in peft.modules() if hasattr(m, "lora_A") and "all" in m.scaling])
        seen += it.check("all", "one")
    assert traces(caplog) == 0 and len({tuple(each) for each in seen}) == 9


DORA = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
#: What has no place, and why, by what the log says.
MISFITS: dict[str, tuple[LoraConfig, str]] = {
    "rank": (LoraConfig(r=17, target_modules=["q_proj"]), r"its rank is 17, and places have 16 \(max_lora_rank\)"),
    "DoRA": (DORA, r"it is more than LoRA of a linear layer \(DoRA, for one\)"),
    "a bias": (LoraConfig(r=2, target_modules=["o_proj"], lora_bias=True), "it is one that is more than two matrices"),
    "another layer": (LoraConfig(r=2, target_modules=["q_proj", "down_proj"]), r"down_proj\S* was (replaced|added)"),
    "no place": (FEW, r"4 adapters, 'one', 'other', 'third', 'two', are more than the places of max_loras=3"),
}


@pytest.mark.parametrize("which", [
    pytest.param(n, marks=[pytest.mark.slow] * (n in ("DoRA", "another layer"))) for n in MISFITS])
def test_what_does_not_fit_is_traced(which, caplog) -> None:
    """Once, with the right result and the reason in the log; what fits later needs no trace again."""
    config, why = MISFITS[which]
    begin = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"])
    with pair(begin, max_loras=3 if which == "no place" else 4) as it:
        it.both(lambda peft: add(peft, "two", FEW, 1))
        it.both(lambda peft: add(peft, "third", FEW, 2))
        it.check("one", "two", "third")
        if which != "no place":
            it.both(lambda peft: peft.delete_adapter("third"))
            it.check("one", "two")
        assert traces(caplog) == 0
        it.both(lambda peft: add(peft, "other", config, 3))
        names = ["one", "two", "__base__", *["third"] * (which == "no place")]
        if which == "a bias":  # no request can choose then; what the model has active is served
            it.both(lambda peft: peft.set_adapter("other"))
            it.check(None)
            it.both(lambda peft: (peft.set_adapter("one"), peft.delete_adapter("other")))
        else:
            assert len(set(map(tuple, it.check("other", *names)))) == 1 + len(names)
            assert traces(caplog) == 1
        assert sum(bool(re.search(why, line)) for line in caplog.text.splitlines() if "tracing it again" in line) == 1
        if which in ("rank", "DoRA", "another layer"):
            before = traces(caplog)
            it.both(lambda peft: add(peft, "later", FEW, 4))
            it.check("later", "other", *names)
            it.both(lambda peft: train(peft, "other"))
            it.check("later", "other", *names)
            assert traces(caplog) == before
            it.both(lambda peft: peft.delete_adapter("other"))
            it.check("later", *names)
            assert traces(caplog) == before + (which == "DoRA")  # the others have places in the new trace


def test_requests_that_run(caplog) -> None:
    """An addition does not disturb them, nor what is cached; a deletion ends those of that adapter, by name; one that is
    another under its name is what its requests go on with, computed again."""
    with pair(enable_prefix_caching=True, page_size=2) as it:
        it.both(lambda peft: add(peft, "two", ALL, 1))
        (one, two), scheduler = it.want("one", "two"), it.engine.scheduler
        stream = it.engine.stream([PROMPT] * 2, PARAMS, adapter=["one", "two"], raise_on_error=False)
        got: dict[int, list[int]] = {0: [], 1: []}
        ended: dict[int, Any] = {}
        for turn, event in enumerate(stream):
            got[event.index] += event.token_ids
            if event.finished:
                ended[event.index] = event.output
            if turn == 3:
                epoch = scheduler.prefixes.epoch
                it.both(lambda peft: add(peft, "three", FEW, 2))
            if turn == 7:
                assert scheduler.num_preemptions == 0 and scheduler.prefixes.epoch == epoch
                it.both(lambda peft: peft.delete_adapter("two"))
        assert ended[0].token_ids == got[0] == one
        assert ended[1].error == "its adapter two was deleted" and ended[1].token_ids == got[1] == two[: len(got[1])]
        assert 0 < len(got[1]) < 12
        it.check("three", "one")
        saved = scheduler.prefixes.stats.saved_tokens
        it.both(lambda peft: add(peft, "two", FEW, 3))
        it.check("one")
        assert scheduler.prefixes.stats.saved_tokens > saved  # of an adapter that is not concerned
        saved = scheduler.prefixes.stats.saved_tokens
        it.both(lambda peft: fill(peft, "one", 7))
        it.check("one")
        assert scheduler.prefixes.stats.saved_tokens == saved
        stream = it.engine.stream(PROMPT, PARAMS, adapter="two")
        first = next(stream).token_ids
        for peft in (it.plain, it.peft):
            peft.delete_adapter("two")
            add(peft, "two", ALL, 9)
        rest = [t for event in stream for t in event.token_ids]
        it.plain.set_adapter("two")
        assert rest == hf_greedy(it.plain.base_model.model, [*PROMPT, *first], 11)
        it.plain.set_adapter("one")
    assert traces(caplog) == 0


def test_a_busy_engine_sees_a_step_of_the_optimizer() -> None:
    """The copy in the place is written before the next step, though nothing has counted the change."""
    with pair() as it:
        it.both(lambda peft: add(peft, "two", ALL, 1))
        stream = it.engine.stream(PROMPT, PARAMS, adapter="two")
        next(stream)
        train(it.peft, "two")
        next(stream)
        weight, places = it.peft.base_model.model.model.layers[0].self_attn.q_proj, it.engine._live.places
        assert places is not None
        place = places.names.index("two")
        number = [id(layer) for layer in places._layers].index(id(weight))
        a, b = places.lora.pair(number, place)
        assert torch.equal(a[:4], weight.lora_A["two"].weight) and torch.equal(b[:, :4], weight.lora_B["two"].weight * 1.5)
        assert not a[4:].any() and not b[:, 4:].any()
        stream.close()
        it.peft.delete_adapter("two")
        it.engine.generate(PROMPT, PARAMS)
        assert places.names.count(None) == 2 and not any(t.any() for t in places.lora.pair(number, place))


def test_merged_and_disabled(caplog) -> None:
    with pair() as it:
        it.both(lambda peft: add(peft, "two", ALL, 1))
        seen = it.check("two", "one")
        it.both(lambda peft: peft.merge_adapter(["two"]))
        seen += it.check(None)
        with pytest.raises(ValueError, match="has merged 'two' into its weights"):
            it.engine.generate(PROMPT, PARAMS, adapter="one")
        it.both(lambda peft: peft.unmerge_adapter())
        it.check(None, "two")
        it.both(lambda peft: peft.base_model.disable_adapter_layers())
        it.both(lambda peft: add(peft, "three", FEW, 2))
        seen += it.check(None)
        assert tokens(it.engine.generate([PROMPT] * 2, PARAMS, adapter=["three", "two"]))[1] == seen[0]
        it.both(lambda peft: peft.base_model.enable_adapter_layers())
        seen += it.check("three", None)
        it.both(lambda peft: peft.merge_adapter())
        it.check(None)
    assert traces(caplog) == 0 and len(set(map(tuple, seen))) == 4


def test_an_addition_and_another_change(caplog) -> None:
    """Only an addition by itself needs no trace. While requests run, too: the next step sees both."""
    with pair() as it:
        it.check("one")
        stream = it.engine.stream(PROMPT, PARAMS)
        next(stream)
        it.both(lambda peft: add(peft, "new", FEW, 1))
        it.both(lambda peft: setattr(peft.base_model.model.model.norm, "variance_epsilon", 0.5))
        next(stream)
        assert traces(caplog) == 1
        list(stream)
        it.check("new", "one")
        for count, change in enumerate([
                lambda peft: setattr(peft.base_model.model.model.layers[0].input_layernorm, "variance_epsilon", 3.0),
                lambda peft: peft.base_model.model.model.layers[0].mlp.register_forward_hook(lambda m, args, out: out * 0.5)]):
            it.both(lambda peft: peft.delete_adapter("new") if "new" in peft.peft_config else None)
            it.both(lambda peft: add(peft, f"new{count}", FEW, 1 + count))  # noqa: B023
            it.both(change)
            it.check(f"new{count}", "one", None)
            assert traces(caplog) == 2 + count


@pytest.mark.parametrize("max_loras", [None, 2])
def test_hotswap(max_loras, tmp_path, caplog) -> None:
    """PEFT's way to put an adapter in the place of another writes through ``p.data``."""
    other = adapted()
    fill(other, "one", 8)
    other.save_pretrained(tmp_path)
    with pair(max_loras=max_loras) as it:
        seen = it.check("one", None)
        it.both(lambda peft: hotswap_adapter(peft, str(tmp_path / "one"), "one", torch_device="cpu"))
        seen += it.check("one", None)
    assert traces(caplog) == 0 and seen[0] == seen[1] != seen[2] == seen[3]


@pytest.mark.parametrize("options", [
    dict(enable_lora=False), dict(max_loras=2), dict(max_loras=None, dtype=torch.bfloat16)], ids=str)
def test_hotswap_beside_requests_and_kept_pages(options, tmp_path, caplog) -> None:
    """What follows has the new adapter, whose scaling is the old one's: pages of the old one are not read, nor are its copies,
    while another request keeps the engine busy. Otherwise an engine would mix two adapters, and nothing would say so."""
    other = adapted()
    fill(other, "one", 8)
    other.save_pretrained(tmp_path)
    with pair(enable_prefix_caching=True, page_size=2, **options) as it:
        names = [None] if "enable_lora" in options else ["one"]

        def generate() -> list[list[int]]:
            return tokens(it.engine.generate([PROMPT], PARAMS, adapter=names))

        before = generate()
        assert generate() == before and it.engine.stats().prefix_hits
        busy = it.engine.stream([[40, 41]], quire.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        next(busy)
        hotswap_adapter(it.peft, str(tmp_path / "one"), "one", torch_device="cpu")
        after = generate()
        list(busy)
        it.engine.reset_prefix_cache()
        assert after == generate() != before
    assert traces(caplog) == 0


@pytest.mark.parametrize("options", [dict(enable_lora=False), dict(max_loras=2), dict(dtype=torch.bfloat16)], ids=str)
def test_merged_and_unmerged_with_another_scaling(options, caplog) -> None:
    """Between two steps, so that all looks as before, but PEFT leaves other base weights, which it writes through ``p.data``:
    pages and copies of the old ones are not read."""
    def merge(peft: Any) -> None:
        for layer in [layer for layer in peft.modules() if hasattr(layer, "set_scale")]:
            layer.set_scale("one", 3.0)
            layer.merge(adapter_names=["one"])
            layer.set_scale("one", 1.0)
            layer.unmerge()

    with pair(enable_prefix_caching=True, page_size=2, **options) as it:
        it.both(lambda peft: [layer.set_scale("one", 1.0) for layer in peft.modules() if hasattr(layer, "set_scale")])

        def generate() -> list[list[int]]:
            return tokens(it.engine.generate([PROMPT], PARAMS))

        before = generate()
        assert generate() == before and it.engine.stats().prefix_hits
        busy = it.engine.stream([[40, 41]], quire.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        next(busy)
        merge(it.peft)
        after = generate()
        list(busy)
        it.engine.reset_prefix_cache()
        assert after == generate() != before
    assert traces(caplog) == 0


@pytest.mark.parametrize("max_loras", [None, 2])
def test_a_scaling_while_requests_run(max_loras) -> None:
    """The next request has it, whichever modules the engine has looked at in the steps so far."""
    with pair(max_loras=max_loras) as it:
        params = quire.SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
        busy = it.engine.stream([[40, 41]], params, adapter="__base__")
        for steps in (1, 2, 3):
            for _ in range(steps):
                next(busy)
            for layer in (*it.plain.modules(), *it.peft.modules()):
                if hasattr(layer, "set_scale"):
                    layer.set_scale("one", 0.2 * steps)
            it.check("one")
        list(busy)


def test_an_uncounted_write_while_requests_run() -> None:
    """Through ``p.data``: after ``reset_prefix_cache`` requests have it, from copies of the adapter too."""
    with pair(max_loras=2, enable_prefix_caching=True, page_size=2) as it:
        it.check("one")
        busy = it.engine.stream([[40, 41]], PARAMS, adapter="__base__")
        next(busy)
        it.both(lambda peft: [p.data.mul_(-1) for name, p in peft.named_parameters() if "lora_B" in name])
        it.engine.reset_prefix_cache()
        it.check("one")
        list(busy)


def test_dora_beside_two_that_are_active() -> None:
    """Sums of LoRA adapters do not depend on their order, whatever else the model has."""
    with pair(max_loras=None) as it:
        it.both(lambda peft: (add(peft, "few", FEW, 1), add(peft, "dora", DORA, 2)))
        it.both(lambda peft: peft.base_model.set_adapter(["one", "few"]))
        it.check("one", None, "__base__")


def test_transformers_own_adapters(caplog) -> None:
    """``model.add_adapter`` makes the new adapter active, and ``generate`` in rows that advance together has it."""
    plain, model = (small_llama(std=0.3, eos_token_id=None) for _ in range(2))
    for each in (plain, model):
        each.add_adapter(ALL, "one")
        fill(each, "one", 0)
    quire.paged(model, **OPTIONS)
    for i, name in enumerate(("one", "two", "three")):
        for each in (plain, model):
            if i:
                each.add_adapter(FEW, name)
                fill(each, name, i)
        with paged_only():
            for options in ({}, dict(no_repeat_ngram_size=2)):
                assert hf_greedy(model, PROMPT, 12, **options) == hf_greedy(plain, PROMPT, 12, **options)
    assert traces(caplog) == 0
    model.generate.close()


def test_in_another_dtype() -> None:
    """Of a model in float32 that is served in bfloat16 the adapters in places are rounded to that, and follow."""
    with pair(dtype=torch.bfloat16) as it:
        it.both(lambda peft: add(peft, "two", LoraConfig(r=4, lora_alpha=5, target_modules="all-linear"), 1))
        live = it.engine._live
        layer = it.peft.base_model.model.model.layers[0].mlp.up_proj
        for seed in range(2):
            fill(it.peft, "two", seed)
            it.engine.generate(PROMPT, PARAMS, adapter="two")
            assert live.places is not None and live.cast is not None
            number = [id(each) for each in live.places._layers].index(id(layer))
            a, b = live.places.lora.pair(number, live.places.names.index("two"))
            assert torch.equal(a[:4], layer.lora_A["two"].weight.bfloat16().float())
            assert torch.equal(b[:, :4], layer.lora_B["two"].weight.bfloat16().float() * 1.25) and b.dtype == torch.float32
        assert id(layer.lora_A["two"].weight) not in live.cast.stand_ins
        memory = it.engine.stats().weight_bytes
        assert memory > live.cast.copies.num_bytes + live.places.num_bytes > live.places.num_bytes > 0


def test_what_a_place_cannot_hold_any_more(caplog) -> None:
    """A hook on A, or A in another dtype, is seen while the engine is busy, too."""
    with pair() as it:
        it.both(lambda peft: add(peft, "two", FEW, 1))
        long = quire.SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        stream = it.engine.stream(PROMPT, long, adapter="two")
        next(stream)
        layer = it.peft.base_model.model.model.layers[0].self_attn.v_proj
        for part in (layer.lora_A, layer.lora_B):
            part["two"].weight.data = part["two"].weight.data.double()
        list(stream)
        assert "v_proj: it is in torch.float64 and torch.float64, and places are in torch.float32): tracing" in caplog.text
        layer.lora_A["one"].register_forward_hook(lambda module, args, out: out)
        list(it.engine.stream(PROMPT, long))
        assert "it is one with hooks" in caplog.text


def test_options_and_limits(caplog) -> None:
    for options, message in ((dict(max_lora_rank=4), "max_lora_rank=4 is the rank of each of max_loras, which is None"),
                             (dict(max_loras=64), "max_loras must be at most 63"), (dict(max_loras=0), "at least 1")):
        with pytest.raises(ValueError, match=message):
            quire.Engine(small_llama(), **options)
    peft = adapted()
    peft.add_adapter("dora", DORA)
    model = peft.base_model.model
    with pytest.raises(ValueError, match="max_loras=63 and 1 adapters that have no place are more than the 63"):
        AdapterPlaces(model, 63, None, None)
    places = AdapterPlaces(model, 2, 3, None)
    assert places.built_in == ["dora", "one"] and places.names == [None, None] and places.lora.rank == 3
    assert AdapterPlaces(model, 2, None, None).names == ["one", None]
    peft.add_adapter("wide", LoraConfig(r=20, target_modules=["q_proj"]))
    places = AdapterPlaces(model, 2, None, None)
    assert places.names == ["one", "wide"] and places.lora.rank == 20
