"""``explain`` shows how a model's attention would run, ``assert_attention_sites`` pins it in a test."""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.kv_cache import token_bytes
from quire.attn_ops.registry import aligned
from quire.attn_ops.selection import Selection
from quire.passes.capture.paged_model import PagedModel, find_sites
from quire.passes.fx import longest_shown
from quire.passes.options import QuireOptions
from quire.passes.verify.sites import format_sites


@dataclass(frozen=True, repr=False)
class Explanation:
    """What ``explain`` found: ``selection`` is None if no backend can serve the model, ``error`` if one can; ``longest``: how
    many tokens a sequence may have at most, and why. ``str()`` is a table of the attention sites, equal ones in one row, and
    how the backend was chosen; ``text(every=True)`` has a row each."""

    model_name: str
    sites: list[AttentionSite]
    selection: Selection | None
    error: str | None
    longest: tuple[int, str] | None = None

    @property
    def supported(self) -> bool:
        return self.error is None

    def text(self, *, every: bool = False) -> str:
        """The table. ``every``: with a row for each site."""
        lines = [f"{self.model_name}: {len(self.sites)} attention sites"]
        if self.sites:
            served = self.selection.sites if self.selection else self.sites
            lowered = functools.cache(self._lowered_to)  # it may look for compiled kernels
            ops = [lowered(replace(s, layer=0, name="")) for s in served]
            lines += _table(served, ops, every)
        if self.selection is not None:
            why = f", {self.selection.why}" if self.selection.why else ""
            lines.append(f"attention backend: {self.selection.backend.name}{why}")
            if self.selection.backend.approximate:
                lines.append(f"an approximation: {self.selection.backend.approximate}")
            lines += [f"  {name} passed over: {'; '.join(why)}" for name, why in self.selection.passed_over.items()]
            if self.selection.not_latent:
                lines.append(f"MLA with keys and values of all heads in the cache, as the latent one is not served: "
                             f"{self.selection.not_latent}")
        if self.longest is not None and self.error is None:
            last, why = self.longest
            lines.append(f"sequences of at most {last} tokens (max_model_len={last}): {why}")
        if self.error is not None:
            lines.append(f"refused: {self.error}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _lowered_to(self, site: AttentionSite) -> str:
        """The paged op, and for MLA what a token takes in the cache, in the model's dtype."""
        if self.selection is None:
            return "refused"
        if site.latent is not None:
            return f"{self.selection.backend.serves(site)}, latent cache of {token_bytes(site)} bytes per token"
        dense = f", {token_bytes(site)} bytes per token" if self.selection.not_latent else ""
        return f"{self.selection.backend.serves(site)}{dense}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model_name, "supported": self.supported, "error": self.error,
            "longest": self.longest[0] if self.longest else None,
            "backend": self.selection.backend.name if self.selection else None,
            "passed_over": dict(self.selection.passed_over) if self.selection else {},
            "sites": [{"layer": s.layer, "module": s.name, "route": s.route, "needs": s.needs(), "scale": s.scale}
                      for s in self.sites]}


def _table(sites: Sequence[AttentionSite], ops: Sequence[str], every: bool) -> list[str]:
    """With one row for all sites that differ in nothing but their layer; ``every``: a row each."""
    groups: dict[tuple[str, ...], list[AttentionSite]] = {}
    for number, (site, op) in enumerate(zip(sites, ops, strict=True)):
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", site.name)
        key = str(number) if every else "", pattern, site.route, site.needs(), f"{site.scale:.6g}", op
        groups.setdefault(key, []).append(site)
    rows = [["layer", "module", "route", "needs", "scale", "lowered to"]]
    for (_, pattern, *rest), equal in groups.items():
        name = equal[0].name if len(equal) == 1 else pattern
        rows.append([_ranges([site.layer for site in equal]), name or "-", *rest])
    return aligned(rows)


def _ranges(layers: Sequence[int]) -> str:
    """"0-47"; "0-46 by 2" for a regular pattern; else "0-4, 6-10"."""
    steps = {b - a for a, b in itertools.pairwise(layers)}
    if len(layers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{layers[0]}-{layers[-1]} by {steps.pop()}"
    runs = [[layer for _, layer in run] for _, run in itertools.groupby(enumerate(layers), lambda at: at[1] - at[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def explain(model: torch.nn.Module, *, attention: str | Mapping[str, str] = "auto", page_size: int = 16) -> Explanation:
    """Trace ``model`` (nothing is computed) and show for each site how its attention would run, or why it is refused.

    Args:
        model, attention: as for ``quire.Engine``.
        page_size: tokens per page, which some backends restrict.

    Raises:
        ValueError: an unknown backend, or a page size below 1. TypeError: ``model`` is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"explain takes a model, got {model!r:.60}; load it first, or use the command line: quire explain "
                        "--model PATH")
    QuireOptions(page_size=page_size)  # checks it; the model is traced without one, so that nothing is compiled
    sites: list[AttentionSite] = []
    selection, error, longest = None, None, None
    try:
        with contextlib.closing(PagedModel(model, QuireOptions(compiler="eager", attention=attention))) as paged:
            sites, longest = paged.sites, longest_shown(paged.graph.raised)
            selection = paged.select(page_size)
    except UnsupportedAttention as refusal:
        error = str(refusal)
    return Explanation(type(model).__name__, sites, selection, error, longest)


def attention_sites(model: torch.nn.Module) -> str:
    """The table that ``assert_attention_sites`` compares: layer, module, route, needs, scale; no backend, no device."""
    return format_sites(find_sites(model))


def assert_attention_sites(model: torch.nn.Module, expected: str) -> None:
    """Fail unless the model's attention sites are the ``expected`` table, as a failure prints it, up to indentation. Raises
    AssertionError with a diff, UnsupportedAttention if the model cannot be served."""
    found, pinned = _lines(attention_sites(model)), _lines(expected)
    if found != pinned:
        diff = "\n".join(difflib.unified_diff(pinned, found, "expected", "actual", lineterm=""))
        raise AssertionError(f"the attention sites of {type(model).__name__} changed:\n{diff}\n\nThe table is now:\n"
                             + "\n".join(found))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]
