"""What users put into a model, around it or in the place of its parts: followed, or refused with the true reason."""

from __future__ import annotations

import copy
import enum
import functools
import logging
import os
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from torch.nn import functional as F
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM, TemperatureLogitsWarper, masking_utils
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import quire
from quire import Engine, UnsupportedAttention
from tests.tiny import GREEDY, assert_idle, hf_greedy, small_llama, snapshot, tokens

pytestmark = pytest.mark.usefixtures("traces_kept")

IDS = [3, 4, 5]
SHORT = replace(GREEDY, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(num_pages=40, max_num_seqs=4, cudagraph_capture_sizes=[])
BATCH = dict(input_ids=torch.tensor([[0, 5, 6, 7], [9, 3, 11, 12]]), attention_mask=torch.tensor([[0, 1, 1, 1], [1] * 4]))
FACTORS = [1.0]


class Mode(enum.Enum):
    SUM, FIRST = 1, 2


@pytest.fixture
def model() -> Any:
    return small_llama(0.3)


def expected(model: Any) -> list[int]:
    return hf_greedy(model, IDS, 8, eos_token_id=None)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * FACTORS[0]


class Steering:
    """A hook with settings in an object of an object, and in a global list that a function of its reads."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(factor=1.0)

    def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return scaled(out) * self.settings.factor


class Activation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.options = SimpleNamespace(slope=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * self.options.slope


@pytest.mark.slow  # test_model_guard.py has the settings of hooks and modules, and what hooks read
def test_settings_inside_objects(model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    factors = [1.0]
    monkeypatch.setitem(globals(), "FACTORS", factors)
    mlp, hook = model.model.layers[0].mlp, Steering()
    mlp.act_fn = Activation()
    mlp.register_forward_hook(hook)
    mlp.register_forward_hook(Steering())  # settings of the same names
    with Engine(model, **OPTIONS) as engine:
        seen = [expected(model)]
        for holder, name, value in ((hook.settings, "factor", 4.0), (mlp.act_fn.options, "slope", -3.0), (factors, 0, 0.1)):
            assert tokens(engine.generate(IDS, SHORT)) == [seen[-1]]
            if isinstance(holder, list):
                holder[0] = value
            else:
                setattr(holder, name, value)
            with caplog.at_level(logging.WARNING, "quire.graph_runner.live_model"):
                assert tokens(engine.generate(IDS, SHORT)) == [expected(model)]
            assert f"{value}): tracing it again" in caplog.messages[-1]
            seen.append(expected(model))
        assert len({tuple(t) for t in seen}) == len(seen)
        # What the forward does not read may change.
        runner, hook.settings.note, mlp.act_fn.options.note = engine.runner, 3, [1]
        assert tokens(engine.generate(IDS, SHORT)) == [seen[-1]] and engine.runner is runner
        assert_idle(engine)


ABSENT = SimpleNamespace(table={"another": 1.0}, names={"another"}, holder=SimpleNamespace())
LOOKUPS = {  # what a forward asks for, and what gives it another answer
    "get": (lambda: ABSENT.table.get("slope", 1.0), lambda patch: ABSENT.table.update(slope=3.0)),
    "in": (lambda: 3.0 if "gate" in ABSENT.table else 1.0, lambda patch: ABSENT.table.update(gate=True)),
    "set": (lambda: 3.0 if "gate" in ABSENT.names else 1.0, lambda patch: ABSENT.names.add("gate")),
    "hasattr": (lambda: 3.0 if hasattr(ABSENT.holder, "gate") else 1.0, lambda patch: setattr(ABSENT.holder, "gate", True)),
    "getattr": (lambda: getattr(ABSENT.holder, "slope", 1.0), lambda patch: setattr(ABSENT.holder, "slope", 3.0)),
    "getenv": (lambda: float(os.getenv("QUIRE_TEST_SLOPE", "1")), lambda patch: patch.setenv("QUIRE_TEST_SLOPE", "3")),
    "environ": (lambda: float(os.environ.get("QUIRE_TEST_SLOPE", "1")), lambda patch: patch.setenv("QUIRE_TEST_SLOPE", "3")),
}


class Asking(nn.Module):
    def __init__(self, ask: Callable[[], float]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * self.ask()


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("ask", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("get", "getattr", "environ")))
                                 for name in LOOKUPS])
def test_names_that_appear_later(ask: str, hooked: bool, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A steering vector that is put into a table, a flag that is set for the first time: tokens of before would be silently
    wrong."""
    monkeypatch.delenv("QUIRE_TEST_SLOPE", raising=False)
    for name, value in (("table", {"another": 1.0}), ("names", {"another"}), ("holder", SimpleNamespace())):
        monkeypatch.setattr(ABSENT, name, value)
    answer, change = LOOKUPS[ask]
    if hooked:
        model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * answer())
    else:
        model.model.layers[0].mlp.act_fn = Asking(answer)
    with Engine(model, **OPTIONS) as engine:
        before = tokens(engine.generate(IDS, SHORT))
        change(monkeypatch)
        after = tokens(engine.generate(IDS, SHORT))
        assert after == [expected(model)] != before


