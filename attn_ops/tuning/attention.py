"""``attention="auto"`` by measurement: the times that ``quire bench attention --save`` kept, and the rule that picks by them.

Each row is one backend's times for one class of shapes (Measurement). Nothing is measured while an engine starts: kernels are
compiled at first use, which can take minutes.

The rule. A backend's time is the geometric mean over the points of the decode grid (batch x context) that all measured backends
share, and over a model's layers where these differ. The fastest wins, with two exceptions:

* on a GPU a backend that captures fewer batches in CUDA graphs must be LOWER_SUPPORT times as fast as one that captures more:
  steps that mix prefill and decode then run uncaptured, and launching them takes the host longer than attention saves;
* the backend first in order of priority must have been measured: else nothing shows that another is faster.

Of MLA on the latent cache there are pairs too: the first backend for prefills and mixed steps, and one that plans on the host
for decodes, at that one's times. A pair must be PAIRED times as fast.

A shape that was not measured uses the times of the nearest one that was: the same dtypes, page size, layout and features, at
most NEAR powers of two away in query heads per key head and head dims together, with a window or chunk at most half or twice as
long. A latent vector is longer than any transfer
from memory, so of latent caches another page size is only half a power of two away for each factor of two.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend, dtype_name
from quire.attn_ops.tuning.store import Store, device_name, installed_version

LOWER_SUPPORT = 2.0  # estimated, not measured, so far from 1: attention is a tenth of a step that decodes 8 B parameters
#: Estimated too: planning each step on the host takes about as long as launching a small step.
PAIRED = 1.2
NEAR = 2.0
LATENT = "mla"
COMMAND = "run `quire bench attention --save`"


@dataclass(frozen=True)
class ShapeClass:
    """Sites for which backends are assumed to rank alike. ``group``: query heads per key head; ``features``: names of what a
    site needs besides plain causal attention. MLA on the latent cache: one key head of rank + R numbers, feature LATENT."""

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
        dims = site.head_dim, site.head_dim_v, site.num_heads // site.num_kv_heads
        if site.latent is not None:
            features, dims = [LATENT, *features], (sum(site.latent), site.latent.rank, site.num_heads)
        return cls(dtype_name(site.dtype), dtype_name(kv_dtype or site.dtype), *dims, page_size, layout or "NHD",
                   tuple(features))

    def distance(self, other: ShapeClass) -> float:
        """From a measured class: powers of two in heads per key head and in head dims, and of latent caches half of those in
        tokens per page; infinite if its times do not carry over."""
        same = ("dtype", "kv_dtype", "layout", "features")
        pages = abs(math.log2(self.page_size / other.page_size))
        if any(getattr(self, name) != getattr(other, name) for name in same) or (pages and LATENT not in self.features):
            return math.inf
        dims = (self.head_dim + self.head_dim_v) / (other.head_dim + other.head_dim_v)
        return abs(math.log2(self.group / other.group)) + abs(math.log2(dims)) + pages / 2

    def describe(self, num_kv_heads: int) -> list[str]:
        """["32/8 x 128 bfloat16", features...], or ["MLA 16 of 512+64 bfloat16", ...]"""
        if LATENT in self.features:
            sizes = f"{self.head_dim_v}+{self.head_dim - self.head_dim_v}"
            return [f"MLA {self.group} of {sizes} {self.dtype}", *(f for f in self.features if f != LATENT)]
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        return [f"{num_kv_heads * self.group}/{num_kv_heads} x {dims} {self.dtype}", *self.features]


def variant_of(site: AttentionSite) -> tuple[int, int | None, int | None]:
    """What a site has besides its class, in the order of ``Measurement.variant``."""
    return site.num_kv_heads if site.latent is None else 1, site.window, site.chunk


@dataclass(frozen=True)
class Measurement:
    """One backend's times for one class of shapes.

    Args:
        device: ``device_name``.  torch, packages: the versions that it was measured with.  date: ISO 8601.
        num_kv_heads, window, chunk: of the measured site; other sites of the class may differ in them.
        decode_us: microseconds of one call, by "batch x context" such as "32x1024".  extend_us: the same for prefills, by
            name, for ``tuning/prefill.py``.
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
        """Conditions that two times must share to be comparable, besides class, device and versions."""
        return self.num_kv_heads, self.window, self.chunk

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.device, self.torch, self.backend, tuple(sorted(self.packages.items())), self.shape, self.variant

    @classmethod
    def read(cls, row: dict[str, Any]) -> Measurement:
        """From JSON. Raises KeyError, TypeError or ValueError for a row that no command wrote."""
        shape = ShapeClass(**{**row["shape"], "features": tuple(row["shape"]["features"])})
        made = cls(**{**row, "shape": shape})
        integers = (made.num_kv_heads, shape.head_dim, shape.head_dim_v, shape.group, shape.page_size)
        texts = (made.device, made.torch, made.backend, made.date, shape.dtype, shape.kv_dtype, shape.layout)
        if not all(type(n) is int and n > 0 for n in integers) or not all(isinstance(t, str) for t in texts):
            raise TypeError(f"a row with a field of the wrong type: {row}")
        if not all(n is None or type(n) is int for n in (made.window, made.chunk)):
            raise TypeError(f"window and chunk are integers or null: {row}")
        for times in (made.decode_us, made.extend_us):
            if not all(math.isfinite(us) and us > 0 for us in times.values()):
                raise ValueError(f"a time that is not a positive number: {row}")
        if not made.decode_us or not all(isinstance(v, str) for v in made.packages.values()):
            raise ValueError(f"a row without times or with versions that are not text: {row}")
        return made


