"""Compile the Triton kernels of a lowered graph ahead, in other processes, while this one compiles the graph itself.

Every op of the graph that launches kernels (``implementations`` in ``attn_ops/kernels/launch.py``) is called with fake tensors
of the shape of each step that the engine will capture, and its launches are recorded. Worker processes
(``attn_ops/kernels/compile_worker.py``) compile them into Triton's cache on disk. What was not foreseen is compiled at its
first launch, as usual.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import logging
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import quire.attn_ops
from quire.attn_ops.kernels.compile_worker import triton_version
from quire.attn_ops.kernels.launch import Launch, implementations, recording
from quire.attn_ops.tuning import small_linear as tuning
from quire.attn_ops.tuning.small_linear import LinearShape
from quire.passes.compile.size_guards import SYMBOL
from quire.passes.start_times import timed

logger = logging.getLogger(__name__)
MAX_WORKERS, LAUNCHES_PER_WORKER = 8, 4  # a process takes as long to start as to compile that many
TIMEOUT = 120.0  # seconds; what takes longer is left to the first launch
_CACHE_PAGES = 4096  # any number: no kernel depends on it
Beside = Mapping[Any, Callable[..., Any]]
_NOTHING: Beside = MappingProxyType({})
_UNIT = re.compile(r",? ?\b(uuid|pci_\w+)=[^,)]*")  # which GPU of its kind
_NO_MATTER = frozenset({"QUIRE_TRACE_CACHE", "QUIRE_CACHE_DIR", "QUIRE_COMPILE_WORKERS"})  # what they change is here by itself


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step: tokens, sequences, and the pages that a row of the block table has room for."""

    tokens: int
    rows: int
    pages_of_a_row: int


class _CallImplementations(TorchDispatchMode):
    """Ops that launch kernels run their implementation for CUDA, whatever the device of their tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        implementation = implementations.get(func)
        if implementation is None:
            return func(*args, **(kwargs or {}))
        with self:  # it may call another such op
            return implementation(*args, **(kwargs or {}))


def launches_of(node: fx.Node, values: dict[fx.Node, Any], roles: dict[str, str], shapes: Iterable[StepShape],
                beside: Beside = _NOTHING) -> set[Launch]:
    """What ``node``, an op of ``implementations``, launches in steps of ``shapes``. ``values``: fakes of all nodes. ``roles``:
    the field of StepShape that a symbol stands for; all others count the pages of a cache. ``beside``: see CompileAhead."""
    found: set[Launch] = set()
    mode = FakeTensorMode()
    fakes: dict[Any, torch.Tensor] = {}  # most are the same in all steps: weights, caches
    arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
    for shape in shapes:

        def number(x: Any, shape: StepShape = shape) -> Any:
            if not isinstance(x, torch.SymInt):
                return x
            expr = x.node.expr
            return int(expr.subs({s: getattr(shape, roles[str(s)]) if str(s) in roles else _CACHE_PAGES
                                  for s in expr.free_symbols}))

        def concrete(x: Any, number: Callable[[Any], Any] = number) -> Any:
            if not isinstance(x, torch.Tensor):
                return number(x)
            sizes, strides, offset = tuple(map(number, x.shape)), tuple(map(number, x.stride())), number(x.storage_offset())
            key = (x.dtype, x.device, sizes, strides, offset)
            if key not in fakes:
                end = offset + 1 + (sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if all(sizes) else 0)
                with mode:
                    fakes[key] = torch.empty(end, dtype=x.dtype, device=x.device).as_strided(sizes, strides, offset)
            return fakes[key]

        args, kwargs = tree_map(concrete, arguments)
        with mode, _CallImplementations(), torch.no_grad(), recording() as noted:
            try:
                node.target(*args, **kwargs)  # type: ignore[operator]
                if node.target in beside:
                    beside[node.target](*args, **kwargs)
            except Exception as error:  # it does not work with fakes; what it launched before counts
                logger.info("kernels: those of %s in steps of %d tokens are left to their first launch: %s: %s", node.target,
                            shape.tokens, type(error).__name__, error)
        found |= noted
    return found


def as_inductor_will(device: torch.device) -> None:
    """Set the environment variables that Inductor sets when it first compiles a kernel, unless the user has: the folder of
    Triton's cache, and the assembler, whose version is part of each kernel's name there. Set half-way through a start, they
    would hide what was compiled before. The digests of the files of Triton (half a gigabyte) and PyTorch, parts of the keys of
    these caches, are computed in threads: reading and hashing does not hold this one up."""
    with _left_to_launches():  # private functions, which a later Inductor may not have
        from torch._inductor.runtime import cache_dir_utils, compile_tasks, triton_compat

        os.environ.setdefault("TRITON_CACHE_DIR", cache_dir_utils.triton_cache_dir(device.index or 0))
        compile_tasks._set_triton_ptxas_path()
        if triton_compat.HAS_TRITON:
            _begin(triton_compat.triton_key)
    with contextlib.suppress(ImportError), timed("compile"):
        from torch._inductor.codecache import torch_key  # not in the thread, where an import may hold up those of this one

        _begin(torch_key)


def _begin(digest: Callable[[], Any]) -> None:
    """Start a computation in a thread, whose result is kept for those who call it later. They see why it fails, if it does."""
    def compute() -> None:
        with contextlib.suppress(Exception):
            digest()

    threading.Thread(target=compute, daemon=True).start()


@contextlib.contextmanager
def _left_to_launches() -> Iterator[None]:
    """An exception inside ends the block, but not the start, which needs nothing of this."""
    try:
        yield
    except Exception as error:
        logger.info("kernels: compiled when they are launched, not ahead: %s: %s", type(error).__name__, error)


@dataclass(frozen=True)
class _Batch:
    """Launches that some processes compile. ``note``: the file in Triton's cache that will say that they are done, or None."""

    launches: list[Launch]
    processes: list[subprocess.Popen[bytes]]
    errors: list[Any]
    note: Any