def test_constants_inside_objects(model: Any) -> None:
    """Values that Dynamo compares as a whole: an enum's member, a tuple, a dtype, in an object that a hook reads."""
    held, added = SimpleNamespace(mode=Mode.SUM, factors=(1.0,), dtype=torch.float32), torch.randn(model.config.hidden_size)

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        out = (out + added if held.mode is Mode.SUM else out - added) * held.factors[0]
        return out.to(held.dtype).float()

    model.model.layers[0].register_forward_hook(hook)
    with Engine(model, **OPTIONS) as engine:
        for name, value in (("mode", Mode.SUM), ("mode", Mode.FIRST), ("factors", (-3.0,)), ("dtype", torch.bfloat16)):
            setattr(held, name, value)
            assert engine.generate([IDS], SHORT)[0].token_ids == expected(model), name


class Options:
    slope = 1.0

    def width(self) -> float:
        return 1.0


class Others(Options):
    def width(self) -> float:
        return 3.0


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.options, self.clip = Options(), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * self.options.slope * self.options.width() * one() * (2.0 if self.clip > 5 else 1.0)


def one() -> float:
    return 1.0


def three_alone() -> float:
    return 3.0


def halved(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.silu(x) / 2


def three(self: Any = None) -> float:
    return 3.0


@pytest.mark.parametrize("change", [
    lambda act: setattr(act.options, "slope", 3.0), lambda act: setattr(act.options, "width", three),
    lambda act: setattr(act.options, "__class__", Others), lambda act: setattr(act, "options", Others()),
    lambda act: setattr(one, "__code__", three_alone.__code__),
    lambda act: setattr(Holding.forward, "__code__", halved.__code__),
], ids=["a default is shadowed", "a method of its own", "another class", "another object", "a function's code", "a forward's"])
def test_objects_that_a_module_holds(change: Callable[[Any], None], model: Any) -> None:
    """And code that is put into a function, as by IPython's autoreload."""
    act, codes = Holding(), {f: f.__code__ for f in (one, Holding.forward)}
    model.model.layers[0].mlp.act_fn = act
    try:
        with Engine(model, **OPTIONS) as engine:
            before = tokens(engine.generate(IDS, SHORT))
            change(act)
            assert tokens(engine.generate(IDS, SHORT)) == [expected(model)] != before
    finally:
        for function, code in codes.items():
            function.__code__ = code


def test_a_setting_that_is_not_a_number(model: Any) -> None:
    """It differs from itself, and has not changed."""
    model.model.layers[0].mlp.act_fn = act = Holding()
    act.options.slope, act.clip = 2.0, float("nan")
    with Engine(model, **OPTIONS) as engine:
        runner = engine.runner
        assert tokens(engine.generate(IDS, SHORT)) == [expected(model)] and engine.runner is runner


def test_attention_functions_that_would_be_replaced(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the engine is made, and while it is open: torch's function inside sdpa, the table's look-up, quire's own name."""
    sdpa, table = F.scaled_dot_product_attention, type(ALL_ATTENTION_FUNCTIONS)
    with Engine(model, **OPTIONS) as engine:
        want = expected(model)
        assert tokens(engine.generate(IDS, SHORT)) == [want]
        for patch, named in ((lambda m: m.setattr(F, "scaled_dot_product_attention", lambda *a, **o: sdpa(*a, **o) * 2),
                              r"torch.nn.functional.scaled_dot_product_attention is not transformers' or PyTorch's own"),
                             (lambda m: m.setattr(table, "get_interface", lambda *a: None), "get_interface is not"),
                             (lambda m: m.setattr(sdpa_attention, "repeat_kv", lambda *a: None), "repeat_kv is not"),
                             (lambda m: m.setattr(masking_utils, "causal_mask_function", lambda *a: None), "function is not")):
            with monkeypatch.context() as patched:
                patch(patched)
                with pytest.raises(RuntimeError, match=f"changed after the engine traced it.*{named}"):
                    engine.generate(IDS, SHORT)
                with pytest.raises(UnsupportedAttention, match=named):
                    Engine(copy.deepcopy(model), **OPTIONS)
        assert tokens(engine.generate(IDS, SHORT)) == [want]
    with monkeypatch.context() as patched:
        patched.setitem(ALL_ATTENTION_FUNCTIONS, "quire", lambda *args, **options: None)
        with pytest.raises(UnsupportedAttention, match="the name 'quire' .* is quire's own, and now means"):
            Engine(model, **OPTIONS)


def test_a_window_changed_in_the_config_only() -> None:
    """transformers makes masks by the config; the modules, which quire asks, keep the window of their initialization."""
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=32, max_position_embeddings=256, sliding_window=8, layer_types=["sliding_attention"])).eval()
    with Engine(model, **OPTIONS) as engine:
        assert tokens(engine.generate(IDS, SHORT)) == [expected(model)]
        model.config.sliding_window = 4
        with pytest.raises(RuntimeError, match="window: 8 -> 4.* attends with window 8, and transformers makes its mask"):
            engine.generate(IDS, SHORT)
        model.config.sliding_window = 8
        assert tokens(engine.generate(IDS, SHORT)) == [expected(model)]


