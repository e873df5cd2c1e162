"""See what happened to a model's attention, and pin it in a test."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import UnsupportedAttention
from quire.passes.capture.paged_model import PagedModel
from quire.passes.options import QuireOptions
from quire.passes.verify.sites import format_sites


class Explanation:
    """What ``explain`` found: ``sites``, ``selection`` (None if no backend can), ``error`` (None if the model can be served).

    ``str()`` is a table with a row for each attention site, then how the backend was chosen.
    """

    def __init__(self, model_name: str, sites: list[AttentionSite], selection: Any, error: str | None) -> None:
        self.model_name, self.sites, self.selection, self.error = model_name, sites, selection, error

    @property
    def supported(self) -> bool:
        return self.error is None

    def __str__(self) -> str:
        lines = [f"{self.model_name}: {len(self.sites)} attention sites"]
        if self.sites:
            op = f"{self.selection.backend.name}_paged_attention" if self.selection else "refused"
            lines.append(format_sites(self.sites, [op] * len(self.sites)))
        if self.selection is not None:
            why = f", {self.selection.why}" if self.selection.why else ""
            lines.append(f"attention backend: {self.selection.backend.name}{why}")
            lines += [f"  {name} passed over: {'; '.join(why)}" for name, why in self.selection.passed_over.items()]
        if self.error is not None:
            lines.append(f"refused: {self.error}")
        return "\n".join(lines)

    __repr__ = __str__


def explain(model: torch.nn.Module, *, attention: str = "auto", page_size: int = 16) -> Explanation:
    """Trace ``model`` (nothing is computed) and say, site by site, how its attention would run, or why it is refused.

    Args:
        model: as for ``quire.Engine``.
        attention: backend to choose, or "auto".
        page_size: tokens a page, which some backends restrict.

    Raises:
        ValueError: no backend of that name, or a page size below 1.
    """
    check_page_size(page_size)
    name = type(model).__name__
    sites: list[AttentionSite] = []
    try:
        paged = PagedModel(model, QuireOptions(compiler="eager", attention=attention))
        try:
            sites = paged.sites
            selection = paged.select(page_size)
        finally:
            paged.close()
    except UnsupportedAttention as error:
        return Explanation(name, sites, None, str(error))
    return Explanation(name, sites, selection, None)


def check_page_size(page_size: int) -> None:
    """Raises ValueError for a page of less than one token."""
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")


def attention_sites(model: torch.nn.Module) -> str:
    """The table that ``assert_attention_sites`` compares: layer, module, route, needs, scale; no backend, no device."""
    paged = PagedModel(model, QuireOptions(compiler="eager"))
    try:
        return format_sites(paged.sites)
    finally:
        paged.close()


def assert_attention_sites(model: torch.nn.Module, expected: str) -> None:
    """Fail unless the model's attention sites are the ``expected`` table (as this function prints it; indentation and blank
    lines at the ends do not count).

    Raises:
        AssertionError: with a diff.
        UnsupportedAttention: the model cannot be served at all.
    """
    actual = _lines(attention_sites(model))
    wanted = _lines(expected)
    if actual != wanted:
        diff = "\n".join(difflib.unified_diff(wanted, actual, "expected", "actual", lineterm=""))
        raise AssertionError(f"the attention sites of {type(model).__name__} changed:\n{diff}\n\nThe table is now:\n"
                             + "\n".join(actual))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]



__all__ = ["Explanation", "assert_attention_sites", "attention_sites", "explain"]
