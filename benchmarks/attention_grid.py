r"""Attention kernels over a grid of shapes, beside FlashInfer's and vLLM's on the same tensors; resumable, on several GPUs.

    python benchmarks/attention_grid.py --out grid.json --deadline 540 --gpus 4 --systems triton,vllm-fa3
    python benchmarks/attention_grid.py --out grid.json --resume --systems fi-fa2,fi-fa3,fi-xqa --dims 64,128 --groups 1,4,8
    python benchmarks/attention_grid.py --out sweep.json --sweep --groups 1,4,8,16 --dims 64,96,128,256 --kv bfloat16,int8 \
        --batches 1,8,32,128 --contexts 1024,8192 --only decode       # launch parameters of triton's kernel, for its rules
    python benchmarks/attention_grid.py --out extend.json --only extend --prefills 1x8192+8192,64x1024 --groups 4 --dims 128 \
        --kv bfloat16 --systems triton:mode=never,triton:mode=always,contiguous,contiguous-copy,fi-fa3,fi-ragged
    python benchmarks/attention_grid.py --out prompts.json --only extend --groups 4,2 --dims 128 --kv bfloat16 \
        --prefills 1x1024,1x8192,1x512+16384,1x2048+14336,1x8192+24576 --systems fi-fa3,fi-ragged,fi-copied,fi-merge
    python benchmarks/attention_table.py grid.json other.json       # what is slow; --docs writes docs/attention.md

Cells: decode by query heads per key head (8 key heads), head dim, batch, context, cache format, and with windows at the longest
context; prefills of a group and head dim. A time is the median over replays of a CUDA graph, with keys from memory: calls go
through several caches unless one is eight times the L2 cache. Of quire's kernels it includes writing the step's keys. A row:
microseconds, bytes and their share of a copy's bandwidth, TFLOP/s, and how far the output is from triton's (``differs``).

Systems: quire's backends by name, e.g. triton; triton:block_n=64+warps=8 sets launch parameters, triton:chunk=512 the fewest
keys per part of a schedule (``schedule.py``), triton:mode=never and mode=always whether keys of long prompts are copied to
contiguous memory first (``extend_route.py``); contiguous: the kernel for such keys alone
(contiguous:block_m=128+block_n=64+warps=8+stages=3), contiguous-copy: the copy; fi-fa2, fi-fa2-cores (without tensor cores),
fi-fa3, fi-ragged (contiguous keys), fi-copied (with their copy), fi-merge (the step's own keys, and those before by pages),
fi-xqa: FlashInfer, which compiles for each shape at first use (20 to 80 s); vllm-fa3: FlashAttention 3 as vLLM builds it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.conformance.batches import planned, prepared
from quire.attn_ops.kernels.host import Caches, kernel_module
from quire.attn_ops.registry import all_backends
from quire.graph_runner.bench.attention_op import OpBatch, Point, extend_point, measure, op_batch, require, timed, work
from quire.graph_runner.bench.models import free_memory
from quire.graph_runner.bench.record import script, started
from quire.graph_runner.bench.row_processes import RowTask, kernel_line, measure_rows, or_failure
from quire.graph_runner.config import kv_dtype

GROUPS, DIMS, KV_HEADS = (1, 2, 4, 7, 8, 16), (64, 80, 96, 128, 192, 256), 8
BATCHES, CONTEXTS, WINDOWS = (1, 8, 32, 128, 256), (256, 1024, 8192, 32768), (512, 4096)
PREFILLS = ["1x4096", "8x1024", "1x16384", "1x32768"]
#: One parameter or two at a time, beside what the rules choose; chunk_min needs no new compilation.
SWEEP = {"decode": ("block_n=32", "block_n=64", "block_n=128", "warps=2", "warps=4", "warps=8", "stages=2", "stages=3",
                    "stages=4", "stages=5", "block_n=128+warps=8", "block_n=32+warps=2", "block_n=64+warps=4+stages=4",
                    "chunk_min=64", "chunk_min=128", "chunk_min=256", "chunk_min=512", "chunk_min=1024", "chunk_min=2048",
                    "wave=132", "wave=264", "wave=396", "wave=528", "masked=0", "masked=1"),
         "extend": ("block_m=64", "block_m=128", "block_n=32", "block_n=64", "block_n=128", "warps=4", "warps=8", "stages=2",
                    "stages=3", "stages=4", "block_m=128+block_n=64+warps=8", "block_m=64+block_n=64+warps=4")}
PAGE = 16


class Cell(NamedTuple):
    kind: str  # decode or extend
    group: int
    dim: int
    kv: str  # bfloat16, int8 or fp8
    batch: int
    context: int
    window: int | None
    before: int | None = None  # of the context's tokens, those computed in earlier steps of a prompt

    @property
    def new(self) -> int:
        """Scheduled tokens of each sequence."""
        return 1 if self.kind == "decode" else self.context - (self.before or 0)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the cache; None: of the queries."""
        return None if self.kv == "bfloat16" else kv_dtype(self.kv)

    @property
    def site(self) -> AttentionSite:
        return AttentionSite(0, KV_HEADS * self.group, KV_HEADS, self.dim, self.dim, torch.bfloat16, self.dim**-0.5,
                             window=self.window)

    @property
    def point(self) -> Point:
        return Point(self.kind, f"{self.batch}x{self.context}", (self.new,) * self.batch, (self.context,) * self.batch)


