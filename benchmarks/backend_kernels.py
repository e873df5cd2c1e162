"""Attention kernels of quire's backends side by side, in pieces that can be continued.

    python benchmarks/backend_kernels.py kernels --json kernels.json --deadline 150        # again: goes on where it ended
    python benchmarks/backend_kernels.py mla --systems triton --heads 16 --set block_n=64,stages=2     # triton's launches
    python benchmarks/backend_kernels.py kernels --systems triton --room 32768      # a block table as wide as an engine's
    python benchmarks/backend_kernels.py composite --device cpu --divide 64 --systems torch_native,two_batch:torch_native

kernels    decode of 1 to 128 sequences of 1k, 8k and 32k tokens, with a window of 4096 at 32k, and prefills; heads as in
           Llama 3 8B: 32 of queries, 8 of keys, 128 dimensions
mla        the op on the latent cache with both products with kv_b, 16 and 128 heads of DeepSeek's sizes
expanded   attention to MLA's expanded keys, which long prompts take (``attn_ops/mla_prefill.py``): a prompt's own, or ("after")
           those of a prefix alone
composite  hybrid, two_batch and cascade beside what they are made of; cascade also with prefixes that all sequences share.
           ``overlap``: the share of kernel time during which another kernel ran, from a profile
sparse     approximate decoding at 32k beside dense: double_sparsity with 16 label channels (random ones: the time does not
           depend on which) and with all, dual_chunk with the sizes of Qwen2.5-1M

A row has ``us``, the median of a call: replays of a CUDA graph where the backend allows one, else between events; calls go
through several caches, so that keys come from memory. ``floor_us`` is the least time for the bytes at the bandwidth of a copy
and for the operations at the rate of a large matrix product, both measured here; ``share`` is floor_us / us. For approximate
and shared-prefix rows the floor is that of dense attention, which reads each key of each sequence.

Each backend runs in a process of its own, and compiles its kernels in others while the first one is measured. --json is written
after each row. Rows that are in it, or in the files of --resume, are left out. A row that takes longer than --limit, or whose
process ends, is an error, and the next one follows. --deadline ends all, with exit code 3. `backend_kernels.py table --resume
FILES` prints them as Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.attn_ops.attention import AttentionSite, Latent
from quire.attn_ops.backend import AttentionBackend
from quire.attn_ops.conformance.batches import planned, prepared
from quire.attn_ops.conformance.lanes import Ended, Worker
from quire.attn_ops.kernels.host import kernel_module
from quire.attn_ops.registry import get_backend
from quire.graph_runner.bench.attention_op import OpBatch, Point, measure, measure_latent, op_batch, require, timed, work
from quire.graph_runner.bench.models import free_memory
from quire.graph_runner.bench.record import dtype_of, script, started
from quire.graph_runner.bench.report import markdown_table
from quire.graph_runner.bench.roofline import matmul_rate
from quire.graph_runner.bench.row_processes import RowTask, kernel_line, measure_rows, or_failure

HEADS, KV_HEADS, DIM = 32, 8, 128
NOPE, DIM_V, LATENT = 128, 128, Latent(512, 64)
COMPILE = 150.0  # seconds at most for kernels that are compiled ahead
SYSTEMS = {
    "kernels": "triton,trtllm_mha,flashinfer,flex_attention",
    "mla": "triton,flashinfer_mla",
    "expanded": "triton,flashinfer",
    "composite": "triton,flashinfer,hybrid:flashinfer+triton,two_batch:triton,cascade:triton@1",
    "sparse": "triton,double_sparsity:2048:0:16,double_sparsity:2048:0:all,dual_chunk:8192:1024",
}


@dataclass(frozen=True)
class Shape(Point):
    """``shared``: tokens at the start of all sequences."""

    window: int | None = None
    shared: int = 0
    heads: int = HEADS


def decode(batch: int, context: int, window: int | None = None, shared: int = 0) -> Shape:
    name = f"decode {batch}x{context}" + (f" window {window}" if window else "") + (f" shared {shared}" if shared else "")
    return Shape("decode", name, (1,) * batch, (context,) * batch, window=window, shared=shared)


def prefill(batch: int, tokens: int, before: int = 0) -> Shape:
    return Shape("extend", f"prefill {batch}x{tokens}" + (f" after {before}" if before else ""), (tokens,) * batch,
                 (tokens + before,) * batch)


def shapes(piece: str, divide: int, heads: list[int]) -> list[Shape]:
    """The batches of a piece; ``divide`` shortens them, for a dry run."""
    k = 1024 // divide
    if piece == "kernels":
        return [*(decode(b, c * k) for c in (1, 8, 32) for b in (1, 8, 32, 128)),
                *(decode(b, 32 * k, window=4 * k) for b in (1, 8, 32, 128)),
                prefill(1, 4 * k), prefill(8, k), prefill(1, 32 * k)]
    if piece == "mla":
        some = [*(decode(b, c * k) for c in (1, 8, 32) for b in (1, 8, 32, 64, 128)), prefill(1, 4 * k), prefill(8, k),
                prefill(1, 8 * k), prefill(1, 8 * k, 8 * k), prefill(1, 2 * k, 30 * k)]
        return [replace(shape, name=f"{shape.name} H={h}", heads=h) for h in heads for shape in some]
    if piece == "expanded":
        some = [prefill(1, k), prefill(8, k), *(prefill(1, n * k) for n in (4, 8, 16)), prefill(1, 2 * k, 8 * k),
                prefill(1, 8 * k, 8 * k)]
        return [replace(shape, name=f"{shape.name} H={h}", heads=h) for h in heads for shape in some]
    if piece == "composite":
        mixed = Shape("extend", f"mixed 63x1,{k // 2}", (*(1,) * 63, k // 2), (2 * k,) * 64)
        return [decode(32, 8 * k), decode(128, k), prefill(8, k), prefill(1, 4 * k), mixed,
                *(decode(b, p + k // 4, shared=p) for p in (k // 2, 2 * k, 8 * k) for b in (8, 32, 128))]
    return [decode(b, 32 * k) for b in (1, 8)]


def attention(shape: Shape, system: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time and floor of the paged op."""
    backend = get_backend(_with_channels(system, args))
    site = AttentionSite(0, HEADS, KV_HEADS, DIM, DIM, args.dtype, DIM**-0.5, window=shape.window)
    require(backend, site, args.device, args.page_size)
    batch = op_batch(site, shape, page_size=args.page_size, device=args.device, max_len=args.room)
    if pages := shape.shared // args.page_size:
        batch.metadata.block_table_tensor[:, :pages] = batch.metadata.block_table_tensor[0, :pages]
    size, flops = work(site, shape)
    found = {"bytes": size, "flops": flops}
    if backend.unrotated:
        return found | {"us": _unrotated(backend, batch)}
    states: dict[str, Any] = {}
    if backend.page_bytes is not None:  # labels of the copies of the cache too, which are made once per cache
        with planned(backend, batch, states=states):
            (state,) = states.values()
            state.layers.update({k.data_ptr(): state.of(k) for k, *_ in batch.caches})
    timing = measure(backend, batch, states=states)
    found |= {"us": timing.us, "how": timing.how}
    if system.startswith("two_batch:") and args.device.type == "cuda":
        try:
            found["overlap"] = _overlap(backend, batch)
        except Exception as error:  # the time stands without the profile
            found["overlap_error"] = f"{type(error).__name__}: {error}"[:200]
    return found


