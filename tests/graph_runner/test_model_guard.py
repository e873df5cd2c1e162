"""Which changes of a traced model are noticed, and by what name; and which are none."""

from __future__ import annotations

import collections
import enum
import functools
import types
from typing import Any

import pytest
import torch
import transformers
from transformers import masking_utils

from quire.graph_runner.model_guard import ModelGuard
from tests.tiny import small_llama


def model() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    made[1].register_buffer("counts", torch.zeros(2, dtype=torch.int64))
    return made


def replace_layer(m) -> None:
    m[0] = torch.nn.Linear(2, 2)


def seen(guard: ModelGuard, count: int = 2) -> str | None:
    """What two glances at ``count`` modules each find."""
    return guard.next_change(count) or guard.next_change(count)


@pytest.mark.parametrize("change, what", [
    (lambda m: m[0].register_forward_hook(lambda *a: None), "0.forward hooks: [] -> [<lambda>.<locals>.<lambda>]"),
    (lambda m: m.register_forward_pre_hook(lambda *a: None),
     "Sequential.forward pre-hooks: [] -> [<lambda>.<locals>.<lambda>]"),
    (replace_layer, "module 0 was replaced"),
    (lambda m: m.append(torch.nn.ReLU()), "module 2 was added"),
    (lambda m: m.pop(1), "module 1 was removed"),
    (lambda m: setattr(m[1], "eps", 1e-3), "1.eps: 1e-05 -> 0.001"),
    (lambda m: m.to(torch.bfloat16),
     "0.weight: Parameter (torch.float32, cpu, version 0) -> Parameter (torch.bfloat16, cpu, version 0)"),
    (lambda m: setattr(m[0].weight, "data", torch.zeros(3, 2)), "0.weight: of another shape, or quantized otherwise"),
    (lambda m: setattr(m[0].weight, "data", torch.zeros(2, 2).t()), "0.weight: of other strides"),
    (lambda m: setattr(m[0], "forward", lambda x: x), "0.forward: None -> <lambda>.<locals>.<lambda>"),
    (lambda m: m[1].counts.add_(1), "1.counts: Tensor (torch.int64, cpu, version 0) -> Tensor (torch.int64, cpu, version 1)"),
], ids=["hook", "pre_hook", "layer", "added", "removed", "setting", "dtype", "shape", "strides", "forward", "integers"])
def test_change(change, what) -> None:
    m = model()
    guard = ModelGuard(m, addresses=False)
    assert guard.change() is None and guard.next_change(2) is None  # of three modules, so the next call begins at the last
    change(m)
    assert guard.change() == what
    assert seen(guard) == what


def test_only_what_was_read_counts() -> None:
    m = Holder()
    guard = ModelGuard(m, addresses=False, reads={"scaling", "cap"})
    m.shape, m.new, m.config.text_config.windows[0], m.act = (2,), 1, 8, torch.cos
    assert guard.change() is None and seen(guard, 9) is None
    m.config.cap = None
    assert guard.change() == seen(guard, 9) == "Holder.config.cap: 30.0 -> None"
    m.config.cap = 30.0
    m.scaling = {"a": 1.0}
    assert guard.change() == seen(guard, 9) == "Holder.scaling: {'a': 1.0, 'b': [2.0]} -> {'a': 1.0}"


def test_an_attribute_equal_to_that_of_the_class_is_no_change() -> None:
    m = Holder()
    guard = ModelGuard(m, addresses=False)
    m.checkpointing = False
    assert guard.change() is None
    m.checkpointing = True
    assert guard.change() == "Holder.checkpointing: absent -> True"


def test_buffers_whose_values_were_read() -> None:
    m = torch.nn.Module()
    m.register_buffer("mask", torch.zeros(2, 2))
    loose, strict = ModelGuard(m, addresses=False), ModelGuard(m, addresses=False, buffer_values=True)
    m.mask.fill_(1.0)
    assert loose.change() is None and strict.change().startswith("Module.mask: Tensor (torch.float32, cpu, version 0) -> ")
    strict = ModelGuard(m, addresses=False, buffer_values=True)
    m.mask = torch.zeros(2, 2).fill_(1.0)
    assert loose.change() is None and strict.change() == "Module.mask: another tensor, or moved in memory"


def test_a_patched_class(monkeypatch) -> None:
    m = Holder()
    guard = ModelGuard(m, addresses=False, reads={"forward", "helper"})
    monkeypatch.setattr(Holder, "unread", lambda self: None, raising=False)
    assert guard.change() is None
    for name in ("helper", "forward"):
        with monkeypatch.context() as patch:
            patch.setattr(Holder, name, scaled)
            assert guard.change() == seen(guard, 9) == f"Holder.{name}: Holder.{name} -> scaled"
    monkeypatch.setattr(torch.nn.Linear, "forward", scaled)
    assert guard.change() == "Linear.forward: Linear.forward -> scaled"


