"""Backends ``hybrid:PREFILL+DECODE``: one backend for prefill, another for decoding, chosen step by step.

Steps of at most one token per sequence go to DECODE, and so does every step that runs as a CUDA graph; all others go to
PREFILL. Where DECODE allows graphs of such batches only and PREFILL of any batch, graphs of other batches are PREFILL's, so
that all steps can be captured. MLA layers are served from latent vectors where both can. ``hybrid:PREFILL+DECODE@long`` gives
PREFILL only the steps in which it was measured faster (``attn_ops/long_prefill.py``).
"""

from __future__ import annotations

from collections.abc import Callable

from quire.attn_ops.backend import AttentionBackend, BackendFamily, CudagraphSupport
from quire.attn_ops.composite import Composite, check_every_step, check_parts, common_capabilities
from quire.attn_ops.long_prefill import make as make_long
from quire.attn_ops.step import current_step

NAME, LONG = "hybrid", "long"


def make(name: str, get: Callable[[str], AttentionBackend]) -> AttentionBackend:
    """The backend ``hybrid:PREFILL+DECODE``, with or without ``@long``. Raises ValueError for a name of another form, or an
    unknown backend."""
    parted, at, which = name.partition(":")[2].partition("@")
    prefill_name, plus, decode_name = parted.partition("+")
    if not (prefill_name and plus and decode_name) or "+" in decode_name or (at and which != LONG):
        raise ValueError(f"attention={name!r}: write {FAMILY.usage}")
    prefill, decode = get(prefill_name), get(decode_name)
    if at:
        return make_long(name, prefill, decode)
    parts = (decode,) if decode is prefill else (decode, prefill)
    check_parts(name, parts, get)
    if len(parts) > 1:
        check_every_step(name, parts)

    support, whole = decode.capabilities.cudagraph_support, CudagraphSupport.ALWAYS
    shared = (CudagraphSupport.UNIFORM_SINGLE_TOKEN_DECODE <= support < whole
              and prefill.capabilities.cudagraph_support is whole)  # graphs of either part

    def part(tokens: int, rows: int, captured: bool) -> AttentionBackend:
        return decode if tokens <= rows or (captured and not shared) else prefill

    def choose(tokens: int, rows: int, window: int | None, chunk: int | None) -> AttentionBackend:
        step = current_step()
        return part(tokens, rows, step is not None and step.graph_key is not None)

    composite = Composite(name, parts, choose, lambda *of_step: (part(*of_step),), lambda site: parts)
    return composite.backend(common_capabilities(parts, composite.site_parts, whole if shared else support),
                             lambda site: f"{prefill.serves(site)} / {decode.serves(site)}",
                             mla_only=any(part.op is None for part in parts))


FAMILY = BackendFamily(NAME, "hybrid:PREFILL+DECODE[@long]: one backend for prefill, another for decoding; @long: prefill only "
                       "where it was measured faster", make=make,
                       long_prefill=lambda prefill, rest: f"{NAME}:{prefill}+{rest}@{LONG}",
                       pair=lambda prefill, decode: f"{NAME}:{prefill}+{decode}")
