"""Compile noted launches (``attn_ops/kernels/launch.py``) into Triton's cache on disk, without a GPU.

``python -m quire.attn_ops.kernels.compile_worker`` reads a pickle from its standard input: (target, launches), the target as Triton describes
it: backend, arch, warp size. A kernel that cannot be compiled is left to the process that launches it, which will say why.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from quire.attn_ops.kernels.launch import Launch, settle


def use_target(target: Sequence[Any]) -> None:
    """Make Triton compile for this target, in the place of the GPU that it would look for."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    found = GPUTarget(*target)
    stand_in: Any = SimpleNamespace(get_current_target=lambda: found, get_current_device=lambda: 0,
                                    get_current_stream=lambda device: 0)
    driver.set_active(stand_in)


def kernel_of(launch: Launch) -> Any:
    """The ``@triton.jit`` function that is launched."""
    kernel = getattr(importlib.import_module(launch.module), launch.name)
    settle(kernel)
    return kernel


def compile_launch(launch: Launch) -> Any:
    """The compiled kernel of a noted launch."""
    return kernel_of(launch).warmup(*launch.arguments, grid=(1,), **dict(launch.options))


def triton_version() -> str:
    import triton

    return triton.__version__


def main() -> None:
    target, launches = pickle.load(sys.stdin.buffer)
    use_target(target)
    failed = 0
    for launch in launches:
        try:
            compile_launch(launch)
        except Exception as error:
            failed += 1
            print(f"{launch.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()


__all__ = ["compile_launch", "kernel_of", "triton_version", "use_target"]