def _with_channels(system: str, args: argparse.Namespace) -> str:
    """``double_sparsity:N:M:C`` with a file of C random channels per key head."""
    if not system.startswith("double_sparsity:") or system.count(":") != 3 or system.endswith(":all"):
        return system
    path = Path(tempfile.gettempdir()) / "quire_channels.json"
    path.write_text(json.dumps({"channels": {"0": [torch.randperm(DIM).tolist() for _ in range(KV_HEADS)]}}))
    return f"{system}:{path}"


def _unrotated(backend: AttentionBackend, batch: OpBatch) -> float:
    """Of a backend that rotates q itself. Tokens at all positions that it keeps the rotation of go through it first."""
    states: dict[str, Any] = {}
    device, m = batch.q.device, batch.metadata
    cos, sin = (torch.rand(DIM, device=device).to(batch.q.dtype).repeat(len(batch.q), 1) for _ in range(2))  # all stand alike
    lens, tables = m.seq_lens_cpu.clone(), batch.tables
    rotary = (batch.q, batch.k, batch.v, cos, sin, None, None, 1e-6)

    def call(i: int) -> None:
        backend.rope_op(*rotary, *batch.caches[i % len(batch.caches)], *tables, batch.sinks, [], **batch.options)

    def at(length: int) -> OpBatch:
        shown = replace(m, seq_lens_cpu=lens.clamp(max=length), seq_lens=m.seq_lens.clamp(max=length), max_seq_len=length)
        return replace(batch, metadata=shown)

    longest, (chunk, local) = int(lens.max()), map(int, backend.name.split(":")[1:3])
    with torch.no_grad():
        for length in range(chunk + 1, longest, chunk - local):
            with planned(backend, at(length), states=states):
                for i in range(len(batch.caches)):
                    call(i)
        with planned(backend, at(longest), states=states):
            return timed(call, device).us


