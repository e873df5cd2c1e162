"""One token's linear layers between two attentions, as one launch of programs that wait for each other, beside one launch each.

    python -m benchmarks.linear_chain --models llama-1b,qwen3-0.6b,llama-8b --json out.json

A decode step of one token is a chain of kernels of 2 to 15 microseconds, each of which reads a weight once: most of what a
small model's step takes beyond its bytes passes while one kernel ends and the next fills the memory's queues again. Here the
output projection, gate and up, down, and the next layer's q, k, v are phases of one kernel with a barrier between them (after
Hazy Research's megakernels, "Look Ma, No Bubbles!", 2025). A program loads its first tile of the next weight before it waits.
``us``: one chain, weights cold; ``apart_us``: the same kernel with a launch for each phase, which only loads early;
``launches_us``: the four ops as engines launch them, with PDL; ``floor_us``: bytes over the copy bandwidth. It is an
experiment: no engine runs this kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from benchmarks.small_linear import MODELS
from quire.attn_ops.kernels.host import num_sms
from quire.attn_ops.kernels.launch import launch
from quire.attn_ops.kernels.pdl import let_next_start, wait_for_previous
from quire.attn_ops.ops.small_linear import small_linear, small_linear_eager
from quire.attn_ops.tuning.small_linear import MOST_COPIES, graph_time
from quire.graph_runner.bench.record import Record, script, started

EPS = 1e-5
PHASES = 4
APART = tuple((phase, phase) for phase in range(PHASES))
_COLD = 240e6  # bytes of weights to go through in turn


@triton.jit
def _load(w, step, steps, program, programs, N, K, stride, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The tile of a program's step: its tiles of rows one after the other, each by columns."""
    per_tile = K // BLOCK_K
    rows = (program + step // per_tile * programs) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = step % per_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows < N) & (step < steps)
    return tl.load(w + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=inside[:, None], other=0.0,
                   eviction_policy="evict_first")


@triton.jit
def _steps(program, programs, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """How many steps a program has in a phase."""
    tiles = tl.cdiv(N, BLOCK_N)
    return tl.maximum(0, tl.cdiv(tiles - program, programs)) * (K // BLOCK_K)


@triton.jit
def _phase(tile, tile_up, x, w, norm, res, out, program, programs, N, K, stride, eps, BLOCK_N: tl.constexpr,
           BLOCK_K: tl.constexpr, GATED: tl.constexpr):
    """A layer's outputs of this program; its first tiles are loaded already. While a tile is multiplied, the next is on its
    way."""
    steps, per_tile = _steps(program, programs, N, K, BLOCK_N, BLOCK_K), K // BLOCK_K
    rms = 1.0
    if norm is not None:
        squares = tl.zeros((BLOCK_K,), tl.float32)
        for start in range(0, K, BLOCK_K):
            xs = tl.load(x + start + tl.arange(0, BLOCK_K)).to(tl.float32)
            squares += xs * xs
        rms = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    acc_up = tl.zeros((BLOCK_N,), tl.float32)
    for step in range(steps):
        after = _load(w, step + 1, steps, program, programs, N, K, stride, BLOCK_N, BLOCK_K)
        cols = step % per_tile * BLOCK_K + tl.arange(0, BLOCK_K)
        xs = tl.load(x + cols).to(tl.float32)
        if norm is not None:
            xs *= tl.load(norm + cols).to(tl.float32)
        acc += tl.sum(tile.to(tl.float32) * xs[None, :], 1)
        tile = after
        if GATED:
            after = _load(w + N.to(tl.int64) * stride, step + 1, steps, program, programs, N, K, stride, BLOCK_N, BLOCK_K)
            acc_up += tl.sum(tile_up.to(tl.float32) * xs[None, :], 1)
            tile_up = after
        if step % per_tile == per_tile - 1:
            rows = (program + step // per_tile * programs) * BLOCK_N + tl.arange(0, BLOCK_N)
            y = acc * rms
            if GATED:
                y = y * tl.sigmoid(y) * (acc_up * rms)
            if res is not None:
                y += tl.load(res + rows, mask=rows < N, other=0.0).to(tl.float32)
            tl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < N)
            acc = tl.zeros((BLOCK_N,), tl.float32)
            acc_up = tl.zeros((BLOCK_N,), tl.float32)


@triton.jit
def _meet(counter, programs):
    """All programs' stores are visible to all when it returns. The count goes on from launch to launch: nothing is reset. Every
    program must run at once, so a grid has no more of them than the GPU holds."""
    tl.debug_barrier()
    seen = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    until = (seen + programs - 1) // programs * programs
    while seen < until:
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def chain_kernel(x, res, w_o, norm_mlp, w_gate_up, w_down, norm_next, w_qkv, mid, active, res_out, out, counter, K, H, INNER, N,
                 eps, BLOCKS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr):
    """Phases FIRST to LAST. x (K,): attention's output; res (H,); out (N,): q, k, v. mid (H,), active (INNER,), res_out (H,):
    what phases leave. BLOCKS: rows and columns of each phase's tiles. counter: one int64 per barrier."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    o_n: tl.constexpr = BLOCKS[0][0]
    o_k: tl.constexpr = BLOCKS[0][1]
    g_n: tl.constexpr = BLOCKS[1][0]
    g_k: tl.constexpr = BLOCKS[1][1]
    d_n: tl.constexpr = BLOCKS[2][0]
    d_k: tl.constexpr = BLOCKS[2][1]
    q_n: tl.constexpr = BLOCKS[3][0]
    q_k: tl.constexpr = BLOCKS[3][1]
    if FIRST <= 0:
        tile = _load(w_o, 0, _steps(program, programs, H, K, o_n, o_k), program, programs, H, K, K, o_n, o_k)
        wait_for_previous(PDL)  # weights are no kernel's results: pdl.py, NOTE [Reads before the wait]
        _phase(tile, tile, x, w_o, None, res, mid, program, programs, H, K, K, eps, o_n, o_k, False)
    if FIRST <= 1 and LAST >= 1:
        steps = _steps(program, programs, INNER, H, g_n, g_k)
        gate = _load(w_gate_up, 0, steps, program, programs, INNER, H, H, g_n, g_k)
        up = _load(w_gate_up + INNER.to(tl.int64) * H, 0, steps, program, programs, INNER, H, H, g_n, g_k)
        if FIRST < 1:
            _meet(counter, programs)
        else:
            wait_for_previous(PDL)
        _phase(gate, up, mid, w_gate_up, norm_mlp, None, active, program, programs, INNER, H, H, eps, g_n, g_k, True)
    if FIRST <= 2 and LAST >= 2:
        down = _load(w_down, 0, _steps(program, programs, H, INNER, d_n, d_k), program, programs, H, INNER, INNER, d_n, d_k)
        if FIRST < 2:
            _meet(counter + 1, programs)
        else:
            wait_for_previous(PDL)
        _phase(down, down, active, w_down, None, mid, res_out, program, programs, H, INNER, INNER, eps, d_n, d_k, False)
    if LAST >= 3:
        qkv = _load(w_qkv, 0, _steps(program, programs, N, H, q_n, q_k), program, programs, N, H, H, q_n, q_k)
        if FIRST < 3:
            _meet(counter + 2, programs)
        else:
            wait_for_previous(PDL)
        _phase(qkv, qkv, res_out, w_qkv, norm_next, None, out, program, programs, N, H, H, eps, q_n, q_k, False)
    let_next_start(PDL)


class Chain(NamedTuple):
    """Weights of the four layers and of the norms before the second and the fourth, as of a Llama layer."""

    o: torch.Tensor
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm_next: torch.Tensor
    qkv: torch.Tensor

    @classmethod
    def random(cls, model: str, dtype: torch.dtype, device: torch.device) -> Chain:
        sizes = MODELS[model]
        hidden = sizes["qkv"][1]
        weights = {name: torch.randn(sizes[name], dtype=dtype, device=device) * sizes[name][1] ** -0.5
                   for name in ("o", "gate_up", "down", "qkv")}
        norms = [1 + 0.1 * torch.randn(hidden, dtype=dtype, device=device) for _ in range(2)]
        return cls(weights["o"], norms[0], weights["gate_up"], weights["down"], norms[1], weights["qkv"])


def by_ops(op: Any, x: torch.Tensor, res: torch.Tensor, c: Chain) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual stream, q, k and v), by an op for each layer."""
    mid = op(x, c.o, None, None, 0.0, res, False)
    active = op(mid, c.gate_up, None, c.norm_mlp, EPS, None, True)
    after = op(active, c.down, None, None, 0.0, mid, False)
    return after, op(after, c.qkv, None, c.norm_next, EPS, None, False)


def blocks(c: Chain, tile: int) -> tuple[tuple[int, int], ...]:
    """Rows and columns of each phase's tiles: ``tile`` numbers of one weight, of as many columns as divide its own, up to 4096.
    Gate and up have half of the rows each."""
    found = []
    for weight, operands in ((c.o, 1), (c.gate_up, 2), (c.down, 1), (c.qkv, 1)):
        k = weight.shape[1]
        cols = min(k & -k, 4096, tile // operands)
        found.append((max(1, tile // operands // cols), cols))
    return tuple(found)


def by_chain(x: torch.Tensor, res: torch.Tensor, c: Chain, counter: torch.Tensor, programs: int, tile: int, num_warps: int,
             pdl: bool, phases: Sequence[tuple[int, int]] = ((0, PHASES - 1),)) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by one launch; by several, each of ``phases`` (first, last), where programs run one after the other. All
    programs of a launch must run at once: they get no more registers than leave room for that."""
    h, inner, n = c.o.shape[0], c.gate_up.shape[0] // 2, c.qkv.shape[0]
    registers = {}
    if x.is_cuda:
        per_sm = -(-programs // num_sms(x.device))
        registers["maxnreg"] = min(255, 65536 // (per_sm * 32 * num_warps) // 8 * 8)
    mid, active, after, out = (x.new_empty(1, size) for size in (h, inner, h, n))
    for first, last in phases:
        launch(chain_kernel, (programs,), x, res, c.o, c.norm_mlp, c.gate_up, c.down, c.norm_next, c.qkv, mid, active, after,
               out, counter, x.shape[1], h, inner, n, EPS, BLOCKS=blocks(c, tile), FIRST=first, LAST=last, pdl=pdl,
               num_warps=num_warps, **registers)
    return after, out


def candidates(sms: int) -> Iterator[dict[str, int]]:
    for per_sm, tile, num_warps in itertools.product((1, 2), (4096, 8192, 16384, 32768), (8, 16)):
        if 16 <= tile // (32 * num_warps) <= 64:  # numbers of a tile per thread
            yield {"programs": per_sm * sms, "tile": tile, "num_warps": num_warps}


def off(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> float:
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, wanted, strict=True))


def rows_of(model: str, record: Record, bandwidth: float) -> Iterator[dict[str, Any]]:
    device = record.device
    size = sum(n * k for name, (n, k) in MODELS[model].items() if name != "head") * 2
    copies = max(2, min(MOST_COPIES, int(_COLD / size) + 1))
    chains = [Chain.random(model, torch.bfloat16, device) for _ in range(copies)]
    x, res = (torch.randn(1, k, dtype=torch.bfloat16, device=device) for k in reversed(chains[0].o.shape))
    counter = torch.zeros(PHASES - 1, dtype=torch.int64, device=device)
    exact = by_ops(small_linear_eager, x.double(), res.double(), Chain(*(w.double() for w in chains[0])))
    launches = graph_time(lambda: [by_ops(small_linear, x, res, c) for c in chains], len(chains))
    base = {"model": model, "floor_us": round(size / bandwidth * 1e6, 2), "launches_us": round(launches, 2),
            "launches_error": off(by_ops(small_linear, x, res, chains[0]), exact)}
    for options in candidates(num_sms(device)):
        row: dict[str, Any] = {**base, **options}
        try:
            for name, phases in (("", ((0, PHASES - 1),)), ("apart_", APART)):
                run = functools.partial(by_chain, x, res, counter=counter, pdl=True, phases=phases, **options)
                row[f"{name}error"] = off(run(c=chains[0]), exact)
                row[f"{name}us"] = round(graph_time(lambda run=run: [run(c=c) for c in chains], len(chains)), 2)
        except Exception as failure:
            row["failed"] = str(failure)[:200]
        yield row


def main() -> None:
    args = script(__doc__, None, models=("llama-1b,qwen3-0.6b,llama-8b", ", ".join(MODELS))).parse_args()
    record = started(args)
    bandwidth = record.copy_bandwidth()
    for model in args.models.split(","):
        for row in rows_of(model, record, bandwidth):
            record.keep(row)
            if record.left <= 0:
                return


if __name__ == "__main__":
    main()
