"""The table of attention backends: what is here, what each can do, and why one is not usable."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_ops import choices
from attn_ops.backend import AttentionCapabilities, all_backends, broken_backends
from attn_ops.kv_quant import QUANTISED

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
                          for found in (caps.dtypes, caps.kv_dtypes & QUANTISED))
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


__all__ = ["BackendRow", "BackendTable", "backends"]
