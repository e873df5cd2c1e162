"""PEFT's merge_adapter and unmerge_adapter on a model whose engine is open: each state gives the tokens of the plain model, and
after the first of them no state needs a trace. A merge that is missed applies an adapter twice, or serves keys of old weights.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="pip install 'quire[integrations]'")

from peft import IA3Config, LoraConfig, get_peft_model

import quire
from quire.passes.capture.lora import active_adapters, check_adapters, merged_adapters
from tests.integrations.test_peft import fill, paged_only
from tests.tiny import assert_idle, hf_greedy, small_llama, tokens

pytestmark = pytest.mark.usefixtures("tokens_unchecked", "traces_kept")

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10, 11], [20, 21]]
PARAMS = quire.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(num_pages=60, max_num_seqs=8, max_model_len=100)
LORA = LoraConfig(r=4, target_modules="all-linear")
DORA = LoraConfig(r=4, target_modules="all-linear", use_dora=True)
SMALL = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_rslora=True)


def adapted(first: LoraConfig = LORA, second: LoraConfig = LORA) -> tuple[Any, Any]:
    """A model, and it in PEFT's wrapper with the adapters "one", which is active, and "two"."""
    model = small_llama(std=0.3, eos_token_id=None)
    peft = get_peft_model(model, copy.deepcopy(first), adapter_name="one")
    peft.add_adapter("two", copy.deepcopy(second))
    for i, name in enumerate(("one", "two")):
        fill(peft, name, i)
    return model, peft.eval()


def want(adapter: str, prompt: int = 0, first: LoraConfig = LORA, second: LoraConfig = LORA) -> list[int]:
    plain, peft = adapted(first, second)
    with peft.disable_adapter() if adapter == "__base__" else contextlib.nullcontext():
        if adapter != "__base__":
            peft.set_adapter(adapter)
        return hf_greedy(plain, PROMPTS[prompt], 12)


def enable(on: bool) -> Callable[[Any], None]:
    return lambda peft: peft.base_model.enable_adapter_layers() if on else peft.base_model.disable_adapter_layers()


#: What a user may do, one after the other. PEFT's forward of a model that is disabled takes out what is merged, and so does
#: ``set_adapter``.
STEPS: list[tuple[str, Callable[[Any], None]]] = [
    ("merged", lambda peft: peft.merge_adapter()),
    ("unmerged", lambda peft: peft.unmerge_adapter()),
    ("switched", lambda peft: peft.set_adapter("two")),
    ("the other merged", lambda peft: peft.merge_adapter()),
    ("disabled while merged", enable(False)),
    ("enabled", enable(True)),
    ("merged in other memory", lambda peft: peft.merge_adapter(safe_merge=True)),
    ("switched while merged", lambda peft: peft.set_adapter("one")),
    ("one merged that is not active", lambda peft: peft.merge_adapter(adapter_names=["two"])),
    ("the active one merged, too", lambda peft: peft.merge_adapter()),
    ("both unmerged", lambda peft: peft.unmerge_adapter()),
    ("merged and disabled", lambda peft: (peft.merge_adapter(), enable(False)(peft))),
    ("enabled at last", enable(True))]


@pytest.mark.parametrize(("first", "second", "door"), [
    (LORA, LORA, "engine"), pytest.param(DORA, SMALL, "engine", marks=pytest.mark.slow),
    pytest.param(LORA, LORA, "lockstep", marks=pytest.mark.slow),
    pytest.param(SMALL, SMALL, "fused", marks=pytest.mark.slow),
    pytest.param(LORA, LORA, "enable_lora", marks=pytest.mark.slow)])
