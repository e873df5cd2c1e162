"""The options of a compilation, as ``torch.compile(backend="quire", options={...})`` and the engine give them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from quire.attn_ops.backend import UnsupportedAttention
from quire.attn_ops.composite import attention_name
from quire.attn_ops.kv_cache import Layout
from quire.attn_ops.registry import get_backend
from quire.passes.compile.inductor import COMPILERS
from quire.passes.fusions.registry import fusion_names


@dataclass(frozen=True)
class QuireOptions:
    """Options of ``torch.compile(backend="quire", options={...})``; the last three are for ``PagedModel`` only. Raises
    ValueError for an unknown backend, compiler, layout or fusion, or a page size below 1.

    Args:
        attention: backend name, or "auto", or a name for each kind of layer: {"full": NAME, "window": NAME, "chunk": NAME}.
        compiler: "inductor", which compiles each distinct layer once (``passes/compile/regions.py``); "inductor-whole", the
            whole graph at once; or "eager", the lowered graph op by op (no C++ compiler needed; for debugging).
        fusions: fusion passes to run: names (a sequence, or with commas between), "all" or "none"; see
            ``passes/fusions/registry.py``.
        page_size, kv_cache_dtype, layout: of the cache. None: those of each step; else every step must have them.
        fixed_kv_scale: likewise, whether the cache has fixed scales (``PagedKVCache(kv_scales=)``).
        max_model_len: longest sequence; some models can be served only up to a length.
        window_tables: in a model that has both kinds of layers, those with a window or chunk take slots and a block table of
            their own (``Step.window_metadata``), if the backend plans nothing on the host or plans with both.
        kv_sharing_fast_prefill: make a second graph for steps whose metadata have ``logits_indices_padded``, in which layers
            that share earlier layers' keys and values run on those tokens alone.
    """

    attention: str | Mapping[str, str] = "auto"
    compiler: str = "inductor"
    fusions: str | Sequence[str] = "none"
    page_size: int | None = None
    kv_cache_dtype: torch.dtype | None = None
    layout: Layout | None = None
    fixed_kv_scale: bool | None = None
    max_model_len: int | None = None
    window_tables: bool = False
    kv_sharing_fast_prefill: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "attention", attention_name(self.attention))
        if isinstance(self.attention, str) and self.attention != "auto":
            with contextlib.suppress(UnsupportedAttention):  # selection raises it, where the layers are known
                get_backend(self.attention)
        if self.compiler not in COMPILERS:
            raise ValueError(f"compiler must be one of {', '.join(COMPILERS)}; got {self.compiler!r}")
        if self.page_size is not None and self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {self.page_size}")
        if self.layout not in (None, "NHD", "HND"):
            raise ValueError(f"layout must be 'NHD' or 'HND', got {self.layout!r}")
        if isinstance(self.fusions, str) and self.fusions not in ("all", "none"):
            object.__setattr__(self, "fusions", tuple(name.strip() for name in self.fusions.split(",")))
        unknown = [] if self.fusions in ("all", "none") else [n for n in self.fusions if n not in fusion_names()]
        if unknown:
            raise ValueError(f"unknown fusions {unknown}; there are {fusion_names()}, 'all' and 'none'")

    @classmethod
    def of(cls, options: dict[str, Any] | None) -> QuireOptions:
        """Options from a dictionary. Raises TypeError for an unknown name."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(options or {}) - known)
        if unknown:
            raise TypeError(f"unknown options for backend 'quire': {unknown}; it takes {sorted(known)}")
        return cls(**(options or {}))
