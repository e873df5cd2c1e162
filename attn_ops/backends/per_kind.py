"""Backends ``full=A,window=B,chunk=C``, or ``attention={"full": A, "window": B}``: one backend for each kind of layer. A layer
with a window is of kind "window", with chunks "chunk", all others "full". A kind that is not named is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, BackendFamily, UnsupportedAttention
from quire.attn_ops.composite import KINDS, Composite, check_parts, common_capabilities, kind_of


def make(name: str, get: Callable[[str], AttentionBackend]) -> AttentionBackend:
    """The backend of such a name. Raises ValueError for another form, a kind twice, or an unknown backend."""
    pairs = [pair.partition("=") for pair in name.split(",")]
    kinds = [kind for kind, _, _ in pairs]
    if any(kind not in KINDS or not part for kind, _, part in pairs) or len(set(kinds)) != len(kinds):
        raise ValueError(f"attention={name!r}: write {FAMILY.usage}; each of {', '.join(KINDS)} at most once")
    if "auto" in (part for _, _, part in pairs):
        raise ValueError(f"attention={name!r}: name a backend for each kind; attention='auto', without kinds, chooses one for "
                         "each where no backend serves all")
    chosen = {kind: get(part) for kind, _, part in pairs}
    parts = tuple({part.name: part for part in chosen.values()}.values())
    check_parts(name, parts, get)

    def serving(site: AttentionSite) -> Sequence[AttentionBackend] | str:
        kind = kind_of(site.window, site.chunk)
        return (chosen[kind],) if kind in chosen else f"no backend is named for layers of kind {kind!r}"

    def choose(tokens: int, rows: int, window: int | None, chunk: int | None) -> AttentionBackend:
        if kind_of(window, chunk) not in chosen:
            raise UnsupportedAttention(f"attention={name!r}: no backend is named for layers of kind {kind_of(window, chunk)!r}")
        return chosen[kind_of(window, chunk)]

    features = {kind: kind in chosen and getattr(chosen[kind].capabilities, kind) for kind in KINDS if kind != "full"}
    support = min(part.capabilities.cudagraph_support for part in parts)
    return Composite(name, parts, choose, lambda *of_step: parts, serving).backend(
        common_capabilities(parts, serving, support, **features),
        lambda site: chosen[kind_of(site.window, site.chunk)].serves(site), mla_only=all(part.op is None for part in parts))


FAMILY = BackendFamily("per_kind", "full=NAME,window=NAME,chunk=NAME: one backend for each kind of layer", make=make,
                       matches=lambda name: "=" in name)