def test_compilation_switched_off(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own code would run without the cache. A trace from the disk needs no compilation."""
    monkeypatch.setenv("QUIRE_TRACE_CACHE", "0")
    with Engine(model, **OPTIONS) as engine:
        assert tokens(engine.generate(IDS, SHORT)) == [expected(model)]
        with torch.compiler.set_stance("force_eager"):
            with pytest.raises(UnsupportedAttention, match="torch.compile is switched off here .*force_eager"):
                engine.generate(IDS, SHORT)
            with pytest.raises(UnsupportedAttention, match="torch.compile is switched off here"):
                Engine(copy.deepcopy(model), **OPTIONS)
        assert tokens(engine.generate(IDS, SHORT)) == [expected(model)]


def test_backward_hooks(model: Any) -> None:
    """They have no effect on a forward without gradients, and run again afterwards."""
    seen: list[str] = []
    model.model.layers[0].register_full_backward_hook(lambda module, before, after: seen.append("hook"))
    model.model.layers[0].register_full_backward_pre_hook(lambda module, before: seen.append("pre-hook"))
    before = snapshot(model)
    with Engine(model, **OPTIONS) as engine:
        assert tokens(engine.generate(IDS, SHORT)) == [expected(model)]
    assert snapshot(model)["attributes"] == before["attributes"]
    model(torch.tensor([IDS])).logits.sum().backward()
    assert seen == ["pre-hook", "hook"]


def no_head(model: Any) -> Any:
    model.lm_head = None
    return model


def scripted(model: Any) -> Any:
    model.model.layers[0].mlp.act_fn = torch.jit.script(nn.ReLU())
    return model


logger = logging.getLogger("mine")


class Logs(LlamaForCausalLM):
    def forward(self, *args: Any, **options: Any) -> Any:
        logger.warning("a forward")
        return super().forward(*args, **options)


def logs(model: Any) -> Any:
    model.__class__ = Logs
    return model


class Reward(nn.Module):
    """One number per token, and a config of a language model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config, self.score = model.model, model.config, nn.Linear(32, 1)

    def forward(self, input_ids: Any, position_ids: Any = None, **options: Any) -> Any:
        return self.score(self.model(input_ids=input_ids, position_ids=position_ids, **options)[0])


class Value(nn.Module):
    """Logits, and a number made of hidden states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config, self.value = model, model.config, nn.Linear(32, 1)

    def forward(self, input_ids: Any, position_ids: Any = None, **options: Any) -> Any:
        out = self.model(input_ids=input_ids, position_ids=position_ids, output_hidden_states=True, **options)
        return out.logits, self.value(out.hidden_states[-1])


@pytest.mark.parametrize(("change", "reason"), [
    (Reward, "Reward has no language-model head: it gives 1 logits per token, and its vocabulary has 64 tokens"),
    (lambda m: m.to("meta"), "model.embed_tokens.weight is on the meta device, so it has no values"),
    (nn.Sequential, "mixes the tokens of the batch.*Its module '0' is a LlamaForCausalLM: give quire that one"),
    (nn.DataParallel, "Its module 'module' is a LlamaForCausalLM: give quire that one"),
    (no_head, "own forward fails on token ids and positions: TypeError: 'NoneType' object is not callable"),
    (scripted, "could not be traced into one graph: it calls a TorchScript module. Put the Python module in its place"),
    (logs, "could not be traced into one graph: it writes to a log. Remove the logging"),
], ids=["reward", "meta", "sequential", "parallel", "no head", "script", "logs"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_reasons(change: Callable[[Any], Any], reason: str, model: Any) -> None:
    """In quire's words, and none of torch.compile's behind them."""
    with pytest.raises(UnsupportedAttention, match=reason) as caught:
        Engine(change(model), **OPTIONS)
    assert "Unsupported" not in str(caught.value) and len(str(caught.value)) < 500


def test_explain_takes_no_path() -> None:
    with pytest.raises(TypeError, match="explain takes a model, got 'some/path'; load it first"):
        quire.explain("some/path")  # type: ignore[arg-type]


def test_hidden_states_are_asked_for(model: Any) -> None:
    """In a first call transformers installs hooks for them, under a lock."""
    both = Value(model).eval()
    with Engine(both, **OPTIONS) as engine:
        assert tokens(engine.generate(IDS, SHORT)) == [expected(model)]


class Weighed(LlamaForCausalLM):
    """Its logits follow from the attention mask, which an engine does not give it."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **options: Any) -> Any:
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, **options)
        if attention_mask is not None:
            out.logits = out.logits + attention_mask.sum(-1)[:, None, None] * torch.arange(64.0)
        return out


