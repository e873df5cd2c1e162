"""What of a forward runs without labels: nothing that may run is left out."""

from __future__ import annotations

import ast
import textwrap

import pytest

from quire.passes.capture.without_loss import without_loss

HEAD = "def forward(self, input_ids, labels=None, *, skip_logits=None, **kwargs):\n"

CASES = {
    "a branch": ("if labels is not None:\n    a()\nelse:\n    b()", "b()"),
    "a variable": ("loss = None\nif labels is not None:\n    loss = a()\nif loss is not None:\n    b()", "loss = None"),
    "of all keywords": ("shifted = kwargs.pop('shift_labels', None)\nif shifted is None and labels is None:\n    a(**kwargs)",
                        "shifted = kwargs.pop('shift_labels', None)\na(**kwargs)"),
    "what decides is not first": ("if a() and labels:\n    b()\nif c and labels and d():\n    e()", "a()"),
    "a choice": ("return a() if labels is None else b()", "return a()"),
    "Liger's": ("if skip_logits is None:\n    skip_logits = self.training and labels is not None\nif skip_logits:\n    a()",
                "skip_logits = False"),
    "in a block": ("with a():\n    if labels is not None:\n        b()\n    c()", "with a():\n    c()"),
}

KEPT = {
    "bound anew": "if labels is None:\n    labels = input_ids\nif labels is not None:\n    a()",
    "bound in one branch": "if a:\n    labels = b\nif labels is not None:\n    c()",
    "bound in the loop": "for x in y:\n    if labels is not None:\n        a()\n    labels = x",
    "bound by a loop": "for labels in y:\n    pass\nif labels is not None:\n    a()",
    "bound in a try": "try:\n    labels = a()\nexcept E:\n    pass\nif labels is not None:\n    b()",
    "bound by an except": "try:\n    a()\nexcept E as labels:\n    b(labels is None)\nif labels is not None:\n    c()",
    "bound by an expression": "a((labels := b))\nif labels is not None:\n    c()",
    "bound with others": "labels, x = a()\nif labels is not None:\n    b()",
    "bound by a function inside": "def a():\n    nonlocal labels\n    labels = 1\na()\nif labels is not None:\n    b()",
    "an import": "import labels\nif labels is not None:\n    a()",
    "added to": "labels += 1\nif labels:\n    a()",
    "keywords that are set": "kwargs['shift_labels'] = 1\nx = kwargs.pop('shift_labels', None)\nif x is not None:\n    a()",
    "keywords that others get": "a(kwargs)\nx = kwargs.pop('shift_labels', None)\nif x is not None:\n    b()",
    "keywords of other names": "x = kwargs.pop('past_key_values', None)\nif x is not None:\n    a()",
    "another default": "x = kwargs.pop('shift_labels', 3)\nif x is not None:\n    a()",
    "false is not None": "x = a and labels\nif x is None:\n    b()",
}


def run(body: str) -> str:
    (function,) = ast.parse(HEAD + textwrap.indent(body, "    ")).body
    assert isinstance(function, ast.FunctionDef)
    return "\n".join(map(ast.unparse, without_loss(function)))


@pytest.mark.parametrize("which", CASES)
def test_what_only_labels_make_run_is_left_out(which: str) -> None:
    assert run(CASES[which][0]) == CASES[which][1]


@pytest.mark.parametrize("which", KEPT)
def test_what_may_run_is_kept(which: str) -> None:
    body = KEPT[which]
    found = run(body)
    if which in ("bound anew", "false is not None"):  # of which one branch is known to run, or what is assigned
        assert found.endswith("if labels is not None:\n    a()" if which == "bound anew" else "if x is None:\n    b()")
    else:
        assert found == "\n".join(map(ast.unparse, ast.parse(body).body))


@pytest.mark.parametrize("head", ["labels", "labels=-100", "labels=None, kwargs=None"])
def test_parameters_of_other_defaults(head: str) -> None:
    (function,) = ast.parse(f"def forward(self, {head}):\n    if labels is not None: a()\n    x = kwargs.get('labels')\n"
                            "    if x: b()").body
    assert isinstance(function, ast.FunctionDef)
    found = "\n".join(map(ast.unparse, without_loss(function)))
    assert ("a()" in found) == ("None" not in head)
    assert "b()" in found