def _overlap(backend: AttentionBackend, batch: OpBatch) -> float | None:
    """The share of kernel time during which another kernel ran."""
    from torch.profiler import ProfilerActivity, profile

    captured = batch.metadata.max_query_len == 1  # then the host launches both halves at once
    with planned(backend, batch, graph_key="overlap" if captured else None, capturing=captured):
        given = prepared(backend, batch)

        def run() -> None:
            for caches in batch.caches[:4] * 2:
                backend.op(batch.q, batch.k, batch.v, *caches, *batch.tables, batch.sinks, given, **batch.options)

        run()
        torch.cuda.synchronize()
        replay = run
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            replay = graph.replay
        replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            replay()
            torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiled.events()
                   if e.device_type == torch.autograd.DeviceType.CUDA)
    total, union, end = sum(b - a for a, b in spans), 0.0, float("-inf")
    for begin, stop in spans:
        union += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return 1 - union / total if total else None


def absorbed_flops(shape: Shape) -> int:
    """Of a decode on the latent cache: scores and sums by latent vectors, and each query's and result's product with kv_b."""
    keys, tokens = sum(shape.seq_lens), sum(shape.query_lens)
    return 2 * shape.heads * (keys * (2 * LATENT.rank + LATENT.rope) + tokens * LATENT.rank * (NOPE + DIM_V))


