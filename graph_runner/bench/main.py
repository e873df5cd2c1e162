"""``quire bench``: its arguments, and one run. Imports nothing heavy: ``--help`` must be fast."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from quire.graph_runner.bench.shapes import NAMES, QUANTIZATIONS
from quire.graph_runner.config import check_options, parse_option

EPILOG = """\
examples:
  quire bench decode --model llama-8b --attention triton,flashinfer --out decode.json
  quire bench decode --model llama-8b --batch 1,32 --vs vllm --plots plots
  quire bench all --model tiny --device cpu --scale 64 --context 128 --batch 1,2      # a dry run
  quire bench host                                                                    # needs no GPU
  quire bench decode --model llama-8b --against decode.json --tolerance 5%            # exits 1 if a row got slower
  quire bench decode --model llama-8b --quantize int8wo --out int8.json
  quire bench attention --model llama-8b --save                      # the kernels alone; attention="auto" goes by it
  quire bench attention --heads 32/8x128,64/8x64 --page-size 32 --out kernels.json
  quire bench matrix --vs vllm --gpus 4 --deadline 540 --out matrix.json         # many models; --resume goes on with it
  quire bench matrix --models llama-8b --cells 'decode/*x1024,online' --against matrix.json
"""


def _list(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _ints(text: str) -> list[int]:
    try:
        found = [int(item) for item in _list(text)]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers such as 1,8,32")
    return found


def percent(text: str) -> float:
    """"5%" or "0.05" as 0.05."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a tolerance such as 5% or 0.05")
    return value