def test_merging_is_traced_once(first, second, door, caplog) -> None:
    """A trace at each merge would cost more than what is generated with it."""
    (plain, plain_peft), (model, peft) = adapted(first, second), adapted(first, second)
    options = OPTIONS | dict(fusions="all" if door == "fused" else "none", enable_prefix_caching=True)
    if door != "lockstep":
        options |= dict(enable_lora=door == "enable_lora")
    quire.paged(model, **options)
    engine = model.generate.engine
    seen, traces = [], []
    alike = first.target_modules == second.target_modules  # else the layers of only one would differ from the others
    steps = [step for step in STEPS if alike or step[0] != "one merged that is not active"]
    for what, change in [("as it was", lambda peft: None), *steps]:
        for each in (plain_peft, peft):
            change(each)
        rule = dict(no_repeat_ngram_size=2) if door == "lockstep" else {}
        expected = [hf_greedy(plain, p, 12, **rule) for p in PROMPTS]
        with paged_only():
            got = [hf_greedy(model, p, 12, **rule) for p in PROMPTS] if rule else tokens(engine.generate(PROMPTS, PARAMS))
        assert got == expected, what
        assert [layer.merged_adapters for layer in model.modules() if hasattr(layer, "merged_adapters")] == [
            layer.merged_adapters for layer in plain.modules() if hasattr(layer, "merged_adapters")], what
        seen.append(expected)
        traces.append(caplog.text.count("tracing it again"))
    assert len(set(map(str, seen))) >= 3 + alike  # one, two, none, both
    assert traces == [0] + [int(door != "enable_lora")] * len(steps)
    model.generate.close()


def test_an_engine_of_a_merged_model() -> None:
    """It serves the model as it is, and each request's own adapters once nothing is merged; none of it is traced again."""
    model, peft = adapted()
    peft.merge_adapter()
    with quire.Engine(model, enable_lora=True, **OPTIONS) as engine:
        runner = engine.runner
        assert tokens(engine.generate(PROMPTS[0], PARAMS)) == [want("one")]
        for adapter in ("one", "two", "__base__"):
            with pytest.raises(ValueError, match=f"adapter='{adapter}' asks for a choice, and the model has merged 'one' into "
                                                 r"its weights. unmerge_adapter\(\) takes it out"):
                engine.generate(PROMPTS[0], PARAMS, adapter=adapter)
        outputs = engine.generate([PROMPTS[0]] * 2, PARAMS, adapter=[None, "two"], raise_on_error=False)
        assert outputs[0].token_ids == want("one") and "unmerge_adapter" in str(outputs[1].error)
        peft.unmerge_adapter()
        names = ["two", "one", "__base__"]
        assert tokens(engine.generate([PROMPTS[0]] * 3, PARAMS, adapter=names)) == list(map(want, names))
        assert engine.runner is runner
        assert_idle(engine)


@pytest.mark.parametrize("options", [{}, dict(async_stepping=True, enable_prefix_caching=True, page_size=2)])
def test_a_merge_while_requests_run(options, caplog) -> None:
    """Those of the model's own adapters go on, merged or not; a choice of adapters ends by name: the merged weights do not have
    it. Nothing that was computed before is read again."""
    model, peft = adapted()
    with quire.Engine(model, enable_lora=True, **OPTIONS | options) as engine:
        stream = engine.stream([*PROMPTS, PROMPTS[0], PROMPTS[0]], PARAMS, adapter=[None, None, None, "two", "one"],
                               raise_on_error=False)
        ended: dict[int, Any] = {}
        for turn, event in enumerate(stream):
            if turn == 9:
                before = engine.scheduler.num_preemptions
                peft.merge_adapter()
            if turn == 24:
                assert engine.scheduler.num_preemptions >= before + len(PROMPTS)
                peft.unmerge_adapter()
            if event.finished:
                ended[event.index] = event.output
        assert [ended[i].token_ids for i in range(3)] == [want("one", i) for i in range(3)]
        for index, name in ((3, "two"), (4, "one")):
            assert 0 < len(ended[index].token_ids) < 12
            assert ended[index].error == (f"it has the adapter {name}, and the model has merged one into its weights; "
                                          "unmerge_adapter takes it out")
        engine.reset_prefix_cache()
        assert_idle(engine)
        if options:  # pages that are kept
            assert tokens(engine.generate(PROMPTS[1], PARAMS)) == [want("one", 1)]
            saved = engine.scheduler.prefixes.stats.saved_tokens
            peft.merge_adapter()
            assert tokens(engine.generate(PROMPTS[1], PARAMS)) == [want("one", 1)]
            assert engine.scheduler.prefixes.stats.saved_tokens == saved
    assert "tracing it again" not in caplog.text


