"""Launch parameters of ``small_linear``: measured once for each shape and device, and kept on disk.

Two files: the user's (small_linear.json beside the attention measurements, see ``attn_ops/tuning/attention.py``), which is asked first,
and TABLE, which ships with quire. A shape that neither has is measured when an engine starts on a GPU (``tune``): a few sets of
parameters, and the definition, which is cuBLAS with the norm, SwiGLU and residual in kernels of their own. Where the
definition was faster the op runs it. With QUIRE_TUNE=0 nothing is measured, and ``config_for`` goes by a rule.

A norm or a residual beside a product, or another dtype, does not make it another shape: parameters change speed, not results.
Quantised weights do: their codes are half the bytes, and for more tokens than others they stay with this op.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quire.attn_ops.kernels.launch import Launch, recording, side_stream
from quire.attn_ops.tuning.attention import cache_folder, device_name

logger = logging.getLogger(__name__)
FORMAT = 1  # of the user's file; another one is not read
TABLE = Path(__file__).parent / "small_linear.json"
SIZES = (1, 8, 32)  # tokens that are measured: one for each padded size
SIZES_QUANTISED = (*SIZES, 64, 128, 256)
_COLD = 240e6  # bytes of weights to go through in turn: several times the L2 cache of a large GPU
MOST_COPIES = 64  # of one weight: so many launches tell its time, and a model of smaller weights stays in the cache anyway


class Config(NamedTuple):
    """Launch parameters of one kernel: weight rows and columns a tile (of each warp, with codes and up to 32 tokens), warps,
    pipeline stages; with codes and more tokens, how many programs share the columns of a tile, to occupy a GPU for which a
    weight has few rows."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1


class LinearShape(NamedTuple):
    """A linear layer as the kernel sees it: rows and columns of the weight, and what runs with it. ``codes``: the dtype of a
    quantised weight's codes."""

    n: int
    k: int
    norm: bool
    residual: bool
    swiglu: bool
    dtype: torch.dtype
    codes: torch.dtype | None = None


#: What is tried for one token, and for more.
CANDIDATES = {
    True: (Config(1, 1024, 4, 2), Config(1, 2048, 4, 1), Config(2, 1024, 4, 3)),
    False: (Config(32, 256, 4, 5), Config(64, 256, 4, 4), Config(128, 128, 8, 3)),
}
#: The same for codes: by tokens up to which. Fewer than 16 rows: without the matrix units.
CANDIDATES_QUANTISED = {
    1: (Config(4, 1024, 4, 2), Config(16, 128, 4, 4), Config(16, 64, 4, 4), Config(32, 64, 4, 3)),
    32: (Config(16, 128, 4, 4), Config(16, 64, 4, 3), Config(32, 64, 4, 4), Config(64, 64, 4, 3)),
    256: (Config(64, 128, 4, 3), Config(128, 64, 8, 4), Config(64, 128, 4, 4, 2), Config(64, 128, 4, 4, 4)),
}


def candidates(num_tokens: int, codes: torch.dtype | None) -> tuple[Config, ...]:
    """The parameters to try for so many tokens."""
    if codes is None:
        return CANDIDATES[num_tokens == 1]
    return next(tried for most, tried in CANDIDATES_QUANTISED.items() if num_tokens <= most)


def padded(num_tokens: int) -> int:
    """Rows of the tile that so many tokens take; 1 for the kernel of one token."""
    return 1 if num_tokens == 1 else max(16, 1 << (num_tokens - 1).bit_length())


def key(num_tokens: int, n: int, k: int, swiglu: bool, codes: torch.dtype | None = None) -> str:
    kind = "" if codes is None else f" {codes}".replace("torch.", "")
    return f"{padded(num_tokens)}x{n}x{k}{'s' if swiglu else ''}{kind}"


def parsed(name: str) -> tuple[int, int, int, bool, torch.dtype | None]:
    """What ``key`` was given: tokens (padded), n, k, swiglu and codes."""
    shape, _, codes = name.partition(" ")
    tokens, n, k = (int(x) for x in shape.rstrip("s").split("x"))
    return tokens, n, k, shape.endswith("s"), getattr(torch, codes) if codes else None


