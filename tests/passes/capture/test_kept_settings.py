"""Traces kept on disk of a model that reads a module of settings, in ways that Dynamo has no guard for. The settings' file is
edited between two starts: a trace of before would give the tokens of other settings."""

from __future__ import annotations

import abc
import enum
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quire.passes.capture.facts import Check, Values, fact, module_names
from tests.passes.capture.test_kept_trace import was_traced

pytestmark = pytest.mark.usefixtures("folder")

MODEL = """
import torch.nn.functional as F
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
    def forward(self, input_ids, position_ids):
        q = (self.embed(input_ids) + position_ids[..., None] * 0.01).unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(y * (EXPRESSION))
"""
META = "class M(type):\n    w = {0}\n    def __getitem__(c, k):\n        return {0}\nclass C(metaclass=M): pass\n"
CLASSES = "import abc\nclass P(abc.ABC):\n    pass\nclass C:\n    pass\nc = C()\n"
SPACE = "import types\nc = types.SimpleNamespace({})\n"
CASES = {  # the settings before and after, and what the forward reads
    "IntEnum": ("import enum\nclass W(enum.IntEnum):\n    A = 1\n", "import enum\nclass W(enum.IntEnum):\n    A = 2\n",
                "2.0 if S.W.A == 1 else 1.0"),
    "by value": ("import enum\nclass W(enum.Enum):\n    A = 'a'\n    B = 'b'\n",
                 "import enum\nclass W(enum.Enum):\n    A = 'b'\n    B = 'a'\n", "2.0 if S.W('a').name == 'A' else 1.0"),
    "a default": ("", "w = 2.0\n", "getattr(S, 'w', 1.0)"),
    "hasattr": ("", "w = 2.0\n", "2.0 if hasattr(S, 'w') else 1.0"),
    "ABC.register": (CLASSES, CLASSES + "P.register(C)\n", "2.0 if isinstance(S.c, S.P) else 1.0"),
    "identity": ("a = [1]\nb = [1]\n", "a = b = [1]\n", "2.0 if S.a is S.b else 1.0"),
    "vars": (SPACE.format(""), SPACE.format("w=1"), "2.0 if 'w' in vars(S.c) else 1.0"),
}


@pytest.mark.parametrize("case", CASES)
def test_edited_settings(tmp_path: Path, case: str) -> None:
    before, after, expression = CASES[case]
    name = f"users_{tmp_path.name}"
    settings, users = types.ModuleType(f"{name}_settings", ""), types.ModuleType(name, "")
    for module, text in ((settings, ""), (users, MODEL.replace("EXPRESSION", expression))):
        module.__file__ = str(tmp_path / f"{module.__name__}.py")
        Path(module.__file__).write_text(text)
        sys.modules[module.__name__] = module
    users.S = settings
    exec(compile(Path(users.__file__).read_text(), users.__file__, "exec"), vars(users))

    def model(text: str) -> nn.Module:
        """As a new process would import it: Dynamo keeps the first module that it met under a name."""
        Path(settings.__file__).write_text(text)
        for each in [each for each in vars(settings) if not each.startswith("__")]:
            delattr(settings, each)
        exec(text, vars(settings))
        torch.manual_seed(0)
        return users.Model().eval()

    assert was_traced(lambda: model(before)) and not was_traced(lambda: model(before))
    assert was_traced(lambda: model(after))


def made(text: str) -> Any:
    """``made`` by the code ``text``."""
    scope: dict[str, Any] = {"enum": enum, "__name__": __name__}
    exec(text, scope)
    return scope["made"]


@pytest.mark.parametrize("text", [
    "class W(enum.IntEnum):\n    A = {}\nmade = W.A", "class W(enum.IntEnum):\n    A = {}\nmade = W",
    META.replace("{0}", "{}", 1).replace("{0}", "9") + "made = C",
    META.replace("{0}", "9", 1).replace("{0}", "{}") + "made = C",
], ids=["member", "enum", "attribute of a metaclass", "method of a metaclass"])
def test_facts(text: str) -> None:
    """Of equal code equal facts, in every process, and of other code others."""
    one, same, other = (fact(made(text.format(n))) for n in (1, 1, 2))
    assert one == same != other


def test_modules_of_what_was_read() -> None:
    """Their files are compared too: of values, of their classes, and of modules that are only asked for names."""
    scope = {"held": fact, "shape": torch.Size([1]), "model": nn.Linear(1, 1), "space": SimpleNamespace(c=META), "asked": abc}
    assert module_names([Check(name, "TYPE_MATCH", None, None) for name in scope], Values(scope)) >= {
        "quire.passes.capture.facts", "torch", "torch.nn.modules.linear", "types", "abc"}
