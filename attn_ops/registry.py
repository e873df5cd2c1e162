"""The registry of attention backends, and the table that ``quire.backends()`` prints."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import entry_points

import torch

from quire.attn_ops.backend import AttentionBackend, AttentionCapabilities, listed
from quire.attn_ops.kv_quant import QUANTIZED_KV_DTYPES
from quire.attn_ops.tuning import attention as choices

# Backends arrive by entry point, so that third parties and our own come in by the same door.
_BACKENDS: dict[str, AttentionBackend] = {}
_BROKEN: dict[str, str] = {}


def register_backend(backend: AttentionBackend) -> AttentionBackend:
    """Make ``backend`` selectable by name. Raises ValueError if the name is taken by another record."""
    if _BACKENDS.get(backend.name, backend) is not backend:
        raise ValueError(f"an attention backend named {backend.name!r} is registered already; choose another name")
    _BACKENDS[backend.name] = backend
    return backend


@functools.cache
def _load_entry_points() -> None:
    for entry in sorted(entry_points(group="quire.backends"), key=lambda e: e.name):
        try:
            register_backend(entry.load())
        except Exception as error:  # a broken plug-in must not take the others down; its reason shows in `quire backends`
            _BROKEN[entry.name] = f"failed to load: {type(error).__name__}: {error}"


def all_backends() -> dict[str, AttentionBackend]:
    """Every backend that loaded, by name, in order of registration."""
    _load_entry_points()
    return dict(_BACKENDS)


def broken_backends() -> dict[str, str]:
    """Entry points that did not load, with the reason."""
    _load_entry_points()
    return dict(_BROKEN)


def get_backend(name: str) -> AttentionBackend:
    """The backend of that name. Raises ValueError that lists the names there are."""
    backends = all_backends()
    if name not in backends:
        broken = f"; {name} {_BROKEN[name]}" if name in _BROKEN else ""
        raise ValueError(f"unknown attention backend {name!r}; there are: auto, {listed(backends)}{broken}")
    return backends[name]


_FEATURES = ("window", "softcap", "sinks", "chunk", "non_causal", "mla", "cross", "encoder", "cascade")


@dataclass(frozen=True)
class BackendRow:
    """One backend on one device. ``reason`` is None if it is usable; ``priority`` is its place for attention="auto"."""

    name: str
    reason: str | None
    priority: int | None
    capabilities: AttentionCapabilities | None

    @property
    def usable(self) -> bool:
        return self.reason is None


class BackendTable(list[BackendRow]):
    """The rows, in order of priority; ``measured``: lines on what attention="auto" goes by; ``str()`` is a table."""

    def __init__(self, rows: list[BackendRow], device: torch.device, measured: list[str] | None = None) -> None:
        super().__init__(rows)
        self.device, self.measured = device, measured or []

    def __str__(self) -> str:
        head = ["backend", "usable", "dtypes", "quantised KV", "head dims", "page sizes", "features", "CUDA graphs"]
        rows = []
        for row in self:
            caps = row.capabilities
            if caps is None:
                rows.append([row.name, "no", "", "", "", "", "", ""])
                continue
            dtypes, kv = (", ".join(sorted(str(d).removeprefix("torch.") for d in found))
                          for found in (caps.dtypes, caps.kv_dtypes & QUANTIZED_KV_DTYPES))
            features = ", ".join(f for f in _FEATURES if getattr(caps, f)) or "none"
            rows.append([row.name, "yes" if row.usable else "no", dtypes, kv or "none", caps.head_dims_note,
                         caps.page_sizes_note, features, caps.cudagraph_support.name])
        widths = [max(len(r[c]) for r in [head, *rows]) for c in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in [head, *rows]]
        lines += [f"{row.name}: not usable on {self.device}: {row.reason}" for row in self if row.reason]
        return "\n".join(lines + self.measured)

    __repr__ = __str__


def backends(device: torch.device | str | None = None) -> BackendTable:
    """Every attention backend: usable on ``device`` or the reason why not, and what it can do.

    Args:
        device: None: the GPU if there is one, else the CPU.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows = []
    for name, backend in all_backends().items():
        caps = backend.capabilities
        reason = None if where.type in caps.devices else f"runs on {', '.join(sorted(caps.devices))}"
        reason = reason or backend.available(where)
        rows.append(BackendRow(name, reason, (backend.priority or {}).get(where.type), caps))
    rows.sort(key=lambda r: (r.priority is None, r.priority or 0))
    rows += [BackendRow(name, why, None, None) for name, why in broken_backends().items()]
    return BackendTable(rows, where, choices.summary(where))


__all__ = ["BackendRow", "BackendTable", "all_backends", "backends", "broken_backends", "get_backend", "register_backend"]