def config_for(num_tokens: int, n: int, k: int, swiglu: bool, device: torch.device,
               codes: torch.dtype | None = None) -> Config | None:
    """The measured parameters for a weight (n, k); None if the definition was faster; by a rule if nothing was measured."""
    known = _known(device)
    found = known.get(key(num_tokens, n, k, swiglu, codes), ())
    if found is None:
        return None
    return Config(*found) if found else by_rule(num_tokens, n, k, swiglu, codes)


def by_rule(num_tokens: int, n: int, k: int, swiglu: bool, codes: torch.dtype | None = None) -> Config:
    """Parameters that nobody measured."""
    if codes is not None:
        if num_tokens > 32:
            return Config(64, 128, 4, 4, 2 if n < 16384 else 1)
        if num_tokens == 1 and n <= 8192:
            return Config(4, 1024 if k % 1024 == 0 else 512, 4, 2)
        return Config(16 if n < 65536 else 64, 64, 4, 3)
    if num_tokens == 1:
        return Config(1 if n <= 8192 and not swiglu else 2, 1024 if k % 1024 == 0 else 512, 4, 2)
    return Config(32 if n < 16384 else 64, 128, 4, 4)


def user_file() -> Path:
    return cache_folder() / "small_linear.json"


@functools.cache
def _known(device: torch.device) -> dict[str, list[int] | None]:
    """What both files have for this kind of device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return {}
    name = device_name(device)
    return {**json.loads(TABLE.read_text()).get(name, {}), **_read_user().get(_device_key(device), {})}


def _device_key(device: torch.device) -> str:
    import triton

    return f"{device_name(device)}, triton {triton.__version__}"


def _read_user() -> dict[str, Any]:
    path = user_file()
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, and this version of quire reads {FORMAT}")
        for configs in content["devices"].values():
            for config in configs.values():
                if config is not None and (len(config) not in (4, 5) or not all(type(x) is int and x > 0 for x in config)):
                    raise ValueError(f"{config} are no launch parameters")
        return content["devices"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("the measurements in %s are ignored (%s: %s); delete the file to have them made anew", path,
                       type(error).__name__, error)
        return {}


def enabled() -> bool:
    """Engines measure shapes that nobody measured, unless QUIRE_TUNE=0."""
    return os.environ.get("QUIRE_TUNE", "1") != "0"


def missing(shapes: Iterable[LinearShape], device: torch.device) -> list[tuple[LinearShape, int]]:
    """(shape, tokens) that no file has measurements of, for this device."""
    found = {}
    for shape in sorted(set(shapes), key=str):
        for m in SIZES if shape.codes is None else SIZES_QUANTISED:
            s = shape if m in SIZES else shape._replace(norm=False, residual=False, swiglu=False)  # see fuse_small_linear
            found[_key(s, m)] = s, m
    known = _known(device) if found else {}  # with nothing to ask for, Triton need not be there
    return [pair for name, pair in found.items() if name not in known]


def _key(shape: LinearShape, num_tokens: int) -> str:
    return key(num_tokens, shape.n, shape.k, shape.swiglu, shape.codes)


def tune(shapes: Iterable[LinearShape], device: torch.device, *, timer: Callable[..., float] | None = None,
         progress: Callable[[list[Any]], Iterator[Any]] = iter) -> int:
    """Measure what is ``missing`` and keep it in the user's file; returns how many shapes and sizes that were.

    Args:
        timer: (function that makes the calls, number of calls) -> microseconds a call; default: from a CUDA graph.
        progress: wraps the list of work, for a progress bar.
    """
    todo = missing(shapes, device)
    if not todo:
        return 0
    logger.info("small_linear: measuring %d shapes and sizes, once on this device", len(todo))
    timer = timer or graph_time
    best: dict[str, Any] = {_key(s, m): fastest(s, m, device, timer) for s, m in progress(todo)}
    devices = _read_user()
    devices[_device_key(device)] = {**devices.get(_device_key(device), {}), **best}
    path = user_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"format": FORMAT, "devices": devices}, indent=1) + "\n")
        part.replace(path)
    except OSError as error:
        logger.warning("the measurements could not be kept in %s: %s", path, error)
        _known(device).update(best)  # for this process
    else:
        _known.cache_clear()
    return len(todo)


def launches(shapes: Iterable[LinearShape], device: torch.device) -> set[Launch]:
    """The kernels that ``tune`` will launch, found out on fake tensors."""
    from quire.attn_ops.ops import small_linear

    kernel: Any = small_linear.small_linear_cuda
    with FakeTensorMode(), recording() as noted:
        for shape, num_tokens in missing(shapes, device):
            (call,) = arguments(shape, num_tokens, device, 1)
            for config in candidates(num_tokens, shape.codes):
                kernel(*call, config=config)
    return noted


def copies_of(shape: LinearShape) -> int:
    """How many weights of that shape to go through in turn."""
    size = shape.n * shape.k * (shape.codes or torch.bfloat16).itemsize
    return max(2, min(MOST_COPIES, int(_COLD / size) + 1))


def fastest(shape: LinearShape, num_tokens: int, device: torch.device, timer: Callable[..., float]) -> Config | None:
    """The fastest parameters; None if the definition is faster than all."""
    from quire.attn_ops.ops import small_linear

    kernel: Any = small_linear.small_linear_cuda
    calls = arguments(shape, num_tokens, device, copies_of(shape))
    reference = small_linear.small_linear_eager(*calls[0]).double()
    times: dict[Config | None, float] = {None: timer(lambda: [small_linear.small_linear_eager(*a) for a in calls], len(calls))}
    for config in candidates(num_tokens, shape.codes):
        try:
            out = kernel(*calls[0], config=config).double()
            if not (out - reference).norm() <= 1e-2 * reference.norm():
                raise ArithmeticError("the result is off by more than 1 %")
            times[config] = timer(lambda config=config: [kernel(*a, config=config) for a in calls], len(calls))
        except Exception as error:  # too much shared memory for this GPU, say
            logger.debug("%s with %d tokens and %s: %s", shape, num_tokens, config, error)
    return min(times, key=times.__getitem__)


def arguments(shape: LinearShape, num_tokens: int, device: torch.device, copies: int) -> list[tuple[Any, ...]]:
    """Arguments of ``copies`` calls, each with a weight of its own."""
    made: dict[str, Any] = dict(device=device, dtype=shape.dtype)
    out_n = shape.n // 2 if shape.swiglu else shape.n
    x = torch.randn(num_tokens, shape.k, **made)
    norm_weight = torch.rand(shape.k, **made) + 0.5 if shape.norm else None
    residual = torch.randn(num_tokens, out_n, **made) if shape.residual else None
    rest = None, norm_weight, 1e-5, residual, shape.swiglu
    if shape.codes is None:
        return [(x, torch.randn(shape.n, shape.k, **made) * 0.02, *rest) for _ in range(copies)]
    scale = torch.full((shape.n,), 0.02 / 64, device=device)
    return [(x, (torch.randn(shape.n, shape.k, **made) * 32).clamp(-127, 127).to(shape.codes), *rest, scale)
            for _ in range(copies)]


def graph_time(run: Callable[[], Any], calls: int) -> float:
    """Microseconds a call, where ``run`` makes ``calls`` of them: the median of 5 replays of a CUDA graph."""
    stream = side_stream(torch.device("cuda", torch.cuda.current_device()))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times[2:])[2]


__all__ = ["CANDIDATES", "CANDIDATES_QUANTISED", "Config", "LinearShape", "MOST_COPIES", "SIZES", "SIZES_QUANTISED", "TABLE",
           "arguments", "by_rule", "candidates", "config_for", "copies_of", "enabled", "fastest", "graph_time", "key",
           "launches", "missing", "padded", "parsed", "tune", "user_file"]
