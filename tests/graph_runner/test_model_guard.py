"""What a traced model may not change without being noticed, and what it may."""

from __future__ import annotations

import functools
import types

import pytest
import torch

from quire.graph_runner.model_guard import ModelGuard


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))


def replace_layer(m) -> None:
    m[0] = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("change, what", [
    (lambda m: m[0].register_forward_hook(lambda *a: None), "0: its forward hooks changed"),
    (lambda m: m.register_forward_pre_hook(lambda *a: None), "Sequential: its forward pre-hooks changed"),
    (replace_layer, "0: the module itself changed"),
    (lambda m: m.append(torch.nn.ReLU()), "module 2 was added"),
    (lambda m: setattr(m[1], "eps", 1e-3), "1: its settings changed"),
    (lambda m: m.to(torch.bfloat16), "0: its parameters changed"),
    (lambda m: setattr(m[0], "forward", lambda x: x), "0: its forward changed"),
], ids=["hook", "pre_hook", "layer", "added", "setting", "dtype", "forward"])
def test_change(change, what) -> None:
    m = model()
    watch = ModelGuard(m, addresses=False)
    assert watch.change() is None and watch.check_some(2) is None  # of three modules, so the next check_some begins at the last
    change(m)
    assert watch.change() == what
    assert what in (watch.check_some(2), watch.check_some(2))
    watch.check_if_due()  # it is not
    watch.due = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{what}.*undo the change, or close the engine"):
            watch.check_if_due()


class Holder(torch.nn.Module):
    """With everything of a model that is no plain attribute, parameter or hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(cap=30.0, text_config=types.SimpleNamespace(windows=[4, None]), use_cache=True,
                                            pad_token_id=None, dtype=torch.float32, _attn_implementation_internal="sdpa")
        self.config.text_config.parent_config = self.config
        self.generation_config = types.SimpleNamespace(max_new_tokens=1)
        self.active, self.scaling, self.shape, self.flags = ["a"], {"a": 1.0, "b": [2.0]}, (1, (2, 3)), {"x"}
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
    (lambda m: m.active.__setitem__(0, "b"), "Holder: its settings changed"),
    (lambda m: m.scaling.update(a=2.0), "Holder: its settings changed"),
    (lambda m: m.scaling["b"].append(2.0), "Holder: its settings changed"),
    (lambda m: setattr(m, "shape", (1, (2, 4))), "Holder: its settings changed"),
    (lambda m: m.flags.add("y"), "Holder: its settings changed"),
    (lambda m: setattr(m, "act", torch.cos), "Holder: its settings changed"),
    (lambda m: setattr(m, "config", types.SimpleNamespace()), "Holder: its settings changed"),
    (lambda m: setattr(m.config, "cap", None), "Holder.config: cap changed"),
    (lambda m: m.config.text_config.windows.reverse(), "Holder.config.text_config: windows changed"),
    (untie, "one.weight and two.weight are no longer one parameter"),
    (lambda m: FACTORS.update(now=2.0), "one: its forward hooks changed"),
    (lambda m: only(m.two._forward_hooks).keywords["by"].append(0.5), "two: its forward hooks changed"),
    (lambda m: setattr(only(m.two._forward_pre_hooks).__self__, "strength", 0.5), "two: its forward pre-hooks changed"),
    (lambda m: torch.nn.modules.module.register_module_forward_hook(lambda *a: None), "torch's hooks for all modules changed"),
], ids=["list", "dict", "nested", "tuple", "set", "function", "other_config", "config", "inner_config", "untied", "global",
        "partial", "method", "all_modules"])
def test_change_beyond_plain_attributes(change, what, monkeypatch) -> None:
    monkeypatch.setitem(FACTORS, "now", 1.0)
    m = Holder()
    watch = ModelGuard(m, addresses=False)
    assert watch.change() is None and watch.check_some(9) is None
    handle = change(m)
    try:
        assert watch.change() == what
        assert what in (watch.check_some(2), watch.check_some(2))
    finally:
        if hasattr(handle, "remove"):
            handle.remove()


def test_what_a_hook_in_a_closure_reads() -> None:
    m, strength = model(), 1.0
    m[0].register_forward_hook(lambda module, args, out: out * strength)
    watch = ModelGuard(m, addresses=False)
    assert watch.change() is None
    strength = 2.0
    assert watch.change() == "0: its forward hooks changed"


def test_what_says_nothing_of_the_forward(monkeypatch) -> None:
    """What users, ``save_pretrained``, the trace of another engine and ``quire.paged`` set; and data."""
    m = Holder()
    watch = ModelGuard(m, addresses=False)
    m.config.use_cache, m.config.pad_token_id, m.config.dtype, m.config.architectures = False, 3, "float32", ["Holder"]
    m.config._attn_implementation_internal = "quire"
    m.generation_config.max_new_tokens = 9
    m.generate = m.state_dict = lambda: None
    m.tensors.append(torch.ones(1))
    m.many[0] = 7
    monkeypatch.setitem(mul, "unread", 2.0)
    assert watch.change() is None and watch.check_some(9) is None


def test_what_may_change() -> None:
    m = model()
    watch, strict = ModelGuard(m, addresses=False), ModelGuard(m, addresses=True)
    m.train()
    with torch.no_grad():
        m[0].weight.add_(1)
    assert watch.change() is None and strict.change() is None
    m[0].weight.data = torch.zeros(2, 2)
    assert watch.change() is None and strict.change() == "0: its parameters changed"