def test_another_attention_implementation() -> None:
    m = Holder()
    guard = ModelGuard(m, addresses=False, reads={"_attn_implementation_internal"})
    m.config._attn_implementation_internal = "quire"  # while another engine traces the model
    assert guard.change() is None
    m.config._attn_implementation_internal = "mine"
    assert guard.change() == "Holder.config._attn_implementation_internal: 'sdpa' -> 'mine'"


def test_hooks_of_transformers_that_only_record() -> None:
    """As model(..., output_hidden_states=True) and enable_input_require_grads() leave them behind."""
    m = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
    guard = ModelGuard(m, addresses=False, reads=set())
    m(torch.tensor([[1, 2]]), output_hidden_states=True)
    m.enable_input_require_grads()
    assert m.model.layers[0]._forward_hooks and m.model.embed_tokens._forward_hooks
    assert guard.change() is None
    m.model.embed_tokens.register_forward_hook(lambda module, args, out: out)
    assert "model.embed_tokens.forward hooks: [] -> " in guard.change()


class Kind(enum.Enum):
    ONE, TWO = 1, 2


class Size(enum.IntEnum):
    ONE, TWO = 1, 2


Pair = collections.namedtuple("Pair", "a b")


class Holder(torch.nn.Module):
    """Has what the guard compares beside plain attributes, parameters and own hooks."""

    checkpointing = False

    def helper(self) -> None: ...

    def forward(self) -> None: ...

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(cap=30.0, text_config=types.SimpleNamespace(windows=[4, None]), use_cache=True,
                                            pad_token_id=None, dtype=torch.float32, _attn_implementation_internal="sdpa")
        self.config.text_config.parent_config = self.config
        self.generation_config = types.SimpleNamespace(max_new_tokens=1)
        self.active, self.scaling, self.shape, self.flags = ["a"], {"a": 1.0, "b": [2.0]}, (1, (2, 3)), {"x"}
        self.kind, self.size, self.pair, self.ordered = Kind.ONE, Size.ONE, Pair(1.0, 2.0), collections.OrderedDict(a=1.0)
        self.itself = [self.active]
        self.itself.append(self.itself)
        self.act, self.tensors, self.many = torch.sin, [torch.zeros(1)], list(range(2000))
        self.one, self.two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.two.weight = self.one.weight
        self.factors = {"now": 1.0}
        self.one.register_forward_hook(lambda module, args, out: out * self.factors["now"] * FACTORS["now"])
        self.two.register_forward_hook(functools.partial(scaled, by=[1.0]))
        self.two.register_forward_pre_hook(Steering().hook)


FACTORS = {"now": 1.0}
mul = {"unread": 1.0}  # of the name of a method that a hook calls


def scaled(module, args, out, by):
    return out.mul(by[-1])


class Steering:
    def __init__(self) -> None:
        self.strength = 1.0

    def hook(self, module, args):
        return args[0] * self.strength


def untie(m) -> None:
    m.two.weight = torch.nn.Parameter(m.one.weight.detach().clone())


def only(hooks):
    [hook] = hooks.values()
    return hook