@pytest.mark.parametrize("expects", [True, False], ids=["later merge", "first merge"])
def test_who_runs_with_other_adapters_than_those_that_are_merged(expects) -> None:
    """What was begun with one adapter is not ended with another."""
    model, peft = adapted()
    with quire.Engine(model, enable_lora=expects, **OPTIONS) as engine:
        stream = engine.stream(PROMPTS[0], PARAMS)
        assert next(stream).token_ids == want("one")[:1]
        peft.merge_adapter(adapter_names=["two"])
        with pytest.raises(RuntimeError, match="it has the adapter one, and the model has merged two into its weights"):
            list(stream)
        assert tokens(engine.generate(PROMPTS[0], PARAMS)) == [want("two")]
        stream = engine.stream(PROMPTS[0], PARAMS)
        first = next(stream).token_ids
        peft.unmerge_adapter()  # "one" is active
        assert first + [t for event in stream for t in event.token_ids] == want("two")
        assert tokens(engine.generate(PROMPTS[0], PARAMS)) == [want("one")]


def test_rows_that_advance_together(caplog) -> None:
    """A processor may merge what its call runs with; with something else merged the call cannot go on."""
    model, peft = adapted()
    quire.paged(model, **OPTIONS)

    def at(length: int, change: Callable[[], None]) -> dict[str, Any]:
        def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == length:
                change()
            return scores
        return dict(logits_processor=[processor])

    with paged_only():
        assert hf_greedy(model, PROMPTS[0], 12, **at(8, peft.merge_adapter)) == want("one")
        assert hf_greedy(model, PROMPTS[0], 12, **at(8, peft.unmerge_adapter)) == want("one")
        assert caplog.text.count("tracing it again") == 1
        with pytest.raises(RuntimeError, match=r"generate\(\) cannot go on: it has the adapter one, and the model has merged"):
            hf_greedy(model, PROMPTS[0], 12, **at(8, lambda: peft.merge_adapter(adapter_names=["two"])))
        assert hf_greedy(model, PROMPTS[0], 12, **at(99, peft.merge_adapter)) == want("two")
    assert caplog.text.count("tracing it again") == 1
    assert_idle(model.generate.engine)
    model.generate.close()


def by_hand(peft: Any) -> None:
    peft.base_model.model.model.layers[0].self_attn.q_proj.merge(adapter_names=["two"])


#: What leaves layers that apply different adapters, beside "one", which is active.
UNEQUAL: dict[str, tuple[LoraConfig, Callable[[Any], None]]] = {
    "one layer": (LORA, by_hand),
    "an adapter of some layers": (SMALL, lambda peft: peft.merge_adapter(adapter_names=["two"])),
    "different ones": (LORA, lambda peft: (by_hand(peft), [
        layer.merge() for layer in peft.modules() if hasattr(layer, "merged_adapters") and not layer.merged_adapters]))}


@pytest.mark.slow
@pytest.mark.parametrize("which", UNEQUAL)
def test_layers_merged_unequally(which, caplog) -> None:
    """The model's forward has a result, which no choice for each token gives: it is traced as it is, at the next step."""
    second, change = UNEQUAL[which]
    (plain, plain_peft), (model, peft) = adapted(second=second), adapted(second=second)
    with quire.Engine(model, enable_lora=True, **OPTIONS) as engine:
        stream = engine.stream(PROMPTS[0], PARAMS)
        assert next(stream).token_ids == want("one", second=second)[:1]
        for each in (plain_peft, peft):
            change(each)
        expected = hf_greedy(plain, PROMPTS[0], 12)
        assert expected not in (want("one", second=second), want("two", second=second))
        assert active_adapters(model) is None and "two" in merged_adapters(model)
        with pytest.raises(RuntimeError, match="adapters cannot be chosen for each request any more"):
            next(stream)
        assert tokens(engine.generate(PROMPTS[0], PARAMS)) == [expected]
        assert "its active adapters are such as no request can have" in caplog.text
        with pytest.raises(ValueError, match="two merged into the weights of some layers.*unmerge_adapter makes them equal"):
            engine.generate(PROMPTS[0], PARAMS, adapter="one")
        peft.unmerge_adapter()
        assert tokens(engine.generate([PROMPTS[0]] * 2, PARAMS, adapter=[None, "two"])) == [
            want("one", second=second), want("two", second=second)]
        assert_idle(engine)