class PassedOn(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, past_key_values: Any = None, **options: Any) -> Any:
        out = super().forward(input_ids, attention_mask, past_key_values=past_key_values, **options)
        out.logits = -out.logits
        return out


def wrapped_like_trl(model: Any, asks: str) -> None:
    """A forward that computes a loss where it is asked to, on the instance, with the class's signature."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def asked(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return original(*args, **kwargs)
        return self.model(*args, **kwargs), kwargs.get("attention_mask")

    @functools.wraps(type(model).forward)
    def always(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if kwargs.get("attention_mask") is not None:
            out.logits = -out.logits
        return out

    model.forward = types.MethodType({"asked": asked, "always": always}[asks], model)


@pytest.mark.parametrize("asks", ["asked", "always"])
def test_a_forward_that_wraps_the_classs(asks: str, model: Any) -> None:
    """The mask that its own code reads is seen, not only what the code of the wrapped one does with it."""
    wrapped_like_trl(model, asks)
    want = model.generate(**BATCH, max_new_tokens=6, do_sample=False)
    quire.paged(model, **OPTIONS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert torch.equal(model.generate(**BATCH, max_new_tokens=6, do_sample=False), want)
    assert ("reads attention_mask" in "".join(str(w.message) for w in said)) == (asks == "always")
    model.generate.close()


@pytest.mark.parametrize(("change", "options", "reason"), [
    (None, dict(attention_mask=BATCH["attention_mask"] * 2), "values beside 0 and 1"),
    (None, dict(attention_mask=BATCH["attention_mask"] * 0.5), "values beside 0 and 1"),
    (lambda model, patch: setattr(model, "__class__", Weighed), {}, "Weighed.forward reads attention_mask"),
    (lambda model, patch: patch.setattr(TemperatureLogitsWarper, "__call__", lambda self, ids, scores: -scores), dict(
        do_sample=True, top_k=1, temperature=0.5), "TemperatureLogitsWarper.__call__ is the model's own"),
    (lambda model, patch: cpu_offload(model), {}, "its weights are on the meta device"),
], ids=["mask of 2", "mask of 0.5", "forward reads the mask", "a warper patched", "offloaded"])
def test_generate_falls_back(change: Any, options: dict[str, Any], reason: str, model: Any, monkeypatch: pytest.MonkeyPatch
                             ) -> None:
    if change is not None:
        change(model, monkeypatch)
    call = BATCH | dict(max_new_tokens=6, do_sample=False) | options
    want = model.generate(**call)
    quire.paged(model, **OPTIONS)
    with pytest.warns(UserWarning, match=f"transformers' own code, not paged, because .*{reason}"):
        assert torch.equal(model.generate(**call), want)
    model.generate.close()


def test_generate_is_paged_where_a_forward_passes_its_inputs_on(model: Any, recwarn: pytest.WarningsRecorder) -> None:
    """And an end token that is not an integer is read as transformers reads it."""
    model.__class__ = PassedOn
    call = BATCH | dict(max_new_tokens=6, do_sample=False)
    calls = [call, call | dict(eos_token_id=True)]
    want = [model.generate(**each) for each in calls]
    quire.paged(model, **OPTIONS)
    assert all(torch.equal(model.generate(**each), ids) for each, ids in zip(calls, want, strict=True))
    assert not [w for w in recwarn if "not paged" in str(w.message)]
    model.generate.close()


def test_a_processor_of_generate_that_asks_the_same_engine_for_more() -> None:
    """It gets what there is room for; where its own call holds every slot, waiting would never end."""
    ids, inner = torch.tensor([[5, 6, 7]]), []
    for slots in (2, 1):
        model = quire.paged(small_llama(), num_pages=40, max_num_seqs=slots, cudagraph_capture_sizes=[])

        def asks(ids: torch.Tensor, logits: torch.Tensor, model: Any = model) -> torch.Tensor:
            inner.append(model.generate(torch.tensor([[8, 9]]), max_new_tokens=2).tolist())
            return logits

        if slots == 2:
            assert torch.equal(model.generate(ids, max_new_tokens=3, logits_processor=[asks]), model.generate(
                ids, max_new_tokens=3))
            assert len(inner) == 3
        else:
            with pytest.raises(RuntimeError, match="its own call holds the slots or pages that they need"):
                model.generate(ids, max_new_tokens=3, logits_processor=[asks])
        assert_idle(model.generate.engine)
        model.generate.close()
