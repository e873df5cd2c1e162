"""docs/index.md: the names that users of vLLM and SGLang look for, and where they are."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import quire

ROOT = Path(__file__).resolve().parent.parent


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_index", ROOT / "docs" / "generate_index.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "index.md").read_text() == generator().page(), "run python docs/generate_index.py"
    # SGLang 0.5.2's index has 97.
    sections = generator().entries()
    assert sum(len(names) for section, names in sections.items() if "model_executor" in section) == 97


def test_every_place_exists() -> None:
    """A reader who follows the page finds the name, and one that is not here has a way out."""
    index = generator()
    wrong = []
    for section, names in index.entries().items():
        for name, (target, note) in names.items():
            if not target:
                same = note.removeprefix("as ")
                if len(note.split()) < 3 and not (same in names and not names[same][0] and same != name):
                    wrong.append(f"{section}: {name} has neither a place nor a reason")
                continue
            try:
                index.resolve(target)
            except (ImportError, AttributeError) as error:
                wrong.append(f"{section}: {name} -> {target}: {error}")
    assert not wrong, "\n".join(wrong)


def test_fields_of_the_metadata() -> None:
    """vLLM's fields of CommonAttentionMetadata are fields or properties here."""
    names = [name.split(".")[1] for section in generator().entries().values() for name in section
             if name.startswith("CommonAttentionMetadata.") and "__" not in name]
    known = {f.name for f in fields(quire.CommonAttentionMetadata)} | set(dir(quire.CommonAttentionMetadata))
    assert len(names) == 15 and not set(names) - known
    # A member of vLLM's classes whose place is a class is a field or an argument of it.
    index, missing = generator(), []
    (names,) = (names for section, names in index.entries().items() if section.startswith("vLLM"))
    for name, (target, note) in names.items():
        owner = index.resolve(target) if target and "." in name else None
        if isinstance(owner, type):
            member = "config" if note == "called config" else name.rpartition(".")[2]
            missing += [name] * (member not in set(dir(owner)) | set(inspect.signature(owner).parameters))
    assert not missing
