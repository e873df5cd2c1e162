"""FlashInfer's compiled prefill kernels: whether those for some sites are there, and compiling them outside this process.

FlashInfer compiles a module per (dtype, head dim, windowed or not, capped or not) with nvcc at its first use, which takes a
minute or more, and keeps it in ~/.cache/flashinfer; the package flashinfer-jit-cache has many compiled. ``ready`` is asked
before a step needs one. As a program, ``python -m quire.attn_ops.backends.flashinfer.modules`` compiles those on its
standard input, {"seconds": at most, "modules": [[kernels, dtype, head dim, windowed, capped, head dim of values], ...]}.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import dtype_name

HOPPER = 9  # major compute capability with kernels of its own, "fa3"; others have "fa2"
logger = logging.getLogger(__name__)
GRACE = 5.0  # seconds that a process has to end by itself
_loaded: set[Module] = set()
_builds: dict[tuple[Module, ...], Build] = {}


class Module(NamedTuple):
    kernels: str
    dtype: str
    dim: int
    windowed: bool
    capped: bool
    dim_v: int = 0  # 0: dim

    @classmethod
    def of(cls, site: AttentionSite, device: torch.device) -> Module:
        hopper = torch.cuda.get_device_properties(device).major == HOPPER
        return cls("fa3" if hopper else "fa2", dtype_name(site.dtype), site.head_dim, site.window is not None,
                   bool(site.softcap), 0 if site.head_dim_v == site.head_dim else site.head_dim_v)

    def spec(self) -> Any:
        """FlashInfer's description of the module, which names its files. Compiles nothing."""
        from flashinfer.jit import gen_batch_prefill_module

        dtype = getattr(torch, self.dtype)
        return gen_batch_prefill_module(  # 0: no rotary embedding inside; False: no sums in fp16
            self.kernels, dtype, dtype, dtype, torch.int32, self.dim, self.dim_v or self.dim, 0, self.windowed, self.capped,
            False)


def up_to_date(spec: Any) -> bool:
    """Whether the module is compiled, and would not be again: FlashInfer runs ninja before it loads one, which compares the
    times of the sources, those of the package among them."""
    if spec.is_aot:
        return True
    if not spec.is_compiled:
        return False
    spec.write_ninja()
    found = subprocess.run(["ninja", "-n", "-C", str(spec.build_dir), "-f", str(spec.ninja_path)], capture_output=True,
                           text=True)
    return found.returncode == 0 and "no work to do" in found.stdout


def missing(modules: Iterable[Module]) -> list[Module]:
    return sorted(m for m in modules if not up_to_date(m.spec()))


def begin(sites: Sequence[AttentionSite], device: torch.device, seconds: float) -> None:
    """``PrefillPart.begin``."""
    modules = {Module.of(site, device) for site in sites} - _loaded
    with contextlib.suppress(Exception):  # ``ready`` reports it
        if seconds > 0 and (lacking := missing(modules)) and tuple(lacking) not in _builds:
            _builds[tuple(lacking)] = Build(lacking, seconds)


def ready(sites: Sequence[AttentionSite], device: torch.device, seconds: float) -> str | None:
    """``PrefillPart.ready``."""
    modules = {Module.of(site, device) for site in sites} - _loaded
    if not modules:
        return None
    try:
        lacking = missing(modules)
        if seconds > 0 and (lacking or any(set(of) & modules for of in _builds)):
            builds = [_builds.pop(of) for of in list(_builds) if set(of) & modules] or [Build(lacking, seconds)]
            failed = [why for build in builds if (why := build.finish())]
            lacking = missing(modules)
            if lacking and failed:
                return failed[0]
        if lacking and any(set(of) & modules and build.process.poll() is None for of, build in _builds.items()):
            return (f"FlashInfer's prefill kernels for {described(lacking)} are being compiled by another process, once per "
                    "machine; engines that start when it is done use them, and with QUIRE_KERNEL_BUILD_SECONDS=180 they wait")
        if lacking:
            return (f"FlashInfer's prefill kernels for {described(lacking)} are not compiled; an engine compiles them when it "
                    "starts if QUIRE_KERNEL_BUILD_SECONDS allows it, and flashinfer-jit-cache has some compiled")
        for module in modules:
            module.spec().build_and_load()
    except Exception as error:  # a part of the package that another version has not, ninja, a file that does not load
        return f"FlashInfer's prefill kernels for {described(modules)} do not load: {type(error).__name__}: {error}"
    _loaded.update(modules)
    return None


def described(modules: Iterable[Module]) -> str:
    return "; ".join(f"{m.dtype} x {m.dim}" + f"/{m.dim_v}" * bool(m.dim_v) + ", window" * m.windowed + ", softcap" * m.capped
                     for m in sorted(modules))


class Build:
    """Modules being compiled in another process, which gives up after ``seconds``."""

    def __init__(self, modules: Sequence[Module], seconds: float) -> None:
        self.what, self.seconds, self.began = described(modules), seconds, time.monotonic()
        logger.info("compiling FlashInfer's prefill kernels for %s, once per machine: at most %.0f s", self.what, seconds)
        self.output = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as task:
            task.write(json.dumps({"modules": modules, "seconds": seconds}).encode())
            task.seek(0)
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            self.process = subprocess.Popen([sys.executable, "-m", __spec__.name], env=env, stdin=task, stdout=self.output,
                                            stderr=self.output, start_new_session=True)
        self.stop = weakref.finalize(self, _kill, self.process)  # also when the interpreter exits

    def finish(self) -> str | None:
        """Wait for the process; None, or why not all is compiled."""
        try:
            self.process.wait(max(0.0, self.began + self.seconds + GRACE - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.stop()
        took = time.monotonic() - self.began
        with self.output:
            if self.process.returncode == 0:
                logger.info("compiled FlashInfer's prefill kernels for %s in %.0f s", self.what, took)
                return None
            self.output.seek(0)
            last = " ".join(self.output.read().decode(errors="replace").split()[-60:])
        if took >= self.seconds:
            return (f"compiling FlashInfer's prefill kernels for {self.what} took more than {self.seconds:.0f} s; "
                    "QUIRE_KERNEL_BUILD_SECONDS raises that, and finished parts are kept")
        return f"compiling FlashInfer's prefill kernels for {self.what} failed: {last}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its own. SIGTERM: ninja's are in other groups, and it ends them at that signal only."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if process.poll() is None:
                os.killpg(process.pid, sent)
                process.wait(GRACE)


def main() -> None:
    task = json.load(sys.stdin)
    os.nice(10)
    if os.getpgrp() != os.getpid():
        os.setsid()

    def give_up(*_: Any) -> None:  # ninja ends, and what it runs; so this process does
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(max(1, round(task["seconds"])))
    for module in task["modules"]:
        Module(*module).spec().build(need_lock=True)


if __name__ == "__main__":
    main()