@pytest.mark.parametrize("change, what", [
    (lambda m: m.active.__setitem__(0, "b"), "Holder.active: ['a'] -> ['b']"),
    (lambda m: m.scaling.update(a=2.0), "Holder.scaling: {'a': 1.0, 'b': [2.0]} -> {'a': 2.0, 'b': [2.0]}"),
    (lambda m: m.scaling["b"].append(2.0), "Holder.scaling: {'a': 1.0, 'b': [2.0]} -> {'a': 1.0, 'b': [2.0, 2.0]}"),
    (lambda m: setattr(m, "shape", (1, (2, 4))), "Holder.shape: (1, (2, 3)) -> (1, (2, 4))"),
    (lambda m: m.flags.clear(), "Holder.flags: {'x'} -> set()"), (lambda m: setattr(m, "act", torch.cos), "Holder.act: "),
    (lambda m: setattr(m, "kind", Kind.TWO), "Holder.kind: <Kind.ONE: 1> -> <Kind.TWO: 2>"),
    (lambda m: setattr(m, "size", Size.TWO), "Holder.size: "),
    (lambda m: setattr(m, "pair", Pair(1.0, 3.0)), "Holder.pair: (1.0, 2.0) -> (1.0, 3.0)"),
    (lambda m: m.ordered.update(a=2.0), "Holder.ordered: {'a': 1.0} -> {'a': 2.0}"),
    (lambda m: setattr(m, "config", types.SimpleNamespace()), "Holder.config: a SimpleNamespace -> a SimpleNamespace"),
    (lambda m: setattr(m.config, "cap", None), "Holder.config.cap: 30.0 -> None"),
    (lambda m: m.config.text_config.windows.reverse(), "Holder.config.text_config.windows: [4, None] -> [None, 4]"),
    (untie, "one.weight and two.weight are no longer one parameter"),
    (lambda m: FACTORS.update(now=2.0), "one.forward hooks: "),
    (lambda m: only(m.two._forward_hooks).keywords["by"].append(0.5), "two.forward hooks: "),
    (lambda m: setattr(only(m.two._forward_pre_hooks).__self__, "strength", 0.5), "two.forward pre-hooks: "),
    (lambda m: torch.nn.modules.module.register_module_forward_hook(lambda *a: None), "torch.forward hooks of all modules: []"),
], ids=["list", "dict", "nested", "tuple", "set", "function", "enum", "int_enum", "named_tuple", "ordered",
        "other_config", "config", "inner_config", "untied", "global",
        "partial", "method", "all_modules"])
def test_change_beyond_plain_attributes(change, what, monkeypatch) -> None:
    monkeypatch.setitem(FACTORS, "now", 1.0)
    m = Holder()
    guard = ModelGuard(m, addresses=False)
    assert guard.change() is None and guard.next_change(9) is None
    handle = change(m)
    try:
        assert guard.change() == seen(guard)
        assert guard.change().startswith(what)
    finally:
        if hasattr(handle, "remove"):
            handle.remove()


def test_what_a_hook_in_a_closure_reads() -> None:
    m, strength = model(), 1.0
    m[0].register_forward_hook(lambda module, args, out: out * strength)
    guard = ModelGuard(m, addresses=False)
    assert guard.change() is None
    strength = 2.0
    assert guard.change().startswith("0.forward hooks: ")


def test_what_has_no_effect_on_the_forward(monkeypatch) -> None:
    """What users, ``save_pretrained`` and ``quire.paged`` set; and data."""
    m = Holder()
    guard = ModelGuard(m, addresses=False)
    m.config.use_cache, m.config.pad_token_id, m.config.dtype, m.config.architectures = False, 3, "float32", ["Holder"]
    m.generation_config.max_new_tokens = 9
    m.generate = m.state_dict = lambda: None
    m.tensors.append(torch.ones(1))
    m.many[0] = 7
    monkeypatch.setitem(mul, "unread", 2.0)
    assert guard.change() is None and guard.next_change(9) is None


def test_weights_may_change_in_place() -> None:
    m = model()
    loose, strict = ModelGuard(m, addresses=False), ModelGuard(m, addresses=True)
    m.train()
    with torch.no_grad():
        m[0].weight.add_(1)
    assert loose.change() is None and strict.change() is None
    m[0].weight.data = torch.zeros(2, 2)
    assert loose.change() is None and strict.change() == "0.weight: another tensor, or moved in memory"


@pytest.mark.parametrize("change, what", [
    (lambda m: m.lists.sizes.append(3), "lists.sizes: [1, 2] -> [1, 2, 3]"),  # the same object
    (lambda m: m.nested.pairs[1].append(3), "nested.pairs: (1, [2]) -> (1, [2, 3])"),
    (lambda m: m.lists.sizes.__setitem__(1, 3), "lists.sizes: [1, 2] -> [1, 3]"),
    (lambda m: m.dicts.scaling.update(a=2.0), "dicts.scaling: {'a': 1.0} -> {'a': 2.0}"),
    (lambda m: m.dicts.scaling.update(b=1.0), "dicts.scaling: {'a': 1.0} -> {'a': 1.0, 'b': 1.0}"),
    (lambda m: m.dicts.scaling.update(b=m.dicts.scaling.pop("a")), "dicts.scaling: {'a': 1.0} -> {'b': 1.0}"),
    (lambda m: m.dicts.inner["x"]["y"].append(2), "dicts.inner: {'x': {'y': [1]}} -> {'x': {'y': [1, 2]}}"),
    (lambda m: m.dicts.names.discard("a"), "dicts.names: {'a'} -> set()"),
    (lambda m: setattr(m.dicts, "names", ["a"]), "dicts.names: {'a'} -> ['a']"),
    (lambda m: setattr(m.dicts, "scaling", {"a": float("1.0")}), None),  # equal
    (lambda m: setattr(m, "data", 5), "Module.data: absent -> 5"),  # a tensor is not compared, a number is
    (lambda m: (delattr(m, "scale"), setattr(m, "other", 1)), "Module.scale: 1.5 -> absent"),  # as many attributes as before
    (lambda m: setattr(m, "w", torch.nn.Parameter(torch.ones(1, dtype=torch.float16))),
     "Module.w: Parameter (torch.float32, cpu, version 0) -> Parameter (torch.float16, cpu, version 0)"),
    (lambda m: (setattr(m, "w", None), setattr(m, "v", torch.nn.Parameter(torch.ones(1)))),
     "Module.w: Parameter (torch.float32, cpu, version 0) -> absent"),
    (lambda m: setattr(m, "scale", float("1.5")), None),  # another object, the same number
    (lambda m: setattr(m, "data", torch.ones(2)), None),
], ids=["list", "nested", "item", "value", "entry", "key", "inner", "member", "type", "equal dict", "kind", "names",
        "parameter", "parameters", "equal", "data"])
