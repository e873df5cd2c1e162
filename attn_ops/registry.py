"""The registry of attention backends, and the table that ``quire.backends()`` prints."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from quire.attn_ops.backend import (
    AttentionBackend,
    AttentionCapabilities,
    BackendFamily,
    UnsupportedAttention,
    dtype_name,
    listed,
)
from quire.attn_ops.composite import attention_name
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES
from quire.attn_ops.tuning import attention as tuning


class Registry:
    """Backends by name, from entry points (quire's own too) and ``register``. ``entries``: by default those of
    the group ``quire.backends``, loaded at first use."""

    def __init__(self, entries: Iterable[EntryPoint] | None = None) -> None:
        self._entries, self._loaded = entries, False
        self._backends: dict[str, AttentionBackend] = {}
        self._families: dict[str, BackendFamily] = {}
        self._made: dict[Any, AttentionBackend] = {}
        self._broken: dict[str, str] = {}
        self._lock, self._loading = threading.RLock(), False

    def register(self, backend: AttentionBackend) -> AttentionBackend:
        if self._backends.get(backend.name, backend) is not backend:
            raise ValueError(f"an attention backend named {backend.name!r} is registered already; choose another name")
        self._backends[backend.name] = backend
        return backend

    def load(self) -> tuple[dict[str, AttentionBackend], dict[str, str]]:
        """Backends by name in order of registration, and entry points that did not load, with the reason."""
        with self._lock:
            if not self._loaded and not self._loading:  # a backend's module may ask while it is loaded
                self._loading = True
                try:
                    self._load()
                    self._loaded = True
                finally:
                    self._loading = False
            return dict(self._backends), dict(self._broken)

    def _load(self) -> None:
        entries = entry_points(group="quire.backends") if self._entries is None else self._entries
        for entry in sorted(entries, key=lambda e: e.name):
            try:
                found = entry.load()
                if isinstance(found, BackendFamily):
                    self._families[found.name] = found
                else:
                    self.register(found)
            except Exception as error:  # a broken plug-in must not take the others down
                self._broken[entry.name] = f"failed to load: {type(error).__name__}: {error}"

    def get(self, name: str) -> AttentionBackend:
        with self._lock:
            return self._get(name)

    def _get(self, name: str) -> AttentionBackend:
        backends, broken = self.load()
        if name in backends:
            return backends[name]
        family = next((f for f in self._families.values() if f.has(name)), None)
        if family is None:
            why = f"; {name} {broken[name]}" if name in broken else ""
            forms = "".join(f", {f.usage.partition(': ')[0]}" for f in self._families.values())
            close = difflib.get_close_matches(name.partition(":")[0].lower(), ["auto", *backends, *self._families], 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"unknown attention backend {name!r}{hint}; there are: auto, {listed(backends)}{forms}{why}")
        key = name, *_files(name)
        if key not in self._made:
            self._made[key] = family.make(name, self.get)
        return self._made[key]

    @property
    def families(self) -> list[BackendFamily]:
        """Those that loaded."""
        self.load()
        return list(self._families.values())


def _files(name: str) -> Iterator[tuple[str, int, int]]:
    """The files that a name mentions, as they are now."""
    for part in re.split("[:=,]", name):
        with contextlib.suppress(OSError):
            if os.path.isfile(part):
                found = os.stat(part)
                yield os.path.realpath(part), found.st_mtime_ns, found.st_size


REGISTRY = Registry()


def register_backend(backend: AttentionBackend) -> AttentionBackend:
    """Make ``backend`` selectable by name. Raises ValueError if the name is taken by another record."""
    return REGISTRY.register(backend)


def all_backends() -> dict[str, AttentionBackend]:
    """Every backend that loaded, by name, in order of registration."""
    return REGISTRY.load()[0]


def get_backend(name: str | Mapping[str, str]) -> AttentionBackend:
    """The backend of that name (or of these, by kind of layer), perhaps made now. Raises ValueError that lists the names."""
    return REGISTRY.get(attention_name(name))


def long_prefill_name(prefill: str, rest: str) -> str | None:
    """The name of the backend that serves by ``prefill`` the steps in which its prompts were measured faster, and all others by
    ``rest``; None if no family has one."""
    return next((f.long_prefill(prefill, rest) for f in REGISTRY.families if f.long_prefill is not None), None)


def pair_name(prefill: str, decode: str) -> str | None:
    """The name of the backend that decodes by ``decode`` and serves all else by ``prefill``; None if no family has one."""
    return next((f.pair(prefill, decode) for f in REGISTRY.families if f.pair is not None), None)


def plain_backend(device_type: str) -> AttentionBackend:
    """The first backend in order of priority whose paged op needs neither a state nor a plan: other backends call it, for steps
    that they leave as they are. Raises UnsupportedAttention if there is none."""
    plain = [b for b in all_backends().values() if b.op is not None and b.make_state is None and b.plan is None]
    found = [(order, b) for b in plain if (order := (b.priority or {}).get(device_type)) is not None
             and b.available(torch.device(device_type)) is None]
    if not found:
        raise UnsupportedAttention(f"no backend without a state and a plan is usable on {device_type}")
    return min(found, key=lambda item: item[0])[1]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines, their cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


FEATURES = ("window", "softcap", "sinks", "chunk", "non_causal", "mla", "lse")


@dataclass(frozen=True)
class BackendRow:
    """One backend on one device. ``reason`` is None if it is usable; ``priority`` is its place for attention="auto"."""

    name: str
    reason: str | None
    priority: int | None
    capabilities: AttentionCapabilities | None
    verified: bool = True
    verified_note: str = ""

    @property
    def usable(self) -> bool:
        return self.reason is None


class BackendTable(list[BackendRow]):
    """The rows, by priority. ``measured``, ``usages``: lines on times and on backends made of backends. ``str()``: a table."""

    def __init__(self, rows: list[BackendRow], device: torch.device, measured: list[str], usages: list[str]) -> None:
        super().__init__(rows)
        self.device, self.measured, self.usages = device, measured, usages

    def __str__(self) -> str:
        table = [["backend", "usable", "dtypes", "quantized KV", "head dims", "page sizes", "features", "CUDA graphs"]]
        for row in self:
            caps = row.capabilities
            if caps is None:
                table.append([row.name, "no", *[""] * 6])
                continue
            dtypes, kv = (listed(map(dtype_name, found)) for found in (caps.dtypes, caps.kv_dtypes & QUANTIZED_KV_DTYPES))
            features = ", ".join(f for f in FEATURES if getattr(caps, f)) or "none"
            table.append([row.name, "yes" if row.usable else "no", dtypes, kv, caps.head_dims_note, caps.page_sizes_note,
                          features, caps.cudagraph_support.name])
        lines = aligned(table)
        lines += [f"{row.name}: not usable on {self.device}: {row.reason}" for row in self if row.reason]
        lines += [f"{row.name}: verified on hardware: {row.verified_note}" for row in self if row.verified_note]
        fixed: dict[str, list[str]] = {}
        for row in self:
            if row.capabilities is not None and row.capabilities.fixed_scale_kv_dtypes:
                fixed.setdefault(listed(map(dtype_name, row.capabilities.fixed_scale_kv_dtypes)), []).append(row.name)
        lines += [f"KV cache of {dtypes} with one fixed scale per layer (kv_scales): {', '.join(names)}"
                  for dtypes, names in fixed.items()]
        unverified = [row.name for row in self if not row.verified]
        if unverified:
            lines.append(f"not verified on hardware, only against their packages' signatures: {', '.join(unverified)}")
        return "\n".join(lines + self.usages + self.measured)

    __repr__ = __str__


def backends(device: torch.device | str | None = None) -> BackendTable:
    """Every attention backend: usable on ``device`` or the reason why not, and what it can do. ``device``: by default the
    GPU if there is one, else the CPU."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    loaded, broken = REGISTRY.load()
    rows = []
    for name, backend in loaded.items():
        caps = backend.capabilities
        reason = None if where.type in caps.devices else f"runs on {listed(caps.devices)}"
        reason = reason or backend.available(where) or caps.reason_against_gpu(where)
        rows.append(BackendRow(name, reason, (backend.priority or {}).get(where.type), caps, backend.verified,
                               backend.verified_note))
    rows.sort(key=lambda r: (r.priority is None, r.priority or 0))
    rows += [BackendRow(name, why, None, None) for name, why in broken.items()]
    return BackendTable(rows, where, tuning.summary(where), [family.usage for family in REGISTRY.families])
