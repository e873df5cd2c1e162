"""``attention="auto"`` by measurement: what ``quire bench attention --save`` found on this device, and the rule that picks.

Two files hold measurements, one row for a backend and a class of shapes (Measurement): the user's (``cache_file``), which is
asked first, then ATTENTION_CHOICES, which ships with quire. Only a command writes rows, so each is a time that was measured.
Nothing is measured while an engine starts: kernels are compiled at their first use, which can take minutes.

The rule. Every point of the decode grid (batch x context) that all measured backends have counts the same: a backend's time is
the geometric mean over them, over a model's layers where these differ. The fastest wins, with two reservations:

* on a GPU a backend that allows fewer batches in CUDA graphs must be LOWER_SUPPORT times as fast as one that allows more:
  steps that mix prefill and decode then run uncaptured, and the host needs longer to launch them than attention saves;
* the backend that comes first in order of priority must be among the measured: no time says that another is faster than it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend

logger = logging.getLogger(__name__)
FORMAT = 1  # of the files; another one is not read
ATTENTION_CHOICES = Path(__file__).parent / "attention.json"
LOWER_SUPPORT = 2.0  # see the rule. Not measured, so far from 1: attention is a tenth of a step that decodes 8 B parameters
COMMAND = "run `quire bench attention --save`"


@dataclass(frozen=True)
class ShapeClass:
    """Sites whose times are taken to rank the backends alike. ``group``: query heads a key head; ``features``: the names of
    what a site needs beside plain causal attention."""

    dtype: str
    kv_dtype: str
    head_dim: int
    head_dim_v: int
    group: int
    page_size: int
    layout: str
    features: tuple[str, ...]

    @classmethod
    def of(cls, site: AttentionSite, page_size: int, kv_dtype: torch.dtype | None = None, layout: str | None = None
           ) -> ShapeClass:
        """The class of a site, for a cache of that format (None: the site's dtype, NHD)."""
        features = [n for n in ("window", "softcap", "chunk") if getattr(site, n) is not None]
        features += ["sinks"] * site.sinks + ["non-causal"] * (not site.causal)
        return cls(_name(site.dtype), _name(kv_dtype or site.dtype), site.head_dim, site.head_dim_v,
                   site.num_heads // site.num_kv_heads, page_size, layout or "NHD", tuple(features))


@dataclass(frozen=True)
class Measurement:
    """One backend's times for one class of shapes.

    Args:
        device: ``device_name``.  torch, packages: the versions that it was measured with (``packages``: the backend's).
        num_kv_heads, window, chunk: of the site that was measured; another site of the class may differ in them.
        decode_us: microseconds of one call, by "batch x context" such as "32x1024".  extend_us: the same for prefills, by
            name; on record, and not part of the rule.
        date: when, ISO 8601.
    """

    device: str
    torch: str
    backend: str
    packages: dict[str, str]
    shape: ShapeClass
    num_kv_heads: int
    window: int | None
    chunk: int | None
    decode_us: dict[str, float]
    extend_us: dict[str, float]
    date: str

    @property
    def variant(self) -> tuple[Any, ...]:
        """What must agree for two times to be comparable, beside class, device and versions."""
        return self.num_kv_heads, self.window, self.chunk

    @property
    def identity(self) -> tuple[Any, ...]:
        """A newer row with the same identity takes the place of an older one."""
        return self.device, self.torch, self.backend, tuple(sorted(self.packages.items())), self.shape, self.variant

    @classmethod
    def read(cls, row: dict[str, Any]) -> Measurement:
        """From JSON. Raises KeyError, TypeError or ValueError for what no command wrote."""
        shape = ShapeClass(**{**row["shape"], "features": tuple(row["shape"]["features"])})
        made = cls(**{**row, "shape": shape})
        integers = (made.num_kv_heads, shape.head_dim, shape.head_dim_v, shape.group, shape.page_size)
        words = (made.device, made.torch, made.backend, made.date, shape.dtype, shape.kv_dtype, shape.layout)
        if not all(type(n) is int and n > 0 for n in integers) or not all(isinstance(w, str) for w in words):
            raise TypeError(f"a row with a field of the wrong type: {row}")
        if not all(n is None or type(n) is int for n in (made.window, made.chunk)):
            raise TypeError(f"window and chunk are integers or null: {row}")
        for times in (made.decode_us, made.extend_us):
            if not all(math.isfinite(us) and us > 0 for us in times.values()):
                raise ValueError(f"a time that is no positive number: {row}")
        if not made.decode_us or not all(isinstance(v, str) for v in made.packages.values()):
            raise ValueError(f"a row without times or with versions that are no text: {row}")
        return made


@dataclass(frozen=True)
class Decision:
    """The backend that the measurements speak for, why, and what they say of each other one."""

    backend: AttentionBackend
    why: str
    passed_over: dict[str, list[str]]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cache_folder() -> Path:
    """Where measurements made on this machine are kept: $QUIRE_CACHE_DIR, else quire's folder of the XDG cache."""
    if folder := os.environ.get("QUIRE_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


def cache_file() -> Path:
    """The user's measurements of attention."""
    return cache_folder() / "attention.json"


@functools.cache
def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name, without the index of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "none"


def versions(backend: AttentionBackend) -> tuple[str, dict[str, str]]:
    """torch's version, and those of the backend's packages; without what names a build (+cu130)."""
    return torch.__version__.partition("+")[0], {name: _version(name) for name in backend.packages}


def measurement(backend: AttentionBackend, site: AttentionSite, *, device: torch.device, page_size: int, layout: str,
                decode_us: dict[str, float], extend_us: dict[str, float], date: str) -> Measurement:
    """A row for times measured now, in this process. The cache was of the site's dtype."""
    own, packages = versions(backend)
    return Measurement(device_name(device), own, backend.name, packages, ShapeClass.of(site, page_size, layout=layout),
                       site.num_kv_heads, site.window, site.chunk, decode_us, extend_us, date)


# Files.


def load(path: Path) -> list[Measurement]:
    """The rows of a file; none, and a warning, if it cannot be read or has another format; none if there is no file."""
    try:
        state = path.stat()
    except OSError:
        return []
    return list(_load(path, state.st_mtime_ns, state.st_size))


@functools.lru_cache(maxsize=8)
def _load(path: Path, mtime: int, size: int) -> tuple[Measurement, ...]:
    """Read once for each version of the file, so that its warning comes once too."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, and this version of quire reads {FORMAT}")
        return tuple(Measurement.read(row) for row in content["rows"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("the attention measurements in %s are ignored (%s: %s); %s to write them anew", path,
                       type(error).__name__, error, COMMAND)
        return ()


def save(rows: Iterable[Measurement], path: Path | None = None) -> Path:
    """Merge ``rows`` into the file (None: ``cache_file``), in one move; a file that cannot be read is replaced."""
    path = path or cache_file()
    merged = {row.identity: row for row in [*load(path), *rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    content = {"format": FORMAT, "rows": [dataclasses.asdict(row) for row in merged.values()]}
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)
    _load.cache_clear()
    return path


def sources(device: torch.device) -> list[list[Measurement]]:
    """The measurements made on a device of this kind, by file, in the order in which they are asked; no file without any."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return []  # only asked about
    name = device_name(device)
    found = [[row for row in load(path) if row.device == name] for path in (cache_file(), ATTENTION_CHOICES)]
    return [rows for rows in found if rows]


# The rule.


def decide(usable: Sequence[AttentionBackend], sites: Sequence[AttentionSite], *, device: torch.device, page_size: int,
           kv_dtype: torch.dtype | None = None, layout: str | None = None) -> Decision | None:
    """What the measurements say of ``usable`` backends, which are in order of priority; None if they do not decide."""
    for rows in sources(device):
        made = _decide(rows, usable, sites, device, page_size, kv_dtype, layout)
        if made is not None:
            return made
    return None


def _decide(rows: list[Measurement], usable: Sequence[AttentionBackend], sites: Sequence[AttentionSite],
            device: torch.device, page_size: int, kv_dtype: torch.dtype | None, layout: str | None) -> Decision | None:
    classes = Counter((ShapeClass.of(s, page_size, kv_dtype, layout), s.num_kv_heads, s.window, s.chunk) for s in sites)
    found = [(_comparable(rows, usable, shape, variant), layers) for (shape, *variant), layers in classes.items()]
    measured = [b for b in usable if all(b.name in by_name for by_name, _ in found)]
    if not found or not measured or measured[0] is not usable[0]:
        return None
    times: dict[str, list[tuple[float, int]]] = {b.name: [] for b in measured}
    for by_name, layers in found:
        points = set.intersection(*(set(by_name[b.name].decode_us) for b in measured))
        if not points:
            return None
        for b in measured:
            logs = [math.log(by_name[b.name].decode_us[point]) for point in sorted(points)]
            times[b.name].append((sum(logs) / len(logs), layers))
    us = {name: math.exp(sum(t * n for t, n in each) / sum(n for _, n in each)) for name, each in times.items()}
    support = {b.name: b.capabilities.cudagraph_support for b in measured}

    def cost(b: AttentionBackend) -> float:
        lower = device.type == "cuda" and support[b.name] < max(support.values())
        return us[b.name] * (LOWER_SUPPORT if lower else 1.0)

    best = min(measured, key=cost)  # the first in order of priority where two are equal
    where = _where(sites, device)
    against: dict[str, list[str]] = {}
    for b in usable:
        if b is best:
            continue
        if b.name not in us:
            against[b.name] = [_unmeasured(rows, b, [shape for shape, *_ in classes])]
        elif us[b.name] >= us[best.name]:
            against[b.name] = [f"measured slower: decode {us[b.name]:.1f} us against {us[best.name]:.1f} us ({where})"]
        else:
            against[b.name] = [
                f"measured decode {us[b.name]:.1f} us against {us[best.name]:.1f} us ({where}), but its CUDA graphs "
                f"({support[b.name].name}, not {support[best.name].name}) leave out batches, and it is not "
                f"{LOWER_SUPPORT:g} times as fast"]
    words = "fastest measured" if len(measured) > 1 else "the only one measured"
    return Decision(best, f"{words}: decode {us[best.name]:.1f} us ({where})", against)


def _comparable(rows: list[Measurement], usable: Sequence[AttentionBackend], shape: ShapeClass, variant: Sequence[Any]
                ) -> dict[str, Measurement]:
    """Rows of the class by backend, all measured alike: with the site's own number of key heads, window and chunk, or else with
    those that most backends were measured with."""
    alike: dict[tuple[Any, ...], dict[str, Measurement]] = {}
    for backend in usable:
        now = versions(backend)
        for row in rows:
            if row.backend == backend.name and row.shape == shape and (row.torch, row.packages) == now:
                alike.setdefault(row.variant, {})[backend.name] = row
    return alike.get(tuple(variant)) or max(alike.values(), key=len, default={})


def _unmeasured(rows: list[Measurement], backend: AttentionBackend, shapes: list[ShapeClass]) -> str:
    own, packages = versions(backend)
    for row in rows:
        if row.backend == backend.name and row.shape in shapes and (row.torch, row.packages) != (own, packages):
            then = ", ".join(f"{n} {v}" for n, v in {"torch": row.torch, **row.packages}.items())
            now = ", ".join(f"{n} {v}" for n, v in {"torch": own, **packages}.items())
            return f"measured with {then}, and here is {now}: {COMMAND}"
    return f"not measured on this device: {COMMAND}"


def _where(sites: Sequence[AttentionSite], device: torch.device) -> str:
    words = list(dict.fromkeys(describe(s) for s in sites))
    more = f" and {len(words) - 1} more" if len(words) > 1 else ""
    return f"{device_name(device)}, {words[0]}{more}"


def describe(site: AttentionSite) -> str:
    """A site's heads and features in short: "32/8 x 128 bfloat16, window"."""
    shape = ShapeClass.of(site, 1)
    dims = f"{site.head_dim}" if site.head_dim == site.head_dim_v else f"{site.head_dim}/{site.head_dim_v}"
    return ", ".join([f"{site.num_heads}/{site.num_kv_heads} x {dims} {shape.dtype}", *shape.features])


def summary(device: torch.device) -> list[str]:
    """For the table of backends: a line for each class of shapes measured on this device, in any versions."""
    lines = []
    for rows in sources(device):
        by_class: dict[Any, list[Measurement]] = {}
        for row in rows:
            by_class.setdefault((row.shape, row.variant, row.torch), []).append(row)
        for (shape, _, version), found in by_class.items():
            dims = f"{shape.head_dim}" if shape.head_dim == shape.head_dim_v else f"{shape.head_dim}/{shape.head_dim_v}"
            heads = found[0].num_kv_heads
            words = [f"{heads * shape.group}/{heads} x {dims} {shape.dtype}", f"page {shape.page_size}", *shape.features]
            times = {r.backend: math.exp(sum(map(math.log, r.decode_us.values())) / len(r.decode_us)) for r in found}
            ranked = ", ".join(f"{n} {us:.1f} us" for n, us in sorted(times.items(), key=lambda t: t[1]))
            lines.append(f"measured with torch {version}: {', '.join(words)}: decode {ranked}")
    return lines or [f"attention=\"auto\" goes by the order above: nothing is measured on this device ({COMMAND})"]


__all__ = ["ATTENTION_CHOICES", "COMMAND", "Decision", "FORMAT", "LOWER_SUPPORT", "Measurement", "ShapeClass", "cache_file",
           "decide", "describe", "device_name", "load", "measurement", "save", "sources", "summary", "versions"]
