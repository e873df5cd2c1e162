"""Which backend serves a model: the one asked for, or the best that can, with the reason why not for each other one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, CudagraphSupport, UnsupportedAttention, dtype_name, listed
from quire.attn_ops.composite import attention_name, kind_of
from quire.attn_ops.kv_cache import token_bytes
from quire.attn_ops.registry import all_backends, get_backend, long_prefill_name, pair_name
from quire.attn_ops.tuning import attention as tuning
from quire.attn_ops.tuning import prefill as prefill_tuning

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """The chosen backend, and why each one that was tried was passed over. ``why``: what measurements say of the choice, or
    "". ``sites``: as it serves them; MLA layers are latent, or else ``not_latent`` says why not."""

    backend: AttentionBackend
    passed_over: dict[str, list[str]]
    why: str = ""
    sites: tuple[AttentionSite, ...] = ()
    not_latent: str = ""

    def __str__(self) -> str:
        over = "".join(f"; {n} passed over: {', '.join(why)}" for n, why in self.passed_over.items())
        over += f"; an approximation: {self.backend.approximate}" if self.backend.approximate else ""
        over += f"; MLA on the dense cache: {self.not_latent}" if self.not_latent else ""
        return self.backend.name + (f" ({self.why})" if self.why else "") + over


def select_latent_or_dense(name: str | Mapping[str, str] | AttentionBackend, sites: Sequence[AttentionSite],
                           **where: Any) -> Selection:
    """``select_backend`` with MLA layers on the latent cache; where no backend serves that, on keys and values of all heads.
    ``where``: keyword arguments of ``select_backend``. Raises UnsupportedAttention if neither is served, with the reasons
    against both."""
    try:
        return select_backend(name, sites, **where)
    except UnsupportedAttention as latent:
        site = next((s for s in sites if s.latent is not None), None)
        if site is None:
            raise
        try:
            selection = select_backend(name, [s.dense for s in sites], **where)
        except UnsupportedAttention as dense:
            if str(dense) == str(latent):  # not of the layers: the package is missing
                raise
            raise UnsupportedAttention(f"{latent}\nWith keys and values of all heads in the cache: {dense}") from dense
    reasons = selection.backend.capabilities.reasons_against(site, **where)
    size = token_bytes(site.dense, where.get("kv_dtype") or site.dtype, where.get("fixed_scale", False))
    logger.warning(
        "%s caches keys and values of all heads of MLA layers, %d bytes per token and layer; the latent cache of %s, %d, is "
        "not served: %s", selection.backend.name, size, dtype_name(site.dtype), token_bytes(site), "; ".join(reasons))
    return replace(selection, not_latent=f"{selection.backend.name}: {'; '.join(reasons)}")


def select_backend(name: str | Mapping[str, str] | AttentionBackend, sites: Sequence[AttentionSite], *, device: torch.device,
                   page_size: int, kv_dtype: torch.dtype | None = None, layout: str | None = None, fixed_scale: bool = False
                   ) -> Selection:
    """Choose the backend for a model: ``name``, or for "auto" the best that can serve every site; where none can, the best for
    each kind of layer (``attn_ops/composite.py``). The best is the fastest by what was measured on this device
    (``attn_ops/tuning/attention.py`` has the rule), else the first in order of priority, always so for a cache with fixed
    scales (``fixed_scale``), on which nothing is measured. Raises UnsupportedAttention, which lists the site, its needs, and
    each reason, if no backend (or not the one asked for) can, and ValueError for an unknown name."""
    name = attention_name(name)
    measured: dict[str, Any] = {"page_size": page_size, "kv_dtype": kv_dtype, "layout": layout}
    cache = {**measured, "fixed_scale": fixed_scale}

    def refusal(backend: AttentionBackend) -> tuple[list[str], AttentionSite | None]:
        """Why the backend cannot serve the model, and the site where that shows."""
        if missing := backend.available(device):
            return [missing], None
        for site in sites:
            if reasons := backend.capabilities.reasons_against(site, device=device, **cache):
                return reasons, site
        return [], None

    auto, latent = name == "auto", any(site.latent is not None for site in sites)
    if isinstance(name, AttentionBackend):
        candidates, name = [name], name.name
    elif not auto:
        candidates = [get_backend(name)]
    else:
        ranked = [((b.priority or {}).get(device.type), n, b) for n, b in all_backends().items() if latent or b.op is not None
                  or b.mla_op is None]
        candidates = [b for _, _, b in sorted((r for r in ranked if r[0] is not None), key=lambda r: r[:2])]
    against: dict[str, list[str]] = {}
    usable: list[AttentionBackend] = []
    first: Selection | None = None
    refused: AttentionSite | None = None
    for backend in candidates:
        reasons, site = refusal(backend)
        refused = site or refused
        if reasons:
            against[backend.name] = reasons
            continue
        first = first or Selection(backend, dict(against), sites=tuple(sites))
        if not auto or fixed_scale or not tuning.sources(device):
            return first
        usable.append(backend)
    if first is not None:
        pairs = _pairs(usable, lambda pair: not refusal(pair)[0]) if latent and device.type == "cuda" else {}
        decision = tuning.decide(usable, sites, device=device, pairs=pairs, **measured)
        if decision is None:
            how = tuning.COMMAND if kv_dtype in (None, sites[0].dtype) else "only caches of the model's dtype are"
            return replace(first, why=f"first in order of priority; this shape is not measured here: {how}")
        chosen = Selection(decision.backend, {**against, **decision.passed_over}, decision.why, tuple(sites))
        if decision.backend in pairs.values():
            return chosen
        for_some = [b for b in candidates if b.op is not None and not b.available(device)
                    and any(b.takes_prompts(site, device=device, **cache) for site in sites)]
        return _with_long_prefill(chosen, for_some, device, measured)
    if auto and against and (by_kind := _by_kind(sites, device, cache)) is not None:
        return replace(by_kind, passed_over=against)
    others = ""
    if not auto:
        can = [n for n, b in all_backends().items() if n != name and not refusal(b)[0]]
        others = "\n" + (f"Can serve it here: {listed(can)} (or attention='auto')." if can else
                         "No other backend here can serve it. Change what the reasons name.")
    at = f" attention site {refused.layer} ({refused.name or 'unnamed'}) needs {refused.needs()}." if refused else ""
    listing = "".join(f"\n  {n}: {'; '.join(why)}" for n, why in against.items())
    raise UnsupportedAttention(
        f"attention={name!r} cannot serve this model on {device} with page_size={page_size}.{at} Why not:{listing}{others}")


def _pairs(usable: Sequence[AttentionBackend], serves: Callable[[AttentionBackend], bool]) -> dict[str, AttentionBackend]:
    """By the name of a backend that captures fewer batches than the first in order of priority: the pair in which it decodes
    and the first serves all else, if that captures any batch."""
    first, found, whole = usable[0], dict[str, AttentionBackend](), CudagraphSupport.ALWAYS
    for other in usable[1:]:
        name = pair_name(first.name, other.name)
        if other.capabilities.cudagraph_support < whole and name is not None:
            pair = get_backend(name)
            if pair.capabilities.cudagraph_support is whole and serves(pair):
                found[other.name] = pair
    return found


def _with_long_prefill(chosen: Selection, others: Sequence[AttentionBackend], device: torch.device, cache: dict[str, Any]
                       ) -> Selection:
    """The choice with another backend for the steps in which that one's prompts were measured faster, if there is one: the
    fastest for long prompts (``attn_ops/long_prefill.py``)."""
    rest, found = chosen.backend, []
    for other in others:
        if other is rest or other.prefill is None or rest.every_step or other.every_step:
            continue
        rules = [rule for site in chosen.sites if other.takes_prompts(site, device=device, **cache)
                 and (rule := prefill_tuning.rule(other, rest, site, device=device, **cache)) is not None and rule.ever]
        if rules:
            found.append((min(rule.prefill.per_operation for rule in rules), other.name, rules[0], len(rules)))
    name = long_prefill_name(min(found)[1], rest.name) if found else None
    if name is None:
        return chosen
    _, other_name, rule, layers = min(found)
    why = f"{chosen.why}; {other_name} for the long prompts of {layers} layers, where it spares time: measured {rule}"
    return replace(chosen, backend=get_backend(name), why=why)


def _by_kind(sites: Sequence[AttentionSite], device: torch.device, cache: dict[str, Any]) -> Selection | None:
    """The best backend for each kind of layer; None if all layers are of one kind, or one kind has none."""
    kinds: dict[str, list[AttentionSite]] = {}
    for site in sites:
        kinds.setdefault(kind_of(site.window, site.chunk), []).append(site)
    if len(kinds) < 2:
        return None
    try:
        names = {kind: select_backend("auto", some, device=device, **cache).backend.name for kind, some in kinds.items()}
        return Selection(get_backend(names), {}, "no backend serves all layers: the first one for each kind of layer",
                         tuple(sites))
    except UnsupportedAttention:
        return None
