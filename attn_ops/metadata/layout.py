"""The default memory layout of new KV caches: by ``set_kv_cache_layout``, else the environment variable
QUIRE_KV_CACHE_LAYOUT, else "NHD". Read when a cache is made.
"""

from __future__ import annotations

import os
from typing import Literal, TypeGuard, get_args

KVCacheLayoutType = Literal["NHD", "HND"]

_override: KVCacheLayoutType | None = None


def is_valid_kv_cache_layout(value: object) -> TypeGuard[KVCacheLayoutType]:
    return value in get_args(KVCacheLayoutType)


def get_kv_cache_layout() -> KVCacheLayoutType:
    """The layout of a cache made now. Raises ValueError if QUIRE_KV_CACHE_LAYOUT is neither NHD nor HND."""
    if _override is not None:
        return _override
    value = os.environ.get("QUIRE_KV_CACHE_LAYOUT") or "NHD"
    if not is_valid_kv_cache_layout(value):
        raise ValueError(f"QUIRE_KV_CACHE_LAYOUT={value!r} is not a KV cache layout; set NHD or HND, or unset it")
    return value


def set_kv_cache_layout(cache_layout: KVCacheLayoutType | None) -> None:
    """Set the layout of caches made from now on in this process; None: what the environment says. Raises ValueError for
    another value."""
    global _override
    if cache_layout is not None and not is_valid_kv_cache_layout(cache_layout):
        raise ValueError(f"the layout of a KV cache is 'NHD' or 'HND', got {cache_layout!r}")
    _override = cache_layout
