"""Which kernels a step launches on an H100 or H200, without one: read from Inductor's code for CUDA, which never runs.

    python -m benchmarks.launches llama-8b                 # every distinct piece of the graph for small batches
    python -m benchmarks.launches llama-8b --lora 16       # with PEFT's LoRA on all linear layers; --lora-dtype float32
    python -m benchmarks.launches gemma2-9b --large --code # the graph for more tokens, with the code of each kernel

The model is traced, lowered and cut on the CPU, as in an engine. Then each piece's tensors are declared to be on a GPU, and
Inductor generates its program: each of its calls is a launch (or, for a custom op, what that op launches).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils._pytree import tree_map

from benchmarks.hopper import without_a_gpu
from quire.attn_ops.ops.small_linear import MAX_TOKENS
from quire.attn_ops.registry import get_backend
from quire.passes.capture.paged_model import PagedModel
from quire.passes.compile.ahead import CompileAhead
from quire.passes.compile.inductor import SETTINGS
from quire.passes.compile.regions import compile_by_regions
from quire.passes.compile.size_guards import watched
from quire.passes.fx import copy_graph
from quire.passes.options import QuireOptions
from quire.passes.rewrite.lower import LoweringTarget

CUDA = torch.device("cuda", 0)
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, warp_size=32, gcnArchName="", shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20, uuid="none")


class _Generated(Exception):
    """Raised instead of loading the program."""


@contextlib.contextmanager
def _as_if_on_an_h200() -> Iterator[None]:
    """Inside, Inductor finds an H200."""
    import torch._inductor.scheduler as scheduler
    from torch._dynamo.device_interface import CudaInterface

    def always(result: Any) -> Any:
        return lambda *args: result

    device = {"get_device_properties": H200, "current_device": 0}
    replaced: dict[Any, dict[str, Any]] = {
        torch.cuda: device | {
            "_exchange_device": 0, "_maybe_exchange_device": 0, "get_rng_state": torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": None, "synchronize": None, "_lazy_init": None, "is_available": True, "device_count": 1,
            "get_device_capability": (9, 0), "get_device_name": H200.name},
        scheduler: {"has_triton": True}, CudaInterface.Worker: device,
        CudaInterface: device | {"is_available": True, "get_compute_capability": 90}}
    with without_a_gpu(), contextlib.ExitStack() as stack:
        for where, results in replaced.items():
            made = {name: staticmethod(always(result)) for name, result in results.items()}
            stack.enter_context(mock.patch.multiple(where, create=True, **made))
        yield


def _on_gpu(x: Any) -> Any:
    if isinstance(x, torch.device):
        return CUDA
    if isinstance(x, torch.Tensor):
        with x.fake_mode:  # type: ignore[attr-defined]
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA)
    return x


def _move(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        node.args, node.kwargs = tree_map(_on_gpu, node.args), tree_map(_on_gpu, node.kwargs)
        node.meta = {k: tree_map(_on_gpu, v) if k == "val" else v for k, v in node.meta.items() if k != "tensor_meta"}
    gm.recompile()


def generate(gm: fx.GraphModule, inputs: Any) -> Any:
    """Inductor's compile_fx up to the program for an H200; also a Dynamo backend. The result runs on the CPU."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph: fx.GraphModule, fakes: Any, **options: Any) -> Any:
        _move(graph)
        with _as_if_on_an_h200():
            return compile_fx_inner(graph, [_on_gpu(x) for x in fakes], **options)

    try:
        compile_fx(copy_graph(gm), inputs, inner_compile=inner)
    except Exception as error:
        if not isinstance(error.__cause__, _Generated) and "_Generated" not in repr(error):
            raise
    return gm.forward


@contextlib.contextmanager
def collecting() -> Iterator[list[str]]:
    """Collects the programs generated inside."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    found: list[str] = []

    def keep(self: Any) -> Any:
        found.append(self.codegen()[0].value)
        raise _Generated

    patched = config.patch({**SETTINGS, "fx_graph_cache": False, "compile_threads": 1})
    with mock.patch.object(GraphLowering, "compile_to_module", keep), patched:
        yield found


def programs(model: torch.nn.Module, *, small: bool, own_experts: bool) -> list[str]:
    """Inductor's program for each distinct piece of the model's lowered graph: source code, in the order of the pieces.
    ``small``: the graph for few tokens, else the one for many. ``own_experts``: keep transformers' experts instead of
    quire's."""
    with _paged(model, own_experts) as paged:
        with mock.patch("quire.passes.fusions.routing.DEVICES", ("cpu",)):
            latent = any(site.latent is not None for site in paged.graph.sites)
            lowered, _ = paged.graph.lowered(LoweringTarget(get_backend("triton"), 16, latent=latent), "all", small)
        with collecting() as found, torch.no_grad():
            compile_by_regions(lowered, generate)
    return found