def grid(args: argparse.Namespace) -> list[Cell]:
    """The cells asked for; those that read the same keys together, small ones first."""
    found = []
    windows = [(c, w) for c in sorted({*args.contexts, *([max(CONTEXTS)] if args.windows else [])})
               for w in ((None,) if c in args.contexts else ()) + (tuple(args.windows) if c == max(CONTEXTS) else ())]
    for dim, kv in itertools.product(args.dims, args.kv):
        for context, pairs in itertools.groupby(windows, lambda pair: pair[0]):
            held = [w for _, w in pairs]
            found += [Cell("decode", g, dim, kv, b, context, w) for b in args.batches for w in held for g in args.groups]
        if args.prefill and (kv == "bfloat16" or args.prefills is not PREFILLS):
            for point in map(extend_point, args.prefills):
                length, new = point.seq_lens[0], point.query_lens[0]
                found += [Cell("extend", g, dim, kv, len(point.seq_lens), length, None, length - new or None)
                          for g in args.groups]
    return [cell for cell in found if not args.only or cell.kind == args.only]


# -- rivals: (cell, batch) -> a function of the number of the call, which returns the output ----------------------------------

Run = Callable[[int], torch.Tensor]


@functools.cache
def _workspace(name: str) -> torch.Tensor:
    return torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")


def _no_codes(cell: Cell, formats: tuple[str, ...] = ("bfloat16",)) -> None:
    if cell.kv not in formats:
        raise NotImplementedError(f"no {cell.kv} cache")