@pytest.mark.slow
def test_dora_merged_beside_another() -> None:
    """Merged, their order is in the weights and any request of the model gets it; unmerged, no request can have it."""
    (plain, plain_peft), (model, peft) = adapted(DORA, DORA), adapted(DORA, DORA)
    with quire.Engine(model, enable_lora=True, **OPTIONS) as engine:
        for each in (plain_peft, peft):
            each.merge_adapter(adapter_names=["one", "two"])
        check_adapters(model)
        assert tokens(engine.generate(PROMPTS[0], PARAMS)) == [hf_greedy(plain, PROMPTS[0], 12)]
        stream = engine.stream(PROMPTS[0], PARAMS)
        assert next(stream).token_ids == hf_greedy(plain, PROMPTS[0], 1)
        peft.unmerge_adapter()
        with pytest.raises(RuntimeError, match="its adapters one, two are no longer merged, and of several together some are"):
            list(stream)
        assert tokens(engine.generate(PROMPTS[0], PARAMS)) == [want("one", first=DORA, second=DORA)]


def test_copies_in_another_dtype_follow_a_merge() -> None:
    """PEFT writes through ``weight.data``, which no version counter shows."""
    model, peft = adapted()
    with quire.Engine(model, enable_lora=True, dtype=torch.bfloat16, **OPTIONS) as engine:
        stream = engine.stream(PROMPTS[0], PARAMS)
        next(stream)
        peft.merge_adapter()
        next(stream)
        weight = model.model.layers[0].mlp.up_proj.base_layer.weight
        assert torch.equal(engine._live.cast.stand_ins[id(weight)], weight.to(torch.bfloat16))
        stream.close()


@pytest.mark.slow
def test_layers_that_are_merged_for_good(caplog) -> None:
    """``merge_and_unload`` replaces modules, so it is traced again, and has no adapters any more."""
    model, peft = adapted()
    with quire.Engine(model, enable_lora=True, **OPTIONS) as engine:
        peft.merge_adapter()
        with pytest.raises(ValueError, match="while they are merged"):
            peft.delete_adapter("one")
        assert tokens(engine.generate(PROMPTS[0], PARAMS)) == [want("one")]
        peft.delete_adapter("two")
        assert tokens(engine.generate(PROMPTS[0], PARAMS)) == [want("one")]
        before = caplog.text.count("tracing it again")
        peft.merge_and_unload()
        assert tokens(engine.generate(PROMPTS[0], PARAMS)) == [want("one")]
        assert caplog.text.count("tracing it again") == before + 1
        with pytest.raises(ValueError, match="the model has no adapters of PEFT"):
            engine.generate(PROMPTS[0], PARAMS, adapter="one")


@pytest.mark.slow
def test_other_layers_that_are_merged_and_disabled_are_refused() -> None:
    """Their forward would change the weights while it runs."""
    model = small_llama(std=0.3)
    peft = get_peft_model(model, IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    fill(peft, "default", 0)
    with quire.Engine(model, **OPTIONS) as engine:
        expected = tokens(engine.generate(PROMPTS[0], PARAMS))
        peft.merge_adapter()
        with peft.disable_adapter(), pytest.raises(RuntimeError, match="adapters are merged and disabled.*unmerge_adapter"):
            engine.generate(PROMPTS[0], PARAMS)
        assert tokens(engine.generate(PROMPTS[0], PARAMS)) == expected