@contextlib.contextmanager
def _paged(model: torch.nn.Module, own_experts: bool = False) -> Iterator[PagedModel]:
    """The model, traced as for a GPU, whose sampling has a kernel."""
    with (mock.patch("quire.attn_ops.ops.sampling.uses_kernel", lambda logits: True),
          mock.patch("quire.passes.capture.hf_experts.wanted", lambda model: not own_experts)):
        paged = PagedModel(model, QuireOptions(compiler="eager", fusions="all"), draws=True)
    try:
        yield paged
    finally:
        paged.close()


def compile_ahead(model: torch.nn.Module, ahead: CompileAhead) -> None:
    """Pass both graphs of the model to ``ahead``, as if compiled on an H200."""
    with _paged(model) as paged:
        for small in (False, True):
            lowered, _ = paged.graph.lowered(LoweringTarget(get_backend("triton"), 16), "all", small)
            with watched(lowered.gm.graph, []) as assumed:
                pass

            def look(nodes: list[fx.Node], values: dict[fx.Node, Any], small: bool = small, roles: Any = assumed.roles) -> None:
                moved = {n: tree_map(_on_gpu, v) for n, v in values.items()}
                with _as_if_on_an_h200():
                    ahead.start(nodes, moved, roles, lambda shape: (shape.tokens <= MAX_TOKENS) == small)

            compile_by_regions(lowered, lambda gm, inputs: gm.forward, always=True, look=look)


def launches(program: str) -> list[str]:
    """A program's calls that run on the GPU, in order: custom ops and library functions by name, Inductor's kernels by kind
    (pointwise, reduction, ...)."""
    body = program[program.index("def call(") : program.index("runner = ")] if "runner = " in program else program
    kinds = {"poi": "pointwise", "per": "reduction", "red": "reduction", "tem": "template", "for": "foreach"}
    found = []
    for line in body.splitlines():
        kernel = re.search(r"\btriton_([a-z]{3})_(\w+)\.run\(", line)
        called = re.search(r"\b(?:extern_kernels|torch\.ops(?:\.\w+)+)\.(\w+)\(", line)
        op = re.search(r"= torch\.ops\.(\w+)\.(\w+)\.\w+\(", line)
        if kernel:
            found.append(kinds.get(kernel[1], kernel[1]))
        elif op:
            found.append(op[2])
        elif called and "assert" not in line:
            found.append(called[1])
    return found


def main() -> None:
    from quire.graph_runner.bench.models import ModelSpec, skeleton
    from quire.graph_runner.bench.shapes import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*SHAPES, "tiny"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--large", action="store_true", help="the graph for more than 32 tokens")
    parser.add_argument("--own-experts", action="store_true", help="with transformers' implementation of the experts")
    parser.add_argument("--lora", type=int, metavar="RANK", help="with an adapter of this rank (needs peft)")
    parser.add_argument("--lora-dtype", choices=["float32", "bfloat16"], default="bfloat16", help="PEFT's default is float32")
    parser.add_argument("--code", action="store_true", help="print the programs too")
    args = parser.parse_args()
    logging.disable()
    model = skeleton(ModelSpec(args.model, torch.bfloat16, torch.device("cpu"), args.layers)).to_empty(device="cpu").eval()
    if args.lora:
        from peft import LoraConfig, get_peft_model

        get_peft_model(model, LoraConfig(r=args.lora, target_modules="all-linear", lora_dropout=0.05),
                       autocast_adapter_dtype=args.lora_dtype == "float32")
    for i, program in enumerate(programs(model, small=not args.large, own_experts=args.own_experts)):
        calls = launches(program)
        print(f"piece {i}: {len(calls)} launches: {', '.join(calls)}\n         {dict(Counter(calls))}")
        if args.code:
            print(program)


if __name__ == "__main__":
    main()