@dataclass(frozen=True)
class Decision:
    """The backend that is fastest by measurement, why, and what the measurements say of each other one."""

    backend: AttentionBackend
    why: str
    passed_over: dict[str, list[str]]


STORE = Store(Path(__file__).parent / "attention.json", "rows", lambda rows: tuple(map(Measurement.read, rows)),
              f"{COMMAND} to write them anew")


def load(path: Path) -> tuple[Measurement, ...]:
    return STORE.load(path) or ()


def save(rows: Iterable[Measurement], path: Path | None = None) -> Path:
    """Merge ``rows`` into the file (None: the user's) in place of older ones of their identity; replaces an unreadable one."""
    merged = {row.identity: row for row in [*load(path or STORE.user_file), *rows]}
    return STORE.save([dataclasses.asdict(row) for row in merged.values()], path)


@functools.cache
def _version(distribution: str) -> str:
    return (installed_version(distribution) or "none").partition("+")[0]


def versions(backend: AttentionBackend) -> tuple[str, dict[str, str]]:
    """The version of torch, and those of the backend's packages; without what names a build (+cu130)."""
    return torch.__version__.partition("+")[0], {name: _version(name) for name in backend.packages}


def measurement(backend: AttentionBackend, site: AttentionSite, *, device: torch.device, page_size: int, layout: str,
                decode_us: dict[str, float], extend_us: dict[str, float], date: str) -> Measurement:
    """A row for times measured now, in this process, on a cache of the site's dtype."""
    own, packages = versions(backend)
    return Measurement(device_name(device), own, backend.name, packages, ShapeClass.of(site, page_size, layout=layout),
                       *variant_of(site), decode_us, extend_us, date)


