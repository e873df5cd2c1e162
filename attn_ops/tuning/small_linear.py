"""Measure ``small_linear``'s launch parameters: once per shape and device, kept on disk (``launch_config.py``).

When an engine starts on a GPU, ``tune`` measures the shapes that no file has, unless QUIRE_TUNE=0: a few sets of parameters,
and the definition, which is cuBLAS with the norm, SwiGLU and residual in kernels of their own. Where the definition is faster,
the op runs it. A norm, a residual or another dtype makes no other shape; quantized weights do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quire.attn_ops.kernels import host
from quire.attn_ops.kernels.launch import CAPTURE_MODE, Launch, recording, side_stream
from quire.attn_ops.ops import small_linear as op
from quire.attn_ops.ops.small_linear_wide import INT4_COLUMNS
from quire.attn_ops.tuning.launch_config import (
    INT4,
    LEAST_COLUMNS,
    MOST_SPLITS,
    STORE,
    Config,
    keep,
    key,
    known,
    wide_configs,
)

logger = logging.getLogger(__name__)
#: Microseconds that a second launch must save: a judgement of how much such times differ from run to run.
SECOND_LAUNCH = 1.0
SIZES = (1, 8, 32)  # tokens that are measured: one per padded size
SIZES_QUANTIZED = (*SIZES, 64, 128, 256)
_COLD = 240e6  # bytes of weights to go through in turn: several times the L2 cache of a large GPU
MOST_COPIES = 64  # of one weight: enough launches to time it, and a small model's weights are in the cache anyway


class LinearShape(NamedTuple):
    """Rows and columns of the weight, and what runs with it. ``codes``: the dtype of a quantized weight's codes."""

    n: int
    k: int
    norm: bool
    residual: bool
    swiglu: bool
    dtype: torch.dtype
    codes: torch.dtype | None = None


#: Candidates, by whether the step has one token.
CANDIDATES = {
    True: (Config(1, 1024, 4, 2), Config(1, 2048, 4, 1), Config(2, 1024, 4, 3)),
    False: (Config(32, 256, 4, 5), Config(64, 256, 4, 4), Config(128, 128, 8, 3)),
}
#: For one token too, where 1024 columns at a time leave a rest.
UNEVEN = (Config(4, 512, 4, 1), Config(1, 512, 4, 1))
#: For several tokens with SwiGLU, and EVENED where ``evenly`` has a share for it. With what ``split`` and ``norms_apart`` add,
#: the best of these is within 4 % of the best of a sweep for each layer of eight models (``h200_small_linear_apart.json``).
SWIGLU = (Config(64, 64, 4, 6), Config(64, 256, 4, 3), Config(128, 128, 8, 3))
EVENED = Config(128, 64, 8, 3)
#: Behind a norm in a launch of its own; with SwiGLU the last, and EVENED_APART as EVENED.
APART = (Config(64, 256, 4, 4), Config(64, 128, 4, 5))
EVENED_APART = Config(64, 128, 4, 4)
#: By rows of the tile, where programs share the columns.
SPLIT = (Config(32, 128, 4, 4), Config(64, 128, 4, 5))
#: The same for codes, by the largest number of tokens. Fewer than 16 rows: without the matrix units.
CANDIDATES_QUANTIZED = {
    1: (Config(4, 1024, 4, 2), Config(16, 128, 4, 4), Config(16, 64, 4, 4), Config(32, 64, 4, 3)),
    32: (Config(16, 128, 4, 4), Config(16, 64, 4, 3), Config(32, 64, 4, 4), Config(64, 64, 4, 3)),
    256: (Config(64, 128, 4, 3), Config(128, 64, 8, 4), Config(64, 128, 4, 4, 2), Config(64, 128, 4, 4, 4)),
}
WIDE = 3  # tiles of the wide kernels that are tried: the best by the model of their times