def latent(shape: Shape, system: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time and floor of the MLA op: decodes by the latent vectors, kv_b, queries and outputs."""
    backend, device, heads, dim = get_backend(system), args.device, shape.heads, NOPE + LATENT.rope
    site = AttentionSite(layer=0, num_heads=heads, num_kv_heads=heads, head_dim=dim, head_dim_v=DIM_V, dtype=args.dtype,
                         scale=dim**-0.5, latent=LATENT)
    require(backend, site, args.device, args.page_size)
    decodes = shape.kind == "decode"
    timing = measure_latent(backend, site, replace(shape, graph=decodes), page_size=args.page_size, device=device,
                            max_len=args.room)
    size, flops = work(site, shape)
    return {"us": timing.us, "how": timing.how, "bytes": size, "flops": absorbed_flops(shape) if decodes else flops}


def expanded(shape: Shape, system: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time and operations of attention to expanded keys, the keys of all heads put together where the kernel needs that."""
    heads, made, rope = shape.heads, {"dtype": args.dtype, "device": args.device}, LATENT.rope
    query_lens = np.array(shape.query_lens)
    before = np.array(shape.seq_lens) - query_lens
    causal, key_lens = not before.any(), before if before.any() else query_lens
    site = AttentionSite(layer=0, num_heads=heads, num_kv_heads=heads, head_dim=NOPE + rope, head_dim_v=DIM_V, dtype=args.dtype,
                         scale=(NOPE + rope)**-0.5, latent=LATENT)
    part = get_backend(system).prefill
    if system == "triton":
        attend = kernel_module("backends.triton.extend_contiguous").attend_to_expanded
    elif part is not None and part.expanded is not None and part.expanded.takes(site, args.device):
        attend = part.expanded.make(args.device).begin()(query_lens, key_lens, heads, NOPE + rope, DIM_V, dtype=args.dtype,
                                                         scale=site.scale, causal=causal)
    else:
        raise ValueError(f"{system} has no kernel for expanded keys of these heads here")
    q, kv, k_rope = (torch.randn(*size, **made) for size in (
        (query_lens.sum(), heads, NOPE + rope), (key_lens.sum(), heads * (NOPE + DIM_V)), (key_lens.sum(), rope)))
    starts = [torch.tensor([0, *lens], device=args.device).cumsum(0).int() for lens in (query_lens, key_lens)]
    timing = timed(lambda i: attend(q, kv, k_rope, *starts, scale=site.scale, causal=causal), args.device)
    seen = query_lens * (query_lens + 1) // 2 if causal else query_lens * key_lens
    return {"us": timing.us, "how": timing.how, "flops": int(2 * seen.sum() * heads * (NOPE + rope + DIM_V)),
            "bytes": sum(x.numel() * x.element_size() for x in (q, kv, k_rope)) + 2 * heads * DIM_V * int(query_lens.sum())}


@dataclass(frozen=True)
class Task:
    """A row to measure, in any process."""

    shape: Shape
    system: str
    args: argparse.Namespace
    nice: bool = False


@or_failure
def measured(task: Task) -> dict[str, Any]:
    """The numbers of a row."""
    args = task.args
    if task.nice:
        os.nice(10)
    params = {name: int(number) for name, number in (each.split("=") for each in args.set.split(",") if each)}
    tuned: Any = contextlib.nullcontext()
    if params:
        from quire.attn_ops.backends.triton import plan

        decodes = task.shape.kind == "decode"
        tuned = plan.overridden(kernel_module("backends.triton.mla").MlaConfig if decodes else
                                kernel_module("backends.triton.extend_contiguous").ContiguousConfig, **params)
    with tuned:
        return {"mla": latent, "expanded": expanded}.get(args.piece, attention)(task.shape, task.system, args)


def compile_ahead(systems: list[str], args: argparse.Namespace, until: float) -> dict[str, list[threading.Thread]]:
    """Threads in which small batches run through each backend, one process for each: FlashInfer compiles a module for each kind
    of batch at its first use, for a minute, and keeps it on disk."""
    heads = args.heads[0] if args.piece in ("mla", "expanded") else HEADS
    small = [prefill(1, 64), *([decode(1, 64)] if args.piece != "expanded" else []),
             *([decode(1, 64, window=32)] if args.piece == "kernels" else [])]

    def run(task: Task) -> None:
        worker = Worker(measured)
        try:
            with contextlib.suppress(Ended):  # the rows report it, and one that hangs
                worker.call(task, until, COMPILE)
        finally:
            worker.end()

    threads = {system: [threading.Thread(target=run, args=(Task(replace(shape, heads=heads), system, args, nice=True),))
                        for shape in small] for system in systems}
    for thread in sum(threads.values(), []):
        thread.start()
    return threads


def line(row: dict[str, Any]) -> str:
    more = [f"overlap {row['overlap']:.0%}"] if row.get("overlap") is not None else []
    return kernel_line(f"{row['shape']:34} {row['system']:30}", row, *more)


def table(files: list[Path]) -> str:
    """Markdown of the rows in files: us and the share of the floor, by shape and system."""
    found: dict[str, dict[str, str]] = {}
    systems: dict[str, None] = {}
    for row in [row for file in files for row in json.loads(file.read_text())["rows"]]:
        system = " ".join(filter(None, (row["system"], row.get("set"))))
        systems[system] = None
        found.setdefault(row["shape"], {})[system] = (
            f"{row['us']:.1f} ({row['share']:.0%})" if "us" in row else row["error"].partition(":")[0])
    return "\n".join(markdown_table(
        ["us (share of the floor)", *(f"`{system}`" for system in systems)],
        [[shape, *(cells.get(system, "–") for system in systems)] for shape, cells in found.items()]))


def main() -> int:
    parser = script(__doc__, None, heads=([16, 128], "of mla and expanded"), set=("", "of these: launch parameters of triton's "
                    "as block_n=64,stages=2: MlaConfig's of decodes, ContiguousConfig's of prefills"),
                    room=(0, "tokens that the block table has room for, as an engine's has"),
                    divide=(1, "divide the lengths by this, for a dry run"),
                    retry=(False, "measure rows with an error again"), limit=(120.0, "seconds for one row"))
    parser.set_defaults(deadline=240.0)
    add = parser.add_argument
    add("piece", choices=[*SYSTEMS, "table"], help="table: the rows in the files of --resume as Markdown")
    add("--systems", help="backends, in the order in which they are measured (default: " + "; ".join(SYSTEMS.values()) + ")")
    add("--page-size", type=int, help="default: 16, of mla 64")
    add("--resume", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    if args.piece == "table":
        print(table(args.resume))
        return 0
    systems = (args.systems or SYSTEMS[args.piece]).split(",")
    args.page_size = args.page_size or (64 if args.piece == "mla" else 16)
    record = started(args)
    record.go_on(args.resume, ("piece", "shape", "system", "set"),
                 drop=lambda row: args.retry and "error" in row and row["system"] in systems)
    args = argparse.Namespace(**{**vars(args), "device": record.device, "dtype": dtype_of(args)})
    own = {"set": args.set} if args.set else {}
    tasks = [RowTask({"piece": args.piece, "shape": shape.name, "system": system, **own}, Task(shape, system, args), system)
             for system in systems for shape in shapes(args.piece, args.divide, args.heads)
             if not shape.shared or system.startswith((systems[0], "cascade:"))]
    slow = [name for name in dict.fromkeys(task.group for task in tasks if not record.has(task.row))
            if ":" not in name and name != systems[0]]
    ahead = compile_ahead(slow, args, time.time() + record.left) if args.device.type == "cuda" else {}
    bandwidth, rate = record.copy_bandwidth(), matmul_rate(args.device, args.dtype)
    record.environment |= {"matmul_tflop_per_s": rate / 1e12, "page_size": args.page_size}
    record.show = line
    free_memory()  # it is the other processes'

    def complete(row: dict[str, Any]) -> dict[str, Any]:
        if "us" not in row:
            return row
        floor = max(row["bytes"] / bandwidth, row["flops"] / rate) * 1e6
        return {**row, "floor_us": floor, "share": floor / row["us"]}

    def wait(system: str) -> None:
        for thread in ahead.pop(system, []):
            thread.join()

    if not measure_rows(record, tasks, measured, limit=args.limit, process_per_group=True, before=wait, complete=complete):
        print("the deadline is over; call again to go on", flush=True)
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
