"""GPU time by kernel, from a trace: a figure that counted what overlaps twice would name the wrong kernel."""

from __future__ import annotations

from typing import Any

from quire.graph_runner.bench.kernel_times import by_kernel, kind, longest


def event(name: str, begin: float, end: float, cat: str = "kernel", grid: Any = (1, 1, 1)) -> dict[str, Any]:
    return {"name": name, "cat": cat, "ts": begin, "dur": end - begin, "args": {"grid": list(grid)} if grid else {}}


def test_what_overlaps_counts_once() -> None:
    """The second kernel was set up while the first ran, and waited for it; the third is inside another stream's."""
    events = [event("b", 4, 12), event("a", 0, 10), event("copy", 20, 21, "gpu_memcpy", None), event("a", 30, 40),
              event("c", 32, 39), event("cudaGraphLaunch", 0, 100, "cuda_runtime")]
    found = by_kernel(events, 2)
    assert found == {"a": (1, 10), "b": (0.5, 1), "copy": (0.5, 0.5), "c": (0.5, 0)}
    assert sum(us for _, us in found.values()) * 2 == 12 + 1 + 10, "the time in which the GPU was busy"


def test_kernels_by_grid_and_the_longest() -> None:
    events = [event("a", 0, 1, grid=(2, 1, 1)), event("a", 1, 4, grid=(8, 1, 1)), event("a", 4, 5, grid=(2, 1, 1))]
    found = by_kernel(events, 1, grids=True)
    assert found == {"a [2, 1, 1]": (2, 2), "a [8, 1, 1]": (1, 3)}
    assert longest(found, 1) == [{"name": "a [8, 1, 1]", "calls": 1, "us": 3}]


def test_kinds() -> None:
    assert kind("tile_kernel") == "matrix product with norm, SwiGLU or residual"
    assert kind("nvjet_sm90_tst_128x64") == "matrix product (cuBLAS)" and kind("mine") == "other"