def evenly(config: Config, num_tokens: int, n: int, swiglu: bool, device: torch.device) -> Config | None:
    """``config`` for n outputs and several tokens, with no more weight rows per program than give each multiprocessor the same
    work; None if its tiles do already. The GPU runs as many programs at once as its shared memory and registers hold, and
    bandwidth is idle while a last few end: 296 tiles of Qwen2-7B's gate and up on 132 multiprocessors are two and a quarter
    rounds. Rows beyond ``Config.rows`` are not read, but their products are computed, which costs little."""
    at_once = max(1, min(host.shared_memory(device) // op.memory_of(config, num_tokens, swiglu), 8 // config.num_warps))
    places = host.num_sms(device) * at_once
    rounds = -(-n // (config.block_n * places))
    rows = -(-n // (4 * rounds * places)) * 4
    return config._replace(rows=rows) if 8 <= rows <= 0.9 * config.block_n else None


def split(n: int, k: int, device: torch.device) -> Iterator[Config]:
    """For several tokens and weights (n, k) of few rows: programs that share the columns of a tile, as many as there are
    multiprocessors. Lower tiles without would do, but each program reads all tokens, from the L2 cache: of 32 tokens and tiles
    of 32 rows as much as of the weight."""
    for config in SPLIT:
        tiles = -(-n // config.block_n)
        if (splits := min(MOST_SPLITS, k // LEAST_COLUMNS, host.num_sms(device) // tiles)) > 1:
            yield config._replace(splits=splits)


def norms_apart(num_tokens: int, shape: LinearShape, device: torch.device) -> Iterator[Config]:
    """For several tokens: a launch for the norm, and then the product of what it made. In one launch each program multiplies
    all tokens by the norm's weight, which of a small layer takes as long as its bytes: q, k and v of glm4-9b take 18.5 us at
    32 tokens, and 16.1 behind a norm of its own (``h200_small_linear_apart.json``). Then programs may share columns too. In
    float16 the norm is apart in any case."""
    if not shape.norm or shape.dtype == torch.float16:
        return
    found: list[Config | None] = [*APART, *split(shape.n, shape.k, device)]
    if shape.swiglu:
        found = [APART[-1], evenly(EVENED_APART, num_tokens, shape.n // 2, True, device)]
    yield from (config._replace(norm_apart=1) for config in found if config is not None)


def candidates(num_tokens: int, shape: LinearShape, device: torch.device) -> tuple[Config, ...]:
    if shape.codes is None and num_tokens == 1:
        return (*CANDIDATES[True], *(UNEVEN if shape.k > 1024 and shape.k % 1024 else ()))
    if shape.codes is None:
        even = evenly(EVENED, num_tokens, shape.n // 2, True, device) if shape.swiglu else None
        splits = () if shape.norm or shape.swiglu else split(shape.n, shape.k, device)  # the former need whole sums
        found = (*(SWIGLU if shape.swiglu else CANDIDATES[False]), *filter(None, [even]), *splits,
                 *norms_apart(num_tokens, shape, device))
        return tuple(c for c in found if op.memory_of(c, num_tokens, shape.swiglu) <= host.shared_memory(device))
    few = () if shape.codes == INT4 else next(tried for most, tried in CANDIDATES_QUANTIZED.items() if num_tokens <= most)
    return (*few, *wide_configs(num_tokens, shape.n, shape.k, shape.swiglu, shape.codes, device)[:WIDE])


def enabled() -> bool:
    """Whether engines measure shapes that no file has: unless QUIRE_TUNE=0."""
    return os.environ.get("QUIRE_TUNE", "1") != "0"


def missing(shapes: Iterable[LinearShape], device: torch.device) -> list[tuple[LinearShape, int]]:
    """(shape, tokens) of which no file has measurements for this device."""
    found = {}
    for shape in sorted(set(shapes), key=str):
        for m in SIZES if shape.codes is None else SIZES_QUANTIZED:
            s = shape if m in SIZES else shape._replace(norm=False, residual=False, swiglu=False)  # see fuse_small_linear
            found[_key(s, m)] = s, m
    have = known(device) if found else {}  # nothing to look up needs no Triton
    return [pair for name, pair in found.items() if name not in have]


def _key(shape: LinearShape, num_tokens: int) -> str:
    return key(num_tokens, shape.n, shape.k, shape.swiglu, shape.codes)


def tune(shapes: Iterable[LinearShape], device: torch.device, *, timer: Callable[..., float] | None = None,
         progress: Callable[[list[Any]], Iterator[Any]] = iter) -> int:
    """Measure what is ``missing`` and keep it in the user's file; returns the number of shapes and sizes measured. ``timer``:
    (function that makes the calls, number of calls) -> microseconds per call; default: from a CUDA graph. ``progress``: wraps
    the list of work, for a progress bar."""
    todo = missing(shapes, device)
    if not todo:
        return 0
    logger.info("small_linear: measuring %d shapes and sizes, once on this device", len(todo))
    timer = timer or graph_time
    best = {_key(s, m): fastest(s, m, device, timer) for s, m in progress(todo)}
    try:
        keep(device, best)
    except OSError as error:
        logger.warning("the measurements could not be kept in %s: %s", STORE.user_file, error)
    return len(todo)


def launches(shapes: Iterable[LinearShape], device: torch.device) -> set[Launch]:
    """The kernels that ``tune`` will launch, found by running it on fake tensors."""
    kernel: Any = op.small_linear_cuda
    with FakeTensorMode(), recording() as noted:
        for shape, num_tokens in missing(shapes, device):
            (call,) = arguments(shape, num_tokens, device, 1)
            for config in candidates(num_tokens, shape, device):
                kernel(*call, config=config)
    return noted


def copies_of(shape: LinearShape) -> int:
    """Weights of that shape to go through in turn."""
    size = shape.n * shape.k // 2 if shape.codes == INT4 else shape.n * shape.k * (shape.codes or torch.bfloat16).itemsize
    return max(2, min(MOST_COPIES, int(_COLD / size) + 1))


def fastest(shape: LinearShape, num_tokens: int, device: torch.device, timer: Callable[..., float]) -> Config | None:
    """The fastest parameters; None if the definition is faster than all."""
    kernel: Any = op.small_linear_cuda
    calls = arguments(shape, num_tokens, device, copies_of(shape))
    reference = op.small_linear_eager(*calls[0]).double()
    times: dict[Config | None, float] = {None: float("inf")}  # of int4, it is for many tokens
    if shape.codes != INT4:
        times[None] = timer(lambda: [op.small_linear_eager(*a) for a in calls], len(calls))
    for config in candidates(num_tokens, shape, device):
        try:
            out = kernel(*calls[0], config=config).double()
            if not (out - reference).norm() <= 1e-2 * reference.norm():
                raise ArithmeticError("the result is off by more than 1 %")
            times[config] = timer(lambda config=config: [kernel(*a, config=config) for a in calls], len(calls))
            times[config] += SECOND_LAUNCH * launches_more(config)
        except Exception as error:  # e.g. too much shared memory for this GPU
            logger.debug("%s with %d tokens and %s: %s", shape, num_tokens, config, error)
    return min(times, key=times.__getitem__)


def launches_more(config: Config) -> int:
    """Launches beside that of the product: of a norm, and of the sums of shared columns."""
    return config.norm_apart + (config.splits > 1)


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
    if shape.codes == INT4:
        size = (shape.n // 8, shape.k // INT4_COLUMNS, 32, 4)
        pairs = torch.full((shape.k // INT4_COLUMNS, shape.n, 2), 0.01, dtype=torch.bfloat16, device=device)
        words: dict[str, Any] = dict(low=-(2**31), high=2**31 - 1, size=size, dtype=torch.int32, device=device)
        return [(x, torch.randint(**words), *rest, pairs) for _ in range(copies)]
    scale = torch.full((shape.n,), 0.02 / 64, dtype=torch.float32, device=device)
    return [(x, (torch.randn(shape.n, shape.k, **made) * 32).clamp(-127, 127).to(shape.codes), *rest, scale)
            for _ in range(copies)]


def graph_time(run: Callable[[], Any], calls: int) -> float:
    """Microseconds per call, where ``run`` makes ``calls`` of them: the median of 5 replays of a CUDA graph."""
    with side_stream(torch.device("cuda", torch.cuda.current_device())) as stream:
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode=CAPTURE_MODE):
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
