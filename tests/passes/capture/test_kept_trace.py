"""Traces kept on disk: taken for the same model in another process, and for no other model, code or state. A stale one would
give the tokens of another model."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, LocalSource
from torch._dynamo.utils import counters
from torch._guards import Guard
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

import quire
from quire import Engine, SamplingParams, UnsupportedAttention
from quire.passes.capture import facts
from quire.passes.capture.paged_model import PagedModel
from quire.passes.fx import fake_mode, text_of
from quire.passes.options import QuireOptions
from tests.passes.models import Tiny, tiny
from tests.tiny import small_llama
from tests.zoo.configs import SERVED, build
from tests.zoo.harness import TOLERANCE, error, reference, serve

EAGER = QuireOptions(compiler="eager")
pytestmark = pytest.mark.usefixtures("folder")


def traced(make: Callable[[], nn.Module], options: QuireOptions = EAGER) -> tuple[bool, PagedModel]:
    """Whether Dynamo traced a model, and the PagedModel of it."""
    before = counters["stats"]["unique_graphs"]
    model = PagedModel(make(), options)
    return counters["stats"]["unique_graphs"] > before, model


def was_traced(make: Callable[[], nn.Module]) -> bool:
    found, model = traced(make)
    model.close()
    return found


llama = functools.partial(build, SERVED["llama"])  # of two layers
one_layer = functools.partial(small_llama, 0.3)


# -- taken ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "llama",
    *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "gpt2", "gemma2", "mistral", "phi3", "falcon", "olmo2", "gpt_neox", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3",
        "cohere2"))])
def test_an_equal_model_with_other_weights_takes_it(name: str) -> None:
    assert was_traced(functools.partial(build, SERVED[name]))
    found, model = traced(functools.partial(build, SERVED[name], seed=3))
    assert not found
    batch = reference(build(SERVED[name], seed=3, attention="eager"))
    assert error(serve(model, batch, page_size=4), batch) <= TOLERANCE


def test_compilations_of_the_traced_model_are_found() -> None:
    """Inductor finds what it compiled by the names of sizes, so those that come after the trace (of tables and caches) must be
    the same: else the first start that takes a trace from the disk compiles everything again."""

    def sizes() -> tuple[bool, list[str]]:
        found, model = traced(llama, QuireOptions(compiler="eager", page_size=4))
        mode = fake_mode(model.graph.compiled().lowered.gm.graph)
        model.close()
        assert mode is not None and mode.shape_env is not None
        return found, sorted(f"{s}: {text_of(sources[0])}" for s, sources in mode.shape_env.var_to_sources.items())

    first, second = sizes(), sizes()
    assert (first[0], second[0]) == (True, False) and any("quire_k_cache_1" in each for each in first[1])
    assert second[1] == first[1]


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_engine_on_it_samples_the_same_tokens_and_sees_changes(compiler: str) -> None:
    def outputs(engine: Engine) -> list[list[int]]:
        params = [SamplingParams(max_tokens=6, temperature=0), SamplingParams(max_tokens=6, seed=1)]
        return [out.token_ids for out in engine.generate([[5, 6, 7], [9, 4]], params)]

    options: Any = dict(num_pages=32, max_num_seqs=4, max_model_len=64, compiler=compiler)
    with Engine(one_layer(), **options) as engine:
        expected = outputs(engine)
    model = one_layer()
    before = counters["stats"]["unique_graphs"]
    with Engine(model, **options) as engine:
        assert counters["stats"]["unique_graphs"] == before
        assert outputs(engine) == expected
        engine.generate([[1, 2]], SamplingParams(max_tokens=2))
        with torch.no_grad():
            model.lm_head.weight.neg_()
        changed = outputs(engine)
        assert changed != expected
        model.model.norm.variance_epsilon = 10.0  # read by the trace: it is made again
        assert outputs(engine) != changed
        assert counters["stats"]["unique_graphs"] > before
    with Engine(one_layer(), **options) as engine:  # and what is kept now is not of that model
        assert outputs(engine) == expected


def test_the_users_line_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each symbol, PyTorch would ask which of its files are of no interest, and import all of torch.export for that."""
    assert was_traced(llama)

    def asked() -> set[str]:
        raise AssertionError("a start that takes the trace imports what it does not need")

    monkeypatch.setattr(torch.fx.experimental.symbolic_shapes, "uninteresting_files", asked)
    assert not was_traced(llama)