def sources(device: torch.device) -> list[list[Measurement]]:
    """The measurements made on a device of this kind, by file, in order of precedence; files without any are left out."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return []  # only asked about
    name = device_name(device)
    found = [[row for row in load(path) if row.device == name] for path in STORE.files]
    return [rows for rows in found if rows]


def decide(usable: Sequence[AttentionBackend], sites: Sequence[AttentionSite], *, device: torch.device, page_size: int,
           kv_dtype: torch.dtype | None = None, layout: str | None = None,
           pairs: Mapping[str, AttentionBackend] | None = None) -> Decision | None:
    """The rule, for ``usable`` backends in order of priority, and ``pairs`` by the name of the one that decodes; or None. Each
    class of layers goes by the first file that has the first backend's times for it: the user's may have measured some."""
    classes = Counter((ShapeClass.of(s, page_size, kv_dtype, layout), *variant_of(s)) for s in sites)
    files, pairs, found = sources(device), pairs or {}, list[tuple[dict[str, Measurement], int]]()
    for (shape, *variant), layers in classes.items():
        by_file = (comparable(rows, usable, shape, variant) for rows in files)
        by_name = next((by for by in by_file if usable[0].name in by), None)
        if by_name is None:
            return None
        found.append((by_name, layers))
    measured = [b for b in usable if all(b.name in by_name for by_name, _ in found)]
    if not found:
        return None
    times: dict[str, list[tuple[float, int]]] = {b.name: [] for b in measured}
    for by_name, layers in found:
        points = set.intersection(*(set(by_name[b.name].decode_us) for b in measured))
        if not points:
            return None
        for b in measured:
            times[b.name].append((geometric_mean(by_name[b.name].decode_us[point] for point in points), layers))
    us = {name: geometric_mean(t for t, layers in each for _ in range(layers)) for name, each in times.items()}
    support = {b.name: b.capabilities.cudagraph_support for b in measured}

    def cost(b: AttentionBackend) -> float:
        lower = device.type == "cuda" and support[b.name] < max(support.values())
        return us[b.name] * (LOWER_SUPPORT if lower else 1.0)

    options = [(cost(b), b, b) for b in measured]  # of equals the first in order of priority
    options += [(us[b.name] * PAIRED, pairs[b.name], b) for b in measured if b.name in pairs]
    _, chosen, best = min(options, key=lambda option: option[0])  # the backend, and the one of it that decodes
    kinds = list(dict.fromkeys(describe(s) for s in sites))
    where = f"{device_name(device)}, {kinds[0]}" + (f" and {len(kinds) - 1} more" if len(kinds) > 1 else "")
    if guessed := [next(iter(by.values())) for (by, _), (shape, *_) in zip(found, classes, strict=True)
                   if all(row.shape != shape for row in by.values())]:
        where += f", by the nearest shape measured, {guessed[0].shape.describe(guessed[0].num_kv_heads)[0]}"
    against: dict[str, list[str]] = {}
    for b in usable:
        if b is best:
            continue
        if b.name not in us:
            against[b.name] = [_unmeasured([row for rows in files for row in rows], b, [shape for shape, *_ in classes])]
            continue
        both = f"decode {us[b.name]:.1f} us against {us[best.name]:.1f} us ({where})"
        if us[b.name] >= us[best.name]:
            against[b.name] = [f"measured slower: {both}"]
        elif b.name in pairs:
            against[b.name] = [f"measured {both}, but as {pairs[b.name].name} it plans each step on the host, and it is not "
                               f"{PAIRED:g} times as fast"]
        else:
            against[b.name] = [f"measured {both}, but its CUDA graphs ({support[b.name].name}, not {support[best.name].name}) "
                               f"leave out batches, and it is not {LOWER_SUPPORT:g} times as fast"]
    words = "fastest measured" if len(measured) > 1 else "the only one measured"
    return Decision(chosen, f"{words}: decode {us[best.name]:.1f} us ({where})", against)


def comparable(rows: list[Measurement], usable: Sequence[AttentionBackend], shape: ShapeClass, variant: Sequence[Any]
                ) -> dict[str, Measurement]:
    """Rows of the class, or the nearest one, by backend, all of one variant: the site's own, else the one of most backends."""
    alike: dict[tuple[Any, ...], dict[str, Measurement]] = {}
    for backend in usable:
        now = versions(backend)
        for row in rows:
            if row.backend == backend.name and row.shape.distance(shape) <= NEAR and (row.torch, row.packages) == now \
                    and _reach_is_near(row.variant, variant):
                alike.setdefault((row.shape, *row.variant), {})[backend.name] = row
    return alike.get((shape, *variant)) or min(
        alike.values(), key=lambda by: (next(iter(by.values())).shape.distance(shape), -len(by)), default={})


def _reach_is_near(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Whether windows and chunks of two variants are within a factor of two: kernels read whole tiles of keys, of which a short
    window is a small part."""
    return all(a == b or (a and b and 0.5 <= a / b <= 2) for a, b in zip(one[1:], two[1:], strict=True))


def _unmeasured(rows: list[Measurement], backend: AttentionBackend, shapes: list[ShapeClass]) -> str:
    here = versions(backend)
    for row in rows:
        if row.backend == backend.name and row.shape in shapes and (row.torch, row.packages) != here:
            then, now = (", ".join(f"{n} {v}" for n, v in {"torch": own, **packages}.items())
                         for own, packages in ((row.torch, row.packages), here))
            return f"measured with {then}, and here is {now}: {COMMAND}"
    return f"not measured on this device: {COMMAND}"


def describe(site: AttentionSite) -> str:
    """A site's heads and features in short: "32/8 x 128 bfloat16, window"."""
    return ", ".join(ShapeClass.of(site, 1).describe(site.num_kv_heads))


def summary(device: torch.device) -> list[str]:
    """For the table of backends: a line per class of shapes measured on this device, in any versions."""
    lines = []
    for rows in sources(device):
        by_class: dict[Any, list[Measurement]] = {}
        for row in rows:
            by_class.setdefault((row.shape, row.variant, row.torch), []).append(row)
        for (shape, (num_kv_heads, *_), version), found in by_class.items():
            heads, *features = shape.describe(num_kv_heads)
            times = {r.backend: geometric_mean(r.decode_us.values()) for r in found}
            ranked = ", ".join(f"{n} {us:.1f} us" for n, us in sorted(times.items(), key=lambda t: t[1]))
            what = ", ".join([heads, f"page {shape.page_size}", *features])
            lines.append(f"measured with torch {version}: {what}: decode {ranked}")
    return lines or [f"attention=\"auto\" goes by the order above: nothing is measured on this device ({COMMAND})"]
