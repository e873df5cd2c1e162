"""Which backend serves a model: the one asked for, or the best of those that can, with the reason why not for every other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, UnsupportedAttention, listed
from quire.attn_ops.registry import all_backends, get_backend
from quire.attn_ops.tuning import attention as choices


@dataclass(frozen=True)
class Selection:
    """The backend chosen, and why each one that was tried was passed over. ``why``: what measurements say of the choice; ""
    where there are none."""

    backend: AttentionBackend
    passed_over: dict[str, list[str]]
    why: str = ""

    def __str__(self) -> str:
        over = "".join(f"; {n} passed over: {', '.join(why)}" for n, why in self.passed_over.items())
        return self.backend.name + (f" ({self.why})" if self.why else "") + over


def select_backend(
    name: str | AttentionBackend, sites: Sequence[AttentionSite], *, device: torch.device, page_size: int,
    kv_dtype: torch.dtype | None = None, layout: str | None = None,
) -> Selection:
    """Choose the backend for a model: ``name``, or the best that can serve every site.

    The best is the fastest by what was measured on this device (``attn_ops/tuning/attention.py`` has the rule), else the first in order
    of priority. Nothing is measured here.

    Raises:
        UnsupportedAttention: no backend (or not the one asked for) can; lists the site, its needs, and each reason.
        ValueError: there is no backend called ``name``.
    """
    backends = all_backends()
    auto = name == "auto"
    if isinstance(name, AttentionBackend):
        candidates, name = [name], name.name
    elif not auto:
        candidates = [get_backend(name)]
    else:
        ranked = {n: (b.priority or {}).get(device.type) for n, b in backends.items()}
        candidates = [backends[n] for _, n in sorted((place, n) for n, place in ranked.items() if place is not None)]
    against: dict[str, list[str]] = {}
    usable: list[AttentionBackend] = []
    first_bad: AttentionSite | None = None
    for backend in candidates:
        reasons: list[str] = []
        missing = backend.available(device)
        if missing:
            reasons = [missing]
        for site in sites if not reasons else ():
            reasons = backend.capabilities.reasons_against(site, device=device, page_size=page_size, kv_dtype=kv_dtype,
                                                           layout=layout)
            if reasons:
                first_bad = site
                break
        if reasons:
            against[backend.name] = reasons
            continue
        if not auto:
            return Selection(backend, against)
        if not usable:
            first = Selection(backend, dict(against))
            if not choices.sources(device):
                return first
        usable.append(backend)
    if usable:
        decision = choices.decide(usable, sites, device=device, page_size=page_size, kv_dtype=kv_dtype, layout=layout)
        if decision is None:
            how = choices.COMMAND if kv_dtype in (None, sites[0].dtype) else "only caches of the model's dtype are"
            return replace(first, why=f"first in order of priority; this shape is not measured here: {how}")
        return Selection(decision.backend, {**against, **decision.passed_over}, decision.why)
    others = "" if name == "auto" else _who_else(sites, device, page_size, kv_dtype, layout, but=name)
    at = f" attention site {first_bad.layer} ({first_bad.name or 'unnamed'}) needs {first_bad.needs()}." if first_bad else ""
    listing = "".join(f"\n  {n}: {'; '.join(why)}" for n, why in against.items())
    raise UnsupportedAttention(
        f"attention={name!r} cannot serve this model on {device} with page_size={page_size}.{at} Why not:{listing}{others}")


def _who_else(sites: Sequence[AttentionSite], device: torch.device, page_size: int, kv_dtype: torch.dtype | None,
              layout: str | None, but: str) -> str:
    can = [n for n, b in all_backends().items() if n != but and not b.available(device) and not any(
        b.capabilities.reasons_against(s, device=device, page_size=page_size, kv_dtype=kv_dtype, layout=layout)
        for s in sites)]
    return f"\nCan serve it here: {listed(can)} (or attention='auto')." if can else "\nNo other backend here can serve it."


__all__ = ["Selection", "select_backend"]
