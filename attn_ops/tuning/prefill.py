"""The time of a prefill as a function of its work, fitted on measured times: which of two backends is faster for a batch.

A few terms describe the prefills of ``Measurement.extend_us`` within a few percent on an H200 (docs/performance.md, "Long
prompts"):

    us = max(host, launch + per_operation * (operations of both matrix products)
                   + per_key * (keys of the longest sequence) + per_mb * (MB of keys and values))

``launch`` is what the smallest call takes on the GPU, ``per_operation`` the rate of the kernel on a full GPU, ``per_key`` a
tile of queries that goes through its keys while other multiprocessors have nothing left to do. ``per_mb`` is for kernels that
copy keys and values first, and is fitted if there are times enough. So is ``host``, what the host takes to launch a call
without a graph: small prefills take that, however little the GPU has to do. Operations count heads, head dims and visible pairs
of query and key, so times carry over within a class of shapes. A backend with faster kernels without a CUDA graph has times of
both.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.tuning.attention import Measurement, ShapeClass, comparable, sources, variant_of

#: A backend serves prefills beside another only where it takes at most this part of the other's time. A fit is off by 6 %.
WINS = 0.95
POINTS = 4  # that a fit of three terms needs; one of four needs two more
HALVED = 0.5  # of the error without ``host``, for it to be believed
EAGER = " without a graph"  # ends the name of a prefill that was measured so
_POINT = re.compile(r"(\d+)x(\d+)(?:\+(\d+))?")  # sequences x new tokens + tokens computed before


class Work(NamedTuple):
    """operations: floating-point, in 10^9.  keys: of the longest sequence.  mb: 10^6 numbers, keys and values of all."""

    operations: float
    keys: float
    mb: float


def pairs(query_lens: np.ndarray, seq_lens: np.ndarray, window: int | None, chunk: int | None) -> float:
    """Pairs of a query and a key that it sees, of a batch with (B,) scheduled and total tokens."""

    def before(tokens: np.ndarray) -> np.ndarray:
        """The pairs of a sequence's first tokens."""
        n = tokens.astype(np.float64)
        if chunk is not None:
            rest = n % chunk
            return (n // chunk) * (chunk * (chunk + 1) / 2) + rest * (rest + 1) / 2
        inside = n if window is None else np.minimum(n, window)
        return inside * (inside + 1) / 2 + (n - inside) * (window or 0)

    return float((before(seq_lens) - before(seq_lens - query_lens)).sum())


def work(site: AttentionSite, query_lens: np.ndarray, seq_lens: np.ndarray) -> Work:
    """The work of one layer on a batch; (B,) integers on the host."""
    longest, dims = float(seq_lens.max(initial=0)), site.head_dim + site.head_dim_v
    reach = min(longest, site.window or longest, site.chunk or longest)
    operations = 2 * pairs(query_lens, seq_lens, site.window, site.chunk) * site.num_heads * dims
    return Work(operations / 1e9, reach, float(seq_lens.sum()) * site.num_kv_heads * dims / 1e6)


class PrefillTime(NamedTuple):
    """Microseconds: of a call, per 10^9 operations, per key of the longest sequence, per 10^6 numbers of keys and values.
    ``host``: of a call, at least."""

    launch: float
    per_operation: float
    per_key: float
    per_mb: float = 0.0
    host: float = 0.0

    def us(self, of: Work) -> float:
        device = self.launch + self.per_operation * of.operations + self.per_key * of.keys + self.per_mb * of.mb
        return max(self.host, device)


def fit(measured: Sequence[tuple[Work, float]]) -> PrefillTime | None:
    """Least squares of the relative error, no term below zero; None for fewer than POINTS points. With two points more, the two
    or three shortest times may be ``host``, if that halves the error: a term more always takes some of it."""
    if len(measured) < POINTS:
        return None
    count, bounds = (4, (2, 3)) if len(measured) >= POINTS + 2 else (3, ())
    ordered = sorted(measured, key=lambda each: each[1])
    found, error = _fitted(ordered, count, 0)
    bounded = [_fitted(ordered, count, bound) for bound in bounds]
    best, least = min(bounded, key=lambda each: each[1], default=(found, error))
    return best if least <= HALVED * error else found


def _fitted(ordered: Sequence[tuple[Work, float]], count: int, bound: int) -> tuple[PrefillTime, float]:
    """The first ``count`` terms for ascending times, the first ``bound`` the host's; and the norm of all relative errors."""
    times = np.array([us for _, us in ordered])
    terms = np.array([[1.0, *of][:count] for of, _ in ordered])
    host = float(np.exp(np.log(times[:bound]).mean())) if bound else 0.0
    best, least = np.zeros(count), np.inf
    for size in range(1, min(count, len(times) - bound - 1 if bound else count) + 1):  # fewer terms than points
        for some in itertools.combinations(range(count), size):
            found = np.zeros(count)
            relative = terms[bound:, some] / times[bound:, None]
            found[list(some)] = np.linalg.lstsq(relative, np.ones(len(relative)), rcond=None)[0]
            error = float(np.linalg.norm(np.maximum(terms @ found, host) / times - 1))
            if (found >= 0).all() and error < least:
                best, least = found, error
    return PrefillTime(*map(float, best))._replace(host=host), least


def of_measurement(row: Measurement, ending: str = "") -> list[tuple[Work, float]]:
    """The prefills among the points of a row whose names have this ending, without those that have decodes beside them."""
    heads = row.num_kv_heads * row.shape.group
    site = AttentionSite(0, heads, row.num_kv_heads, row.shape.head_dim, row.shape.head_dim_v, torch.float32, 1.0,
                         window=row.window, chunk=row.chunk)
    found = []
    for name, us in row.extend_us.items():
        if name.endswith(ending) and (point := _POINT.fullmatch(name.removesuffix(ending))):
            count, new, computed = (int(n or 0) for n in point.groups())
            found.append((work(site, np.full(count, new), np.full(count, new + computed)), us))
    return found


class PrefillRule(NamedTuple):
    """Times of two backends for prefills of one class of shapes: one that may serve them, and the one that serves the rest,
    without a graph and, if that differs, in one."""

    prefill: PrefillTime
    rest: PrefillTime
    graph: PrefillTime | None = None

    @property
    def ever(self) -> bool:
        """Whether it wins for some batch, however large."""
        return self.prefill.per_operation <= WINS * self.rest.per_operation

    def spared(self, of: Work) -> float:
        """Microseconds that the backend for prefills takes less for one layer; 0 where it does not win."""
        ours, theirs = self.prefill.us(of), self.rest.us(of)
        return theirs - ours if ours <= WINS * theirs else 0.0

    def __str__(self) -> str:
        rates = (f"{1e3 / time.per_operation:.0f}" if time.per_operation else "any" for time in (self.prefill, self.rest))
        return " against ".join(rates) + " TFLOP/s for long prompts"


def rule(prefill: AttentionBackend, rest: AttentionBackend, site: AttentionSite, *, device: torch.device, page_size: int,
         kv_dtype: torch.dtype | None = None, layout: str | None = None) -> PrefillRule | None:
    """The rule for a site, by the first file of measurements that has prefills of both backends for its class of shapes, or the
    nearest one measured; None if none has. Of MLA's expanded keys: by the times that both declare."""
    if site.latent is not None:
        part = None if prefill.prefill is None else prefill.prefill.expanded
        return None if part is None or rest.expanded_time is None else PrefillRule(part.time, rest.expanded_time)
    shape = ShapeClass.of(site, page_size, kv_dtype, layout)
    for rows in sources(device):
        found = comparable(rows, [prefill, rest], shape, variant_of(site))
        if prefill.name not in found or rest.name not in found:
            continue
        ours, graph = fit(of_measurement(found[prefill.name])), fit(of_measurement(found[rest.name]))
        theirs = fit(of_measurement(found[rest.name], EAGER)) or graph
        if ours is not None and theirs is not None:
            return PrefillRule(ours, theirs, graph)
    return None