def test_the_second_model_of_a_process_leaves_a_trace_that_the_next_takes() -> None:
    """Dynamo counts up the names of what it adds to the globals. Else only a process's first model would start fast later."""
    torch._dynamo.reset()
    for hidden in (32, 48):
        assert was_traced(functools.partial(small_llama, hidden_size=hidden))
        torch._dynamo.reset()  # with which they go
    for hidden in (48, 32):
        assert not was_traced(functools.partial(small_llama, hidden_size=hidden))


def test_a_paged_model_leaves_the_trace_of_a_plain_one() -> None:
    """Else a program that has both would trace each time that it starts."""
    options: Any = dict(num_pages=32, max_num_seqs=4, max_model_len=64)
    for again in (False, True):
        before = counters["stats"]["unique_graphs"]
        assert was_traced(one_layer) is not again
        quire.paged(model := one_layer(), **options)
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
        model.generate.close()
        assert (counters["stats"]["unique_graphs"] == before) is again


class State:
    dtype: torch.dtype


def with_state(dtype: torch.dtype) -> nn.Module:
    """Each forward sets a dtype, as those of bitsandbytes 0.49 do."""
    model, state = tiny(is_causal=True), State()
    state.dtype = dtype
    model.layers[0].state = state
    model.layers[0].register_forward_pre_hook(_set_dtype)
    return model


def _set_dtype(module: Any, args: Any) -> None:
    module.state.dtype = args[0].dtype


def test_an_assignment_of_what_is_there_is_one_of_that_model_only() -> None:
    """No guard is on what is assigned: a model that holds something else would be served, and not be changed."""
    assert was_traced(functools.partial(with_state, torch.float32))
    assert not was_traced(functools.partial(with_state, torch.float32))
    with pytest.raises(UnsupportedAttention, match="changes what outlives the call: model.layers.0.state"):
        PagedModel(with_state(torch.bfloat16), EAGER)


@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    names: list[str] = dataclasses.field(default_factory=lambda: ["x", "y"])