class CompileAhead:
    """Compiles kernels for steps of ``shapes`` in the background, in at most ``workers`` processes for one graph. ``target``:
    Triton's description of the GPU (backend, arch, warp size). ``gpu``: its properties, on which some launches depend.
    ``beside``: by op, a function of its arguments that launches what a step does with them outside the graph."""

    def __init__(self, shapes: Sequence[StepShape], target: tuple[Any, ...], workers: int, gpu: str = "",
                 beside: Beside = _NOTHING) -> None:
        self.shapes, self.target, self.workers, self.gpu, self.beside = list(shapes), target, workers, gpu, beside
        self._batches: list[_Batch] = []
        self._waited = False  # what is compiled after that is launched at once
        weakref.finalize(self, _end, self._batches)  # also runs when the interpreter exits

    @classmethod
    def for_device(cls, shapes: Sequence[StepShape], device: torch.device,
                   beside: Beside = _NOTHING) -> CompileAhead | None:
        """None where it would gain nothing: without a GPU, with fewer than four cores, with QUIRE_COMPILE_WORKERS=0."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = int(os.environ.get("QUIRE_COMPILE_WORKERS") or (min(MAX_WORKERS, cores // 2) if cores >= 4 else 0))
        if device.type != "cuda" or importlib.util.find_spec("triton") is None:
            return None
        as_inductor_will(device)
        if workers < 1:
            return None
        with _left_to_launches():
            from triton.runtime import driver

            with torch.cuda.device(device):
                target = driver.active.get_current_target()
            return cls(shapes, (target.backend, target.arch, target.warp_size), workers,
                       str(torch.cuda.get_device_properties(device)), beside)
        return None

    def start(self, nodes: Iterable[fx.Node], values: dict[fx.Node, Any], roles: dict[str, str],
              fits: Callable[[StepShape], bool] = lambda shape: True) -> None:
        """Start to compile the kernels that ``nodes`` launch (``launches_of``) in steps that ``fits``, if they are not."""
        chosen = [node for node in nodes if node.target in implementations]
        if not chosen or self._waited:
            return
        with timed("kernels"), _left_to_launches():
            shapes = [s for s in self.shapes if fits(s)]
            made_of = self._made_of(chosen, values, roles, shapes)
            note = _note(made_of)
            if not note.has_file("done"):
                logger.info("kernels: compiled ahead, for Triton's cache has no note of a start with the same %s",
                            ", ".join(f"{name} {digest[:8]}" for name, digest in made_of.items()))
                found = set().union(*(launches_of(node, values, roles, shapes, self.beside) for node in chosen))
                self._batches.append(self._run(sorted(found, key=repr), note))

    def start_tuning(self, shapes: Iterable[LinearShape], device: torch.device) -> None:
        """Start to compile the kernels that measuring these linear layers launches, if they are not measured yet."""
        if self._waited or not tuning.enabled():
            return
        with timed("kernels"), _left_to_launches():
            found = tuning.launches(shapes, device)
            if found:
                self._batches.append(self._run(sorted(found, key=repr), None))

    def _made_of(self, nodes: list[fx.Node], values: dict[fx.Node, Any], roles: dict[str, str], shapes: list[StepShape]
                 ) -> dict[str, str]:
        """Digests of what these launches follow from, by name. What is missing here is compiled when it is launched."""

        def described(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return x.dtype, x.device.type, *(tuple(map(described, n)) for n in (x.shape, x.stride(), [x.storage_offset()]))
            if isinstance(x, torch.SymInt):  # by what it counts, which is all that a launch depends on (``launches_of``)
                return SYMBOL.sub(lambda match: roles.get(match[0], "pages"), str(x.node.expr))
            return x

        calls = [(node.target, tree_map(described, fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])))
                 for node in nodes]
        files = [quire.attn_ops.__file__, *(inspect.getfile(implementations[n.target]) for n in nodes)]
        folders = sorted({Path(file).parent for file in files})
        sources = [path.read_bytes() for folder in folders for path in sorted(folder.rglob("*.py"))]
        measured = [path.read_bytes() for path in tuning.STORE.files if path.exists()]
        settings = sorted((k, v) for k, v in os.environ.items() if k.startswith("QUIRE_") and k not in _NO_MATTER)
        facts = {"versions": (triton_version(), torch.__version__), "GPU": (self.target, _UNIT.sub("", self.gpu)),
                 "shapes": shapes, "calls": calls, "settings": settings, "sources": sources, "measurements": measured}
        return {name: hashlib.sha256(repr(fact).encode()).hexdigest() for name, fact in facts.items()}

    def _run(self, launches: list[Launch], note: Any) -> _Batch:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "CUDA_VISIBLE_DEVICES": ""}
        count = min(self.workers, -(-len(launches) // LAUNCHES_PER_WORKER))
        batch = _Batch(launches, [], [], note)
        try:
            for i in range(count):  # launches of one kernel take equally long, so they go to all processes in turn
                with tempfile.TemporaryFile() as work:
                    pickle.dump((self.target, launches[i::count]), work)
                    work.seek(0)
                    batch.errors.append(tempfile.TemporaryFile())
                    batch.processes.append(subprocess.Popen(
                        [sys.executable, "-m", "quire.attn_ops.kernels.compile_worker"], env=env, stdin=work,
                        stdout=subprocess.DEVNULL, stderr=batch.errors[-1]))
        except BaseException:
            _end([batch])
            raise
        return batch

    def wait(self) -> None:
        """Wait until everything that was started is compiled. Afterwards nothing more is started."""
        self._waited = True
        with timed("kernels"):
            until = time.monotonic() + TIMEOUT
            for batch in self._batches:
                for process in batch.processes:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.1, until - time.monotonic()))
                if all(process.returncode == 0 for process in batch.processes):
                    logger.info("kernels: %d compiled ahead by %d processes", len(batch.launches), len(batch.processes))
                    if batch.note is not None:
                        with contextlib.suppress(OSError):  # the next start works them out again
                            batch.note.put(b"", "done")
                else:
                    logger.info("kernels: not all were compiled ahead: %s", _text(batch.errors) or "timed out")
            self.close()

    def close(self) -> None:
        """Kill the processes."""
        self._waited = True
        _end(self._batches)


def _note(made_of: Mapping[str, str]) -> Any:
    """The place in Triton's cache for a note that the kernels of such launches are compiled; it goes when the kernels go."""
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(hashlib.sha256(repr(made_of).encode()).hexdigest())


def _end(batches: list[_Batch]) -> None:
    for batch in batches:
        for process in batch.processes:
            process.kill()
            process.wait()
        for errors in batch.errors:
            errors.close()
    batches.clear()


def _text(errors: list[Any]) -> str:
    found = []
    for file in errors:
        file.seek(0)
        found.append(file.read().decode(errors="replace").strip())
    return "; ".join(filter(None, found))[-500:]