def test_changes_that_a_glance_could_miss(change, what) -> None:
    m = torch.nn.Module()
    m.scale, m.data, m.w, m.lists = 1.5, torch.ones(1), torch.nn.Parameter(torch.ones(1)), torch.nn.Module()
    m.nested = torch.nn.Module()
    m.lists.sizes, m.nested.pairs = [1, 2], (1, [2])
    m.dicts = torch.nn.Module()
    m.dicts.scaling, m.dicts.inner, m.dicts.names = {"a": 1.0}, {"x": {"y": [1]}}, {"a"}
    guard = ModelGuard(m, addresses=False)
    assert guard.change() is None
    change(m)
    assert guard.change() == seen(guard) == what


class Keys(dict[str, Any]):
    """Its attributes are its entries, so that it raises KeyError for any other."""

    __getattr__ = dict.__getitem__  # type: ignore[assignment]


def test_a_dict_with_attributes() -> None:
    """As a config, and anywhere else."""
    m = torch.nn.Module()
    m.options_config, m.options = Keys(a=1.0), Keys(a=1.0)
    guard = ModelGuard(m, addresses=False)
    assert guard.change() is None
    m.options_config = Keys(a=2.0)
    assert guard.change() == "Module.options_config: a Keys -> a Keys"


@pytest.mark.parametrize("before, after", [(True, 1), (1, 1.0), (Size.ONE, 1), ([True], [1]),
                                           ({"a": 1}, collections.OrderedDict(a=1))])
def test_what_is_equal_but_of_another_type(before: Any, after: Any) -> None:
    """``is True`` and isinstance tell them apart."""
    m = torch.nn.Module()
    m.flag = before
    guard = ModelGuard(m, addresses=False)
    m.flag = after
    assert before == after and "Module.flag: " in (guard.change() or "")
    m.flag = before
    assert guard.change() is None


def test_a_list_that_holds_itself() -> None:
    m = torch.nn.Module()
    m.loop, m.scale = [1], 1.5
    m.loop.append(m.loop)
    guard = ModelGuard(m, addresses=False)
    assert guard.change() is None
    m.scale = 2.0
    assert guard.change() == "Module.scale: 1.5 -> 2.0"


def test_a_setting_beside_lists_that_nobody_read() -> None:
    """A module that a glance compares in part: its lists are data."""
    m = torch.nn.Module()
    m.scale, m.log = 1.5, []
    guard = ModelGuard(m, addresses=False, reads={"scale"})
    m.log.append(1)
    assert guard.change() is None
    m.scale = 2.0
    assert guard.change() == "Module.scale: 1.5 -> 2.0"


def test_a_field_that_only_masks_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever name: a trace makes no masks, so it does not read the field, and the model's own masks change with it."""

    def tree_mask(config: Any) -> Any:
        return config.tree_width

    model, tree_mask.__module__ = small_llama(), masking_utils.__name__
    model.config.sliding_window = model.config.tree_width = model.config.unread_by_all = 3
    guard = ModelGuard(model, addresses=False, reads=["hidden_size"])
    model.config.tree_width = 4
    assert guard.change() is None
    monkeypatch.setattr(masking_utils, "tree_mask", tree_mask, raising=False)
    guard = ModelGuard(model, addresses=False, reads=["hidden_size"])
    model.config.unread_by_all = 4
    assert guard.change() is None
    for name in ("sliding_window", "tree_width"):
        setattr(model.config, name, 5)
        assert f"{name}: " in (guard.change() or "")
        setattr(model.config, name, 3 if name == "sliding_window" else 4)