def _pages(cell: Cell, batch: OpBatch, tokens: int) -> tuple[torch.Tensor, ...]:
    """FlashInfer's page table of the first ``tokens`` of each sequence: indptr, indices, last page's length."""
    m = batch.metadata
    count = -(-tokens // PAGE)
    indptr = torch.arange(cell.batch + 1, dtype=torch.int32) * count
    last = torch.full((cell.batch,), tokens - (count - 1) * PAGE, dtype=torch.int32)
    return indptr, m.block_table_tensor[:, :count].reshape(-1).contiguous(), last


def copied(cell: Cell, batch: OpBatch) -> tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """What copies keys and values to contiguous memory, and where those of each sequence begin."""
    gather, m = kernel_module("kernels.gather_kv"), batch.metadata
    starts = gather.kv_starts(m.query_start_loc, m.seq_lens)
    return lambda i: gather.gather_kv(Caches(*batch.caches[i % len(batch.caches)]), m.block_table_tensor, starts,
                                      cell.batch * cell.context, cell.site.dtype), starts


def contiguous(cell: Cell, batch: OpBatch) -> Run:
    copy, starts = copied(cell, batch)
    (keys, values), out, kernel = copy(0), torch.empty_like(batch.q), kernel_module("backends.triton.extend_contiguous")

    def run(i: int) -> torch.Tensor:
        kernel.attend_to_contiguous(batch.q, keys, values, batch.metadata.query_start_loc, starts, None, out, cell.site.scale,
                                    None, False)
        return out

    return run


def contiguous_copy(cell: Cell, batch: OpBatch) -> Run:
    copy, _ = copied(cell, batch)
    return lambda i: copy(i)[0]


def flashinfer(cell: Cell, batch: OpBatch, kernels: str, tensor_cores: bool = True, keys: str = "pages") -> Run:
    """``keys``: of prefills, where they are: "pages", "contiguous", "copied" there in each call, or "own", those of the step,
    merged with the pages of those before."""
    import flashinfer as lib

    _no_codes(cell, ("bfloat16", "fp8") if kernels == "fa2" else ("bfloat16",))
    indptr, indices, last = _pages(cell, batch, cell.context)
    s, held, out = cell.site, batch.cache.k[0].dtype, torch.empty_like(batch.q)
    options = {"sm_scale": s.scale, "window_left": -1 if s.window is None else s.window - 1, "q_data_type": s.dtype,
               "kv_data_type": held}
    if cell.kind == "decode":
        wrapper = lib.BatchDecodeWithPagedKVCacheWrapper(
            _workspace("float"), "NHD", use_cuda_graph=True, use_tensor_cores=tensor_cores, backend=kernels,
            paged_kv_indptr_buffer=indptr.cuda(), paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last.cuda())
        wrapper.plan(indptr, indices, last, s.num_heads, s.num_kv_heads, s.head_dim, PAGE, **options)
        return lambda i: wrapper.run(batch.q, batch.caches[i % len(batch.caches)][:2], out=out)
    starts = torch.arange(cell.batch + 1, dtype=torch.int32) * cell.new
    sizes = s.num_heads, s.num_kv_heads, s.head_dim
    ragged, paged = (make(_workspace("float"), "NHD", backend=kernels) for make in (
        lib.BatchPrefillWithRaggedKVCacheWrapper, lib.BatchPrefillWithPagedKVCacheWrapper))
    if keys in ("contiguous", "copied"):
        copy, key_starts = copied(cell, batch)
        ragged.plan(starts.cuda(), key_starts, *sizes, causal=True, **options)
        once = copy(0)
        return lambda i: ragged.run(batch.q, *(once if keys == "contiguous" else copy(i)), out=out)
    if keys == "own":
        return _own(cell, batch, ragged, paged, starts, options, out)
    paged.plan(starts, indptr, indices, last, *sizes, PAGE, causal=True, **options)
    return lambda i: paged.run(batch.q, batch.caches[i % len(batch.caches)][:2], out=out)


def _own(cell: Cell, batch: OpBatch, ragged: Any, paged: Any, starts: torch.Tensor, options: dict[str, Any], out: torch.Tensor
         ) -> Run:
    """As the backend runs prompts by the step's own keys."""
    contiguous, s, k, v = importlib.import_module("quire.attn_ops.backends.flashinfer.contiguous"), cell.site, batch.k, batch.v
    if cell.window is not None or k is None or v is None:
        raise NotImplementedError("no window")
    sizes, prefix = (s.num_heads, s.num_kv_heads, s.head_dim), None
    ragged.plan(starts, starts, *sizes, causal=True, **options)
    if cell.before:
        prefix = paged
        prefix.plan(starts, *_pages(cell, batch, cell.before), *sizes, PAGE, causal=False, **options)
    plan = contiguous.OwnKeys([(ragged, 0, len(batch.q))], prefix)

    def run(i: int) -> torch.Tensor:
        plan.run(batch.q, batch.caches[i % len(batch.caches)][:2], own=(k, v), out=out)
        return out

    return run


def xqa(cell: Cell, batch: OpBatch) -> Run:
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    _no_codes(cell, ("bfloat16", "fp8"))
    if cell.kind != "decode":
        raise NotImplementedError("decode only")
    out, m, s = torch.empty_like(batch.q), batch.metadata, cell.site
    # It plans for as many keys as the table has room for.
    table, lens = m.block_table_tensor[:, : -(-cell.context // PAGE)].contiguous(), m.seq_lens.to(torch.int32)

    def run(i: int) -> torch.Tensor:
        return trtllm_batch_decode_with_kv_cache(
            batch.q, batch.caches[i % len(batch.caches)][:2], _workspace("xqa"), table, lens, cell.context, bmm1_scale=s.scale,
            bmm2_scale=1.0, window_left=-1 if s.window is None else s.window - 1, out=out, kv_layout="NHD", backend="xqa")

    return run


def vllm_fa3(cell: Cell, batch: OpBatch) -> Run:
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    _no_codes(cell, ("bfloat16", "fp8"))
    m, s, codes = batch.metadata, cell.site, cell.kv == "fp8"
    q = batch.q.to(torch.float8_e4m3fn) if codes else batch.q
    scales = {name: torch.ones(cell.batch, KV_HEADS, device="cuda") for name in ("q_descale", "k_descale", "v_descale")}
    window = (-1, -1) if s.window is None else (s.window - 1, 0)
    lens, starts = m.seq_lens.to(torch.int32), m.query_start_loc.to(torch.int32)
    plan = get_scheduler_metadata(
        cell.batch, m.max_query_len, cell.context, s.num_heads, s.num_kv_heads, s.head_dim, lens, qkv_dtype=q.dtype,
        cu_seqlens_q=starts, page_size=PAGE, causal=True, window_size=window)
    out = torch.empty_like(batch.q)

    def run(i: int) -> torch.Tensor:
        k, v, *_ = batch.caches[i % len(batch.caches)]
        return flash_attn_varlen_func(
            q, k, v, m.max_query_len, starts, cell.context, seqused_k=lens, block_table=m.block_table_tensor,
            softmax_scale=s.scale, causal=True, window_size=list(window), fa_version=3, scheduler_metadata=plan, out=out,
            **(scales if codes else {}))

    return run


RIVALS: dict[str, Callable[[Cell, OpBatch], Run]] = {
    "fi-fa2": lambda cell, batch: flashinfer(cell, batch, "fa2"),
    "fi-fa2-cores": lambda cell, batch: flashinfer(cell, batch, "fa2", tensor_cores=False),
    "fi-fa3": lambda cell, batch: flashinfer(cell, batch, "fa3"),
    "fi-ragged": lambda cell, batch: flashinfer(cell, batch, "fa3", keys="contiguous"),
    "fi-copied": lambda cell, batch: flashinfer(cell, batch, "fa3", keys="copied"),
    "fi-merge": lambda cell, batch: flashinfer(cell, batch, "fa3", keys="own"),
    "fi-xqa": xqa,
    "vllm-fa3": vllm_fa3,
}
PARTS: dict[str, Callable[[Cell, OpBatch], Run]] = {"contiguous": contiguous, "contiguous-copy": contiguous_copy}


# -- measuring ----------------------------------------------------------------------------------------------------------------


def overridden(cell: Cell, system: str) -> contextlib.AbstractContextManager[None]:
    """The launch parameters that the name of a system sets."""
    name, _, text = system.partition(":")
    params = {n: int(v) if v.isdigit() else v for n, v in (item.split("=") for item in text.split("+") if item)}
    if not params:
        return contextlib.nullcontext()
    from quire.attn_ops.backends.triton import decode, extend, extend_contiguous, extend_route, plan, schedule

    decodes: list[Any] = [decode.DecodeConfig, schedule.ScheduleConfig]
    kinds: list[Any] = [extend_contiguous.ContiguousConfig] if name in PARTS else decodes if cell.kind == "decode" else [
        extend.ExtendConfig, extend_route.RouteConfig]
    stack = contextlib.ExitStack()
    for param, value in params.items():
        stack.enter_context(plan.overridden(next(kind for kind in kinds if param in kind._fields), **{param: value}))
    return stack


#: of this process: a batch by the keys that it reads, and by the cell the batch and what the first of the systems put out
HELD: dict[Any, Any] = {}


def batch_of(cell: Cell, max_len: int, device: torch.device) -> OpBatch:
    """The batch, the same for all systems; cells of other groups and windows read the same keys."""
    if cell in HELD:
        return HELD[cell]
    keys = cell._replace(group=1, window=None)
    if (keys, "keys") not in HELD:
        HELD.clear()
        free_memory()
        HELD[keys, "keys"] = op_batch(keys.site, keys.point, page_size=PAGE, device=device, max_len=max_len,
                                      kv_dtype=keys.dtype)
    of_keys: OpBatch = HELD[keys, "keys"]
    for old in [key for key in HELD if key != (keys, "keys")]:
        del HELD[old]
    generator = torch.Generator(device).manual_seed(1)
    q = torch.randn(len(of_keys.q), cell.site.num_heads, cell.dim, generator=generator, device=device)
    HELD[cell] = made = replace(of_keys, site=cell.site, q=q.to(cell.site.dtype))
    return made


def compile_kernels(cells: Sequence[Cell], system: str, max_len: int, where: str) -> None:
    """Call the kernels of a backend of quire's once for each cell. Decodes read few keys: what is compiled follows from the
    room that the table has, not from lengths."""
    if (backend := all_backends().get(system.partition(":")[0])) is None:
        return
    short = (cell._replace(context=min(cell.context, min(CONTEXTS))) if cell.kind == "decode" else cell for cell in cells)
    for cell in dict.fromkeys(short):
        with contextlib.suppress(Exception), overridden(cell, system), torch.no_grad():  # its row says why
            batch = batch_of(cell, max_len, torch.device(where))
            require(backend, cell.site, batch.q.device, PAGE, batch.cache.dtype)
            with planned(backend, batch):
                backend.op(batch.q, batch.k, batch.v, *batch.caches[0], *batch.tables, None, prepared(backend, batch),
                           **batch.options)


def compile_first(processes: int, tasks: Sequence[RowTask], max_len: int, where: str) -> None:
    """Compile the kernels of all rows. Not beside timing: calling them once takes the GPU's time from what is timed."""
    by_kernel: dict[Any, dict[Cell, None]] = {}
    for task in tasks:
        cell, system = task.given[:2]
        by_kernel.setdefault((task.group, cell.group, system), {})[cell] = None
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        wait([pool.submit(compile_kernels, [*cells], key[2], max_len, where) for key, cells in by_kernel.items()])


@or_failure
def measured(task: tuple[Cell, str, int, str]) -> dict[str, Any]:
    """Time of a system, and the distance from the first system's output."""
    cell, system, max_len, where = task
    batch, name = batch_of(cell, max_len, torch.device(where)), system.partition(":")[0]
    device = batch.q.device
    with overridden(cell, system):
        if name in RIVALS or name in PARTS:
            run = (RIVALS | PARTS)[name](cell, batch)
            out = run(0).clone()
            us = timed(run, device, captured=name in RIVALS).us
        else:
            backend = all_backends()[name]
            require(backend, cell.site, device, PAGE, batch.cache.dtype)
            with planned(backend, batch):
                out = backend.op(batch.q, batch.k, batch.v, *batch.caches[0], *batch.tables, None, prepared(backend, batch),
                                 **batch.options).clone()
            us = measure(backend, batch, graph="mode=" not in system).us  # graphs hold no copies
    first = HELD.setdefault((cell, "out"), out)
    size, flops = work(cell.site, cell.point, cell.dtype)
    differs = float((out.float() - first.float()).norm() / first.float().norm()) if out.shape == first.shape else None
    return {"us": us, "differs": differs, "bytes": size, "tflop_per_s": flops / us / 1e6}


def line(row: dict[str, Any]) -> str:
    name = f"{row['kind']} {row['group']}x{row['dim']} {row['kv']} {row['batch']}x{row['context']}"
    name += f" window {row['window']}" if row["window"] else ""
    name += f" after {row['before']}" if row.get("before") else ""
    more = [f"{row['tflop_per_s']:7.1f} TFLOP/s"] if "us" in row else []
    more += [f"differs {row['differs']:.1e}"] if row.get("differs") is not None else []
    return kernel_line(f"{name:44s}{row['system']:14s}", row, *more)


def main() -> None:
    def names(text: str) -> list[str]:
        return text.split(",")

    def prefills(text: str) -> list[str]:
        try:
            return [extend_point(one).name for one in names(text)]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parser = script(__doc__, None, groups=[*GROUPS], dims=[*DIMS], batches=[*BATCHES], contexts=[*CONTEXTS],
                    windows=([*WINDOWS], "at the longest context"),
                    sweep=(False, "also with other launch parameters of triton's kernels"),
                    max_len=(32768, "tokens that a row of the block table has room for"), gpus=1,
                    compilers=(0, "processes that compile quire's kernels before the first is timed; 0: each at its row"),
                    limit=(300.0, "seconds for one row, compilation included"))
    add = parser.add_argument
    add("--systems", type=names, default=["triton"], help=f"quire's backends, {', '.join(RIVALS | PARTS)} (default: triton)")
    add("--kv", type=names, default=["bfloat16", "int8", "fp8"])
    add("--prefills", type=prefills, default=PREFILLS, metavar="LIST", help=(
        f"sequences x tokens, or sequences x tokens + tokens before (default: {','.join(PREFILLS)}, without quantized caches)"))
    add("--only", choices=("decode", "extend"))
    add("--no-prefill", dest="prefill", action="store_false")
    add("--out", dest="json", type=Path, help="another name of --json (default: attention_grid.json)")
    add("--resume", type=Path, nargs="*", help="go on with the rows of --out and of these files")
    parser.set_defaults(json=Path("attention_grid.json"))
    args = parser.parse_args()
    known = {*PARTS, *all_backends()}
    if unknown := [name for name in args.systems if name not in RIVALS and name.partition(":")[0] not in known]:
        parser.error(f"unknown systems {unknown}")
    for prefix, package in (("fi-", "flashinfer"), ("vllm-", "vllm")):
        if any(name.startswith(prefix) for name in args.systems) and importlib.util.find_spec(package) is None:
            parser.error(f"{package} is not installed")
    if args.json.is_file() and args.resume is None:
        parser.error(f"{args.json} exists: continue it with --resume, or give another --out")
    record = started(args)
    bandwidth, record.show = record.copy_bandwidth(), line
    free_memory()  # it is the other processes'
    record.write_every = 5.0
    record.environment |= {"page_size": PAGE, "kv_heads": KV_HEADS}
    record.go_on(args.resume or [], (*Cell._fields, "system"))
    tasks = [RowTask({**cell._asdict(), "system": name}, (cell, name, args.max_len, args.device),
                     (cell.dim, cell.kv))
             for cell in grid(args) for name in [*args.systems, *(f"triton:{p}" for p in SWEEP[cell.kind] if args.sweep)]]
    with contextlib.suppress(KeyboardInterrupt):
        if args.compilers:
            compile_first(args.compilers, [task for task in tasks if not record.has(task.row)], args.max_len, args.device)
        measure_rows(record, tasks, measured, limit=args.limit, gpus=args.gpus, complete=lambda row: (
            row | {"share": row["bytes"] / row["us"] * 1e6 / bandwidth} if "us" in row else row))


if __name__ == "__main__":
    main()
