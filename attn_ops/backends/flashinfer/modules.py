"""FlashInfer's compiled prefill kernels: whether those for some sites are there, and compiling them outside this process.

FlashInfer compiles a module per (dtype, head dim, windowed or not, capped or not) with nvcc at its first use, which takes a
minute or more, and keeps it in ~/.cache/flashinfer; the package flashinfer-jit-cache has many compiled. ``ready`` is asked
before a step needs one. As a program, ``python -m quire.attn_ops.backends.flashinfer.modules`` compiles the modules that are on
its standard input, JSON: [[kernels, dtype, head dim, windowed, capped], ...].
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
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from quire.attn_ops.attention import AttentionSite
from quire.attn_ops.backend import dtype_name

HOPPER = 9  # major compute capability with kernels of its own, "fa3"; others have "fa2"
logger = logging.getLogger(__name__)
_loaded: set[Module] = set()


class Module(NamedTuple):
    """What FlashInfer compiles one module for."""

    kernels: str
    dtype: str
    dim: int
    windowed: bool
    capped: bool

    @classmethod
    def of(cls, site: AttentionSite, device: torch.device) -> Module:
        hopper = torch.cuda.get_device_properties(device).major == HOPPER
        return cls("fa3" if hopper else "fa2", dtype_name(site.dtype), site.head_dim, site.window is not None,
                   bool(site.softcap))

    def spec(self) -> Any:
        """FlashInfer's description of the module, which names its files. Compiles nothing."""
        from flashinfer.jit import gen_batch_prefill_module

        dtype = getattr(torch, self.dtype)
        return gen_batch_prefill_module(  # 0: no rotary embedding inside; False: no sums in fp16
            self.kernels, dtype, dtype, dtype, torch.int32, self.dim, self.dim, 0, self.windowed, self.capped, False)


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


def ready(sites: Sequence[AttentionSite], device: torch.device, seconds: float) -> str | None:
    """``PrefillPart.ready``."""
    modules = {Module.of(site, device) for site in sites} - _loaded
    if not modules:
        return None
    try:
        missing = sorted(m for m in modules if not up_to_date(m.spec()))
        if missing and seconds > 0:
            failed = compiled(missing, seconds)
            missing = sorted(m for m in modules if not up_to_date(m.spec()))
            if missing and failed:
                return failed
        if missing:
            return (f"FlashInfer's prefill kernels for {described(missing)} are not compiled; an engine compiles them when it "
                    "starts if QUIRE_KERNEL_BUILD_SECONDS allows it, and flashinfer-jit-cache has some compiled")
        for module in modules:
            module.spec().build_and_load()
    except Exception as error:  # a part of the package that another version has not, ninja, a file that does not load
        return f"FlashInfer's prefill kernels for {described(modules)} do not load: {type(error).__name__}: {error}"
    _loaded.update(modules)
    return None


def described(modules: Iterable[Module]) -> str:
    return ", ".join(f"{m.dtype} x {m.dim}" + ", window" * m.windowed + ", softcap" * m.capped for m in sorted(modules))


def compiled(modules: Sequence[Module], seconds: float) -> str | None:
    """Compile modules in another process, for at most ``seconds``; None, or why not all are."""
    logger.info("compiling FlashInfer's prefill kernels for %s, once per machine: at most %.0f s", described(modules), seconds)
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=output, stderr=output,
                                   start_new_session=True)
        try:
            process.communicate(json.dumps(list(modules)).encode(), timeout=seconds)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # nvcc's processes too
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return (f"compiling FlashInfer's prefill kernels for {described(modules)} took more than {seconds:.0f} s; "
                    "QUIRE_KERNEL_BUILD_SECONDS raises that, and finished parts are kept")
        if process.returncode:
            output.seek(0)
            last = output.read().decode(errors="replace").strip().splitlines()[-8:]
            return f"compiling FlashInfer's prefill kernels for {described(modules)} failed: {' '.join(last)}"
    logger.info("compiled FlashInfer's prefill kernels in %.0f s", time.monotonic() - began)
    return None


def main() -> None:
    for module in json.load(sys.stdin):
        Module(*module).spec().build(need_lock=True)


if __name__ == "__main__":
    main()


__all__ = ["HOPPER", "Module", "compiled", "described", "ready", "up_to_date"]