class UsersLayer(LlamaMLP):
    """As people write them: it asks for what Dynamo has no guard for, and gets the same answers in every process."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.settings, self.acts = Settings(), {"silu": F.silu, "gelu": F.gelu}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.settings, Settings) and hasattr(self, "gate_proj") and "x" in self.settings.names:
            return self.down_proj(self.acts["silu"](self.gate_proj(x)) * self.up_proj(x)) * self.settings.scale / math.pi
        return super().forward(x)


def with_users_layers() -> nn.Module:
    model: Any = llama()
    for layer in model.model.layers:
        mlp = layer.mlp
        layer.mlp = UsersLayer(model.config).eval()
        layer.mlp.load_state_dict(mlp.state_dict())
    return model


def test_a_model_with_code_of_the_users_is_taken() -> None:
    assert was_traced(with_users_layers) and not was_traced(with_users_layers)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "with_users_layers"])
def test_another_process_takes_it(folder: Path, tmp_path: Path, model: str) -> None:
    program = textwrap.dedent(f"""
        import torch
        from torch._dynamo.utils import counters
        from quire.graph_runner.engine import Engine
        from quire.graph_runner.sampling_params import SamplingParams
        from tests.passes.capture.test_kept_trace import {model} as make
        with Engine(make(), num_pages=32, max_num_seqs=4, max_model_len=64, compiler="eager") as engine:
            tokens = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=6, temperature=0))[0].token_ids
        print(counters["stats"]["unique_graphs"], tokens)
    """)
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONHASHSEED": str(seed)}, cwd=Path(__file__).parents[3]).stdout.split(" ", 1)
            for seed in (1, 2)]
    assert [int(traces) > 0 for traces, _ in runs] == [True, False]
    assert runs[0][1] == runs[1][1]


# -- not taken: something that the trace built in is not what it was --------------------------------------------------------


def _setting(model: Any) -> None:
    model.model.norm.variance_epsilon = 1e-2


def _layer_setting(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2


def _activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def _module(model: Any) -> None:
    model.model.layers[1].mlp = nn.Linear(model.config.hidden_size, model.config.hidden_size)


def _tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def _swapped(model: Any) -> None:
    norms = model.model.layers[0]
    norms.input_layernorm, norms.post_attention_layernorm = norms.post_attention_layernorm, norms.input_layernorm
    norms.post_attention_layernorm.variance_epsilon = 0.5


def _hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, out: out * 2)


def _forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.up_proj(x))


@pytest.mark.parametrize("change", [
    _setting, *(pytest.param(change, marks=pytest.mark.slow) for change in (
        _hook, _layer_setting, _activation, _module, _tied, _swapped, _forward))])
def test_a_model_that_differs_is_traced(change: Callable[[Any], None]) -> None:
    def changed() -> nn.Module:
        model = llama()
        change(model)
        return model

    assert was_traced(llama)
    found, model = traced(changed)
    assert found
    batch = reference(model.model)
    assert error(serve(model, batch, page_size=4), batch) <= TOLERANCE
    model.close()


def test_replaced_code_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert was_traced(one_layer) and not was_traced(one_layer)
    half = modeling_llama.rotate_half
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "rotate_half", lambda x: half(x) * 0.5)
        assert was_traced(one_layer)
    with monkeypatch.context() as patch:
        forward = modeling_llama.LlamaMLP.forward
        patch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x) * 0.5)
        assert was_traced(one_layer)
    assert was_traced(one_layer) and not was_traced(one_layer)
    linear = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: linear(self, x) * 0.5)
    assert was_traced(one_layer)


def test_another_state_of_pytorch_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert was_traced(one_layer) and not was_traced(one_layer)
    torch.set_float32_matmul_precision("high")
    try:
        torch.use_deterministic_algorithms(True)
        assert was_traced(one_layer)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    with torch.compiler.set_stance("force_eager"), pytest.raises(UnsupportedAttention, match="switched off"):
        PagedModel(one_layer(), EAGER)


SOURCE = """
import os
import torch
import torch.nn.functional as F
from torch import nn
FACTOR = {factor}
TABLE = {{"a": {entry}}}
def scaled(x):
    return x * FACTOR
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)
        x = x + position_ids[..., None] * 0.01
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(scaled(y) * TABLE["a"] {more})
"""


def module(folder: Path, factor: str = "1.0", entry: str = "1.0", more: str = "") -> nn.Module:
    """A model of a file as given, as a new process would import it."""
    name = f"users_model_{folder.name}"
    file = folder / f"{name}.py"
    file.write_text(SOURCE.format(factor=factor, entry=entry, more=more))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found.Model().eval()


@pytest.mark.parametrize("change", [
    dict(factor="2.0"), dict(entry="2.0"), dict(more="+ 1"), dict(more="* float(os.environ.get('QUIRE_TEST_FACTOR', '1'))"),
    pytest.param(dict(factor="1"), marks=pytest.mark.slow)])
def test_edited_source_is_traced(tmp_path: Path, change: dict[str, str]) -> None:
    assert was_traced(lambda: module(tmp_path)) and not was_traced(lambda: module(tmp_path))
    assert was_traced(lambda: module(tmp_path, **change))


@pytest.mark.parametrize("change", [dict(FACTOR=3.0), dict(TABLE={"a": 3.0}), dict(scaled=lambda x: x * 0.5)])
def test_globals_changed_in_the_process_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
                                                   ) -> None:
    made = type(module(tmp_path))
    users = sys.modules[made.__module__]
    assert was_traced(made) and not was_traced(made)
    with monkeypatch.context() as patch:
        for name, value in change.items():
            patch.setattr(users, name, value)
        assert was_traced(made)


def test_an_environment_variable_that_the_forward_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = functools.partial(module, tmp_path, more="* float(os.environ.get('QUIRE_TEST_FACTOR', '1'))")
    monkeypatch.setenv("QUIRE_TEST_FACTOR", "2")
    assert was_traced(made)
    monkeypatch.setenv("QUIRE_TEST_FACTOR", "3")
    found, model = traced(made)
    ids = torch.arange(5)
    expected = model.model(ids[None], ids[None])[0]
    assert found
    torch.testing.assert_close(model.by_itself(ids, ids), expected)


class Holding(Tiny):
    """Its forward follows whether a list is empty, a closure (as of a decorator or a factory), and whether an object has an
    attribute, by a name that the object may not know."""

    def __init__(self, *extra: float, factor: float = 1.0, **more: float) -> None:
        super().__init__(*tiny().layers)

        def activation(x: torch.Tensor) -> torch.Tensor:
            return F.silu(x) * factor

        self.extra, self.activation, self.held = list(extra), activation, types.SimpleNamespace(**more)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        out = self.activation(super().forward(input_ids, position_ids, **more))
        out = -out if self.extra else out
        return out * 2 if hasattr(self.held, "double") else out


@pytest.mark.parametrize("other", [
    lambda: Holding(1.0), lambda: Holding(factor=2.0), pytest.param(lambda: Holding(double=1.0), marks=pytest.mark.slow)],
    ids=["a list that is not empty", "a closure over another number", "an attribute"])
def test_what_a_model_holds_otherwise_is_traced(other: Callable[[], nn.Module]) -> None:
    makes = [lambda: Holding().eval(), lambda: other().eval()]
    assert [was_traced(makes[i]) for i in (0, 0, 1, 1, 0)] == [True, False, True, False, True]  # the last one is kept


@pytest.mark.parametrize("register", [
    register_module_forward_hook, pytest.param(register_module_forward_pre_hook, marks=pytest.mark.slow)])
def test_hooks_of_all_modules_are_traced(register: Callable[..., Any]) -> None:
    """Dynamo reads whether there are any, and guards nothing."""
    assert was_traced(tiny) and not was_traced(tiny)
    hook = register(lambda module, *args: None)
    try:
        assert was_traced(tiny)
    finally:
        hook.remove()
    assert not was_traced(tiny)


def test_a_guard_on_an_attribute_as_of_torch_2_11() -> None:
    """The guard HASATTR has no argument there: it is on the attribute, which may not be there."""
    guard = Guard(AttrSource(LocalSource("held"), "double"), GuardBuilder.HASATTR)  # type: ignore[arg-type]
    entry = types.SimpleNamespace(name="held.double", guard_type=guard.create_fn_name(), orig_guard=guard)
    held = types.SimpleNamespace()
    scope = {"L": {"held": held}}
    found = facts.checks([entry], facts.Values(scope))
    assert facts.difference(found, facts.Values(scope)) is None
    held.double = 1
    assert facts.difference(found, facts.Values(scope)) == "L['held'] (HASATTR)"


def test_a_trace_is_taken_after_another_and_in_another_folder(tmp_path: Path) -> None:
    """Torch 2.11 leaves None behind as what it is translating."""
    assert was_traced(tiny)
    state = torch._dynamo.symbolic_convert.tls
    state.current_tx = None
    try:
        assert not was_traced(tiny)
    finally:
        vars(state).pop("current_tx", None)
    # Dynamo has an option that tells: where it writes what is debugged.
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        assert not was_traced(tiny)
