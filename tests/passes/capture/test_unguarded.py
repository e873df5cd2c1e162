"""Traces kept on disk of a model whose code asks what Dynamo has no guard for. The code stays as it is, and the answer is
another at the next start: a trace of before would give the tokens of the other model."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from quire.passes.capture.facts import NotPortable, Values
from quire.passes.capture.unguarded import Asked, asked_by, description
from tests.passes.capture.test_kept_trace import was_traced

pytestmark = pytest.mark.usefixtures("folder")

MODEL = """
import abc, collections, functools, math, sys, typing
import torch
import torch.nn.functional as F
from torch import nn
DEFINED
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
    def forward(self, input_ids, position_ids):
        m, q = self, (self.embed(input_ids) + position_ids[..., None] * 0.01).unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(y * (2.0 if EXPRESSION else 1.0))
"""
C, CD = "class C: pass\n", "class C: pass\nclass D: pass\n"
ABC, METHOD = "class P(abc.ABC): pass\nclass C: pass\n", "class C:\n    def f(self): pass\n"
GETTER = "R = [0]\ndef __getattr__(name):\n    if name == 'w' and R[0]: return 1\n    raise AttributeError(name)\n"
MAKES = "def make():\n    def f(x): return x\n    return f\n"
CLASSES = "def make():\n    class K: pass\n    return K\n"
ISINSTANCE = "def make(k):\n    def f(x): return isinstance(x, k)\n    return f\n"
META = "class M(type):\n    {}\nclass C(metaclass=M):\n    held = [False]\n"
slow = pytest.mark.slow
#: What the user's module defines; what is set before a start, where ``v`` is 0 or 1; and what the forward asks.
CASES = {
    "two objects": (C, "m.a = U.C(); m.b = m.a if v else U.C()", "m.a is m.b"),
    "two lists": ("", "m.a = [1]; m.b = m.a if v else [1]", "m.a is m.b"),
    "two numbers": ("", "m.a = float('1.5'); m.b = m.a if v else float('1.5')", "m.a is m.b"),
    "two modules in lists": ("", "m.a = [nn.ReLU()]; m.b = [m.a[0] if v else nn.ReLU()]", "m.a[0] is m.b[0]"),
    "methods of two objects": (METHOD, "a = U.C(); m.a = a.f; m.b = a.f if v else U.C().f", "m.a == m.b"),
    "two classes of one name": (CLASSES, "a = U.make(); m.a = a(); m.b = a() if v else U.make()()", "type(m.a) is type(m.b)"),
    "two bases of one name": (CLASSES, "m.a = U.make(); m.b = type('B', (m.a if v else U.make(),), {})()",
                              "isinstance(m.b, m.a)"),
    "two functions in a set": (MAKES, "a, b = U.make(), U.make(); m.a = [a, a if v else b]", "len(set(m.a)) == 1"),
    "functions in a list": ("def f(): pass\ndef g(): pass\n", "m.a = [U.g if v else U.f]", "g in set(m.a)"),
    "a class in a closure": (CD + ISINSTANCE, "m.c = U.C(); m.f = U.make(U.C if v else U.D)", "m.f(m.c)"),
    "ABC.register": (ABC, "m.c = U.C(); v and U.P.register(U.C)", "isinstance(m.c, P)"),
    "ABC.register, in a closure": (ABC + ISINSTANCE, "m.c = U.C(); m.f = U.make(U.P); v and U.P.register(U.C)", "m.f(m.c)"),
    "a protocol": ("@typing.runtime_checkable\nclass P(typing.Protocol):\n    def go(self): ...\n" + C,
                   "m.c = U.C(); vars(m.c).update({'go': int} if v else {})", "isinstance(m.c, P)"),
    "vars": (C, "m.c = U.C(); vars(m.c).update({'w': 1} if v else {})", "'w' in vars(m.c)"),
    "vars of a module": ("", "vars(m).update({'w': 1} if v else {})", "'w' in m.__dict__"),
    "the order of vars": (C, "m.c = U.C(); vars(m.c).update(dict.fromkeys('ab' if v else 'ba'))", "list(vars(m.c))[0] == 'a'"),
    "hasattr of a function": ("def f(): pass\n", "vars(U.f).update({'w': 1} if v else {})", "hasattr(f, 'w')"),
    "hasattr of a method": (METHOD, "m.c = U.C(); vars(U.C.f).update({'w': 1} if v else {})", "hasattr(m.c.f, 'w')"),
    "hasattr of a module": ("", "U.S = types.ModuleType('S'); vars(U.S).update({'w': 1} if v else {})", "hasattr(S, 'w')"),
    "__getattr__ of a module": (GETTER, "U.R[0] = v; m.u = U", "hasattr(m.u, 'w')"),
    "hasattr of a new object": (C, "v and setattr(U.C, 'w', [1])", "hasattr(C(), 'w')"),
    "the order of a set": ("", "m.c = {8, 0} if v else {0, 8}", "list(m.c)[0] == 8"),
    "a name of a built-in one": ("", "vars(U).update({'len': lambda x: 5} if v else {})", "len([1]) == 5"),
    "hooks of a tensor": ("", "m.t = torch.ones(1, requires_grad=True); v and m.t.register_hook(print)", "m.t._backward_hooks"),
}
BOOL = META.format("def __bool__(cls): return cls.held[0]")
SUBSTITUTE = """
import torch._dynamo
R = [0]
def f(): return R[0]
@torch._dynamo.substitute_in_graph(f, can_constant_fold_through=True)
def g(): return R[0]
"""
NOT_KEPT = {
    "metaclass": (BOOL, "U.C.held[0] = bool(v)", "C"),
    "metaclass of an object": (BOOL, "m.c = U.C(); U.C.held[0] = bool(v)", "type(m.c)"),
    "attribute of a metaclass": (META.format("w = [0]"), "U.M.w[0] = v", "C.w[0]"),
    "property of a metaclass": ("R = [0]\n" + META.format("w = property(lambda cls: R[0])"), "U.R[0] = v", "C.w"),
    "isinstance by a metaclass": (META.format("def __instancecheck__(cls, x): return cls.held[0]"),
                                  "m.c = types.SimpleNamespace(); U.C.held[0] = bool(v)", "isinstance(m.c, C)"),
    "a substitute": (SUBSTITUTE, "U.R[0] = v", "f()"),
    "state of Python": ("", "", "sys.getrecursionlimit() == 1001"),
    "truth of an enum": ("import enum\nR = [0]\nclass E(enum.Enum):\n    A = 1\n    def __bool__(self): return bool(R[0])\n",
                         "U.R[0] = v", "E.A"),
    "truth of a named tuple": (
        "R = [0]\nclass T(collections.namedtuple('T', 'a')):\n    def __bool__(self): return bool(R[0])\n",
        "m.t = U.T(1); U.R[0] = v", "m.t"),
    "hash": ("", "m.c = 'a'", "hash(m.c) % 2"),
    "id": ("", "m.c = [1]", "id(m.c) % 32 == 16"),
    "annotations": ("def f(a: int): pass\n", "U.f.__annotations__['a'] = float if v else int",
                    "f.__annotations__['a'] is float"),
}
QUICK = ("two objects", "two numbers", "a class in a closure", "ABC.register", "vars", "hasattr of a function",
         "the order of a set")


def maker(folder: Path, defined: str, arranged: str, expression: str) -> Callable[[int], Callable[[], nn.Module]]:
    """Makes the model of a start, as a new process would: from the same file, after ``arranged``."""
    name = f"users_{folder.name}"
    users, text = types.ModuleType(name, ""), MODEL.replace("DEFINED", defined).replace("EXPRESSION", expression)
    users.__file__ = str(folder / f"{name}.py")
    Path(users.__file__).write_text(text)
    sys.modules[name] = users

    def make(v: int) -> nn.Module:
        for each in [each for each in vars(users) if not each.startswith("__") or each == "__getattr__"]:
            delattr(users, each)
        exec(compile(text, str(users.__file__), "exec"), vars(users))
        torch.manual_seed(0)
        model = users.Model().eval()
        exec(arranged, {"m": model, "U": users, "v": v, "nn": nn, "torch": torch, "types": types, "__name__": "start"})
        return model

    return lambda v: lambda: make(v)


@pytest.mark.parametrize("case", [name if name in QUICK else pytest.param(name, marks=slow) for name in CASES])
def test_another_answer_is_traced(tmp_path: Path, case: str) -> None:
    make = maker(tmp_path, *CASES[case])
    assert was_traced(make(0)) and not was_traced(make(0))
    assert was_traced(make(1)) and not was_traced(make(1))
    assert was_traced(make(0))


@pytest.mark.parametrize("case", [name if name == "metaclass" else pytest.param(name, marks=slow) for name in NOT_KEPT])
def test_code_that_dynamo_does_not_look_into_is_not_kept(tmp_path: Path, case: str) -> None:
    make = maker(tmp_path, *NOT_KEPT[case])
    assert was_traced(make(0)) and was_traced(make(0))


def test_what_a_built_in_name_means_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may add names for all modules; Dynamo takes what has one for Python's own."""
    found = []
    for value in (0.0, 0.0, 1.0):
        monkeypatch.setattr(builtins, "switched_on", value, raising=False)
        found.append(description((), Values({}), asked_by([(lambda: switched_on).__code__])))  # type: ignore[name-defined] # noqa: F821
    assert found[0] == found[1] != found[2]


def test_objects_that_become_one_are_described_for_code_of_libraries_too() -> None:
    none = Asked(None, frozenset(), {})
    one, other = [1], [1]
    found = [description(("a", "b"), Values({"a": one, "b": b}), none) for b in (other, [1], one)]
    assert found[0] == found[1] != found[2]


def test_another_rank_is_traced(tmp_path: Path) -> None:
    """The processes of a group have one folder."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    make = maker(tmp_path, "", "", "torch.distributed.get_rank()")
    for rank, traced in ((0, True), (1, True), (0, False), (1, False)):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            assert was_traced(make(0)) is traced
        finally:
            dist.destroy_process_group()


def test_the_cache_of_casts_is_a_state_of_pytorch(tmp_path: Path) -> None:
    make = maker(tmp_path, "", "", "torch.is_autocast_cache_enabled()")
    try:
        for on, traced in ((True, True), (True, False), (False, True)):
            torch.set_autocast_cache_enabled(on)
            assert was_traced(make(0)) is traced
    finally:
        torch.set_autocast_cache_enabled(True)


def test_a_trace_of_unknown_code_is_not_kept() -> None:
    """A version of PyTorch that does not note what it traces."""
    with pytest.raises(NotPortable, match="what code"):
        asked_by(())