def engine_option(text: str) -> tuple[str, Any]:
    """An argument of --engine: "key=value", the value a Python literal or a bare word."""
    try:
        return parse_option(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


#: The default of each option that some workloads would ignore, and the workloads that it is for.
_FOR: dict[str, tuple[Any, tuple[str, ...]]] = {}
ENGINES = ("decode", "mixed256", "prefill", "start", "host", "all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``quire bench``."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EPILOG
    group: Any = parser

    def add(flag: str, *workloads: str, **options: Any) -> None:
        action = group.add_argument(flag, **options)
        if workloads:
            _FOR[action.dest] = (action.default, workloads)

    add("workload", nargs="?", default="decode", choices=(*ENGINES, "attention", "matrix"), help=(
        "what to measure (default: decode); host: the host's part of a step, without the model; attention: each backend's "
        "kernels alone; matrix: decode, prefill, mixed and online cells of many models; all: the others"))
    add("--model", *ENGINES, "attention", metavar="NAME|PATH", help=(
        f"a public model's shape, with random weights: {', '.join(NAMES)}; or the path of a saved model (default: llama-8b, on "
        "a CPU tiny)"))
    add("--layers", type=int, metavar="N", help="only the first N layers, for a dry run (default: $LAYERS, else all)")
    add("--dtype", help="of weights and KV cache (default: bfloat16, on a CPU float32)")
    add("--quantize", *ENGINES, metavar="NAME", help=(
        f"quantize the weights with torchao first: {', '.join(QUANTIZATIONS)} (wo: weights only, dq: activations too); "
        "--dtype is then that of the rest"))
    add("--kv-cache-dtype", *ENGINES, "matrix", default="auto", metavar="DTYPE",
        help="of quire's KV cache: auto (that of --dtype), int8, fp8, fp8_e5m2 (default: auto)")
    add("--device", help="cuda or cpu (default: cuda if there is a GPU)")
    add("--attention", type=_list, default=["auto"], metavar="LIST", help=(
        "quire's attention backends to measure, comma-separated (default: auto; for the workload attention: all usable ones)"))
    add("--batch", *ENGINES, "attention", type=_ints, metavar="LIST",
        help="batch sizes of decode, host and attention (default: 1,8,32,128, and 256 for host)")
    add("--context", *ENGINES, "attention", type=_ints, metavar="N", help=(
        "tokens per sequence in decode (default: 1024, or the model's limit); the workload attention takes a list (default: "
        "1024,8192, on a CPU 128,1024)"))
    add("--systems", *ENGINES, type=_list, default=["quire"], metavar="LIST", help=(
        "quire, hf-eager, hf-static, hf-cb (transformers' generate and continuous batching), vllm, vllm-transformers; "
        "comma-separated (default: quire)"))
    add("--vs", *ENGINES, "matrix", type=_list, default=[], metavar="LIST", help="more systems: --vs vllm")
    add("--engine", *ENGINES, "matrix", type=engine_option, action="append", default=[], metavar="KEY=VALUE",
        help="an option of quire.Engine, e.g. page_size=32; may be repeated")
    add("--repeats", *ENGINES, type=int, default=3, metavar="N", help="runs of which the median counts (default: 3)")
    add("--scale", type=int, default=1, metavar="N",
        help="divide request counts and lengths of mixed256 and prefill, for a dry run (default: 1)")
    add("--out", type=Path, metavar="FILE.json", help="write rows and environment there, after every row")
    add("--plots", *ENGINES, type=Path, metavar="DIR", help="draw the decode rows there, as PNG and SVG")
    add("--against", type=Path, metavar="FILE.json", help="compare with an earlier result; exit code 1 if a row got slower")
    add("--tolerance", type=percent, default=0.05, metavar="P", help="how much slower is allowed (default: 5%%)")
    group = parser.add_argument_group("for the workload attention only")
    add("--heads", "attention", type=_list, metavar="LIST",
        help="query heads/KV heads x head dim, such as 32/8x128; of MLA heads x latent + rotary numbers, such as "
             "128x512+64 (default: the attention sites of --model)")
    add("--page-size", "attention", type=int, default=16, metavar="N",
        help="tokens per page (default: 16; of an engine: --engine page_size=N)")
    add("--layout", "attention", default="NHD", choices=("NHD", "HND"), help="of the KV cache (default: NHD)")
    add("--save", "attention", action="store_true",
        help="keep the times in the user's cache, where attention=\"auto\" finds them")
    group = parser.add_argument_group("for the workload matrix only")
    add("--models", "matrix", type=_list, metavar="LIST", help="as for --model (default: twelve, on a CPU tiny)")
    add("--cells", "matrix", type=_list, metavar="LIST", help="patterns such as decode/8x*, prefill/*, mixed256, online")
    add("--resume", "matrix", type=Path, nargs="*", metavar="FILE.json",
        help="leave out the cells that --out, or one of these files, has a row of")
    add("--retry", "matrix", action="store_true", help="with --resume: measure cells again that have only an error")
    add("--deadline", "matrix", type=float, metavar="SECONDS",
        help="start nothing that may end later than this, counted from the start")
    add("--gpus", "matrix", type=int, metavar="N", help="GPUs to use at once, one model each (default: 1)")
    add("--vllm-path", "matrix", type=Path, metavar="DIR",
        help="folder with vLLM, put last on PYTHONPATH of its processes only")


def _session(args: argparse.Namespace, command: str) -> Any:
    """The session for the workload. Raises ValueError for arguments of other workloads, which would be ignored."""
    if ignored := [f"--{name.replace('_', '-')}" for name, (default, workloads) in _FOR.items()
                   if args.workload not in workloads and getattr(args, name) != default]:
        raise ValueError(f"{', '.join(ignored)}: not with the workload {args.workload}; see quire bench --help")
    if args.workload == "attention":
        from quire.graph_runner.bench.attention import AttentionSession

        return AttentionSession(args, command)
    if args.workload == "matrix":
        from quire.graph_runner.bench.matrix import Matrix

        return Matrix(args, command)
    from quire.graph_runner.bench.session import Session

    if args.context is not None and len(args.context) > 1:
        raise ValueError(f"the workload {args.workload} takes one --context, got {args.context}")
    return Session(args, command)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, print and write. Returns the exit code: 1 if ``--against`` found a slower row, else 0."""
    if args.against is not None and not args.against.is_file():
        raise FileNotFoundError(f"no result to compare with at {args.against}")
    before = json.loads(args.against.read_text()) if args.against is not None else None
    check_options(dict(args.engine))
    session = _session(args, "quire bench " + shlex.join(argv))
    try:
        session.run()
    except KeyboardInterrupt:
        print("interrupted; the rows so far are kept", file=sys.stderr)
        session.finish()
        return 130
    session.finish()
    if args.plots is not None:
        from quire.graph_runner.bench.plots import draw

        for path in draw(session.rows, args.plots):
            print(f"wrote {path}")
    if before is not None:
        from quire.graph_runner.bench.report import compare

        return compare(before, session.environment, session.rows, args.tolerance, session.console)
    return 0
